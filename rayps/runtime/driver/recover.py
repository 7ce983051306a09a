"""Recover a run from the failure of a member, by the decision of `rayps.runtime.driver.decide_recovery`.

There are three ways, here the cheapest first. *Replace*: a new process takes the place of the lost worker or shard, and
the others keep training. *Rebuild*: a new process gets the lost worker's state from its counterpart (the worker at the
same place in another replica), or from the worker that holds its backup. All workers continue from the newest round
whose state every worker has, and a surviving worker repeats at most one round. *Restart*: all workers start again from
the last snapshot, and repeat the rounds since then.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rayps_client.errors import ClusterError
from rayps_client.values import JsonObject

from rayps.cluster.local import ActorReply
from rayps.cluster.members import GroupMember
from rayps.core.grid import Grid
from rayps.core.job.continuation import Continuation
from rayps.core.job.user_code import START_SECONDS
from rayps.recovery.backup_assignment import BackupAssignment, HeldRounds, choose_backup_holders, plan_rebuild
from rayps.recovery.worker_backup import CommitCost
from rayps.runtime.driver.decide_recovery import FailureCount, RebuildLost, Replace, Restart
from rayps.runtime.records.journal import Journal
from rayps.runtime.size.late_workers import LateReplacements
from rayps.tensors.snapshot import Snapshot
from rayps.worker.plan import WorkerFacts

if TYPE_CHECKING:
    from rayps.runtime.driver.worker_group import WorkerGroup

HALT_SECONDS = 30.0  # seconds for a worker to end its generation; a step of the user's code cannot be interrupted


@dataclass(slots=True)
class PeerStates:
    """Which workers of a group hold backups of which workers' states.

    Only states with the current `base_generation` can be used: see `rayps.recovery.state_slots.StateSlots`.
    """

    base_generation: int = 0  # the newest generation that started from a snapshot
    # one for each rank: how that worker's state is backed up in this generation
    assignments: list[BackupAssignment | None] = field(default_factory=list)

    def assign_backups(self, grid: Grid, workers: list[GroupMember], continues: Continuation | None) -> None:
        """Choose which worker holds whose state in a new generation. A worker that does not answer counts as dead.

        `continues`: how the generation continues from workers' states; None if it starts from a snapshot.
        """
        found = _collect_answers(workers, [worker.handle.call("backup_address") for worker in workers], START_SECONDS)
        if any(worker.dead for worker in workers) or not all(found.values()):
            self.assignments = [None] * len(workers)
            return
        hosts = [worker.place.host if worker.place else "" for worker in workers]
        addresses = tuple(str(found[rank]) for rank in range(len(workers)))
        sources = {} if continues is None else continues.sources
        self.assignments = [
            None
            if holder is None
            else BackupAssignment(
                self.base_generation, addresses, holder, grid.data > 1, continues is not None, sources.get(rank)
            )
            for rank, holder in enumerate(choose_backup_holders(grid, hosts))
        ]

    def end_generation(self, grid: Grid, workers: list[GroupMember]) -> Continuation | None:
        """End the generation now. Return how all workers can continue without a snapshot, or None if they cannot."""
        living = [(rank, worker) for rank, worker in enumerate(workers) if not worker.dead]
        replies = [worker.handle.call("halt", self.base_generation) for _, worker in living]
        answers = _collect_answers([worker for _, worker in living], replies, HALT_SECONDS)
        held_rounds = {living[at][0]: held for at, held in answers.items()}
        return plan_rebuild(grid, held_rounds)


def _collect_answers(
    workers: list[GroupMember], replies: list[ActorReply], timeout: float
) -> dict[int, dict[int, HeldRounds]]:
    found: dict[int, dict[int, HeldRounds]] = {}
    for at, (worker, reply) in enumerate(zip(workers, replies, strict=True)):
        try:
            found[at] = reply.result(timeout)
        except ClusterError as error:
            worker.dead = str(error.data.get("reason", error))
        except TimeoutError:
            worker.dead = f"it did not answer within {timeout:g} s"
    return found


@dataclass(slots=True)
class _Failure:
    """A failure from which the run is recovering."""

    reason: str
    lost: list[str]  # names of members
    plan: Continuation
    seen: float  # when the failure was detected, as time.monotonic


@dataclass(slots=True)
class RecoveryExecutor:
    """Carries out restarts, rebuilds and replacements, counts failures, and reports each recovery as an event."""

    journal: Journal
    count: FailureCount = field(default_factory=FailureCount)  # of the whole job, under all its drivers
    cost: CommitCost | None = None  # the cost of the backups of workers' states in this generation
    late: LateReplacements = field(default_factory=LateReplacements)  # with backup workers
    _first_sign: float | None = None  # the first sign of a failure, as time.monotonic
    _first_error: float | None = None  # the first error of a worker in this generation
    _failure: _Failure | None = None
    _reported_cost: CommitCost | None = None
    # replicas that are starting again: their ranks, their lost workers, the time of the failure
    _rejoining: list[tuple[list[int], list[str], float]] = field(default_factory=list)

    def clear_error(self) -> None:
        """Forget the time of the workers' first error, at the start of a generation or of a replacement."""
        self._first_error = None

    def record_failures(self, *, errors: bool, dead: bool) -> None:
        """Record the current time as the time of the failure: workers have `errors`, or members are `dead`.

        If an earlier time is recorded, it is not changed.
        """
        now = time.monotonic()
        if (errors or dead) and self._first_sign is None:
            self._first_sign = now
        if errors and self._first_error is None:
            self._first_error = now

    @property
    def error_age(self) -> float:
        """Seconds since the first error of a worker in this generation; 0 if there was no error."""
        return 0.0 if self._first_error is None else time.monotonic() - self._first_error

    def may_replace(self, group: WorkerGroup) -> bool:
        """Return whether one replica may start again alone although workers run in step.

        Return False while a replica that was started again has not completed a round.
        """
        return group.rejoins and not self._rejoining

    def end_generation(
        self, group: WorkerGroup, decision: Restart | RebuildLost, generation: int
    ) -> Continuation | None:
        """End the generation. Return how the next one continues without a snapshot, or None if it cannot.

        `generation` is the number of the next generation.
        """
        for member in group.members:
            if member.name in decision.lost and not member.dead:
                member.dead = "silent"
        self._rejoining = []
        if isinstance(decision, Restart):
            self._first_sign = self._failure = None
            return None
        seen = self._first_sign or time.monotonic()
        lost = list(decision.lost)
        if self._failure is not None:  # this is another failure before the first new round
            seen = self._failure.seen
            lost = sorted({*lost, *self._failure.lost})
        found = group.end_generation()
        self._first_sign = None
        if found is None:
            self._failure = None
            self.journal.event(
                "warning",
                f"{decision.reason}: no living worker has the lost state: its copy was lost too, or no "
                "round was copied yet; all workers return to the newest checkpoint",
                lost=list(decision.lost),
            )
            return None
        reason, sources = decision.reason, found.sources
        if self._failure is not None:
            reason, sources = f"{self._failure.reason}; {reason}", self._failure.plan.sources | sources
        self._failure = _Failure(reason, lost, replace(found, sources=sources), seen)
        self.journal.event(
            "mending",
            f"{decision.reason}: {_describe_sources(found) or 'every worker has its own state'}; "
            f"all workers continue from round {found.round}",
            lost=list(decision.lost),
            round=found.round,
            generation=generation,
        )
        return found

    def report_restart(self, decision: Restart | RebuildLost, what: str, begin: int, generation: int) -> None:
        """Report that all workers start again from the snapshot of round `begin`. `what` says what they then do."""
        self.journal.event(
            "restarted",
            f"{decision.reason}: all workers {what}",
            lost=list(decision.lost),
            round=begin,
            generation=generation,
        )

    def give_up_memory(self, workers: int, begin: int, generation: int) -> None:
        """Report that workers continue from the snapshot of round `begin`, and not from memory as was planned."""
        failure, self._failure = self._failure, None
        reason = "workers that had a newer state in memory have died" if failure is None else failure.reason
        self.journal.event(
            "restarted",
            f"{reason}: there is no worker in whose memory the lost state can be rebuilt; {workers} workers continue "
            f"from round {begin}",
            lost=[] if failure is None else failure.lost,
            round=begin,
            generation=generation,
        )

    def replace(self, group: WorkerGroup, decision: Replace, snapshot: Snapshot) -> None:
        """Start new processes for the lost members, while the other members continue.

        If a replica has several workers, all workers of a lost worker's replica start again from the servers'
        parameters.
        """
        numbers = [(name.partition("-")[0], int(name.partition("-")[2])) for name in decision.lost]
        seen, self._first_sign = self._first_sign or time.monotonic(), None
        for index in [number for kind, number in numbers if kind == "shard"]:
            group.replace_shard(index, snapshot)
            message = f"shard-{index} was restored from round {snapshot.round}"
            self._report_replaced(decision, [f"shard-{index}"], message, snapshot)
        gone = [number for kind, number in numbers if kind == "worker"]
        for ranks in replicas_of(group.grid, gone):
            group.replace_workers(ranks, snapshot)
            lost = [f"worker-{rank}" for rank in ranks if rank in gone]
            message = f"{' and '.join(lost)} {'was' if len(lost) == 1 else 'were'} replaced"
            if len(ranks) > 1:
                message += f", and its replica (worker-{ranks[0]} to worker-{ranks[-1]}) started again from the servers"
                self._rejoining = [each for each in self._rejoining if each[0] != ranks] + [(ranks, lost, seen)]
            self._report_replaced(decision, lost, message, snapshot)

    def _report_replaced(self, decision: Replace, lost: list[str], message: str, snapshot: Snapshot) -> None:
        self.journal.event(
            "replaced", f"{decision.reason}: {message}; the others continued", lost=lost, round=snapshot.round
        )

    def _report_rejoined(self, group: WorkerGroup) -> None:
        for ranks, lost, seen in list(self._rejoining):
            facts = [group.workers[rank].facts for rank in ranks]
            if all(isinstance(f, WorkerFacts) and f.position > 0 and f.status != "failed" for f in facts):
                self._rejoining.remove((ranks, lost, seen))
                at, seconds = min(f.position for f in facts) - 1, time.monotonic() - seen
                self.journal.event(
                    "rejoined",
                    f"the replica that lost {' and '.join(lost)} resumed training at round {at}, {seconds:.2f} s after "
                    "the failure was detected",
                    lost=lost,
                    round=at,
                    seconds=seconds,
                )

    def check_progress(self, group: WorkerGroup, generation: int) -> None:
        """Read the workers' current progress, and report a recovery when its first new round is complete."""
        known = [w.facts for w in group.workers if isinstance(w.facts, WorkerFacts)]
        facts = [f for f in known if f.generation == generation]
        if costs := [f.cost for f in facts if f.cost is not None]:
            self.cost = CommitCost.most(costs)
        self._report_rejoined(group)
        failure = self._failure
        if failure is None or len(facts) < len(group.workers):
            return
        if all(f.position > failure.plan.round or f.status == "finished" for f in facts):
            self._failure = None
            self._report_rebuild(failure, generation)

    def _report_rebuild(self, failure: _Failure, generation: int) -> None:
        seconds = time.monotonic() - failure.seen
        origin = f"{_describe_sources(failure.plan)}; " if failure.plan.sources else ""
        self.journal.event(
            "mended",
            f"{failure.reason}: {origin}all workers continued from round {failure.plan.round}; this was "
            f"{seconds:.2f} s after the failure was detected",
            lost=failure.lost,
            round=failure.plan.round,
            generation=generation,
            seconds=seconds,
            sources={f"worker-{rank}": f"worker-{s.holder}" for rank, s in sorted(failure.plan.sources.items())},
            twins=[f"worker-{rank}" for rank, s in sorted(failure.plan.sources.items()) if s.counterpart],
            **self._write_cost(),
        )

    def report_backup_cost(self) -> None:
        """Report at the end of a phase what the backups of workers' states cost."""
        if self.cost is not None and self.cost != self._reported_cost:
            self._reported_cost = self.cost
            self.journal.event(
                "upkeep",
                f"the workers' states are backed up, and a failure repeats at most one round: workers {self.cost}",
                **self.cost.to_dict(),
            )

    def _write_cost(self) -> JsonObject:
        return {} if self.cost is None else {"upkeep": self.cost.to_dict()}


def replicas_of(grid: Grid, ranks: list[int]) -> list[list[int]]:
    """Return the replicas that these workers belong to: for each replica, the list of its ranks."""
    return [grid.replica(data) for data in sorted({grid.at(rank).data for rank in ranks})]


def _describe_sources(plan: Continuation) -> str:
    words = []
    for rank, source in sorted(plan.sources.items()):
        kind = "its counterpart" if source.counterpart else "its backup on"
        words.append(f"worker-{rank} has the state of {kind} worker-{source.holder}")
    return ", ".join(words)
