"""Kill the service (SIGKILL) at each step of submit, launch, restart, stop, kill and end: every acknowledged job ends,
once, and the death of the service is no failure of the job. Drivers are processes that outlive the service
(`service_process`); `test_service.py` has the same on Ray."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import service_process

from rayps.core.failpoint import VARIABLE

pytestmark = pytest.mark.chaos
ROOT = Path(__file__).resolve().parents[2]
FAMILIES = "submit|launch|restart|stop|kill|end|driver"

LINE = """
import torch
import rayps

class Line(rayps.Workload):
    def model(self):
        return torch.nn.Linear(3, 1)
    def data(self):
        return rayps.data.tensors(torch.ones(8, 3), torch.ones(8, 1), batch_size=2)
    def loss(self, model, batch):
        return ((model(batch.x) - batch.y) ** 2).mean()
"""


class Site:
    """The service's processes, one after the other, on one state directory."""

    def __init__(self, path: Path) -> None:
        self.state = path / "state"
        self.actors = path / "actors"
        self.process: subprocess.Popen[bytes] | None = None
        self.http = httpx2.Client()

    def start(self, failpoint: str = "") -> None:
        (self.state / "http.json").unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, str(service_process.HERE), str(self.state)], env={**os.environ, VARIABLE: failpoint}
        )
        until(lambda: (self.state / "http.json").exists() or self.process.poll() is not None)  # type: ignore[union-attr]
        found = json.loads((self.state / "http.json").read_text())
        self.http = httpx2.Client(base_url=found["url"], headers={"Authorization": f"Bearer {found['token']}"})

    def died(self) -> None:
        assert self.process is not None
        assert self.process.wait(120) == -signal.SIGKILL, "it did not come by the place"

    def submit(self, workload: str, key: str, **fields: Any) -> str | None:
        """The job's id; None when nobody acknowledged it."""
        body = {"workload": workload, "working_dir": str(self.state.parent), **fields}
        try:
            answer = self.http.post("/api/v1/jobs", json=body, headers={"Idempotency-Key": key})
        except httpx2.TransportError:
            return None
        assert answer.status_code in (200, 201), answer.text
        return str(answer.json()["id"])

    def stop(self, job: str) -> bool:
        try:
            return self.http.post(f"/api/v1/jobs/{job}/stop").status_code == 202
        except httpx2.TransportError:
            return False

    def job(self, job: str) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get(f"/api/v1/jobs/{job}").json()
        return found

    def ended(self, job: str) -> dict[str, Any]:
        return until(lambda: (found := self.job(job))["status"] in ("SUCCEEDED", "FAILED", "STOPPED") and found)

    def pid(self, job: str) -> int:
        path = self.actors / f"driver-{job}.lock"
        return int(until(lambda: path.exists() and path.read_text()))

    def ledger(self, job: str) -> list[str]:
        path = self.state / "jobs" / job / "ledger.txt"
        return path.read_text().splitlines() if path.exists() else []

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for path in self.actors.glob("*.lock"):
            if service_process.held(path):
                os.kill(int(path.read_text()), signal.SIGKILL)


def until(ready: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 120
    while not (found := ready()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    (tmp_path / "line.py").write_text(LINE)
    site = Site(tmp_path)
    yield site
    site.close()


def all_end(site: Site, jobs: list[str], status: str) -> None:
    """Each job ends so; each attempt ran once and one outcome was written; no driver is left; there is no other job."""
    for job in jobs:
        found = site.ended(job)
        assert found["status"] == status, found
        begun = [line for line in site.ledger(job) if line.startswith("begun")]
        assert len(begun) == len(set(begun)), begun
        assert sum(line.startswith("ended") for line in site.ledger(job)) == 1, site.ledger(job)
        until(lambda job=job: not service_process.held(site.actors / f"driver-{job}.lock"))
    assert sorted(job["id"] for job in site.http.get("/api/v1/jobs").json()["jobs"]) == sorted(jobs)


SUBMIT = [
    "submit: checked, not stored",
    "submit: written, not committed",
    "submit: stored, folder not written",
    "submit: stored, not acknowledged",
]
LAUNCH = ["launch: chosen, not stored", "launch: stored, not started", "launch: started, not noted"]
END = ["end: decided, not stored", "end: stored, driver not ended"]
RESTART = ["restart: attempt stored, status not"]
STOP = ["stop: stored, not acknowledged", "stop: stored, driver not asked", "stop: driver asked"]
KILL = ["kill: chosen, not done", "kill: done"]
DRIVER = ["driver: begun, nothing done", "driver: outcome written, not ended"]


def test_there_is_a_kill_for_each_place() -> None:
    found = set()
    for folder in ("rayps/service", "rayps/runtime", "api"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= set(re.findall(rf'passing\("((?:{FAMILIES}): [^"]+)"\)', path.read_text()))
    assert found == {*SUBMIT, *LAUNCH, *END, *RESTART, *STOP, *KILL, *DRIVER}


@pytest.mark.parametrize("place", [*SUBMIT, *LAUNCH, *END])
def test_killed_between_submit_and_end(site: Site, place: str) -> None:
    """With `max_failures=0`: that the service was killed is no failure of the job."""
    site.start(f"{place}=2")
    jobs = {key: site.submit("quick:Quick", key, max_failures=0) for key in ("one", "two", "three")}
    site.died()
    site.start()
    again = {key: site.submit("quick:Quick", key, max_failures=0) for key in jobs}
    assert all(job in (None, again[key]) for key, job in jobs.items())  # what was acknowledged is there, and once
    all_end(site, [str(job) for job in again.values()], "SUCCEEDED")


@pytest.mark.parametrize("place", [*RESTART, *LAUNCH])
def test_killed_while_it_starts_a_job_again(site: Site, place: str) -> None:
    site.start(f"{place}={2 if place in LAUNCH else 1}")
    job = site.submit("hold:Hold", "one", max_failures=1)
    assert job is not None
    until(lambda: site.ledger(job) == ["begun 1"] and site.job(job)["status"] == "RUNNING")
    os.kill(site.pid(job), signal.SIGKILL)
    site.died()
    site.start()
    found = site.ended(job)
    assert found["status"] == "SUCCEEDED", found  # one failure is the driver's death; the service's is none
    lines = site.ledger(job)
    assert lines[0] == "begun 1" and len(lines) == 3 and lines[2] == lines[1].replace("begun", "ended"), lines
    until(lambda: not service_process.held(site.actors / f"driver-{job}.lock"))


@pytest.mark.parametrize("place", STOP)
def test_killed_while_it_stops_a_job(site: Site, place: str) -> None:
    site.start(f"{place}=1")
    job = site.submit("hold:Hold", "one", max_failures=0)
    assert job is not None
    until(lambda: site.ledger(job) == ["begun 1"])
    site.stop(job)  # acknowledged or not, the wish is stored: its place comes after
    site.died()
    site.start()
    all_end(site, [job], "STOPPED")


@pytest.mark.parametrize("place", KILL)
def test_killed_while_it_kills_a_driver(site: Site, place: str) -> None:
    site.start(f"{place}=1")
    job = site.submit("crash:Crash", "one", max_failures=0)
    assert job is not None
    site.died()
    site.start()
    found = site.ended(job)
    assert found["status"] == "FAILED" and "KeyError: 'x'" in found["reason"], found
    assert site.ledger(job) == ["begun 1"]
    until(lambda: not service_process.held(site.actors / f"driver-{job}.lock"))


@pytest.mark.parametrize("place", DRIVER)
def test_a_driver_killed_at_its_begin_and_its_end(site: Site, place: str) -> None:
    """The real driver, whose environment has the place too; the service comes by none of them."""
    site.start(f"{place}=1")
    job = site.submit("line.py:Line", "one", epochs=1, max_failures=1)
    assert job is not None
    if place == DRIVER[0]:
        found = site.ended(job)  # the next attempt's driver comes by the place as well: failure 2
        assert found["status"] == "FAILED" and "max_failures 1" in found["reason"], found
        assert site.ledger(job) == ["begun 1", "begun 2"]
    else:
        assert site.ended(job)["status"] == "SUCCEEDED" and site.ledger(job) == ["begun 1"]
    until(lambda: not service_process.held(site.actors / f"driver-{job}.lock"))
