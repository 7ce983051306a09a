"""Random kills, many times, on a real Ray; prints its figures, exits with 1 where something was lost. `make kills`.

    python scripts/kills.py [--seed 0] [--kills 50] [--each 10] [--only service --only gcs ...]

First the service is killed (SIGKILL) `--kills` times, each at a random moment after a submission: each acknowledged job
must succeed, once, without a failure counted (`max_failures=0`). Then each process of Ray, and all at once, is killed
`--each` times under one job that never ends by itself: the service must live, become ready and the job go on from its
checkpoint. CI has one kill of each with fixed seeds: `test_service_kills.py`, `test_service.py`.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import folders

folders.add_to_path()
from real_service import Serve
from test_service import VICTIMS, WORK, rounds

from rayps.service import processes
from rayps.service.local_ray.ray_daemon import read_record

PATIENCE = 600.0  # seconds; ends a hang, measures nothing
KILLED = {**VICTIMS, "daemon": ["ray_daemon"]}
ENDS = ("SUCCEEDED", "FAILED", "STOPPED")


def until(ready: Callable[[], Any], what: str) -> float:
    """Wait, and give the seconds that it took."""
    began = time.monotonic()
    while not ready():
        if time.monotonic() - began > PATIENCE:
            raise TimeoutError(f"not within {PATIENCE:g} s: {what}")
        time.sleep(0.05)
    return time.monotonic() - began


def is_ready(serve: Serve) -> bool:
    try:
        return httpx2.get(f"{serve.url}/readyz").status_code == 200
    except httpx2.TransportError:
        return False


def told(name: str, facts: str, seconds: list[float]) -> None:
    times = f"; ready again after {statistics.median(seconds):.1f} s (median), {max(seconds):.1f} s (worst)"
    print(f"{name}: {facts}{times if seconds else ''}", flush=True)


def soak_service(serve: Serve, work: Path, kills: int, dice: random.Random) -> bool:
    """Kill the service at random moments of submit, launch and seal; gives whether every job ended once."""
    jobs: dict[str, str] = {}
    ready: list[float] = []
    for count in range(kills):
        made = serve.client()
        key = f"soak-{count}"
        body = {"workload": "line.py:Line", "working_dir": str(work), "epochs": 1, "max_failures": 0}
        for _ in range(dice.randint(1, 2)):  # a second one is the first again
            answer = httpx2.post(
                f"{serve.url}/api/v1/jobs",
                json=body,
                headers={
                    "Authorization": f"Bearer {(serve.state / 'token').read_text().strip()}",
                    "Idempotency-Key": key,
                },
            )
            jobs[key] = answer.json()["id"]
        made.close()
        time.sleep(dice.choice([0.0, 0.1, 0.3, 0.6, 1.0, 2.0, dice.uniform(0.0, 12.0)]))
        serve.kill()
        began = time.monotonic()
        serve.start()
        until(lambda: is_ready(serve), "the service is ready")
        ready.append(time.monotonic() - began)
    client = serve.client()
    until(lambda: all(client.job(job).status in ENDS for job in jobs.values()), "every job has ended")
    found = [client.job(job) for job in jobs.values()]
    good = sum(job.status == "SUCCEEDED" for job in found)
    twice = sum([event["kind"] for event in job.events()].count("finished") != 1 for job in found)
    strange = len(client.jobs(limit=200)) - len(jobs)
    again = sum(job.data["attempt"] > 1 for job in found)
    told(
        "service",
        f"{kills} kills, {len(jobs)} jobs acknowledged, {good} succeeded with max_failures=0, {twice} not "
        f"exactly once, {strange} that nobody submitted; {again} drivers were started again",
        ready,
    )
    for job in found:
        if job.status != "SUCCEEDED":
            print(f"  {job.id}: {job.status}: {job.data['reason']}", flush=True)
    return good == len(jobs) and not twice and not strange


def soak_ray(serve: Serve, work: Path, victim: str, times: int, dice: random.Random) -> bool:
    """Kill a process of Ray under a job; gives whether service and job went on each time."""
    service = serve.process
    assert service is not None
    client = serve.client()
    job = client.submit(
        "line.py:Slow", working_dir=work, workers=2, epochs=100_000, checkpoint_every=5, max_failures=10 * times
    )
    home = serve.state / "jobs" / job.id
    ready, on, deaths = [], [], 0
    for _ in range(times):
        before = len(rounds(home))
        until(lambda before=before: len(rounds(home)) > before + 8, "the job gets on")
        time.sleep(dice.uniform(0.0, 1.0))
        daemon = read_record(serve.state)
        assert daemon is not None
        for pid in [daemon.pid, *processes.list_descendants(daemon.pid)]:
            if any(part in " ".join(processes.read_command(pid)[:3]) for part in KILLED[victim]):
                os.kill(pid, signal.SIGKILL)
        before, began = len(rounds(home)), time.monotonic()
        until(lambda before=before: len(rounds(home)) > before + 8, "the job goes on")
        on.append(time.monotonic() - began)
        until(lambda: is_ready(serve), "the service is ready")
        ready.append(time.monotonic() - began)
        deaths += service.poll() is not None
    job.stop()
    until(lambda: client.job(job.id).status in ENDS, "the job has stopped")
    found = client.job(job.id)
    done = set(rounds(home))
    holes = max(done) + 1 - len(done)
    told(
        victim,
        f"{times} kills, the service died {deaths} times, the job ended {found.status} in attempt "
        f"{found.data['attempt']} after {max(done) + 1} rounds, {holes} rounds missing; eight rounds on after "
        f"{statistics.median(on):.1f} s (median), {max(on):.1f} s (worst)",
        ready,
    )
    return found.status == "STOPPED" and not deaths and not holes


def main() -> int:
    parser = argparse.ArgumentParser(description="random kills of the service and of Ray's processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--each", type=int, default=10)
    parser.add_argument("--only", action="append", choices=["service", *KILLED], default=[])
    given = parser.parse_args()
    dice, good = random.Random(given.seed), True
    print(f"seed {given.seed}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "line.py").write_text(WORK)
        (work / "state").mkdir()
        serve = Serve(work / "state")
        serve.start()
        try:
            until(lambda: is_ready(serve), "the service is ready")
            if not given.only or "service" in given.only:
                good &= soak_service(serve, work, given.kills, dice)
            for victim in KILLED:
                if not given.only or victim in given.only:
                    good &= soak_ray(serve, work, victim, given.each, dice)
        finally:
            serve.end()
    print("all went on" if good else "SOMETHING WAS LOST", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
