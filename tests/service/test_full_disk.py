"""A full disk: writes are answered with 507 and change nothing, readyz says so, and what was acknowledged stays."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import sqlalchemy as sa
from rayps_client.errors import ConfigError, ServiceError
from service_site import Site

from rayps.cli import main as cli
from rayps.core.job.job_status import Status
from rayps.service.client import Client
from rayps.service.state_disk import LEAST_FREE, StateDisk, is_full
from rayps.service.store import Store


def full_sqlite() -> sqlite3.Error:
    """The error of a real SQLite that has no page left."""
    with sqlite3.connect(":memory:") as connection:
        connection.execute("PRAGMA max_page_count=2")
        connection.execute("CREATE TABLE a (b)")
        try:
            while True:
                connection.execute("INSERT INTO a VALUES (zeroblob(4000))")
        except sqlite3.Error as error:
            return error


def caused(error: Exception) -> Exception:
    outer = RuntimeError("outer")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "x"), True),
        (OSError(errno.EDQUOT, "x"), True),
        (OSError(errno.EACCES, "x"), False),
        (full_sqlite(), True),
        (sqlite3.OperationalError("database or disk is full"), False),
        (None, False),
        (sa.exc.OperationalError("INSERT", {}, full_sqlite()), True),
        (caused(full_sqlite()), True),
        (caused(ValueError()), False),
    ],
)
def test_what_a_full_disk_looks_like(error: Exception | None, full: bool) -> None:
    assert is_full(error) == full


def test_trouble_lasts_as_long_as_the_disk_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, free = [100.0], [1 << 30]
    disk = StateDisk(tmp_path, lambda: now[0])

    def statvfs(path: Path) -> Any:
        assert path == tmp_path
        return os.statvfs_result((4096, 4096, 0, 0, free[0] // 4096, 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert disk.error is None
    disk.record_failure()
    assert disk.error and str(tmp_path) in disk.error and "rayps delete" in disk.error
    disk.record_success()
    assert disk.error is None
    disk.record_failure()
    now[0] += 11
    assert disk.error is None  # nothing was written since, and there is room
    free[0] = LEAST_FREE - 4096
    assert disk.error and "4.0 MiB free" in disk.error
    disk.record_success()
    assert disk.error


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path / "state")
    yield site
    site.close()


def pages(site: Site, most: int | None) -> None:
    """Let the database have as many pages as it has, or any number: SQLite itself then says that the disk is full."""

    async def limit() -> None:
        async with site.service.store.writing() as tx:
            found = (await tx.exec_driver_sql("PRAGMA page_count")).scalar() if most is None else most
            await tx.exec_driver_sql(f"PRAGMA max_page_count={found}")

    asyncio.run_coroutine_threadsafe(limit(), site.loop).result(10)


def submit(site: Site) -> Any:
    return site.http.post("/api/v1/jobs", json={"workload": "a:B", "working_dir": "/" + "tmp/../" * 100})


def test_a_store_without_room_refuses_with_507_and_keeps_what_it_acknowledged(site: Site) -> None:
    made = [submit(site).json()["id"]]
    pages(site, None)
    while (answer := submit(site)).status_code == 201:
        made.append(answer.json()["id"])
    assert answer.status_code == 507 and answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["code"] == "disk_full" and str(site.settings.state_dir) in problem["detail"]
    assert "changed nothing" in problem["detail"]
    ready = site.http.get("/readyz")
    assert ready.status_code == 503 and "is full" in ready.json()["reason"]
    assert site.http.get("/healthz").status_code == 200
    shown = site.http.get("/api/v1/jobs?limit=200").json()["jobs"]
    assert [job["id"] for job in shown] == made[::-1]
    with Client(site.url, site.token) as client, pytest.raises(ServiceError, match="is full") as caught:
        client.submit("a" * 990 + ":B", working_dir="/tmp", upload=False)
    assert caught.value.data["status"] == 507 and caught.value.exit_code == 1
    pages(site, 1 << 30)
    made.append(submit(site).json()["id"])
    assert "is full" not in site.http.get("/readyz").json()["reason"]
    assert [job["id"] for job in site.http.get("/api/v1/jobs?limit=200").json()["jobs"]] == made[::-1]
    assert site.http.get(f"/api/v1/jobs/{made[-1]}/events").json()["events"][0]["kind"] == "queued"


def test_a_folder_without_room_refuses_with_507(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayps.service.groups.private_write", no_room)
    answer = site.http.post("/api/v1/server-groups", json={"name": "a", "servers": 2})
    assert answer.status_code == 507 and site.http.get("/api/v1/server-groups").json() == {"groups": []}


def no_room(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_other_errors_stay_500(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "x")

    monkeypatch.setattr("rayps.service.groups.private_write", denied)
    assert site.http.post("/api/v1/server-groups", json={"name": "a", "servers": 2}).status_code == 500


def test_a_store_that_finds_no_room_at_its_start_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Any) -> None:
        raise sa.exc.OperationalError("CREATE", {}, full_sqlite())

    monkeypatch.setattr("rayps.service.store._migrate", full)
    with pytest.raises(ConfigError, match="is full") as caught:
        asyncio.run(Store.open(tmp_path / "s.db"))
    assert "Move the file away" not in str(caught.value)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_on_a_disk_that_is_really_full_deleting_makes_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = Site(small_disk / "state")
    try:
        made = [site.add(), site.add()]
        home = site.start(made[0])
        site.store("change_status", made[0], Status.SUCCEEDED, message="")
        with (home / "model.bin").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while file.write(b"x" * 4096):
                pass
        answers = [submit(site) for _ in range(200)]
        made += [answer.json()["id"] for answer in answers if answer.status_code == 201]
        assert {answer.status_code for answer in answers} <= {201, 507} and answers[-1].status_code == 507
        assert "is full" in site.http.get("/readyz").json()["reason"]
        assert {job["id"] for job in site.http.get("/api/v1/jobs?limit=200").json()["jobs"]} == set(made)
        site.close()
        site = Site(small_disk / "state")  # it starts on a full disk, and knows all jobs
        assert {job["id"] for job in site.http.get("/api/v1/jobs?limit=200").json()["jobs"]} == set(made)
        monkeypatch.setenv("RAYPS_URL", site.url)
        monkeypatch.setenv("RAYPS_TOKEN", site.token)
        assert cli.main(["delete", made[0]]) == 0, capsys.readouterr().err
        assert submit(site).status_code == 201
        assert "is full" not in site.http.get("/readyz").json()["reason"]
    finally:
        site.close()


@pytest.mark.parametrize("left", [0, 40_000])
def test_a_service_on_a_full_disk_serves_or_says_why_not(small_disk: Path, left: int) -> None:
    """Opening the store takes 32 KiB; with that much, jobs are shown and can be deleted."""
    state, log = small_disk / "state", small_disk.parent / "log"
    site = Site(state)
    job = site.add()
    site.close()
    with (small_disk / "filler").open("wb", buffering=0) as file:
        with pytest.raises(OSError, match="No space"):
            while file.write(b"x" * 512):
                pass
        file.truncate(file.tell() - left)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with log.open("w") as out:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "rayps.cli",
                "serve",
                "--state-dir",
                str(state),
                "--port",
                str(port),
                "--address",
                "127.0.0.1:1",
            ],
            stdout=out,
            stderr=out,
        )
    try:
        if left == 0:
            assert process.wait(120) not in (0, -9), log.read_text()
            assert "is full" in log.read_text() and "Move the file away" not in log.read_text()
            return
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
        while "Application startup complete" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        with Client(url, site.token) as client:
            assert client.job(job).id == job
        head = {"Authorization": f"Bearer {site.token}"}
        codes = []
        while 507 not in codes:  # what is left takes some jobs
            codes.append(httpx2.post(f"{url}/api/v1/jobs", json={"workload": "a:B"}, headers=head).status_code)
            assert codes[-1] in (201, 507) and len(codes) < 100, log.read_text()
        assert "is full" in httpx2.get(f"http://127.0.0.1:{port}/readyz").json()["reason"]
        process.terminate()
        assert process.wait(120) == 0, log.read_text()
    finally:
        process.kill()
