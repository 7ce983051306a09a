"""Callbacks, evaluations within an epoch and the best checkpoint in jobs of the service, with drivers in processes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
from folders import PYTHONPATH
from rayps_client.errors import ConfigError
from service_process import ProcessPlace
from service_site import Site

from rayps.cli.main import main
from rayps.service.client import Client, Job

WORK = """
import torch
import rayps

class Line(rayps.Workload):
    lr: float = 0.05

    def model(self):
        torch.manual_seed(0)
        return torch.nn.Linear(4, 1)
    def data(self):
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return rayps.data.tensors(x, x.sum(dim=1, keepdim=True), batch_size=8)
    def optimizer(self, params):
        return torch.optim.SGD(params, lr=self.lr)
    def loss(self, model, batch):
        return ((model(batch.x) - batch.y) ** 2).mean()
    def evaluate(self, model, batch):
        return {"error": ((model(batch.x) - batch.y) ** 2).mean(), "constant": torch.tensor(1.0)}

class Stops(Line):
    patience: int = 2
    def callbacks(self):
        return [rayps.EarlyStopping("constant", patience=self.patience, mode="min")]

class Keeps(Line):
    def callbacks(self):
        return [rayps.BestCheckpoint("constant", "min")]
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("service")
    os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), PYTHONPATH])
    site = Site(folder / "state", place=ProcessPlace(folder / "actors"))
    yield site
    site.close()


@pytest.fixture
def client(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setenv("RAYPS_URL", site.url)
    monkeypatch.setenv("RAYPS_TOKEN", site.token)
    with Client(timeout=120) as client:
        yield client


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "line.py").write_text(WORK)
    return tmp_path


def evaluated(job: Job) -> list[int]:
    return [point["round"] for point in job.metrics() if point["kind"] == "evaluation"]


def done(job: Job) -> Job:
    assert job.wait(400).data["status"] == "SUCCEEDED", job.data["reason"]
    return job


def test_a_job_whose_workload_stops_early_succeeds(client: Client, home: Path) -> None:
    spec = {"working_dir": str(home), "workers": 2, "steps": 50_000, "evaluate_every": 4, "params": {"patience": 3}}
    job = done(client.submit("line.py:Stops", **spec))
    assert "constant has not improved for 3 evaluations (best: 1, after round 4)" in job.data["reason"]
    rounds = evaluated(job)
    assert rounds[:4] == [4, 8, 12, 16] and rounds[-1] < 50_000
    assert job.data["checkpoint"] and job.result["constant"] == 1.0


def test_a_job_resumes_from_the_best_checkpoint_of_another(
    client: Client, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = done(client.submit("line.py:Keeps", working_dir=home, workers=2, steps=12, evaluate_every=4))
    best = first.data["progress"]["best"]
    assert best.endswith("best/step-00000004"), "a constant is best at first"
    assert main(["export", first.id, str(home / "newest")]) == 0
    assert main(["export", first.id, str(home / "kept"), "--checkpoint", "best"]) == 0
    assert main(["export", best, str(home / "there"), "--workload", f"{home / 'line.py'}:Keeps"]) == 0
    newest, kept, there = (
        safetensors.torch.load_file(home / name / "model.safetensors")["weight"] for name in ("newest", "kept", "there")
    )
    assert kept.equal(there) and not kept.equal(newest)
    again = client.submit("line.py:Line", working_dir=home, workers=2, steps=12, resume=f"{first.id}:best")
    assert again.data["spec"]["resume"] == best
    assert main(["get", again.id]) == 0 and re.search(rf"resumed from +{re.escape(best)}", capsys.readouterr().out)
    warm = client.submit("line.py:Line", working_dir=home, steps=2, start_from=first.id)
    assert main(["get", warm.id]) == 0
    assert re.search(rf"started from +{re.escape(first.data['checkpoint'])}", capsys.readouterr().out)
    done(warm)
    done(again)
    assert [point["round"] for point in again.metrics() if point["kind"] == "round"] == list(range(4, 12))
    assert again.result["error"] == pytest.approx(first.result["error"], rel=1e-5)
    plain = done(client.submit("line.py:Line", working_dir=home, steps=2))
    with pytest.raises(ConfigError, match="has kept no best checkpoint"):
        client.submit("line.py:Line", working_dir=home, resume=f"{plain.id}:best")


def test_evaluations_and_kept_checkpoints_are_fields_of_rest_and_of_job_files(
    site: Site, client: Client, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"workload": "line.py:Keeps", "working_dir": str(home), "steps": 12}  # each evaluation has a checkpoint
    refused = site.http.post("/api/v1/jobs", json={**body, "evaluate_every": 0})
    assert refused.status_code == 422 and "evaluate_every" in refused.text
    made = site.http.post("/api/v1/jobs", json={**body, "evaluate_every": 3, "keep_checkpoints": 3})
    assert made.status_code == 201, made.text
    (home / "job.yaml").write_text("workload: line.py:Keeps\nsteps: 12\nevaluate_every: 3\n")
    assert main(["submit", str(home / "job.yaml"), "--set", "keep_checkpoints=3", "--set", f"working_dir={home}"]) == 0
    for job in (client.job(made.json()["id"]), client.job(capsys.readouterr().out.strip())):
        done(job)
        assert evaluated(job) == [3, 6, 9, 12]
        kept = {path.split("/")[1] for path in job.files()}
        assert kept == {"best", "step-00000006", "step-00000009", "step-00000012"}
