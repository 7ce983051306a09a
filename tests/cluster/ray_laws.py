"""Laws of strategies on real Ray workers: see test_ray_matrix.py."""

import pytest
import torch
from small_work import Small, distance, plain, rows
from small_work import train as on_threads
from test_exactly_once import ROWS, Tally
from test_hogwild import Rows, serial
from test_replica_laws import Deep
from torch import nn

import rayps
from rayps.strategies.catalogue import parse

EXACT = 1e-12


WORKERS = 2


def train(cluster, work, strategy, **options):
    """A job of two Ray workers."""
    return rayps.train(
        work, strategy=strategy, cluster=cluster, progress=False, **{"workers": WORKERS, "timeout": 300.0, **options}
    )


def column(result, name):
    return result.history.column(name).to_pylist()


def same(result, other, tolerance=0.0):
    """The same loss, samples and evaluation in each round, the same parameters and buffers."""
    evaluations = [name for name in other.history.schema.names if name.startswith("evaluation_")]
    assert evaluations
    for name in ("loss", "samples", *evaluations):
        expected = pytest.approx(column(other, name), abs=tolerance, rel=0, nan_ok=True)  # private jobs have no loss
        assert column(result, name) == expected, name
    assert result.metrics == pytest.approx(other.metrics, abs=tolerance, rel=0)
    state, expected = result.model().state_dict(), other.model().state_dict()
    assert state.keys() == expected.keys()
    for name, value in state.items():
        assert (value - expected[name]).abs().max() <= tolerance, name


def phases(strategies, epochs):
    return [(epochs, strategy) for strategy in strategies]


class Line(Small):
    """y = x a for an `a` that the model can learn: the loss of the optimum is 0."""

    def model(self):
        return nn.Linear(5, 1, bias=False).double()

    def data(self):
        x, _ = rows(self.n)
        a = torch.tensor([[1.0], [-2.0], [0.5], [3.0], [-1.0]], dtype=torch.float64)
        return rayps.data.tensors(x, x @ a, batch_size=self.batch)


class Evaluated(Small):
    """Has public rows to evaluate on, as private jobs need."""

    def evaluation_data(self):
        return rayps.data.tensors(*rows(10), batch_size=5)


class Law:
    """What is to hold of strategies, given as texts."""

    def __init__(self, *strategies, **options):
        self.strategies, self.options = strategies, options

    def __repr__(self):
        names = dict.fromkeys(text.partition(":")[0] for text in self.strategies)
        return f"{type(self).__name__.lower()}-{'+'.join(names)}"


class Union(Law):
    """In step: one process on the union of the workers' batches; `replicas` of several workers count as one worker."""

    def holds(self, cluster):
        work, replicas = Deep(n=22, batch=4, optimizer="adam"), self.options.get("replicas", WORKERS)
        result = train(cluster, work, phases(self.strategies, 1), epochs=None, seed=5)
        law, losses, evaluations = plain(work, replicas, epochs=len(self.strategies), seed=5)
        assert column(result, "loss") == pytest.approx(losses, abs=EXACT)
        assert result.metrics["loss"] == pytest.approx(evaluations[-1], abs=EXACT)
        assert distance(result.model(), law) < EXACT


class Twin(Law):
    """The same job on threads. Alone, each strategy gives another model than that of `unlike`, so that it decides."""

    def __init__(self, unlike, work=None):
        super().__init__(*unlike)
        self.unlike, self.work = unlike, work or Small(n=22, batch=3, optimizer="momentum")

    def holds(self, cluster):
        job = {"epochs": None, "seed": 3}
        result = train(cluster, self.work, phases(self.strategies, 2), **job)
        by_client = all(parse(text)[0].strategy.rows.by_client for text in self.strategies)
        expected = on_threads(self.work, phases(self.strategies, 2), workers=WORKERS, **job)
        same(result, expected, 0.0 if by_client else EXACT)
        alone = {
            text: on_threads(self.work, text, workers=WORKERS, epochs=2, seed=3).model()
            for text in {**self.unlike, **dict.fromkeys(self.unlike.values())}
        }
        for text, other in self.unlike.items():
            assert distance(alone[text], alone[other]) > 1e-6, text


class Pushes(Law):
    """Out of step on servers: in each phase of an epoch, each row of the data adds 1 to its own slots."""

    def holds(self, cluster):
        result = train(cluster, Tally(self.options["scale"]), phases(self.strategies, 1), epochs=None)
        epochs = len(self.strategies)
        assert torch.equal(result.snapshot.params, torch.full((2 * ROWS,), float(epochs), dtype=torch.float64))
        assert sum(column(result, "samples")) == epochs * ROWS


class Learns(Law):
    """Out of step on servers: in each phase of four epochs a line is learnt further; there is no noise in the data."""

    def holds(self, cluster):
        work = Line(n=64, batch=4)
        result = train(cluster, work, phases(self.strategies, 4), epochs=None)
        losses = [loss for loss in column(result, "evaluation_loss") if loss is not None]
        assert len(losses) == 4 * len(self.strategies)
        before = work.data().y.square().mean().item()
        for text, after in zip(self.strategies, losses[3::4], strict=True):
            assert after < 0.05 * before, text
            before = after


class NeverMeet(Law):
    """Hogwild: rows that never meet are stepped in shared memory as one process would, to the bit."""

    def holds(self, cluster):
        (strategy,) = self.strategies
        work = Rows(n=30)
        result = train(cluster, work, strategy)
        assert distance(result.model(), serial(work, WORKERS, 1)) == 0
