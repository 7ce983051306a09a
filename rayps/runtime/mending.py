"""Recover a run from the failure of a member, by the decision of `rayps.runtime.decide_recovery`.

Three ways, the cheapest first. *Replace*: a new process for the lost worker or shard, the others keep training.
*Rebuild*: a new process gets the lost worker's state from its twin in another replica, or from the neighbour that holds
its backup; all workers continue from the newest round whose state every worker has, so a surviving worker repeats at
most one round. *Restart*: all workers start again from the last snapshot; the rounds since are repeated.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rayps.cluster.local import ActorReply
from rayps.cluster.members import GroupMember
from rayps.core.errors import ClusterError
from rayps.core.grid import Grid
from rayps.core.user_code import START_SECONDS
from rayps.core.values import JsonObject
from rayps.recovery.backup_assignment import Bond, HeldRounds, Mending, keepers, mending
from rayps.recovery.worker_backup import CommitCost
from rayps.runtime.decide_recovery import Mend, Replace, Restart
from rayps.runtime.journal import Journal
from rayps.tensors.snapshot import Snapshot
from rayps.worker.plan import WorkerFacts

if TYPE_CHECKING:
    from rayps.runtime.worker_group import WorkerGroup

HALT_SECONDS = 30.0  # seconds for a worker to end its generation: a step of the user's code cannot be interrupted


@dataclass(slots=True)
class PeerStates:
    """A record of which workers' states the other workers of a group hold.

    A *line* is the sequence of states that follows one snapshot, rebuilds included. A state of another line cannot be
    used.
    """

    line: int = 0  # the number of the last generation that started from a snapshot
    bonds: list[Bond | None] = field(default_factory=list)  # by rank: how the state is backed up in this generation

    def begin(self, grid: Grid, workers: list[GroupMember], mended: Mending | None) -> None:
        """Choose which worker holds whose state in a new generation; a worker that does not answer counts as dead.

        `mended` is how the generation continues from workers' states; None = it starts from a snapshot.
        """
        found = _answers(workers, [worker.handle.call("backup_address") for worker in workers], START_SECONDS)
        if any(worker.dead for worker in workers) or not all(found.values()):
            self.bonds = [None] * len(workers)
            return
        hosts = [worker.place.host if worker.place else "" for worker in workers]
        addresses = tuple(str(found[rank]) for rank in range(len(workers)))
        sources = {} if mended is None else mended.sources
        self.bonds = [
            None
            if keeper is None
            else Bond(self.line, addresses, keeper, grid.data > 1, mended is not None, sources.get(rank))
            for rank, keeper in enumerate(keepers(grid, hosts))
        ]

    def halt(self, grid: Grid, workers: list[GroupMember]) -> Mending | None:
        """End the generation now; return the round from which all workers can continue without a snapshot, or None."""
        living = [(rank, worker) for rank, worker in enumerate(workers) if not worker.dead]
        replies = [worker.handle.call("halt", self.line) for _, worker in living]
        answers = _answers([worker for _, worker in living], replies, HALT_SECONDS)
        holdings = {living[at][0]: held for at, held in answers.items()}
        return mending(grid, holdings)


def _answers(workers: list[GroupMember], replies: list[ActorReply], timeout: float) -> dict[int, dict[int, HeldRounds]]:
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
class _Loss:
    """A failure from which the run is recovering."""

    reason: str
    lost: list[str]
    mending: Mending
    seen: float  # when it was detected, as time.monotonic


@dataclass(slots=True)
class Mender:
    """Carries out restarts, rebuilds and replacements, counts failures, and reports each recovery as an event."""

    journal: Journal
    failures: int = 0  # failures of the whole job, under all its drivers
    cost: CommitCost | None = None  # cost of the states' backups, in this generation
    _seen: float | None = None  # the first sign of a failure, as time.monotonic
    _broken: float | None = None  # the first error of a worker in this generation
    _loss: _Loss | None = None
    _filed: CommitCost | None = None
    # replicas that are starting again: their ranks, their lost workers, the time of the failure
    _rejoining: list[tuple[list[int], list[str], float]] = field(default_factory=list)

    def begin(self) -> None:
        """Forget the workers' errors so far, at the start of a generation or of a replacement."""
        self._broken = None

    def saw(self, *, errors: bool, dead: bool) -> None:
        """Record that workers have failed with errors, or that members are dead, as of now."""
        now = time.monotonic()
        if (errors or dead) and self._seen is None:
            self._seen = now
        if errors and self._broken is None:
            self._broken = now

    @property
    def broken_for(self) -> float:
        """Seconds since the first error of a worker in this generation; 0 without one."""
        return 0.0 if self._broken is None else time.monotonic() - self._broken

    def may_replace(self, group: WorkerGroup) -> bool:
        """Return whether one replica may start again alone although workers run in step.

        False while a replica that started again has not completed a round.
        """
        return group.rejoins and not self._rejoining

    def mend(self, group: WorkerGroup, decision: Restart | Mend, generation: int) -> Mending | None:
        """End the generation; return the round from which the next one continues without a snapshot, or None.

        `generation` is the number of the next generation.
        """
        for member in group.members:
            if member.name in decision.lost and not member.dead:
                member.dead = "silent"
        self._rejoining = []
        if isinstance(decision, Restart):
            self._seen = self._loss = None
            return None
        seen = self._seen or time.monotonic()
        lost = list(decision.lost)
        if self._loss is not None:  # this is another failure before the first new round
            seen = self._loss.seen
            lost = sorted({*lost, *self._loss.lost})
        found = group.halt()
        self._seen = None
        if found is None:
            self._loss = None
            self.journal.event(
                "warning",
                f"{decision.reason}: no other worker has the lost state (backups exist after the first round); "
                "all workers return to the snapshot",
                lost=list(decision.lost),
            )
            return None
        reason, sources = decision.reason, dict(found.sources)
        if self._loss is not None:
            reason, sources = f"{self._loss.reason}; {reason}", self._loss.mending.sources | sources
        self._loss = _Loss(reason, lost, Mending(found.round, sources), seen)
        self.journal.event(
            "mending",
            f"{decision.reason}: {_sources(found) or 'every worker has its own state'}; "
            f"all workers continue from round {found.round}",
            lost=list(decision.lost),
            round=found.round,
            generation=generation,
        )
        return found

    def restarted(self, decision: Restart | Mend, what: str, begin: int, generation: int) -> None:
        """Report that all workers start again from the snapshot of round `begin`; `what` says what they do then."""
        self.journal.event(
            "restarted",
            f"{decision.reason}: all workers {what}",
            lost=list(decision.lost),
            round=begin,
            generation=generation,
        )

    def replace(self, group: WorkerGroup, decision: Replace, snapshot: Snapshot) -> None:
        """Start new processes for the lost members; the other members continue.

        The replica of a lost worker starts again from the servers' parameters.
        """
        numbers = [(name.partition("-")[0], int(name.partition("-")[2])) for name in decision.lost]
        seen, self._seen = self._seen or time.monotonic(), None
        for index in [number for kind, number in numbers if kind == "shard"]:
            group.replace_shard(index, snapshot)
            message = f"shard-{index} was restored from round {snapshot.round}"
            self._replaced(decision, [f"shard-{index}"], message, snapshot)
        gone = [number for kind, number in numbers if kind == "worker"]
        for ranks in replicas_of(group.grid, gone):
            group.replace_workers(ranks, snapshot)
            lost = [f"worker-{rank}" for rank in ranks if rank in gone]
            message = f"{' and '.join(lost)} {'was' if len(lost) == 1 else 'were'} replaced"
            if len(ranks) > 1:
                message += f", and worker-{ranks[0]} to worker-{ranks[-1]}, its replica, started again from the servers"
                self._rejoining = [each for each in self._rejoining if each[0] != ranks] + [(ranks, lost, seen)]
            self._replaced(decision, lost, message, snapshot)

    def _replaced(self, decision: Replace, lost: list[str], message: str, snapshot: Snapshot) -> None:
        self.journal.event(
            "replaced", f"{decision.reason}: {message}, the others continued", lost=lost, round=snapshot.round
        )

    def _look_for_those_who_rejoin(self, group: WorkerGroup) -> None:
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

    def look(self, group: WorkerGroup, generation: int) -> None:
        """Examine the workers' current progress; report a recovery when its first new round is complete."""
        known = [w.facts for w in group.workers if isinstance(w.facts, WorkerFacts)]
        facts = [f for f in known if f.generation == generation]
        if costs := [f.cost for f in facts if f.cost is not None]:
            self.cost = CommitCost.most(costs)
        self._look_for_those_who_rejoin(group)
        loss = self._loss
        if loss is None or len(facts) < len(group.workers):
            return
        if all(f.position > loss.mending.round or f.status == "finished" for f in facts):
            self._loss = None
            self._tell(loss, generation)

    def _tell(self, loss: _Loss, generation: int) -> None:
        seconds = time.monotonic() - loss.seen
        origin = f"{_sources(loss.mending)}; " if loss.mending.sources else ""
        self.journal.event(
            "mended",
            f"{loss.reason}: {origin}all workers continued from round {loss.mending.round}; this was "
            f"{seconds:.2f} s after the failure was detected",
            lost=loss.lost,
            round=loss.mending.round,
            generation=generation,
            seconds=seconds,
            sources={f"worker-{rank}": f"worker-{s.giver}" for rank, s in sorted(loss.mending.sources.items())},
            twins=[f"worker-{rank}" for rank, s in sorted(loss.mending.sources.items()) if s.twin],
            **self._upkeep(),
        )

    def tell_cost(self) -> None:
        """Report the cost of the backups of workers' states, at the end of a phase."""
        if self.cost is not None and self.cost != self._filed:
            self._filed = self.cost
            self.journal.event(
                "upkeep",
                f"backups of the workers' states, so that a failure repeats at most one round: workers {self.cost}",
                **self.cost.to_dict(),
            )

    def _upkeep(self) -> JsonObject:
        return {} if self.cost is None else {"upkeep": self.cost.to_dict()}


def replicas_of(grid: Grid, ranks: list[int]) -> list[list[int]]:
    """Return the replicas that these workers belong to, each as its ranks."""
    return [grid.replica(data) for data in sorted({grid.at(rank).data for rank in ranks})]


def _sources(mending: Mending) -> str:
    words = []
    for rank, source in sorted(mending.sources.items()):
        kind = "its twin" if source.twin else "its backup on"
        words.append(f"worker-{rank} has the state of {kind} worker-{source.giver}")
    return ", ".join(words)
