"""Waiting jobs: the decision equals the plan over all of them, and its cost does not grow with their number."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from test_scheduler import FakeCluster, FakePlace

from rayps.core.job.job_status import Status
from rayps.core.strategy.elastic import ElasticWorkers
from rayps.service import store as store_module
from rayps.service.elastic_jobs import describe_elastic_job, find_job_needs
from rayps.service.elastic_plan import WaitingJob, allot
from rayps.service.plan import Action, Dependencies, EndJob, OpenJob, SetReason, Start, find_cores, needs, plan
from rayps.service.scheduler import Scheduler
from rayps.service.store import JobRecord, Store
from rayps.service.waiting import GroupReasons, JobQueue, QueuedJob, find_room_for_new_jobs, with_cores
from rayps.strategies.job import JobSpec

S = Status
WHY = "Ray does not answer"


class World:
    """A random history of jobs, groups and the cluster."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.waiting: dict[str, QueuedJob] = {}
        self.running: dict[str, OpenJob] = {}
        self.wait_reason: dict[str, str | None] = {"g": None, "h": "h is starting"}
        self.ended: dict[str, str | None] = {"g": None, "h": None}
        self.total: dict[str, float] | None = {"cpu": 8.0, "gpu": 0.0}
        self.others = 0.0  # CPUs that others take in a joined cluster
        self.made = 0

    def step(self, fast: JobQueue) -> None:
        pick = self.random.random()
        if pick < 0.5:
            for _ in range(self.random.choice([1, 1, 1, 5])):
                self.submit(fast)
        elif pick < 0.6 and self.waiting:
            job = self.random.choice(list(self.waiting.values()))
            stopped = QueuedJob(job.id, job.name, job.needs, job.attempt, job.group, stopping=True)
            self.waiting[job.id] = stopped
            fast.put(stopped)
        elif pick < 0.75 and self.running:
            self.running.pop(self.random.choice(list(self.running)))
        elif pick < 0.85:
            name = self.random.choice(["g", "h"])
            self.wait_reason[name] = self.random.choice([None, f"{name} is starting"])
            self.ended[name] = self.random.choice([None, None, None, f"{name} was stopped"])
        elif pick < 0.95:
            self.total = self.random.choice([None, {"cpu": 4.0, "gpu": 0.0}, {"cpu": 8.0, "gpu": 1.0}])
            self.others = self.random.choice([0.0, 0.0, 3.0])
        for job_id, job in self.running.items():
            if job.status is S.STARTING and self.random.random() < 0.5:
                coming = {"cpu": self.random.choice([0.0, 0.0, job.needs["cpu"]])}  # of an elastic job that grows
                self.running[job_id] = OpenJob(job_id, job.name, S.RUNNING, needs=job.needs, coming=coming, attempt=1)

    def submit(self, fast: JobQueue) -> None:
        self.made += 1
        pick = self.random.choice
        wanted = {"cpu": pick([0.0, 1.0, 2.0, 4.0, 6.0, 99.0]), "gpu": pick([0.0, 0.0, 1.0])}
        job = QueuedJob(f"{self.made:05}", f"job-{self.made % 7}", wanted, 0, pick([None, None, "g", "h"]))
        self.waiting[job.id] = job
        fast.put(job)

    @property
    def free(self) -> dict[str, float]:
        total = self.total or {}
        taken = (job.needs["cpu"] - job.coming["cpu"] for job in self.running.values() if job.status is S.RUNNING)
        held = sum(taken)
        return {"cpu": max(0.0, total.get("cpu", 0.0) - held - self.others), "gpu": total.get("gpu", 0.0)}

    def naive(self) -> list[Action]:
        """The plan over every job, by its facts."""
        waiting = [
            OpenJob(
                job.id,
                job.name,
                S.QUEUED,
                needs=job.needs,
                attempt=job.attempt,
                stopping=1.0 if job.stopping else None,
                outside=Dependencies()
                if job.group is None
                else Dependencies(self.wait_reason[job.group], self.ended[job.group]),
            )
            for job in self.waiting.values()
        ]
        drivers = None if self.total is None else set(self.running)
        return plan(
            [*self.running.values(), *sorted(waiting, key=lambda job: job.id)], drivers, self.free, self.total, why=WHY
        )

    def fast(self, jobs: JobQueue) -> list[Action]:
        room = None if self.total is None else find_room_for_new_jobs(self.running.values(), self.free, self.total)
        groups = GroupReasons(lambda name: self.wait_reason[name], lambda name: self.ended[name])
        return [*jobs.stopped(), *jobs.decide(room, self.total, groups, WHY)]

    def carry_out(self, actions: list[Action], jobs: JobQueue) -> None:
        """Some decisions do not come to pass: the next one asks for the same."""
        for action in actions:
            if self.random.random() < 0.8 and isinstance(action, Start | EndJob):
                job = self.waiting.pop(action.job)
                jobs.drop(action.job)
                if isinstance(action, Start):
                    self.running[job.id] = OpenJob(
                        job.id, job.name, S.STARTING, needs=job.needs, attempt=action.attempt
                    )


@pytest.mark.parametrize("seed", range(40))
def test_the_decision_equals_the_plan_over_all_jobs_on_random_histories(seed: int) -> None:
    world, jobs = World(seed), JobQueue()
    for _ in range(150):
        world.step(jobs)
        slow, quick = world.naive(), world.fast(jobs)
        lost = {job.id for job in world.waiting.values() if job.stopping and job.group and world.ended[job.group]}
        acts = sorted((a for a in slow if isinstance(a, Start | EndJob) and a.job not in lost), key=lambda a: a.job)
        assert sorted((a for a in quick if a.job not in lost), key=lambda a: a.job) == acts
        assert lost <= {a.job for a in quick if isinstance(a, EndJob) and a.status is S.STOPPED}
        waits = {action.job: action.reason for action in slow if isinstance(action, SetReason)}
        ends = {action.job for action in slow if isinstance(action, EndJob)}
        for job_id in set(world.waiting) - ends:
            assert jobs.reason(job_id) == waits.get(job_id), job_id
        assert len(jobs) == len(world.waiting)
        world.carry_out(quick, jobs)


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_jobs_run_side_by_side_while_they_fit_into_the_cores_and_a_larger_one_runs_alone(cores: int) -> None:
    """Every order of four jobs of 0 to 5 CPUs, on a Ray of 5 logical CPUs; after each end the next ones start."""
    for sizes in itertools.product([0, 0.5, 1, 2, 5], repeat=4):
        left, running, order = JobQueue(), dict[str, float](), list[str]()
        for number, cpus in enumerate(sizes):
            left.put(QueuedJob(f"{number:05}", "w", with_cores({"cpu": float(cpus), "gpu": 0.0}, cores)))
        while len(left) or running:
            taken = [OpenJob(i, status=S.STARTING, needs=with_cores({"cpu": c}, cores)) for i, c in running.items()]
            total = {"cpu": 5.0, "gpu": 0.0, "core": float(cores)}
            starts = left.decide(find_room_for_new_jobs(taken, total, total), total, GroupReasons(), WHY)
            for start in starts:
                left.drop(start.job)
                running[start.job] = float(sizes[int(start.job)])
                order.append(start.job)
            occupied = [cpus for cpus in running.values() if cpus > 0]
            assert sum(occupied) <= cores or len(occupied) == 1, (sizes, running)
            assert occupied or not len(left), "no job waits while nothing runs"
            if (head := left.head) is not None:
                assert sum(occupied) + min(head.needs["cpu"], cores) > cores, "no job waits that would fit"
                assert "rayps serve --cpus" in str(left.reason(head.id)) or head.needs["cpu"] > 5 - sum(occupied)
            running.pop(next(iter(running)))
        assert order == sorted(order), "first in, first out"


def test_an_elastic_job_grows_into_the_cores_and_gives_them_up_for_a_job_that_waits() -> None:
    record = JobRecord(
        "A", "a", S.RUNNING, None, JobSpec("w:W", workers=1, elastic=ElasticWorkers(4)), 1, 0, False, None, 0.0, 0.0,
        0.0, None, None, None,
    )  # fmt: skip
    job = describe_elastic_job(record, None, 1e9, reachable=True, cores=2)
    assert job is not None
    assert [change.workers for change in allot([job], {"cpu": 15.0, "gpu": 0.0, "core": 1.0}).changes] == [2]
    grown = replace(job, members=2, allowed=2)
    assert find_job_needs(record, grown, 2)[0] == {"cpu": 2.0, "gpu": 0.0, "core": 2.0}
    waiting = WaitingJob("B", "b", with_cores({"cpu": 1.0}, 2))
    found = allot([grown], {"cpu": 14.0, "gpu": 0.0, "core": 0.0}, waiting)
    assert [change.workers for change in found.changes] == [1] and found.givers == ("a",)


def test_without_a_number_of_cores_jobs_reserve_what_ray_has() -> None:
    assert with_cores({"cpu": 4.0}, find_cores(JobSpec("w:W", branch="A"), 2)) == {"cpu": 4.0}
    assert with_cores({"cpu": 4.0, "gpu": 1.0}, None) == {"cpu": 4.0, "gpu": 1.0}
    assert with_cores({"gpu": 1.0}, 2) == {"gpu": 1.0, "core": 0.0}


def counted(path: Path, number: int, body: Callable[[Store, Scheduler, FakeCluster, Counts], Awaitable[Any]]) -> Any:
    """Run `body` with a scheduler before so many waiting jobs, and what it counts."""

    async def inside() -> Any:
        store = await Store.open(path / f"{number}.db")
        try:
            spec = JobSpec("w:W", workers=8)
            rows = [
                (
                    {
                        "id": f"{n:026}",
                        "name": "w",
                        "status": S.QUEUED,
                        "spec": spec.to_dict(),
                        "attempt": 0,
                        "failures": 0,
                        "created_at": 1.0,
                    },
                    "filed",
                )
                for n in range(number)
            ]
            await store.restore_rows(rows)
            cluster = FakeCluster()
            scheduler = Scheduler(store, FakePlace(cluster), path / f"jobs-{number}")  # type: ignore[arg-type]
            with Counts(store, scheduler) as counts:
                return await body(store, scheduler, cluster, counts)
        finally:
            await store.close()

    return asyncio.run(inside())


class Counts:
    """Rows parsed, SQL statements, and jobs and shapes looked at."""

    def __init__(self, store: Store, scheduler: Scheduler) -> None:
        self._engines = [store._writer.sync_engine, store._reader.sync_engine]
        self._waiting = scheduler._open_jobs.queue
        self._parse = store_module._read_record
        self.zero()

    def zero(self) -> None:
        self.rows = self.statements = 0
        self._before = self._waiting.examined

    @property
    def all(self) -> tuple[int, int, int]:
        return self.rows, self.statements, self._waiting.examined - self._before

    def __enter__(self) -> Counts:
        def record(row: Any) -> Any:
            self.rows += 1
            return self._parse(row)

        store_module._read_record = record
        for engine in self._engines:
            sa.event.listen(engine, "before_cursor_execute", self._statement)
        return self

    def __exit__(self, *_: object) -> None:
        store_module._read_record = self._parse
        for engine in self._engines:
            sa.event.remove(engine, "before_cursor_execute", self._statement)

    def _statement(self, *_: Any) -> None:
        self.statements += 1


def test_a_tick_in_which_nothing_changed_reads_and_writes_nothing(tmp_path: Path) -> None:
    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, counts: Counts) -> tuple[int, int, int]:
        await scheduler.tick()  # reads all, and starts the first
        await scheduler.tick()
        counts.zero()
        for _ in range(10):
            assert await scheduler.tick() == []
        return counts.all

    few, many = (counted(tmp_path, number, body) for number in (10, 2000))
    assert few == many == (0, 0, 20)  # one shape and its oldest job a tick


@pytest.mark.parametrize("what", ["submit", "stop", "end"])
def test_what_a_change_costs_does_not_depend_on_how_many_wait(tmp_path: Path, what: str) -> None:
    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, counts: Counts) -> tuple[int, int, int]:
        await scheduler.tick()
        await scheduler.tick()
        counts.zero()
        if what == "submit":
            await store.add(JobSpec("w:W", workers=8), name="late")
        elif what == "stop":
            await store.request_stop(f"{7:026}")
        else:  # the one that ran; another one starts, and every other waits behind a new head
            await store.change_status(f"{0:026}", S.SUCCEEDED, message="")
            cluster.actors.clear()
        await scheduler.tick()
        if what == "stop":
            assert (await store.get(f"{7:026}")).status is S.STOPPED
        if what == "end":
            assert (await store.get(f"{1:026}")).status is S.STARTING
            last = await store.get(f"{9:026}")
            await scheduler.tick()
            assert scheduler.reason(last) == f"waits behind w ({2:026}), which was submitted before"
        return counts.all

    few, many = (counted(tmp_path, number, body) for number in (10, 2000))
    assert few == many and few[0] <= 10


def test_the_state_in_memory_equals_the_store_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, counts: Counts) -> None:
        await scheduler.tick()
        await store.request_stop(f"{5:026}")

        async def broken(ids: Any) -> Any:
            raise OSError("cannot be read")

        with monkeypatch.context() as patch:
            patch.setattr(store, "get_many", broken)
            with pytest.raises(OSError, match="cannot be read"):
                await scheduler.tick()
        await scheduler.tick()
        assert (await store.get(f"{5:026}")).status is S.STOPPED and counts.rows > 20

    counted(tmp_path, 10, body)


def test_a_waiting_job_stops_while_ray_does_not_answer(tmp_path: Path) -> None:
    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, counts: Counts) -> None:
        await scheduler.tick()
        answer = asyncio.get_running_loop().create_future()
        scheduler._pending_view = answer  # a look that hangs
        ticking = asyncio.create_task(scheduler.tick())
        await asyncio.sleep(0)
        await store.request_stop(f"{5:026}")
        scheduler.wake()
        while (await store.get(f"{5:026}")).status is not S.STOPPED:
            assert not ticking.done()
            await asyncio.sleep(0.01)
        ticking.cancel()

    counted(tmp_path, 10, body)
    assert needs(JobSpec("w:W", workers=8)) == {"cpu": 8.0, "gpu": 0.0}
