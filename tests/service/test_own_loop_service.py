"""A loop of one's own as a job of the service, on a real Ray: submitted, killed, continued, stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from real_service import Serve, until

from rayps.service.client import Job

pytestmark = pytest.mark.ray
ROOT = Path(__file__).resolve().parents[2]

LOOP = """
import os, signal, time
import torch
import rayps

def train_fn(lr: float = 0.1, steps: int = 12, kill_at: int = -1, pause: float = 0.0):
    here = rayps.world()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    rayps.wrap(model, optimizer)
    begun = rayps.restore() or {"step": 0}
    for step in range(begun["step"], steps):
        generator = torch.Generator().manual_seed(1000 * step + here.rank)
        x = torch.randn(8, 3, generator=generator)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        time.sleep(pause)
        rayps.log(loss=loss, total=sum(p.detach().double().sum().item() for p in model.parameters()))
        rayps.save({"step": step + 1})
        if step == kill_at and here.rank == 1 and begun["step"] == 0:
            print("killed now", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def whole(ray_service: Serve, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The job that nothing happens to; whoever compares waits for it."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "loop.py").write_text(LOOP)
    return ray_service.client().submit(run="loop.py:train_fn", working_dir=folder, workers=2, name="whole")


def test_a_loop_is_a_job_and_goes_on_after_kill_9(ray_service: Serve, whole: Job, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    client = ray_service.client()
    command = [sys.executable, "-m", "rayps.cli", "submit", "--run", "loop.py:train_fn", "--workers", "2"]
    given = ["--set", "params.kill_at=5", "--set", "name=killed", "--set", "profile=true"]
    environment = os.environ | {
        "RAYPS_URL": ray_service.url,
        "RAYPS_STATE_DIR": str(ray_service.state),
        "PYTHONPATH": str(ROOT),
    }
    said = subprocess.run(
        [*command, *given], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert said.returncode == 0, said.stderr
    killed = client.job(said.stdout.strip())
    found = {}
    for job in (whole, killed):
        job.wait(timeout=240)
        assert job.data["status"] == "SUCCEEDED", job.data
        found[job.data["name"]] = job.data["metrics"]
        steps = {point["round"]: point for point in job.metrics()}
        assert sorted(steps) == list(range(1, 13))
        assert job.data["checkpoint"]
    assert found["killed"] == pytest.approx(found["whole"], abs=0)
    events = [event["kind"] for event in killed.events()]
    assert events.count("restarted") == 1
    assert {"profile/rank-0.json", "profile/rank-1.json"} <= set(killed.files()) and events.count("profiled") == 2
    for line in killed.data["progress"]["workers"]:
        assert line["round"] == 12 and line["status"] == "finished" and line["host"]
        assert line["compute"] > 0 and {"wait", "move", "data"} <= set(line)
    again = client.submit(
        run="loop.py:train_fn", working_dir=tmp_path, workers=2, resume=whole.id, params={"steps": 14}
    )
    cloned = client.submit_again(whole.id, params={"steps": 2})
    again.wait(timeout=240)
    assert [point["round"] for point in again.metrics()] == [13, 14]
    cloned.wait(timeout=240)
    assert cloned.data["status"] == "SUCCEEDED" and cloned.data["spec"]["code"] == whole.data["spec"]["code"]
    spec = {"run": "loop.py:train_fn", "working_dir": str(tmp_path), "params": {"steps": 3}}
    sweep = client.sweep(spec, lr=[0.1, 0.3]).wait(timeout=300)
    rows = sweep.table()
    assert [(row["lr"], row["rounds"]) for row in rows] == [(0.1, 3), (0.3, 3)]
    assert sweep.best("total", mode="max").id in {job.id for job in sweep.jobs}
    slow = client.submit(
        run="loop.py:train_fn",
        working_dir=tmp_path,
        workers=2,
        strategy="parameter_server:staleness=none",
        params={"steps": 10_000, "pause": 0.05, "kill_at": 20},
    )
    for topic, data in slow.follow():  # worker-1 dies, and is replaced alone
        lines = ((data.get("progress") or {}).get("workers") or []) if topic == "job" else []
        if (
            "replaced" in [event["kind"] for event in slow.events()]
            and min(line["round"] for line in lines or [{"round": 0}]) > 21
        ):
            break
    assert "restarted" not in [event["kind"] for event in slow.events()]
    slow.stop()
    slow.wait(timeout=120)
    assert slow.data["status"] == "STOPPED"
    assert slow.data["checkpoint"]


@pytest.mark.chaos
def test_a_loop_whose_driver_is_killed_has_an_equal_result(ray_service: Serve, whole: Job, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    job = ray_service.client().submit(run="loop.py:train_fn", working_dir=tmp_path, workers=2, params={"pause": 0.3})
    home = ray_service.state / "jobs" / job.id
    until(lambda: any((home / "checkpoints").glob("step-*")), 120)
    os.kill(json.loads((home / "driver.json").read_text())["pid"], signal.SIGKILL)
    job.wait(timeout=240)
    assert job.data["status"] == "SUCCEEDED", job.data
    assert sorted({point["round"] for point in job.metrics()}) == list(range(1, 13))
    kinds = [event["kind"] for event in job.events()]
    assert kinds.count("driver_restarted") == 1 and job.data["attempt"] == 2
    whole.wait(timeout=240)
    assert job.data["metrics"] == pytest.approx(whole.data["metrics"], abs=0)
