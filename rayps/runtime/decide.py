"""What a run does next. Pure: no clock, no input or output.

`decide` maps the facts of one poll to a decision: continue, finish, stop, fail, or how to recover from a death (replace
the lost member, mend, or restart everyone from the snapshot). The order of its rules matters: a stop request first,
then errors that no retry can mend, then deaths, then lost connections, then the end.

`next_state` maps a state of the run, and what the effect of that state has found, to the state that follows. The driver
carries out the effects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from rayps.core.errors import LinkError, PeerTimeout, RaypsError, TrainingError
from rayps.core.families import Rebuild, Recovery, ReplaceOne, RestartAll
from rayps.core.job import Status
from rayps.recovery.backup_assignment import Mending

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
    recovery: Recovery = field(default_factory=RestartAll)  # what a death brings about now, see `recovery_now`
    stop: bool = False
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
    if isinstance(facts.recovery, ReplaceOne):
        return _recover(facts, tuple(member for member, _ in facts.errors), reason)
    return _recover(facts, tuple(sorted(set(blamed[:1]))), reason)


def _recover(facts: RunFacts, lost: tuple[str, ...], reason: str) -> Decision:
    failures = facts.failures + 1
    if failures > facts.max_failures:
        return Fail(
            None,
            f"{reason}\nthat was failure {failures}, and max_failures is {facts.max_failures}: raise it, "
            "or find out why the process dies (its log, memory, `rayps doctor`)",
        )
    if isinstance(facts.recovery, Rebuild):
        return Mend(lost, reason)
    return Replace(lost, reason) if isinstance(facts.recovery, ReplaceOne) else Restart(lost, reason)


def _member(peer: str) -> str:
    return peer.replace(":", "-")  # a ring calls its ranks worker:2


def _at(facts: RunFacts, member: str) -> str:
    return f" at round {facts.at[member]}" if member in facts.at else ""


def _short(text: str) -> str:
    first = text.strip().splitlines()[0] if text.strip() else "no reason given"
    return first if len(first) <= MOST_LETTERS else first[: MOST_LETTERS - 3] + "..."


# ---- states


class _Step:
    """What the states have in common."""

    __slots__ = ()
    terminal: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class StartWorkers(_Step):
    """Check the workload, reserve resources, start the workers, and find the first snapshot."""


@dataclass(frozen=True, slots=True)
class EnterPhase(_Step):
    """Enter the phase with this number, or skip it where a checkpoint lies behind its end."""

    phase: int


@dataclass(frozen=True, slots=True)
class BeginGeneration(_Step):
    """Give every member its orders. `mending`: workers start from states that peers retain, else from the snapshot."""

    phase: int
    mending: Mending | None = None


@dataclass(frozen=True, slots=True)
class Train(_Step):
    """Poll the members once and decide."""

    phase: int


@dataclass(frozen=True, slots=True)
class Recover(_Step):
    """End the generation after a failure. `evaluating`: it was lost in the evaluation at the phase's end."""

    phase: int
    decision: Restart | Mend
    evaluating: bool = False


@dataclass(frozen=True, slots=True)
class ReplaceMembers(_Step):
    """Start new processes for lost members while the others keep training."""

    phase: int
    decision: Replace


@dataclass(frozen=True, slots=True)
class Evaluate(_Step):
    """Evaluate the state at the end of a phase on all workers."""

    phase: int


@dataclass(frozen=True, slots=True)
class RequestCheckpoint(_Step):
    """After a stop request: ask all members for one more snapshot."""

    phase: int


@dataclass(frozen=True, slots=True)
class AwaitCheckpoint(_Step):
    """Poll until the requested snapshot is saved, a member fails, or the deadline passes."""

    phase: int


@dataclass(frozen=True, slots=True)
class RunEnded(_Step):
    """The run is over: SUCCEEDED, STOPPED or FAILED."""

    terminal: ClassVar[bool] = True
    status: Status
    reason: str = ""
    error: Exception | None = None


State = (
    StartWorkers
    | EnterPhase
    | BeginGeneration
    | Train
    | Recover
    | ReplaceMembers
    | Evaluate
    | RequestCheckpoint
    | AwaitCheckpoint
    | RunEnded
)


@dataclass(frozen=True, slots=True)
class Findings:
    """What the effect of a state has found. A state reads only the fields that are named for it."""

    stopped: bool = False  # StartWorkers: the user asked to stop before the workers were there
    phases: int = 1  # EnterPhase: number of phases of the run
    work: bool = True  # EnterPhase: rounds or an evaluation of this phase are left
    decision: Decision | None = None  # Train; Evaluate: None = the metrics are there
    complete: bool = False  # Train: the newest snapshot is the last one of the phase
    mending: Mending | None = None  # Recover: the round from which workers continue without the snapshot
    saving: bool = False  # RequestCheckpoint, AwaitCheckpoint: the last snapshot is still to come


def next_state(state: State, found: Findings) -> State:
    """The state that follows `state`, whose effect has found `found`."""
    match state:
        case StartWorkers():
            return RunEnded(Status.STOPPED) if found.stopped else EnterPhase(0)
        case EnterPhase(phase) if phase >= found.phases:
            return RunEnded(Status.SUCCEEDED, "trained to the end")
        case EnterPhase(phase):
            return BeginGeneration(phase) if found.work else EnterPhase(phase + 1)
        case BeginGeneration(phase) | ReplaceMembers(phase):
            return Train(phase)
        case Train(phase):
            return _after_poll(phase, found)
        case Recover(phase):
            return BeginGeneration(phase, found.mending)
        case Evaluate(phase):
            return _after_evaluation(phase, found.decision)
        case RequestCheckpoint(phase) | AwaitCheckpoint(phase):
            return AwaitCheckpoint(phase) if found.saving else RunEnded(Status.STOPPED)
        case RunEnded():
            return state


def _after_poll(phase: int, found: Findings) -> State:
    match found.decision:
        case Stop():
            return RequestCheckpoint(phase)
        case Fail() as decision:
            return _failed(decision)
        case Restart() | Mend() as decision:
            return Recover(phase, decision)
        case Replace() as decision:
            return ReplaceMembers(phase, decision)
        case Finish() if found.complete:
            return Evaluate(phase)
    return Train(phase)


def _after_evaluation(phase: int, decision: Decision | None) -> State:
    """A worker lost in an evaluation means that everyone restarts from the snapshot and evaluates again."""
    match decision:
        case None:
            return EnterPhase(phase + 1)
        case Restart() | Mend() | Replace():
            return Recover(phase, Restart(decision.lost, decision.reason), evaluating=True)
        case Fail() as decision:
            return _failed(decision)
        case Stop():
            return RunEnded(Status.STOPPED)
    return Evaluate(phase)


def _failed(decision: Fail) -> RunEnded:
    if isinstance(decision.error, RaypsError):
        return RunEnded(Status.FAILED, str(decision.error), decision.error)
    return RunEnded(Status.FAILED, decision.reason, TrainingError(decision.reason))
