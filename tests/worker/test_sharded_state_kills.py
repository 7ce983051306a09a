"""Processes that die while a checkpoint in parts is written: it is whole or absent, and the next run continues.

The processes are real, and die by SIGKILL: at named places (see rayps.core.failpoint), and some time after a file of a
part was created. The law is a run that no one kills. The memory of the driver's process is measured here too.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import forkserver

import psutil
import pytest
import torch
from folders import FOLDERS, TESTS
from process_cluster import ProcessCluster, start_process
from rayps_client.errors import RaypsError
from small_work import Small, distance, kinds, train
from torch import nn

import rayps
from rayps.cluster.local import until
from rayps.tensors.checkpoints import checkpoint
from rayps.tensors.checkpoints.checkpoint_place import LocalFolder, name_of

EPOCHS, STEPS = 4, 2  # epochs of a run, each with a checkpoint; rounds of an epoch
PAUSE = 0.25  # seconds of a step: a checkpoint is written before the next one is due, which is left out otherwise
SHARD = "all_reduce:shard=gradients"
UNDISTURBED = []


class Large(Small):
    """Parts of 29 MB: the write of one takes several blocks."""

    width = 1100

    def model(self):
        w = self.width
        hidden = [nn.Linear(5, w), nn.Tanh(), nn.Linear(w, w), nn.Tanh(), nn.Linear(w, w), nn.Tanh()]
        return nn.Sequential(*hidden, nn.Linear(w, 1)).double()

    def loss(self, model, batch):
        if model.training:
            time.sleep(PAUSE)
        return super().loss(model, batch)

    def optimizer(self, params):
        return torch.optim.Adam(params, lr=1e-3)


class Sized(Large):
    """Parameters of `width` squared times 8 bytes, in float32."""

    def __init__(self, width):
        super().__init__(n=12, batch=3)
        self.width = width

    def model(self):
        return super().model().float()

    def data(self):
        return rayps.data.tensors(torch.ones(12, 5), torch.ones(12, 1), batch_size=3)


def run(folder, arm=None, **options):
    """Train as the driver of processes; the run ends at the first death."""
    cluster = ProcessCluster(arm)
    options = {"workers": 2, "epochs": EPOCHS, "keep_checkpoints": EPOCHS + 1, "max_failures": 0} | options
    try:
        return train(Large(n=12), SHARD, cluster, checkpoint=folder, **options)
    finally:
        cluster.close()


def complete(folder):
    """The rounds of the checkpoints that a start would use; each is whole, and its files have their hashes."""
    rounds = sorted(LocalFolder(folder).steps())
    for each in rounds:
        checkpoint.verify(folder / name_of(each))
    return rounds


def continues(folder, law_folder):
    """The next start uses the newest complete checkpoint, and ends with the bits of the law; it leaves no drafts."""
    if not UNDISTURBED:
        UNDISTURBED.append(run(law_folder).model())
    rounds = complete(folder)
    found = run(folder, resume=bool(rounds))  # without a checkpoint, resume=True is refused
    resumed = [event["round"] for event in found.events if event["kind"] == "resumed"]
    assert resumed == rounds[-1:]
    assert "restarted" not in kinds(found)
    assert distance(found.model(), UNDISTURBED[0]) == 0
    assert complete(folder)[-1] == EPOCHS * STEPS
    assert not list(folder.glob("*.tmp-*"))


# ------------------------------------------------------------------------- a worker

PLACES = [
    "checkpoint: part not begun=2",
    "checkpoint: a block written=1",
    "checkpoint: a block written=30",
    "checkpoint: part written, not reported=1",
    "checkpoint: part written, not reported=3",
]


@pytest.mark.chaos
@pytest.mark.parametrize("place", PLACES)
def test_a_worker_killed_at_a_place_of_its_write_leaves_the_checkpoints_before(tmp_path, place):
    folder = tmp_path / "run"
    with pytest.raises(RaypsError):
        run(folder, {("WorkerActor", PLACES.index(place) % 2): place})
    assert EPOCHS * STEPS not in complete(folder)
    assert not list(folder.glob("*.tmp-*"))  # the driver lives, and removes what was begun
    continues(folder, tmp_path / "law")


# below, `delay` is the seconds from the creation of a part's file until the kill


@pytest.mark.chaos
@pytest.mark.parametrize("delay", [0.0, 0.02])
def test_a_worker_killed_some_time_after_it_began_to_write_leaves_whole_checkpoints(tmp_path, delay):
    folder, workers = tmp_path / "run", []

    def look(progress):
        workers[:] = [worker["pid"] for worker in progress.get("workers", ()) if worker.get("pid")]

    kill = Kill(folder, delay, lambda: workers[1:2])
    try:
        run(folder, progress=look)
    except RaypsError:
        pass  # the delay may be longer than the run
    finally:
        kill.join()
    continues(folder, tmp_path / "law")


class Kill(threading.Thread):
    """Kills a process by SIGKILL, `delay` seconds after a part of a checkpoint was begun, which is not the first."""

    def __init__(self, folder, delay, victims):
        super().__init__(daemon=True)
        self._folder, self._delay, self._victims = folder, delay, victims
        self._over = threading.Event()
        self.start()

    def run(self):
        while not self._over.wait(0.0005):
            victims = self._victims()
            begun = {path.parent.name for path in self._folder.glob("step-*.tmp-*/part-*")}
            if victims and any(name.partition(".")[0] != name_of(STEPS) for name in begun):
                time.sleep(self._delay)
                for pid in victims:
                    os.kill(pid, signal.SIGKILL)
                return

    def join(self, timeout=None):
        self._over.set()
        super().join(timeout)


# ------------------------------------------------------------------------- the driver

DRIVER = {  # places of the second checkpoint, and the number of checkpoints that are complete then
    "checkpoint: part not begun=2": 1,  # the parts of the workers are written, and not the driver's
    "checkpoint: part written, not reported=2": 1,
    "checkpoint: manifest written, draft not renamed=2": 1,
    "checkpoint: draft renamed, not synced=2": 2,
    "checkpoint: complete, old ones not removed=2": 2,
}


def driven(folder, place=""):
    """Start a driver that trains in a folder: its process, and the processes that were there before."""
    forkserver.ensure_running()
    before = set(psutil.Process().children(recursive=True))
    return start_process(run, folder, failpoints=place), before


def ended(process, before):
    """The exit code, after the processes of its cluster have ended too."""
    try:
        process.join(300)
        assert until(lambda: not running(before), 60)
    finally:
        process.kill()
    return process.exitcode


def running(before):
    """The processes that were started after these, and have not ended."""
    found = set(psutil.Process().children(recursive=True)) - before
    return [each for each in found if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def driver(code, folder):
    """Start a process that runs `code` with this module's names and `folder`."""
    head = "from pathlib import Path; from test_sharded_state_kills import *"
    text = f"{head}; folder = Path({str(folder)!r}); {code}"
    path = os.pathsep.join([*FOLDERS, str(TESTS.parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.Popen([sys.executable, "-c", text], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.chaos
@pytest.mark.parametrize("place", DRIVER)
def test_a_driver_killed_between_the_parts_and_the_manifest_leaves_the_checkpoints_before(tmp_path, place):
    assert ended(*driven(tmp_path / "run", place)) == -signal.SIGKILL
    assert len(complete(tmp_path / "run")) == DRIVER[place]
    continues(tmp_path / "run", tmp_path / "law")


@pytest.mark.chaos
@pytest.mark.parametrize("delay", [0.005, 0.1])
def test_a_driver_killed_some_time_after_a_part_was_begun_leaves_whole_checkpoints(tmp_path, delay):
    process, before = driven(tmp_path / "run")
    kill = Kill(tmp_path / "run", delay, lambda: [process.pid])
    try:
        ended(process, before)
    finally:
        kill.join()
    continues(tmp_path / "run", tmp_path / "law")


# ------------------------------------------------------------------------- the driver's memory

MEMORY = """
from benchmarks.runs.sharded_script import read_own_peak
cluster = ProcessCluster()
train(Sized({width}), SHARD, cluster, workers=2, epochs=1, checkpoint=folder)
cluster.close()
print(read_own_peak())
"""


def test_the_drivers_peak_of_memory_does_not_grow_with_the_model(tmp_path):
    peaks = []
    for width in (700, 5000):  # 4 MB and 200 MB of parameters, three times as much in a checkpoint
        code = f"exec({MEMORY.format(width=width)!r})"
        found, _ = (process := driver(code, tmp_path / str(width))).communicate(timeout=300)
        assert process.returncode == 0
        peaks.append(int(found.splitlines()[-1]))
    assert peaks[1] - peaks[0] < 20e6
