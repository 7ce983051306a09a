"""Find the processes of one job on this machine, and refuse any process that is not the job's or its Ray's.

The job's folder and the state directory name the processes: `progress.json` (workers, servers), `driver.json`,
`service.json`, `ray.json`. A named process is used only if it still is the process that was named: see `refusal`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayps.core.job.records import read_json
from rayps.service import processes
from rayps.service.job_folders import read_attempt
from rayps.service.local_ray.ray_daemon import read_record
from rayps_chaos.faults import FaultRole

_TITLES = {  # a part of the command line of a process of each role
    FaultRole.WORKER: ("WorkerActor", "LoopActor"),
    FaultRole.SERVER: ("ShardActor", "ServerActor"),
    FaultRole.DRIVER: ("DriverActor",),
    FaultRole.MANAGER: ("ManagerActor",),
    FaultRole.SERVICE: ("rayps",),
    FaultRole.RAYLET: ("raylet/raylet",),
    FaultRole.GCS: ("gcs_server",),
}
_UNDER_RAY = (FaultRole.WORKER, FaultRole.SERVER, FaultRole.DRIVER, FaultRole.MANAGER, FaultRole.RAYLET, FaultRole.GCS)
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ChaosProcess:
    """A process of a job. `started`: its start time in clock ticks since boot, which tells it from later processes."""

    role: FaultRole
    number: int
    pid: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether the process is alive, and not another process with its id."""
        return processes.is_alive(self.pid, self.started)


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What the system says about a process that a file named. Times are seconds since the epoch."""

    started_at: float | None  # None if there is no such process
    command: str
    owner: int  # user id
    under_ray: bool  # whether the process descends from the daemon of the state directory's Ray
    named_at: float  # when the file that names the process was written


def refusal(role: FaultRole, facts: ProcessFacts, user: int) -> str | None:
    """Return why a process must not be touched, or None if it is the job's process that was named. Pure."""
    if facts.started_at is None:
        return "it has ended"
    if facts.owner != user and user != 0:
        return f"it belongs to user {facts.owner}"
    if not any(title in facts.command for title in _TITLES[role]):
        return f"its command line is that of another program: {facts.command[:60]!r}"
    if facts.started_at > facts.named_at + 1.0:  # the start time has a resolution of 10 ms, and the clocks differ
        return "a later process has its id"
    if role in _UNDER_RAY and not facts.under_ray:
        return "it does not belong to this service's Ray"
    return None


class JobProcesses:
    """The living processes of one job, of its service and of its Ray on this machine."""

    def __init__(self, state_dir: Path, job_id: str) -> None:
        self.state_dir, self.folder = state_dir, state_dir / "jobs" / job_id

    @property
    def shared_group(self) -> bool:
        """Whether the job stores its parameters on a server group that other jobs may use."""
        group = (read_json(self.folder / "progress.json") or {}).get("server_group") or {}
        return bool(group) and not group.get("own", False)

    def find(self, role: FaultRole) -> list[ChaosProcess]:
        """Return the processes of a role that may be touched, by their numbers."""
        if role is FaultRole.MACHINE:
            own = os.getpid()
            return [ChaosProcess(role, 0, own, processes.start_time(own) or 0)]
        daemon = read_record(self.state_dir)
        under = set() if daemon is None or not daemon.alive else set(processes.list_descendants(daemon.pid))
        found = []
        for number, (pid, named_at) in sorted(self._named(role, under).items()):
            facts = process_facts(pid, named_at, under_ray=pid in under)
            since = processes.start_time(pid)
            if since is not None and refusal(role, facts, os.geteuid()) is None:
                found.append(ChaosProcess(role, number, pid, since))
        return found

    def counts(self) -> dict[FaultRole, int]:
        """Return how many processes of each role there are."""
        return {role: len(self.find(role)) for role in FaultRole}

    def _named(self, role: FaultRole, under: set[int]) -> Mapping[int, tuple[int, float]]:
        """Return a dict from number to (process id, when it was named) of the role's processes."""
        now = time.time()
        progress: Mapping[str, Any] = read_json(self.folder / "progress.json") or {}
        at = float(progress.get("time", 0.0))
        group: Mapping[str, Any] = progress.get("server_group") or {}
        match role:
            case FaultRole.WORKER:
                alive = [each for each in progress.get("workers", []) if each.get("pid") and each["status"] != "dead"]
                return {each["rank"]: (each["pid"], at) for each in alive}
            case FaultRole.SERVER:
                shards = {each["index"]: (each["pid"], at) for each in progress.get("shards", []) if each.get("pid")}
                servers = [each for each in group.get("servers", []) if each.get("pid") and each["state"] == "alive"]
                return shards or {number: (each["pid"], at) for number, each in enumerate(servers)}
            case FaultRole.DRIVER:
                begun = read_attempt(self.folder / "driver.json")
                pid, since = begun.get("pid"), begun.get("started")
                return {0: (pid, now)} if pid is not None and processes.is_alive(pid, since) else {}
            case FaultRole.SERVICE:
                path = self.state_dir / "service.json"
                pid = (read_json(path) or {}).get("pid")
                return {} if pid is None else {0: (pid, path.stat().st_mtime)}
            case FaultRole.MANAGER:
                pid = group.get("manager_pid")
                return {} if pid is None else {0: (pid, at)}
            case _:
                names = _TITLES[role]
                pids = [pid for pid in under if any(name in "".join(processes.read_command(pid)[:1]) for name in names)]
                return {number: (pid, now) for number, pid in enumerate(sorted(pids))}


class NewbornProcesses:
    """The processes of one job that were started since `since` (seconds since the epoch), before files name them.

    The job must be the only one of its service that has been submitted since then.
    """

    def __init__(self, state_dir: Path, since: float) -> None:
        self._state_dir, self.since = state_dir, since

    def find(self, role: FaultRole) -> list[ChaosProcess]:
        """Return the processes of a role, oldest first."""
        daemon, now = read_record(self._state_dir), time.time()
        found: list[tuple[float, int, int]] = []
        for pid in [] if daemon is None or not daemon.alive else processes.list_descendants(daemon.pid):
            facts = process_facts(pid, now, under_ray=True)
            since = processes.start_time(pid)
            if since is None or facts.started_at is None or refusal(role, facts, os.geteuid()) is not None:
                continue
            if facts.started_at >= self.since:
                found.append((facts.started_at, pid, since))
        return [ChaosProcess(role, number, pid, since) for number, (_, pid, since) in enumerate(sorted(found))]

    def age(self, process: ChaosProcess) -> float:
        """Return the seconds since a process was started; infinity if it has ended."""
        facts = process_facts(process.pid, time.time(), under_ray=True)
        return math.inf if facts.started_at is None or not process.alive else time.time() - facts.started_at


def process_facts(pid: int, named_at: float, *, under_ray: bool) -> ProcessFacts:
    """Read the facts of a process from /proc."""
    since = processes.start_time(pid)
    try:
        owner = Path(f"/proc/{pid}").stat().st_uid
        boot = time.time() - float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        since, owner, boot = None, -1, 0.0
    started_at = None if since is None else boot + since / _TICK
    return ProcessFacts(started_at, " ".join(processes.read_command(pid)), owner, under_ray, named_at)
