"""Elastic jobs and notices in the service: the scheduler's ticks before a fake cluster, requests, and the store."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from rayps_client.errors import ConfigError, Conflict, NotFound
from service_site import Site
from test_scheduler import END, Body, FakeCluster, FakeHandle, FakePlace, write

from rayps.cli.main import main
from rayps.cluster.notices import LINGER_SECONDS, Notice, StoredNotice
from rayps.core.job.job_status import Status
from rayps.core.strategy.elastic import ElasticWorkers
from rayps.service.client import Client
from rayps.service.drivers import Drivers
from rayps.service.notice_store import NoticeChanges, NoticeStore, find_notice_changes
from rayps.service.scheduler import Scheduler
from rayps.service.store import Store
from rayps.strategies.job import JobSpec

S = Status


def serve(path: Path, body: Body) -> None:
    """Run `body` with a scheduler whose view of the cluster is never late."""

    async def inside() -> None:
        store = await Store.open(path / "s.db")
        cluster = FakeCluster()
        place = FakePlace(cluster)
        try:
            await body(store, Scheduler(store, place, path / "jobs", view_seconds=60.0), cluster, place)
        finally:
            await store.close()

    asyncio.run(inside())


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
        ({}, (SPOT,), NOW, NoticeChanges()),  # of another service, or of Ray
        (stored(SPOT), (), NOW, NoticeChanges(announce=(SPOT,))),
        (stored(SPOT), (SPOT,), NOW, NoticeChanges()),
        (stored(SPOT), (Notice("", "10.0.0.7", 19.0, "spot"),), NOW + 10, NoticeChanges()),  # a second on its way
        (stored(SPOT), (Notice("", "10.0.0.7", 60.0, "spot"),), NOW, NoticeChanges(announce=(SPOT,))),  # a new deadline
        (stored(SPOT), (Notice("", "10.0.0.7", None, "spot"),), NOW, NoticeChanges(announce=(SPOT,))),
        (stored(SPOT), (Notice("", "10.0.0.7", 30.0, "x"),), NOW, NoticeChanges(announce=(SPOT,))),
        (stored(SPOT), (), NOW + 31 + LINGER_SECONDS, NoticeChanges(forget=(SPOT.key,))),
        (stored(SPOT, True), (SPOT,), NOW, NoticeChanges(withdraw=(SPOT,))),
        (stored(SPOT, True), (), NOW, NoticeChanges(forget=(SPOT.key,))),
    ],
)
def test_what_the_cluster_is_told(rows: Any, known: Any, at: float, expected: NoticeChanges) -> None:
    assert find_notice_changes(rows, known, at) == expected


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
        assert await NoticeStore(store).pending(()) == NoticeChanges()  # the row is gone

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


# ---- requests


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.close()


def test_an_elastic_job_is_submitted_scaled_and_shown(site: Site) -> None:
    job = site.add(workers=[2, 8], elastic={"global_batch": 64, "cooldown": 5.0}, name="grows")
    shown = site.http.get(f"/api/v1/jobs/{job}").json()
    assert shown["spec"]["workers"] == 2
    assert shown["spec"]["elastic"] == {"most": 8, "global_batch": 64, "cooldown": 5.0}
    counts = {"least": 2, "most": 8, "now": 0, "allowed": 2, "requested": None}
    assert shown["elastic"] == counts
    for _ in range(2):  # a repeated request changes nothing
        answer = site.http.patch(f"/api/v1/jobs/{job[:12]}", json={"workers": 6})
        assert answer.status_code == 202 and answer.json()["elastic"] == counts | {"requested": 6}
    row = json.loads((site.settings.jobs_dir / job / "job.json").read_text())
    assert row["scale_to"] == 6  # also in the folder, from which a lost row is restored
    with Client(site.url, site.token) as client:
        assert client.job(job).scale(4).data["elastic"] == counts | {"requested": 4}
        with pytest.raises(ConfigError, match="workers is 9"):
            client.job(job).scale(9)
    fixed = site.add(workers=2)
    answer = site.http.patch(f"/api/v1/jobs/{fixed}", json={"workers": 6})
    assert (answer.status_code, answer.json()["code"]) == (422, "not_elastic")
    assert answer.json()["errors"][0]["pointer"] == "/workers"
    assert site.http.get(f"/api/v1/jobs/{fixed}").json()["elastic"] is None
    assert site.http.patch(f"/api/v1/jobs/{job}", json={"workers": 1}).json()["code"] == "out_of_range"
    assert site.http.patch(f"/api/v1/jobs/{job}", json={"workers": 0}).status_code == 422
    assert site.http.patch(f"/api/v1/jobs/{job}", json={"worker": 3}).json()["detail"].endswith("mean 'workers'?")
    site.http.post(f"/api/v1/jobs/{job}/stop")
    assert site.http.patch(f"/api/v1/jobs/{job}", json={"workers": 3}).status_code == 409


@pytest.mark.parametrize(
    ("fields", "pointer", "message"),
    [
        ({"workers": [2]}, "/workers", "such as [2, 8]"),
        ({"workers": [2, 4, 8]}, "/workers", "such as [2, 8]"),
        ({"workers": [0, 4]}, "/workers/0", "give a whole number of at least 1"),
        ({"workers": [4, 2]}, "/workers", "workers is [4, 2]"),
        ({"workers": "2-4"}, "/workers", "valid integer"),
        ({"workers": [2, 4], "elastic": {"most": 8}}, "/elastic", "leave out elastic.most"),
        ({"workers": 2, "elastic": {"cooldown": 8}}, "/elastic", "lacks most"),
        ({"workers": [2, 4], "elastic": {"global_batch": 3}}, "/global_batch", "at least 4"),
        ({"workers": [2, 4], "elastic": {"lr_scaling": "square"}}, "/lr_scaling", "one of keep, linear, sqrt"),
    ],
)
def test_a_range_that_cannot_be(site: Site, fields: Any, pointer: str, message: str) -> None:
    answer = site.http.post("/api/v1/jobs", json={"workload": "a:B", **fields})
    assert answer.status_code == 422, answer.text
    [error] = answer.json()["errors"]
    assert error["pointer"] == pointer and message in error["message"]


def test_notices_are_announced_listed_and_withdrawn(site: Site) -> None:
    url = "/api/v1/notices"
    assert site.http.get(url).json() == {"notices": []}
    answer = site.http.post(url, json={"host": "10.0.0.7", "seconds": 30, "reason": "spot"})
    assert answer.status_code == 202
    assert answer.json() == {"node": "", "host": "10.0.0.7", "seconds": 30.0, "reason": "spot", "pid": None}
    site.http.post(url, json={"node": "ab" * 28})
    [first, second] = site.http.get(url).json()["notices"]
    assert 0 < first["seconds"] <= 30 and second["seconds"] is None and second["node"] == "ab" * 28
    assert site.http.post(url, json={"seconds": 30}).json()["errors"][0]["pointer"] == "/node"
    assert site.http.post(url, json={"host": "a b"}).status_code == 422
    assert site.http.post(url, json={"host": "a", "seconds": -1}).status_code == 422
    assert site.http.delete(url, params={"host": "10.0.0.7"}).json()["reason"] == "spot"
    assert site.http.delete(url, params={"host": "10.0.0.7"}).status_code == 404
    assert len(site.http.get(url).json()["notices"]) == 1
    assert httpx2.post(site.url + url, json={"host": "a"}).status_code == 401


def test_the_command_scales_and_shows_the_workers(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAYPS_URL", site.url)
    monkeypatch.setenv("RAYPS_TOKEN", site.token)
    job = site.add(workers=[2, 8], name="grows")
    assert main(["scale", job, "6"]) == 0
    assert capsys.readouterr().out == f"{job}: 0 of 2 to 8 workers; at most 6 requested\n"
    assert main(["scale", job, "9"]) == ConfigError.exit_code
    assert "with 2 to 8 workers: give a number in this range" in capsys.readouterr().err
    assert main(["get", job]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "workers          0 of 2 to 8" in lines and "allowed workers  2 (at most 6 requested)" in lines
    assert main(["ls"]) == 0
    assert "0 of 2 to 8 x all_reduce" in capsys.readouterr().out


class Placing(FakeCluster):
    """Notes where drivers are started."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[dict[str, Any]] = []

    def spawn(self, target: str, *args: Any, name: str, **kwargs: Any) -> FakeHandle:
        self.places.append({key: kwargs.get(key) for key in ("here", "avoid", "anywhere")})
        return super().spawn(target, *args, name=name, **kwargs)


@pytest.mark.parametrize("anywhere", [False, True])
def test_a_driver_starts_away_from_a_host_that_ends_if_it_may(tmp_path: Path, anywhere: bool) -> None:
    async def inside() -> list[dict[str, Any]]:
        store, cluster = await Store.open(tmp_path / "s.db"), Placing()
        scheduler = Scheduler(store, FakePlace(cluster), tmp_path / "jobs", view_seconds=60.0, anywhere=anywhere)
        try:
            await add(store, 1, name="first")
            await scheduler.tick()
            cluster.announce(Notice("n2", "", 30.0, "spot"))
            cluster.announce(Notice("n1", "", 30.0, "one process", pid=3))
            await add(store, 1, name="second")
            await scheduler.tick()
        finally:
            await store.close()

        return cluster.places

    first, second = asyncio.run(inside())
    assert first["here"] and second["here"]
    assert first["avoid"] in (None, ()) and second["avoid"] == (("n2",) if anywhere else None)
    assert second["anywhere"] is (True if anywhere else None)


def test_a_driver_that_moved_is_started_again_without_a_failure(tmp_path: Path) -> None:
    async def body(store: Store, scheduler: Scheduler, cluster: FakeCluster, place: FakePlace) -> None:
        job = await add(store, 2, max_failures=0)
        await scheduler.tick()
        trains(tmp_path, job, 2)
        await scheduler.tick()
        write(tmp_path, job, "driver.json", {"attempt": 1, "moved": "this process ends in 9 s (SIGTERM)"})
        cluster.actors.clear()
        await scheduler.tick()
        found = await store.get(job)
        assert (found.status, found.attempt, found.failures) == (S.RECOVERING, 2, 0)
        assert found.reason == "the driver is started again: this process ends in 9 s (SIGTERM)"
        cluster.actors.clear()  # the second driver dies without a notice: what the file says is of the first
        await scheduler.tick()
        assert (await store.get(job)).status is S.FAILED

    serve(tmp_path, body)
