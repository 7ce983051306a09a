"""The process that keeps an own Ray alive beside the service, and ends it without a trace. Imports no ray.

    python -m rayps.service.ray_daemon --state-dir DIR --cpus 16 --idle 600

It holds `ray.lock`, starts `ray start --head --block` on loopback with token authentication in a temporary
directory of its own, says in `ray.json` where it is, and watches. It ends everything when told (SIGTERM), when Ray or
one of its two pillars (gcs, raylet) ends, when its `ray.json` is gone, and when for `--idle` seconds, of those in which
it ran itself, neither the service nor a job gave a sign. Before that last end it looks once more: as long as a driver's
process lives it does not end Ray, and a service that holds its lock gets time to give a sign.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rayps.cluster.local import WORKER_NICENESS
from rayps.service import processes
from rayps.service.liveness import QuietTime
from rayps.service.settings import SERVICE_LOCK, private_write

log = logging.getLogger("rayps.service.ray_daemon")

RECORD, LOCK, HEARTBEAT, TOKEN, LOG = "ray.json", "ray.lock", "ray_heartbeat", "ray_token", "ray_daemon.log"
_START_SECONDS = 120.0
_POLL_SECONDS = 0.25
_ASK_SECONDS = 2.0  # between two looks at jobs and processes, while all is silent
_GRACE_SECONDS = 300.0  # beyond `--idle` for a service that lives, and gives no sign: it may have been suspended
_PILLARS = ("gcs_server", "raylet")  # Ray's processes without which it is none, as their programs are called
_DRIVER_TITLE = "DriverActor"  # in the title of a driver's process


@dataclass(frozen=True, slots=True)
class RayRecord:
    """What `ray.json` says: whose Ray, where, and its state (starting, ready, stopping, failed)."""

    state: str
    pid: int
    started: int | None
    temp_dir: str
    cpus: int
    address: str | None = None
    session: int | None = None  # of Ray's processes, as the system counts them
    reason: str | None = None

    @property
    def alive(self) -> bool:
        """Whether its daemon lives."""
        return processes.alive(self.pid, self.started)

    def write(self, state_dir: Path) -> None:
        """Replace `ray.json` in one step."""
        private_write(state_dir / RECORD, json.dumps(asdict(self)))


def read_record(state_dir: Path) -> RayRecord | None:
    """What `ray.json` says; None when it is not there or cannot be read."""
    try:
        return RayRecord(**json.loads((state_dir / RECORD).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def environment(state_dir: Path) -> dict[str, str]:
    """What a process needs in its environment before it imports ray, to start or join the own Ray."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(state_dir / TOKEN),
        # makes Ray take 127.0.0.1 as this node's address, so that it listens on loopback only; despite its
        # name it is read everywhere (ray._private.ray_constants.ENABLE_RAY_CLUSTER)
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "RAY_worker_niceness": os.environ.get("RAY_worker_niceness", WORKER_NICENESS),  # noqa: SIM112  Ray spells it so
    }


def make_token(state_dir: Path) -> None:
    """Make the token of the own Ray before Ray would, since Ray's own file is readable by all."""
    path = state_dir / TOKEN
    if not path.exists() or not path.read_text().strip():
        private_write(path, secrets.token_hex(32))
    path.chmod(0o600)


def sweep(record: RayRecord) -> None:
    """Remove what a daemon left that was itself killed: its processes and its temporary directory."""
    temp = Path(record.temp_dir)
    if temp.name.startswith("rayps-"):  # ours, whatever the file says
        processes.end_all(processes.left_in(str(temp), record.session))
        shutil.rmtree(temp, ignore_errors=True)


class Daemon:
    """One own Ray, from its start to its end."""

    def __init__(self, state_dir: Path, cpus: int, idle: float) -> None:
        self._state_dir = state_dir
        self._idle = idle
        self._told_to_stop = False
        self._ray: subprocess.Popen[bytes] | None = None
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        temp = tempfile.mkdtemp(prefix="rayps-", dir=_short_temp())
        self.record = RayRecord("starting", os.getpid(), processes.started(os.getpid()), temp, cpus)

    def run(self) -> int:
        """Start, watch, end; gives the exit code."""
        processes.adopt_orphans()
        self._write("starting")
        failure = None
        try:
            if not self._told_to_stop:
                self._ray = self._start()
                self._write("starting", session=self._ray.pid)
                failure = self._watch(self._wait_for_address(self._ray))
        finally:
            self._end()
        if failure:
            log.error("%s", failure)
            self._write("failed", reason=failure)
            return 1
        if self._is_ours():
            (self._state_dir / RECORD).unlink(missing_ok=True)
        return 0

    def _start(self) -> subprocess.Popen[bytes]:
        make_token(self._state_dir)
        env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        command = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--head",
            "--block",
            "--port=0",
            "--node-ip-address=127.0.0.1",
            f"--temp-dir={self._ray_temp}",
            "--include-dashboard=false",
            "--disable-usage-stats",
            f"--num-cpus={self.record.cpus}",
            "--no-monitor",
            "--include-log-monitor=false",
            f"--object-store-memory={_object_store_bytes()}",
        ]
        return subprocess.Popen(
            command,
            env=env | environment(self._state_dir),
            stdin=subprocess.DEVNULL,
            cwd=self._state_dir,
            start_new_session=True,
            preexec_fn=processes.die_with_parent,
        )

    @property
    def _ray_temp(self) -> Path:
        return Path(self.record.temp_dir) / "r"  # Ray opens its folder to everybody; ours around it is private

    def _wait_for_address(self, ray: subprocess.Popen[bytes]) -> str | None:
        file = self._ray_temp / "ray_current_cluster"
        deadline = time.monotonic() + _START_SECONDS
        while not self._told_to_stop and time.monotonic() < deadline:
            if ray.poll() is not None:
                return f"Ray did not start, it ended with code {ray.returncode}: see {self._state_dir / LOG}"
            if file.exists() and (address := file.read_text().strip()):
                self._write("ready", address=address)
                return None
            time.sleep(0.1)
        return (
            None
            if self._told_to_stop
            else (f"Ray did not start within {_START_SECONDS:g} s: see {self._state_dir / LOG}")
        )

    def _watch(self, failure: str | None) -> str | None:
        lease = Lease(self._state_dir, self._idle)
        pillars: dict[str, tuple[int, int | None]] = {}
        while failure is None and not self._told_to_stop and self._is_ours():
            pillars = pillars if len(pillars) == len(_PILLARS) else self._pillars()
            gone = [name for name, (pid, since) in pillars.items() if not processes.alive(pid, since)]
            if self._ray is not None and self._ray.pid in processes.reap():
                failure = f"Ray ended by itself: see {self._state_dir / LOG}"
            elif gone:
                failure = f"Ray's {gone[0]} has ended: see {self._state_dir / LOG}"
            elif lease.over():
                log.info("neither service nor job for %g s: ending", self._idle)
                return None
            time.sleep(_POLL_SECONDS)
        return failure

    def _pillars(self) -> dict[str, tuple[int, int | None]]:
        """Ray's processes without which it is none, by name: (process id, start)."""
        found = {}
        for pid in processes.below(os.getpid()):
            name = Path(next(iter(processes.command(pid)), "")).name
            if name in _PILLARS:
                found[name] = (pid, processes.started(pid))
        return found

    def _end(self) -> None:
        if self._is_ours():
            self._write("stopping")
        processes.end_tree(os.getpid())
        shutil.rmtree(self.record.temp_dir, ignore_errors=True)

    def _is_ours(self) -> bool:
        found = read_record(self._state_dir)
        return found is not None and found.pid == self.record.pid

    def _write(self, state: str, **facts: Any) -> None:
        self.record = replace(self.record, state=state, **facts)
        if self._state_dir.is_dir():
            self.record.write(self._state_dir)

    def _stop(self, *_: Any) -> None:
        self._told_to_stop = True


class Lease:
    """Whether an own Ray is still needed. It is renewed by each change of the service's heartbeat and of a file of a
    job, counted by this process's own clock (see `QuietTime`); the system's wall clock plays no part.
    """

    def __init__(
        self,
        state_dir: Path,
        idle: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        drivers: Callable[[], bool] | None = None,
    ) -> None:
        """`idle` in seconds; `drivers` tells whether a driver's process lives."""
        self._state_dir = state_dir
        self._idle = idle
        self._silence = QuietTime(clock)
        self._clock = clock
        self._drivers = drivers or _drivers_live
        self._jobs = _newest_of_jobs(state_dir)
        self._asked = clock() - _ASK_SECONDS

    def over(self) -> bool:
        """Look, and tell whether nobody needs this Ray any more. Asks for more only when all has been silent."""
        silent = self._silence.observe((_changed(self._state_dir / HEARTBEAT), self._jobs))
        if silent <= self._idle or 0.0 <= self._clock() - self._asked < _ASK_SECONDS:
            return False
        self._asked = self._clock()
        jobs = _newest_of_jobs(self._state_dir)
        if jobs != self._jobs:  # a job got on since the last look
            self._jobs = jobs
            self._silence.observe((_changed(self._state_dir / HEARTBEAT), jobs))
            return False
        return is_over(silent, self._idle, service=service_lives(self._state_dir), drivers=self._drivers())


def is_over(silent: float, idle: float, *, service: bool, drivers: bool) -> bool:
    """Whether a Ray that nobody gave a sign for during `silent` seconds may end."""
    if drivers or silent <= idle:
        return False
    return not service or silent > idle + _GRACE_SECONDS


def service_lives(state_dir: Path) -> bool:
    """Whether a service of this state directory lives: it holds its lock, which is looked at and not touched."""
    try:
        inode = str((state_dir / SERVICE_LOCK).stat().st_ino)
        held = [line.split() for line in Path("/proc/locks").read_text().splitlines() if " FLOCK " in line]
    except OSError:
        return False
    return any(inode == part.rpartition(":")[2] for line in held for part in line if part.count(":") == 2)


def _drivers_live() -> bool:
    return any(_DRIVER_TITLE in " ".join(processes.command(pid)) for pid in processes.below(os.getpid()))


def _newest_of_jobs(state_dir: Path) -> int:
    """The newest change of a job that has not ended, or of its end."""
    newest = 0
    for progress in state_dir.glob("jobs/*/progress.json"):
        newest = max(newest, _changed(progress.parent / "outcome.json") or _changed(progress))
    return newest


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _short_temp() -> str:
    # Ray puts unix sockets below its folder, and their paths may have 107 bytes at most
    return tempfile.gettempdir() if len(tempfile.gettempdir()) <= 20 else "/tmp"


def _object_store_bytes() -> int:
    # tensors travel over rayps's own links: the store holds only what users put there. Ray's floor is 75 MB.
    room = shutil.disk_usage("/dev/shm").total // 4 if Path("/dev/shm").is_dir() else 0
    return min(max(room, 80_000_000), 1_000_000_000)


def _lock(state_dir: Path, seconds: float = 60.0) -> int | None:
    """The lock that one daemon holds as long as it lives; waits for one that is stopping."""
    descriptor = os.open(state_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError:
            found = read_record(state_dir)
            if time.monotonic() > deadline or (found is not None and found.alive and found.state == "ready"):
                os.close(descriptor)
                return None  # another one serves
            time.sleep(0.1)


def main() -> int:
    """Run one daemon until its end."""
    parser = argparse.ArgumentParser(description="keeps the Ray of a rayps service")
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--cpus", type=int, required=True)
    parser.add_argument("--idle", type=float, required=True)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    if _lock(given.state_dir) is None:
        return 0
    stale = read_record(given.state_dir)
    if stale is not None and not stale.alive:
        sweep(stale)
    return Daemon(given.state_dir, given.cpus, given.idle).run()


if __name__ == "__main__":
    raise SystemExit(main())
