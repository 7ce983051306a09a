"""The phases of a run: their rounds, the division of the model in each phase, and the orders for the members."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rayps_client.errors import RaypsError

from rayps.cluster.local import Bundle
from rayps.core.grid import Grid
from rayps.core.rows.phase_rounds import OPEN, Boundary, Calendar, PhaseSpan
from rayps.core.strategy.strategy import Phase, StrategyView
from rayps.core.strategy.strategy_families import has_remote_clients, learns_by_client
from rayps.core.strategy.topology import runs_in_step, shard_bundles
from rayps.federated.remote_replies import untrained
from rayps.ps.protocol.space import SparseTable
from rayps.runtime.private.private_client_run import PrivateClientRun
from rayps.runtime.private.private_run import PrivateRun
from rayps.runtime.records.journal import Journal
from rayps.runtime.records.ledger_folder import LedgerFolder
from rayps.runtime.results.cost_report import CostReport, cost_report_of
from rayps.runtime.size.worker_changes import WorkerChanges
from rayps.strategies.job import JobSpec
from rayps.tensors.division import Division
from rayps.tensors.flat import Layout
from rayps.tensors.learning_rate import ScheduleRecord, Ticks
from rayps.tensors.named_tensors import StartPoint
from rayps.tensors.snapshot import Snapshot
from rayps.worker.plan import EvaluationPlan, Orders, PrivatePlan, SnapshotPlan
from rayps.workload.base import Workload

OPEN_CHECKPOINT_EVERY = 100  # default rounds between two snapshots if the rounds of an epoch are not known
FEDERATED_EPOCHS = 10  # default epochs between two snapshots of a federated strategy, whose epoch is only one round


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What is known of a run after its workload was checked."""

    phases: Sequence[Phase]
    calendar: Calendar
    divisions: Sequence[Division | None]  # one for each phase; None if a replica is one worker
    tables: tuple[SparseTable, ...]  # the model's tables
    schedule: ScheduleRecord  # the schedule of the learning rate
    changes: WorkerChanges  # what changes the workers
    mailbox: str | None = None  # the folder through which real clients send and receive; None if there are none
    start: StartPoint | None = None  # the first parameters, if a file has them
    ledger: LedgerFolder | None = None  # the folder of the ledger of private releases; None without privacy
    private: PrivateRun | None = None  # what the run spends; None unless rows are private
    private_clients: PrivateClientRun | None = None  # what the run spends; None unless clients are private

    def phase(self, number: int) -> PhaseRun:
        """Return the phase with this number, and its current rounds, which change if earlier phases end early."""
        return PhaseRun(self.phases[number], self.calendar.spans[number], self.divisions[number])

    def bundles_of_servers(self, workers: int) -> list[Bundle]:
        """Return the resources to reserve for each of the job's own servers; empty if no server needs a GPU."""
        return shard_bundles([phase.strategy for phase in self.phases], workers)

    def error_of_void_rounds(self) -> RaypsError | None:
        """Return the error of a run of real clients whose secure rounds were all void; None if there is none."""
        return untrained(self.mailbox)

    def limit_privacy(self, orders: Orders, number: int, at: int) -> Orders:
        """Return the orders of a generation of phase `number` after round `at`, with what the ledger and budget say."""
        if self.ledger is not None:
            orders = replace(orders, private=PrivatePlan(str(self.ledger.path)))
        return orders if self.private is None else self.private.limited(orders, number, at)

    def strategy_of(self, snapshot: Snapshot) -> StrategyView:
        """Return the strategy of the phase in which a state was taken: the last that begins at the state's origin."""
        began = [number for number, span in enumerate(self.calendar.spans) if span.begin <= snapshot.origin[0]]
        return self.phases[began[-1]].strategy

    def widest(self, workers: int) -> Grid:
        """Return the grid of the phase whose replicas have the most workers."""
        return max((phase.grid(workers) for phase in self.phases), key=lambda grid: grid.columns)


@dataclass(frozen=True, slots=True)
class PhaseRun:
    """A phase, its rounds, and how the model is divided in the phase.

    `division` is None if a replica is one worker.
    """

    phase: Phase
    span: PhaseSpan
    division: Division | None

    @property
    def end(self) -> int:
        """The round after which the phase ends."""
        return self.span.end

    @property
    def runs_in_step(self) -> bool:
        """Whether all workers end each round together."""
        return runs_in_step(self.phase.strategy)

    @property
    def _known_end(self) -> int | None:
        return None if self.end >= OPEN else self.end

    @property
    def name(self) -> str:
        """The name of the phase's strategy."""
        return self.phase.name

    def enter(self, snapshot: Snapshot, workers: int) -> None:
        """Adapt a snapshot to the number of workers and the strategy of this phase."""
        snapshot.enter_phase(self.span)
        snapshot.enter_strategy(self.name, workers)

    def end_by_stop_rule(self, journal: Journal, calendar: Calendar, at: int, reason: str) -> None:
        """End the phase after round `at`, because the strategy's stop rule is met, and report this as an event."""
        planned = "" if self.end >= OPEN else f" of {self.end}"
        journal.event("met", f"{self.name} ends after round {at}{planned}: {reason}", round=at, end=self._known_end)
        if planned and self.end == calendar.rounds:
            calendar.ends_early(reason)
        calendar.cut(self.end, at)

    def report_start(self, journal: Journal, now: int) -> None:
        """Report that the phase starts after round `now`."""
        until = "the data ends" if self.end >= OPEN else f"round {self.end}"
        message = f"training with {self.name} until {until}"
        journal.event("phase", message, round=now, end=self._known_end, strategy=self.name)
        if self.division is not None:
            journal.event("divided", self.division.describe(), columns=self.division.facts())

    def cost_report(self, workload: Workload, workers: int, layout: Layout) -> CostReport | None:
        """Return the CostReport of the phase's rounds, or None if its clients are real processes."""
        if has_remote_clients(self.phase.strategy):
            return None
        return cost_report_of(workload, self.phase.strategy, workers, self.division, layout)

    def orders(
        self, spec: JobSpec, generation: int, evaluated: int, mailbox: str | None = None, *, each: bool = False
    ) -> Orders:
        """Return the orders of a generation; `evaluated` is the last round whose evaluation is in the journal.

        `each`: a snapshot is taken after every evaluation, and workers wait for it.
        """
        every, begin = spec.checkpoint_every, self.span.begin
        each_epoch = each and spec.evaluate_every is None and self.span.steps >= OPEN
        each_boundary = each and not each_epoch
        if each_boundary:
            every = spec.evaluate_every
            boundary = Boundary(self.span.steps, self.end, begin) if every is None else Boundary(every, self.end)
        elif every is None:
            strategy = self.phase.strategy
            simulated = learns_by_client(strategy) and not has_remote_clients(strategy)
            epochs = FEDERATED_EPOCHS if simulated else 1  # a round of real clients is too expensive to repeat
            steps = OPEN_CHECKPOINT_EVERY if self.span.steps >= OPEN else self.span.steps * epochs
            boundary = Boundary(steps, self.end, begin)
        else:
            boundary = Boundary(every, self.end)
        return Orders(
            generation,
            self.phase.strategy,
            spec.seed,
            self.end,
            SnapshotPlan(boundary, each_boundary, each_epoch),
            EvaluationPlan(evaluated, spec.evaluate_every),
            spec.timeout,
            self.span.origin,
            self.division,
            mailbox,
            Ticks(self.span.origin, self.span.steps),
        )
