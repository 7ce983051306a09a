"""A table's segment against a slow twin: a dict of rows, stepped one at a time by torch's own optimizers."""

import numpy as np
import pytest
import torch

from rayps.core.strategy.staleness_bound import MovedBound
from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables.initial_rows import draw_initial
from rayps.ps.tables.table_segment import TableSegment
from rayps.ps.tables.wire_format import bucket, decode_rows, encode_empty_push, encode_pull, encode_push
from rayps.strategies.parameter_server import ParameterServer

OPTIMIZERS = {
    "sgd": ({"name": "sgd", "lr": 0.1}, lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (
        {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    ),
    "adagrad": ({"name": "adagrad", "lr": 0.1}, lambda p: torch.optim.Adagrad(p, lr=0.1)),
    "adam": ({"name": "adam", "lr": 0.01}, lambda p: torch.optim.SparseAdam(p, lr=0.01)),
}
UNIVERSE = 60


class Twin:
    """A row is a parameter with an optimizer of its own; nothing is fast, nothing is shared."""

    def __init__(self, table, make, staleness, workers):
        self.table, self.make, self.workers, self.staleness = table, make, workers, staleness
        self.rows, self.counts, self.done = {}, {}, [0] * workers
        self.inbox, self.closed = {}, 0

    def row(self, key):
        if key not in self.rows:
            value = torch.nn.Parameter(torch.from_numpy(draw_initial(self.table, np.array([key]))))
            self.rows[key] = value, self.make([value])
            self.counts[key] = 0
        return self.rows[key]

    def value(self, key):
        return (
            self.rows[key][0].detach()[0]
            if key in self.rows
            else torch.from_numpy(draw_initial(self.table, np.array([key])))[0]
        )

    def step(self, key, grad, count, decays=1.0):
        value, optimizer = self.row(key)
        for group in optimizer.param_groups:
            if "weight_decay" in group:
                group["weight_decay"] = optimizer.defaults["weight_decay"] * decays
        grad = grad.clone().view(1, -1)
        sparse = isinstance(optimizer, torch.optim.SparseAdam)
        if sparse:
            grad = torch.sparse_coo_tensor([[0]], grad, value.shape, check_invariants=False).coalesce()
        value.grad = grad
        optimizer.step()
        self.counts[key] += count

    def push(self, rank, step, weight, batch):
        """`batch`: id -> (count, gradient)."""
        if self.staleness != 0:
            if step < self.done[rank]:
                return
            self.done[rank] += 1
            for key, (count, grad) in batch.items() if weight else ():
                self.step(key, grad * (1 / self.workers), count, 1 / self.workers)
            return
        self.inbox.setdefault(step, {}).setdefault(rank, (weight, batch))
        while len(self.inbox.get(self.closed, {})) == self.workers:
            pushes = [each for _, each in sorted(self.inbox.pop(self.closed).items())]
            total = sum(weight for weight, _ in pushes)
            for key in sorted({key for _, batch in pushes for key in batch}) if total else ():
                mean = None
                for weight, batch in pushes:
                    part = batch.get(key, (0, torch.zeros(self.table.dim)))[1] * (weight / total)
                    mean = part if mean is None else mean + part
                self.step(key, mean, sum(batch.get(key, (0, 0))[0] for _, batch in pushes))
            self.closed += 1


def batch_of(chance, table, index):
    ids = chance.integers(0, UNIVERSE, chance.integers(0, 40))
    ids = ids[bucket(ids, table.segments) == index]
    unique, counts = np.unique(ids, return_counts=True)
    grads = torch.from_numpy(chance.standard_normal((len(unique), table.dim)).astype(np.float32))
    return unique, counts, grads


def same(segment, twin):
    everyone = np.arange(UNIVERSE)
    rows = decode_rows(segment.read(encode_pull(everyone)), UNIVERSE, segment.table)
    for key in range(UNIVERSE):
        assert torch.equal(rows[key], twin.value(key)), (key, rows[key], twin.value(key))
    stored = segment.store.export()
    assert stored.ids.tolist() == sorted(twin.rows)
    assert stored.life[:, 0].tolist() == [twin.counts[key] for key in stored.ids.tolist()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("staleness", [None, 2, 0])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_segment_is_its_twin_and_so_is_its_copy(optimizer, staleness, seed):
    """To the bit: random batches, retries, a copy that begins in the midst and takes over, a branch."""
    chance = np.random.default_rng(seed)
    knobs, make = OPTIMIZERS[optimizer]
    table, workers = SparseTable("t", 5, 2, seed=seed, optimizer=knobs), 3
    strategy = ParameterServer(staleness=staleness)
    segment, twin = TableSegment(table, 1, strategy, workers), Twin(table, make, staleness, workers)
    copy, at, said = None, [0] * workers, {}
    for turn in range(120):
        open_ranks = [rank for rank in range(workers) if at[rank] - min(at) <= 3]
        rank = int(chance.choice(open_ranks))
        step = at[rank] if chance.random() < 0.9 or not at[rank] else int(chance.integers(0, at[rank]))
        if (rank, step) not in said:
            said[rank, step] = batch_of(chance, table, 1), float(chance.integers(0, 4))
            at[rank] += 1
        (ids, counts, grads), weight = said[rank, step]
        piece = encode_push(ids, grads, counts)
        if chance.random() < 0.5:
            segment.check(rank, step, weight, piece)
        changes = segment.push(rank, step, weight, piece)
        piece[:] = 255  # its memory is the link's
        twin.push(rank, step, weight, {int(k): (int(c), g) for k, c, g in zip(ids, counts, grads, strict=True)})
        for change in changes:
            if copy is not None:
                copy.replay(memoryview(change))
        if turn == 40:
            copy = TableSegment(table, 1, strategy, workers)
            copy.load(segment.dump())
        if turn % 30 == 0:
            same(segment, twin)
        if copy is not None and turn in (41, 80, 119):
            assert copy.dump() == segment.dump()
            assert (copy.seq, copy.version) == (segment.seq, segment.version)
    same(segment, twin)
    segment = copy  # promoted: workers say again what is not durable
    for (rank, step), ((ids, counts, grads), weight) in sorted(said.items(), key=lambda item: item[0][::-1]):
        if step >= segment.durable(rank):
            segment.push(rank, step, weight, encode_push(ids, grads, counts))
    same(segment, twin)
    branch, before = segment.branch(), segment.dump()
    assert branch.marks() == dict.fromkeys(range(workers), 0)
    branch.push(0, 0, 1.0, encode_push(np.array([3]), torch.ones(1, 5)))
    for rank in (1, 2):
        branch.push(rank, 0, 1.0, encode_empty_push(table))
    assert segment.dump() == before
    assert not torch.equal(decode_rows(branch.read(encode_pull(np.array([3]))), 1, table)[0], twin.value(3))


def test_a_segment_of_a_table_keeps_the_bound_when_a_state_is_loaded():
    segment = TableSegment(SparseTable("t", 2, segments=1), 0, ParameterServer(staleness="auto"), 2)
    segment.move_bound(MovedBound(0, (5, 5)))
    segment.load(TableSegment(SparseTable("t", 2, segments=1), 0, ParameterServer(staleness=None), 2, [6, 5]).dump())
    assert [segment.may_pull(rank) for rank in range(2)] == [False, True]
