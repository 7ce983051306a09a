"""The Ray in which drivers run: one that rayps owns, run by `local_ray.ray_daemon`, or a cluster that rayps joins.

Jobs survive the death of the service, because the service starts no Ray process itself. The service survives a Ray that
hangs or dies, because the service calls Ray only through a child process (`ray_process`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from rayps_client.errors import ClusterError

from rayps.cluster.local import Actors
from rayps.service import processes
from rayps.service.liveness import QuietTime
from rayps.service.local_ray.ray_daemon import (
    HEARTBEAT,
    LOG,
    RayRecord,
    make_environment,
    make_token,
    read_record,
    remove_leftovers,
)
from rayps.service.local_ray.ray_process import ClusterProcess, make_python_path
from rayps.service.plan import Bundle
from rayps.service.settings import Settings

log = logging.getLogger(__name__)

_START_SECONDS = 150.0
_RETRY_SECONDS = 15.0
_END_SECONDS = 30.0
_SERVICE_STOPS = "the service is stopping"
_UNRESPONSIVE_SECONDS = 180.0  # seconds without an answer of Ray and without progress of a job: Ray is restarted


def choose_place(settings: Settings) -> OwnRay | JoinedRay:
    """Return the Ray for drivers: the cluster at `settings.address`, or without an address a Ray that rayps owns."""
    return OwnRay(settings) if settings.address is None else JoinedRay(settings.address)


def describe_cpus(settings: Settings) -> str:
    """Return what one job may reserve in rayps's own Ray, and what jobs may that run side by side."""
    most, cores = settings.logical_cpus, settings.cores
    own = f"starting Ray with {most} logical CPUs; this machine has {os.cpu_count() or 1} cores"
    if cores is None:
        return f"{own}: the workers of all running jobs may be up to {most} (--cpus)"
    return (
        f"{own}: jobs run side by side while they have at most {cores} workers of one CPU together, and a job with "
        f"more runs alone, with up to {most} (--cpus N: jobs share N CPUs)"
    )


class OwnRay:
    """A Ray on this machine that belongs to one state directory.

    Ray is restarted when it has ended. It is also restarted when, for `unresponsive_seconds`, it has not answered and
    no job has written its progress.
    """

    owned = True

    def __init__(self, settings: Settings, *, unresponsive_seconds: float = _UNRESPONSIVE_SECONDS) -> None:
        self._dir = settings.state_dir
        self._settings = settings
        self._cluster: ClusterProcess | None = None
        self._record: RayRecord | None = None
        self._daemon: subprocess.Popen[bytes] | None = None
        self._failed: tuple[float, str] | None = None
        self._answers = 0  # number of answers of all earlier child processes
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._unresponsive = _UnresponsiveTime(settings.jobs_dir, unresponsive_seconds)

    @property
    def address(self) -> str | None:
        """The address host:port of the Ray, or None if the Ray is not ready."""
        return None if self._record is None else self._record.address

    def capacity(self) -> Bundle:
        """Return the logical CPUs of the running Ray, or of the one that will be started."""
        cpus = self._settings.logical_cpus if self._record is None else self._record.cpus
        return {"cpu": float(cpus)}

    def cluster(self) -> Actors:
        """Return the joined cluster; first start the daemon if none is running.

        Raises:
            ClusterError: Ray did not become ready, or the service is stopping.
        """
        with self._lock:
            if self._cluster is not None and self._cluster.alive and self._give_up_reason() is None:
                return self._cluster
            self._drop_connection(graceful=False)
            if self._unresponsive.expired():
                log.error(
                    "Ray has not answered for %g s and no job made progress: Ray is restarted",
                    self._unresponsive.seconds,
                )
                self._end()
                self._unresponsive.reset()
            self._record = self._ensure()
            assert self._record.address is not None
            self._cluster = ClusterProcess(
                self._record.address, make_environment(self._dir), give_up_reason=self._give_up_reason
            )
            return self._cluster

    def renew_lease(self) -> None:
        """Update the heartbeat file, so that the daemon does not stop Ray while the service is alive."""
        (self._dir / HEARTBEAT).touch(mode=0o600)

    def disconnect(self, *, end: bool) -> None:
        """Disconnect from Ray. With `end`, also stop the daemon and wait until all its processes have ended."""
        self._stopping.set()
        got = self._lock.acquire(timeout=5.0)
        try:
            self._drop_connection(graceful=not end)
            if end:
                self._end()
        finally:
            if got:
                self._lock.release()

    def _give_up_reason(self) -> str | None:
        """Return why the service should not wait for Ray's answer any longer, or None if it should wait.

        `ClusterProcess` calls this several times a second while it waits for an answer.
        """
        if self._stopping.is_set():
            return _SERVICE_STOPS
        self.renew_lease()
        record = read_record(self._dir)
        if record is None or not record.alive or record.state != "ready" or record != self._record:
            return "Ray has ended"
        if self._unresponsive.observe(self._answers + (0 if self._cluster is None else self._cluster.totals)):
            return f"Ray has not answered for {self._unresponsive.seconds:g} s"
        return None

    def _drop_connection(self, *, graceful: bool) -> None:
        if self._cluster is not None:
            self._answers += self._cluster.totals
            self._cluster.close(graceful=graceful)
            self._cluster = None
        self._record = None

    def _ensure(self) -> RayRecord:
        deadline = time.monotonic() + _START_SECONDS
        if self._failed is not None and time.monotonic() - self._failed[0] < _RETRY_SECONDS:
            raise ClusterError(self._failed[1])
        while time.monotonic() < deadline and not self._stopping.is_set():
            self.renew_lease()
            record = read_record(self._dir)
            if record is not None and record.alive and record.state == "ready":
                return record
            mine = self._daemon is not None and record is not None and record.pid == self._daemon.pid
            if record is not None and record.state == "failed" and mine:
                (self._dir / "ray.json").unlink(missing_ok=True)
                if record.address is None:  # Ray never became ready: wait before the next attempt
                    self._failed = (time.monotonic(), record.reason or "Ray did not start")
                    raise ClusterError(self._failed[1])
                log.warning("%s; Ray is restarted", record.reason)
                continue
            if record is None or not record.alive or record.state in ("stopping", "failed"):
                self._spawn()
            time.sleep(0.1)
        raise ClusterError(
            _SERVICE_STOPS
            if self._stopping.is_set()
            else f"Ray was not ready within {_START_SECONDS:g} s: see {self._dir / LOG}"
        )

    def _spawn(self) -> None:
        if self._daemon is not None and self._daemon.poll() is None:
            return  # the daemon is starting, or waits for the previous one to end
        make_token(self._dir)
        log.info("%s", describe_cpus(self._settings))
        with (self._dir / LOG).open("ab") as out:
            self._daemon = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "rayps.service.local_ray.ray_daemon",
                    "--state-dir",
                    str(self._dir),
                    "--cpus",
                    str(self._settings.logical_cpus),
                    "--idle",
                    str(self._settings.idle),
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd=self._dir,
                env={**os.environ, "PYTHONPATH": make_python_path()},
            )

    def _end(self) -> None:
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline:
            record = read_record(self._dir)
            mine = self._daemon is not None and self._daemon.poll() is None
            if record is not None and record.alive:
                os.kill(record.pid, signal.SIGTERM)
            elif mine and self._daemon is not None:
                self._daemon.terminate()
            else:
                break
            time.sleep(0.1)
        record = read_record(self._dir)
        if record is not None:
            if record.alive:
                processes.kill_all([*processes.list_descendants(record.pid), record.pid])
            remove_leftovers(record)
            (self._dir / "ray.json").unlink(missing_ok=True)


class JoinedRay:
    """A running Ray cluster that rayps joins and never stops."""

    owned = False

    def __init__(self, address: str) -> None:
        self.address: str | None = address
        self._at = address
        self._cluster: ClusterProcess | None = None
        self._failed: tuple[float, str] | None = None
        self._stopping = threading.Event()

    def capacity(self) -> None:
        """Return None: the size is not known before the cluster is joined, and it may grow."""
        return None

    def cluster(self) -> Actors:
        """Return the joined cluster. Join it at the first call, and again after the connection was lost.

        Raises:
            ClusterError: no cluster answers at the address.
        """
        self._check_reachable()  # at each call, so that a lost head is reported at once
        if self._cluster is not None and not self._cluster.alive:
            self._drop_connection(graceful=False)
        if self._cluster is None:
            self._cluster = self._join()
        return self._cluster

    def renew_lease(self) -> None:
        """Do nothing: a joined cluster has no lease."""

    def disconnect(self, *, end: bool) -> None:
        """Disconnect from the cluster, which keeps running."""
        self._stopping.set()
        self._drop_connection(graceful=True)

    def _join(self) -> ClusterProcess:
        if self._failed is not None and time.monotonic() - self._failed[0] < _RETRY_SECONDS:
            raise ClusterError(self._failed[1])  # e.g. a refused token: wait before the next attempt
        try:
            return ClusterProcess(self._at, give_up_reason=lambda: _SERVICE_STOPS if self._stopping.is_set() else None)
        except ClusterError as error:
            self._failed = (time.monotonic(), str(error))
            raise

    def _drop_connection(self, *, graceful: bool) -> None:
        if self._cluster is not None:
            self._cluster.close(graceful=graceful)
            self._cluster = None

    def _check_reachable(self) -> None:
        host, _, port = self._at.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=3.0).close()
        except OSError as error:
            self._drop_connection(graceful=False)
            raise ClusterError(f"no Ray cluster answers at {self._at}: {error.strerror or error}") from error


class _UnresponsiveTime:
    """Measure how long Ray has not answered while no job made progress, and report when that exceeds `seconds`."""

    def __init__(self, jobs_dir: Path, seconds: float) -> None:
        self.seconds = seconds
        self._jobs_dir = jobs_dir
        self._quiet = QuietTime()
        self._over = False
        self._progress = self._find_newest()

    def observe(self, answers: int) -> bool:
        """Record how many answers Ray has given so far; return whether the limit is exceeded."""
        if self._quiet.observe((answers, self._progress)) > self.seconds:
            newest = self._find_newest()  # called only here, because it reads many files
            self._over = newest == self._progress
            self._progress = newest
        return self._over

    def expired(self) -> bool:
        """Return whether the limit was exceeded at the last observation."""
        return self._over

    def reset(self) -> None:
        """Start again at zero. Call it after a restart of Ray."""
        self._quiet, self._over = QuietTime(), False

    def _find_newest(self) -> int:
        stamps = [0]
        for path in self._jobs_dir.glob("*/progress.json"):
            with contextlib.suppress(OSError):
                stamps.append(path.stat().st_mtime_ns)
        return max(stamps)
