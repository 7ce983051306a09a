"""The scheduler: every decision of `plan` as a table, and ticks against a fake cluster as unruly as Ray."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from rayps_client.errors import ClusterError, ConfigError

from rayps.cluster.notices import Notice
from rayps.cluster.warm import WarmState
from rayps.core.job.job_environment import JobEnvironment
from rayps.core.job.job_status import Status, may_move
from rayps.service import drivers, processes
from rayps.service.liveness import MOST_STEP, QuietTime, QuietTimes
from rayps.service.plan import (
    STOP_SECONDS,
    UNSEEN_SECONDS,
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
from rayps.service.scheduler import Scheduler
from rayps.service.store import Store
from rayps.strategies.job import JobSpec

S = Status
ROOM = {"cpu": 8.0, "gpu": 0.0}
END = {"status": "SUCCEEDED", "message": "done", "metrics": {"accuracy": 0.9}, "checkpoint": "/c", "finished_at": 9.0}
BEHIND = "waits behind job (a), which was submitted before"
ASKED = "stop requested"
RESTARTED = "it is restarted (failure {} of max_failures 3)"
UNSTARTED = "the service was killed before the driver had started: the driver is restarted"
NO_SIGN = (
    "no sign of progress for 900 s while {}: the limit is RAYPS_STALL, or 5 times the job's timeout if that is longer"
)


def decide(job: OpenJob, alive: bool = True, **kwargs: Any) -> list[Any]:
    return plan([job], {job.id} if alive else set(), ROOM, ROOM, **kwargs)


def cpus(n: float, status: Status = S.QUEUED, job_id: str = "a", **kwargs: Any) -> OpenJob:
    return OpenJob(job_id, needs={"cpu": n, "gpu": 0.0}, status=status, **kwargs)


RUNNING = OpenJob("a", status=S.RUNNING, attempt=1)


@pytest.mark.parametrize(
    ("job", "alive", "expected"),
    [
        (RUNNING, True, []),
        (OpenJob("a", status=S.STARTING, attempt=1), True, []),
        # an outcome is the last word, whether the driver still lives or not, and whatever was asked for
        (
            OpenJob("a", status=S.RUNNING, outcome=END),
            True,
            [EndJob("a", S.SUCCEEDED, "done", {"accuracy": 0.9}, "/c", 9.0, has_event=True)],
        ),
        (
            OpenJob("a", status=S.UNKNOWN, outcome=END, stopping=1.0),
            False,
            [EndJob("a", S.SUCCEEDED, "done", {"accuracy": 0.9}, "/c", 9.0, has_event=True)],
        ),
        (
            OpenJob("a", status=S.RUNNING, outcome={"status": "GREAT", "message": "?"}),
            True,
            [EndJob("a", S.FAILED, "?", has_event=True)],
        ),
        (
            OpenJob("a", status=S.RUNNING, outcome={"status": "RUNNING"}),
            True,
            [EndJob("a", S.FAILED, "", has_event=True)],
        ),
        # what the driver says is shown, if it is a legal move
        (
            OpenJob("a", status=S.STARTING, progress={"status": "RUNNING", "message": "x"}),
            True,
            [SetStatus("a", S.RUNNING, has_event=True)],
        ),
        (
            OpenJob("a", status=S.RUNNING, progress={"status": "RECOVERING", "message": "worker 1 died"}),
            True,
            [SetStatus("a", S.RECOVERING, "worker 1 died", has_event=True)],
        ),
        (OpenJob("a", status=S.RUNNING, progress={"status": "STARTING"}), True, []),
        (OpenJob("a", status=S.RUNNING, progress={"status": "SUCCEEDED"}), True, []),
        (OpenJob("a", status=S.RUNNING, progress={"status": "odd"}), True, []),
        (
            OpenJob("a", status=S.STARTING, progress={"status": "STARTING", "message": "waits for 4 CPUs"}),
            True,
            [SetReason("a", "waits for 4 CPUs")],
        ),
        (OpenJob("a", status=S.UNKNOWN, progress={"status": "RUNNING"}), True, [SetStatus("a", S.RUNNING)]),
        (OpenJob("a", status=S.UNKNOWN), True, [SetStatus("a", S.STARTING)]),
        # stop
        (
            OpenJob("a", status=S.RUNNING, stopping=0.1),
            True,
            [SetStatus("a", S.STOPPING, ASKED, has_event=True), RequestStop("a")],
        ),
        (OpenJob("a", status=S.STOPPING, stopping=9.0), True, [RequestStop("a")]),
        (
            OpenJob("a", status=S.STOPPING, stopping=STOP_SECONDS + 1),
            True,
            [Kill("a", "the driver did not stop within 60 s")],
        ),
        (
            OpenJob("a", status=S.STOPPING, stopping=5.0),
            False,
            [EndJob("a", S.STOPPED, "stopped: the job's driver ended without an outcome")],
        ),
        (
            OpenJob("a", status=S.STOPPING, stopping=70.0, crash="the driver did not stop within 60 s"),
            False,
            [EndJob("a", S.STOPPED, "stopped: the job's driver was killed (the driver did not stop within 60 s)")],
        ),
        # the service was killed before it had started this attempt's driver: that is no failure of the job
        (
            OpenJob("a", status=S.STARTING, attempt=1, max_failures=0, launched=False),
            False,
            [Start("a", 2, 0, UNSTARTED)],
        ),
        (
            OpenJob("a", status=S.RECOVERING, attempt=3, failures=2, launched=False),
            False,
            [Start("a", 4, 2, UNSTARTED)],
        ),
        (
            OpenJob("a", status=S.STOPPING, attempt=1, stopping=1.0, launched=False),
            False,
            [EndJob("a", S.STOPPED, "stopped: the job's driver ended without an outcome")],
        ),
        # deadlines: the driver of a job that starts or recovers without a sign of progress is given up
        (OpenJob("a", status=S.STARTING, attempt=1, silent=900.0), True, []),
        (OpenJob("a", status=S.STARTING, attempt=1, silent=901.0), True, [Kill("a", NO_SIGN.format("STARTING"))]),
        (OpenJob("a", status=S.RECOVERING, attempt=2, silent=901.0), True, [Kill("a", NO_SIGN.format("RECOVERING"))]),
        (OpenJob("a", status=S.RUNNING, attempt=2, silent=901.0), True, []),
        (OpenJob("a", status=S.STARTING, attempt=1, silent=901.0, deadline=3000.0), True, []),
        (
            OpenJob("a", status=S.STARTING, attempt=1, silent=901.0, crash=NO_SIGN.format("STARTING")),
            True,
            [Kill("a", NO_SIGN.format("STARTING"))],
        ),  # until it is gone
        (
            OpenJob("a", status=S.STARTING, attempt=1, silent=901.0, outcome=END),
            True,
            [EndJob("a", S.SUCCEEDED, "done", {"accuracy": 0.9}, "/c", 9.0, has_event=True)],
        ),
        (
            OpenJob("a", status=S.STARTING, attempt=1, crash=NO_SIGN.format("STARTING")),
            False,
            [Start("a", 2, 1, f"the driver was lost ({NO_SIGN.format('STARTING')}): {RESTARTED.format(1)}")],
        ),
        (OpenJob("a", stopping=0.0), False, [EndJob("a", S.STOPPED, "stopped before it started")]),
        # a driver that is gone, or lives on after its run
        (
            OpenJob("a", status=S.RUNNING, attempt=1),
            False,
            [Start("a", 2, 1, f"the driver was lost: {RESTARTED.format(1)}")],
        ),
        (
            OpenJob("a", status=S.RECOVERING, attempt=3, failures=2, crash="ActorDied: oom"),
            False,
            [Start("a", 4, 3, f"the driver was lost (ActorDied: oom): {RESTARTED.format(3)}")],
        ),
        (
            OpenJob("a", status=S.RUNNING, attempt=4, failures=3),
            False,
            [EndJob("a", S.FAILED, "the driver was lost: failure 4 exceeds max_failures 3")],
        ),
        (
            OpenJob("a", status=S.RUNNING, attempt=1, max_failures=0),
            False,
            [EndJob("a", S.FAILED, "the driver was lost: failure 1 exceeds max_failures 0")],
        ),
        # what the driver counted before it was lost is of the same job
        (
            OpenJob("a", status=S.RUNNING, attempt=1, progress={"status": "RUNNING", "failures": 2}),
            False,
            [Start("a", 2, 3, f"the driver was lost: {RESTARTED.format(3)}")],
        ),
        (
            OpenJob("a", status=S.RUNNING, attempt=2, failures=1, progress={"status": "RUNNING", "failures": 3}),
            False,
            [EndJob("a", S.FAILED, "the driver was lost: failure 4 exceeds max_failures 3")],
        ),
        (
            OpenJob("a", status=S.RUNNING, attempt=1, interrupted=True, progress={"failures": 2}),
            False,
            [Start("a", 2, 2, "the service had stopped its own Ray: the driver is restarted")],
        ),
        (
            OpenJob("a", status=S.RUNNING, attempt=1, max_failures=0, interrupted=True),
            False,
            [Start("a", 2, 0, "the service had stopped its own Ray: the driver is restarted")],
        ),
        (OpenJob("a", status=S.RUNNING, attempt=1, crash="KeyError: 'x'"), True, [Kill("a", "KeyError: 'x'")]),
        # its server group was stopped with --force
        (
            OpenJob("a", status=S.RUNNING, attempt=1, outside=Dependencies(group_ended="gone")),
            True,
            [Kill("a", "gone"), EndJob("a", S.FAILED, "gone")],
        ),
        (
            OpenJob("a", status=S.RECOVERING, attempt=1, outside=Dependencies(group_ended="gone")),
            False,
            [EndJob("a", S.FAILED, "gone")],
        ),
        (OpenJob("a", outside=Dependencies(group_ended="gone")), False, [EndJob("a", S.FAILED, "gone")]),
        (
            OpenJob("a", status=S.STOPPING, stopping=1.0, outside=Dependencies(group_ended="gone")),
            False,
            [EndJob("a", S.STOPPED, "gone")],
        ),
        (
            OpenJob(
                "a",
                status=S.RUNNING,
                outside=Dependencies(group_ended="gone"),
                outcome={"status": "SUCCEEDED", "message": "done"},
            ),
            True,
            [EndJob("a", S.SUCCEEDED, "done", has_event=True)],
        ),
        # its quota
        (
            OpenJob("a", status=S.RUNNING, progress={"status": "RUNNING", "server_group": {"held_back": "held back"}}),
            True,
            [SetReason("a", "held back")],
        ),
    ],
)
def test_a_job_that_was_started(job: OpenJob, alive: bool, expected: list[Any]) -> None:
    assert decide(job, alive) == expected


@pytest.mark.parametrize(
    ("status", "unseen", "expected"),
    [
        (S.RUNNING, 0.0, []),
        (S.RUNNING, UNSEEN_SECONDS - 1, []),
        (S.RUNNING, UNSEEN_SECONDS + 1, [SetStatus("a", S.UNKNOWN, "the job's driver cannot be reached: no route")]),
        (S.STOPPING, UNSEEN_SECONDS + 1, [SetStatus("a", S.UNKNOWN, "the job's driver cannot be reached: no route")]),
        (S.UNKNOWN, UNSEEN_SECONDS + 1, []),
    ],
)
def test_a_failed_look_is_not_a_failed_job(status: Status, unseen: float, expected: list[Any]) -> None:
    assert plan([OpenJob("a", status=status)], None, None, None, unseen=unseen, why="no route") == expected


@pytest.mark.parametrize(
    ("jobs", "free", "expected"),
    [
        ([cpus(8)], 8, [Start("a", 1)]),
        ([cpus(8)], 2, [SetReason("a", "needs 8 CPUs, 2 free")]),
        ([cpus(8, reason="needs 8 CPUs, 2 free")], 2, []),
        ([cpus(1)], 0, [SetReason("a", "needs 1 CPU, 0 free")]),
        ([cpus(0)], 0, [Start("a", 1)]),
        # first in, first out; a large one at the head is not overtaken
        (
            [cpus(4), cpus(4, job_id="b"), cpus(4, job_id="c")],
            8,
            [Start("a", 1), Start("b", 1), SetReason("c", "needs 4 CPUs, 0 free")],
        ),
        ([cpus(6), cpus(1, job_id="b")], 4, [SetReason("a", "needs 6 CPUs, 4 free"), SetReason("b", BEHIND)]),
        # but nobody waits behind what can never start here
        ([cpus(99), cpus(1, job_id="b")], 8, [SetReason("a", "needs 99 CPUs, the whole cluster has 8"), Start("b", 1)]),
        (
            [cpus(6), cpus(99, job_id="b")],
            4,
            [SetReason("a", "needs 6 CPUs, 4 free"), SetReason("b", "needs 99 CPUs, the whole cluster has 8")],
        ),
        # a driver that starts has yet to take its share, and a recovering one takes it again
        ([cpus(6, S.STARTING, "z", attempt=1), cpus(4)], 8, [SetReason("a", "needs 4 CPUs, 2 free")]),
        ([cpus(6, S.RECOVERING, "z", attempt=1), cpus(4)], 8, [SetReason("a", "needs 4 CPUs, 2 free")]),
        ([cpus(4, S.RUNNING, "z", attempt=1), cpus(4)], 4, [Start("a", 1)]),
        # others in a joined cluster hold something too
        ([cpus(2, S.RUNNING, "z", attempt=1), cpus(4)], 3, [SetReason("a", "needs 4 CPUs, 3 free")]),
        (
            [cpus(6, stopping=0.0), cpus(4, job_id="b")],
            4,
            [EndJob("a", S.STOPPED, "stopped before it started"), Start("b", 1)],
        ),
    ],
)
def test_the_queue(jobs: list[OpenJob], free: float, expected: list[Any]) -> None:
    drivers = {job.id for job in jobs if job.status is not S.QUEUED}
    assert plan(jobs, drivers, {"cpu": free, "gpu": 0.0}, ROOM) == expected


@pytest.mark.parametrize(
    ("stopping", "unseen", "deadline", "ends"),
    [
        (901.0, 901.0, 900.0, True),
        (899.0, 901.0, 900.0, False),
        (901.0, 899.0, 900.0, False),
        (901.0, 901.0, 1e3, False),
        (None, 1e6, 900.0, False),
    ],
)
@pytest.mark.parametrize("status", [s for s in S if not s.terminal and s is not S.QUEUED])
def test_a_stop_of_a_job_that_cannot_be_seen_has_a_deadline(
    status: Status, stopping: float | None, unseen: float, deadline: float, ends: bool
) -> None:
    job = OpenJob("a", status=status, stopping=stopping, deadline=deadline)
    actions = plan([job], None, None, None, unseen=unseen, why="no route")
    sealed = [
        EndJob(
            "a",
            S.STOPPED,
            f"stopped: the job's driver could not be reached for {deadline:g} s (no route); "
            "a driver that is found later is killed",
        )
    ]
    assert (actions == sealed) is ends and (ends or not any(isinstance(action, EndJob) for action in actions))


def test_no_status_is_for_ever() -> None:
    """Whatever the facts, some later fact or deadline moves a job on: a driver that says nothing is given up, a job
    whose driver is gone is started again or ended, a stop ends."""
    for status, launched, interrupted, stopping, crash in itertools.product(
        [s for s in S if not s.terminal and s is not S.QUEUED],
        (True, False),
        (True, False),
        (None, 1e6),
        (None, "KeyError: 'x'"),
    ):
        job = OpenJob(
            "a",
            status=status,
            launched=launched,
            interrupted=interrupted,
            stopping=stopping,
            crash=crash,
            silent=1e6,
            attempt=1,
        )
        gone = plan([job], set(), ROOM, ROOM)
        assert len(gone) == 1 and isinstance(gone[0], EndJob if stopping else Start), job
        alive = plan([job], {"a"}, ROOM, ROOM)
        # RUNNING is watched by its driver, UNKNOWN becomes what the driver says
        assert any(isinstance(action, Kill) for action in alive) or status in (S.RUNNING, S.UNKNOWN, S.STOPPING), job
        if stopping:
            assert any(isinstance(action, Kill) for action in alive), job
            assert any(isinstance(action, EndJob) for action in plan([job], None, None, None, unseen=1e6)), job


def test_nothing_starts_unseen_and_the_reason_is_said_once() -> None:
    assert plan([cpus(1)], None, None, None) == [SetReason("a", "Ray is starting")]
    assert plan([cpus(1, reason="Ray is starting")], None, None, None) == []


def test_gpus_are_counted_too() -> None:
    job = OpenJob("a", needs=needs(JobSpec("w:W", workers=2, resources={"cpu": 1, "gpu": 1, "memory": 5})))
    assert plan([job], set(), ROOM, ROOM) == [SetReason("a", "needs 2 GPUs, the whole cluster has 0")]
    assert plan([job], set(), {"cpu": 8.0, "gpu": 2.0}, {"cpu": 8.0, "gpu": 2.0}) == [Start("a", 1)]


def test_every_planned_move_is_legal() -> None:
    words = [None, *({"status": s.value, "message": "m"} for s in S)]
    for status, alive, stopping, said, unseen, silent, launched in itertools.product(
        [s for s in S if not s.terminal],
        (True, False, None),
        (None, 1.0, 99.0, 999.0),
        words,
        (0.0, 99.0, 999.0),
        (0.0, 999.0),
        (True, False),
    ):
        job = OpenJob("a", status=status, stopping=stopping, progress=said, attempt=1, silent=silent, launched=launched)
        drivers = None if alive is None else {"a"} if alive else set()
        for action in plan([job], drivers, ROOM, ROOM, unseen=unseen):
            if isinstance(action, SetStatus | EndJob):
                assert may_move(status, action.status), (job, action)
                assert isinstance(action, SetStatus) or action.status.terminal


def test_silence_counts_only_while_we_run() -> None:
    now = [0.0]
    silence = QuietTime(lambda: now[0])
    assert silence.observe("a") == 0.0
    for step, sign, expected in [
        (1.0, "a", 1.0),
        (2.0, "a", 3.0),
        (1.0, "b", 0.0),
        (4.0, "b", 4.0),
        (86400.0, "b", 4.0 + MOST_STEP),  # we were suspended for a day
        (-50.0, "b", 4.0 + MOST_STEP),
        (1.0, "b", 5.0 + MOST_STEP),
        (1.0, "a", 0.0),
    ]:
        now[0] += step
        assert silence.observe(sign) == expected


# ticks


class FakeHandle:
    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name = name
        self.args = args
        self.calls: list[str] = []
        self.allowed: list[Any] = []

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls.append(method)
        if method == "allow":
            self.allowed.append(args[0])
        return Future()


class FakeCluster:
    def __init__(self) -> None:
        self.actors: dict[str, FakeHandle] = {}
        self.spawned: list[FakeHandle] = []
        self.warm: list[bool | None] = []
        self.room = {"cpu": 8.0, "gpu": 0.0}
        self.announced: dict[str, Notice] = {}

    def keep_warm(self, wanted: int) -> WarmState:
        return WarmState(wanted, 1, 0, 1000)

    def spawn(self, target: str, *args: Any, name: str, **kwargs: Any) -> FakeHandle:
        assert target == "rayps.runtime.driver.driver_actor:DriverActor" and kwargs["detached"] and kwargs["here"]
        self.warm.append(kwargs.get("warm"))
        if name in self.actors:
            raise ClusterError(f"{name} lives already")
        handle = FakeHandle(name, args)
        self.spawned.append(handle)
        self.actors[name] = handle
        return handle

    def find(self, name: str) -> FakeHandle | None:
        return self.actors.get(name)

    def kill(self, handle: FakeHandle) -> None:
        self.actors.pop(handle.name, None)

    def free(self) -> dict[str, float]:
        return self.room

    total = free

    def hosts(self, free: bool = True) -> dict[str, dict[str, float]]:
        return {"n1": {"cpu": 6.0, "gpu": 0.0, "memory": 1e9}, "n2": {"cpu": 2.0, "gpu": 0.0, "memory": 1e9}}

    def notices(self) -> tuple[Notice, ...]:
        return tuple(self.announced.values())

    def announce(self, notice: Notice) -> None:
        self.announced[notice.key] = notice

    def withdraw(self, notice: Notice) -> None:
        self.announced.pop(notice.key, None)


class FakePlace:
    def __init__(self, cluster: FakeCluster | None, owned: bool = True) -> None:
        self.at: FakeCluster | Exception | None = cluster
        self.owned = owned
        self.address = "here:1"
        self.left: bool | None = None

    def capacity(self) -> dict[str, float] | None:
        return {"cpu": 8.0} if self.owned else None

    def cluster(self) -> Any:
        if not isinstance(self.at, FakeCluster):
            raise self.at or ClusterError("Ray is starting")
        return self.at

    def renew_lease(self) -> None:
        pass

    def disconnect(self, *, end: bool) -> None:
        self.left = end


Body = Callable[[Store, Scheduler, FakeCluster, FakePlace], Awaitable[None]]


def serve(path: Path, body: Body) -> None:
    async def inside() -> None:
        store = await Store.open(path / "s.db")
        cluster = FakeCluster()
        place = FakePlace(cluster)
        try:
            await body(store, Scheduler(store, place, path / "jobs", view_seconds=0.3), cluster, place)
        finally:
            await store.close()

    asyncio.run(inside())


async def add(store: Store, **kwargs: Any) -> str:
    return (await store.add(JobSpec("w:W", **kwargs), name="w"))[0].id


def write(path: Path, job_id: str, name: str, data: dict[str, Any]) -> None:
    (path / "jobs" / job_id / name).write_text(json.dumps(data))


def test_a_job_from_queue_to_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, place: FakePlace) -> None:
        place.at = None
        job = await add(store, workers=2)
        await scheduler.tick()
        found = await store.get(job)
        assert (found.status, scheduler.reason(found)) == (S.QUEUED, "Ray is starting") and not scheduler.view.ready
        place.at = cluster
        await scheduler.tick()
        found = await store.get(job)
        assert (found.status, found.attempt, found.reason) == (S.STARTING, 1, None) and scheduler.view.ready
        [driver] = cluster.spawned
        assert driver.args[1:] == (str(tmp_path / "jobs" / job), 1, 0) and driver.calls == []  # it begins by itself
        assert driver.args[0]["workers"] == 2 and (tmp_path / "jobs" / job).stat().st_mode & 0o777 == 0o700
        write(tmp_path, job, "progress.json", {"status": "RUNNING", "time": time.time() + 1})
        await scheduler.tick()
        assert (await store.get(job)).status is S.RUNNING
        write(tmp_path, job, "outcome.json", END)
        cluster.actors.clear()
        await scheduler.tick()
        found = await store.get(job)
        assert (found.status, found.metrics, found.checkpoint, found.finished_at) == (
            S.SUCCEEDED,
            {"accuracy": 0.9},
            "/c",
            9.0,
        )
        # what the driver's own events say is not said again
        assert [e["kind"] for e in await store.events(job)] == ["queued", "starting"]
        cluster.spawn("rayps.runtime.driver.driver_actor:DriverActor", name=f"driver-{job}", detached=True, here=True)
        assert await scheduler.tick() == [] and cluster.actors  # it gets a while to end itself
        monkeypatch.setattr(drivers, "_END_SECONDS", 0.0)
        assert await scheduler.tick() == [] and not cluster.actors

    serve(tmp_path, body)


def test_a_default_service_starts_no_more_workers_at_once_than_it_has_cores(tmp_path: Path) -> None:
    async def body(store: Store, _: Scheduler, cluster: FakeCluster, place: FakePlace) -> None:
        scheduler = Scheduler(store, place, tmp_path / "jobs", view_seconds=0.3, cores=2)  # type: ignore[arg-type]
        large, *small = [await add(store, workers=workers) for workers in (4, 1, 1, 1)]
        started = []
        for ending in (large, small[0], None):
            await scheduler.tick()
            started.append([job.id for job in await store.unfinished() if job.status is S.STARTING])
            if ending is not None:
                write(tmp_path, ending, "outcome.json", END)
                cluster.actors.pop(f"driver-{ending}", None)
                await scheduler.tick()
        assert started == [[large], small[:2], small[1:]]

    serve(tmp_path, body)


def test_a_branch_runs_beside_its_source_whatever_the_cores(tmp_path: Path) -> None:
    async def body(store: Store, _: Scheduler, cluster: FakeCluster, place: FakePlace) -> None:
        scheduler = Scheduler(store, place, tmp_path / "jobs", view_seconds=0.3, cores=2)  # type: ignore[arg-type]
        source = await add(store, workers=2)
        branch = await add(store, workers=2, branch=source)
        await add(store, workers=1)
        await scheduler.tick()
        assert [job.id for job in await store.unfinished() if job.status is S.STARTING] == [source, branch]

    serve(tmp_path, body)


def test_warm_processes_are_seen_and_not_for_jobs_with_requirements(tmp_path: Path) -> None:
    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, place: FakePlace) -> None:
        await add(store)
        await scheduler.tick()
        assert scheduler.view.warm is None and cluster.warm == [True]
        keeps = Scheduler(store, place, tmp_path / "jobs", view_seconds=0.3, warm=2)
        await add(store, environment=JobEnvironment(["einops==0.8.0"]))
        await keeps.tick()
        assert keeps.view.warm == WarmState(2, 1, 0, 1000) and cluster.warm == [True, False]

    serve(tmp_path, body)


def test_a_lost_driver_is_started_again_until_it_is_enough(tmp_path: Path) -> None:
    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, place: FakePlace) -> None:
        job = await add(store, max_failures=1)
        await scheduler.tick()
        # of long ago: not this attempt's
        write(tmp_path, job, "progress.json", {"status": "RUNNING", "time": 1.0})
        cluster.actors.clear()
        await scheduler.tick()
        found = await store.get(job)
        assert (found.status, found.attempt, found.failures) == (S.RECOVERING, 2, 1)
        assert cluster.spawned[-1].args[2:] == (2, 1)
        assert "driver_restarted" in [e["kind"] for e in await store.events(job)]
        cluster.actors.clear()
        await scheduler.tick()
        found = await store.get(job)
        assert found.status is S.FAILED and "max_failures 1" in (found.reason or "")

    serve(tmp_path, body)


def test_a_run_that_raised_is_ended_and_says_why(tmp_path: Path) -> None:
    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, place: FakePlace) -> None:
        job = await add(store, max_failures=0)
        await scheduler.tick()
        write(tmp_path, job, "driver.json", {"attempt": 1, "crash": "ValueError: bad"})
        await scheduler.tick()
        assert not cluster.actors
        await scheduler.tick()
        found = await store.get(job)
        assert found.status is S.FAILED and "(ValueError: bad)" in (found.reason or "")

    serve(tmp_path, body)


def test_stop_reaches_the_driver(tmp_path: Path) -> None:
    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, place: FakePlace) -> None:
        job = await add(store)
        await scheduler.tick()
        await store.request_stop(job)
        await scheduler.tick()
        await scheduler.tick()
        assert (await store.get(job)).status is S.STOPPING and cluster.spawned[0].calls == ["stop"]
        evaluated = {"status": "RUNNING", "time": time.time() + 1, "metrics": {"accuracy": 0.8}}
        write(tmp_path, job, "progress.json", evaluated)
        told = {"status": "STOPPED", "message": "stopped at round 7", "metrics": {}}
        write(tmp_path, job, "outcome.json", told)
        await scheduler.tick()
        found = await store.get(job)
        assert found.status is S.STOPPED and found.metrics == {"accuracy": 0.8}, "the last ones"

    serve(tmp_path, body)


def test_a_service_that_was_killed_carries_on(tmp_path: Path) -> None:
    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, place: FakePlace) -> None:
        job = await add(store)
        await scheduler.tick()
        again = Scheduler(store, place, tmp_path / "jobs")  # type: ignore[arg-type]
        await again.tick()
        assert len(cluster.spawned) == 1 and (await store.get(job)).attempt == 1
        await store.request_stop(job)
        await again.tick()
        assert cluster.spawned[0].calls == ["stop"]

    serve(tmp_path, body)


def test_an_orderly_end_is_no_failure(tmp_path: Path) -> None:
    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, place: FakePlace) -> None:
        job = await add(store, max_failures=0)
        await scheduler.tick()
        assert await scheduler.close(end=True) == 1 and place.left is True
        cluster.actors.clear()
        await Scheduler(store, place, tmp_path / "jobs").tick()  # type: ignore[arg-type]
        found = await store.get(job)
        assert (found.status, found.attempt, found.failures, found.interrupted) == (S.RECOVERING, 2, 0, False)

    serve(tmp_path, body)


class StartingPlace(FakePlace):
    """A Ray that starts until the service disconnects."""

    def __init__(self) -> None:
        super().__init__(None)
        self.stopping = threading.Event()

    def cluster(self) -> Any:
        assert self.stopping.wait(60)
        raise ClusterError("the service is stopping\nsee the log")

    def disconnect(self, *, end: bool) -> None:
        self.stopping.set()


def test_a_view_that_the_end_of_the_service_breaks_off_is_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGTERM while Ray starts: the view of Ray fails after its tick was cancelled, and nobody awaits it."""

    async def body(store: Store, _: Scheduler, cluster: FakeCluster, place: FakePlace) -> None:
        await add(store)
        scheduler = Scheduler(store, StartingPlace(), tmp_path / "jobs")
        tick = asyncio.create_task(scheduler.tick())
        await asyncio.sleep(0.1)
        tick.cancel()
        await asyncio.gather(tick, return_exceptions=True)
        await scheduler.close(end=True)
        del tick, scheduler
        gc.collect()

    caplog.set_level("INFO")
    serve(tmp_path, body)
    assert "never retrieved" not in caplog.text and "Traceback" not in caplog.text
    assert [r.getMessage() for r in caplog.records if "stopping" in r.getMessage()] == [
        "the service stopped while it looked at Ray: the service is stopping"
    ]


@pytest.mark.parametrize("trouble", [ClusterError("no route"), OSError("gone"), "slow"])
def test_trouble_with_ray_leaves_jobs_alone(tmp_path: Path, trouble: Any) -> None:
    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, place: FakePlace) -> None:
        job = await add(store)
        await scheduler.tick()
        if trouble == "slow":
            cluster.find = lambda name: time.sleep(1)  # type: ignore[assignment,func-returns-value]
        else:
            place.at = trouble
        await scheduler.tick()
        found = await store.get(job)
        assert found.status is S.STARTING and not scheduler.view.ready and scheduler.view.reason

    serve(tmp_path, body)


def test_a_driver_that_shows_no_sign_is_given_up(tmp_path: Path) -> None:
    """A job cannot stay STARTING: its driver is killed, started again, and at last the job fails with the reason."""

    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, place: FakePlace) -> None:
        scheduler = Scheduler(store, place, tmp_path / "jobs", stall=0.0)  # type: ignore[arg-type]
        job = await add(store, max_failures=1, timeout=0.001)
        behind = await add(store, workers=8)
        seen = []
        for _ in range(200):
            await scheduler.tick()
            seen.append((await store.get(job)).status)
            if seen[-1].terminal:
                break
        found = await store.get(job)
        assert (found.status, found.attempt) == (S.FAILED, 2) and "no sign of progress" in (found.reason or "")
        assert S.STARTING in seen and S.RECOVERING in seen
        await scheduler.tick()
        assert (await store.get(behind)).status is S.STARTING

    serve(tmp_path, body)


def test_signs_of_progress_renew_the_deadline(tmp_path: Path) -> None:
    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, place: FakePlace) -> None:
        now = [0.0]
        scheduler._quiet_times = QuietTimes(lambda: now[0])
        job = await add(store)
        await scheduler.tick()
        for count in range(1000):  # 4,000 seconds of a slow start that says something every 400
            now[0] += 4.0
            if count % 100 == 99:
                write(tmp_path, job, "progress.json", {"status": "STARTING", "time": time.time() + 9, "n": "x" * count})
            await scheduler.tick()
        assert (await store.get(job)).attempt == 1 and cluster.actors
        for _ in range(230):
            now[0] += 4.0
            await scheduler.tick()
        assert (await store.get(job)).attempt == 2

    serve(tmp_path, body)


def test_what_is_left_of_an_attempt_is_ended_before_the_next(tmp_path: Path) -> None:
    """Ray may call a process dead that lives on, stopped: it must not write to the job's folder beside the next."""

    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, place: FakePlace) -> None:
        job = await add(store)
        await scheduler.tick()
        left = subprocess.Popen(["sleep", "300"])
        other = subprocess.Popen(["sleep", "300"])
        try:
            write(
                tmp_path, job, "driver.json", {"attempt": 1, "pid": left.pid, "started": processes.start_time(left.pid)}
            )
            cluster.actors.clear()
            await scheduler.tick()
            assert left.wait(30) == -9 and (await store.get(job)).attempt == 2
            # the same id, another process
            write(tmp_path, job, "driver.json", {"attempt": 2, "pid": other.pid, "started": 1})
            cluster.actors.clear()
            await scheduler.tick()
            assert other.poll() is None and (await store.get(job)).attempt == 3
        finally:
            other.kill()
            other.wait()

    serve(tmp_path, body)


def test_a_driver_that_ray_has_lost_does_not_outlive_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that ends without an outcome: its process may still run, and must not write an outcome afterwards."""

    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, place: FakePlace) -> None:
        job = await add(store, max_failures=0)
        await scheduler.tick()
        left = subprocess.Popen(["sleep", "300"])
        began = {"attempt": 1, "pid": left.pid, "started": processes.start_time(left.pid)}
        write(tmp_path, job, "driver.json", began)
        cluster.actors.clear()
        await scheduler.tick()
        assert left.wait(30) == -9 and (await store.get(job)).status is S.FAILED

    serve(tmp_path, body)


def test_an_outcome_that_comes_while_its_job_is_given_up_is_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, place: FakePlace) -> None:
        job = await add(store, max_failures=0)
        await scheduler.tick()
        cluster.actors.clear()
        # the driver writes its outcome after the scheduler has looked, and before the driver is ended
        monkeypatch.setattr(
            "rayps.service.scheduler.end_process", lambda folder: write(tmp_path, job, "outcome.json", END)
        )
        await scheduler.tick()
        assert (await store.get(job)).status is S.STARTING
        await scheduler.tick()
        assert (await store.get(job)).status is S.SUCCEEDED

    serve(tmp_path, body)


def test_a_driver_that_neither_ends_nor_is_known_to_ray_is_ended_after_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, place: FakePlace) -> None:
        job = await add(store)
        await scheduler.tick()
        left = subprocess.Popen(["sleep", "300"])
        began = {"attempt": 1, "pid": left.pid, "started": processes.start_time(left.pid)}
        write(tmp_path, job, "driver.json", began)
        write(tmp_path, job, "outcome.json", END)
        cluster.actors.clear()
        await scheduler.tick()
        assert left.poll() is None and (await store.get(job)).status is S.SUCCEEDED  # it may still end by itself
        monkeypatch.setattr("rayps.service.drivers._END_SECONDS", -1.0)
        await scheduler.tick()
        assert left.wait(30) == -9

    serve(tmp_path, body)


def test_a_clock_that_is_set_kills_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, place: FakePlace) -> None:
        job = await add(store)
        await scheduler.tick()
        await store.request_stop(job)
        await scheduler.tick()
        wall = time.time
        for jump in (86400.0, -86400.0):
            monkeypatch.setattr(time, "time", lambda jump=jump: wall() + jump)
            await scheduler.tick()
            assert cluster.actors and (await store.get(job)).status is S.STOPPING
        monkeypatch.setattr(time, "time", wall)
        other = await add(store)
        await scheduler.tick()
        write(tmp_path, other, "driver.json", {"attempt": 1})  # then what its progress says is of this attempt
        write(tmp_path, other, "progress.json", {"status": "RUNNING", "time": wall() - 86400.0})
        await scheduler.tick()
        assert (await store.get(other)).status is S.RUNNING

    serve(tmp_path, body)


def test_a_job_larger_than_the_own_ray_is_refused_but_waits_in_a_joined_one(tmp_path: Path) -> None:
    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, place: FakePlace) -> None:
        big = JobSpec("w:W", workers=9)
        with pytest.raises(ConfigError, match=r"9 CPUs.*has 8") as caught:
            scheduler.refuse_too_large(big)
        assert caught.value.data["code"] == "too_large" and "--cpus" in str(caught.value)
        scheduler.refuse_too_large(JobSpec("w:W", workers=8))
        place.owned = False
        scheduler.refuse_too_large(big)

    serve(tmp_path, body)
