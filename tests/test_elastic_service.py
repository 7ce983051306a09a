"""Elastic jobs and notices in the service: the scheduler's ticks before a fake cluster, requests, and the store."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from test_scheduler import END, FakeCluster, FakePlace, serve, write

from rayps.cluster.notices import LINGER_SECONDS, Notice, StoredNotice
from rayps.core.elastic import ElasticWorkers
from rayps.core.errors import ConfigError, Conflict, NotFound
from rayps.core.job_status import Status
from rayps.service.drivers import Drivers
from rayps.service.notice_store import HandOver, NoticeStore, hand_over
from rayps.service.scheduler import Scheduler
from rayps.service.store import Store
from rayps.strategies.job import JobSpec

S = Status


async def add(store: Store, least: int, most: int | None = None, name: str = "w", **fields: Any) -> str:
    elastic = None if most is None else ElasticWorkers(most, cooldown=0.0)
    return (await store.add(JobSpec("w:W", workers=least, elastic=elastic, **fields), name=name))[0].id


def trains(path: Path, job: str, workers: int, **facts: Any) -> None:
    lines = [{"rank": rank, "host": "h", "pid": 1, "status": "running", "round": 0} for rank in range(workers)]
    write(path, job, "progress.json", {"status": "RUNNING", "time": time.time() + 9, "workers": lines, **facts})


async def events(store: Store, job: str) -> list[str]:
    return [each["message"] for each in await store.events(job) if each["kind"] in ("allowed", "scale_requested")]


def test_a_job_grows_into_free_room_and_shrinks_for_a_waiting_job(tmp_path: Path) -> None:
    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, place: FakePlace) -> None:
        job = await add(store, 2, 8)
        await scheduler.tick()  # its least number can run
        assert (await store.get(job)).status is S.STARTING
        await scheduler.tick()
        assert (await store.get(job)).allowed is None  # it does not grow before it trains
        cluster.room = {"cpu": 6.0, "gpu": 0.0}  # of what `free` and `total` return, which is one number here
        driver = cluster.actors[f"driver-{job}"]
        trains(tmp_path, job, 2, allowed=2)
        await scheduler.tick()
        await scheduler.tick()
        assert (await store.get(job)).allowed == 6 and driver.allowed == [6]  # told once, until it has answered
        trains(tmp_path, job, 6, allowed=6)
        await scheduler.tick()
        assert driver.allowed == [6]
        other = await add(store, 3, name="other")
        await scheduler.tick()
        assert scheduler.reason(await store.get(other)) == "needs 3 CPUs, 0 free; waits until workers of w have left"
        assert (await store.get(job)).allowed == 3 and driver.allowed == [6, 3]
        trains(tmp_path, job, 3, allowed=3)
        await scheduler.tick()
        assert (await store.get(other)).status is S.STARTING
        assert await events(store, job) == [
            "the job may have 6 workers, before 2: resources are free that no waiting job could use",
            f"the job may have 3 workers, before 6: job other ({other}) waits for these resources",
        ]

    serve(tmp_path, body)


def test_a_request_limits_the_workers_and_is_told_again_to_a_new_driver(tmp_path: Path) -> None:
    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, place: FakePlace) -> None:
        job = await add(store, 2, 8)
        await store.scale(job, 4)  # while it waits
        await scheduler.tick()
        trains(tmp_path, job, 2, allowed=2)
        await scheduler.tick()
        await scheduler.tick()
        assert (await store.get(job)).allowed == 4
        first = cluster.actors.pop(f"driver-{job}")
        assert first.allowed == [4]
        await scheduler.tick()  # the driver was lost
        assert (await store.get(job)).attempt == 2
        await scheduler.tick()
        assert cluster.actors[f"driver-{job}"].allowed == [4]
        write(tmp_path, job, "driver.json", {"attempt": 2})
        trains(tmp_path, job, 4, allowed=4)
        await scheduler.tick()
        await store.scale(job, 2)
        await scheduler.tick()
        assert (await store.get(job)).allowed == 2
        assert (await events(store, job))[-2:] == [
            "at most 2 of 2 to 8 workers were requested",
            "the job may have 2 workers, before 4: at most 2 workers were requested",
        ]

    serve(tmp_path, body)


def test_what_a_growing_job_may_still_take_is_not_given_to_others(tmp_path: Path) -> None:
    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, place: FakePlace) -> None:
        job = await add(store, 2, 8)
        await scheduler.tick()
        trains(tmp_path, job, 2, allowed=2)
        await scheduler.tick()
        await scheduler.tick()
        assert (await store.get(job)).allowed == 8
        small = await add(store, 2, name="small")  # 6 CPUs are free, and the job may have them
        await scheduler.tick()
        assert (await store.get(small)).status is S.QUEUED and (await store.get(job)).allowed == 6
        await scheduler.tick()
        assert (await store.get(small)).status is S.STARTING

    serve(tmp_path, body)


def test_a_fixed_job_is_never_told_a_number(tmp_path: Path) -> None:
    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, place: FakePlace) -> None:
        job = await add(store, 2)
        await scheduler.tick()
        trains(tmp_path, job, 2)
        await scheduler.tick()
        await scheduler.tick()
        assert (await store.get(job)).allowed is None and cluster.actors[f"driver-{job}"].calls == []

    serve(tmp_path, body)


def test_what_cannot_be_requested(tmp_path: Path) -> None:
    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, place: FakePlace) -> None:
        fixed, job = await add(store, 4), await add(store, 2, 8)
        with pytest.raises(ConfigError, match="has a fixed number of workers, 4: submit it with a range"):
            await store.scale(fixed, 2)
        for number in (1, 9):
            with pytest.raises(ConfigError, match=f"workers is {number}, and job .* with 2 to 8 workers"):
                await store.scale(job, number)
        before = await store.scale(job, 3)
        assert await store.scale(job, 3) == before and len(await events(store, job)) == 1  # a repeated request
        await store.request_stop(job)
        with pytest.raises(Conflict, match="is stopping; its number of workers cannot change"):
            await store.scale(job, 4)
        await scheduler.tick()
        with pytest.raises(Conflict, match="has ended: STOPPED"):
            await store.scale(job, 4)
        with pytest.raises(NotFound):
            await store.scale("0" * 26, 4)

    serve(tmp_path, body)


# ---- notices


SPOT = Notice("", "10.0.0.7", 30.0, "spot")
NOW = 1000.0


def stored(notice: Notice, withdrawn: bool = False) -> dict[str, tuple[StoredNotice, bool]]:
    return {notice.key: (StoredNotice.of(notice, NOW), withdrawn)}


@pytest.mark.parametrize(
    ("rows", "known", "at", "expected"),
    [
        ({}, (SPOT,), NOW, HandOver()),  # of another service, or of Ray
        (stored(SPOT), (), NOW, HandOver(announce=(SPOT,))),
        (stored(SPOT), (SPOT,), NOW, HandOver()),
        (stored(SPOT), (Notice("", "10.0.0.7", 19.0, "spot"),), NOW + 10, HandOver()),  # a second on its way
        (stored(SPOT), (Notice("", "10.0.0.7", 60.0, "spot"),), NOW, HandOver(announce=(SPOT,))),  # a new deadline
        (stored(SPOT), (Notice("", "10.0.0.7", None, "spot"),), NOW, HandOver(announce=(SPOT,))),
        (stored(SPOT), (Notice("", "10.0.0.7", 30.0, "x"),), NOW, HandOver(announce=(SPOT,))),
        (stored(SPOT), (), NOW + 31 + LINGER_SECONDS, HandOver(forget=(SPOT.key,))),
        (stored(SPOT, True), (SPOT,), NOW, HandOver(withdraw=(SPOT,))),
        (stored(SPOT, True), (), NOW, HandOver(forget=(SPOT.key,))),
    ],
)
def test_what_the_cluster_is_told(rows: Any, known: Any, at: float, expected: HandOver) -> None:
    assert hand_over(rows, known, at) == expected


def test_a_notice_reaches_the_cluster_again_after_it_has_forgotten_it(tmp_path: Path) -> None:
    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, place: FakePlace) -> None:
        await scheduler.notices.add(SPOT)
        await scheduler.tick()
        assert list(cluster.announced) == [SPOT.key]
        cluster.announced.clear()  # Ray has lost its keys
        await scheduler.tick()
        assert list(cluster.announced) == [SPOT.key]
        again = NoticeStore(store)  # a new service
        assert [(one.host, one.reason) for one in await again.current()] == [("10.0.0.7", "spot")]
        with pytest.raises(NotFound, match="no notice about 'beta' that was sent to the service"):
            await scheduler.notices.withdraw("", "beta")
        await scheduler.notices.withdraw("", "10.0.0.7")
        assert await scheduler.notices.current() == ()
        with pytest.raises(NotFound):
            await scheduler.notices.withdraw("", "10.0.0.7")
        await scheduler.tick()
        assert not cluster.announced
        await scheduler.tick()
        assert await NoticeStore(store).pending(()) == HandOver()  # the row is gone

    serve(tmp_path, body)


def test_a_host_under_notice_is_no_room(tmp_path: Path) -> None:
    cluster = FakeCluster()
    drivers = Drivers(FakePlace(cluster), tmp_path)
    assert drivers.view([]).free == {"cpu": 8.0, "gpu": 0.0}
    cluster.announce(Notice("n2", "", 30.0, "one process only", pid=5))
    assert drivers.view([]).free == {"cpu": 8.0, "gpu": 0.0}
    cluster.announce(Notice("n2", "", 30.0, "spot"))
    seen = drivers.view([])
    assert seen.free == seen.total == {"cpu": 6.0, "gpu": 0.0} and len(seen.notices) == 2


def test_an_ended_job_is_no_longer_counted(tmp_path: Path) -> None:
    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, place: FakePlace) -> None:
        job = await add(store, 2, 8)
        await scheduler.tick()
        trains(tmp_path, job, 2, allowed=2)
        await scheduler.tick()
        await scheduler.tick()
        write(tmp_path, job, "outcome.json", END)
        second = await add(store, 8, name="second")
        await scheduler.tick()
        await scheduler.tick()
        assert (await store.get(second)).status is S.STARTING

    serve(tmp_path, body)
