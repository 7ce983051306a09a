"""Let ranks that know only a ring's name find each other, through a key-value map that all processes can read.

Rank 0 writes its address into the map. Every other rank connects to rank 0 and sends its own address. Rank 0 answers
with the addresses of all ranks. No tensors are sent over these connections.
"""

from __future__ import annotations

import contextlib
import secrets
import time

from rayps_client.errors import ConfigError, LinkError, PeerTimeout

from rayps.cluster.local import KeyValues, host_address, rendezvous
from rayps.comm.link import Link, Listener, Message, connect
from rayps.comm.link.socket_link import measure_time_left
from rayps.comm.ring.messages import format_ranks

_READ_SECONDS = 0.02  # seconds between two reads of the map
_TRY_SECONDS = 2.0  # seconds for one attempt to reach rank 0; the address in the map may be that of an earlier group
_ADDRESS, _TABLE, _MISSING = 0, 1, 2

FoundRanks = tuple[Listener, bytes, int, list[str]]  # this rank's listener, secret, generation, all addresses


def find_ranks(name: str, rank: int, size: int, timeout: float, host: str | None) -> FoundRanks:
    """Find the addresses of all ranks that join under `name`.

    Raises PeerTimeout if a rank does not join within `timeout` seconds, ConfigError if `rank` is not below `size`.
    """
    if not 0 <= rank < size:
        raise ConfigError(f"rank {rank} is not one of {size} ranks (0 to {size - 1})", rank=rank, size=size)
    values = rendezvous()
    host = host or host_address()
    deadline = time.monotonic() + timeout
    if rank == 0:
        return _collect(name, size, values, host, (timeout, deadline))
    return _join(name, rank, values, host, (timeout, deadline))


def _make_key(name: str) -> str:
    return f"rayps/comm/ring/{name}"


def _collect(name: str, size: int, values: KeyValues, host: str, until: tuple[float, float]) -> FoundRanks:
    timeout, deadline = until
    secret, generation = secrets.token_bytes(32), secrets.randbits(31)
    listener = Listener("rank 0", secret, generation, host)
    found: dict[int, tuple[str, Link]] = {}
    try:
        values.put(_make_key(name), f"{listener.address}\n{generation}\n{secret.hex()}".encode())
        while len(found) < size - 1:
            _accept_rank(listener, generation, found, deadline)
    except PeerTimeout:
        missing = [peer for peer in range(1, size) if peer not in found]
        error = _explain_missing(name, missing, timeout)
        for _, link in found.values():
            _send_and_close(link, Message(_MISSING, payload=bytearray(error.message.encode())))
        listener.close()
        raise error from None
    except BaseException:
        listener.close()
        raise
    finally:
        values.delete(_make_key(name))
    addresses = [listener.address] + [found[peer][0] for peer in range(1, size)]
    table = bytearray("\n".join(addresses).encode())
    for _, link in found.values():
        _send_and_close(link, Message(_TABLE, payload=table))
    return listener, secret, generation, addresses


def _accept_rank(listener: Listener, generation: int, found: dict[int, tuple[str, Link]], deadline: float) -> None:
    link = listener.accept(generation, measure_time_left(deadline), lambda peer: peer.startswith("join:"))
    try:
        message = link.recv(_TRY_SECONDS)
    except LinkError:
        link.close()  # the rank gave up before it sent its address, and will connect again
        return
    earlier = found.pop(message.a, None)
    if earlier is not None:
        earlier[1].close()
    found[message.a] = (bytes(message.payload).decode(), link)


def _send_and_close(link: Link, message: Message) -> None:
    with contextlib.suppress(LinkError):  # the rank has ended; `Ring.form` will raise an error that names it
        link.send(message, timeout=_TRY_SECONDS)
    link.close()


def _join(name: str, rank: int, values: KeyValues, host: str, until: tuple[float, float]) -> FoundRanks:
    timeout, deadline = until
    while measure_time_left(deadline):
        value = values.get(_make_key(name))
        if value is None:
            time.sleep(_READ_SECONDS)
            continue
        address, generation, secret = value.decode().split("\n")
        try:
            return _call(rank, (address, bytes.fromhex(secret), int(generation)), host, deadline)
        except _RanksMissing as error:
            raise PeerTimeout(str(error), peer="rank 0", seconds=timeout) from None
        except LinkError:
            time.sleep(_READ_SECONDS)  # the address may be that of an earlier group that has ended: read the map again
    raise _explain_missing(name, [0], timeout)


class _RanksMissing(Exception):
    """Rank 0 answered that some ranks did not join in time."""


def _call(rank: int, contact: tuple[str, bytes, int], host: str, deadline: float) -> FoundRanks:
    address, secret, generation = contact
    timeout = min(_TRY_SECONDS, measure_time_left(deadline))
    link = connect(address, name=f"join:{rank}", secret=secret, generation=generation, timeout=timeout)
    listener = Listener(f"rank {rank}", secret, generation, host)
    try:
        with link:
            link.send(Message(_ADDRESS, a=rank), listener.address.encode(), timeout=timeout)
            answer = link.recv(measure_time_left(deadline) + _TRY_SECONDS)
        text = bytes(answer.payload).decode()
        if answer.kind == _MISSING:
            raise _RanksMissing(text)
        return listener, secret, generation, text.split("\n")
    except BaseException:
        listener.close()
        raise


def _explain_missing(name: str, missing: list[int], timeout: float) -> PeerTimeout:
    return PeerTimeout(
        f"ring {name!r}: {format_ranks(missing)} did not join within {timeout:g} s (the knob is `timeout`)",
        peer=format_ranks(missing),
        seconds=timeout,
        missing=missing,
    )
