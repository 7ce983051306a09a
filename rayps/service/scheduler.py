"""Makes the world match the store, one idempotent tick at a time. What to do is decided in `rayps.service.plan`.

The only writer of a job's status. It looks at drivers first and at folders second, because a driver writes
its outcome before it goes: what is gone in the first look has its outcome in the second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayps.cluster.local import Actors, Bundle
from rayps.core.errors import ClusterError, ConfigError, Conflict, NotFound, RaypsError
from rayps.core.failpoint import passing
from rayps.core.job import Status, may_move
from rayps.federated.remote.mailbox import FOLDER, Mailbox
from rayps.service.drivers import BEGUN, LAUNCHED, Drivers, DriverView, RayHome, foreign
from rayps.service.job_folders import read_json
from rayps.service.liveness import QuietTimes
from rayps.service.open_jobs import OpenJobs
from rayps.service.plan import SIGN_SECONDS, Action, AskToStop, Kill, OpenJob, Seal, Show, Start, Wait, needs, plan
from rayps.service.state_disk import is_full
from rayps.service.store import JobRecord, Store
from rayps.service.waiting import GroupQuestions, room_beside
from rayps.strategies.job import JobSpec

log = logging.getLogger(__name__)

_SIGNS = ("progress.json", "events.jsonl", "metrics.jsonl", "log.txt", BEGUN)  # files that change while a job gets on
_TIMEOUTS = 5.0  # times its own `timeout` that a job may show no progress, where that is more than the service's limit


@dataclass(frozen=True, slots=True)
class View:
    """The cluster as last seen."""

    ready: bool = False
    reason: str | None = "Ray is starting"
    total: Bundle | None = None
    free: Bundle | None = None


class Scheduler:
    """Starts, watches and stops drivers until every job of the store has ended."""

    def __init__(
        self,
        store: Store,
        place: RayHome,
        jobs_dir: Path,
        *,
        interval: float = 0.5,
        look_seconds: float = 10.0,
        stall: float = SIGN_SECONDS,
    ) -> None:
        self.place = place
        self.view = View()
        self.group_hinders: Callable[[JobSpec], str | None] = lambda _: None  # why a job's server group is not ready
        self.group_ended: Callable[[JobSpec], str | None] = lambda _: None  # why it never will be again
        self._store = store
        self._jobs_dir = jobs_dir
        self._interval = interval
        self._look_seconds = look_seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rayps-look")
        self._looking: asyncio.Future[DriverView] | None = None
        self._blind_since: float | None = None
        self._drivers = Drivers(place, jobs_dir)
        self._silences = QuietTimes()
        self._stall = stall
        self._wake = asyncio.Event()
        self._roster = OpenJobs(store)
        self._came_round = time.monotonic()

    @property
    def cluster(self) -> Actors | None:
        """The cluster that was joined; None while no look at it succeeds."""
        return self._drivers.cluster if self.view.ready else None

    @property
    def joined(self) -> int:
        """How often a Ray was joined."""
        return self._drivers.joined

    @property
    def silent(self) -> float:
        """Seconds since the loop came round, or did something in a tick."""
        return time.monotonic() - self._came_round

    def wake(self) -> None:
        """Tick now rather than at the next interval."""
        self._wake.set()

    async def run(self) -> None:
        """Tick until cancelled; an error in one tick is logged and the next one tries again."""
        while True:
            self._came_round = time.monotonic()
            try:
                await self.tick()
            except Exception:  # whatever it is, jobs must go on being watched
                log.exception("a tick of the scheduler failed; the next one tries again")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._interval)
            self._wake.clear()

    async def close(self, *, end: bool) -> int:
        """Let go of the cluster; `end` ends an own Ray with its jobs, which the next service starts again.

        Gives how many jobs were running.
        """
        await self._roster.refresh()
        held = len(self._roster.started)
        if end and self.place.owned:
            held = await self._store.interrupt()
        await asyncio.get_running_loop().run_in_executor(None, lambda: self.place.leave(end=end))
        self._thread.shutdown(wait=False, cancel_futures=True)
        return held

    def refuse_too_large(self, spec: JobSpec) -> None:
        """Refuse what an own Ray can never hold; in a joined cluster it waits, since that may grow.

        Raises:
            ConfigError: with code too_large, naming the way out.
        """
        if not self.place.owned:
            return
        total = {**(self.place.capacity() or {}), **(self.view.total or {})}
        for kind, amount in needs(spec).items():
            if kind in total and amount > total[kind]:
                knob = "start `rayps serve` with more --cpus" if kind == "cpu" else "join a larger cluster"
                raise ConfigError(
                    f"the job needs {amount:g} {kind.upper()}s ({spec.workers} workers x "
                    f"{spec.resources[kind]:g}) and this service's Ray has {total[kind]:g}:\n"
                    f"ask for fewer workers, give each less in resources, or {knob}",
                    field="workers",
                    code="too_large",
                )

    async def tick(self) -> list[Action]:
        """Look, decide, act; once. Gives what was done."""
        await self._roster.refresh()
        done = await self._act([*self._roster.waiting.stopped()], {})  # whether Ray answers or not
        records = list(self._roster.started.values())
        sight = await self._look([r.id for r in records])
        facts = await asyncio.to_thread(lambda: [self._facts(r, sight) for r in records])
        self._silences.keep({key for r in records for key in (r.id, (r.id, "stop"))})
        now = time.monotonic()
        if sight is not None:
            self._blind_since = None
        elif self._blind_since is None:
            self._blind_since = now
        actions: list[Action] = plan(
            facts,
            None if sight is None else sight.drivers,
            None if sight is None else sight.free,
            None if sight is None else sight.total,
            blind=0.0 if self._blind_since is None else now - self._blind_since,
            why=self.view.reason or "Ray is starting",
        )
        running = {fact.id: (fact.status, fact.needs) for fact in facts if fact.doomed is None}
        room = None if sight is None else room_beside(running, sight.free, sight.total)
        await self._roster.refresh()  # what was asked for during the look
        actions += self._roster.waiting.stopped()
        actions += self._roster.waiting.decide(
            room, None if sight is None else sight.total, self._groups(), self.view.reason or "Ray is starting"
        )
        return done + await self._act(actions, {record.id: record for record in records})

    async def _act(self, actions: list[Action], jobs: dict[str, JobRecord]) -> list[Action]:
        for action in actions:
            self._came_round = time.monotonic()
            try:
                await self._do(action, jobs.get(action.job) or await self._store.get(action.job))
            except (Conflict, NotFound) as error:
                log.info("%s", error)  # the world moved on since the look: the next tick sees it
            except Exception as error:
                if not is_full(error):
                    raise
                self._store.disk.failed()  # which says so; the next tick tries again
        return actions

    def reason(self, job: JobRecord) -> str | None:
        """Why a job stands where it stands. That of a waiting one is worked out here, and not stored."""
        waits = job.status is Status.QUEUED and job.id in self._roster.waiting
        return (self._roster.waiting.reason(job.id) or job.reason) if waits else job.reason

    def _groups(self) -> GroupQuestions:
        return GroupQuestions(
            lambda name: self.group_hinders(JobSpec("", server_group=name)),
            lambda name: self.group_ended(JobSpec("", server_group=name)),
        )

    async def _look(self, watched: list[str]) -> DriverView | None:
        loop = asyncio.get_running_loop()
        if self._looking is None:
            self._looking = loop.run_in_executor(self._thread, self._drivers.look, watched)
        try:
            await self._wait_for(self._looking)
            sight = await asyncio.wait_for(asyncio.shield(self._looking), 0)
        except TimeoutError:
            # at the first start this is Ray coming up; the same look is waited for again in the next tick
            reason = self.view.reason if not self.view.ready else "Ray does not answer"
            self.view = View(False, reason, self.view.total, None)
            return None
        except (RaypsError, OSError, RuntimeError) as error:
            self._looking = None
            reason = str(error).splitlines()[0]
            if reason != self.view.reason:
                log.warning("no look at Ray: %s", error)
            self.view = View(False, reason, self.view.total, None)
            return None
        self._looking = None
        self.view = View(True, None, sight.total, sight.free)
        return sight

    async def _wait_for(self, look: asyncio.Future[Any]) -> None:
        """Wait for a look; whoever stops a waiting job meanwhile need not wait for it."""
        deadline = time.monotonic() + self._look_seconds
        while not look.done() and (left := deadline - time.monotonic()) > 0:
            woken: asyncio.Future[Any] = asyncio.ensure_future(self._wake.wait())
            await asyncio.wait([look, woken], timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if woken.done():
                self._wake.clear()
                await self._roster.refresh()
                await self._act([*self._roster.waiting.stopped()], {})
            woken.cancel()

    def _facts(self, record: JobRecord, sight: DriverView | None) -> OpenJob:
        lost = sight is not None and record.id not in sight.drivers
        folder = self._jobs_dir / record.id
        begun, started = read_json(folder / BEGUN) or {}, read_json(folder / LAUNCHED) or {}
        return OpenJob(
            record.id,
            record.name,
            record.status,
            record.reason,
            needs(record.spec),
            record.attempt,
            record.failures,
            record.spec.max_failures,
            record.interrupted,
            None if record.stop_requested_at is None else self._silences.observe((record.id, "stop"), "asked"),
            read_json(folder / "outcome.json"),
            self._progress(record, begun),
            self._drivers.crash(record, begun),
            launched=record.attempt in (begun.get("attempt"), started.get("attempt")),
            foreign=foreign(record.attempt, begun, started),
            silent=self._silent(record),
            deadline=max(self._stall, _TIMEOUTS * record.spec.timeout),
            group=self.group_hinders(record.spec) if lost else None,
            doomed=self.group_ended(record.spec),
        )

    def _progress(self, record: JobRecord, begun: dict[str, Any]) -> dict[str, Any] | None:
        folder = self._jobs_dir / record.id
        progress = read_json(folder / "progress.json")
        if progress is not None:
            old = progress.get("time", 0) < (record.attempt_at or 0) and begun.get("attempt") != record.attempt
            progress = None if old else progress  # old: of the attempt before
        if progress is not None:
            progress["waits"] = Mailbox(folder / FOLDER).standing()  # of a job whose clients are real
        return progress

    def _silent(self, record: JobRecord) -> float:
        """Seconds in which the folder of a job that is starting or recovering has not changed."""
        if record.status not in (Status.STARTING, Status.RECOVERING):
            return 0.0
        stamps = [_stamp(self._jobs_dir / record.id / name) for name in _SIGNS]
        return self._silences.observe(record.id, (record.status, record.attempt, *stamps))

    async def _do(self, action: Action, job: JobRecord) -> None:
        match action:
            case Start():
                await self._start(action, job)
            case AskToStop():
                await self._in_thread(self._drivers.ask, job.id)
            case Kill():
                log.warning("job %s attempt %d: driver is killed: %s", job.id, job.attempt, action.reason)
                await self._in_thread(self._drivers.kill, job, action.reason)
            case Show():
                await self._store.move(
                    job.id,
                    action.status,
                    old=job.status,
                    reason=action.reason,
                    message=None if action.told else action.reason or action.status.value.lower(),
                )
            case Wait():
                await self._store.explain(job.id, action.reason)
            case Seal():
                await self._seal(action, job)

    async def _start(self, action: Start, job: JobRecord) -> None:
        now = time.time()
        passing("launch: chosen, not stored")
        if job.status is Status.QUEUED:
            await self._store.move(
                job.id,
                Status.STARTING,
                old=Status.QUEUED,
                message="its driver is started",
                reason=None,
                attempt=action.attempt,
                attempt_at=now,
                started_at=now,
            )
        else:
            reason = action.reason or "started again"
            await self._store.begin(
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
                await self._store.move(job.id, Status.RECOVERING, message=None, reason=reason)
        log.info("job %s attempt %d: driver is started", job.id, action.attempt)
        passing("launch: stored, not started")
        try:
            await self._in_thread(self._drivers.start, job, action)
        except ClusterError as error:
            log.warning("job %s attempt %d: driver did not start: %s", job.id, action.attempt, error)

    async def _seal(self, action: Seal, job: JobRecord) -> None:
        passing("seal: decided, not stored")
        facts: dict[str, Any] = {} if action.finished_at is None else {"finished_at": action.finished_at}
        await self._store.move(
            job.id,
            action.status,
            message=None if action.told else action.message,
            reason=action.message or None,
            metrics=action.metrics,
            checkpoint=action.checkpoint,
            **facts,
        )
        log.info("job %s ended: %s %s", job.id, action.status, action.message)
        passing("seal: stored, driver not dismissed")
        self._drivers.ended(job.id)

    async def _in_thread(self, work: Any, *args: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)


def _stamp(path: Path) -> tuple[int, int]:
    """What changes whenever a file does."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
