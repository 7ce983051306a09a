"""Elastic jobs on real Ray actors: one job whose workers join, are killed, are preempted, and leave."""

import os
import signal

import pytest
import torch
from small_work import Small, vector

import rayps

pytestmark = pytest.mark.ray


class Harm(rayps.Callback):
    """Harms workers, one after the other: each when the change before has been reported."""

    def __init__(self, *harms):
        self.left, self.seen, self.workers = list(harms), 1, []

    def on_round(self, run, point):
        changes = [event for event in run.events if event["kind"] == "resized"]
        if self.left and len(changes) >= self.seen and len(self.workers) >= 2:
            rank, number = self.left.pop(0)
            self.seen = len(changes) + 1
            os.kill(self.workers[rank]["pid"], number)

    def progress(self, facts):
        self.workers = [line for line in facts["workers"] if line["pid"] and line["status"] == "running"]


@pytest.mark.parametrize(
    ("strategy", "harms"),
    [("all_reduce", [(1, signal.SIGKILL), (0, signal.SIGTERM)]), ("parameter_server:shards=2", [(1, signal.SIGKILL)])],
    ids=["ring", "servers"],
)
def test_workers_join_die_and_are_preempted(ray_cluster, strategy, harms):
    """The state stays in memory: with one global batch the result is that of one worker, within rounding."""
    epochs = 6 if len(harms) == 2 else 4
    work = Small(n=400, batch=4, optimizer="adam", pause=0.03)
    harm = Harm(*harms)
    result = rayps.train(
        work,
        strategy=strategy,
        workers=(1, 3),
        epochs=epochs,
        seed=5,
        global_batch=12,
        elastic={"cooldown": 0, "gain": 0},
        cluster=ray_cluster,
        progress=harm.progress,
        callbacks=[harm],
        checkpoint_every=10,
    )
    assert not harm.left
    changes = [event for event in result.events if event["kind"] == "resized"]
    assert changes[0]["from"] == 1
    assert any(change["lost"] for change in changes)
    assert any(event["kind"] == "notice" for event in result.events) == (len(harms) == 2)
    assert result.snapshot.round == 34 * epochs
    alone = rayps.train(
        Small(n=400, batch=4, optimizer="adam"),
        workers=1,
        global_batch=12,
        epochs=epochs,
        seed=5,
        cluster=rayps.cluster.local.LocalCluster(),
        progress=False,
    )
    torch.testing.assert_close(vector(result.model()), vector(alone.model()), rtol=1e-9, atol=1e-11)
