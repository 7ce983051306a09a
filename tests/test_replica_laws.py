"""The law of replicas of several workers: whatever the layout, the result is that of one process on the union batch."""

import pytest
from small_work import Small, distance, plain, train
from torch import nn

from rayps import AllReduce, ParameterServer
from rayps.strategies.pipeline import Pipeline
from rayps.strategies.tensor_parallel import TensorParallel

EXACT = 1e-12


class Deep(Small):
    """Six layers, of which three learn."""

    def __init__(self, n=36, batch=4, **options):
        super().__init__(n=n, batch=batch, **options)

    def model(self):
        return nn.Sequential(
            nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 6), nn.Linear(6, 1)
        ).double()


def losses(result):
    return result.history.column("loss").to_pylist()


def ident(strategy):
    replica = strategy.replica
    inner = f"x{replica.tensor}" if isinstance(replica, Pipeline) and replica.stage else ""
    return f"{strategy.name}-{replica.name}{replica.stages if replica.stages > 1 else replica.tensor}{inner}"


REPLICAS = [
    Pipeline(stages=2), Pipeline(stages=3, micro_batches=3, schedule="gpipe"), TensorParallel(size=2),
    TensorParallel(size=3), Pipeline(stages=2, micro_batches=2, stage=TensorParallel(size=2)),
]
STRATEGIES = [
    *(AllReduce(replica=each) for each in REPLICAS),
    *(ParameterServer(shards=5, replica=each) for each in (REPLICAS[0], REPLICAS[2], REPLICAS[4])),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=ident)
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_any_composition_equals_one_process_on_the_union_batch(strategy, replicas):
    work = Deep(n=38, optimizer="adam")
    workers = replicas * strategy.grid(strategy.replica.stages * strategy.replica.tensor).columns
    result = train(work, strategy, workers=workers, epochs=2, seed=5)
    model, expected, evaluations = plain(work, replicas, epochs=2, seed=5)
    assert distance(result.model(), model) < EXACT
    assert losses(result) == pytest.approx(expected, abs=EXACT)
    assert result.metrics["loss"] == pytest.approx(evaluations[-1], abs=EXACT)
    assert sum(result.history.column("samples").to_pylist()) == 2 * 38
