"""Decide which Ray a process uses. This module neither imports Ray nor opens a connection.

A process can be in one Ray at a time. `head` returns the address of the wanted Ray. `move` decides whether the process
leaves the Ray in which it is already.
"""

from __future__ import annotations

import enum
from collections.abc import Collection

from rayps_client.errors import ClusterError

AUTO = "auto"
RAY_ADDRESS = "RAY_ADDRESS"


class Owner(enum.StrEnum):
    """Which code brought this process into its Ray."""

    NONE = "none"  # the process is in no Ray
    STARTED = "started"  # rayps started a private Ray
    JOINED = "joined"  # rayps joined a Ray at an address
    FOREIGN = "foreign"  # the user called ray.init(), or the process is an actor or task of that Ray


class Move(enum.StrEnum):
    """What a process does to be in the wanted Ray."""

    START = "start"  # start a private Ray
    JOIN = "join"  # join the Ray at the address
    STAY = "stay"  # use the Ray in which the process is
    LEAVE_AND_JOIN = "leave and join"  # end the private Ray, or disconnect from the joined one, and join the address
    REFUSE_FOREIGN = "refuse: a foreign Ray"  # the process is in a Ray that rayps does not own
    REFUSE_BUSY = "refuse: a run uses it"  # the process would have to leave a Ray that a run uses


def move(owner: Owner, *, named: bool, same: bool, busy: bool) -> Move:
    """Return what the process does to be in the wanted Ray.

    `named`: an address is given. `same`: the address leads to the Ray in which the process is. `busy`: a run uses the
    Ray in which the process is.

    Without an address, the process stays in its Ray, whichever code joined it. With an address, it leaves a Ray that
    rayps started or joined, unless a run uses that Ray; it never leaves a Ray that rayps does not own.
    """
    if owner is Owner.NONE:
        return Move.JOIN if named else Move.START
    if same or not named:
        return Move.STAY
    if owner is Owner.FOREIGN:
        return Move.REFUSE_FOREIGN
    return Move.REFUSE_BUSY if busy else Move.LEAVE_AND_JOIN


def head(
    given: str,
    *,
    inside: str | None = None,
    environment: str | None = None,
    last: str | None = None,
    found: Collection[str] = (),
) -> str:
    """Return the `host:port` of the Ray that the address `given` refers to.

    "auto" refers to the first of these that exists:

    - `inside`, the Ray in which the process is;
    - `environment`, the value of RAY_ADDRESS;
    - `last`, the Ray that `ray start` started last on this machine, if it still runs;
    - the only element of `found`, the Ray heads that run on this machine.

    Raises:
        ClusterError: the address is not host:port, or "auto" finds no Ray or several.
    """
    if given != AUTO:
        return _checked(given, "address")
    if inside is not None:
        return inside
    if environment:
        return _checked(environment, RAY_ADDRESS)
    if last is not None and last in found:
        return last
    if len(found) == 1:
        return next(iter(found))
    seen = f"several Rays run on this machine ({', '.join(sorted(found))})" if found else "no Ray runs on this machine"
    raise ClusterError(
        f"address is 'auto', and {seen}:\n"
        f"give the head's host:port as `ray start --head` printed it, or set {RAY_ADDRESS} to it",
        address=given,
    )


def _checked(given: str, name: str) -> str:
    host, _, port = given.rpartition(":")
    if "://" in given:
        reason = "only the head itself can be joined, neither through Ray Client nor through its dashboard"
    elif not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        reason = "that is not host:port"
    else:
        return given
    raise ClusterError(
        f"{name} is {given!r}: {reason}\n"
        "give the head's host:port as `ray start --head` printed it, such as 10.0.0.5:6379, or 'auto'",
        address=given,
    )


def foreign(address: str, current: str) -> ClusterError:
    """Return the error for an address when other code has brought this process into another Ray."""
    return ClusterError(
        f"address is {address!r}, but this process is in the Ray at {current}, which rayps did not start. A process "
        "can be in one Ray:\nleave address out to use that Ray, call ray.shutdown() first, or use another process",
        address=address,
        current=current,
    )


def busy(address: str, current: str) -> ClusterError:
    """Return the error for an address when another run uses the Ray that this process would have to leave."""
    return ClusterError(
        f"address is {address!r}, but a run of this process uses the Ray at {current}. A process can be in one Ray:\n"
        "wait until that run has ended, or start this one from another process",
        address=address,
        current=current,
    )


def token_refused(address: str, *, sent: bool) -> ClusterError:
    """Return the error for a cluster that requires a token. `sent`: whether this process sent a token."""
    which = "refused the token of this process" if sent else "requires a token, and this process sends none"
    return ClusterError(
        f"the Ray cluster at {address!r} {which}:\n"
        "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the cluster's token or RAY_AUTH_TOKEN_PATH to the file that "
        "holds it\n(for the Ray of a `rayps serve`: the file ray_token in its state directory, by default ~/.rayps)",
        address=address,
        reason="token",
    )


def too_slow(error: Exception) -> bool:
    """Return whether Ray failed to start because its processes took too long: another try may succeed."""
    words = str(error).lower()
    return any(sign in words for sign in ("timed out", "failed to start gcs", "may not have started"))


def slow_start(seconds: float, load: float, cpus: int, reason: str) -> ClusterError:
    """Return the error for a Ray that took too long to start, also at its second try.

    `load` is the average number of processes that wanted a processor in the last minute, `reason` what Ray said.
    """
    return ClusterError(
        f"Ray did not start in two tries ({seconds:.0f} s): {reason}\n"
        f"the load of this machine is {load:.1f} with {cpus} processors: try again when it is lower, or start a Ray "
        "once by `ray start --head` and use it by address='auto'",
        load=load,
        cpus=cpus,
    )
