"""`rayps.train` from one call to a result: arguments, progress, resume, and what it refuses."""

import io
import os
import re
import signal
import threading
import time

import pyarrow as pa
import pytest
import torch
from folders import FOLDERS
from rayps_client.errors import CheckpointError, ConfigError, DataError, NoResources, RaypsError, WorkloadError
from small_work import Small, distance, kinds, plain, rows, train
from torch import nn

import rayps
from rayps import AllReduce, ParameterServer
from rayps.cluster.local import LocalCluster
from rayps.cluster.ray_cluster import RayCluster
from rayps.runtime.driver.driver import Driver
from rayps.runtime.driver.workload_job import WorkloadJob
from rayps.runtime.records.display import Display
from rayps.runtime.records.journal import Journal
from rayps.strategies.job import JobSpec


def test_a_result_has_everything():
    result = train(Small(), "all_reduce", workers=2, epochs=2)
    assert set(result.metrics) == {"loss", "error"}
    assert isinstance(result.history, pa.Table)
    assert {"round", "epoch", "loss", "samples", "staleness", "evaluation_error"} <= set(result.history.column_names)
    assert kinds(result)[0] == "phase"
    assert kinds(result)[-1] == "finished"
    assert result.checkpoint is None
    model = result.model()
    x, y = rows(36)
    with torch.no_grad():
        assert (model(x) - y).abs().mean().item() == pytest.approx(result.metrics["error"], abs=1e-12)
    assert "Small" not in repr(result)


def test_without_epochs_and_steps_it_is_one_epoch():
    assert train(Small(), workers=2).history.num_rows == 6


def test_a_workload_by_name(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        f"import sys; sys.path[:0] = {FOLDERS!r}\nfrom small_work import Small\nclass Mine(Small): pass\n"
    )
    monkeypatch.chdir(tmp_path)
    assert train("mine.py:Mine", workers=1).history.num_rows == 12


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_more_workers_than_rows(workers):
    result = train(Small(n=3, batch=2), "parameter_server", workers=workers, epochs=2)
    assert distance(result.model(), plain(Small(n=3, batch=2), workers, epochs=2)[0]) < 1e-12


def test_a_batch_larger_than_the_data():
    result = train(Small(n=5, batch=1000), workers=2, epochs=3)
    assert result.history.column("samples").to_pylist() == [5, 5, 5]


class NoLabels(Small):
    """An autoencoder: the rows are their own labels."""

    def model(self):
        return torch.nn.Linear(5, 5).double()

    def data(self):
        return rayps.data.tensors(rows(10)[0], batch_size=2)

    def loss(self, model, batch):
        assert batch.y is None
        return ((model(batch.x) - batch.x) ** 2).mean()

    def evaluate(self, model, batch):
        return {}


def test_data_without_labels():
    assert set(train(NoLabels(), workers=2).metrics) == {"loss"}


class Pairs(torch.utils.data.Dataset):
    def __init__(self):
        self.x, self.y = rows(20)

    def __len__(self):
        return 20

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class FromDataset(Small):
    def data(self):
        return rayps.data.dataset(Pairs(), batch_size=3)


def test_a_torch_dataset():
    result = train(FromDataset(), workers=3, epochs=2)
    assert sum(result.history.column("samples").to_pylist()) == 40


class Dropped(Small):
    def model(self):
        return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 1)).double()


@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server", "1*all_reduce > parameter_server"])
def test_the_model_of_a_result_is_in_evaluation_mode(strategy):
    work = Dropped(n=24)
    result = train(work, strategy=strategy, workers=2, epochs=2)
    model = result.model()
    assert not any(module.training for module in model.modules())
    assert torch.equal(model(work.data().x), model(work.data().x))
    assert work.model().training


class Needs(Small):
    """A class that cannot be made without an argument."""

    def __init__(self, rows):
        super().__init__(n=rows)


def raises(error, words, workload=None, **options):
    threads = threading.active_count()
    with pytest.raises(error) as caught:
        train(workload if workload is not None else Small(), options.pop("strategy", "all_reduce"), **options)
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3
    assert threading.active_count() <= threads + 20


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"strategy": "all_reduc"}, ConfigError, ["did you mean 'all_reduce'"]),
        ({"strategy": "parameter_server:shards=0"}, ConfigError, ["shards", "at least 1"]),
        ({"strategy": [(1, "all_reduce"), (1, "parameter_server")], "epochs": 5}, ConfigError, ["2 epochs", "5"]),
        ({"strategy": [(3, "all_reduce"), "parameter_server"], "epochs": 2}, ConfigError, ["3 epochs", "raise epochs"]),
        ({"workers": 0}, ConfigError, ["workers", "0"]),
        ({"workers": "2"}, ConfigError, ["workers", "'2'"]),
        ({"epochs": 0}, ConfigError, ["epochs", "0"]),
        ({"epochs": 1, "steps": 1}, ConfigError, ["only one of them"]),
        ({"steps": -1}, ConfigError, ["steps"]),
        ({"seed": "x"}, ConfigError, ["seed"]),
        ({"timeout": 0}, ConfigError, ["timeout"]),
        ({"max_failures": -1}, ConfigError, ["max_failures"]),
        ({"checkpoint_every": 0}, ConfigError, ["checkpoint_every"]),
        ({"resources": {"tpu": 1}}, ConfigError, ["tpu", "cpu, gpu or memory"]),
        ({"workers": 65}, NoResources, ["65", "64"]),
        ({"resources": {"gpu": 1}}, NoResources, ["GPU"]),
        ({"resume": True}, ConfigError, ["checkpoint=FOLDER"]),
        ({"resume": "/nowhere/step-00000001"}, CheckpointError, ["/nowhere"]),
        ({"resume": True, "checkpoint": "/nowhere"}, CheckpointError, ["/nowhere", "no complete checkpoint"]),
        ({"workload": "nowhere.py:X"}, WorkloadError, ["nowhere.py"]),
        ({"workload": "nowhere"}, ConfigError, ["'nowhere'"]),
        ({"workload": 3}, ConfigError, ["int", "rayps.Workload"]),
        ({"workload": Needs}, WorkloadError, ["Needs", "'rows'", "defaults"]),
        ({"workload": Small(n=0)}, DataError, ["no rows"]),
        ({"workload": Small(batch=0)}, WorkloadError, ["batch_size"]),
    ],
)
def test_bad_arguments(options, error, words):
    workload = options.pop("workload", None) if "workload" in options else None
    try:
        raises(error if error is not WorkloadError else RaypsError, words, workload, **options)
    finally:
        if workload is not None:
            options["workload"] = workload


def test_a_checkpoint_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    raises(CheckpointError, ["file", "cannot be written"], checkpoint=tmp_path / "file" / "folder")


def test_checkpoints_are_kept_and_told(tmp_path):
    result = train(Small(), ParameterServer(shards=2), workers=2, epochs=3, checkpoint=tmp_path)
    assert result.checkpoint == tmp_path / "step-00000018"
    assert result.checkpoint.is_dir()
    saved = [e["round"] for e in result.events if e["kind"] == "checkpoint"]
    assert saved[-1] == 18
    assert set(saved) <= {6, 12, 18}
    again = train(Small(), ParameterServer(), workers=2, epochs=3, checkpoint=tmp_path, resume=True)
    assert again.history.num_rows == 0  # there was nothing left to do
    assert distance(again.model(), result.model()) == 0
    assert again.metrics == pytest.approx(result.metrics, abs=1e-12)


def test_resume_from_a_path(tmp_path):
    first = train(Small(), workers=2, epochs=1, checkpoint=tmp_path / "a")
    second = train(Small(), workers=2, epochs=2, resume=first.checkpoint, checkpoint=tmp_path / "b")
    assert distance(second.model(), plain(Small(), 2, epochs=2)[0]) < 1e-12
    assert (tmp_path / "b").is_dir()


def test_the_users_random_numbers_stay_as_they_were():
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    Driver(WorkloadJob(Small(), JobSpec("x:Small", {"name": "parameter_server"}), Journal())).preflight()
    assert torch.equal(torch.randn(3), expected)


def test_progress_on_no_terminal_is_plain_lines(monkeypatch):
    monkeypatch.setattr("rayps.runtime.records.display.LINE_SECONDS", 0.0)
    stream = io.StringIO()
    display = Display(stream)
    display.event({"kind": "restarted", "message": "worker-1 died [red]"})
    display.event({"kind": "checkpoint", "message": "not shown"})
    progress = {
        "status": "RUNNING",
        "round": 5,
        "rounds": 20,
        "epoch": 0,
        "epochs": 2,
        "loss": 0.25,
        "samples_per_second": 1234.5,
        "eta_seconds": 7.0,
        "metrics": {"loss": 1, "accuracy": 0.5},
    }
    display.progress(progress)
    display.progress(progress | {"status": "STOPPED"})
    display.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "restarted: worker-1 died [red]"
    assert lines[1] == (
        "epoch 1/2  round 5/20  batch loss 0.2500  evaluation: loss 1.0000 accuracy 0.5000  1,234 samples/s  7 s left"
    )
    assert lines[2].startswith("stopped  round 5/20") and "left" not in lines[2]
    assert len(lines) == 3


def test_progress_goes_to_stderr(capsys):
    train(Small(pause=0.01), workers=2, progress=True)
    found = capsys.readouterr()
    assert found.out == ""
    assert "phase: training with all_reduce until round 6" in found.err


def test_it_learns_under_every_strategy():
    class Line(Small):
        """Its labels can be learnt to the last digit."""

        def model(self):
            return torch.nn.Linear(5, 1).double()

        def data(self):
            x, _ = rows(120)
            return rayps.data.tensors(x, x.sum(dim=1, keepdim=True), batch_size=5)

    for strategy in (AllReduce(), ParameterServer(), ParameterServer(staleness=3), ParameterServer(staleness=None)):
        assert train(Line(), strategy, workers=4, epochs=12).metrics["loss"] < 1e-3, strategy


def test_the_given_cluster_is_left_open():
    cluster = LocalCluster()
    train(Small(), cluster=cluster, workers=2)
    assert cluster._handles == {}
    assert cluster.spawn("rayps.cluster.local:LocalCluster").call("total").result(60)["cpu"] == 64
    cluster.close()


# ------------------------------------------------------------------------------------------ Ctrl-C


class Presses:
    """Ctrl-C, once the run has come so far; given as `progress`."""

    def __init__(self, at_round, times=1):
        self.at_round, self.times = at_round, times

    def __call__(self, progress):
        if self.times and progress["status"] in ("RUNNING", "STOPPING") and progress.get("round", 0) >= self.at_round:
            self.times -= 1
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server:shards=2", "parameter_server:staleness=none"])
def test_ctrl_c_saves_a_checkpoint_and_says_how_to_go_on(tmp_path, strategy):
    work = Small(n=3000, pause=0.004)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as caught:
        train(work, strategy, workers=2, epochs=1, checkpoint=tmp_path, progress=Presses(20))
    assert signal.getsignal(signal.SIGINT) is before
    saved = [path for path in tmp_path.iterdir() if path.name.startswith("step-")]
    assert str(saved[0]) in str(caught.value)
    assert "--resume" in str(caught.value)
    assert 20 <= int(saved[0].name[5:]) < 500  # not of the epoch's end
    assert len(str(caught.value).splitlines()) <= 3
    again = train(work, strategy, workers=2, epochs=1, checkpoint=tmp_path, resume=True)
    if "none" not in strategy:
        assert distance(again.model(), plain(work, 2, epochs=1)[0]) < 1e-12


def test_ctrl_c_without_a_folder_says_that_nothing_was_kept():
    with pytest.raises(KeyboardInterrupt, match=r"nothing was kept\n.*--checkpoint DIR"):
        train(Small(n=600, pause=0.004), workers=2, epochs=3, progress=Presses(20))


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    losses = []

    class Stuck(Small):
        def loss(self, model, batch):
            losses.append(1)
            time.sleep(0.5)
            return super().loss(model, batch)

    with pytest.raises(KeyboardInterrupt):
        train(Stuck(n=600), workers=2, epochs=3, checkpoint=tmp_path, progress=Presses(0, times=2))
    assert len(losses) < 300  # of 3 epochs on 600 rows, 3 in a batch and fewer
    assert not list(tmp_path.glob("step-*"))


def test_a_result_is_short_to_look_at(tmp_path):
    result = train(Small(), workers=2, epochs=1, checkpoint=tmp_path)
    assert re.fullmatch(
        rf"Result\(loss=\d.*, error=\S+, 6 rounds, {len(result.events)} events, checkpoint='\S+'\)", repr(result)
    )
    assert len(repr(result)) < 300


def test_a_resumed_run_that_is_over_says_so(tmp_path):
    train(Small(), workers=2, steps=6, checkpoint=tmp_path)
    result = train(Small(), workers=2, steps=4, checkpoint=tmp_path, resume=True)
    told = [event["message"] for event in result.events if event["kind"] == "warning"]
    assert ["round 6" in text and "round 4" in text and "no training is left" in text for text in told] == [True]
    assert result.metrics["error"] > 0


def test_more_workers_than_a_machine_holds_are_refused_before_any_ray(monkeypatch):
    monkeypatch.setattr(RayCluster, "local", lambda *a: pytest.fail("a Ray was started"))
    with pytest.raises(ConfigError, match=r"1000 CPUs \(1000 workers x 1\)") as caught:
        rayps.train(Small(), workers=1000, progress=False)
    assert caught.value.data["code"] == "too_large" and len(str(caught.value).splitlines()) <= 3
