"""Run the store's jobs, one idempotent tick at a time. `rayps.service.plan` decides what to do.

The scheduler is the only writer of a job's status. A tick reads the list of drivers first and the job folders second.
A driver writes the job's outcome before it ends. Therefore, if a driver that ended by itself is missing from the list,
the folder has the outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from rayps_client.errors import ClusterError, ConfigError, Conflict, NotFound, RaypsError, first_line

from rayps.cluster.local import Actors, Bundle
from rayps.cluster.notices import Notice
from rayps.cluster.warm import WarmState
from rayps.core.failpoint import passing
from rayps.core.job.job_status import Status, may_move
from rayps.core.job.records import AttemptRecord, ProgressRecord, read_json
from rayps.core.strategy.strategy import Phase
from rayps.federated.remote.mailbox import FOLDER, Mailbox
from rayps.service.drivers import BEGUN, LAUNCHED, Drivers, DriverView, RayHome, end_process, explain_version_conflict
from rayps.service.elastic_jobs import count_workers, describe_elastic_job, find_job_needs
from rayps.service.elastic_plan import ElasticJob, WaitingJob, add_up_reserved, allot
from rayps.service.job_folders import read_attempt
from rayps.service.liveness import QuietTimes
from rayps.service.notice_store import NoticeStore
from rayps.service.open_jobs import OpenJobs
from rayps.service.plan import (
    STALL_SECONDS,
    Action,
    Dependencies,
    EndJob,
    Kill,
    OpenJob,
    RequestStop,
    SetReason,
    SetStatus,
    Start,
    needs,
    plan,
)
from rayps.service.state_disk import is_full
from rayps.service.store import JobRecord, RowFacts, Store
from rayps.service.waiting import CORE, GroupReasons, find_room_for_new_jobs
from rayps.strategies.job import JobSpec

log = logging.getLogger(__name__)

# files that change while a job makes progress
_PROGRESS_FILES = ("progress.json", "events.jsonl", "metrics.jsonl", "log.txt", BEGUN)
_BREAK_OFF_SECONDS = 5.0  # seconds in which a view of Ray fails after the disconnection
_TIMEOUT_FACTOR = 5.0  # a job may show no progress for 5 times its `timeout`, or for the service's limit if longer


@dataclass(frozen=True, slots=True)
class View:
    """The newest known state of the Ray cluster: whether it answers, why not, what it has, and what will end."""

    ready: bool = False
    reason: str | None = "Ray is starting"
    total: Bundle | None = None
    free: Bundle | None = None
    warm: WarmState | None = None
    notices: tuple[Notice, ...] = ()  # that hosts or processes will end


class Scheduler:
    """The loop that starts, watches and stops drivers until every job of the store has ended."""

    def __init__(
        self,
        store: Store,
        place: RayHome,
        jobs_dir: Path,
        *,
        interval: float = 0.5,
        view_seconds: float = 10.0,
        stall: float = STALL_SECONDS,
        warm: int = 0,
        anywhere: bool = False,
        cores: float | None = None,
    ) -> None:
        """Prepare. `cores`: the CPUs that jobs side by side may reserve in a Ray that rayps owns; None: all."""
        self.place = place
        self.view = View()
        # two functions that return why a job must wait for its server group, and why the group was stopped
        self.group_wait_reason: Callable[[JobSpec], str | None] = lambda _: None
        self.group_end_reason: Callable[[JobSpec], str | None] = lambda _: None
        self._store = store
        self._jobs_dir = jobs_dir
        self._interval = interval
        self._view_seconds = view_seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rayps-view")
        self._pending_view: asyncio.Future[DriverView] | None = None
        self._unseen_since: float | None = None
        self._drivers = Drivers(place, jobs_dir, warm, anywhere=anywhere)
        self._quiet_times = QuietTimes()
        self._stall = stall
        self._wake = asyncio.Event()
        self._open_jobs = OpenJobs(store, cores if place.owned else None)
        self.notices = NoticeStore(store)
        self._allow_reasons: dict[str, str] = {}  # from job to why it may have its number of workers
        self._active_at = time.monotonic()

    @property
    def cluster(self) -> Actors | None:
        """The joined cluster, or None if it does not answer."""
        return self._drivers.cluster if self.view.ready else None

    @property
    def cores(self) -> float | None:
        """How many CPUs jobs that run side by side may reserve; None: all that Ray has."""
        return self._open_jobs.cores

    @property
    def join_count(self) -> int:
        """The number of times that a cluster was joined."""
        return self._drivers.join_count

    @property
    def silent(self) -> float:
        """Seconds since the loop last began a tick or an action."""
        return time.monotonic() - self._active_at

    def wake(self) -> None:
        """Run the next tick now."""
        self._wake.set()

    async def run(self) -> None:
        """Run ticks until this task is cancelled. If a tick fails, log the error and run the next tick."""
        while True:
            self._active_at = time.monotonic()
            try:
                await self.tick()
            except Exception:  # after any error the jobs must still be watched
                log.exception("a tick of the scheduler failed; the next one tries again")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._interval)
            self._wake.clear()

    async def close(self, *, end: bool) -> int:
        """Disconnect from Ray; return the number of jobs that were running.

        With `end`, also stop Ray and its drivers if rayps owns this Ray. The next service then restarts these jobs.
        """
        await self._open_jobs.refresh()
        held = len(self._open_jobs.started)
        if end and self.place.owned:
            held = await self._store.mark_interrupted()
        await asyncio.get_running_loop().run_in_executor(None, lambda: self.place.disconnect(end=end))
        await self._end_view()
        self._thread.shutdown(wait=False, cancel_futures=True)
        return held

    async def _end_view(self) -> None:
        """Wait for the view that the disconnection has broken off, and log in one line why it failed."""
        view, self._pending_view = self._pending_view, None
        if view is None:
            return
        await asyncio.wait([view], timeout=_BREAK_OFF_SECONDS)
        if not view.done():
            view.cancel()
        elif not view.cancelled() and (error := view.exception()) is not None:
            log.info("the service stopped while it looked at Ray: %s", first_line(error))

    def refuse_too_large(self, spec: JobSpec, phases: Sequence[Phase] | None = None) -> None:
        """Refuse a job that is larger than the Ray that rayps owns. In a joined cluster such a job waits.

        `phases`: those of its strategy, if it has been parsed.

        Raises:
            ConfigError: the job is too large (code too_large).
        """
        if not self.place.owned:
            return
        total = {**(self.place.capacity() or {}), **(self.view.total or {})}
        for kind, amount in needs(spec, phases).items():
            if kind in total and amount > total[kind]:
                remedy = "start `rayps serve` with more --cpus" if kind == "cpu" else "join a larger cluster"
                raise ConfigError(
                    f"the job needs {amount:g} {kind.upper()}s ({spec.workers} workers x "
                    f"{spec.resources[kind]:g}) and this service's Ray has {total[kind]:g}:\n"
                    f"lower workers or resources, or {remedy}",
                    field="workers",
                    code="too_large",
                )

    async def tick(self) -> list[Action]:
        """View the cluster, decide on the actions, and carry them out; return the actions."""
        await self._open_jobs.refresh()
        done: list[Action] = [*await self._end_stopped()]  # without an answer of Ray
        records = list(self._open_jobs.started.values())
        seen = await self._view_drivers([r.id for r in records])
        if seen is not None:
            await self._pass_on_notices(seen.notices)
        facts, elastic = await asyncio.to_thread(self._collect_all_facts, records, seen)
        self._quiet_times.retain_only({key for r in records for key in (r.id, (r.id, "stop"))})
        now = time.monotonic()
        if seen is not None:
            self._unseen_since = None
        elif self._unseen_since is None:
            self._unseen_since = now
        free, total = (None, None) if seen is None else (self._with_cores(seen.free), self._with_cores(seen.total))
        actions: list[Action] = plan(
            facts,
            None if seen is None else seen.drivers,
            free,
            total,
            unseen=0.0 if self._unseen_since is None else now - self._unseen_since,
            why=self.view.reason or "Ray is starting",
        )
        running = [fact for fact in facts if fact.outside.group_ended is None]
        room = None if free is None or total is None else find_room_for_new_jobs(running, free, total)
        await self._open_jobs.refresh()  # a stop may have been requested during the view
        done += await self._end_stopped()
        actions += self._open_jobs.queue.decide(
            room, total, self._make_group_reasons(), self.view.reason or "Ray is starting"
        )
        known = {record.id: record for record in records}
        if room is not None:
            await self._allot([job for job, _ in elastic.values()], facts, known)
            for job_id, (_, told) in elastic.items():
                await self._allow(known[job_id], told)
        return done + await self._act(actions, known)

    def _with_cores(self, has: Bundle) -> Bundle:
        """Return resources of the cluster with the cores of this machine, which only jobs occupy."""
        cores = self._open_jobs.cores
        return has if cores is None else has | {CORE: cores}

    async def _allot(self, jobs: list[ElasticJob], facts: list[OpenJob], records: dict[str, JobRecord]) -> None:
        """Decide how many workers each elastic job may have now, and store it."""
        queue = self._open_jobs.queue
        head = None if queue.head is None else WaitingJob(queue.head.id, queue.head.name, queue.head.needs)
        ending: Bundle = {}
        for fact in facts:
            if fact.stopping is not None:
                ending = add_up_reserved(ending, fact.needs, 1)
        found = allot(jobs, queue.left, head, ending)
        queue.expect(found.givers)
        for change in found.changes:
            before = next(job.allowed for job in jobs if job.id == change.job)
            message = f"the job may have {change.workers} workers, before {before}: {change.reason}"
            try:
                record = await self._store.set_allowed(change.job, change.workers, message=message)
            except NotFound as error:
                log.info("%s", error)  # the job was deleted since the view
                continue
            records[change.job] = record
            self._allow_reasons[change.job] = change.reason

    async def _allow(self, record: JobRecord, told: int | None) -> None:
        """Tell a driver how many workers its job may have, unless its progress shows that it knows."""
        counts = count_workers(record, None)
        if counts is not None and counts.allowed != (counts.least if told is None else told):
            reason = self._allow_reasons.get(record.id, f"the job may have {counts.allowed} workers")
            await self._run_in_thread(lambda: self._drivers.allow(record, counts.allowed, reason))

    async def _pass_on_notices(self, known: tuple[Notice, ...]) -> None:
        found = await self.notices.pending(known)
        if not (found.announce or found.withdraw):
            return
        try:
            await self._run_in_thread(lambda: self._drivers.pass_on(found))
        except ClusterError as error:
            log.warning("notices were not passed on to the cluster; the next tick tries again: %s", error)

    async def _act(self, actions: list[Action], jobs: dict[str, JobRecord]) -> list[Action]:
        for action in actions:
            self._active_at = time.monotonic()
            try:
                await self._carry_out(action, jobs.get(action.job) or await self._store.get(action.job))
            except (Conflict, NotFound) as error:
                log.info("%s", error)  # the job changed since the view: the next tick sees it
            except Exception as error:
                if not is_full(error):
                    raise
                self._store.disk.record_failure()  # logs it; the next tick tries again
        return actions

    async def _end_stopped(self) -> list[EndJob]:
        """End the queued jobs whose stop was requested, all in one transaction; return the actions."""
        actions = self._open_jobs.queue.stopped()
        if not actions:
            return []
        self._active_at = time.monotonic()
        passing("end: decided, not stored")
        try:
            ended = await self._store.end_queued([action.job for action in actions], actions[0].message)
        except Exception as error:
            if not is_full(error):
                raise
            self._store.disk.record_failure()  # logs it; the next tick tries again
            return []
        for job_id in ended:
            log.info("job %s ended: %s %s", job_id, Status.STOPPED, actions[0].message)
        return [action for action in actions if action.job in ended]

    def reason(self, job: JobRecord) -> str | None:
        """Return the reason for a job's status. The reason of a queued job is not stored, but computed here."""
        waits = job.status is Status.QUEUED and job.id in self._open_jobs.queue
        return (self._open_jobs.queue.reason(job.id) or job.reason) if waits else job.reason

    def _make_group_reasons(self) -> GroupReasons:
        return GroupReasons(
            lambda name: self.group_wait_reason(JobSpec("", server_group=name)),
            lambda name: self.group_end_reason(JobSpec("", server_group=name)),
        )

    async def _view_drivers(self, watched: list[str]) -> DriverView | None:
        loop = asyncio.get_running_loop()
        if self._pending_view is None:
            self._pending_view = loop.run_in_executor(self._thread, self._drivers.view, watched)
        try:
            await self._wait_for(self._pending_view)
            seen = await asyncio.wait_for(asyncio.shield(self._pending_view), 0)
        except TimeoutError:
            # e.g. Ray is starting; the next tick waits for the same view again
            reason = self.view.reason if not self.view.ready else "Ray does not answer"
            self.view = View(False, reason, self.view.total, None)
            return None
        except (RaypsError, OSError, RuntimeError) as error:
            self._pending_view = None
            reason = first_line(error)
            if reason != self.view.reason:
                log.warning("Ray cannot be viewed: %s", error)
            self.view = View(False, reason, self.view.total, None)
            return None
        self._pending_view = None
        self.view = View(True, None, seen.total, seen.free, seen.warm, seen.notices)
        return seen

    async def _wait_for(self, view: asyncio.Future[DriverView]) -> None:
        """Wait for a view of the cluster; during the wait, end each queued job as soon as its stop is requested."""
        deadline = time.monotonic() + self._view_seconds
        while not view.done() and (left := deadline - time.monotonic()) > 0:
            woken: asyncio.Task[bool] = asyncio.create_task(self._wake.wait())
            both: list[asyncio.Future[DriverView] | asyncio.Task[bool]] = [view, woken]
            await asyncio.wait(both, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if woken.done():
                self._wake.clear()
                await self._open_jobs.refresh()
                await self._end_stopped()
            woken.cancel()

    def _collect_all_facts(
        self, records: list[JobRecord], seen: DriverView | None
    ) -> tuple[list[OpenJob], dict[str, tuple[ElasticJob, int | None]]]:
        """Return the facts of all jobs; and of elastic ones the facts and the number that their driver was told."""
        found, elastic, now = [], dict[str, tuple[ElasticJob, int | None]](), time.time()
        for record in records:
            fact = self._collect_facts(record, seen)
            reachable = seen is not None and record.id in seen.drivers and fact.version_conflict is None
            cores = self._open_jobs.cores
            job = describe_elastic_job(record, fact.progress, now, reachable=reachable, cores=cores)
            if job is not None:
                elastic[record.id] = job, (fact.progress or {}).get("allowed")
            held, coming = find_job_needs(record, job, cores)
            found.append(replace(fact, needs=held, coming=coming))
        return found, elastic

    def _collect_facts(self, record: JobRecord, seen: DriverView | None) -> OpenJob:
        lost = seen is not None and record.id not in seen.drivers
        folder = self._jobs_dir / record.id
        begun, started = read_attempt(folder / BEGUN), read_attempt(folder / LAUNCHED)
        progress = self._read_progress(record, begun)
        return OpenJob(
            record.id,
            record.name,
            record.status,
            record.reason,
            attempt=record.attempt,
            failures=record.failures,
            max_failures=record.spec.max_failures,
            interrupted=record.interrupted,
            stopping=None
            if record.stop_requested_at is None
            else self._quiet_times.observe((record.id, "stop"), "asked"),
            outcome=read_json(folder / "outcome.json"),
            progress=progress,
            crash=self._drivers.crash_reason(record, begun),
            moved=begun.get("moved") if begun.get("attempt") == record.attempt else None,
            launched=record.attempt in (begun.get("attempt"), started.get("attempt")),
            version_conflict=explain_version_conflict(record.attempt, begun, started),
            silent=self._measure_silence(record),
            deadline=max(self._stall, _TIMEOUT_FACTOR * record.spec.timeout),
            outside=Dependencies(
                self.group_wait_reason(record.spec) if lost else None,
                self.group_end_reason(record.spec),
                Mailbox(folder / FOLDER).standing() if progress is not None else None,
            ),
        )

    def _read_progress(self, record: JobRecord, begun: AttemptRecord) -> ProgressRecord | None:
        folder = self._jobs_dir / record.id
        progress: ProgressRecord | None = read_json(folder / "progress.json")
        if progress is not None:
            old = progress.get("time", 0) < (record.attempt_at or 0) and begun.get("attempt") != record.attempt
            progress = None if old else progress  # an earlier attempt wrote the old progress
        return progress

    def _measure_silence(self, record: JobRecord) -> float:
        """Return the seconds since the folder of a starting or recovering job last changed; 0 for other jobs."""
        if record.status not in (Status.STARTING, Status.RECOVERING):
            return 0.0
        stamps = [_stamp(self._jobs_dir / record.id / name) for name in _PROGRESS_FILES]
        return self._quiet_times.observe(record.id, (record.status, record.attempt, *stamps))

    async def _carry_out(self, action: Action, job: JobRecord) -> None:
        match action:
            case Start():
                await self._start(action, job)
            case RequestStop():
                await self._run_in_thread(lambda: self._drivers.request_stop(job.id))
            case Kill():
                log.warning("job %s attempt %d: driver is killed: %s", job.id, job.attempt, action.reason)
                await self._run_in_thread(lambda: self._drivers.kill(job, action.reason))
            case SetStatus():
                await self._store.change_status(
                    job.id,
                    action.status,
                    old=job.status,
                    reason=action.reason,
                    message=None if action.has_event else action.reason or action.status.value.lower(),
                )
            case SetReason():
                await self._store.set_reason(job.id, action.reason)
            case EndJob():
                await self._end_job(action, job)
                self._allow_reasons.pop(job.id, None)

    async def _start(self, action: Start, job: JobRecord) -> None:
        now = time.time()
        passing("launch: chosen, not stored")
        if job.status is Status.QUEUED:
            await self._store.change_status(
                job.id,
                Status.STARTING,
                old=Status.QUEUED,
                message="the driver is starting",
                reason=None,
                attempt=action.attempt,
                attempt_at=now,
                started_at=now,
            )
        else:
            reason = action.reason or "restarted"
            await self._store.begin_attempt(
                job.id,
                attempt=action.attempt,
                failures=action.failures,
                interrupted=False,
                reason=reason,
                message=reason,
                kind="driver_restarted",
            )
            passing("restart: attempt stored, status not")
            if may_move(job.status, Status.RECOVERING):
                await self._store.change_status(job.id, Status.RECOVERING, message=None, reason=reason)
        log.info("job %s attempt %d: driver is starting", job.id, action.attempt)
        passing("launch: stored, not started")
        try:
            await self._run_in_thread(lambda: self._drivers.start(job, action))
        except ClusterError as error:
            log.warning("job %s attempt %d: driver did not start: %s", job.id, action.attempt, error)

    async def _end_job(self, action: EndJob, job: JobRecord) -> None:
        passing("end: decided, not stored")
        if not action.has_event and job.status is not Status.QUEUED:
            # the job has no outcome, and its driver may still run although Ray does not list it
            folder = self._jobs_dir / job.id
            await asyncio.to_thread(end_process, folder)
            if read_json(folder / "outcome.json") is not None:
                return  # the driver has written it meanwhile: the next tick records it
        facts: RowFacts = {"reason": action.message or None, "metrics": action.metrics, "checkpoint": action.checkpoint}
        if action.finished_at is not None:
            facts["finished_at"] = action.finished_at
        message = None if action.has_event else action.message
        await self._store.change_status(job.id, action.status, message=message, **facts)
        log.info("job %s ended: %s %s", job.id, action.status, action.message)
        passing("end: stored, driver not ended")
        self._drivers.record_end(job.id)

    async def _run_in_thread(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _stamp(path: Path) -> tuple[int, int]:
    """Return a file's modification time (ns) and size (bytes); (0, 0) if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
