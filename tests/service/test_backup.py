"""`rayps backup` beside a running service, and a service that goes on from the copy."""

from __future__ import annotations

import json
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rayps_client.errors import ConfigError
from service_site import Site

from rayps.cli import main as cli
from rayps.core.job.job_status import Status
from rayps.service import backup as backup_module
from rayps.service.backup import backup
from rayps.service.settings import Settings


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path / "state")
    yield site
    site.close()


def ended(site: Site) -> str:
    job = site.add(name="ended")
    home = site.start(job)
    saved = home / "checkpoints" / "step-00000003"
    saved.mkdir(parents=True)
    (saved / "model.safetensors").write_bytes(b"x" * 1000)
    (home / "log.txt").write_text("2026-11-21T06:41:00.000Z worker-0 hello\n")
    (home / "outcome.json").write_text(json.dumps({"status": "SUCCEEDED", "message": "done"}))
    site.store("change_status", job, Status.SUCCEEDED, message="over", checkpoint=str(saved), metrics={"accuracy": 0.9})
    return job


@pytest.mark.parametrize("late", [False, True])
def test_a_service_goes_on_from_a_backup(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str], late: bool
) -> None:
    waiting, over, running = site.add(name="waiting", seed=5), ended(site), site.add(name="running")
    home = site.start(running)
    (home / "driver.json").write_text('{"attempt": 1}')
    assert site.http.post("/api/v1/server-groups", json={"name": "shared", "servers": 3}).status_code == 201
    home = site.settings.state_dir
    (home / "ray_token").write_text("of a Ray that is gone")
    assert cli.main(["backup", str(tmp_path / "copy"), "--state-dir", str(home)]) == 0
    said = capsys.readouterr()
    assert "3 jobs" in said.out and "cp -a" in said.err
    copy = tmp_path / "copy"
    assert copy.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in copy.rglob("*"))
    assert not any((copy / name).exists() for name in ("ray_token", "service.json", "rayps.db-wal"))
    before = {job: site.http.get(f"/api/v1/jobs/{job}").json() for job in (waiting, over, running)}
    lost = site.add(name="after the backup") if late else None
    token = site.token
    site.close()
    home.rename(tmp_path / "broken")
    shutil.copytree(copy, home)
    if lost:  # the job folders survived, the store is of yesterday
        shutil.copytree(tmp_path / "broken" / "jobs" / lost, home / "jobs" / lost)
    again = Site(home)
    try:
        assert again.token == token  # who could ask before can ask now
        after = {job: again.http.get(f"/api/v1/jobs/{job}").json() for job in before}
        for job in (waiting, over):
            assert {**after[job], "reason": None} == {**before[job], "reason": None}
        assert after[running]["attempt"] == 1 and after[running]["status"] == "STARTING"
        assert Path(after[over]["checkpoint"], "model.safetensors").read_bytes() == b"x" * 1000
        assert again.http.get(f"/api/v1/jobs/{over}/logs").json()["lines"][0]["text"] == "hello"
        [group] = again.http.get("/api/v1/server-groups").json()["groups"]
        assert (group["name"], group["wanted"]) == ("shared", 3)
        assert again.http.get(f"/api/v1/jobs/{lost}").json()["name"] == "after the backup" if lost else True
    finally:
        again.close()


def test_a_backup_is_of_one_moment_while_jobs_are_filed(site: Site, tmp_path: Path) -> None:
    done, made = threading.Event(), []

    def submit() -> None:
        while not done.is_set():
            made.append(site.add(seed=len(made)))

    writer = threading.Thread(target=submit)
    writer.start()
    try:
        for number in range(3):
            target = tmp_path / f"copy-{number}"
            acknowledged = list(made)
            found = backup(site.settings, target)
            with sqlite3.connect(target / "rayps.db") as copy:
                assert copy.execute("PRAGMA integrity_check").fetchone() == ("ok",)
                jobs = {row[0] for row in copy.execute("SELECT id FROM jobs")}
                noted = {row[0] for row in copy.execute("SELECT job_id FROM events WHERE kind='queued'")}
            copy.close()
            assert jobs == noted and set(acknowledged) <= jobs and found.jobs == len(jobs)
    finally:
        done.set()
        writer.join()


def test_without_checkpoints_they_are_left_out(site: Site, tmp_path: Path) -> None:
    job = ended(site)
    found = backup(site.settings, tmp_path / "copy", checkpoints=False)
    assert not found.checkpoints and not list((tmp_path / "copy").rglob("checkpoints"))
    assert (tmp_path / "copy" / "jobs" / job / "log.txt").exists()


def test_a_checkpoint_that_goes_while_it_is_copied_is_not_half_there(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ended(site)
    saved = site.settings.jobs_dir / job / "checkpoints" / "step-00000003"
    (saved / "zz.safetensors").write_bytes(b"y")
    copied = backup_module._copy

    def slow(path: Path, target: Path) -> int | None:
        found = copied(path, target)
        if path.name == "model.safetensors":
            shutil.rmtree(saved)
        return found

    monkeypatch.setattr(backup_module, "_copy", slow)
    backup(site.settings, tmp_path / "copy")
    assert not (tmp_path / "copy" / "jobs" / job / "checkpoints" / "step-00000003").exists()


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("state/copy", "inside the state directory"),
        ("state", "inside the state directory"),
        ("full", "not empty"),
        ("file", "not empty"),
    ],
)
def test_a_target_that_cannot_be_is_refused(site: Site, tmp_path: Path, target: str, says: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=says):
        backup(site.settings, tmp_path / target)


def test_without_a_store_there_is_nothing_to_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["backup", str(tmp_path / "copy"), "--state-dir", str(tmp_path / "none")]) == 2
    assert "no store" in capsys.readouterr().err and not (tmp_path / "copy").exists()
    state = Settings(state_dir=tmp_path / "state").prepare()
    state.database.write_bytes(b"this is no database " * 100)
    assert cli.main(["backup", str(tmp_path / "copy"), "--state-dir", str(state.state_dir)]) == 2
    assert "cannot be copied" in capsys.readouterr().err
