"""A job of a workload, as its driver runs it: rayps runs the rounds of a strategy on the workers and servers.

The driver decides (`rayps.runtime.driver.driver`); each method here carries out one moment of the run.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rayps_client import parameters
from rayps_client.errors import RaypsError

from rayps.cluster.code_folder import JobCode
from rayps.cluster.local import Cluster
from rayps.core.job.job_status import Status
from rayps.core.job.records import Point, ProgressRecord
from rayps.core.strategy.strategy import Phase
from rayps.core.strategy.strategy_families import Recovery, RestartAll, has_remote_clients, learns_by_client
from rayps.core.urls import Location
from rayps.runtime.checks.preflight import PreflightFindings
from rayps.runtime.checks.trial import Trial
from rayps.runtime.driver.bound_mover import BoundMover
from rayps.runtime.driver.decide_recovery import (
    BeginGeneration,
    Continue,
    Decision,
    EndEarly,
    Fail,
    Findings,
    Finish,
    Recover,
    RecoveryFacts,
    Regroup,
    Replace,
    Restart,
    RunEnded,
    RunFacts,
    choose_recovery,
    death_of,
)
from rayps.runtime.driver.driven_job import DrivenJob, JobRun
from rayps.runtime.driver.last_checkpoint import LastCheckpoint, count_repeated_rounds
from rayps.runtime.driver.make_group import make_group
from rayps.runtime.driver.phases import PhaseRun, RunPlan
from rayps.runtime.driver.prepare_run import prepare_run, trial_of
from rayps.runtime.driver.recover import RecoveryExecutor
from rayps.runtime.driver.worker_group import WorkerGroup, WorkerProcess
from rayps.runtime.records.journal import Journal
from rayps.runtime.records.status import Outcome, RunRecord
from rayps.runtime.results.callbacks import CallbackRunner, RunHandle, runner_of
from rayps.runtime.results.snapshots import Checkpointer
from rayps.runtime.size.gather_workers import GatheredWorkers
from rayps.runtime.size.job_size import Allowance
from rayps.strategies.catalogue import parse
from rayps.strategies.job import JobSpec
from rayps.workload.base import Workload
from rayps.workload.callback import Callback

POLL_SECONDS = 0.1
STOPPING_SECONDS = 0.005  # seconds between two polls while workers stop to change their number
EVALUATE_SECONDS = 600.0  # the smallest time limit, in seconds, of an evaluation at the end of a phase


class WorkloadJob(DrivenJob):
    """A job of a workload, with one strategy or several in succession."""

    def __init__(
        self,
        workload: Workload,
        spec: JobSpec,
        journal: Journal,
        *,
        checkpoints: Location | None = None,
        resume: Location | None = None,
        capture: bool = True,
        phases: list[Phase] | None = None,
        failures: int = 0,
        name: str | None = None,
        again: bool = False,
        tries: bool = False,
        profile: Path | None = None,
        callbacks: Sequence[Callback] | None = (),
        code: JobCode | None = None,
        evaluation_batches: int | None = None,
    ) -> None:
        """Prepare a job; `name` is the name of the job, and of its space on a server group.

        `checkpoints` is the folder for checkpoints, and `resume` the checkpoint to start from. `capture`: whether the
        workers' output becomes log lines. `failures`: the failures under earlier drivers of the job. `again`: whether
        an earlier driver of the job has died. `tries`: whether to try one batch in a child process while workers start
        (see `rayps.runtime.checks.trial`). `profile` is the folder for traces of a few rounds; None if there are
        none. `callbacks` are called in addition to those of the workload; if they are None, no callback is called.
        `code`: what the workers import the user's modules from, unless it is the folder `spec.working_dir`.
        `evaluation_batches`: the most batches that each worker evaluates; None means all.
        """
        spec = spec.check()
        self.workload = workload
        self.trial = Trial()
        self._phases = phases or parse(spec.strategy, spec.working_dir or Path.cwd())
        self._name, self._again = name or spec.name or f"job-{uuid.uuid4().hex[:8]}", again
        self._process, self._tries = WorkerProcess(code or JobCode.of_caller(spec.working_dir), capture), tries
        self._params = parameters.effective(workload)
        handle = RunHandle(self._name, spec, self._params, journal, checkpoints)
        self._callbacks = (
            CallbackRunner([], handle, spec.timeout)
            if callbacks is None
            else runner_of(callbacks, workload, handle, spec.timeout)
        )
        self._evaluation_batches = evaluation_batches
        self._checkpoints = Checkpointer(spec, journal, checkpoints, resume, self._callbacks, workload)
        record = RunRecord(journal, spec.workers, self._read_round_and_facts, self._callbacks.deliver)
        self.run = JobRun(spec, journal, record, failures)
        self._recoveries = RecoveryExecutor(journal, self.run.failures)
        record.trace_into(profile)
        self._bound = BoundMover(journal)
        self._known: RunPlan | None = None  # set by the preflight
        self._allowance = Allowance(spec.most_workers)
        self._started: WorkerGroup | None = None
        self._last: LastCheckpoint | None = None  # after a stop request

    def allow(self, workers: int, reason: str) -> None:
        """Set the number of workers that an elastic job may have from now on. Any thread may call it."""
        self._allowance.set(workers, reason)

    @property
    def saves(self) -> bool:
        """Whether there is a folder for checkpoints."""
        return self._checkpoints.folder is not None

    def preflight(self) -> bool:
        """Check data, model and optimizer before any worker starts. Return False if a stop is requested before the end.

        Raises:
            DataError, WorkloadError, ConfigError: the user's code or an option is wrong; the text says how to fix it.
        """
        params = None if self._again else self._params
        prepared = prepare_run(self.workload, self._phases, self.run, self._checkpoints, self._allowance, params)
        if prepared is None:
            return False
        found, self._known = prepared
        calendar = self._known.calendar
        if (note := self._callbacks.check_folder(self.run.spec, calendar)) is not None:
            self.run.journal.event("warning", note)
        self.run.record.set_calendar(calendar)
        if self._tries:
            self._try_a_batch(found)
        return True

    def close(self) -> None:
        """End the child process that the preflight may have started, and let other runs use a shared ledger."""
        self.trial.close()
        if self._known is not None and self._known.ledger is not None:
            self._known.ledger.release()

    @property
    def _plan(self) -> RunPlan:
        assert self._known is not None, "call preflight() first"
        return self._known

    @property
    def _group(self) -> WorkerGroup:
        assert self._started is not None, "workers start first"
        return self._started

    # ---- the effects of states

    def start(self, cluster: Cluster) -> RunFacts | None:
        """Start the servers of the job's group, if it has one, and all workers, and find the first state."""
        self.trial.check()
        try:
            self._start_group(cluster)
        except RaypsError as error:
            died = death_of(error)
            if died is None:
                raise
            started, self._started = self._started, None
            if started is not None:
                started.close()
            return self._collect_facts_of_start((died,), {died[0]: str(error.data.get("output", ""))})
        plan, first = self._plan, self._checkpoints.round
        plan.changes.begin(self._group, {"cpu": 1.0} | self.run.spec.resources)
        if self._checkpoints.resume is not None:
            # an earlier driver may have died after it saved this checkpoint and before it evaluated the state
            known = self.run.journal.evaluated
            self.run.record.evaluated = self._callbacks.known(first) if known is None else known
        self._callbacks.start(first, plan.calendar.epoch_of(first))
        earlier = self.run.journal.earlier_points()
        self._callbacks.deliver_earlier(earlier, first)
        self.run.record.times.continues(earlier)
        if self._callbacks.may_end(first):  # an earlier driver has died between the stop and the end
            self._end_early()
        return None

    def _start_group(self, cluster: Cluster) -> None:
        """Start the servers of the job's group, if it has one, and all workers, and find the first state."""
        plan, spec = self._plan, self.run.spec
        again = self._again
        group = self._started = make_group(cluster, self.workload, spec, plan, self._process, self._name, again=again)
        servers = plan.bundles_of_servers(spec.workers)
        placed = group.start(spec.timeout, plan.widest(spec.workers), self.trial.check, servers=servers)
        if placed:
            self.run.journal.event("placed", placed)
        self.trial.end(self.run.journal)
        self._checkpoints.first(group, self.workload, plan, again=again)

    def _collect_facts_of_start(self, dead: tuple[tuple[str, str], ...], outputs: dict[str, str]) -> RunFacts:
        self._recoveries.record_failures(errors=False, dead=True)
        return self.run.facts_of_start(dead, outputs)

    def _end_early(self, *, agreed: bool = False) -> None:
        """End all phases at the newest state, because a callback has stopped the run.

        If the workers' parameters differ, and it is not the `agreed` state at a phase's end, one more round is run,
        after which they agree.
        """
        snapshot, calendar = self._checkpoints.snapshot, self._plan.calendar
        rounds = calendar.rounds
        end = min(snapshot.round + (bool(snapshot.own) and not agreed), rounds)
        run = self._callbacks.run
        if end < rounds:
            early = calendar.ends_early(str(run.stop_reason))
            self.run.journal.event("ended_early", early.message(end), round=end, rounds=rounds)
        elif run.stop_round < snapshot.round:
            self.run.journal.event(
                "warning",
                f"a callback stopped the run at round {run.stop_round} ({run.stop_reason}), but the workers had "
                f"trained to the end, round {rounds}, before the driver knew: with a rayps.BestCheckpoint beside it, "
                "workers wait for the driver at evaluations",
            )
        calendar.end_at(end)
        self.run.record.end_generation()
        self.run.record.flush()
        self._callbacks.end_at(end)

    def enter_phase(self, number: int) -> Findings:
        """Enter a phase: adapt the newest state to it, and report its start."""
        plan, count = self._plan, len(self._phases)
        if number == count:
            if plan.tables and not self.saves and self._group.space is not None:
                self._checkpoints.tables = self._group.space.whole_tables()
            return Findings(phases=count)
        phase, snapshot = plan.phase(number), self._checkpoints.snapshot
        only_evaluate = phase.end == plan.calendar.rounds and self.run.generation == 0
        if snapshot.round >= phase.end and not only_evaluate:
            return Findings(phases=count, work=False)
        workers = self._group.slots or self._group.size
        plan.changes.enter_phase(snapshot, phase.span)
        phase.enter(snapshot, workers)
        phase.report_start(self.run.journal, snapshot.round)
        if plan.private is not None:
            plan.private.report_start(number, phase.span, snapshot.round)
        self.run.journal.cost_report = phase.cost_report(self.workload, workers, snapshot.layout)
        if phase.runs_in_step:  # workers in step start from one position
            snapshot.align()
        return Findings(phases=count)

    def begin_generation(self, state: BeginGeneration) -> Findings | RunFacts:
        """Start a generation on every member, when the job has the workers that it needs."""
        changes, group = self._plan.changes, self._group
        gathered = self._gather(state)
        continues = gathered.continues
        if gathered.waits or gathered.ends:
            group.end_leavers()
            return Findings(stopped=gathered.ends, waiting=True, continues=continues)
        strategy = self._phases[state.phase].strategy
        changes.begin_generation(strategy, self._checkpoints.snapshot, group, continues)
        phase = self._plan.phase(state.phase)
        self.run.generation += 1
        self._recoveries.clear_error()
        repeats = continues is not None and continues.keeps_places
        self.run.record.begin_generation(self.run.generation, phase.name, continues=repeats, pushes=changes.pushes)
        each = self.saves and self._callbacks.each_evaluation and changes.evaluates_in_step
        known = self.run.record.evaluated
        orders = phase.orders(self.run.spec, self.run.generation, known, self._plan.mailbox, each=each)
        orders = replace(orders, evaluation=replace(orders.evaluation, batches=self._evaluation_batches))
        orders = self._plan.limit_privacy(orders, state.phase, self._checkpoints.round)
        orders = replace(orders, profile=self.run.record.ranks_to_trace(group.size))
        parts = self._checkpoints.parts_plan(strategy, group.hosts)
        recovers, reached = self.run.record.times.begin_generation(group.slots or group.size)
        orders = replace(orders, snapshots=replace(orders.snapshots, parts=parts), recovers=recovers, reached=reached)
        orders = changes.amend(orders, continues)
        if parts is None:
            self._checkpoints.load_newest()
        lost = group.begin(orders, self._checkpoints.snapshot, continues)
        group.end_leavers()
        if lost:
            return replace(
                self._collect_facts_of_start(lost, group.last_outputs()), recovery=self._choose_recovery(phase)
            )
        changes.begun(group)
        self._bound.begin(orders.strategy)
        self.run.record.set_status(Status.RUNNING, "")
        if self._again and self.run.generation == 1:
            self.run.move.report_arrival(self._checkpoints.round)
        return Findings()

    def _gather(self, state: BeginGeneration) -> GatheredWorkers:
        """Let the workers of the next generation be those that there are; wait a moment if the job lacks some."""
        group, at = self._group, self._checkpoints.round
        stops = self.run.stopping.is_set() or self._callbacks.is_stopping
        found = self._plan.changes.gather(group, state.continues, at, stops=stops)
        if found.size[0] != found.size[1]:
            self.run.record.change_workers(group.size)
        if state.continues is not None and found.continues is None:
            self._recoveries.give_up_memory(group.size, at, self.run.generation + 1)
        if found.waits:
            self.run.record.set_status(Status.RECOVERING if self.run.generation else Status.STARTING, found.waits)
            self.run.stopping.wait(POLL_SECONDS)
        return found

    def poll(self) -> None:
        """Take the results of a poll into the record, and look for workers that were late for long."""
        points = self._poll()
        allowed = self.run.failures.failures < self.run.spec.max_failures
        self._recoveries.late.look(self._group, points, self._checkpoints.round, allowed=allowed)

    def follow(self, phase: int, decision: Decision, facts: RunFacts) -> Findings:
        """Collect a state unless members are lost; then wait, end the generation, or end the run early."""
        if not isinstance(decision, (Fail, Replace, EndEarly)) and not (
            isinstance(decision, Regroup) and decision.lost
        ):
            self._collect()
        if self._callbacks.is_stopping:
            self._group.snapshot_soon()
        elif self.run.move.take_save():
            self._group.snapshot_once()
        complete, now = False, self._plan.phase(phase)
        match decision:
            case Continue():
                if self._plan.changes.is_stopping:
                    time.sleep(STOPPING_SECONDS)  # a stop is requested, too, if the driver moves meanwhile
                else:
                    self._plan.changes.balance(self._group)
                    self.run.stopping.wait(POLL_SECONDS)
            case EndEarly():
                self._end_early()
            case Finish():
                complete = self._checkpoints.round >= now.end or self._meets_its_stop_rule() or self._rows_are_done()
                if complete:
                    self._end_generation(now)
                else:
                    time.sleep(POLL_SECONDS / 4)
        return Findings(decision=decision, complete=complete)

    def _meets_its_stop_rule(self) -> bool:
        """Return whether the strategy's stop rule was met at the newest state."""
        at, group = self._checkpoints.round, self._group
        return group.met is not None and all(worker.facts.position == at for worker in group.workers)

    def _rows_are_done(self) -> bool:
        """Return whether no row is left to learn from after the newest state."""
        return self._plan.changes.has_ended(self._checkpoints.snapshot)

    def _end_generation(self, phase: PhaseRun) -> None:
        """End the generation after the last state of the phase, and write the remaining points of its rounds."""
        self._poll()
        self.run.record.end_generation()
        self.run.record.flush()
        self._recoveries.report_backup_cost()
        at, reason = self._checkpoints.round, self._group.met
        if self._rows_are_done():
            reason = "all rows are learned from"
        if reason is not None and at < phase.end:
            phase.end_by_stop_rule(self.run.journal, self._plan.calendar, at, reason)
        if self._callbacks.is_stopping:
            self._end_early(agreed=True)

    def recover(self, state: Recover) -> Findings:
        """End the generation. The next one continues from rebuilt states if there are some, else from the snapshot."""
        decision, generation = state.decision, self.run.generation + 1
        self.run.record.end_generation()
        self.run.stopping.wait(decision.pause)
        continues = self._recoveries.end_generation(self._group, decision, generation)
        if continues is not None:
            self.run.record.repeat_from(generation, continues.round)
            return Findings(continues=continues)
        self.run.record.flush()
        at = self._checkpoints.round
        what = "evaluate again" if state.evaluating else f"continue from round {at}"
        self._recoveries.report_restart(decision, what, at, generation)
        return Findings()

    def change_workers(self, decision: Regroup) -> Findings:
        """Form the group anew. If no worker has a state in memory, all workers return to the newest snapshot."""
        group = self._group
        self.run.record.end_generation()
        if decision.lost:
            self.run.record.set_status(Status.RECOVERING, decision.reason)
        self.run.record.add_poll(group, group.last_points())
        at = self._checkpoints.round
        continues = self._plan.changes.regroup(group, decision, at)
        self.run.record.change_workers(group.size)
        if continues is None and decision.lost:
            self._recoveries.report_restart(
                Restart(decision.lost, decision.reason),
                f"continue from round {at}, because no living worker has the state of a later round in memory",
                at,
                self.run.generation + 1,
            )
        return Findings(continues=continues)

    def replace_members(self, decision: Replace) -> None:
        """Start new processes for the lost members that are replaced in their places."""
        self._recoveries.clear_error()
        changes, group, snapshot = self._plan.changes, self._group, self._checkpoints.snapshot
        decision = changes.before_replace(group, decision, snapshot)
        if decision.lost:
            self._recoveries.replace(group, decision, snapshot)
            changes.replaced(snapshot)

    def evaluate(self, phase: int) -> RunFacts | None:
        """Evaluate the newest state on all workers."""
        snapshot = self._checkpoints.snapshot.averaged(self.workload.average)
        totals = self._group.evaluate(snapshot, timeout=max(EVALUATE_SECONDS, self.run.spec.timeout))
        if totals is None:
            return replace(self.find_facts(phase), recovery=RestartAll())
        self.run.record.add_last_evaluation(snapshot.round, totals)
        return None

    def can_save_last(self, phase: int) -> bool:
        """Return whether there is a folder for the last state. A round of real clients may take hours."""
        return self.saves and not has_remote_clients(self._phases[phase].strategy)

    def request_checkpoint(self, phase: int, seconds: float) -> None:
        """Request the state after the next round, beyond which no worker trains."""
        stop, end = self._plan.changes.stop_round, self._plan.phase(phase).end
        end = end if stop is None else min(end, stop)
        self._last = LastCheckpoint(self._group, self._checkpoints.snapshot.clock, end, seconds)

    def await_checkpoint(self, phase: int) -> bool:
        """Check once for the requested checkpoint. After the deadline the run ends with the previous checkpoint."""
        assert self._last is not None, "it was requested"
        self._poll()
        self._plan.changes.lose_dead(self._group)
        facts = self.find_facts(phase)
        if facts.dead or facts.errors:
            return False
        self._collect()
        if self._last.look(self._group, self._checkpoints.snapshot.clock):
            return False
        time.sleep(POLL_SECONDS / 4)
        return True

    # ---- shared by the effects

    def _poll(self) -> list[Point]:
        """Take the results of a poll into the record, and return the points of single workers."""
        group = self._group
        points = group.poll()
        self._plan.changes.look(group, self.run.generation, self._checkpoints.snapshot, points)
        for point in points:
            # for later generations, and for runs that resume from this state
            self._checkpoints.snapshot.record_ring_choices(point)
        self.run.record.add_poll(group, points)
        if any(point["kind"] == "round" for point in points):
            self.run.failures.progressed()
        self._bound.follow(group, points)
        for name in group.move_shards(group.cluster.notices(), self.run.spec.timeout):
            self.run.journal.event("moved", f"{name} ends soon: its segment has moved to a new process", shard=name)
        self._recoveries.check_progress(group, self.run.generation)
        self.run.record.show_progress()
        return points

    def _collect(self) -> None:
        self._checkpoints.collect(self._group, self._plan, self.run.generation)

    def find_facts(self, phase: int) -> RunFacts:
        """Return the facts of the last poll."""
        group, recoveries = self._group, self._recoveries
        current = group.facts_of(self.run.generation)
        errors = tuple((name, f.error) for name, f in current if f.status == "failed" and f.error is not None)
        dead = group.dead
        if errors or dead:  # the servers go on without their manager as long as nobody else is lost
            dead += group.dead_manager
        recoveries.record_failures(errors=bool(errors), dead=bool(dead))
        change, changes = None, self._plan.changes
        # workers that stop for a change of their number would not reach the round of a last checkpoint: it is completed
        ends = self.run.stopping.is_set() and not changes.is_stopping
        if not errors and not dead and not ends:
            change = changes.find_change(group, self.run.generation, self._checkpoints.round)
        return RunFacts(
            change=change,
            size=max(1, group.size),
            finished=frozenset(name for name, f in current if f.status == "finished"),
            errors=errors,
            dead=dead,
            failures=recoveries.count.failures,
            max_failures=self.run.spec.max_failures,
            in_row=recoveries.count.in_row,
            outputs=group.last_outputs(),
            error_age=recoveries.error_age,
            recovery=self._choose_recovery(self._plan.phase(phase)),
            stop=ends,
            ends_early=self._callbacks.may_end(self._checkpoints.round),
            positions={name: f.position for name, f in current},
            unanswered=group.unanswered,
        )

    def _choose_recovery(self, phase: PhaseRun) -> Recovery:
        """Return how the run recovers from a death now."""
        changes, group = self._plan.changes, self._group
        return choose_recovery(
            RecoveryFacts(
                phase.phase.strategy.recovery,
                holds_tables=group.holds_tables,
                rejoins=self._recoveries.may_replace(group),
                regroups=changes.regroups,
                server_died=any(shard.dead for shard in group.shards),
                servers_end=changes.servers_end,
                open_data=self._plan.calendar.open,
            )
        )

    def _read_round_and_facts(self) -> tuple[int, ProgressRecord]:
        facts: ProgressRecord = {
            "generation": self.run.generation,
            "failures": self.run.failures.failures,
            "params": self._params,
        }
        if self.run.spec.elastic is not None:
            facts["allowed"] = self._allowance.now[0]
        if self._known is not None:
            facts |= self._known.changes.progress()
        if self._bound.moves:
            facts["bound"] = self._bound.bound
        if self._callbacks.run.best is not None:
            facts["best"] = str(self._callbacks.run.best)
        return self._checkpoints.round, facts

    def _try_a_batch(self, found: PreflightFindings) -> None:
        """Try one batch in a child process while workers start."""
        # strategies that learn by client may add metrics of the clients
        watches = [] if learns_by_client(self._phases[0].strategy) else self._callbacks.watches()
        watched = any(watch.metric != "loss" for watch in watches)
        facts, request = trial_of(self.workload, self._phases, self.run.spec, found, watched=watched)
        self.trial.begin(facts, request, watches)

    # ---- the end

    def end(self) -> None:
        """End the child process, the workers and the servers, and write their last lines and times."""
        self.trial.close()
        if self._known is not None:
            self._known.changes.close()
        if self._started is not None:
            self.run.journal.lines(self._started.last_lines())
            self.run.record.add_server_events(self._started, over=True)
            self.run.record.times.end(self._started.members)
            self._checkpoints.clients = self._started.release_client_states()
            self._started.close()
            self._checkpoints.discard_unfinished()

    def conclude(self, state: RunEnded) -> Outcome:
        """Return the outcome, and call the callbacks' `on_end`."""
        outcome = Outcome(state.status, state.reason, snapshot=self._checkpoints.newest)
        outcome.clients, self._checkpoints.clients = self._checkpoints.clients, None
        if self._known is not None and outcome.snapshot is not None:
            outcome.strategy = self._known.strategy_of(outcome.snapshot)
        if state.status is Status.SUCCEEDED and (error := self._plan.error_of_void_rounds()) is not None:
            outcome.status, outcome.message, outcome.error = Status.FAILED, str(error), error
        elif state.status is Status.SUCCEEDED:
            outcome.metrics, outcome.tables = self.run.record.metrics, self._checkpoints.tables
            if (early := self._plan.calendar.early) is not None:
                outcome.message = early.message(self._checkpoints.round)
        elif state.status is Status.STOPPED and self.run.move.reason is not None:
            outcome.message = self._leave()
            return outcome
        elif state.status is Status.STOPPED:
            outcome.message = self._describe_stop()
        else:
            outcome.error = state.error
        self._report_claim()
        outcome.checkpoint, outcome.best = self._checkpoints.saved, self._callbacks.run.best
        outcome.scratch, self._checkpoints.scratch = self._checkpoints.scratch, None
        self._end_callbacks(outcome)
        return outcome

    def _report_claim(self) -> None:
        """Write what a private job claims, as an event."""
        if self._known is not None and self._known.private is not None:
            self._known.private.report_end(self._checkpoints.round, self._known.calendar.spans)
        elif self._known is not None and self._known.private_clients is not None:
            self._known.private_clients.report_end()

    def _end_callbacks(self, outcome: Outcome) -> None:
        """Call the callbacks' `on_end`. An error in it ends a run that has not failed with this error."""
        try:
            self._callbacks.end(outcome.to_dict())
        except RaypsError as error:
            if outcome.status is Status.FAILED:
                self.run.journal.event("warning", str(error))
            else:
                outcome.status, outcome.message, outcome.error = Status.FAILED, str(error), error

    def _leave(self) -> str:
        """Write what the move of the driver costs, and no outcome; return it."""
        facts = [] if self._started is None else [worker.facts for worker in self._started.workers]
        checkpoints, saved = self._checkpoints, self._checkpoints.saved is not None
        positions = checkpoints.newest.positions if saved and checkpoints.newest is not None else []
        at = checkpoints.round if saved else 0
        return self.run.depart(at, count_repeated_rounds(facts, positions, at))

    def _describe_stop(self) -> str:
        saved = self._checkpoints.saved
        if self._known is None:
            return f"stopped on request before it started: {f'{saved} is kept' if saved else 'nothing was saved'}"
        at = self.run.record.reached(self._checkpoints.round)
        rounds = self._known.calendar.known_rounds
        of = "" if rounds is None else f" of {rounds}"
        return f"stopped on request at round {at}{of}: {self._checkpoints.describe_saved(at)}"
