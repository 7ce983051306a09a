"""What a driver asks about changes of its workers, at each moment of a run: one protocol for all jobs.

`WorkerChanges` is the part of a job whose workers are a fixed number: they never change. Two others replace what they
need: `rayps.runtime.size.elastic_run` for workers in step, and `rayps.runtime.size.leased_run` for workers that join
and leave at any time. The driver does not ask which of them it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from rayps.cluster.local import Bundle
from rayps.cluster.room import RoomWatch
from rayps.core.job.continuation import Continuation
from rayps.core.job.records import Point, ProgressRecord
from rayps.core.metrics import PushRounds
from rayps.core.rows.phase_rounds import Calendar, PhaseSpan
from rayps.core.strategy.elastic import ElasticWorkers
from rayps.core.strategy.strategy import StrategyView
from rayps.runtime.driver.decide_recovery import Regroup, Replace
from rayps.runtime.records.journal import Journal
from rayps.runtime.size.gather_workers import GatheredWorkers
from rayps.runtime.size.job_size import Allowance, JobSize
from rayps.runtime.size.share_balancer import ShareBalancer

if TYPE_CHECKING:
    from rayps.runtime.driver.worker_group import WorkerGroup
    from rayps.tensors.snapshot import Snapshot
    from rayps.worker.plan import Orders


class WorkerChanges:
    """The driver's part of a job with a fixed number of workers. A subclass changes them."""

    # whether each worker has resources of its own, which are released when it leaves
    apart: ClassVar[bool] = False
    # whether the living workers form a new group after a death, and continue from the state in their memory
    regroups: ClassVar[bool] = False
    # whether a state can be taken after each evaluation, for which the workers wait
    evaluates_in_step: ClassVar[bool] = True
    slots: int | None = None  # the number of ranks, of which some have no worker; None if each rank has one
    pushes: PushRounds | None = None  # what counts rounds if each worker pushes at its own pace

    def __init__(self, calendar: Calendar, journal: Journal, *, balances: bool = False) -> None:
        """Prepare. `balances`: whether workers that are slow for long get fewer rows; they are always reported."""
        self._calendar, self._journal = calendar, journal
        self._shares = ShareBalancer(journal, balances=balances)

    # ---- the start and the end

    def begin(self, group: WorkerGroup, resources: Bundle) -> None:
        """Begin, when the first workers have started. A worker takes `resources`."""

    def close(self) -> None:
        """End what `begin` has started."""

    def resume(self, snapshot: Snapshot) -> None:
        """Adapt a checkpoint to the workers of this job.

        Raises:
            CheckpointError: which rows the checkpoint has learned from is not known.
        """
        snapshot.resume(self._calendar)

    def progress(self) -> ProgressRecord:
        """Return the facts that the job's progress shows of the number of workers."""
        return {}

    # ---- a generation

    def enter_phase(self, snapshot: Snapshot, span: PhaseSpan) -> None:
        """Enter the phase with the rounds `span`, of which `snapshot` may be the first state."""

    def gather(
        self, group: WorkerGroup, continues: Continuation | None, collected: int, *, stops: bool
    ) -> GatheredWorkers:
        """Return whether the next generation can begin with the workers that there are. Call it again while it waits.

        `continues`: how the generation continues; None if it starts from the newest snapshot, which is of round
        `collected`. `stops`: whether the run is to end.

        Raises:
            NoResources: too few workers live, and the cluster had no room for others before the deadline.
        """
        return GatheredWorkers(continues, size=(group.size, group.size))

    def begin_generation(
        self, strategy: StrategyView, snapshot: Snapshot, group: WorkerGroup, continues: Continuation | None
    ) -> None:
        """Prepare the next generation, and adapt the newest `snapshot` to it. Call it before the group begins.

        `continues`: how it continues from the workers' states; None if it starts from the snapshot.
        """

    def amend(self, orders: Orders, continues: Continuation | None) -> Orders:
        """Return the orders of the next generation with what changes of the workers add to them."""
        return orders

    def begun(self, group: WorkerGroup) -> None:
        """Take over the workers of a generation that has begun."""
        self._shares.begin(group.size)

    @property
    def stop_round(self) -> int | None:
        """The round after which the workers of the generation pause; None if there is none."""
        return None

    # ---- each poll

    def look(self, group: WorkerGroup, generation: int, snapshot: Snapshot, points: Iterable[Point]) -> None:
        """Carry out what follows from a poll, whose new points of single ranks are `points`."""
        self._shares.add(points)

    def find_change(self, group: WorkerGroup, generation: int, collected: int) -> Regroup | None:
        """Return the change for which all workers have stopped; None if there is none.

        `collected` is the round of the newest state that the driver has. Call it only if no member is dead and no
        worker has failed.
        """
        return None

    def balance(self, group: WorkerGroup) -> None:
        """Deal the rows of later rounds by the workers' speeds, if the job has asked for that."""

    @property
    def is_stopping(self) -> bool:
        """Whether the workers stop for a change: the driver then polls more often."""
        return False

    def has_ended(self, snapshot: Snapshot) -> bool:
        """Return whether no row is left to learn from, and `snapshot` is the last state."""
        return False

    @property
    def servers_end(self) -> bool:
        """Whether the servers were told to end the phase. One that is restored now would lack the last pushes."""
        return False

    # ---- failures and changes

    def regroup(self, group: WorkerGroup, decision: Regroup, collected: int) -> Continuation | None:
        """Form the new group from the living workers and newcomers, and return how it continues.

        The result is None if the group continues from the newest snapshot, which is of round `collected`.
        """
        raise AssertionError("a fixed number of workers forms no other group")

    def lose_dead(self, group: WorkerGroup) -> None:
        """Go on without the workers that have died, if the others can."""

    def before_replace(self, group: WorkerGroup, decision: Replace, snapshot: Snapshot) -> Replace:
        """Return which members get a new process in their places; `snapshot` is the newest state."""
        return decision

    def replaced(self, snapshot: Snapshot) -> None:
        """Continue after lost members were replaced, servers from `snapshot`."""

    # ---- snapshots

    def collected(self, snapshot: Snapshot) -> None:
        """Complete a new snapshot with what is known of the workers and their rows."""

    def saved(self, snapshot: Snapshot, group: WorkerGroup) -> None:
        """Forget what only states before `snapshot` need, because the driver has saved it."""


class ChangingWorkers(WorkerChanges):
    """The driver's part of a job whose number of workers changes, by the decisions of `JobSize`."""

    apart: ClassVar[bool] = True

    def __init__(
        self, elastic: ElasticWorkers, least: int, calendar: Calendar, journal: Journal, allowance: Allowance
    ) -> None:
        """Prepare; `least` is the least number of workers."""
        super().__init__(calendar, journal, balances=elastic.balance)
        self.size = JobSize(elastic, least, journal, allowance)

    def begin(self, group: WorkerGroup, resources: Bundle) -> None:
        """Begin to look for room, and for notices of ends."""
        self.size.begin(group.newcomers(), RoomWatch(group.cluster, resources), group.cluster.notices)

    def close(self) -> None:
        """End newcomers, and stop looking for room."""
        self.size.close()

    def progress(self) -> ProgressRecord:
        """Return how many workers the job wants, if that is known."""
        return self.size.progress()
