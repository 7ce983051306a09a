"""A job's driver as a separate actor, which the service starts and stops, and finds again after the service's restart.

The actor's constructor starts the job in a thread. After that, the job needs no service: the actor ends itself when the
run has ended. `driver.json` in the job's folder has the number of the attempt that has started, and its process.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from dataclasses import replace
from pathlib import Path

from rayps_client.errors import RaypsError
from rayps_client.values import Keywords

from rayps.cluster.code_folder import JobCode, OpenCode, enter_code, read_archive
from rayps.cluster.local import PROTOCOL, Cluster, LocalCluster, surrounding
from rayps.cluster.notices import Notice
from rayps.core.failpoint import passing
from rayps.core.job.code_archive import locate_archive
from rayps.core.job.job_status import Status
from rayps.core.job.records import read_json
from rayps.core.urls import Location, location_of
from rayps.runtime.driver.driver import Driver
from rayps.runtime.driver.driver_move import NoticeWatch, can_leave, move_seconds, save_delay
from rayps.runtime.driver.workload_job import WorkloadJob
from rayps.runtime.own_loop.loop_job import LoopJob
from rayps.runtime.own_loop.named import load as load_function
from rayps.runtime.records.journal import Journal
from rayps.runtime.records.status import Outcome
from rayps.strategies.catalogue import own_names
from rayps.strategies.job import JobSpec
from rayps.tensors.checkpoints import checkpoint
from rayps.workload.base import load

log = logging.getLogger(__name__)

# the file with {"attempt", "pid", "started" (clock ticks since boot), "protocol", "crash"}; "crash" is the error if the
# driver wrote no outcome; "moved" says why the process ends on purpose, if a notice announced it
DRIVER_FILE = "driver.json"
LAUNCH_FILE = "launch.json"  # the service writes it: the number of the last attempt whose driver it has started


class DriverActor:
    """A job's driver as an actor that continues after the service's death, and writes the job's folder."""

    def __init__(
        self,
        spec: Keywords,
        folder: str,
        attempt: int,
        failures: int = 0,
        *,
        anywhere: bool = False,
        variables: dict[str, str] | None = None,
    ) -> None:
        """Start the job. `anywhere`: the next driver of this job may start on another host.

        `variables`: the values of the job's environment variables, as far as the service has found them.
        """
        self._variables = variables or {}
        self._spec, self._folder, self._attempt = JobSpec.from_dict(spec), Path(folder), attempt
        self._failures = failures  # number of failures in earlier attempts
        self._anywhere = anywhere
        self._driver: Driver | None = None
        self._stopped = threading.Event()
        self._allowed = self._spec.workers, "the job starts with its least number of workers"
        self._status = Status.FAILED
        self._crash: BaseException | None = None
        self._thread = threading.Thread(target=self._run_and_end, name="rayps-driver", daemon=True)
        self._thread.start()

    def ping(self) -> int:
        """Return the process id. The answer shows that the actor is alive."""
        return os.getpid()

    def stop(self) -> None:
        """Request the end of the job."""
        self._stopped.set()
        if self._driver is not None:
            self._driver.stop()

    def allow(self, workers: int, reason: str) -> None:
        """Set the number of workers that an elastic job may have now. Before the first call it is the least number."""
        self._allowed = workers, reason
        if self._driver is not None:
            self._driver.allow(workers, reason)

    def run(self) -> str:
        """Wait until the run that the constructor started has ended, and return its status.

        Raises the error with which the driver ended if the driver wrote no outcome.
        """
        self._thread.join()
        if self._crash is not None:
            raise self._crash
        return self._status

    def _run_and_end(self) -> None:
        try:
            if self._is_superseded():
                log.warning("attempt %d of %s ends: a later attempt has started", self._attempt, self._folder.name)
                return
            self._begin()
            self._status = self._run()
            passing("driver: outcome written, not ended")
        except BaseException as error:  # also SystemExit of the user's code: the next attempt reports it
            log.exception("the driver of %s crashed", self._folder.name)
            self._crash = error
            self._write_driver_file(crash=f"{type(error).__name__}: {error}".splitlines()[0])
        finally:
            self._end_actor()

    def _is_superseded(self) -> bool:
        """Return whether a later attempt of the job has started: this process was stopped, and Ray has given it up."""
        found = [read_json(self._folder / name) or {} for name in (DRIVER_FILE, LAUNCH_FILE)]
        return any(isinstance(each.get("attempt"), int) and each["attempt"] > self._attempt for each in found)

    def _begin(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._attempt > 1:
            (self._folder / "progress.json").unlink(missing_ok=True)  # of the previous attempt
        self._write_driver_file()
        passing("driver: begun, nothing done")

    def _write_driver_file(self, **facts: str) -> None:
        pid = os.getpid()
        known = {"attempt": self._attempt, "pid": pid, "started": _read_start(), "protocol": PROTOCOL}
        text = json.dumps(known | facts)
        part = self._folder / f".{DRIVER_FILE}.{pid}"
        part.write_text(text, encoding="utf-8")
        part.replace(self._folder / DRIVER_FILE)

    def _run(self) -> Status:
        """Run the job until its outcome is written, and return its status."""
        spec, journal = self._spec, Journal(self._folder)
        checkpoints = self._folder / "checkpoints"
        opened: OpenCode | None = None
        try:
            code = self._read_code(journal)
            opened = enter_code(code)
            spec = replace(spec, working_dir=opened.folder or spec.working_dir)
            resume: Location | None
            resume, passed = checkpoint.usable(checkpoints) if self._attempt > 1 else (None, [])
            if resume is None and spec.resume:
                resume, more = checkpoint.usable_at(location_of(spec.resume))
                passed += more
            for warning in passed:
                journal.event("warning", warning)
            if self._attempt > 1 and resume is None:
                journal.event(
                    "began_again", f"attempt {self._attempt} has no checkpoint to continue from and starts at round 0"
                )
            cluster = surrounding()
            tries = not isinstance(cluster, LocalCluster)  # workers that are threads start at once
            self._driver = self._make_driver(journal, checkpoints, resume, code, tries=tries)
            watch = NoticeWatch(cluster, lambda notice: self._act_on_notice(notice, cluster, journal))
            self.allow(*self._allowed)
            if self._stopped.is_set():
                self._driver.stop()
            try:
                return self._driver.run(cluster).status
            finally:
                watch.close()
        except (RaypsError, OSError) as error:  # the job cannot start: its folder must have the reason
            journal.event("failed", str(error))
            journal.write_outcome(Outcome(Status.FAILED, str(error), error=error).to_dict())
            return Status.FAILED
        finally:
            if opened is not None:
                opened.close()
            journal.close()

    def _act_on_notice(self, notice: Notice, cluster: Cluster, journal: Journal) -> None:
        """Move, or save the newest state, because this process or its host will end."""
        driver, what = self._driver, "this process" if notice.pid is not None else "the driver's host"
        left = "" if notice.seconds is None else f" in {notice.seconds:.0f} s"
        reason = f"{what} ends{left} ({notice.reason})"
        self._write_driver_file(moved=reason)  # so that the end of the process is not a failure of the job
        if driver is None:
            return
        hosts = frozenset(cluster.hosts(free=False))
        if can_leave(notice, hosts, cluster.notices(), anywhere=self._anywhere):
            driver.move(reason, move_seconds(notice))
        elif not driver.job.saves_on_request:
            journal.event("notice", f"{reason}: the loop continues from its newest saved state in another process")
        else:
            later = threading.Timer(save_delay(notice), driver.save_soon)
            later.daemon = True
            later.start()
            journal.event(
                "notice",
                f"{reason}: the newest state is saved before that, and training continues; the driver stays, because "
                + ("no other host is free of notices" if self._anywhere else "the state directory is on this host"),
            )

    def _read_code(self, journal: Journal) -> JobCode:
        """Return the user's code as the job's processes get it. Raises ConfigError if it is missing or damaged."""
        spec = self._spec
        argv = (spec.target.rpartition(":")[0],)  # a job is no program with arguments: a parser finds its defaults
        own = spec.environment
        own.must_have(self._variables)
        variables = tuple(self._variables.items())
        if spec.code is None and not own.requirements:
            return JobCode(self._folder.name, folder=spec.working_dir, argv=argv, variables=variables)
        archive = None
        if spec.code is not None:
            # <state directory>/jobs/ID is the job's folder
            archive = read_archive(locate_archive(self._folder.parent.parent, spec.code), spec.code)
        if own.requirements:
            journal.event("installing", f"installing {len(own.requirements)} requirements for the job's processes")
        names = [spec.target, *own_names(spec.strategy)]
        paths = {
            Path(name.rpartition(":")[0]).parent.as_posix() for name in names if name.rpartition(":")[0].endswith(".py")
        }
        folders, lines = tuple(sorted(paths - {"."})), tuple(own.requirements or ())
        return JobCode(self._folder.name, archive, spec.working_dir, folders, lines, argv, variables)

    def _make_driver(
        self, journal: Journal, checkpoints: Path, resume: Location | None, code: JobCode, *, tries: bool
    ) -> Driver:
        """Return the driver of the job's workload, or of its function. `tries`: workers are processes."""
        spec = self._spec
        profile = _make_traces_folder(self._folder) if spec.profile else None
        if spec.run is not None:
            return Driver(
                LoopJob(
                    load_function(spec.run, spec.working_dir),
                    spec,
                    journal,
                    checkpoints=checkpoints,
                    resume=resume,
                    failures=self._failures,
                    sends=False,
                    profile=profile,
                    code=code,
                )
            )
        return Driver(
            WorkloadJob(
                load(spec.workload, spec.working_dir, spec.params),
                spec,
                journal,
                checkpoints=checkpoints,
                resume=resume,
                failures=self._failures,
                name=self._folder.name,
                again=self._attempt > 1,
                tries=tries,
                profile=profile,
                code=code,
            )
        )

    def _end_actor(self) -> None:
        """End this actor, because an idle actor would occupy a process, and its job would seem to run.

        If Ray does not answer, or does not know this actor any more, the actor ends its process without Ray.
        """
        try:
            cluster = surrounding()
            handle = cluster.find(f"driver-{self._folder.name}")
            if handle is not None:
                cluster.kill(handle)
            if handle is not None or isinstance(cluster, LocalCluster):
                return
        except Exception as error:
            log.warning("the driver of %s could not end itself by Ray: %s", self._folder.name, error)
        os._exit(0)


def _make_traces_folder(home: Path) -> Path:
    """Create and return the folder of a job's traces, which may have those of an earlier attempt."""
    folder = home / "profile"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _read_start() -> int | None:
    """Return when this process started, in clock ticks since boot, or None if the system does not report it."""
    try:
        return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
