"""Keeps one job alive until it ends: phases, generations, checkpoints, recovery.

The driver decides nothing itself: `decide` does; it polls the group, writes the journal and carries out.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import uuid
from dataclasses import replace
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

from rayps.cluster.local import Cluster
from rayps.core.calendar import Calendar
from rayps.core.errors import RaypsError, TrainingError
from rayps.core.job import Status
from rayps.core.metrics import Point, Rounds
from rayps.core.strategy import Phase
from rayps.federated.remote.remote_replies import prepared
from rayps.ps.job_space import JobSpace
from rayps.ps.protocol.space import SparseTable
from rayps.runtime.decide import Continue, Fail, Finish, Mend, Replace, Restart, Stop, decide
from rayps.runtime.decide import RunFacts as RunFacts
from rayps.runtime.initial_state import InitialState, maker, space_of
from rayps.runtime.journal import Journal
from rayps.runtime.mending import Mender
from rayps.runtime.outcome import Outcome
from rayps.runtime.phase import PhaseRun
from rayps.runtime.preflight import PreflightFindings, preflight
from rayps.runtime.report import ProgressReport
from rayps.runtime.server_events import ServerEvents
from rayps.runtime.status import RunStatus
from rayps.runtime.time_limit import awaited
from rayps.runtime.trial import Trial
from rayps.runtime.trial import TrialFacts as TrialFacts
from rayps.runtime.trial_process import TrialRequest
from rayps.runtime.worker_actor import WorkerFacts
from rayps.runtime.worker_group import WorkerGroup
from rayps.strategies.catalogue import parse
from rayps.strategies.job import JobSpec
from rayps.tensors import checkpoint
from rayps.tensors.learning_rate import ScheduleRecord, Ticks, recipe_of
from rayps.tensors.snapshot import Snapshot
from rayps.workload.base import Workload, pack
from rayps.workload.model import drawn_apart

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
LEAVE_SECONDS = 20.0  # for a last checkpoint after a stop; the service waits longer than that


class _StoppedByUser(Exception):
    pass


class Driver:
    """One job from start to end. `run()` blocks; `stop()` may come from another thread."""

    def __init__(
        self,
        workload: Workload,
        spec: JobSpec,
        journal: Journal,
        *,
        checkpoints: Path | None = None,
        resume: Path | None = None,
        capture: bool = True,
        phases: list[Phase] | None = None,
        failures: int = 0,
        name: str | None = None,
        again: bool = False,
        tries: bool = False,
    ) -> None:
        """`name` is that of the job, and of its space on a server group. `again`: an earlier driver of it has died.
        `tries`: one batch is tried in a process of its own while workers start, see `rayps.runtime.trial`.
        """
        self.workload, self.spec, self.journal = workload, spec.check(), journal
        self.phases = phases or parse(spec.strategy)
        self._checkpoints, self._resume, self._capture = checkpoints, resume, capture
        self._calendar: Calendar | None = None  # known after the preflight, as are
        self._legs: list[PhaseRun] = []
        self._name, self._again = name or spec.name or f"job-{uuid.uuid4().hex[:8]}", again
        self._tables: tuple[SparseTable, ...] = ()  # of the model
        self._mailbox: str | None = None  # of real clients
        self._schedule = ScheduleRecord(workload.optimizer)  # with its schedule, after the preflight
        self._news = ServerEvents()
        self._stop = threading.Event()
        self._failures = failures  # of the whole job, whatever drivers it had
        self._generation = 0
        self._snapshot: Snapshot | None = None  # the newest state that a restart can begin from
        self._saved: Path | None = resume
        self._report = ProgressReport()
        self._standing = RunStatus(journal, self._report, self._where)
        self._broken_since: float | None = None
        self._mender = Mender(journal)
        self._evaluated = 0  # the last round whose evaluation is filed
        self.trial, self._tries = Trial(), tries

    def stop(self) -> None:
        """Ask the run to end, with a last checkpoint where there is a folder for it."""
        self._stop.set()

    @property
    def saves(self) -> bool:
        """Whether there is a folder for checkpoints."""
        return self._checkpoints is not None

    @property
    def status(self) -> Status:
        """Where the run stands."""
        return self._standing.status

    def run(self, cluster: Cluster) -> Outcome:
        """Run the job to its end; never raises for what went wrong in the run, says it in the outcome."""
        group: WorkerGroup | None = None
        try:
            if self._calendar is None:
                self.preflight()
            self._standing.say(Status.STARTING, "starting workers")
            self.trial.check()
            group = WorkerGroup(
                cluster,
                pack(self.workload),
                self.spec.workers,
                {"cpu": 1.0} | self.spec.resources,
                self.spec.working_dir,
                self._capture,
                space=self._space(cluster),
            )
            grids = [leg.phase.strategy.grid(self.spec.workers) for leg in self._legs]
            placed = group.start(self.spec.timeout, max(grids, key=lambda grid: grid.columns), self.trial.check)
            if placed:
                self.journal.event("placed", placed)
            self.trial.end(self.journal)
            outcome = Outcome(Status.SUCCEEDED, "trained to the end", self._run_phases(group))
            if self._tables and self._checkpoints is None and group.space is not None:
                outcome.tables = group.space.whole_tables()
        except _StoppedByUser:
            outcome = Outcome(Status.STOPPED, self._stopped())
        except RaypsError as error:
            outcome = Outcome(Status.FAILED, str(error), error=error)
        except Exception as error:  # a fault of ours must end the job with a reason, not vanish with its thread
            log.exception("the driver failed")
            outcome = Outcome(Status.FAILED, f"rayps failed: {type(error).__name__}: {error}", error=error)
        finally:
            self.close()
            if group is not None:
                self.journal.lines(group.lines())
                self._tell(group, over=True)
                group.close()
        outcome.snapshot, outcome.checkpoint = self._snapshot, self._saved
        self._seal(outcome)
        return outcome

    def preflight(self) -> None:
        """Find what is wrong with data, model and optimizer before any worker starts.

        Raises:
            DataError, WorkloadError, ConfigError: what is wrong and the way out.
        """
        self._mailbox = prepared(self.phases, self.journal.folder)
        find = partial(preflight, self.workload, self.phases, self.spec)
        found = awaited(find, self.spec.timeout, where="driver", stopped=self._stop.is_set)
        if found is None:
            raise _StoppedByUser
        for warning in found.warnings:
            self.journal.event("warning", warning)
        self._tables, self._schedule = found.tables, ScheduleRecord(recipe_of(self.workload))
        self._calendar = self._report.calendar = Calendar(
            self.phases, found.steps, self.spec.workers, epochs=self.spec.epochs, rounds=self.spec.steps
        )
        self._legs = list(starmap(PhaseRun, zip(self.phases, self._calendar.spans, found.divisions, strict=True)))
        if self._tries:
            self._try(found)

    def close(self) -> None:
        """End what a preflight has begun, where no run follows."""
        self.trial.close()

    def _try(self, found: PreflightFindings) -> None:
        """Let one batch be tried while workers start."""
        strategies, packed = [phase.strategy for phase in self.phases], pack(self.workload)
        model, data = found.sizes
        facts = TrialFacts(
            all(strategy.rows.remote for strategy in strategies),
            any(division is not None for division in found.divisions),
            self.spec.resources.get("gpu", 0.0),
            model,
            len(packed),
            data,
        )
        first = strategies[0]
        size, federated = first.grid(self.spec.workers).data, first.rows.by_client
        self.trial.begin(
            facts, TrialRequest(packed, size, self.spec.seed, federated, self.spec.working_dir, tuple(sys.path))
        )

    @property
    def calendar(self) -> Calendar:
        """The rounds and epochs of the phases."""
        assert self._calendar is not None, "preflight() comes first"
        return self._calendar

    def _space(self, cluster: Cluster) -> JobSpace | None:
        """This job's place on a server group, if it needs one."""
        strategies = [phase.strategy for phase in self.phases]
        space = space_of(cluster, self.spec, strategies, self._name, lambda: recipe_of(self.workload), self._tables)
        if space is not None and self._again and not space.own:
            space.take_over()
        return space

    # ---- phases and generations

    def _run_phases(self, group: WorkerGroup) -> dict[str, float]:
        """All phases from the first snapshot; gives the final metrics."""
        # what no worker could hold whole is drawn here
        draw = partial(drawn_apart, self.workload) if any(leg.division for leg in self._legs) else None
        begin = InitialState(self.spec, self._resume, self.calendar, draw, self._schedule)
        self._snapshot, metrics = begin.snapshot(group, self.phases[0].strategy, self.journal), dict[str, float]()
        checkpoint.must_be_finite(self._snapshot.to_state(), "before the first round")
        if begin.resumed:
            # an earlier driver of this very run may have died before the evaluation that belongs to the checkpoint
            self._evaluated = self._snapshot.round if self.journal.evaluated is None else self.journal.evaluated
        for number in range(len(self._legs)):
            leg = replace(self._legs[number], span=self.calendar.spans[number])  # earlier ones may have ended early
            nothing_left = leg.end == self.calendar.rounds and self._generation == 0  # the workers only evaluate
            if self._snapshot.round < leg.end or nothing_left:
                leg.enter(self._snapshot, self.spec.workers)
                leg.tell(self.journal, self._snapshot.round)
                self.journal.tally = leg.tally(self.workload, self.spec.workers, self._snapshot.layout)
                self._run_phase(group, leg)
                if group.met is not None and self._snapshot.round < leg.end:
                    leg = leg.met(self.journal, self.calendar, self._snapshot.round, group.met)
                metrics = self._evaluate(group, leg)
                self.journal.reckon()
        return metrics

    def _run_phase(self, group: WorkerGroup, leg: PhaseRun) -> None:
        assert self._snapshot is not None
        phase, end = leg.phase, leg.end
        if phase.strategy.topology.in_step:  # such a phase begins in step, also after one that was not
            self._snapshot.align()
        rounds, mending = Rounds(self.spec.workers, 0, phase.strategy.name), None
        while True:
            self._generation += 1
            self._broken_since, rounds.generation = None, self._generation
            orders = leg.orders(self.spec, self._generation, self._evaluated, self._mailbox)
            group.begin(orders, self._snapshot, mending)
            self._standing.say(Status.RUNNING, "")
            broken = self._watch(group, rounds, phase, end)
            self._report.begin_again()
            if broken is not None:
                self._standing.say(Status.RECOVERING, broken.reason)
                mending = self._mender.mend(group, broken, rounds, self._generation + 1)
            if broken is None or mending is None:
                self._file(rounds.flush())
            if broken is None:
                self._mender.tell_cost()
                return
            if mending is None:
                rounds = Rounds(self.spec.workers, 0, phase.strategy.name)
                at = self._snapshot.round
                self._mender.restarted(broken, f"goes on from round {at}", at, self._generation + 1)

    def _watch(self, group: WorkerGroup, rounds: Rounds, phase: Phase, end: int) -> Restart | Mend | None:
        """Poll until the generation ends; None = it reached `end`, else everyone must begin again."""
        while True:
            self._take_in(group, rounds)
            decision = decide(self._facts(group, phase))
            match decision:
                case Continue():
                    self._collect(group)
                    self._stop.wait(POLL_SECONDS)
                case Finish():
                    self._collect(group)
                    if self._snapshot is not None and (self._snapshot.round >= end or self._over(group)):
                        self._take_in(group, rounds)
                        return None
                    time.sleep(POLL_SECONDS / 4)
                case Stop():
                    self._collect(group)
                    self._save_on_leaving(group, rounds, phase)
                    raise _StoppedByUser
                case Fail(error, reason):
                    raise error if isinstance(error, RaypsError) else TrainingError(reason)
                case Restart() | Mend():
                    self._failures += 1
                    self._collect(group)
                    return decision
                case Replace():
                    self._failures += 1
                    self._replace(group, decision)

    def _over(self, group: WorkerGroup) -> bool:
        """Whether the newest state is that at which the strategy has met its stop rule."""
        assert self._snapshot is not None
        facts = [worker.facts for worker in group.workers]
        return group.met is not None and all(f.position == self._snapshot.round for f in facts)

    def _save_on_leaving(self, group: WorkerGroup, rounds: Rounds, phase: Phase) -> None:
        """A last checkpoint, of a round that everyone reaches soon; where it takes too long, the one before stays."""
        if (
            self._checkpoints is None or self._snapshot is None or phase.strategy.rows.remote
        ):  # nobody waits for clients
            return
        self._standing.say(Status.STOPPING, "saving a checkpoint")
        group.hurry()
        before, deadline = self._snapshot.round, time.monotonic() + LEAVE_SECONDS
        while self._snapshot.round == before and time.monotonic() < deadline:
            self._take_in(group, rounds)
            facts = self._facts(group, phase)
            if facts.dead or facts.errors:
                return
            self._collect(group)
            time.sleep(POLL_SECONDS / 4)

    def _replace(self, group: WorkerGroup, decision: Replace) -> None:
        assert self._snapshot is not None
        self._standing.say(Status.RECOVERING, decision.reason)
        self._broken_since = None
        self._mender.replace(group, decision, self._snapshot)
        self._standing.say(Status.RUNNING, "")

    def _facts(self, group: WorkerGroup, phase: Phase) -> RunFacts:
        workers = [(w.name, w.facts) for w in group.workers if isinstance(w.facts, WorkerFacts)]
        current = [(name, f) for name, f in workers if f.generation == self._generation]
        errors = tuple((name, f.error) for name, f in current if f.status == "failed" and f.error is not None)
        dead = tuple((m.name, m.dead) for m in group.members if m.dead)
        at = {name: f.position for name, f in current}
        self._mender.saw(bool(errors or dead))
        if errors and self._broken_since is None:
            self._broken_since = time.monotonic()
        return RunFacts(
            size=self.spec.workers,
            finished=frozenset(name for name, f in current if f.status == "finished"),
            errors=errors,
            dead=dead,
            failures=self._failures,
            max_failures=self.spec.max_failures,
            broken_for=0.0 if self._broken_since is None else time.monotonic() - self._broken_since,
            lockstep=phase.strategy.topology.in_step and not group.holds_tables and not self._mender.may_replace(group),
            stop=self._stop.is_set(),
            at=at,
            mends=group.mends,
        )

    # ---- what is recorded

    def _take_in(self, group: WorkerGroup, rounds: Rounds) -> None:
        found = group.poll()
        for point in found:
            if self._snapshot is not None:
                self._snapshot.hear(point)  # also for the generations and the runs that go on from here
        points = self.journal.choices(found)
        self._report.hear(points)
        self._news.hear(points)
        self._tell(group)
        self._file(rounds.add(points))
        self.journal.lines(group.lines())
        self._report.look(group, rounds.strategy)
        self._mender.look(group, self._generation)
        for name, count in self._report.newly_lost(group):
            self.journal.event("lost", f"{name} lacks {count} pushes: the workers kept them no more", pushes=count)
        self._standing.show()

    def _tell(self, group: WorkerGroup, over: bool = False) -> None:
        """File what happened to the server group."""
        if group.space is not None:
            if over:
                group.space.look()
            for event in self._news.tell(group.space.news(), over):
                self.journal.event(**event)

    def _file(self, merged: list[Point]) -> None:
        for point in merged:
            point.setdefault("epoch", self.calendar.epoch_of(max(point["round"] - 1, 0)))
            if point["kind"] == "evaluation":
                self._evaluated = point["round"]
            if point.get("missing"):
                lost = ", ".join(f"worker-{rank}" for rank in point["missing"])
                which = f"the evaluation after round {point['round']}"
                self.journal.event("warning", f"{which} lacks the rows of {lost}, which died before it was heard")
        self._report.file(merged)
        self.journal.add(merged)

    def _collect(self, group: WorkerGroup) -> None:
        assert self._snapshot is not None
        newer = group.collect(self._snapshot)
        if newer is None:
            return
        ticks = Ticks(newer.origin, newer.steps_per_epoch)
        schedule = self._schedule.facts(newer.layout, newer.round, ticks)
        state = newer.to_state(generation=self._generation, **maker(self.spec), **schedule)
        checkpoint.must_be_finite(state, f"after round {newer.round - 1}", round=newer.round - 1)
        self._snapshot = newer
        if self._checkpoints is not None:
            beside = group.space.write_tables(newer.round) if group.space is not None else group.vault.beside
            self._saved = checkpoint.save(self._checkpoints, newer.round, state, beside=beside)
            if group.space is not None:
                group.space.tables_kept(self._saved / checkpoint.TABLES)
            self.journal.event("checkpoint", f"saved round {newer.round}", round=newer.round, path=str(self._saved))
        group.saved(newer)

    def _evaluate(self, group: WorkerGroup, leg: PhaseRun) -> dict[str, float]:
        """Evaluate the end of a phase; who dies meanwhile is replaced as in training, and all evaluate again."""
        while True:
            assert self._snapshot is not None
            metrics = group.evaluate(self._snapshot, timeout=max(600.0, self.spec.timeout))
            if metrics is not None:
                break
            match decide(replace(self._facts(group, leg.phase), lockstep=True, mends=False)):
                case Restart() as restart:
                    self._failures += 1
                    self._standing.say(Status.RECOVERING, restart.reason)
                    self._mender.restarted(restart, "evaluates again", self._snapshot.round, self._generation + 1)
                case Fail(_, reason):
                    raise TrainingError(reason)
                case _:
                    raise _StoppedByUser
            self._run_phase(group, leg)
        self._file([{"kind": "evaluation", "round": self._snapshot.round, "time": time.time(), "metrics": metrics}])
        return metrics

    def _stopped(self) -> str:
        if self._calendar is None:
            kept = f"{self._saved} is kept" if self._saved else "nothing was kept"
            return f"stopped on request before it began: {kept}"
        saved = self._snapshot.round if self._snapshot else 0
        at = self._report.reached(saved)
        kept = "nothing was kept"
        if self._checkpoints is not None and self._saved:
            kept = f"{self._saved} is kept" + (f", of round {saved}" if saved < at else "")
        return f"stopped on request at round {at} of {self.calendar.rounds}: {kept}"

    def _where(self) -> tuple[int, dict[str, Any]]:
        done = self._snapshot.round if self._snapshot else 0
        return done, {"generation": self._generation, "failures": self._failures}

    def _seal(self, outcome: Outcome) -> None:
        kind = {Status.SUCCEEDED: "finished", Status.STOPPED: "stopped"}.get(outcome.status, "failed")
        self.journal.event(kind, outcome.message, metrics=outcome.metrics)
        self._standing.say(outcome.status, outcome.message)
        self.journal.seal(outcome.to_dict())
