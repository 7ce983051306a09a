"""A stage is killed on real Ray actors: the run goes on, to the bit what it would have been."""

import os
import signal

import pytest
from small_work import Small, distance, kinds
from torch import nn

import rayps
from rayps import AllReduce, Pipeline

pytestmark = [pytest.mark.ray, pytest.mark.chaos]
STRATEGY = AllReduce(replica=Pipeline(stages=2, micro_batches=3))


class Deep(Small):
    """Random numbers in both stages."""

    def model(self):
        def block(a, b):
            return nn.Sequential(nn.Linear(a, b), nn.Tanh(), nn.Dropout(0.2))

        return nn.Sequential(block(5, 8), block(8, 8), block(8, 8), nn.Linear(8, 1)).double()


def run(cluster, victim=None):
    killed = []

    def look(progress):
        if victim is not None and progress.get("round", 0) > 4 and not killed:
            killed.append(progress["workers"][victim]["pid"])
            os.kill(killed[0], signal.SIGKILL)

    work = Deep(n=240, batch=6, optimizer="adam", pause=0.01)
    result = rayps.train(work, strategy=STRATEGY, workers=2, epochs=2, cluster=cluster, progress=look)
    assert len(killed) == (victim is not None)
    return result, killed


def test_a_stage_is_killed_in_the_middle_of_a_step(ray_cluster):
    (law, _), (result, killed) = run(ray_cluster), run(ray_cluster, victim=1)
    [event] = [event for event in result.events if event["kind"] == "mended"]
    print(event["message"])
    assert event["lost"] == ["worker-1"]
    assert f"process {killed[0]}" in event["message"]
    assert event["sources"] == {"worker-1": "worker-0"}
    assert event["seconds"] > 0
    assert "restarted" not in kinds(result)
    assert distance(result.model(), law.model()) == 0.0
    for column in ("round", "loss", "samples"):
        assert result.history.column(column).to_pylist() == law.history.column(column).to_pylist(), column
