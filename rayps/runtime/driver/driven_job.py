"""What a driver runs: a job of one kind, which carries out what the driver decides.

`rayps.runtime.driver.workload_job` is a job of a workload, whose rounds rayps runs. `rayps.runtime.own_loop.loop_job`
is a loop that a user wrote. The driver does not ask which of them it has.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import ClassVar

from rayps.cluster.local import Cluster
from rayps.core.job.job_status import Status
from rayps.runtime.driver.decide_recovery import (
    BeginGeneration,
    Decision,
    FailureCount,
    Findings,
    Recover,
    Regroup,
    Replace,
    RunEnded,
    RunFacts,
)
from rayps.runtime.driver.driver_move import DriverMove
from rayps.runtime.records.journal import Journal
from rayps.runtime.records.status import Outcome, RunRecord
from rayps.strategies.job import JobSpec


class JobRun:
    """One run of a job: what its driver and the job share."""

    def __init__(self, spec: JobSpec, journal: Journal, record: RunRecord, failures: int) -> None:
        """Prepare. `failures`: those under earlier drivers of the job."""
        self.spec, self.journal, self.record = spec, journal, record
        self.failures = FailureCount(failures)
        self.generation = 0
        self.stopping = threading.Event()  # set when the end of the run is requested
        self.move = DriverMove(journal)

    def facts_of_start(self, dead: tuple[tuple[str, str], ...], outputs: dict[str, str]) -> RunFacts:
        """Return the facts of processes that died before every member had its plan."""
        return RunFacts(
            size=self.spec.workers,
            dead=dead,
            failures=self.failures.failures,
            max_failures=self.spec.max_failures,
            in_row=self.failures.in_row,
            planned=False,
            outputs=outputs,
            stop=self.stopping.is_set(),
        )

    def depart(self, saved: int, again: int) -> str:
        """Report that another driver continues the job after round `saved`, and computes `again` rounds again."""
        message = self.move.report_departure(saved, again)
        self.record.set_status(Status.RECOVERING, message)
        self.journal.flush()
        return message


class DrivenJob(ABC):
    """A job of one kind. Each method is one moment of its run; `run` is what it shares with its driver."""

    run: JobRun
    saves_on_request: ClassVar[bool] = True  # whether the newest state can be saved at any time

    @property
    @abstractmethod
    def saves(self) -> bool:
        """Whether there is a folder for checkpoints."""

    @abstractmethod
    def preflight(self) -> bool:
        """Check what the user gave before any worker starts. Return False if a stop is requested before the end.

        Raises:
            DataError, WorkloadError, ConfigError, CheckpointError: the user's code or an option is wrong.
        """

    @abstractmethod
    def allow(self, workers: int, reason: str) -> None:
        """Set the number of workers that the job may have from now on, if that number changes. Any thread may call."""

    @abstractmethod
    def close(self) -> None:
        """End what the preflight has started."""

    # ---- the start

    @abstractmethod
    def start(self, cluster: Cluster) -> RunFacts | None:
        """Reserve resources, and start what comes before the first generation.

        Return the facts of a process that died meanwhile, after what has started was ended; None if all is there.
        """

    @abstractmethod
    def enter_phase(self, number: int) -> Findings:
        """Enter the phase with this number."""

    @abstractmethod
    def begin_generation(self, state: BeginGeneration) -> Findings | RunFacts:
        """Start a generation on every member. Return the facts of members that died meanwhile, if some did."""

    # ---- each poll

    @abstractmethod
    def poll(self) -> None:
        """Take what the members have reported since the last poll into the record of the run."""

    @abstractmethod
    def find_facts(self, phase: int) -> RunFacts:
        """Return the facts of the last poll."""

    @abstractmethod
    def follow(self, phase: int, decision: Decision, facts: RunFacts) -> Findings:
        """Carry out what a decision after a poll brings at once, and wait until the next poll if there is one."""

    # ---- failures and changes

    @abstractmethod
    def recover(self, state: Recover) -> Findings:
        """End the generation after a failure, wait for its pause, and find how the next one continues."""

    def change_workers(self, decision: Regroup) -> Findings:
        """Form a new group of workers."""
        raise AssertionError("the workers of this job do not change")

    def replace_members(self, decision: Replace) -> None:
        """Start new processes for the lost members while the others continue."""
        raise AssertionError("no member of this job is replaced alone")

    # ---- the end

    def evaluate(self, phase: int) -> RunFacts | None:
        """Evaluate the state at the end of a phase. Return the facts of workers that were lost meanwhile, if any."""
        return None

    @abstractmethod
    def can_save_last(self, phase: int) -> bool:
        """Return whether a last state can be saved when the run is to end in this phase."""

    @abstractmethod
    def request_checkpoint(self, phase: int, seconds: float) -> None:
        """Request a last state within `seconds`."""

    @abstractmethod
    def await_checkpoint(self, phase: int) -> bool:
        """Look once for the last state, and return whether it is still awaited. It is given up at its deadline."""

    @abstractmethod
    def end(self) -> None:
        """End all members, and release what they had."""

    @abstractmethod
    def conclude(self, state: RunEnded) -> Outcome:
        """Return the outcome of the run, which has ended with `state`.

        If another driver continues the job, call `JobRun.depart` instead: there is no outcome then.
        """
