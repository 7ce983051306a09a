"""Faults of the service that have no file of their own: a locked store, clients that go away, a second service."""

from __future__ import annotations

import asyncio
import fcntl
import json
import socket
import sqlite3
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from rayps_client.errors import ConfigError
from service_site import Site

from rayps.cli import main as cli
from rayps.core.job.job_status import Status
from rayps.service.settings import SERVICE_LOCK, Settings
from rayps.service.store import Store, is_locked


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path / "state")
    yield site
    site.close()


def impatient(site: Site) -> None:
    """Let the store wait no time for a lock."""

    async def set_pragma() -> None:
        async with site.service.store.writing() as tx:
            await tx.exec_driver_sql("PRAGMA busy_timeout=0")

    asyncio.run_coroutine_threadsafe(set_pragma(), site.loop).result(10)


def test_a_locked_store_is_said_to_be_busy_and_nothing_is_changed(site: Site) -> None:
    impatient(site)
    before = site.add()
    other = sqlite3.connect(site.settings.database, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    try:
        answer = site.http.post("/api/v1/jobs", json={"workload": "a:B"}, headers={"Idempotency-Key": "k"})
        assert answer.status_code == 503 and answer.headers["Retry-After"] == "5", answer.text
        found = answer.json()
        assert found["code"] == "busy" and "changed nothing" in found["detail"] and "INSERT" not in answer.text
        assert site.http.get("/healthz").status_code == 200
        assert [job["id"] for job in site.http.get("/api/v1/jobs").json()["jobs"]] == [before]  # readers go on
    finally:
        other.execute("ROLLBACK")
        other.close()
    made = site.http.post("/api/v1/jobs", json={"workload": "a:B"}, headers={"Idempotency-Key": "k"})
    assert made.status_code == 201, made.text  # the key was not used
    assert len(site.http.get("/api/v1/jobs").json()["jobs"]) == 2


def test_what_a_locked_file_looks_like(tmp_path: Path) -> None:
    one, other = (sqlite3.connect(tmp_path / "a.db", isolation_level=None, timeout=0) for _ in range(2))
    one.execute("BEGIN EXCLUSIVE")
    with pytest.raises(sqlite3.OperationalError) as caught:
        other.execute("BEGIN IMMEDIATE")
    assert is_locked(caught.value) and is_locked(sa.exc.OperationalError("BEGIN", {}, caught.value))
    assert not is_locked(sqlite3.OperationalError("database is locked")) and not is_locked(None)
    one.close()
    other.close()


def test_a_commit_is_on_disk_before_it_is_acknowledged(tmp_path: Path) -> None:
    """A killed process cannot show this: the settings are what makes a commit survive a loss of power."""

    async def pragmas() -> tuple[int, str]:
        store = await Store.open(tmp_path / "a.db")
        async with store.writing() as tx:
            full = (await tx.exec_driver_sql("PRAGMA synchronous")).scalar()
            mode = (await tx.exec_driver_sql("PRAGMA journal_mode")).scalar()
        await store.close()
        return int(full), str(mode)

    assert asyncio.run(pragmas()) == (2, "wal")  # 2: FULL


def test_a_store_with_a_damaged_page_is_refused_with_the_way_out_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "rayps.db"

    async def open_once() -> None:
        await (await Store.open(path)).close()

    asyncio.run(open_once())
    data = bytearray(path.read_bytes())
    data[40:2000] = bytes(1960)  # in the first page: the schema
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"malformed[\s\S]*Move the file away"):
        asyncio.run(open_once())
    assert path.read_bytes() == bytes(data)


def request(site: Site, key: str) -> bytes:
    body = json.dumps({"workload": "a:B"}).encode()
    head = f"POST /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {site.token}\r\n"
    head += f"Content-Type: application/json\r\nIdempotency-Key: {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize("sent", ["head", "half a body", "everything"])
def test_a_client_that_goes_away_while_it_submits_leaves_a_whole_job_or_none(site: Site, sent: str) -> None:
    whole = request(site, "k")
    head = whole.index(b"\r\n\r\n") + 4
    cut = {"head": head, "half a body": (head + len(whole)) // 2, "everything": len(whole)}[sent]
    with socket.create_connection(("127.0.0.1", site.port)) as line:
        line.sendall(whole[:cut])
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not an orderly end
    answer = site.http.post("/api/v1/jobs", json={"workload": "a:B"}, headers={"Idempotency-Key": "k"})
    assert answer.status_code in (200, 201), answer.text
    jobs = site.http.get("/api/v1/jobs").json()["jobs"]
    assert [job["id"] for job in jobs] == [answer.json()["id"]]  # the first request made this job, or none
    assert jobs[0]["status"] == "QUEUED"
    site.http.post(f"/api/v1/jobs/{jobs[0]['id']}/stop")
    deadline = time.monotonic() + 60
    while site.http.get(f"/api/v1/jobs/{jobs[0]['id']}").json()["status"] != Status.STOPPED:
        assert time.monotonic() < deadline, "the job did not end"
        time.sleep(0.02)


def test_a_second_service_on_the_same_state_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(state_dir=tmp_path / "state").prepare()
    with (settings.state_dir / SERVICE_LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as the first service does
        assert cli.main(["serve", "--state-dir", str(settings.state_dir), "--port", "0"]) == 2
    assert "another `rayps serve`" in capsys.readouterr().err
