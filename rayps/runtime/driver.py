"""Run one job to its end: one loop over the states of `rayps.runtime.decide_recovery`.

    while not state.terminal:
        state = next_state(state, <result of the state's effect>)

Each state has one method here, which carries out its effect. The pure functions `next_state` and `decide` choose the
next state, and what to do about a failure.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import assert_never

from rayps.cluster.local import Cluster
from rayps.core.errors import RaypsError
from rayps.core.job_status import Status
from rayps.core.phase_rounds import Calendar
from rayps.core.records import ProgressRecord
from rayps.core.strategy import Phase
from rayps.core.strategy_families import RestartAll, has_remote_clients, learns_by_client
from rayps.core.topology import runs_in_step
from rayps.core.user_code import awaited
from rayps.core.user_module import pack
from rayps.federated.remote_replies import prepared
from rayps.runtime import decide_recovery as states
from rayps.runtime.decide_recovery import (
    Continue,
    Fail,
    Findings,
    Finish,
    Mend,
    Replace,
    Restart,
    RunFacts,
    decide,
    next_state,
    recovery_now,
)
from rayps.runtime.job_servers import space_of
from rayps.runtime.journal import Journal
from rayps.runtime.mending import Mender
from rayps.runtime.phases import PhaseRun, RunPlan
from rayps.runtime.preflight import PreflightFindings, Trial, TrialFacts, TrialRequest, preflight
from rayps.runtime.snapshots import Checkpointer
from rayps.runtime.status import Outcome, RunRecord
from rayps.runtime.worker_group import WorkerGroup
from rayps.strategies.catalogue import parse
from rayps.strategies.job import JobSpec
from rayps.tensors.learning_rate import ScheduleRecord, recipe_of
from rayps.worker.plan import WorkerFacts
from rayps.workload.base import Workload

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
LEAVE_SECONDS = 20.0  # seconds for a last checkpoint after a stop request; the service waits longer
EVALUATE_SECONDS = 600.0  # least seconds for an evaluation at the end of a phase


class Driver:
    """One job from start to end. `run()` blocks; `stop()` may be called from another thread."""

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
        """Prepare a driver; `name` is the name of the job, and of its space on a server group.

        `again`: whether an earlier driver of the job has died. `tries`: whether to try one batch in a child process
        while workers start (see `rayps.runtime.preflight`).
        """
        self.workload, self.spec, self.journal = workload, spec.check(), journal
        self.trial = Trial()
        self._phases = phases or parse(spec.strategy, spec.working_dir or Path.cwd())
        self._name, self._again = name or spec.name or f"job-{uuid.uuid4().hex[:8]}", again
        self._capture, self._tries = capture, tries
        self._stop = threading.Event()
        self._checkpoints = Checkpointer(spec, journal, checkpoints, resume)
        self._mender = Mender(journal, failures)
        self._record = RunRecord(journal, spec.workers, self._where)
        self._known: RunPlan | None = None  # set by the preflight
        self._started: WorkerGroup | None = None
        self._generation = 0
        self._metrics: dict[str, float] = {}  # metrics of the last evaluation
        self._requested = (0, 0.0)  # the last checkpoint after a stop: it must be newer than this round; its deadline

    def stop(self) -> None:
        """Request the end of the run; a last checkpoint is saved first if there is a folder for it."""
        self._stop.set()

    @property
    def saves(self) -> bool:
        """Whether there is a folder for checkpoints."""
        return self._checkpoints.folder is not None

    @property
    def status(self) -> Status:
        """The status of the run."""
        return self._record.status

    def preflight(self) -> bool:
        """Check data, model and optimizer before any worker starts; return False if a stop was requested meanwhile.

        Raises:
            DataError, WorkloadError, ConfigError: the user's code or an option is wrong; the text says how to fix it.
        """
        remote = any(has_remote_clients(phase.strategy) for phase in self._phases)
        mailbox = prepared(self.journal.folder) if remote else None
        find = partial(preflight, self.workload, self._phases, self.spec)
        found = awaited(find, self.spec.timeout, where="driver", stopped=self._stop.is_set)
        if found is None:
            return False
        for warning in found.warnings:
            self.journal.event("warning", warning)
        calendar = Calendar(
            self._phases, found.steps, self.spec.workers, epochs=self.spec.epochs, rounds=self.spec.steps
        )
        schedule = ScheduleRecord(recipe_of(self.workload))
        self._known = RunPlan(self._phases, calendar, found.divisions, found.tables, schedule, mailbox)
        self._record.begin(calendar)
        if self._tries:
            self._try_a_batch(found)
        return True

    def close(self) -> None:
        """End the child process that the preflight may have started; `run` calls this too."""
        self.trial.close()

    def run(self, cluster: Cluster) -> Outcome:
        """Run the job to its end. Errors of the run are not raised: they are in the outcome."""
        state: states.State = states.StartWorkers()
        try:
            while not state.terminal:
                state = self._step(state, cluster)
        finally:
            self.close()
            self._end_workers()
        return self._sealed(state)

    def _step(self, state: states.State, cluster: Cluster) -> states.State:
        """Carry out a state's effect and return the next state; an error ends the run."""
        try:
            return next_state(state, self._carry_out(state, cluster))
        except RaypsError as error:
            return states.RunEnded(Status.FAILED, str(error), error)
        except Exception as error:  # a bug of rayps must end the job with a reason, not only its thread
            log.exception("the driver failed")
            return states.RunEnded(Status.FAILED, f"rayps failed: {type(error).__name__}: {error}", error)

    def _carry_out(self, state: states.State, cluster: Cluster) -> Findings:
        match state:
            case states.StartWorkers():
                return self._start_workers(cluster)
            case states.EnterPhase(phase):
                return self._enter_phase(phase)
            case states.BeginGeneration():
                return self._begin_generation(state)
            case states.Train(phase):
                return self._train(self._plan.phase(phase))
            case states.Recover():
                return self._recover(state)
            case states.ReplaceMembers(_, decision):
                return self._replace_members(decision)
            case states.Evaluate(phase):
                return self._evaluate(self._plan.phase(phase))
            case states.RequestCheckpoint(phase):
                return self._request_checkpoint(self._plan.phase(phase))
            case states.AwaitCheckpoint(phase):
                return self._await_checkpoint(self._plan.phase(phase))
            case states.RunEnded():
                return Findings()
        assert_never(state)

    @property
    def _plan(self) -> RunPlan:
        assert self._known is not None, "call preflight() first"
        return self._known

    @property
    def _group(self) -> WorkerGroup:
        assert self._started is not None, "workers start first"
        return self._started

    # ---- the effects of states

    def _start_workers(self, cluster: Cluster) -> Findings:
        if self._known is None and not self.preflight():
            return Findings(stopped=True)
        self._record.say(Status.STARTING, "starting workers")
        self.trial.check()
        plan, spec = self._plan, self.spec
        strategies = [phase.strategy for phase in self._phases]
        space = space_of(cluster, spec, strategies, self._name, lambda: recipe_of(self.workload), plan.tables)
        if space is not None and self._again and not space.own:
            space.take_over()
        resources = {"cpu": 1.0} | spec.resources
        packed = pack(self.workload)
        group = WorkerGroup(
            cluster, packed, spec.workers, resources, spec.working_dir, capture=self._capture, space=space
        )
        self._started = group
        placed = group.start(spec.timeout, plan.widest(spec.workers), self.trial.check)
        if placed:
            self.journal.event("placed", placed)
        self.trial.end(self.journal)
        first = self._checkpoints.first(group, self.workload, plan)
        if self._checkpoints.resume is not None:
            # an earlier driver of this run may have died after it saved the checkpoint and before it evaluated the
            # state
            filed = self.journal.evaluated
            self._record.evaluated = first.round if filed is None else filed
        return Findings()

    def _enter_phase(self, number: int) -> Findings:
        plan, count = self._plan, len(self._phases)
        if number == count:
            if plan.tables and not self.saves and self._group.space is not None:
                self._checkpoints.tables = self._group.space.whole_tables()
            return Findings(phases=count)
        phase, snapshot = plan.phase(number), self._checkpoints.snapshot
        only_evaluate = phase.end == plan.calendar.rounds and self._generation == 0
        if snapshot.round >= phase.end and not only_evaluate:
            return Findings(phases=count, work=False)
        phase.enter(snapshot, self.spec.workers)
        phase.tell(self.journal, snapshot.round)
        self.journal.tally = phase.tally(self.workload, self.spec.workers, snapshot.layout)
        if runs_in_step(phase.phase.strategy):  # workers in step start from one position
            snapshot.align()
        return Findings(phases=count)

    def _begin_generation(self, state: states.BeginGeneration) -> Findings:
        phase = self._plan.phase(state.phase)
        self._generation += 1
        self._mender.begin()
        self._record.generation(self._generation, phase.name, mended=state.mending is not None)
        orders = phase.orders(self.spec, self._generation, self._record.evaluated, self._plan.mailbox)
        self._group.begin(orders, self._checkpoints.snapshot, state.mending)
        self._record.say(Status.RUNNING, "")
        return Findings()

    def _train(self, phase: PhaseRun) -> Findings:
        self._poll()
        decision = self._decided(self._facts(phase))
        if not isinstance(decision, (Fail, Replace)):
            self._collect()
        complete = False
        match decision:
            case Continue():
                self._stop.wait(POLL_SECONDS)
            case Finish():
                complete = self._checkpoints.round >= phase.end or self._meets_its_stop_rule()
                if complete:
                    self._end_generation(phase)
                else:
                    time.sleep(POLL_SECONDS / 4)
        return Findings(decision=decision, complete=complete)

    def _meets_its_stop_rule(self) -> bool:
        """Return whether the newest state is the one at which the strategy's stop rule was met."""
        at, group = self._checkpoints.round, self._group
        return group.met is not None and all(worker.facts.position == at for worker in group.workers)

    def _end_generation(self, phase: PhaseRun) -> None:
        """End the generation after the phase's last state, and write the remaining points of its rounds."""
        self._poll()
        self._record.end_generation()
        self._record.flush()
        self._mender.tell_cost()
        at, reason = self._checkpoints.round, self._group.met
        if reason is not None and at < phase.end:
            phase.met(self.journal, self._plan.calendar, at, reason)

    def _recover(self, state: states.Recover) -> Findings:
        decision, generation = state.decision, self._generation + 1
        self._record.end_generation()
        self._record.say(Status.RECOVERING, decision.reason)
        mending = self._mender.mend(self._group, decision, generation)
        if mending is not None:
            self._record.again(generation, mending.round)
            return Findings(mending=mending)
        self._record.flush()
        at = self._checkpoints.round
        what = "evaluate again" if state.evaluating else f"continue from round {at}"
        self._mender.restarted(decision, what, at, generation)
        return Findings()

    def _replace_members(self, decision: Replace) -> Findings:
        self._record.say(Status.RECOVERING, decision.reason)
        self._mender.begin()
        self._mender.replace(self._group, decision, self._checkpoints.snapshot)
        self._record.say(Status.RUNNING, "")
        return Findings()

    def _evaluate(self, phase: PhaseRun) -> Findings:
        snapshot = self._checkpoints.snapshot
        metrics = self._group.evaluate(snapshot, timeout=max(EVALUATE_SECONDS, self.spec.timeout))
        if metrics is None:
            facts = replace(self._facts(phase), recovery=RestartAll())
            return Findings(decision=self._decided(facts))
        point = {"kind": "evaluation", "round": snapshot.round, "time": time.time(), "metrics": metrics}
        self._record.file([point])
        self.journal.reckon()
        self._metrics = metrics
        return Findings()

    def _request_checkpoint(self, phase: PhaseRun) -> Findings:
        if not self.saves or has_remote_clients(phase.phase.strategy):  # a round of real clients may take hours
            return Findings()
        self._record.say(Status.STOPPING, "saving a checkpoint")
        self._group.hurry()
        self._requested = self._checkpoints.round, time.monotonic() + LEAVE_SECONDS
        return Findings(saving=True)

    def _await_checkpoint(self, phase: PhaseRun) -> Findings:
        """Check once for the requested checkpoint; after the deadline the run ends with the previous checkpoint."""
        before, deadline = self._requested
        self._poll()
        facts = self._facts(phase)
        if facts.dead or facts.errors:
            return Findings()
        self._collect()
        if self._checkpoints.round != before or time.monotonic() > deadline:
            return Findings()
        time.sleep(POLL_SECONDS / 4)
        return Findings(saving=True)

    # ---- shared by the effects

    def _poll(self) -> None:
        group = self._group
        points = group.poll()
        for point in points:
            # for the generations and the runs that continue from this snapshot
            self._checkpoints.snapshot.record_ring_choices(point)
        self._record.take_in(group, points)
        self._mender.look(group, self._generation)
        self._record.show()

    def _collect(self) -> None:
        self._checkpoints.collect(self._group, self._plan, self._generation)

    def _decided(self, facts: RunFacts) -> states.Decision:
        decision = decide(facts)
        if isinstance(decision, (Restart, Mend, Replace)):
            self._mender.failures += 1
        return decision

    def _facts(self, phase: PhaseRun) -> RunFacts:
        """Return the facts of the last poll."""
        group, mender = self._group, self._mender
        workers = [(w.name, w.facts) for w in group.workers if isinstance(w.facts, WorkerFacts)]
        current = [(name, f) for name, f in workers if f.generation == self._generation]
        errors = tuple((name, f.error) for name, f in current if f.status == "failed" and f.error is not None)
        dead = tuple((m.name, m.dead) for m in group.members if m.dead)
        mender.saw(errors=bool(errors), dead=bool(dead))
        return RunFacts(
            size=self.spec.workers,
            finished=frozenset(name for name, f in current if f.status == "finished"),
            errors=errors,
            dead=dead,
            failures=mender.failures,
            max_failures=self.spec.max_failures,
            broken_for=mender.broken_for,
            recovery=recovery_now(
                phase.phase.strategy.recovery, holds_tables=group.holds_tables, rejoins=mender.may_replace(group)
            ),
            stop=self._stop.is_set(),
            at={name: f.position for name, f in current},
        )

    def _where(self) -> tuple[int, ProgressRecord]:
        facts: ProgressRecord = {"generation": self._generation, "failures": self._mender.failures}
        return self._checkpoints.round, facts

    def _try_a_batch(self, found: PreflightFindings) -> None:
        """Try one batch in a child process while workers start."""
        strategies, packed = [phase.strategy for phase in self._phases], pack(self.workload)
        model, data = found.sizes
        facts = TrialFacts(
            all(map(has_remote_clients, strategies)),
            any(division is not None for division in found.divisions),
            self.spec.resources.get("gpu", 0.0),
            model,
            len(packed),
            data,
        )
        first = strategies[0]
        size, path = first.grid(self.spec.workers).data, tuple(sys.path)
        request = TrialRequest(packed, size, self.spec.seed, learns_by_client(first), self.spec.working_dir, path)
        self.trial.begin(facts, request)

    # ---- the end

    def _end_workers(self) -> None:
        if self._started is not None:
            self.journal.lines(self._started.lines())
            self._record.tell(self._started, over=True)
            self._started.close()

    def _sealed(self, state: states.State) -> Outcome:
        """Write the outcome, once."""
        assert isinstance(state, states.RunEnded)
        outcome = Outcome(state.status, state.reason, snapshot=self._checkpoints.newest)
        if state.status is Status.SUCCEEDED:
            outcome.metrics, outcome.tables = self._metrics, self._checkpoints.tables
        elif state.status is Status.STOPPED:
            outcome.message = self._stopped()
        else:
            outcome.error = state.error
        outcome.checkpoint = self._checkpoints.saved
        kind = {Status.SUCCEEDED: "finished", Status.STOPPED: "stopped"}.get(outcome.status, "failed")
        self.journal.event(kind, outcome.message, metrics=outcome.metrics)
        self._record.say(outcome.status, outcome.message)
        self.journal.seal(outcome.to_dict())
        return outcome

    def _stopped(self) -> str:
        saved = self._checkpoints.saved
        if self._known is None:
            return f"stopped on request before it started: {f'{saved} is kept' if saved else 'nothing was saved'}"
        at = self._record.reached(self._checkpoints.round)
        return f"stopped on request at round {at} of {self._known.calendar.rounds}: {self._checkpoints.kept(at)}"
