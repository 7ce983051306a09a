"""Makes the world match the store, one idempotent tick at a time. What to do is decided in `rayps.service.plan`.

The only writer of a job's status. It looks at drivers first and at folders second, because a driver writes
its outcome before it goes: what is gone in the first look has its outcome in the second.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rayps.cluster import Cluster, Handle, Reply
from rayps.errors import ClusterError, ConfigError, Conflict, RaypsError
from rayps.federated.real.mailbox import FOLDER, Mailbox
from rayps.job import JobSpec, Status, may_move
from rayps.service.plan import Action, Ask, Bundle, Facts, Kill, Seal, Show, Start, Wait, needs, plan
from rayps.service.store import Record, Store

log = logging.getLogger(__name__)

DRIVER = "rayps.runtime.driver_actor:DriverActor"
_TIDY_SECONDS = 10.0


class Place(Protocol):
    """Where drivers run: a Ray that rayps owns, or one that was joined. Called from one thread."""

    @property
    def owned(self) -> bool:
        """Whether the Ray is rayps's own."""

    @property
    def address(self) -> str | None:
        """host:port, once it is known."""

    def capacity(self) -> Bundle | None:
        """What there is in all, where that is known before Ray is up."""

    def cluster(self) -> Cluster:
        """The cluster, joined. Raises ClusterError while it cannot be."""

    def touch(self) -> None:
        """Say that the service lives."""

    def leave(self, *, end: bool) -> None:
        """Let go; `end` also ends a Ray that rayps owns."""


@dataclass(frozen=True, slots=True)
class View:
    """The cluster as last seen."""

    ready: bool = False
    reason: str | None = "Ray is starting"
    total: Bundle | None = None
    free: Bundle | None = None


@dataclass(frozen=True, slots=True)
class _Sight:
    """One look at the cluster: which drivers live, and what is free."""

    drivers: frozenset[str]
    crashes: dict[str, str]
    free: Bundle
    total: Bundle


class Scheduler:
    """Starts, watches and stops drivers until every job of the store has ended."""

    def __init__(self, store: Store, place: Place, jobs_dir: Path, *, interval: float = 0.5,
                 look_seconds: float = 10.0) -> None:
        self.place = place
        self.view = View()
        self.joined = 0  # how often a Ray was joined
        self.group_hinders: Callable[[JobSpec], str | None] = lambda _: None  # why a job's server group is not ready
        self.group_ended: Callable[[JobSpec], str | None] = lambda _: None  # why it never will be again
        self._store = store
        self._jobs_dir = jobs_dir
        self._interval = interval
        self._look_seconds = look_seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rayps-look")
        self._looking: asyncio.Future[_Sight] | None = None
        self._blind_since: float | None = None
        self._cluster: Cluster | None = None
        self._handles: dict[str, Handle] = {}
        self._runs: dict[str, Reply] = {}
        self._asked: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self._wake = asyncio.Event()

    @property
    def cluster(self) -> Cluster | None:
        """The cluster that was joined; None while no look at it succeeds."""
        return self._cluster if self.view.ready else None

    @property
    def stuck(self) -> bool:
        """Whether a look at Ray has begun and not come back."""
        return self._looking is not None and not self._looking.done()

    def wake(self) -> None:
        """Tick now rather than at the next interval."""
        self._wake.set()

    async def run(self) -> None:
        """Tick until cancelled; an error in one tick is logged and the next one tries again."""
        while True:
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
        held = len([job for job in await self._store.live() if job.status is not Status.QUEUED])
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
                    field="workers", code="too_large")

    async def tick(self) -> list[Action]:
        """Look, decide, act; once. Gives what was done."""
        records = await self._store.live()
        sight = await self._look([r.id for r in records if r.status is not Status.QUEUED])
        crashes = {} if sight is None else sight.crashes
        facts = await asyncio.to_thread(lambda: [self._facts(r, crashes.get(r.id)) for r in records])
        now = time.monotonic()
        if sight is not None:
            self._blind_since = None
        elif self._blind_since is None:
            self._blind_since = now
        actions = plan(
            facts, None if sight is None else sight.drivers, None if sight is None else sight.free,
            None if sight is None else sight.total,
            blind=0.0 if self._blind_since is None else now - self._blind_since,
            why=self.view.reason or "Ray is starting")
        jobs = {record.id: record for record in records}
        for action in actions:
            try:
                await self._do(action, jobs[action.job])
            except Conflict as error:
                log.info("%s", error)  # the world moved on since the look: the next tick sees it
        return actions

    async def _look(self, watched: list[str]) -> _Sight | None:
        loop = asyncio.get_running_loop()
        if self._looking is None:
            self._looking = loop.run_in_executor(self._thread, self._see, watched)
        try:
            sight = await asyncio.wait_for(asyncio.shield(self._looking), self._look_seconds)
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

    def _see(self, watched: list[str]) -> _Sight:
        self.place.touch()
        cluster = self.place.cluster()
        if cluster is not self._cluster:  # another Ray: what the last one gave us is void
            self._cluster = cluster
            self.joined += 1
            self._handles.clear()
            self._runs.clear()
        self._dismiss()
        living = set()
        for job_id in watched:
            handle = cluster.find(f"driver-{job_id}")
            if handle is not None:
                self._handles[job_id] = handle
                living.add(job_id)
        crashes = {job_id: crash for job_id in watched if (crash := self._crash(job_id)) is not None}
        return _Sight(frozenset(living), crashes, cluster.free(), cluster.total())

    def _facts(self, record: Record, crash: str | None) -> Facts:
        folder = self._jobs_dir / record.id
        outcome = progress = None
        if record.status is not Status.QUEUED:
            outcome = read_json(folder / "outcome.json")
            progress = read_json(folder / "progress.json")
            if progress is not None and progress.get("time", 0) < (record.attempt_at or 0):
                progress = None  # of the attempt before
        if progress is not None:
            progress["waits"] = Mailbox(folder / FOLDER).standing()  # of a job whose clients are real
        asked = record.stop_requested_at
        return Facts(
            record.id, record.name, record.status, record.reason, needs(record.spec), record.attempt,
            record.failures, record.spec.max_failures, record.interrupted,
            None if asked is None else max(0.0, time.time() - asked), outcome, progress, crash,
            self.group_hinders(record.spec) if record.status is Status.QUEUED else None,
            self.group_ended(record.spec))

    def _dismiss(self) -> None:
        # a driver lives on after its outcome, as an actor with nothing to do: it gets a while to tidy up
        for job_id, since in list(self._ended.items()):
            run = self._runs.get(job_id)
            if time.monotonic() - since > _TIDY_SECONDS or (run is not None and run.done()):
                self._ended.pop(job_id)
                self._runs.pop(job_id, None)
                self._kill(job_id)

    def _crash(self, job_id: str) -> str | None:
        run = self._runs.get(job_id)
        if run is None or not run.done():
            return None
        try:
            run.result(timeout=0)
        except Exception as error:  # whatever the driver raised is the reason
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return "it ended without an outcome"

    async def _do(self, action: Action, job: Record) -> None:
        match action:
            case Start():
                await self._start(action, job)
            case Ask():
                await self._in_thread(self._ask, job.id)
            case Kill():
                log.warning("job %s attempt %d: driver is killed: %s", job.id, job.attempt, action.reason)
                await self._in_thread(self._kill, job.id)
            case Show():
                await self._store.move(job.id, action.status, old=job.status, reason=action.reason,
                                       message=None if action.told else action.reason or action.status.value.lower())
            case Wait():
                await self._store.explain(job.id, action.reason)
            case Seal():
                await self._seal(action, job)

    async def _start(self, action: Start, job: Record) -> None:
        now = time.time()
        if job.status is Status.QUEUED:
            await self._store.move(
                job.id, Status.STARTING, old=Status.QUEUED, message="its driver is started", reason=None,
                attempt=action.attempt, attempt_at=now, started_at=now)
        else:
            reason = action.reason or "started again"
            await self._store.begin(
                job.id, attempt=action.attempt, failures=action.failures, interrupted=False, reason=reason,
                message=reason, kind="driver_restarted")
            if may_move(job.status, Status.RECOVERING):
                await self._store.move(job.id, Status.RECOVERING, message=None, reason=reason)
        log.info("job %s attempt %d: driver is started", job.id, action.attempt)
        try:
            await self._in_thread(self._spawn, job, action)
        except ClusterError as error:
            log.warning("job %s attempt %d: driver did not start: %s", job.id, action.attempt, error)

    async def _seal(self, action: Seal, job: Record) -> None:
        facts: dict[str, Any] = {} if action.finished_at is None else {"finished_at": action.finished_at}
        await self._store.move(
            job.id, action.status, message=None if action.told else action.message, reason=action.message or None,
            metrics=action.metrics, checkpoint=action.checkpoint, **facts)
        log.info("job %s ended: %s %s", job.id, action.status, action.message)
        self._asked.pop(job.id, None)
        self._ended[job.id] = time.monotonic()

    async def _in_thread(self, work: Any, *args: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def _spawn(self, job: Record, start: Start) -> None:
        folder = self._jobs_dir / job.id
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = self.place.cluster().spawn(
            DRIVER, job.spec.to_dict(), str(folder), start.attempt, start.failures, name=f"driver-{job.id}",
            detached=True, here=True, cpus=0.0)
        self._handles[job.id] = handle
        self._runs[job.id] = handle.call("run")

    def _ask(self, job_id: str) -> None:
        handle = self._handles.get(job_id)
        if handle is None or time.monotonic() - self._asked.get(job_id, -1e9) < 5.0:
            return
        self._asked[job_id] = time.monotonic()
        handle.call("stop")  # its answer is its outcome

    def _kill(self, job_id: str) -> None:
        handle = self._handles.pop(job_id, None)
        if handle is not None:
            self.place.cluster().kill(handle)


def read_json(path: Path) -> dict[str, Any] | None:
    """An object from a small file that is replaced in one step; None while it is not there."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
