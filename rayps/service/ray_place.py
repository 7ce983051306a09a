"""Where the service's drivers run: a Ray of its own, kept by `rayps.service.ray_daemon`, or a cluster that it joins.

The service starts no Ray process itself, so that killing the service leaves its jobs alone. It is in no Ray itself
either: `ray_process` asks through a child, so that a Ray that hangs or dies costs the child.
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

from rayps.cluster.local import Actors
from rayps.core.errors import ClusterError
from rayps.service import processes
from rayps.service.liveness import QuietTime
from rayps.service.plan import Bundle
from rayps.service.ray_daemon import HEARTBEAT, LOG, RayRecord, environment, make_token, read_record, sweep
from rayps.service.ray_process import ClusterProcess, python_path
from rayps.service.settings import Settings

log = logging.getLogger(__name__)

_START_SECONDS = 150.0
_RETRY_SECONDS = 15.0
_END_SECONDS = 30.0
_LEAVING = "the service is ending"
_MUTE_SECONDS = 180.0  # without one answer of a Ray that seems to run, and without a job that gets on in it


def place(settings: Settings) -> OwnRay | JoinedRay:
    """The place that the settings ask for."""
    return OwnRay(settings) if settings.address is None else JoinedRay(settings.address)


class OwnRay:
    """A Ray on this machine that belongs to one state directory.

    It is ended and started anew when it has ended, and when it has answered nothing for `mute_seconds` in which no job
    wrote its progress either.
    """

    owned = True

    def __init__(self, settings: Settings, *, mute_seconds: float = _MUTE_SECONDS) -> None:
        self._dir = settings.state_dir
        self._settings = settings
        self._cluster: ClusterProcess | None = None
        self._record: RayRecord | None = None
        self._daemon: subprocess.Popen[bytes] | None = None
        self._failed: tuple[float, str] | None = None
        self._looks = 0  # that the processes before this one have answered
        self._leaving = threading.Event()
        self._busy = threading.Lock()
        self._mute = _Mute(settings.jobs_dir, mute_seconds)

    @property
    def address(self) -> str | None:
        """host:port, once it is up."""
        return None if self._record is None else self._record.address

    def capacity(self) -> Bundle:
        """The logical CPUs of the running Ray, or of the one that will be started."""
        cpus = self._settings.cpus if self._record is None else self._record.cpus
        return {"cpu": float(cpus)}

    def cluster(self) -> Actors:
        """The cluster, joined; starts the daemon when there is none.

        Raises:
            ClusterError: it did not come up, or the service is leaving.
        """
        with self._busy:
            if self._cluster is not None and self._cluster.alive and self._hopeless() is None:
                return self._cluster
            self._forget(goodbye=False)
            if self._mute.over():
                log.error(
                    "Ray has answered nothing for %g s and no job got on: it is ended and started again",
                    self._mute.seconds,
                )
                self._end()
                self._mute.reset()
            self._record = self._ensure()
            assert self._record.address is not None
            self._cluster = ClusterProcess(self._record.address, environment(self._dir), hopeless=self._hopeless)
            return self._cluster

    def touch(self) -> None:
        """Tell the daemon that the service lives."""
        (self._dir / HEARTBEAT).touch(mode=0o600)

    def leave(self, *, end: bool) -> None:
        """Let go, and with `end` stop the daemon and wait until nothing of it is left."""
        self._leaving.set()
        got = self._busy.acquire(timeout=5.0)
        try:
            self._forget(goodbye=not end)
            if end:
                self._end()
        finally:
            if got:
                self._busy.release()

    def _hopeless(self) -> str | None:
        """Why no answer of the joined Ray will come; asked while one is awaited. None: it may come."""
        if self._leaving.is_set():
            return _LEAVING
        self.touch()
        record = read_record(self._dir)
        if record is None or not record.alive or record.state != "ready" or record != self._record:
            return "Ray has ended"
        if self._mute.observe(self._looks + (0 if self._cluster is None else self._cluster.totals)):
            return f"Ray has answered nothing for {self._mute.seconds:g} s"
        return None

    def _forget(self, *, goodbye: bool) -> None:
        if self._cluster is not None:
            self._looks += self._cluster.totals
            self._cluster.close(goodbye=goodbye)
            self._cluster = None
        self._record = None

    def _ensure(self) -> RayRecord:
        deadline = time.monotonic() + _START_SECONDS
        if self._failed is not None and time.monotonic() - self._failed[0] < _RETRY_SECONDS:
            raise ClusterError(self._failed[1])
        while time.monotonic() < deadline and not self._leaving.is_set():
            self.touch()
            record = read_record(self._dir)
            if record is not None and record.alive and record.state == "ready":
                return record
            mine = self._daemon is not None and record is not None and record.pid == self._daemon.pid
            if record is not None and record.state == "failed" and mine:
                (self._dir / "ray.json").unlink(missing_ok=True)
                if record.address is None:  # it never came up: not at once again
                    self._failed = (time.monotonic(), record.reason or "Ray did not start")
                    raise ClusterError(self._failed[1])
                log.warning("%s; it is started again", record.reason)
                continue
            if record is None or not record.alive or record.state in ("stopping", "failed"):
                self._spawn()
            time.sleep(0.1)
        raise ClusterError(
            _LEAVING
            if self._leaving.is_set()
            else f"Ray did not come up within {_START_SECONDS:g} s: see {self._dir / LOG}"
        )

    def _spawn(self) -> None:
        if self._daemon is not None and self._daemon.poll() is None:
            return  # it is on its way, or waits for the one before to end
        make_token(self._dir)
        log.info(
            "starting Ray: jobs may take %d CPUs in all, which share this machine's %d cores",
            self._settings.cpus,
            os.cpu_count() or 1,
        )
        with (self._dir / LOG).open("ab") as out:
            self._daemon = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "rayps.service.ray_daemon",
                    "--state-dir",
                    str(self._dir),
                    "--cpus",
                    str(self._settings.cpus),
                    "--idle",
                    str(self._settings.idle),
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd=self._dir,
                env={**os.environ, "PYTHONPATH": python_path()},
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
                processes.end_all([*processes.below(record.pid), record.pid])
            sweep(record)
            (self._dir / "ray.json").unlink(missing_ok=True)


class JoinedRay:
    """A cluster that others run."""

    owned = False

    def __init__(self, address: str) -> None:
        self.address: str | None = address
        self._at = address
        self._cluster: ClusterProcess | None = None
        self._failed: tuple[float, str] | None = None
        self._leaving = threading.Event()

    def capacity(self) -> None:
        """Not known before it is joined, and it may grow."""
        return None

    def cluster(self) -> Actors:
        """The cluster, joined; joined again after its head did not answer.

        Raises:
            ClusterError: nobody answers at the address.
        """
        self._knock()  # each time: a head that is gone is named at once
        if self._cluster is not None and not self._cluster.alive:
            self._forget(goodbye=False)
        if self._cluster is None:
            self._cluster = self._join()
        return self._cluster

    def touch(self) -> None:
        """Nobody watches."""

    def leave(self, *, end: bool) -> None:
        """Let go; the cluster goes on."""
        self._leaving.set()
        self._forget(goodbye=True)

    def _join(self) -> ClusterProcess:
        if self._failed is not None and time.monotonic() - self._failed[0] < _RETRY_SECONDS:
            raise ClusterError(self._failed[1])  # a refused token, say: not at once again
        try:
            return ClusterProcess(self._at, hopeless=lambda: _LEAVING if self._leaving.is_set() else None)
        except ClusterError as error:
            self._failed = (time.monotonic(), str(error))
            raise

    def _forget(self, *, goodbye: bool) -> None:
        if self._cluster is not None:
            self._cluster.close(goodbye=goodbye)
            self._cluster = None

    def _knock(self) -> None:
        host, _, port = self._at.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=3.0).close()
        except OSError as error:
            self._forget(goodbye=False)
            raise ClusterError(f"no Ray cluster answers at {self._at}: {error.strerror or error}") from error


class _Mute:
    """How long Ray has answered nothing while no job got on, as a limit."""

    def __init__(self, jobs_dir: Path, seconds: float) -> None:
        self.seconds = seconds
        self._jobs_dir = jobs_dir
        self._silence = QuietTime()
        self._over = False
        self._progress = self._newest()

    def observe(self, looks: int) -> bool:
        """Take in how many looks were answered so far; gives whether the limit is passed."""
        if self._silence.observe((looks, self._progress)) > self.seconds:
            newest = self._newest()  # many files: looked at only now
            self._over = newest == self._progress
            self._progress = newest
        return self._over

    def over(self) -> bool:
        """Whether the limit is passed."""
        return self._over

    def reset(self) -> None:
        """Another Ray begins."""
        self._silence, self._over = QuietTime(), False

    def _newest(self) -> int:
        stamps = [0]
        for path in self._jobs_dir.glob("*/progress.json"):
            with contextlib.suppress(OSError):
                stamps.append(path.stat().st_mtime_ns)
        return max(stamps)
