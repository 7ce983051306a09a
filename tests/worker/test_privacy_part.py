"""A privacy that a test defines runs under each exchange of gradients, by the one line that names it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_work import Small, distance, rows, train

import rayps
from rayps.core.refusals.table import TABLE, rows_by_feature
from rayps.data.single_rows import row_of
from rayps.privacy.noise import KeyedNoise

ROWS, BATCH, STEPS = 36, 12, 3
EXCHANGES = {
    "ring": ("all_reduce", {}),
    "scatter of steps": ("all_reduce", {"shard": "optimizer"}),
    "scatter of gradients": ("all_reduce", {"shard": "gradients"}),
    "servers": ("parameter_server", {"shards": 2}),
}
WAYS = {"all_reduce": rayps.AllReduce, "parameter_server": rayps.ParameterServer}


class Public(Small):
    """The small regression, evaluated on rows that are public."""

    def evaluation_data(self):
        return rayps.data.tensors(*rows(20, seed=9), batch_size=20)


class Doubled:
    """Twice the sum of the gradients of the rows, without noise. It ends after `STEPS` steps."""

    batch = BATCH
    calls: list[str]

    def __init__(self, w):
        self._w = w

    def begin(self, stopped):
        assert not stopped()
        self.calls.append("begin")

    def seed_step(self, step):
        self.calls.append(f"seed {step}")

    def part(self, batch):
        total = torch.zeros(self._w.layout.size)
        for stack in batch.parts:
            for row in range(stack.size):
                self._w.flat.drop_grad()
                self._w.workload.loss(self._w.part.module, row_of(stack, row)).backward()
                total += torch.cat([p.grad.reshape(-1) for p in self._w.flat.parameters])
        self._w.flat.drop_grad()
        return 2 * total

    def end_reason(self, step):
        return "the test has seen enough" if step >= STEPS else None

    def close(self):
        self.calls.append("close")


def naive(work, seed):
    """The law: twice the mean gradient over the drawn rows, by one process."""
    torch.manual_seed(seed)
    model, data, source = work.model(), work.data(), KeyedNoise.of_seed(seed)
    optimizer = work.optimizer(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for row in np.flatnonzero(source.uniform(work.n, step) < BATCH / work.n):
            (2 * ((model(data.x[row : row + 1]) - data.y[row : row + 1]) ** 2).mean() / BATCH).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_privacy_of_ones_own_runs_under_each_exchange(monkeypatch, exchange, workers):
    name, options = EXCHANGES[exchange]
    monkeypatch.setattr("rayps.worker.privacy.ROW_PRIVACY", f"{__name__}:Doubled")
    monkeypatch.setattr(Doubled, "calls", [], raising=False)
    if "shard" in options:  # DP-SGD refuses it; the parts do not
        rest = tuple(row for row in TABLE if {row.one, row.other} != {"privacy", "shard"})
        monkeypatch.setattr("rayps.core.refusals.table.ROWS", rows_by_feature(rest))
        monkeypatch.setattr("rayps.runtime.checks.row_privacy.SYNC_GRADIENTS", "sharded_state")
    work = Public(n=ROWS, batch=BATCH // workers, optimizer="adam")
    privacy = rayps.dp(noise_multiplier=3.0, clip=0.4, delta=1e-3, noise="seeded")
    result = train(work, WAYS[name](privacy=privacy, **options), workers=workers, steps=STEPS + 2, seed=3)
    assert distance(result.model(), naive(work, 3)) < 1e-5
    assert sorted(Doubled.calls) == sorted(workers * ["begin", "close", *(f"seed {step}" for step in range(STEPS))])
