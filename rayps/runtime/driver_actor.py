"""A job's driver as an actor of its own: what the service starts, asks to stop, and finds again."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from rayps import checkpoint
from rayps.cluster import surrounding
from rayps.errors import RaypsError
from rayps.job import JobSpec, Status
from rayps.runtime.driver import Driver
from rayps.runtime.journal import Journal
from rayps.runtime.outcome import Outcome
from rayps.workload import load


class DriverActor:
    """A job's driver as an actor of its own, started by the service: survives the service, writes the job's folder."""

    def __init__(self, spec: dict[str, Any], folder: str, attempt: int, failures: int = 0) -> None:
        self._spec, self._folder, self._attempt = JobSpec.from_dict(spec), Path(folder), attempt
        self._failures = failures  # what went wrong in the attempts before
        self._driver: Driver | None = None
        self._stopped = threading.Event()

    def ping(self) -> int:
        """The process id: a sign of life."""
        return os.getpid()

    def stop(self) -> None:
        """Ask the job to end."""
        self._stopped.set()
        if self._driver is not None:
            self._driver.stop()

    def run(self) -> str:
        """Run the job to its sealed outcome, then leave."""
        spec, journal = self._spec, Journal(self._folder)
        checkpoints = self._folder / "checkpoints"
        try:
            if spec.working_dir:
                os.chdir(spec.working_dir)
            newest = checkpoint.newest(checkpoints) if self._attempt > 1 else None
            resume = newest or (Path(spec.resume) if spec.resume else None)
            if self._attempt > 1 and resume is None:
                journal.event("began_again", f"attempt {self._attempt} has no checkpoint to go on from: from round 0")
            workload = load(spec.workload, spec.working_dir)
            self._driver = Driver(
                workload, spec, journal, checkpoints=checkpoints, resume=resume, failures=self._failures,
                name=self._folder.name, again=self._attempt > 1,
            )  # fmt: skip
            if self._stopped.is_set():
                self._driver.stop()
            status = self._driver.run(surrounding()).status
        except (RaypsError, OSError) as error:  # the job cannot even begin: its folder must say why
            status = Status.FAILED
            journal.event("failed", str(error))
            journal.seal(Outcome(status, str(error), error=error).to_dict())
        finally:
            journal.close()
        return status
