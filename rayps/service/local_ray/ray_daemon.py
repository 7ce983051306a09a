"""The process that starts, watches and stops the Ray that rayps owns. It is not the service's, and imports no ray.

    python -m rayps.service.local_ray.ray_daemon --state-dir DIR --cpus 16 --idle 600

The process locks `ray.lock`, starts `ray start --head --block` on loopback, with token authentication, in a new
temporary directory, writes Ray's address into `ray.json`, and watches Ray. It stops Ray and deletes the directory

- on SIGTERM, and when `ray.json` was deleted;
- when Ray or one of Ray's two required processes (gcs, raylet) has ended;
- when neither the service nor a job has shown activity for `--idle` seconds (suspended time does not count), and no
  driver's process is alive. While a service holds the service's lock, the daemon waits five minutes longer.
"""

from __future__ import annotations

import argparse
import contextlib
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
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from rayps.cluster.local import WORKER_NICENESS
from rayps.service import processes
from rayps.service.liveness import QuietTime
from rayps.service.local_ray.ray_logs import FOLDERS, LogFile, list_removable
from rayps.service.settings import SERVICE_LOCK, private_write

log = logging.getLogger("rayps.service.local_ray.ray_daemon")

RECORD, LOCK, HEARTBEAT, TOKEN, LOG = "ray.json", "ray.lock", "ray_heartbeat", "ray_token", "ray_daemon.log"
_START_SECONDS = 120.0
_POLL_SECONDS = 0.25
_CHECK_SECONDS = 2.0  # seconds between two checks of jobs and processes while there is no activity
_GRACE_SECONDS = 300.0  # seconds beyond `--idle` for a service that is alive but inactive, e.g. suspended
_REQUIRED_PROCESSES = ("gcs_server", "raylet")  # program names
_PRUNE_SECONDS = 60.0  # seconds between two looks for old log files
_DRIVER_TITLE = "DriverActor"  # in the title of a driver's process


@dataclass(frozen=True, slots=True)
class RayRecord:
    """The content of `ray.json`: the daemon's process, and Ray's address and state.

    The state is "starting", "ready", "stopping" or "failed".
    """

    state: str
    pid: int
    started: int | None
    temp_dir: str
    cpus: int
    address: str | None = None
    session: int | None = None  # the process session of Ray's processes
    reason: str | None = None

    @property
    def alive(self) -> bool:
        """Whether the daemon that wrote this record is alive."""
        return processes.is_alive(self.pid, self.started)

    def write(self, state_dir: Path) -> None:
        """Replace `ray.json` atomically."""
        private_write(state_dir / RECORD, json.dumps(asdict(self)))


def read_record(state_dir: Path) -> RayRecord | None:
    """Return the content of `ray.json`, or None if it does not exist or cannot be read."""
    try:
        return RayRecord(**json.loads((state_dir / RECORD).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def make_environment(state_dir: Path) -> dict[str, str]:
    """Return the environment variables with which a process starts or joins the Ray that rayps owns."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(state_dir / TOKEN),
        # with "0" Ray takes 127.0.0.1 as this node's address and listens on loopback only; Linux reads the variable too
        # (ray._private.ray_constants.ENABLE_RAY_CLUSTER)
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        # Ray's gcs would keep an event of each of the last 100,000 calls, and the last 100,000 ended actors: its memory
        # would grow by hundreds of megabytes in a day, and rayps reads neither
        "RAY_task_events_report_interval_ms": "0",
        "RAY_maximum_gcs_destroyed_actor_cached_count": "1000",
        "RAY_worker_niceness": os.environ.get("RAY_worker_niceness", WORKER_NICENESS),  # noqa: SIM112  Ray spells it so
    }


def make_token(state_dir: Path) -> None:
    """Create Ray's token file, readable by its owner only. A file that Ray creates is readable by all users."""
    path = state_dir / TOKEN
    if not path.exists() or not path.read_text().strip():
        private_write(path, secrets.token_hex(32))
    path.chmod(0o600)


def remove_leftovers(record: RayRecord) -> None:
    """Remove the processes and the temporary directory that a killed daemon left."""
    temp = Path(record.temp_dir)
    if temp.name.startswith("rayps-"):  # never delete a directory that rayps did not create
        processes.kill_all(processes.find_left_by_ray(str(temp), record.session))
        shutil.rmtree(temp, ignore_errors=True)


class Daemon:
    """Start, watch and stop the Ray of one state directory."""

    def __init__(self, state_dir: Path, cpus: int, idle: float) -> None:
        self._state_dir = state_dir
        self._idle = idle
        self._stop_requested = False
        self._ray: subprocess.Popen[bytes] | None = None
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        temp = tempfile.mkdtemp(prefix="rayps-", dir=_choose_temp())
        self.record = RayRecord("starting", os.getpid(), processes.start_time(os.getpid()), temp, cpus)

    def run(self) -> int:
        """Start, watch and stop Ray; return the exit code."""
        processes.adopt_orphans()
        self._write("starting")
        failure = None
        try:
            if not self._stop_requested:
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
            f"--object-store-memory={_choose_object_store_bytes()}",
        ]
        return subprocess.Popen(
            command,
            env=env | make_environment(self._state_dir),
            stdin=subprocess.DEVNULL,
            cwd=self._state_dir,
            start_new_session=True,
            preexec_fn=processes.die_with_parent,
        )

    @property
    def _ray_temp(self) -> Path:
        # Ray makes its folder readable by all users, and the folder above is private
        return Path(self.record.temp_dir) / "r"

    def _wait_for_address(self, ray: subprocess.Popen[bytes]) -> str | None:
        file = self._ray_temp / "ray_current_cluster"
        deadline = time.monotonic() + _START_SECONDS
        while not self._stop_requested and time.monotonic() < deadline:
            if ray.poll() is not None:
                return f"Ray did not start: it exited with code {ray.returncode}; see {self._state_dir / LOG}"
            if file.exists() and (address := file.read_text().strip()):
                self._write("ready", address=address)
                return None
            time.sleep(0.1)
        return (
            None
            if self._stop_requested
            else (f"Ray did not start within {_START_SECONDS:g} s: see {self._state_dir / LOG}")
        )

    def _watch(self, failure: str | None) -> str | None:
        lease = Lease(self._state_dir, self._idle)
        found: dict[str, tuple[int, int | None]] = {}
        prune_at = time.monotonic() + _PRUNE_SECONDS
        while failure is None and not self._stop_requested and self._is_ours():
            found = found if len(found) == len(_REQUIRED_PROCESSES) else self._find_required_processes()
            gone = [name for name, (pid, since) in found.items() if not processes.is_alive(pid, since)]
            if self._ray is not None and self._ray.pid in processes.reap():
                failure = f"Ray has ended by itself: see {self._state_dir / LOG}"
            elif gone:
                failure = f"Ray's {gone[0]} has ended: see {self._state_dir / LOG}"
            elif lease.expired():
                log.info("no activity of the service or a job for %g s (--idle): stopping Ray", self._idle)
                return None
            if time.monotonic() >= prune_at:
                self._prune_logs()
                prune_at = time.monotonic() + _PRUNE_SECONDS
            time.sleep(_POLL_SECONDS)
        return failure

    def _prune_logs(self) -> None:
        """Remove old log files of ended processes."""
        folder, found = self._ray_temp / "session_latest" / "logs", list[LogFile]()
        for part in FOLDERS:
            with contextlib.suppress(OSError):  # Ray is ending, or has no such folder
                for path in (folder / part).iterdir():
                    with contextlib.suppress(OSError):  # the file was removed
                        found.append(LogFile(str(path.relative_to(folder)), path.stat().st_mtime))
        for name in list_removable(found, set(processes.list_descendants(os.getpid())), time.time()):
            (folder / name).unlink(missing_ok=True)

    def _find_required_processes(self) -> dict[str, tuple[int, int | None]]:
        """Return a dict from the name of each required process of Ray that was found to (process id, start time)."""
        found = {}
        for pid in processes.list_descendants(os.getpid()):
            name = Path(next(iter(processes.read_command(pid)), "")).name
            if name in _REQUIRED_PROCESSES:
                found[name] = (pid, processes.start_time(pid))
        return found

    def _end(self) -> None:
        if self._is_ours():
            self._write("stopping")
        processes.kill_descendants(os.getpid())
        shutil.rmtree(self.record.temp_dir, ignore_errors=True)

    def _is_ours(self) -> bool:
        found = read_record(self._state_dir)
        return found is not None and found.pid == self.record.pid

    def _write(self, state: str, **facts: str | int) -> None:
        self.record = RayRecord(**{**asdict(self.record), **facts, "state": state})
        if self._state_dir.is_dir():
            self.record.write(self._state_dir)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stop_requested = True


class Lease:
    """A lease on Ray, renewed by each change of the service's heartbeat file and of a job's progress file.

    Seconds are counted by this process (see `QuietTime`); the system's wall clock is not used.
    """

    def __init__(
        self,
        state_dir: Path,
        idle: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        drivers: Callable[[], bool] | None = None,
    ) -> None:
        """Start a lease of `idle` seconds. `drivers` returns whether a driver's process is alive."""
        self._state_dir = state_dir
        self._idle = idle
        self._silence = QuietTime(clock)
        self._clock = clock
        self._drivers = drivers or _are_drivers_alive
        self._jobs = _find_newest_of_jobs(state_dir)
        self._checked_at = clock() - _CHECK_SECONDS

    def expired(self) -> bool:
        """Check for activity; return whether the lease has expired.

        Job files and processes are read only after `idle` seconds without a heartbeat, because that takes long.
        """
        silent = self._silence.observe((_read_change_time(self._state_dir / HEARTBEAT), self._jobs))
        if silent <= self._idle or 0.0 <= self._clock() - self._checked_at < _CHECK_SECONDS:
            return False
        self._checked_at = self._clock()
        jobs = _find_newest_of_jobs(self._state_dir)
        if jobs != self._jobs:  # a job made progress
            self._jobs = jobs
            self._silence.observe((_read_change_time(self._state_dir / HEARTBEAT), jobs))
            return False
        return is_expired(silent, self._idle, service=service_is_alive(self._state_dir), drivers=self._drivers())


def is_expired(silent: float, idle: float, *, service: bool, drivers: bool) -> bool:
    """Return whether Ray may be stopped after `silent` seconds without activity. Pure."""
    if drivers or silent <= idle:
        return False
    return not service or silent > idle + _GRACE_SECONDS


def service_is_alive(state_dir: Path) -> bool:
    """Return whether /proc/locks shows that a service holds the lock of this state directory. Locks nothing itself."""
    try:
        inode = str((state_dir / SERVICE_LOCK).stat().st_ino)
        held = [line.split() for line in Path("/proc/locks").read_text().splitlines() if " FLOCK " in line]
    except OSError:
        return False
    return any(inode == part.rpartition(":")[2] for line in held for part in line if part.count(":") == 2)


def _are_drivers_alive() -> bool:
    return any(
        _DRIVER_TITLE in " ".join(processes.read_command(pid)) for pid in processes.list_descendants(os.getpid())
    )


def _find_newest_of_jobs(state_dir: Path) -> int:
    """Return the newest time, over all jobs, at which a progress or outcome file changed, in ns since the epoch."""
    newest = 0
    for progress in state_dir.glob("jobs/*/progress.json"):
        newest = max(newest, _read_change_time(progress.parent / "outcome.json") or _read_change_time(progress))
    return newest


def _read_change_time(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _choose_temp() -> str:
    # Ray makes unix sockets below its folder, whose paths have at most 107 bytes
    return tempfile.gettempdir() if len(tempfile.gettempdir()) <= 20 else "/tmp"


def _choose_object_store_bytes() -> int:
    # rayps sends tensors over its own connections, so Ray's store holds only users' objects; Ray's minimum is 75 MB
    room = shutil.disk_usage("/dev/shm").total // 4 if Path("/dev/shm").is_dir() else 0
    return min(max(room, 80_000_000), 1_000_000_000)


def _lock(state_dir: Path, seconds: float = 60.0) -> int | None:
    """Lock `ray.lock` until this process ends; wait up to `seconds` while another daemon stops.

    Return the lock's descriptor, or None if another daemon is running.
    """
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
                return None  # another daemon is running
            time.sleep(0.1)


def main() -> int:
    """Run the daemon."""
    parser = argparse.ArgumentParser(description="run the Ray of a rayps service")
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--cpus", type=int, required=True)
    parser.add_argument("--idle", type=float, required=True)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    if _lock(given.state_dir) is None:
        return 0
    stale = read_record(given.state_dir)
    if stale is not None and not stale.alive:
        remove_leftovers(stale)
    return Daemon(given.state_dir, given.cpus, given.idle).run()


if __name__ == "__main__":
    raise SystemExit(main())
