"""A worker that dies inside a replica is replaced and its step is replayed: to the bit what would have been.

With processes the deaths are real: a layer or the optimizer of the workload below lets its process die by SIGKILL at a
named visit. With threads they come at any moment.
"""

import importlib
import os
import signal

import pytest
import torch
from process_cluster import ProcessCluster
from small_work import Small, kinds, train, vector
from torch import nn

from rayps import AllReduce, Pipeline, TensorParallel

pytestmark = pytest.mark.chaos


class _Places(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        importlib.import_module("rayps.core.failpoint").passing("forward")
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        importlib.import_module("rayps.core.failpoint").passing("backward")
        return grad


class Places(nn.Module):
    """Where a process may die in a pass."""

    def forward(self, x):
        return _Places.apply(x)


class Deadly(torch.optim.Adam):
    """Where a process may die in a step: before it, and with half of it done."""

    def step(self, closure=None):
        failpoint = importlib.import_module("rayps.core.failpoint")
        failpoint.passing("step")
        whole, groups = self.param_groups, [dict(group) for group in self.param_groups]
        self.param_groups = [{**group, "params": group["params"][:1]} for group in groups]
        super().step()
        failpoint.passing("half a step")
        self.param_groups = [{**group, "params": group["params"][1:]} for group in groups]
        super().step()
        self.param_groups = whole


class Deep(Small):
    """Four equal blocks that a pipeline cuts between; buffers that count, random numbers, and places to die at."""

    def __init__(self, n=60, batch=6, dropout=0.2, **more):
        super().__init__(n, batch, **more)
        self.dropout = dropout

    def model(self):
        def block(a, b):
            return nn.Sequential(Places(), nn.Linear(a, b), nn.BatchNorm1d(b), nn.Tanh(), nn.Dropout(self.dropout))

        return nn.Sequential(block(5, 8), block(8, 8), block(8, 8), nn.Sequential(Places(), nn.Linear(8, 1))).double()

    def optimizer(self, params):
        return Deadly(params, lr=0.01)


class Wide(Small):
    """A pair of layers that tensor ranks share, twice."""

    def model(self):
        return nn.Sequential(
            Places(),
            nn.Linear(5, 12),
            nn.Tanh(),
            nn.Linear(12, 6),
            nn.Tanh(),
            Places(),
            nn.Linear(6, 12),
            nn.Tanh(),
            nn.Linear(12, 1),
        ).double()

    def optimizer(self, params):
        return Deadly(params, lr=0.01)


PIPE = Pipeline(stages=2, micro_batches=3)
LAYOUTS = {  # name: replica, workers, workload
    "pipeline": (PIPE, 2, Deep),
    "pipelines": (PIPE, 4, Deep),
    "three stages": (Pipeline(stages=3, micro_batches=2, schedule="1f1b"), 3, Deep),
    "tensor": (TensorParallel(size=2), 2, Wide),
    "tensors": (TensorParallel(size=2), 4, Wide),
}
UNDISTURBED = {}


def undisturbed(layout, **options):
    """The same run without a death: model, losses, evaluations. In processes: threads share their random numbers."""
    key = layout, tuple(sorted(options.items()))
    if key not in UNDISTURBED:
        replica, workers, work = LAYOUTS[layout]
        UNDISTURBED[key] = run(work(), ProcessCluster(), replica, workers, **options)
    return UNDISTURBED[key]


def run(work, cluster, replica, workers, **options):
    try:
        return train(work, AllReduce(replica=replica), cluster, workers=workers, **({"epochs": 2} | options))
    finally:
        cluster.close()


def mended(result):
    return [event for event in result.events if event["kind"] == "mended"]


def equal(result, law):
    """To the bit: parameters, buffers and every loss."""
    assert torch.equal(vector(result.model()), vector(law.model()))
    for (name, a), (_, b) in zip(result.model().named_buffers(), law.model().named_buffers(), strict=True):
        assert torch.equal(a, b), name
    for column in ("round", "loss", "samples", "evaluation_loss"):
        assert result.history.column(column).to_pylist() == law.history.column(column).to_pylist(), column


def speaks(event, lost, *, twin):
    """The event says who died, from whom the state came, how long it took and what it costs to be able to."""
    assert event["lost"] == lost
    assert set(event["sources"]) == set(lost)
    assert event["twins"] == (lost if twin else [])
    assert 0 < event["seconds"] < 60
    assert f"{event['seconds']:.2f} s after the failure was detected" in event["message"]
    assert f"continued from round {event['round']}" in event["message"]
    for name, holder in event["sources"].items():
        kind = "its counterpart" if twin else "its backup on"
        assert f"{name} has the state of {kind} {holder}" in event["message"]


# ------------------------------------------------------------------------- real deaths at named places

MOMENTS = [  # the n-th visit is in the third step or so
    ("pipeline", 0, "forward=17"),  # between two micro-batches' forward passes
    ("pipeline", 0, "backward=14"),
    ("pipeline", 0, "state slots: half a commit=4"),
    ("pipeline", 1, "backward=18"),  # its last of a step: before the data ring
    ("pipeline", 1, "step=3"),  # after the data ring
    ("pipeline", 1, "half a step=4"),
    ("pipeline", 1, "state slots: after a commit=4"),
    ("pipelines", 1, "forward=17"),
    ("pipelines", 1, "step=3"),
    ("pipelines", 2, "state slots: half a commit=4"),
]


@pytest.mark.parametrize(("layout", "victim", "moment"), MOMENTS)
def test_a_stage_that_is_killed_is_replaced_and_the_step_is_replayed(layout, victim, moment):
    replica, workers, work = LAYOUTS[layout]
    cluster = ProcessCluster({("WorkerActor", victim): moment})
    result = run(work(), cluster, replica, workers)
    [event] = mended(result)
    speaks(event, [f"worker-{victim}"], twin=workers > replica.stages)
    assert "restarted" not in kinds(result)
    assert event["round"] in range(2, 6)
    assert len([handle for handle in cluster.handles if "WorkerActor" in handle.name]) == workers + 1
    equal(result, undisturbed(layout))


@pytest.mark.parametrize(
    ("layout", "victim", "moment"),
    [
        ("tensor", 0, "forward=5"),
        ("tensor", 1, "half a step=4"),
        ("tensors", 2, "forward=5"),
        ("tensors", 2, "half a step=4"),
    ],
)
def test_a_tensor_rank_that_is_killed_is_replaced_and_the_step_is_replayed(layout, victim, moment):
    replica, workers, work = LAYOUTS[layout]
    result = run(work(), ProcessCluster({("WorkerActor", victim): moment}), replica, workers)
    [event] = mended(result)
    speaks(event, [f"worker-{victim}"], twin=workers > replica.tensor)
    equal(result, undisturbed(layout))


def test_two_deaths_in_a_row_and_one_while_it_is_mended():
    # the 4th process is the first replacement, which dies in its first step, and the 5th in its third
    arm = {("WorkerActor", 1): "backward=7", ("WorkerActor", 3): "backward=1", ("WorkerActor", 4): "step=3"}
    replica, workers, work = LAYOUTS["three stages"]
    result = run(work(), ProcessCluster(arm), replica, workers)
    deaths = [event for event in result.events if event["kind"] == "mending"]
    assert [event["lost"] for event in deaths] == [["worker-1"]] * 3
    assert [event["lost"] for event in mended(result)] == [["worker-1"]] * len(mended(result))
    assert 1 <= len(mended(result)) <= 3  # deaths that come while another is mended are mended with it
    equal(result, undisturbed("three stages"))


def test_a_worker_and_its_mirror_gone_together_mean_the_snapshot_again():
    cluster, killed = ProcessCluster(), []

    def look(progress):
        if progress.get("round", 0) > 6 and not killed:
            killed.extend(worker["pid"] for worker in progress["workers"])
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    replica, workers, _ = LAYOUTS["pipeline"]
    result = run(Deep(pause=0.05), cluster, replica, workers, progress=look)
    assert len(killed) == 2
    assert kinds(result).count("restarted") == 1
    assert not mended(result)
    assert any("no living worker has the lost state" in event["message"] for event in result.events)
    equal(result, undisturbed("pipeline"))
