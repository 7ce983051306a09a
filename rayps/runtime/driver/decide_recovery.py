"""Decide what a run does next. Pure: no clock, no input or output.

`decide` maps the facts of one poll to a decision: continue, finish, stop, fail, or how to recover from a failure
(replace the lost member, rebuild its state, or restart all from the snapshot). The order of its rules matters: a stop
request first, then errors that no retry can fix, then deaths, then lost connections, then the end.

A process may die at any moment: while it starts, before it has its plan, or while it trains. `death_of` finds the death
in an error that a start has raised, and `decide` counts it as any other. While not every member has its plan, no member
can be replaced alone, and all restart. Restarts in a row without a new round wait longer each time.

Each state of the run has an effect, which the driver carries out. `find_next_state` maps a state and the result of its
effect to the next state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from rayps_client.errors import ActorDied, LinkError, PeerTimeout, RaypsError, TrainingError

from rayps.core.job.continuation import Continuation
from rayps.core.job.job_status import Status
from rayps.core.strategy.strategy_families import Rebuild, Recovery, RegroupLiving, ReplaceOne, RestartAll

MOST_LETTERS = 400  # longest reason in an event, in characters
GRACE_SECONDS = 3.0  # seconds after the first lost connection in which the death that caused it is detected
PAUSE_SECONDS = 1.0  # seconds before the second restart in a row without a new round; doubled before each further one
LONGEST_PAUSE = 60.0  # seconds


@dataclass(slots=True)
class FailureCount:
    """The failures of a job: all so far, and those in a row since a new round was last reported."""

    failures: int = 0
    in_row: int = 0

    def add(self) -> None:
        """Count one more failure."""
        self.failures, self.in_row = self.failures + 1, self.in_row + 1

    def progressed(self) -> None:
        """Record that a new round was reported."""
        self.in_row = 0


@dataclass(frozen=True, slots=True)
class RecoveryFacts:
    """What decides how a run recovers from a death now."""

    declared: Recovery  # what the strategy declares
    # whether the parameters are in one space with sparse tables, which is too large for a snapshot: the dead worker or
    # server is then replaced
    holds_tables: bool = False
    rejoins: bool = False  # whether a replica can start again from the servers' parameters; otherwise all restart
    regroups: bool = False  # whether the living workers of an elastic job can form a new group
    server_died: bool = False  # whether a server of the job's own is dead
    servers_end: bool = False  # whether the servers were told to end the phase of an elastic job
    open_data: bool = False  # whether the data has no length


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the driver knows after a poll, or after a start that failed.

    Members are named `worker-<rank>` and `shard-<index>`; the manager of a server group has its actor's name.
    """

    size: int  # number of workers
    finished: frozenset[str] = frozenset()  # workers that reached the end
    errors: tuple[tuple[str, Exception], ...] = ()  # (member, error) of workers that failed
    dead: tuple[tuple[str, str], ...] = ()  # (member, reason) of members whose process has ended or does not answer
    error_age: float = 0.0  # seconds since the driver received the first of the errors
    failures: int = 0  # failures of the job so far
    max_failures: int = 3
    recovery: Recovery = field(default_factory=RestartAll)  # how the run recovers now, by `choose_recovery`
    stop: bool = False  # whether the user has requested a stop
    ends_early: bool = False  # whether a callback has ended the run, and the newest state is one to end with
    positions: Mapping[str, int] = field(default_factory=dict)  # from a worker's name to the last round it reported
    unanswered: RaypsError | None = None  # why servers did not send the wanted states in time
    # the change of the workers for which all of them have stopped; None if there is none
    change: Regroup | None = None
    in_row: int = 0  # failures in a row without a new round
    planned: bool = True  # whether every member has had its plan of this generation
    outputs: Mapping[str, str] = field(default_factory=dict)  # from a dead member's name to its last output, if known


@dataclass(frozen=True, slots=True)
class Continue:
    """Keep training."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Every worker has reached the end of the phase."""


@dataclass(frozen=True, slots=True)
class EndEarly:
    """A callback has ended the run: evaluate the newest state, and end with it as after the last round."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The user requested a stop."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Start a new generation of all members from the last snapshot. New processes replace the members `lost`.

    `pause`: seconds to wait before.
    """

    lost: tuple[str, ...]
    reason: str
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class RebuildLost:
    """Start new processes for the workers `lost`, and rebuild their states from copies on other workers.

    All workers continue from the newest round whose state is available for every worker: see
    `rayps.recovery.backup_assignment.plan_rebuild`. `pause`: seconds to wait before.
    """

    lost: tuple[str, ...]
    reason: str
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Regroup:
    """Form a new generation from the memory of the workers, which are in step.

    The members `lost` are gone, the ranks `leavers` leave, and `joiners` newcomers that are ready join.
    """

    lost: tuple[str, ...]
    leavers: tuple[int, ...]
    joiners: int
    reason: str


@dataclass(frozen=True, slots=True)
class Replace:
    """Start the members `lost` again while the others continue. A member whose process has ended gets a new one."""

    lost: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """End the run with an error."""

    error: Exception | None
    reason: str


Decision = Continue | Finish | EndEarly | Stop | Restart | RebuildLost | Regroup | Replace | Fail


def decide(facts: RunFacts) -> Decision:
    """Return the decision for these facts."""
    if facts.stop:
        return Stop()
    for member, error in facts.errors:
        if not isinstance(error, (LinkError, ActorDied)):
            return Fail(error, f"{member}: {error}")
    if facts.dead:
        lost = tuple(member for member, _ in facts.dead)
        reason = "; ".join(f"{member} died{_at(facts, member)} ({_shorten(why)})" for member, why in facts.dead)
        return _recover(facts, lost, reason)
    # after the grace time, all workers that lost the same peer have reported the loss
    if facts.errors and facts.error_age >= GRACE_SECONDS:
        return _reconnect(facts)
    if len(facts.finished) == facts.size:
        if facts.unanswered is not None:  # without the servers' states the phase cannot end
            return _recover(replace(facts, recovery=RestartAll()), (), _shorten(str(facts.unanswered)))
        return Finish()
    if facts.ends_early:
        return EndEarly()
    return Continue() if facts.change is None else facts.change


def death_of(error: RaypsError) -> tuple[str, str] | None:
    """Return who died and why, if a start failed because a process died or does not answer; otherwise None.

    The error is then the user's, or a refusal that no retry can fix, and ends the job.
    """
    reason = str(error.data.get("reason", error.message))
    match error:
        case ActorDied():
            return str(error.data.get("actor", "a process of the job")), reason
        case LinkError():
            return _name_member(str(error.data.get("peer", "a server"))), reason
    return None


def pause_before(restarts: int) -> float:
    """Return the seconds to wait before a restart, after so many restarts in a row that led to no new round."""
    return min(PAUSE_SECONDS * 2.0 ** min(restarts - 1, 30), LONGEST_PAUSE) if restarts else 0.0


def choose_recovery(facts: RecoveryFacts) -> Recovery:
    """Return how a run recovers from a death now."""
    declared = facts.declared
    rebuilds = isinstance(declared, Rebuild)
    if facts.regroups and not rebuilds:
        return RestartAll() if facts.server_died else RegroupLiving()
    if facts.servers_end and facts.server_died:  # a restored server would lack the end and the last pushes
        return RestartAll()
    if isinstance(declared, Rebuild):
        if facts.open_data:  # backups of workers do not have their positions in data without a length
            return RestartAll()
        if not declared.from_servers:
            return declared
        return ReplaceOne() if facts.rejoins else RestartAll()
    return ReplaceOne() if facts.holds_tables else declared


def _reconnect(facts: RunFacts) -> Decision:
    """Decide about lost connections if every process answers polls.

    If the run recovers by replacing members, the members that reported errors count as lost. Otherwise the first peer
    that timed out counts as lost.
    """
    blamed = [_name_member(str(error.data.get("peer"))) for _, error in facts.errors if isinstance(error, PeerTimeout)]
    blamed = [name for name in blamed if _is_member(name)]
    reason = "; ".join(f"{member}: {_shorten(str(error))}" for member, error in facts.errors[:2])
    if isinstance(facts.recovery, ReplaceOne):
        return _recover(facts, tuple(member for member, _ in facts.errors), reason)
    return _recover(facts, tuple(sorted(set(blamed[:1]))), reason)


def _recover(facts: RunFacts, lost: tuple[str, ...], reason: str) -> Decision:
    failures = facts.failures + 1
    if failures > facts.max_failures:
        return Fail(
            None,
            f"{reason}\nthat was failure {failures}, and max_failures is {facts.max_failures}: raise max_failures, "
            f"or find out why the process dies (see its log, its memory, `rayps doctor`){_quote_last_output(facts)}",
        )
    pause = pause_before(facts.in_row)
    if isinstance(facts.recovery, Rebuild):
        return RebuildLost(lost, reason, pause)
    if isinstance(facts.recovery, RegroupLiving):
        return Regroup(lost, (), 0, reason)
    if isinstance(facts.recovery, ReplaceOne) and facts.planned and all(map(_is_member, lost)):
        return Replace(lost, reason)
    return Restart(lost, reason, pause)


def _quote_last_output(facts: RunFacts) -> str:
    """Return the last output of the first dead member whose output is known, as the end of an error; "" if none is."""
    found = next(((member, facts.outputs[member]) for member, _ in facts.dead if facts.outputs.get(member)), None)
    return "" if found is None else f"\nthe last output of {found[0]}:\n{found[1]}"


def _is_member(name: str) -> bool:
    return name.startswith(("worker-", "shard-"))  # and not the manager of a server group


def _name_member(peer: str) -> str:
    return peer.replace(":", "-")  # a ring calls rank 2 "worker:2"


def _at(facts: RunFacts, member: str) -> str:
    if not facts.planned:
        return " while the members started"
    return f" after it had reported round {facts.positions[member]}" if member in facts.positions else ""


def _shorten(text: str) -> str:
    first = text.strip().splitlines()[0] if text.strip() else "no reason given"
    return first if len(first) <= MOST_LETTERS else first[: MOST_LETTERS - 3] + "..."


# ---- states


class _Step:
    """The base class of the states of a run. `terminal` is True for the state in which the run has ended."""

    __slots__ = ()
    terminal: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class StartWorkers(_Step):
    """Check the workload, reserve resources, start the workers, and find the first snapshot.

    `pause`: seconds to wait before, after an earlier start that failed.
    """

    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class EnterPhase(_Step):
    """Enter the phase with this number. Skip the phase if the newest snapshot is at or after the phase's end."""

    phase: int


@dataclass(frozen=True, slots=True)
class BeginGeneration(_Step):
    """Start a generation on every member, when an elastic job has the workers that it needs.

    `continues`: how workers continue from the states in their memory; None if they start from the snapshot.
    """

    phase: int
    continues: Continuation | None = None


@dataclass(frozen=True, slots=True)
class Train(_Step):
    """Poll the members once, and decide what to do next."""

    phase: int


@dataclass(frozen=True, slots=True)
class Recover(_Step):
    """End the generation after a failure, and find the round from which workers continue.

    `evaluating`: the failure happened in the evaluation at the end of the phase.
    """

    phase: int
    decision: Restart | RebuildLost
    evaluating: bool = False


@dataclass(frozen=True, slots=True)
class ChangeWorkers(_Step):
    """Form a new group of workers, which continues from the memory of those that stay."""

    phase: int
    decision: Regroup


@dataclass(frozen=True, slots=True)
class ReplaceMembers(_Step):
    """Start new processes for the lost members while the others keep training."""

    phase: int
    decision: Replace


@dataclass(frozen=True, slots=True)
class Evaluate(_Step):
    """Evaluate, on all workers, the state at the end of a phase."""

    phase: int


@dataclass(frozen=True, slots=True)
class RequestCheckpoint(_Step):
    """Request one more snapshot from all members, because the user has requested a stop."""

    phase: int


@dataclass(frozen=True, slots=True)
class AwaitCheckpoint(_Step):
    """Poll until the requested snapshot is saved, a member fails, or the deadline passes."""

    phase: int


@dataclass(frozen=True, slots=True)
class RunEnded(_Step):
    """The run has ended: SUCCEEDED, STOPPED or FAILED."""

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
    | ChangeWorkers
    | ReplaceMembers
    | Evaluate
    | RequestCheckpoint
    | AwaitCheckpoint
    | RunEnded
)


@dataclass(frozen=True, slots=True)
class Findings:
    """The result of a state's effect. The comment of a field names the states that set it."""

    stopped: bool = False  # StartWorkers, BeginGeneration: a stop was requested before the workers had started
    phases: int = 1  # EnterPhase: the number of phases of the run
    work: bool = True  # EnterPhase: whether rounds or an evaluation of this phase remain
    # what to do next; None in Evaluate if the metrics are known, and in StartWorkers and BeginGeneration if nobody died
    decision: Decision | None = None
    complete: bool = False  # Train: whether the newest snapshot is the last one of the phase
    waiting: bool = False  # BeginGeneration: whether workers are awaited; `continues` then still holds
    # Recover, ChangeWorkers: how workers continue from their memory; None if they continue from the snapshot
    continues: Continuation | None = None
    saving: bool = False  # RequestCheckpoint, AwaitCheckpoint: whether the last snapshot is still to be saved


def find_next_state(state: State, found: Findings) -> State:
    """Return the state that follows `state`. `found` is the result of the effect of `state`."""
    match state:
        case StartWorkers():
            return _decide_after_start(found)
        case EnterPhase(phase) if phase >= found.phases:
            return RunEnded(Status.SUCCEEDED, "trained to the end")
        case EnterPhase(phase):
            return BeginGeneration(phase) if found.work else EnterPhase(phase + 1)
        case BeginGeneration() if found.stopped:
            return RunEnded(Status.STOPPED)
        case BeginGeneration(phase) if found.waiting:
            return BeginGeneration(phase, found.continues)
        case BeginGeneration(phase) if found.decision is not None:
            return RunEnded(Status.STOPPED) if isinstance(found.decision, Stop) else _decide_after_poll(phase, found)
        case BeginGeneration(phase) | ReplaceMembers(phase):
            return Train(phase)
        case Train(phase):
            return _decide_after_poll(phase, found)
        case Recover(phase) | ChangeWorkers(phase):
            return BeginGeneration(phase, found.continues)
        case Evaluate(phase):
            return _decide_after_evaluation(phase, found.decision)
        case RequestCheckpoint(phase) | AwaitCheckpoint(phase):
            return AwaitCheckpoint(phase) if found.saving else RunEnded(Status.STOPPED)
        case RunEnded():
            return state


def _decide_after_start(found: Findings) -> State:
    """Return the state after a start of the workers: if one of them died, all start again from the beginning."""
    match found.decision:
        case Restart() | RebuildLost() as decision:
            return StartWorkers(decision.pause)
        case Regroup() | Replace():
            return StartWorkers()
        case Fail() as decision:
            return _fail(decision)
        case Stop():
            return RunEnded(Status.STOPPED)
    return RunEnded(Status.STOPPED) if found.stopped else EnterPhase(0)


def _decide_after_poll(phase: int, found: Findings) -> State:
    match found.decision:
        case Stop():
            return RequestCheckpoint(phase)
        case Fail() as decision:
            return _fail(decision)
        case Restart() | RebuildLost() as decision:
            return Recover(phase, decision)
        case Regroup() as decision:
            return ChangeWorkers(phase, decision)
        case Replace() as decision:
            return ReplaceMembers(phase, decision)
        case Finish() if found.complete:
            return Evaluate(phase)
        case EndEarly():  # a generation with the new end: its workers agree on parameters, as at the end of a phase
            return BeginGeneration(phase)
    return Train(phase)


def _decide_after_evaluation(phase: int, decision: Decision | None) -> State:
    """Return the state after an evaluation.

    If a worker was lost during the evaluation, all workers restart from the snapshot and evaluate again.
    """
    match decision:
        case None:
            return EnterPhase(phase + 1)
        case Restart() | RebuildLost() | Regroup() | Replace():
            return Recover(phase, Restart(decision.lost, decision.reason), evaluating=True)
        case Fail() as decision:
            return _fail(decision)
        case Stop():
            return RunEnded(Status.STOPPED)
    return Evaluate(phase)


def _fail(decision: Fail) -> RunEnded:
    if isinstance(decision.error, RaypsError):
        return RunEnded(Status.FAILED, str(decision.error), decision.error)
    return RunEnded(Status.FAILED, decision.reason, TrainingError(decision.reason))
