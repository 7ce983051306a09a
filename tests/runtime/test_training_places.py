"""Runs whose checkpoints are behind a URL: the results of a local folder, through faults of the place too."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import fsspec
import pytest
import torch
from federated_work import Fed
from folders import FOLDERS
from rayps_client.errors import CheckpointError, PlaceError
from s3_site import empty_bucket, s3_site, wait_for
from safetensors.torch import load_file
from small_work import Small, distance, kinds, plain, train
from typer.testing import CliRunner

import rayps
from rayps import ParameterServer, Scaffold
from rayps.cli.main import app
from rayps.cluster.local import LocalCluster
from rayps.runtime.results import snapshots
from rayps.tensors.checkpoints import checkpoint
from rayps.tensors.checkpoints.checkpoint_place import CheckpointPlace, ObjectStore, unfinished

ROOT = Path(__file__).resolve().parents[2]
RUN = "memory://runs/one"
S3 = "s3://bucket/run"


@pytest.fixture(autouse=True)
def empty_memory():
    fsspec.filesystem("memory").store.clear()
    yield
    fsspec.filesystem("memory").store.clear()


@pytest.fixture(scope="module")
def server():
    with s3_site() as site:
        yield site


@pytest.fixture
def site(server, monkeypatch):
    with empty_bucket(server, monkeypatch) as found:
        yield found


def test_a_run_resumes_from_a_place_as_from_a_folder(tmp_path):
    expected = plain(Small(), 2, epochs=3)[0]
    first = train(Small(), workers=2, epochs=1, checkpoint=RUN)
    assert first.checkpoint == f"{RUN}/step-00000006" == checkpoint.newest(RUN)
    again = train(Small(), workers=2, epochs=2, checkpoint=f"{RUN}/", resume=True)
    assert again.checkpoint == f"{RUN}/step-00000012"
    with pytest.raises(CheckpointError, match=f"{RUN} holds the checkpoints of an earlier run .step-00000012"):
        train(Small(), workers=2, epochs=1, checkpoint=RUN)
    third = train(Small(), workers=2, epochs=3, checkpoint=tmp_path, resume=again.checkpoint)
    assert distance(third.model(), expected) < 1e-12
    with pytest.raises(CheckpointError, match="several checkpoints: give one of them"):
        train(Small(), workers=2, epochs=3, resume=RUN)
    with pytest.raises(CheckpointError, match="no complete checkpoint in memory://elsewhere"):
        train(Small(), workers=2, epochs=3, checkpoint="memory://elsewhere", resume=True)


def test_a_run_starts_from_a_place_and_its_checkpoint_is_exported(tmp_path):
    first = train(Small(), ParameterServer(), workers=2, epochs=1, checkpoint=RUN)
    warm = train(Small(), workers=1, steps=1, start_from=first.checkpoint)
    assert "started_from" in kinds(warm)
    state = checkpoint.load(first.checkpoint)
    for where in (RUN, first.checkpoint):
        out = tmp_path / where.rpartition("/")[2]
        ran = CliRunner().invoke(app, ["export", where, str(out)])
        assert ran.exit_code == 0, ran.output
        assert torch.equal(load_file(out / "model.safetensors")["0.weight"], state.tensors["model/0.weight"])


def test_the_best_checkpoint_is_kept_in_the_place():
    best = [rayps.BestCheckpoint("loss")]
    first = train(Small(), workers=2, epochs=2, checkpoint=RUN, callbacks=best)
    assert first.best is not None and first.best.startswith(f"{RUN}/best/step-")
    checkpoint.load(first.best)
    # a run that resumes in another place takes the best along
    other = train(
        Small(),
        workers=2,
        epochs=3,
        checkpoint="memory://runs/two",
        resume=first.checkpoint,
        callbacks=[rayps.BestCheckpoint("loss")],
    )
    assert other.best.startswith("memory://runs/two/best/step-")
    checkpoint.load(other.best)


def test_the_states_of_federated_clients_are_in_the_place():
    work, strategy = Fed(), Scaffold(fraction=0.5)
    whole = train(work, strategy, workers=2, epochs=4)
    train(work, strategy, workers=1, epochs=2, checkpoint=RUN)
    resumed = train(work, strategy, workers=2, epochs=4, checkpoint=RUN, resume=True)
    assert torch.equal(resumed.snapshot.params, whole.snapshot.params)


def test_a_loop_of_your_own_saves_to_a_place():
    def train_fn(upto: int = 0):
        begun = rayps.restore() or {"n": 0}
        for n in range(begun["n"], upto):
            rayps.save({"n": n + 1, "x": torch.full((3,), float(n))})
        return begun["n"]

    options = {"workers": 2, "progress": False, "checkpoint": RUN}
    assert rayps.run(train_fn, cluster=LocalCluster(), params={"upto": 3}, **options) == [0, 0]
    assert rayps.run(train_fn, cluster=LocalCluster(), params={"upto": 5}, resume=True, **options) == [3, 3]
    with pytest.raises(CheckpointError, match="earlier run"):
        rayps.run(train_fn, cluster=LocalCluster(), **options)


def test_a_place_that_takes_nothing_is_known_before_any_training(site):
    with pytest.raises(PlaceError, match="bucket does not exist\nthe bucket or folder is not there: create it"):
        train(Small(), workers=2, epochs=1, checkpoint="s3://nowhere/run")


class Cuts(rayps.Callback):
    """Cuts all connections to the place after the first checkpoint, until the run has reported one that failed."""

    def __init__(self, proxy):
        self.proxy, self.reported = proxy, threading.Event()

    def on_checkpoint(self, run, path):
        if not self.reported.is_set():
            self.proxy.cut_up = 0
            threading.Thread(target=self.watch, args=(run,), daemon=True).start()

    def watch(self, run):
        wait_for(lambda: any("was not written" in event["message"] for event in run.events), "the warning")
        self.reported.set()
        self.proxy.pass_on()


def test_a_run_goes_on_while_a_place_does_not_answer_and_saves_again(site):
    cuts = Cuts(site.proxy)
    result = train(Small(pause=0.02), workers=2, epochs=8, checkpoint=S3, callbacks=[cuts])
    assert cuts.reported.is_set()
    (warning,) = [event for event in result.events if "was not written" in event["message"]]
    assert warning["kind"] == "warning" and f"in {S3}" in warning["message"]
    assert result.checkpoint == checkpoint.newest(S3) == f"{S3}/step-00000048"
    assert distance(result.model(), plain(Small(), 2, epochs=8)[0]) < 1e-12


def test_a_last_state_that_a_place_does_not_take_is_an_error(site, monkeypatch):
    monkeypatch.setattr(snapshots, "LAST_SECONDS", 5.0)

    class AtTheEnd(rayps.Callback):
        def on_round(self, run, point):
            site.proxy.cut_up = 0

    with pytest.raises(PlaceError, match=f"in {S3}/step-00000006"):
        train(Small(), workers=2, epochs=1, checkpoint=S3, callbacks=[AtTheEnd()])
    site.proxy.pass_on()
    assert checkpoint.newest(S3) is None


KILLED = f"""
import sys
sys.path[:0] = {FOLDERS!r}
from rayps.core import failpoint
from small_work import Small, train
from torch import nn


class Large(Small):
    def model(self):
        return nn.Sequential(nn.Linear(5, 700_000), nn.Linear(700_000, 1))

    def loss(self, model, batch):
        return ((model(batch.x.float()) - batch.y.float()) ** 2).mean()


failpoint.arm("checkpoint: a block written=3")
train(Large(), workers=1, steps=1, checkpoint={S3!r})
"""


def test_the_uploads_of_a_killed_run_are_in_the_events_of_the_next(site):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", KILLED], env=env, timeout=300).returncode == -signal.SIGKILL
    assert len(unfinished(CheckpointPlace.of(S3))) == 1 and ObjectStore(S3).steps() == []
    result = train(Small(), workers=1, epochs=1, checkpoint=S3)
    (event,) = [event for event in result.events if event["kind"] == "unfinished_uploads"]
    assert event["aborted"] == 1 and event["found"][0].startswith(f"{S3}/step-")  # moto dates uploads to 2010
    assert unfinished(CheckpointPlace.of(S3)) == []
    assert result.checkpoint == checkpoint.newest(S3)
