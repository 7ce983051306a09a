"""Jobs that the store lost are restored from their folders; each one is named in the log."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from rayps_client.errors import NotFound
from service_site import Site

from rayps.cli import doctor
from rayps.core.job.job_status import Status
from rayps.service import adoption, job_folders, processes
from rayps.service.adoption import FolderRow, StoreRow, compare, make_restored_columns
from rayps.service.store import Store
from rayps.strategies.job import JobSpec

S = Status
END = {"status": "SUCCEEDED", "message": "done", "metrics": {"accuracy": 0.9}, "checkpoint": "/c", "finished_at": 9.0}
ROW = {"id": "a", "name": "n", "spec": JobSpec("w:W").to_dict(), "created_at": 5.0}


def test_every_difference_between_folders_and_rows_is_found() -> None:
    row_cases = [None, *(StoreRow(status, attempt) for status in S for attempt in (0, 1, 2))]
    trace_cases = [
        None,
        *(FolderRow(row, attempt) for row in (None, ROW, {**ROW, "spec": {"wokers": 1}}) for attempt in (0, 1, 2)),
    ]
    for row, found in itertools.product(row_cases, trace_cases):
        findings = compare({} if row is None else {"a": row}, {} if found is None else {"a": found})
        live = row is not None and not row.status.terminal
        assert findings.rows_missing == (("a",) if row is None and found and found.row is ROW else ())
        assert findings.folders_invalid == (("a",) if row is None and found and found.row is not ROW else ())
        assert findings.rows_outdated == (("a",) if live and row and found and found.attempt > row.attempt else ())
        assert findings.job_files_missing == (("a",) if live and (found is None or found.row is None) else ())


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (FolderRow(ROW), {"status": S.QUEUED, "reason": None, "attempt": 0, "failures": 0}),
        (
            FolderRow(ROW, 3, 2),
            {
                "status": S.UNKNOWN,
                "reason": "searching for the job's driver",
                "interrupted": True,
                "attempt": 3,
                "failures": 2,
            },
        ),
        (
            FolderRow(ROW, 2, 1, END),
            {
                "status": S.SUCCEEDED,
                "reason": "done",
                "metrics": {"accuracy": 0.9},
                "checkpoint": "/c",
                "finished_at": 9.0,
                "attempt": 2,
                "failures": 1,
            },
        ),
        (
            FolderRow(ROW, 1, 0, {"status": "RUNNING"}),
            {
                "status": S.FAILED,
                "reason": None,
                "metrics": None,
                "checkpoint": None,
                "finished_at": None,
                "attempt": 1,
                "failures": 0,
            },
        ),
    ],
)
def test_how_a_lost_job_is_filed_again(found: FolderRow, expected: dict[str, Any]) -> None:
    assert make_restored_columns(found) == expected


def lose(site: Site, how: str, backup: bytes = b"") -> None:
    """What happens to databases."""
    site.close()
    database = site.settings.database
    if how == "moved away":
        for path in database.parent.glob("rayps.db*"):
            path.rename(path.with_name(f"old-{path.name}"))
        (database.parent / "service.lock").touch()
    elif how == "replaced by an old one":
        for path in database.parent.glob("rayps.db*"):
            path.unlink()
        database.write_bytes(backup)
    else:
        with sqlite3.connect(database) as connection:
            connection.execute("DELETE FROM events")
            connection.execute("DELETE FROM jobs")
        connection.close()


@pytest.mark.parametrize("how", ["moved away", "replaced by an old one", "emptied"])
def test_no_job_is_lost_with_the_store(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    site = Site(tmp_path / "state")
    waiting = site.http.post(
        "/api/v1/jobs", json={"workload": "a:B", "name": "waiting", "seed": 7}, headers={"Idempotency-Key": "k"}
    ).json()["id"]
    running, ended = site.add(name="running", workers=2), site.add(name="ended")
    site.close()
    backup = site.settings.database.read_bytes()
    site = Site(tmp_path / "state")
    for job in (running, ended):
        home = site.start(job)
        (home / "driver.json").write_text(json.dumps({"attempt": 2}))
        (home / "progress.json").write_text(json.dumps({"status": "RUNNING", "failures": 1, "time": time.time()}))
    (home / "outcome.json").write_text(json.dumps(END))
    (home / "checkpoints").mkdir()
    lose(site, how, backup)
    with caplog.at_level(logging.WARNING, logger="rayps.service.adoption"):
        site = Site(tmp_path / "state")
    try:
        for job in (running, ended) if how == "replaced by an old one" else (waiting, running, ended):
            assert job in caplog.text
            events = site.http.get(f"/api/v1/jobs/{job}/events").json()["events"]
            assert "adopted" in [event["kind"] for event in events]
        found = {job: site.http.get(f"/api/v1/jobs/{job}").json() for job in (waiting, running, ended)}
        assert [found[job]["name"] for job in found] == ["waiting", "running", "ended"]
        assert (found[waiting]["status"], found[waiting]["spec"]["seed"]) == ("QUEUED", 7)
        assert (found[running]["status"], found[running]["attempt"], found[running]["spec"]["workers"]) == (
            "UNKNOWN",
            2,
            2,
        )
        assert (found[ended]["status"], found[ended]["metrics"]) == ("SUCCEEDED", {"accuracy": 0.9})
        again = site.http.post(
            "/api/v1/jobs", json={"workload": "a:B", "name": "waiting", "seed": 7}, headers={"Idempotency-Key": "k"}
        )
        assert (again.status_code, again.json()["id"]) == (200, waiting)  # it is still the same request
        kept = site.store("statuses")
    finally:
        site.close()
    caplog.clear()
    site = Site(tmp_path / "state")  # once is enough
    try:
        assert "restored from the folders" not in caplog.text and site.store("statuses") == kept
    finally:
        site.close()


def with_store(path: Path, body: Callable[[Store], Awaitable[None]]) -> None:
    async def inside() -> None:
        store = await Store.open(path / "s.db")
        try:
            await body(store)
        finally:
            await store.close()

    asyncio.run(inside())


def test_a_folder_that_does_not_say_what_its_job_is_is_named_and_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(store: Store) -> None:
        job = "0" * 26
        for folder in (job, "notes", "." + job):
            (tmp_path / "jobs" / folder).mkdir(parents=True)
        findings = await adoption.adopt(store, tmp_path / "jobs")
        assert findings.folders_invalid == (job,) and job in caplog.text and "notes" not in caplog.text
        with pytest.raises(NotFound):
            await store.get(job)
        assert (tmp_path / "jobs" / job).exists()

    with_store(tmp_path, body)


def test_a_driver_whose_job_nobody_can_know_is_ended_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(store: Store) -> None:
        for known, folder in ((False, "0" * 26), (True, "1" * 26)):
            driver = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            home = tmp_path / "jobs" / folder
            try:
                job_folders.write_row(home, ({**ROW, "id": folder, "status": "QUEUED"} if known else {}))
                (home / "driver.json").write_text(
                    json.dumps({"attempt": 1, "pid": driver.pid, "started": processes.start_time(driver.pid)})
                )
                await adoption.adopt(store, tmp_path / "jobs")
                if known:
                    assert driver.poll() is None and (await store.get(folder)).status is S.UNKNOWN
                else:
                    assert driver.wait(60) == -signal.SIGKILL
                    assert folder in caplog.text and str(driver.pid) in caplog.text
            finally:
                driver.kill()
                driver.wait()

    with_store(tmp_path, body)


def test_a_living_job_without_job_json_gets_one_at_the_next_start(tmp_path: Path) -> None:
    async def body(store: Store) -> None:
        job, _ = await store.add(JobSpec("w:W", seed=3), name="early")
        over, _ = await store.add(JobSpec("w:W"), name="over")
        await store.change_status(over.id, S.STOPPED, message="")
        await adoption.adopt(store, tmp_path / "jobs")
        kept = job_folders.read_row(tmp_path / "jobs" / job.id)
        assert kept is not None and (kept["name"], kept["spec"]["seed"], kept["status"]) == ("early", 3, "QUEUED")
        assert not (tmp_path / "jobs" / over.id).exists()
        assert await adoption.adopt(store, tmp_path / "jobs") == adoption.FolderDifferences()

    with_store(tmp_path, body)


def test_the_doctor_names_lost_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPS_STATE_DIR", str(tmp_path / "state"))

    def said() -> doctor.Finding:
        return next(each for each in doctor.list_findings() if each.name == "jobs in the store")

    assert said().found == "no state directory yet"
    site = Site(tmp_path / "state")
    job = site.add()
    site.close()
    assert said().found == "all 1"
    lose(site, "moved away")
    nameless = "0" * 26
    (site.settings.jobs_dir / nameless).mkdir()
    found = said()
    assert found.found is None and not found.failed
    assert job in found.remedy and "rayps serve" in found.remedy and nameless in found.remedy
