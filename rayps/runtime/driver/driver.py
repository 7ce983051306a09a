"""Run one job to its end: one loop over the states of `rayps.runtime.driver.decide_recovery`.

    while not state.terminal:
        state = next_state(state, <result of the state's effect>)

The pure function `find_next_state` chooses the next state, and the pure function `decide` chooses what to do about a
failure. The job carries out the effects: see `rayps.runtime.driver.driven_job`.
"""

from __future__ import annotations

import logging
from typing import assert_never

from rayps_client.errors import RaypsError

from rayps.cluster.local import Cluster
from rayps.core.job.job_status import Status
from rayps.core.time.goodput import JobTime
from rayps.runtime.driver import decide_recovery as states
from rayps.runtime.driver.decide_recovery import Findings, decide, find_next_state
from rayps.runtime.driver.driven_job import DrivenJob, JobRun
from rayps.runtime.records.journal import Journal
from rayps.runtime.records.status import Outcome
from rayps.strategies.job import JobSpec

log = logging.getLogger(__name__)

LEAVE_SECONDS = 20.0  # seconds for a last checkpoint after a stop request; the service waits longer than this


class Driver:
    """Runs one job from start to end. `run()` blocks; `stop()` may be called from another thread."""

    def __init__(self, job: DrivenJob) -> None:
        """Prepare a driver of `job`."""
        self.job = job
        self._checked = False  # whether the preflight has ended

    @property
    def _run(self) -> JobRun:
        return self.job.run

    @property
    def spec(self) -> JobSpec:
        """The job as it was submitted."""
        return self._run.spec

    @property
    def journal(self) -> Journal:
        """The journal of the job."""
        return self._run.journal

    @property
    def status(self) -> Status:
        """The status of the run."""
        return self._run.record.status

    @property
    def saves(self) -> bool:
        """Whether there is a folder for checkpoints."""
        return self.job.saves

    def stop(self) -> None:
        """Request the end of the run. If there is a folder for checkpoints, a last one is saved first."""
        self._run.stopping.set()

    def move(self, reason: str, seconds: float) -> None:
        """Leave this process within `seconds`: save a checkpoint, and end the run without an outcome.

        Another driver then continues the job as its next attempt. Any thread may call this method.
        """
        self._run.move.request(reason, seconds)
        self._run.stopping.set()

    def save_soon(self) -> None:
        """Save a checkpoint as soon as possible, and continue. Any thread may call this method."""
        self._run.move.saves = True

    @property
    def moved(self) -> bool:
        """Whether the run has ended without an outcome, because another driver continues the job."""
        return self._run.move.left

    def allow(self, workers: int, reason: str) -> None:
        """Set the number of workers that an elastic job may have from now on. Any thread may call it."""
        self.job.allow(workers, reason)

    def job_time(self) -> JobTime:
        """Return where the time of the job's workers and servers went so far."""
        return self._run.record.times.job_time()

    def preflight(self) -> bool:
        """Check what the user gave before any worker starts. Return False if a stop is requested before the end.

        Raises:
            DataError, WorkloadError, ConfigError, CheckpointError: the user's code or an option is wrong; the text
                says how to fix it.
        """
        self._checked = self._checked or self.job.preflight()
        return self._checked

    def close(self) -> None:
        """End what the preflight has started, and let other runs use a shared ledger."""
        self.job.close()

    def run(self, cluster: Cluster) -> Outcome:
        """Run the job to its end and return the outcome, which also contains an error of the run. Nothing is raised."""
        state: states.State = states.StartWorkers()
        try:
            while not state.terminal:
                state = self._step(state, cluster)
        finally:
            self.job.end()
        assert isinstance(state, states.RunEnded)
        return self._write_outcome(state)

    def _step(self, state: states.State, cluster: Cluster) -> states.State:
        """Carry out a state's effect and return the next state. If the effect raises an error, the run has ended."""
        try:
            return find_next_state(state, self._carry_out(state, cluster))
        except RaypsError as error:
            return states.RunEnded(Status.FAILED, str(error), error)
        except Exception as error:  # a bug of rayps must end the job with a reason, not only its thread
            log.exception("the driver failed")
            return states.RunEnded(Status.FAILED, f"rayps failed: {type(error).__name__}: {error}", error)

    def _carry_out(self, state: states.State, cluster: Cluster) -> Findings:
        job = self.job
        match state:
            case states.StartWorkers(pause):
                return self._start_workers(cluster, pause)
            case states.EnterPhase(phase):
                return job.enter_phase(phase)
            case states.BeginGeneration():
                return self._decide_if_lost(job.begin_generation(state))
            case states.Train(phase):
                job.poll()
                facts = job.find_facts(phase)
                return job.follow(phase, self._decide(facts), facts)
            case states.Recover(_, decision):
                self._run.record.times.recovering = True
                self._run.record.set_status(Status.RECOVERING, decision.reason)
                return job.recover(state)
            case states.ChangeWorkers(_, change):
                return job.change_workers(change)
            case states.ReplaceMembers(_, replace):
                self._run.record.set_status(Status.RECOVERING, replace.reason)
                job.replace_members(replace)
                self._run.record.set_status(Status.RUNNING, "")
                return Findings()
            case states.Evaluate(phase):
                return self._decide_if_lost(job.evaluate(phase))
            case states.RequestCheckpoint(phase):
                return self._request_checkpoint(phase)
            case states.AwaitCheckpoint(phase):
                return Findings(saving=job.await_checkpoint(phase))
            case states.RunEnded():
                return Findings()
        assert_never(state)

    # ---- the effects of states

    def _start_workers(self, cluster: Cluster, pause: float) -> Findings:
        run = self._run
        if pause and run.stopping.wait(pause):
            return Findings(stopped=True)
        if not self.preflight():
            return Findings(stopped=True)
        run.record.set_status(Status.STARTING, "starting workers")
        found = self._decide_if_lost(self.job.start(cluster))
        if isinstance(found.decision, states.Restart):
            decision, text = found.decision, "all workers start again"
            run.record.set_status(Status.RECOVERING, decision.reason)
            facts = {"lost": list(decision.lost), "round": 0, "generation": run.generation + 1}
            run.journal.event("restarted", f"{decision.reason}: {text}", **facts)
        return found

    def _request_checkpoint(self, phase: int) -> Findings:
        """Request the last state. A job that moves goes on then, and one that is STOPPING never runs again."""
        move = self._run.move
        moves = move.reason is not None
        if not self.job.can_save_last(phase):
            return Findings()
        self._run.record.set_status(Status.RECOVERING if moves else Status.STOPPING, "saving a checkpoint")
        self.job.request_checkpoint(phase, move.seconds if moves else LEAVE_SECONDS)
        return Findings(saving=True)

    def _decide(self, facts: states.RunFacts) -> states.Decision:
        """Decide, and count a failure."""
        decision = decide(facts)
        recovers = isinstance(decision, (states.Restart, states.RebuildLost, states.Replace, states.Regroup))
        if recovers and decision is not facts.change:
            self._run.failures.add()
        return decision

    def _decide_if_lost(self, found: Findings | states.RunFacts | None) -> Findings:
        """Return what was found, or the decision about members that were lost meanwhile."""
        if isinstance(found, states.RunFacts):
            return Findings(decision=self._decide(found))
        return found or Findings()

    # ---- the end

    def _write_outcome(self, state: states.RunEnded) -> Outcome:
        """Write the outcome to the journal, once. If another driver continues the job, there is none."""
        run = self._run
        outcome = self.job.conclude(state)
        if run.move.left:
            return outcome
        kind = {Status.SUCCEEDED: "finished", Status.STOPPED: "stopped"}.get(outcome.status, "failed")
        run.journal.event(kind, outcome.message, metrics=outcome.metrics)
        run.record.set_status(outcome.status, outcome.message)
        run.journal.write_outcome(outcome.to_dict())
        run.record.times.close()
        return outcome
