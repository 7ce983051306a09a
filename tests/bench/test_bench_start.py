"""The benchmark of starts: what it records, in which order, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rayps_client.errors import ConfigError

import rayps
from benchmarks.runs import start
from benchmarks.runs.first_steps import STEPS, FirstSteps, read_first_times
from benchmarks.runs.ray_train_start import make_steps, train_by_ray_train
from benchmarks.runs.start import bench_start, warm_processes
from rayps.cluster.local import LocalCluster


def test_the_last_worker_decides_and_all_must_have_recorded(tmp_path):
    assert read_first_times(tmp_path, 2) is None
    (tmp_path / "1").write_text("10.0\n12.0\n")
    assert read_first_times(tmp_path, 2) is None
    (tmp_path / "2").write_text("11.0\n")
    assert read_first_times(tmp_path, 2) is None
    (tmp_path / "2").write_text("11.0\n11.5\n")
    assert read_first_times(tmp_path, 2) == (11.0, 12.0)


def test_a_run_records_two_losses_of_training(tmp_path):
    work, cluster = FirstSteps(), LocalCluster()
    work.folder = str(tmp_path)
    try:
        rayps.train(work, workers=1, steps=STEPS, cluster=cluster, progress=False)
    finally:
        cluster.close()
    loss, step = read_first_times(tmp_path, 1)
    assert loss < step and len(next(tmp_path.iterdir()).read_text().splitlines()) == 2


@pytest.mark.ray
def test_a_cold_start_is_told_in_its_parts():
    found = []
    ray, cold = bench_start(["ray", "cold"], workers=1, repeats=1, report=found.append)
    assert found == [ray, cold] and ray.first_loss is None
    assert ray.first_step == pytest.approx(sum(ray.parts.values()))
    names = ["imports", "import ray", "preflight", "ray", "state", "generation", "first step", "processes"]
    assert sorted(cold.parts) == sorted(names) and all(seconds >= 0 for seconds in cold.parts.values())
    assert cold.first_step == pytest.approx(cold.first_loss + cold.parts["first step"]) == cold.slowest
    # "generation" ends after the worker has begun, so that it may contain the first loss
    assert sum(cold.parts[name] for name in names[:5]) + cold.parts["processes"] < cold.first_step


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ConfigError, match="no scene 'hot'; use some of ray, cold"):
        bench_start(["hot"])
    with pytest.raises(ConfigError, match="workers is 0: give at least 1"):
        bench_start(["cold"], workers=0)
    with pytest.raises(ConfigError, match="repeats is 0"):
        bench_start(["cold"], repeats=0)
    assert warm_processes("of no service") == 0


def test_ray_train_makes_the_same_first_steps(tmp_path):
    ranks = []

    def prepare(model):
        ranks.append(model)
        return model

    make_steps(str(tmp_path), 1, 2, prepare)
    loss, step = read_first_times(tmp_path, 1)
    assert loss < step and len(ranks) == 1


def test_ray_train_is_skipped_with_the_reason_where_it_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.train", None)
    found = train_by_ray_train({"workers": 1, "folder": str(tmp_path)})
    assert "pip install 'rayps[bench]'" in found["skipped"]

    def script(command, **options):
        Path(command[-1]).write_text(json.dumps(found))
        return process(["true"])

    process = subprocess.Popen
    monkeypatch.setattr(start.subprocess, "Popen", script)
    monkeypatch.setattr(start, "_CALM_SECONDS", 0.0)
    [row] = bench_start(["ray_train"], workers=1, repeats=2)
    assert row.first_step is None and row.shown == f"skipped: {found['skipped']}"
