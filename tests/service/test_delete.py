"""Ended jobs are deleted with their folders over REST, the client and the command line; others are refused."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rayps_client.errors import Conflict, NotFound
from service_site import Site

from rayps.cli import main as cli
from rayps.core.job.job_status import Status
from rayps.service import job_folders
from rayps.service.client import Client


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("state"))
    yield site
    site.close()


def ended(site: Site, status: Status = Status.SUCCEEDED, **fields: Any) -> tuple[str, Path]:
    job = site.add(**fields)
    home = site.start(job)
    saved = home / "checkpoints" / "step-00000007"
    saved.mkdir(parents=True)
    (saved / "model.safetensors").write_bytes(b"x" * 1000)
    site.store("change_status", job, status, message="over", checkpoint=str(saved))
    return job, home


@pytest.mark.parametrize("status", [Status.SUCCEEDED, Status.FAILED, Status.STOPPED])
def test_an_ended_job_is_deleted_with_all_that_it_kept(site: Site, status: Status) -> None:
    job, home = ended(site, status)
    other, kept = ended(site)
    made = site.service.client_tokens.create(job, "hospital-a")
    token, _ = asyncio.run_coroutine_threadsafe(made, site.loop).result(10)
    assert token.id in site.http.get("/api/v1/client-tokens").text
    answer = site.http.delete(f"/api/v1/jobs/{job[:22].lower()}")
    assert answer.status_code == 200 and (answer.json()["id"], answer.json()["status"]) == (job, status)
    for path in ("", "/events", "/logs", "/metrics"):
        assert site.http.get(f"/api/v1/jobs/{job}{path}").status_code == 404
    assert not home.exists() and site.store("events", job) == [] and list(site.settings.jobs_dir.glob(".*")) == []
    assert token.id not in site.http.get("/api/v1/client-tokens").text
    assert job not in [each["id"] for each in site.http.get("/api/v1/jobs?limit=200").json()["jobs"]]
    assert site.http.delete(f"/api/v1/jobs/{job}").status_code == 404
    assert site.http.get(f"/api/v1/jobs/{other}").status_code == 200 and kept.exists()


@pytest.mark.parametrize("status", [s for s in Status if not s.terminal])
def test_a_job_that_has_not_ended_is_refused_and_loses_nothing(site: Site, status: Status) -> None:
    job = site.add()
    home = site.settings.jobs_dir / job
    if status is not Status.QUEUED:
        home = site.start(job)
        if status is not Status.STARTING:
            site.store("change_status", job, status, message="")
    answer = site.http.delete(f"/api/v1/jobs/{job}")
    assert answer.status_code == 409 and answer.json()["code"] == "conflict"
    assert job in answer.json()["detail"] and "rayps stop" in answer.json()["detail"]
    assert site.http.get(f"/api/v1/jobs/{job}").status_code == 200 and home.exists()


def test_a_job_whose_checkpoint_a_living_job_resumes_is_refused_until_that_has_ended(site: Site) -> None:
    job, home = ended(site)
    heir = site.add(resume=job, name="heir")
    answer = site.http.delete(f"/api/v1/jobs/{job}")
    assert answer.status_code == 409 and heir in answer.json()["detail"] and home.exists()
    site.store("change_status", heir, Status.STOPPED, message="")
    assert site.http.delete(f"/api/v1/jobs/{job}").status_code == 200 and not home.exists()


def test_a_removal_that_was_cut_off_is_completed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    job, home = ended(site)

    def cut_off(path: Path) -> None:
        next(Path(path).rglob("*.safetensors")).unlink()
        raise OSError("cut off")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", cut_off)
        assert site.http.delete(f"/api/v1/jobs/{job}").status_code == 500
    assert not home.exists() and site.http.get(f"/api/v1/jobs/{job}").status_code == 200  # the row is the last to go
    assert site.http.delete(f"/api/v1/jobs/{job}").status_code == 200
    assert list(site.settings.jobs_dir.glob(f"*{job}")) == []
    job, home = ended(site)
    home.rename(home.with_name(f".deleted-{job}"))
    job_folders.complete_removals(site.settings.jobs_dir)
    assert list(site.settings.jobs_dir.glob(f"*{job}")) == []


def test_the_client_and_the_command_line_delete(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAYPS_URL", site.url)
    monkeypatch.setenv("RAYPS_STATE_DIR", str(site.settings.state_dir))
    with Client() as client:
        job = client.job(ended(site)[0])
        job.delete()
        with pytest.raises(NotFound):
            job.refresh()
        running = client.job(site.add())
        with pytest.raises(Conflict, match="stop it first"):
            running.delete()
    first, second = ended(site)[0], ended(site)[0]
    assert cli.main(["delete", first, second]) == 0
    assert capsys.readouterr().out == f"{first} is deleted\n{second} is deleted\n"
    third = ended(site)[0]
    assert cli.main(["delete", third, "-o", "json"]) == 0
    assert [each["id"] for each in json.loads(capsys.readouterr().out)] == [third]
    assert cli.main(["delete", running.id]) == 5 and "stop it first" in capsys.readouterr().err
    assert cli.main(["delete", third]) == 3


def test_a_reader_of_a_deleted_job_is_told_the_end(site: Site) -> None:
    job, home = ended(site)
    (home / "log.txt").write_text("2026-11-21T06:41:00.000Z worker-0 hello\n" * 30_000)
    kinds = []
    with site.http.stream("GET", f"/api/v1/stream?job={job}&topics=job,logs") as stream:
        for line in stream.iter_lines():
            if line.startswith("event: "):
                kinds.append(line[7:])
                if kinds == ["job"]:
                    assert site.http.delete(f"/api/v1/jobs/{job}").status_code == 200
    assert kinds[-1] == "end"
