"""`dry_run=True`: a few rounds of everything, a report, and nothing left behind."""

import threading

import pytest
from federated_work import Fed
from small_work import SEEN, Paced, Small, kinds, train

from rayps.core.errors import ConfigError, WorkloadError


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [("all_reduce", 2), ("parameter_server:shards=2", 2), ("local_sgd:period=2", 2), ("pipeline:stages=2", 2)],
)
def test_a_few_rounds_of_everything(tmp_path, monkeypatch, strategy, workers):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "temporary").mkdir()
    SEEN.pop("dry", None)
    threads = threading.active_count()
    result = train(
        Paced(n=360, batch=4, tag="dry"),
        strategy,
        workers=workers,
        epochs=100,
        dry_run=True,
        checkpoint=tmp_path / "saved",
    )
    assert "dry_run" in kinds(result)
    report = result.events[-1]
    [phase] = report["phases"]
    replicas = 1 if "pipeline" in strategy else workers
    assert phase["epoch"] == 90 // replicas
    assert phase["rounds"] == 100 * 90 // replicas
    assert phase["seconds"] > 0
    assert phase["checkpoint"] > 100
    assert phase["memory"]["all"] > 0
    assert f"the run has {phase['rounds']} rounds in 100 epochs" in report["message"]
    assert "nothing was kept" in report["message"]
    assert result.checkpoint is None
    if "pipeline" not in strategy:  # a pipeline calls loss for each micro-batch
        assert 0 <= SEEN["dry"] - workers * (4 + 2 * 3) <= 2  # the formula of memory calls loss once or twice
    assert sorted(path.name for path in tmp_path.iterdir()) == ["temporary"]
    left = [path.name for path in (tmp_path / "temporary").iterdir()]
    assert [name for name in left if not name.startswith("torchinductor")] == []  # a cache that torch makes
    assert threading.active_count() <= threads + 1


def test_each_phase_is_tried():
    strategies = [(1, "all_reduce"), (2, "parameter_server:shards=2")]
    result = train(Small(n=72), strategies, workers=2, dry_run=True)
    first, second = result.events[-1]["phases"]
    assert (first["strategy"], first["rounds"], first["epoch"]) == ("all_reduce", 12, 12)
    assert (second["strategy"], second["rounds"], second["epoch"]) == ("parameter_server", 24, 12)


def test_a_federated_run():
    result = train(Fed(), "fedavg", workers=2, steps=50, dry_run=True)
    assert result.events[-1]["phases"][0]["rounds"] == 50


class BreaksAtEnd(Small):
    def evaluate(self, model, batch):
        raise KeyError("accuracy")


class BreaksSchedule(Small):
    def schedule(self, optimizer):
        return lambda step: 1.0 if step < 2 else 1 / 0


@pytest.mark.parametrize(("work", "text"), [(BreaksAtEnd, "evaluate"), (BreaksSchedule, "schedule")])
def test_a_mistake_is_found_and_leaves_nothing(tmp_path, monkeypatch, work, text):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(WorkloadError, match=text):
        train(work(n=3600), workers=2, epochs=100, dry_run=True)
    assert list(tmp_path.iterdir()) == []


def test_it_starts_at_round_0(tmp_path):
    with pytest.raises(ConfigError, match="dry_run and resume"):
        train(Small(), dry_run=True, resume=tmp_path / "step-00000001")
