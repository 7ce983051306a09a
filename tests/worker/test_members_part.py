"""Members that a test defines run under each exchange of gradients, by the one line that names them."""

from __future__ import annotations

import pytest
import torch
from small_work import Small, distance, train

import rayps
from rayps.core.refusals.table import TABLE, rows_by_feature
from rayps.core.rows.backup_portions import Portions
from rayps.core.strategy.strategy_families import SERVER_STEPS, SHARDED_STATE, SYNC_GRADIENTS
from rayps.worker.loops.loop_of_family import MEMBERS
from rayps.worker.loops.server_steps import ServerWorker
from rayps.worker.loops.sharded_state import ShardedWorker
from rayps.worker.loops.sync_gradients import SyncWorker

ROWS, BATCH, EPOCHS, BACKUP = 40, 3, 2, 2
EXCHANGES = {  # the strategy, its options, and its line in the table of members
    "ring": (rayps.AllReduce, {}, SYNC_GRADIENTS),
    "scatter of steps": (rayps.AllReduce, {"shard": "optimizer"}, SHARDED_STATE),
    "scatter of gradients": (rayps.AllReduce, {"shard": "gradients"}, SHARDED_STATE),
    "servers": (rayps.ParameterServer, {"shards": 2}, SERVER_STEPS),
}
WORKERS = {"ring": SyncWorker, "scatter of steps": ShardedWorker, "scatter of gradients": ShardedWorker}


def choose(step, portions):
    """The even ranks first, then the odd ones: in each second step the other way round."""
    ranks = sorted(portions.holders, key=lambda rank: ((rank + step) % 2, rank))
    return tuple(sorted(ranks[: portions.needed]))


class Chosen:
    """The members are chosen by their ranks, and no worker is late."""

    calls: list[str]

    def __init__(self, w, peers):
        self._w = w

    def begin(self):
        self.calls.append("begin")

    def run_round(self, call):
        call()

    def exchange(self, batch, send):
        step, walk = self._w.position - 1, self._w.batches.blocks.walk
        members = choose(step, walk.now)
        walk.advance(members)
        self.calls.append(f"step {step}")
        return send(batch if self._w.rank in members else None)

    def end_round(self):
        self.calls.append("end")

    def meet(self):
        pass

    def save(self, shared):
        self.calls.append("save")

    def restore(self, snapshot, shared):
        self._w.batches.blocks.begin_at(self._w.position, None)
        self.calls.append("restore")

    def close(self):
        self.calls.append("close")


def naive(work, workers, seed):
    """The law: in each step the mean gradient over the members' rows, by one process. Returns the model and the steps.

    The counts say how often each row was applied.
    """
    torch.manual_seed(seed)
    model, data, shares, applied = work.model(), work.data(), workers - BACKUP, []
    optimizer, steps = work.optimizer(list(model.parameters())), data.steps(shares)
    for epoch in range(EPOCHS):
        read = [list(data.batches(rank=rank, size=shares, seed=seed, epoch=epoch)) for rank in range(shares)]
        portions = Portions.at(0, shares=shares, workers=workers, steps=steps)
        for index in range(steps):
            members = choose(epoch * steps + index, portions)
            places = [portions.place(portions.held[rank]) for rank in members]
            taken = [read[share][number] for share, number in places]
            x, y = (torch.cat([getattr(batch, name) for batch in taken if batch.size]) for name in ("x", "y"))
            applied += [(epoch, *row) for row in x.tolist()]
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            portions = portions.after(members)
    assert len(applied) == len(set(applied)) == EPOCHS * work.n  # each row once in each epoch
    return model, EPOCHS * steps


def run(monkeypatch, exchange, *, workers=5, seed=3):
    """Train under an exchange with the members of this test. Return the distance from the law, and the rounds."""
    kind, options, family = EXCHANGES[exchange]
    monkeypatch.setitem(MEMBERS, family, f"{__name__}:Chosen")
    monkeypatch.setattr(Chosen, "calls", [], raising=False)
    if "shard" in options:  # backup workers refuse it; the parts do not
        pairs = ({"backup", "shard"}, {"backup", "a loop of its own"})
        rest = tuple(row for row in TABLE if {row.one, row.other} not in pairs)
        monkeypatch.setattr("rayps.core.refusals.table.ROWS", rows_by_feature(rest))
    work = Small(n=ROWS, batch=BATCH, optimizer="adam")
    result = train(work, kind(backup=BACKUP, **options), workers=workers, epochs=EPOCHS, seed=seed)
    model, steps = naive(work, workers, seed)
    assert result.history.num_rows == steps
    return distance(result.model(), model), steps


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_members_of_ones_own_run_under_each_exchange(monkeypatch, exchange):
    off, steps = run(monkeypatch, exchange)
    assert off < 1e-12
    calls = {name: Chosen.calls.count(name) for name in ("begin", "restore", "end", "close")}
    assert calls == {"begin": 5, "restore": 5, "end": 5 * steps, "close": 5} and "save" in Chosen.calls
    assert [Chosen.calls.count(f"step {step}") for step in range(steps)] == [5] * steps


@pytest.mark.parametrize("exchange", WORKERS)
def test_an_exchange_that_ignores_its_members_is_seen(monkeypatch, exchange):
    """The defect of a new exchange: it sends this worker's gradient, whether or not it counts."""

    def ignores(self, batch):
        self.batches.blocks.walk.advance(choose(self.position - 1, self.batches.blocks.walk.now))
        return self._average_gradients(batch)

    monkeypatch.setattr(WORKERS[exchange], "mean_grad", ignores)
    assert run(monkeypatch, exchange)[0] > 1e-3


def test_servers_that_ignore_the_members_are_seen(monkeypatch):
    """A round closes with the pushes that come first. A worker that is no member pushes too."""
    send = ServerWorker._send

    def ignores(self, batch):
        send(self, self.kept if batch is None else batch)

    def pushes(self, batch):
        self.kept = batch
        self.members.exchange(batch, self._send)

    monkeypatch.setattr(ServerWorker, "_send", ignores)
    monkeypatch.setattr(ServerWorker, "push_grad", pushes)
    with pytest.raises((rayps.RaypsError, AssertionError)):
        assert run(monkeypatch, "servers")[0] < 1e-12
