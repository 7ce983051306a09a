"""Stages as threads with real links, and the law they are held to: one process on the whole batch."""

import contextlib
import csv
import io
import threading
from dataclasses import dataclass

import torch
from test_ring import errors, every, form
from torch import nn

from rayps.core.partition import cut_slices
from rayps.core.pipeline.schedule import make_table
from rayps.parallel.pipeline import cut, skip
from rayps.parallel.pipeline.engine import PipelineEngine

SCHEDULES = ["gpipe", "1f1b", "zero_bubble", "interleaved"]


def to_csv(made):
    """A table as torch writes it: a line for each stage."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([[str(action) for action in row] for row in made])
    return out.getvalue()


def deep(width=5, layers=12, seed=0, dtype=torch.float64):
    """Linear and Tanh in turn, and some that learn nothing, are in place, or have a bias only."""
    torch.manual_seed(seed)
    found = []
    for i in range(layers):
        found.append(
            [
                nn.Linear(width, width),
                nn.Tanh(),
                nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True)),
                nn.LayerNorm(width),
            ][i % 4]
        )
    return nn.Sequential(*found).to(dtype)


def mse(output, y):
    return (output - y).pow(2).mean()


def rows(n, width=5, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, width, generator=g, dtype=torch.float64), torch.randn(
        n, width, generator=g, dtype=torch.float64
    )


@dataclass
class Ran:
    """What a stage did: the loss where it is known, the gradients it left by name, and its engine."""

    loss: float
    grads: dict
    engine: PipelineEngine


class Site:
    """The stages of one pipeline, each with a model of its own of which it uses its chunks."""

    def __init__(self, rings, make, schedule, m, v=1, boundaries=None, seed=0, data=0, loss=mse):
        self.rings, self.m, self.loss = rings, m, loss
        p = len(rings)
        self.models = [make() for _ in rings]
        found = cut.layers(self.models[0])
        self.at = cut.shares([1.0] * len(found), p * v) if boundaries is None else boundaries
        routes = skip.routes([layer.module for layer in found], self.at)
        self.table = make_table(schedule, p, m, v)
        self.engines = [
            PipelineEngine(
                cut.layers(model), self.at, self.table[ring.rank], ring if p > 1 else None, routes, seed=seed, data=data
            )
            for model, ring in zip(self.models, rings, strict=True)
        ]

    def micro(self, *whole):
        n = len(whole[0])
        return [[each[at] for each in whole] for at in cut_slices(n, self.m)], [
            (at.stop - at.start) / n for at in cut_slices(n, self.m)
        ]

    def one(self, ring, x, y, step=0):
        """One stage's part in a step."""
        parts, weights = self.micro(x, y)
        engine, model = self.engines[ring.rank], self.models[ring.rank]
        model.zero_grad()
        loss = engine.backward(step, weights, lambda i: ((parts[i][0],), {}), lambda i, o: self.loss(o, parts[i][1]))
        return Ran(loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, engine)

    def step(self, x, y, step=0):
        return every(self.rings, lambda ring: self.one(ring, x, y, step))

    def fails(self, x, y):
        return errors(self.rings, lambda ring: self.one(ring, x, y))

    def evaluate(self, x, y):
        parts, weights = self.micro(x, y)
        got = {}
        every(
            self.rings,
            lambda ring: self.engines[ring.rank].evaluate(weights, lambda i: ((parts[i][0],), {}), got.__setitem__),
        )
        return got


def together(ran):
    """All stages' gradients by name; a parameter has one stage."""
    found = {}
    for one in ran:
        assert not found.keys() & one.grads.keys()
        found |= one.grads
    return found


def alone(model, x, y, loss=mse):
    """The law: one process, the whole batch."""
    model.zero_grad()
    value = loss(model(x), y)
    value.backward()
    return value.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def apart(got, want):
    """The relative distance of two gradients."""
    assert got.keys() == want.keys()
    square = sum((got[n] - want[n]).pow(2).sum() for n in want)
    return (square / sum(w.pow(2).sum() for w in want.values())).sqrt().item()


@contextlib.contextmanager
def stages(p, **options):
    rings = form(p, **options)
    try:
        yield rings
    finally:
        for ring in rings:
            ring.close()


one_at_a_time = threading.RLock()  # threads of one process share torch's generator; processes do not
