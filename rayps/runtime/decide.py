"""What to do next with a run: a pure function from facts to a decision.

The order matters: the user's wish first, then errors that no retry can mend, then deaths, then lost
connections, then the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rayps.core.errors import LinkError, PeerTimeout

MOST_LETTERS = 400  # of a reason, in an event
GRACE_SECONDS = 3.0  # after the first lost connection, for the death behind it to be seen


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the driver knows after a poll. Members are named `worker-<rank>` and `shard-<index>`."""

    size: int
    finished: frozenset[str] = frozenset()  # workers that reached the end
    errors: tuple[tuple[str, Exception], ...] = ()  # (member, error) of workers that failed
    dead: tuple[tuple[str, str], ...] = ()  # (member, reason) of members whose process is gone or silent
    broken_for: float = 0.0  # seconds since the first of the errors was seen
    failures: int = 0
    max_failures: int = 3
    lockstep: bool = True
    stop: bool = False
    mends: bool = False  # whether workers keep each other's states, so that nobody need go back to a snapshot
    at: Mapping[str, int] = field(default_factory=dict)  # the round in which a dead worker was last heard of


@dataclass(frozen=True, slots=True)
class Continue:
    """Nothing to do."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Every worker reached the end."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The user asked for it."""


@dataclass(frozen=True, slots=True)
class Restart:
    """A new generation of everyone from the last snapshot; `lost` are replaced by new processes."""

    lost: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Mend:
    """New processes for `lost`, and everyone goes on from the newest round whose state all have or can be given."""

    lost: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Replace:
    """New processes (or a new begin) for `lost`, while the others go on."""

    lost: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The run cannot go on."""

    error: Exception | None
    reason: str


Decision = Continue | Finish | Stop | Restart | Mend | Replace | Fail


def decide(facts: RunFacts) -> Decision:
    """What to do next."""
    if facts.stop:
        return Stop()
    for member, error in facts.errors:
        if not isinstance(error, LinkError):
            return Fail(error, f"{member}: {error}")
    if facts.dead:
        lost = tuple(member for member, _ in facts.dead)
        reason = "; ".join(f"{member} died{_at(facts, member)} ({_short(why)})" for member, why in facts.dead)
        return _recover(facts, lost, reason)
    if facts.errors and facts.broken_for >= GRACE_SECONDS:  # by then all who miss the same peer have said so
        return _reconnect(facts)
    if len(facts.finished) == facts.size:
        return Finish()
    return Continue()


def _reconnect(facts: RunFacts) -> Decision:
    """Connections were lost although every process answers: the peer that was silent for too long is to blame."""
    blamed = [_member(str(error.data.get("peer"))) for _, error in facts.errors if isinstance(error, PeerTimeout)]
    blamed = [name for name in blamed if name.startswith(("worker-", "shard-"))]
    reason = "; ".join(f"{member}: {_short(str(error))}" for member, error in facts.errors[:2])
    if facts.lockstep:
        return _recover(facts, tuple(sorted(set(blamed[:1]))), reason)
    return _recover(facts, tuple(member for member, _ in facts.errors), reason)


def _recover(facts: RunFacts, lost: tuple[str, ...], reason: str) -> Decision:
    failures = facts.failures + 1
    if failures > facts.max_failures:
        return Fail(
            None,
            f"{reason}\nthat was failure {failures}, and max_failures is {facts.max_failures}: raise it, "
            "or find out why the process dies (its log, memory, `rayps doctor`)",
        )
    if facts.mends:
        return Mend(lost, reason)
    return Restart(lost, reason) if facts.lockstep else Replace(lost, reason)


def _member(peer: str) -> str:
    return peer.replace(":", "-")  # a ring calls its ranks worker:2


def _at(facts: RunFacts, member: str) -> str:
    return f" at round {facts.at[member]}" if member in facts.at else ""


def _short(text: str) -> str:
    first = text.strip().splitlines()[0] if text.strip() else "no reason given"
    return first if len(first) <= MOST_LETTERS else first[: MOST_LETTERS - 3] + "..."
