"""Commit a worker's state, hold the backups of other workers, and restore a state after a failure.

`Committer` commits the worker's state after each step and measures the cost. `WorkerBackup` holds the states of other
workers, and finds the state from which the worker continues after a failure.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from rayps_client.errors import LinkError, PeerLost, StaleGeneration
from rayps_client.values import JsonObject
from torch import Tensor

from rayps.comm.link import memory
from rayps.core import failpoint
from rayps.core.job.records import Point
from rayps.core.strategy.costs import format_bytes
from rayps.recovery.backup_assignment import BackupAssignment, HeldRounds
from rayps.recovery.peer_replication import BackupConnection, PeerReplication, fetch_missing_part, fetch_state
from rayps.recovery.state_slots import CommittedState, StateFacts
from rayps.tensors.optim import Moments
from rayps.tensors.snapshot import Snapshot
from rayps.tensors.training_state import TrainingState
from rayps.workload.model_part import ModelPart

log = logging.getLogger(__name__)


class CommittedWorker(Protocol):
    """A worker between two rounds: the state that its backup reads."""

    @property
    def position(self) -> int:
        """The number of batches that the worker has taken."""

    @property
    def part(self) -> ModelPart:
        """The buffers and frozen parameters."""

    def committed_state(self) -> tuple[Tensor, Moments]:
        """Return the parameters and the optimizer's state, or those of the elements that the worker owns."""


@dataclass(frozen=True, slots=True)
class CommitCost:
    """Cost of one worker's backup: bytes and seconds per round.

    `share`: those seconds divided by the seconds of a round.
    """

    kept: int = 0  # bytes copied into shared memory of this host
    sent: int = 0  # bytes sent to another host
    seconds: float = 0.0
    share: float = 0.0

    @classmethod
    def most(cls, costs: Iterable[CommitCost]) -> CommitCost | None:
        """Return the cost with the largest share of a round, or None if there are no costs."""
        return max(costs, key=lambda cost: (cost.share, cost.kept), default=None)

    def __str__(self) -> str:
        travel = f" and send {format_bytes(self.sent)} to another host" if self.sent else ""
        took = f"{self.seconds * 1e3:.2f} ms, {self.share:.1%} of the round"
        return f"copy {format_bytes(self.kept)}{travel} per round ({took})"

    def to_dict(self) -> JsonObject:
        """Return the cost as JSON-ready facts."""
        return {"kept_bytes": self.kept, "sent_bytes": self.sent, "seconds": self.seconds, "share": self.share}


class Committer:
    """Commits one worker's state after each round of one generation, and measures the cost."""

    def __init__(self, connection: BackupConnection, writer: int, points: Callable[[], list[Point]]) -> None:
        """Prepare the commits of generation `writer`.

        `points()` returns the points to be stored with each state: those that the driver may not have received.
        """
        self._connection, self._writer, self._points = connection, writer, points
        self._frozen: set[str] | None = None  # names of the parameters that need no gradient: they never change
        self._rounds = 0
        self._seconds, self._began = 0.0, 0.0  # seconds of all commits but the first; when the first one ended
        self._failed = False

    def commit(self, worker: CommittedWorker) -> None:
        """Commit the worker's current state. If a commit fails, the run continues without a backup."""
        if self._failed:
            return
        began = time.perf_counter()
        failpoint.passing("state slots: before a commit")
        try:
            kept = self._state_of(worker)
            if self._connection.slots.commit(self._writer, worker.position, *kept):
                self._connection.send_committed(worker.position)
        except (LinkError, TypeError, ValueError) as error:
            self._failed = True
            self._connection.slots.refuse_commits()
            log.warning(
                "this worker has no backup any more (%s): after its death all workers return to the snapshot", error
            )
        failpoint.passing("state slots: after a commit")
        ended = time.perf_counter()
        if self._rounds == 0:
            self._began = ended  # the first commit allocates the memory and is not counted
        else:
            self._seconds += ended - began
        self._rounds += 1

    def _state_of(self, worker: CommittedWorker) -> tuple[dict[str, Tensor], StateFacts]:
        """Return the worker's state without a copy."""
        if self._frozen is None:
            self._frozen = {name for name, p in worker.part.module.named_parameters() if not p.requires_grad}
        params, moments = worker.committed_state()
        buffers = {name: value for name, value in worker.part.beside.items() if name not in self._frozen}
        tensors, numbers = TrainingState(params, moments, buffers, rng=torch.get_rng_state()).named()
        return tensors, {"numbers": numbers, "points": self._points()}

    @property
    def cost(self) -> CommitCost | None:
        """The cost so far, or None before the first round has ended."""
        rounds = self._rounds - 1
        if rounds < 1:
            return None
        lasted = max(time.perf_counter() - self._began, 1e-9)
        return CommitCost(
            self._connection.slots.bytes,
            self._connection.bytes,
            self._seconds / rounds,
            min(1.0, self._seconds / lasted),
        )

    def close(self) -> None:
        """Close the connection to the holder of the backup. The holder keeps the states that it has received."""
        self._connection.close()


def with_state(snapshot: Snapshot, rank: int, state: CommittedState, rest: CommittedState | None = None) -> Snapshot:
    """Return a column's snapshot in which the state of worker `rank` is replaced by its newer `state`.

    If `state` is that of a counterpart, `rest` is the part of the worker's own state that the counterpart lacks.
    """
    rng = rest.rng if rest is not None else state.rng
    found = replace(snapshot.after(state.round, state.state), rng={} if rng is None else {rank: rng})
    if rest is not None:
        found.buffers |= rest.buffers
    return found


MOST_UNCONFIRMED = 200  # the largest number of points, not known to have reached the driver, stored with a state
_STORED_KINDS = ("round", "evaluation")  # the kinds of points that are stored


class BackedPlan(Protocol):
    """The part of a worker's plan that its backup uses."""

    @property
    def generation(self) -> int:
        """The generation's number."""

    @property
    def rank(self) -> int:
        """The worker's rank."""

    @property
    def start(self) -> int:
        """The position (number of batches taken) from which the generation starts."""

    @property
    def timeout(self) -> float:
        """Seconds to wait for a peer."""

    @property
    def backup_assignment(self) -> BackupAssignment | None:
        """How the worker's state is backed up, or None if it is not backed up."""


class WorkerBackup:
    """One worker's part of recovery, in all generations: its own backup, and the backups that it holds of others."""

    def __init__(self, rank: int, secret: bytes, host: str) -> None:
        self._rank, self._secret, self._host = rank, secret, host
        self._replication: PeerReplication | None = None
        self._committer: Committer | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._unconfirmed: list[Point] = []  # the newest points, which the driver may not have received
        self._in_last_answer = 0  # how many of these were in the answer to the driver's latest poll

    def backup_address(self) -> str:
        """Return the address at which other workers store and request states, or "" without shared memory."""
        with self._lock:
            if self._replication is None and memory.AVAILABLE and not self._closed:
                self._replication = PeerReplication(self._rank, self._secret, self._host)
            return "" if self._replication is None else self._replication.address

    def add_point(self, point: Point) -> None:
        """Record a point that is reported to the driver, until it is known that the driver has received the point."""
        if point["kind"] in _STORED_KINDS:
            dropped = max(0, len(self._unconfirmed) + 1 - MOST_UNCONFIRMED)
            self._unconfirmed = [*self._unconfirmed[dropped:], point]
            self._in_last_answer = max(0, self._in_last_answer - dropped)

    def confirm_points(self) -> None:
        """Drop the points of the previous poll's answer: a new poll shows that the driver has received that answer."""
        self._unconfirmed = self._unconfirmed[self._in_last_answer :]
        self._in_last_answer = len(self._unconfirmed)

    def unconfirmed_points(self, before: int) -> list[Point]:
        """Return the points that the driver may not have received, to be sent again.

        The new generation continues from round `before`. Points of this round and of later rounds are dropped.
        """
        self._unconfirmed = [point for point in self._unconfirmed if point["round"] < before]
        self._in_last_answer = 0
        return [point | {"again": True} for point in self._unconfirmed]

    def take_over_points(self, points: list[Point], before: int) -> list[Point]:
        """Take over the points of the worker that this one replaces; return those that the next poll must receive.

        No other poll may be answered before that one: the points would count as received although they were not sent.
        """
        self._unconfirmed = points
        return self.unconfirmed_points(before)

    def refuse_commits(self) -> None:
        """Refuse further commits of this worker's state."""
        if self._replication is not None:
            self._replication.refuse_commits()

    def held_rounds(self, base_generation: int) -> dict[int, HeldRounds]:
        """Return a dict from rank to the rounds of that worker's states held here, including this worker's own states.

        Only states with `base_generation` count.
        """
        return {} if self._replication is None else self._replication.held_rounds(base_generation)

    def restore(self, plan: BackedPlan, snapshot: Snapshot) -> tuple[Snapshot, list[Point] | None]:
        """Return the snapshot from which this worker continues, updated with the newer state of its rank.

        The state is this worker's own, or that of the worker that it replaces. The second value is for
        `take_over_points`: the points that the replaced worker had reported, or None if the state is this worker's own.

        Raises LinkError if no worker has the state any more.
        """
        assignment, rest, missed = plan.backup_assignment, None, None
        if assignment is None or not assignment.restores_state:
            return snapshot, missed
        if assignment.source is None:
            state = (
                None
                if self._replication is None
                else self._replication.state(plan.rank, assignment.base_generation, plan.start)
            )
            if state is None:
                raise PeerLost(f"worker-{plan.rank} no longer has its state after round {plan.start}", peer="")
        else:
            where = list(assignment.addresses), self._secret, assignment.base_generation, plan.start, plan.timeout
            state = fetch_state(assignment.source, *where)
            rest = fetch_missing_part(assignment.source, plan.rank, *where) if assignment.source.counterpart else None
            own = rest if assignment.source.counterpart else state
            missed = [] if own is None else list(own.facts.get("points", []))
        return with_state(snapshot, plan.rank, state, rest), missed

    def begin_commits(self, plan: BackedPlan, ended: Callable[[], bool]) -> Committer | None:
        """Return the committer of the worker's state, or None if the plan has no backups.

        `ended()` returns whether the plan was ended; `end_commits` is called after that. The states of later plans are
        then left as they are.

        Raises:
            LinkError: the holder of the backup does not answer, or there is no shared memory.
            StaleGeneration: the plan was ended.
        """
        assignment = plan.backup_assignment
        if assignment is None or self._replication is None:
            return None
        connection = BackupConnection(
            self._replication,
            assignment.addresses[assignment.holder],
            self._secret,
            timeout=plan.timeout,
            has_counterpart=assignment.has_counterpart,
        )
        with self._lock:
            if not ended():
                self._replication.drop_states(assignment.base_generation, plan.start)
                connection.slots.open(assignment.base_generation, plan.start, plan.generation)
                self._committer = Committer(connection, plan.generation, lambda: self._unconfirmed)
                return self._committer
        connection.close()
        raise StaleGeneration(f"generation {plan.generation} was ended before its first commit", peer="driver")

    @property
    def cost(self) -> CommitCost | None:
        """The cost of this worker's commits in the current generation so far, or None if there are none."""
        return None if self._committer is None else self._committer.cost

    def end_commits(self) -> None:
        """End the generation's commits. Any thread may call it."""
        with self._lock:
            committer, self._committer = self._committer, None
        if committer is not None:
            committer.close()

    def close(self) -> None:
        """Release this worker's own backup and the backups that it holds of others."""
        with self._lock:
            self._closed = True
        self.end_commits()
        if self._replication is not None:
            self._replication.close()
