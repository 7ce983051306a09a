"""Where the service's drivers run: a Ray of its own, kept by `rayps.service.ray_daemon`, or a cluster that it joins.

The service starts no Ray process itself, so that killing the service leaves its jobs alone. ray is imported
when the first cluster is joined, never before.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import rayps
from rayps.cluster import Cluster
from rayps.errors import ClusterError
from rayps.service import processes
from rayps.service.plan import Bundle
from rayps.service.ray_daemon import HEARTBEAT, LOG, RayRecord, environment, make_token, read_record, sweep
from rayps.service.settings import Settings

log = logging.getLogger(__name__)

_START_SECONDS = 150.0
_RETRY_SECONDS = 15.0
_END_SECONDS = 30.0
_GOODBYE_SECONDS = 20.0
# a Ray client ends its process when the head is silent for this long (60 by default): never the service's
_PATIENT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "1000000"}


def place(settings: Settings) -> OwnRay | JoinedRay:
    """The place that the settings ask for."""
    return OwnRay(settings) if settings.address is None else JoinedRay(settings.address)


class OwnRay:
    """A Ray on this machine that belongs to one state directory."""

    owned = True

    def __init__(self, settings: Settings) -> None:
        self._dir = settings.state_dir
        self._settings = settings
        self._cluster: Cluster | None = None
        self._record: RayRecord | None = None
        self._daemon: subprocess.Popen[bytes] | None = None
        self._failed: tuple[float, str] | None = None
        self._leaving = threading.Event()
        self._busy = threading.Lock()

    @property
    def address(self) -> str | None:
        """host:port, once it is up."""
        return None if self._record is None else self._record.address

    def capacity(self) -> Bundle:
        """The logical CPUs of the running Ray, or of the one that will be started."""
        cpus = self._settings.cpus if self._record is None else self._record.cpus
        return {"cpu": float(cpus)}

    def cluster(self) -> Cluster:
        """The cluster, joined; starts the daemon when there is none.

        Raises:
            ClusterError: it did not come up, or the service is leaving.
        """
        with self._busy:
            record = read_record(self._dir)
            if self._cluster is not None and record is not None and record == self._record and record.alive:
                return self._cluster
            self._forget()
            self._record = self._ensure()
            assert self._record.address is not None
            self._cluster = _join(self._record.address, environment(self._dir) | _PATIENT)
            return self._cluster

    def touch(self) -> None:
        """Tell the daemon that the service lives."""
        (self._dir / HEARTBEAT).touch(mode=0o600)

    def leave(self, *, end: bool) -> None:
        """Let go, and with `end` stop the daemon and wait until nothing of it is left."""
        self._leaving.set()
        got = self._busy.acquire(timeout=5.0)
        try:
            self._forget()
            if end:
                self._end()
        finally:
            if got:
                self._busy.release()

    def _forget(self) -> None:
        if self._cluster is not None:
            _close(self._cluster)
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
                self._failed = (time.monotonic(), record.reason or "Ray did not start")
                (self._dir / "ray.json").unlink(missing_ok=True)
                raise ClusterError(self._failed[1])
            if record is None or not record.alive or record.state in ("stopping", "failed"):
                self._spawn()
            time.sleep(0.1)
        raise ClusterError("the service is ending" if self._leaving.is_set() else
                           f"Ray did not come up within {_START_SECONDS:g} s: see {self._dir / LOG}")

    def _spawn(self) -> None:
        if self._daemon is not None and self._daemon.poll() is None:
            return  # it is on its way, or waits for the one before to end
        make_token(self._dir)
        log.info("starting Ray: jobs may take %d CPUs in all, which share this machine's %d cores",
                 self._settings.cpus, os.cpu_count() or 1)
        with (self._dir / LOG).open("ab") as out:
            self._daemon = subprocess.Popen(
                [sys.executable, "-m", "rayps.service.ray_daemon", "--state-dir", str(self._dir),
                 "--cpus", str(self._settings.cpus), "--idle", str(self._settings.idle)],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd=self._dir,
                env={**os.environ, "PYTHONPATH": _python_path()})

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
        self._cluster: Cluster | None = None
        self._suspect = False

    def capacity(self) -> None:
        """Not known before it is joined, and it may grow."""
        return None

    def cluster(self) -> Cluster:
        """The cluster, joined; joined again after its head did not answer.

        Raises:
            ClusterError: nobody answers at the address.
        """
        self._knock()  # each time: a call to a head that is gone would hang
        if self._suspect and self._cluster is not None:
            _close(self._cluster)
            self._cluster = None
        self._suspect = False
        if self._cluster is None:
            self._cluster = _join(self._at, _PATIENT)
        return self._cluster

    def touch(self) -> None:
        """Nobody watches."""

    def leave(self, *, end: bool) -> None:
        """Let go; the cluster goes on."""
        if self._cluster is not None:
            _close(self._cluster)
            self._cluster = None

    def _knock(self) -> None:
        host, _, port = self._at.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=3.0).close()
        except OSError as error:
            self._suspect = True
            raise ClusterError(f"no Ray cluster answers at {self._at}: {error.strerror or error}") from error


def _close(cluster: Cluster) -> None:
    """Let go of a cluster that may be gone; Ray's own goodbye to a dead head has no end."""
    goodbye = threading.Thread(target=cluster.close, name="rayps-goodbye", daemon=True)
    goodbye.start()
    goodbye.join(_GOODBYE_SECONDS)
    if goodbye.is_alive():
        log.warning("Ray does not let go within %g s", _GOODBYE_SECONDS)


def _join(address: str, env: dict[str, str]) -> Cluster:
    os.environ.update(env)  # Ray reads it when it is imported, and once more when it connects
    if "RAY_AUTH_TOKEN_PATH" in env:
        os.environ.pop("RAY_AUTH_TOKEN", None)  # of another Ray: it would win over the file
    joined: Cluster = importlib.import_module("rayps.ray_cluster").RayCluster.join(address)
    return joined


def _python_path() -> str:
    home = str(Path(rayps.__file__).resolve().parent.parent)  # a source tree that is not installed
    rest = os.environ.get("PYTHONPATH")
    return home if not rest else f"{home}{os.pathsep}{rest}"
