"""Find, start, stop and kill the drivers of jobs in the cluster. Called from one thread.

A driver is a detached actor with the name of its job. A job therefore has at most one driver, and a restarted service
finds the driver by this name. A driver starts its work by itself. Two files in the job's folder show how far a start
has come: the driver writes `driver.json` when it begins, and the service writes `launch.json` when the call that starts
the driver has returned.

Both files contain the driver's protocol number. If it differs from this service's number, another version of rayps
started the driver. The service calls no method of such a driver. The driver finishes its job, or is killed when a stop
is requested.
"""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rayps_client.errors import ClusterError
from rayps_client.values import Keywords

from rayps.cluster.local import FIRST_PROTOCOL, PROTOCOL, ActorHandle, Actors, Bundle
from rayps.cluster.notices import Notice
from rayps.cluster.warm import WarmState
from rayps.core.failpoint import passing
from rayps.core.job.records import AttemptRecord
from rayps.service import processes
from rayps.service.job_folders import read_attempt
from rayps.service.notice_store import NoticeChanges
from rayps.service.plan import Start
from rayps.service.settings import private_write
from rayps.service.store import JobRecord

log = logging.getLogger(__name__)

DRIVER = "rayps.runtime.driver.driver_actor:DriverActor"
BEGUN, LAUNCHED = "driver.json", "launch.json"
_END_SECONDS = 10.0  # seconds in which a driver must end by itself after it wrote its outcome
_STOP_PAUSE = 5.0  # seconds between two equal requests to a driver


class RayHome(Protocol):
    """The Ray cluster in which drivers run: one that rayps owns, or one that it joined. Called from one thread."""

    @property
    def owned(self) -> bool:
        """Whether rayps owns the Ray cluster, that is, starts and stops it."""

    @property
    def address(self) -> str | None:
        """The address host:port of the Ray cluster, or None if it is not known yet."""

    def capacity(self) -> Bundle | None:
        """Return the total resources, or None if they are not known before Ray has started."""

    def cluster(self) -> Actors:
        """Return the joined cluster. Raises ClusterError if the cluster cannot be joined."""

    def renew_lease(self) -> None:
        """Tell a Ray that rayps owns that the service is alive."""

    def disconnect(self, *, end: bool) -> None:
        """Disconnect from Ray. With `end`, also stop Ray if rayps owns it."""


@dataclass(frozen=True, slots=True)
class DriverView:
    """The ids of the jobs whose driver is alive, and the cluster's free and total resources, as of one moment.

    `warm`: the processes that wait for a job; None if the service keeps none. Hosts that a notice concerns are not
    counted in the resources: no new worker should start there.
    """

    drivers: frozenset[str]
    free: Bundle
    total: Bundle
    warm: WarmState | None = None
    notices: tuple[Notice, ...] = ()


class Drivers:
    """Find, start, stop and kill the drivers of the jobs in `jobs_dir`, in the Ray cluster `place`."""

    def __init__(self, place: RayHome, jobs_dir: Path, warm: int = 0, *, anywhere: bool = False) -> None:
        """Prepare. `warm` is the number of processes to keep warm: see `rayps.cluster.warm`.

        `anywhere`: every host of the cluster has `jobs_dir`, so that a driver may run on each of them.
        """
        self._warm, self._anywhere = warm, anywhere
        self._notices: tuple[Notice, ...] = ()  # of the last view
        self.cluster: Actors | None = None  # the cluster that the last `view` joined
        self.join_count = 0  # number of times that a cluster was joined
        self._place = place
        self._jobs_dir = jobs_dir
        self._handles: dict[str, ActorHandle] = {}
        self._stop_requested_at: dict[str, float] = {}
        self._ended_at: dict[str, float] = {}
        self._killed: dict[str, tuple[int, str]] = {}
        # from job to (attempt, number of workers) that its driver was told last, and when
        self._allowed: dict[str, tuple[tuple[int, int], float]] = {}

    def view(self, watched: list[str]) -> DriverView:
        """Return which of the watched jobs have a living driver, and the cluster's resources.

        Raises:
            ClusterError: Ray does not answer.
        """
        self._place.renew_lease()
        cluster = self._place.cluster()
        if cluster is not self.cluster:  # a new connection: handles that an earlier connection returned are invalid
            self.cluster = cluster
            self.join_count += 1
            self._handles.clear()
        self._kill_ended(cluster)
        living = set()
        for job_id in watched:
            handle = cluster.find(_name_actor(job_id))
            if handle is not None:
                self._handles[job_id] = handle
                living.add(job_id)
        warm = cluster.keep_warm(self._warm) if self._warm else None
        notices = self._notices = cluster.notices()
        if any(one.node and one.pid is None for one in notices):
            free, total = (_leave_out_ending(cluster.hosts(free), notices) for free in (True, False))
        else:
            free, total = cluster.free(), cluster.total()
        return DriverView(frozenset(living), free, total, warm, notices)

    def start(self, job: JobRecord, start: Start) -> None:
        """Start the driver of an attempt; first kill the previous attempt's process if it is still alive.

        Raises:
            ClusterError: the driver could not be started, or it is unknown whether it was.
        """
        folder = self._jobs_dir / job.id
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        end_process(folder)
        elsewhere: Keywords = {}
        if job.spec.environment.env:
            elsewhere["variables"] = job.spec.environment.looked_up(os.environ)
        if self._anywhere:
            ending = {one.node for one in self._notices if one.node and one.pid is None}
            elsewhere |= {"anywhere": True, "avoid": tuple(sorted(ending))}
        try:
            self._handles[job.id] = self._require_cluster().spawn(
                DRIVER,
                job.spec.to_dict(),
                str(folder),
                start.attempt,
                start.failures,
                name=_name_actor(job.id),
                detached=True,
                here=True,
                cpus=0.0,
                warm=not job.spec.environment.requirements,  # an imported package keeps its version
                **elsewhere,
            )
            passing("launch: started, not noted")
        finally:
            private_write(folder / LAUNCHED, json.dumps({"attempt": start.attempt, "protocol": PROTOCOL}))

    def allow(self, job: JobRecord, workers: int, reason: str) -> None:
        """Tell a driver how many workers its elastic job may have. The same number within 5 s is told once."""
        handle = self._handles.get(job.id)
        told, at = self._allowed.get(job.id, ((0, 0), -1e9))
        if handle is None or (told == (job.attempt, workers) and time.monotonic() - at < _STOP_PAUSE):
            return
        self._allowed[job.id] = (job.attempt, workers), time.monotonic()
        handle.call("allow", workers, reason)

    def pass_on(self, found: NoticeChanges) -> None:
        """Announce and withdraw notices in the cluster."""
        cluster = self._require_cluster()
        for one in found.announce:
            cluster.announce(one)
        for one in found.withdraw:
            cluster.withdraw(one)

    def request_stop(self, job_id: str) -> None:
        """Request a driver to stop, and to write the job's outcome. A request within 5 s of the last one is omitted."""
        handle = self._handles.get(job_id)
        if handle is None or time.monotonic() - self._stop_requested_at.get(job_id, -1e9) < _STOP_PAUSE:
            return
        self._stop_requested_at[job_id] = time.monotonic()
        passing("stop: stored, driver not asked")
        handle.call("stop")
        passing("stop: driver asked")

    def kill(self, job: JobRecord, reason: str) -> None:
        """Kill a driver. `reason` is shown with the job's next status."""
        self._killed[job.id] = job.attempt, reason
        handle = self._handles.pop(job.id, None)
        passing("kill: chosen, not done")
        if handle is not None:
            self._require_cluster().kill(handle)
        end_process(self._jobs_dir / job.id)
        passing("kill: done")

    def record_end(self, job_id: str) -> None:
        """Record that a job has ended. If its driver is still alive after 10 s, a later `view` kills the driver."""
        self._stop_requested_at.pop(job_id, None)
        self._killed.pop(job_id, None)
        self._allowed.pop(job_id, None)
        self._ended_at[job_id] = time.monotonic()

    def crash_reason(self, job: JobRecord, begun: AttemptRecord) -> str | None:
        """Return why the driver of the current attempt was killed or crashed, or None if neither is known.

        `begun`: the content of `driver.json`.
        """
        attempt, reason = self._killed.get(job.id, (0, None))
        if attempt == job.attempt:
            return reason
        crash = begun.get("crash") if begun.get("attempt") == job.attempt else None
        return None if crash is None else str(crash)

    def _require_cluster(self) -> Actors:
        if self.cluster is None:
            raise ClusterError("the service has not joined a Ray cluster yet")
        return self.cluster

    def _kill_ended(self, cluster: Actors) -> None:
        for job_id, since in list(self._ended_at.items()):
            if time.monotonic() - since > _END_SECONDS:
                handle = cluster.find(_name_actor(job_id))
                if handle is not None:
                    log.warning("the driver of job %s did not end by itself and is killed", job_id)
                    cluster.kill(handle)
                end_process(self._jobs_dir / job_id)
                self._handles.pop(job_id, None)
                self._ended_at.pop(job_id)


def _leave_out_ending(hosts: dict[str, Bundle], notices: tuple[Notice, ...]) -> Bundle:
    """Return the CPUs and GPUs of all hosts except those that a notice concerns."""
    ending = {one.node for one in notices if one.pid is None}
    left = [has for name, has in hosts.items() if name not in ending]
    return {kind: sum(has.get(kind, 0.0) for has in left) for kind in ("cpu", "gpu")}


def _name_actor(job_id: str) -> str:
    return f"driver-{job_id}"


def explain_version_conflict(attempt: int, begun: AttemptRecord, launched: AttemptRecord) -> str | None:
    """Return why the service must not call the driver of this attempt.

    Return None if the service may call it, or if the driver's protocol is not known yet. `begun` is the content of
    `driver.json`, `launched` is the content of `launch.json`.
    """
    for found in (begun, launched):
        if found.get("attempt") == attempt:
            protocol = found.get("protocol", FIRST_PROTOCOL)
            if protocol == PROTOCOL:
                return None
            return (
                f"another version of rayps started the driver: the driver has protocol {protocol!r:.20} and this "
                f"service has protocol {PROTOCOL}, so the service cannot ask the driver to stop"
            )
    return None


def end_process(folder: Path) -> None:
    """Kill the process that `driver.json` names, if it is alive: Ray may have lost a process that still runs."""
    found = read_attempt(folder / BEGUN)
    pid, since = found.get("pid"), found.get("started")
    if isinstance(pid, int) and isinstance(since, int) and pid != os.getpid() and processes.is_alive(pid, since):
        log.warning("process %d of an attempt that was abandoned is killed", pid)
        processes.kill_all([pid])
