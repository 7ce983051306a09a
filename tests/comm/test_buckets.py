"""Gradients that leave in buckets while backward continues, against their law: one mean after backward."""

import covers
import pytest
import torch
from rayps_client.errors import ConfigError, PeerLost
from small_work import OPTIMIZERS, Small, distance, plain, train
from test_ring import errors, every, form
from torch import nn
from torch.utils.checkpoint import checkpoint

from rayps import AllReduce
from rayps.comm.ring.bucketed_mean import SentBuckets, SharedMemoryMean, bucket_mean
from rayps.strategies.catalogue import parse
from rayps.tensors.flat import FlatModel, Gradient, Layout
from rayps.worker.core import step_and_compare
from rayps.worker.exchange.buckets import Buckets, cut

GROUPS = [(1, "shm"), (2, "shm"), (3, "shm"), (4, "shm"), (2, "tcp"), (3, "tcp")]
SIZES = [0, 1e-6, 4e-4, None]  # one bucket; one a parameter; some; chosen
EXACT = 1e-12


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def rings(request):
    n, transport = request.param
    made = form(n, prefer=transport)
    yield made
    for ring in made:
        ring.close()


@pytest.fixture
def pair():
    made = form(2, timeout=60)
    yield made
    for ring in made:
        ring.close()


class Net(nn.Module):
    """A tied layer, one behind a switch, a number, a spare one."""

    def __init__(self):
        super().__init__()
        self.first, self.tied, self.switched, self.last = (nn.Linear(5, 5) for _ in range(4))
        self.tied.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.spare = nn.Linear(5, 3)

    def forward(self, x, switch=True, swap=False):
        a, b = (self.last, self.first) if swap else (self.first, self.last)
        x = torch.tanh(a(x)) * self.scale
        x = self.tied(x) if not switch else self.switched(self.tied(x))
        return b(x)


def net(dtype=torch.float32):
    generator = torch.Generator().manual_seed(11)
    model = Net().to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return model


def loss_of(model, rank, turn, *, switch=True, swap=False):
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * turn + rank)).to(model.scale.dtype)
    return (model(x, switch, swap) ** 2).mean()


def law(ring, rounds, dtype):
    """One `ring.mean` over the whole gradient after backward, for each round."""
    flat = FlatModel(net(dtype), ring.buffer)
    means = []
    for turn, (samples, options) in enumerate(rounds):
        flat.drop_grad()
        if samples:
            loss_of(flat.model, ring.rank, turn, **options).backward()
        flat.collect_grad()
        means.append(ring.mean(Gradient(flat.packed, samples), in_place=False).clone())
    return means


def bucketed(ring, rounds, dtype, bucket_mb):
    flat = FlatModel(net(dtype), ring.buffer)
    buckets = Buckets(flat, ring, bucket_mb)
    means = []
    for turn, (samples, options) in enumerate(rounds):
        buckets.begin(samples)
        if samples:
            loss_of(flat.model, ring.rank, turn, **options).backward()
        mean, unused = buckets.finish()
        means.append((mean.clone(), [flat.layout.entries[i].name for i in unused]))
    return means


def plans(ring):
    """Rounds as (samples, options) of this rank: ragged, empty on some ranks, other paths on some, other orders."""
    me = ring.rank
    yield 6, {}
    yield 6, {}
    yield 1 + me, {}
    yield 3 * (me != 1), {}  # rank 1 has no rows
    yield 6, {"switch": me != 0}  # rank 0 does not use the layer
    yield 6, {"switch": False}  # nobody does
    yield 6, {"swap": True}  # backward in another order, on all ranks
    yield 6, {"swap": me == 0}  # on one
    yield 2, {}


@covers.pairs
@pytest.mark.parametrize("held", [1, 7, 1 << 14])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bucket_mb", SIZES)
def test_buckets_equal_one_mean_after_backward(rings, bucket_mb, dtype, held, monkeypatch):
    monkeypatch.setattr("rayps.worker.exchange.buckets.HELD_ELEMENTS", held)
    rounds = [list(plans(ring)) for ring in rings]
    expected = every(rings, lambda ring: law(ring, rounds[ring.rank], dtype))
    found = every(rings, lambda ring: bucketed(ring, rounds[ring.rank], dtype, bucket_mb))
    same_bits = len(rings) == 2 or rings[0].choices["transport"] == "shm"
    for turn in range(len(rounds[0])):
        for rank in range(len(rings)):
            mean = found[rank][turn][0]
            assert torch.equal(mean, found[0][turn][0])
            if same_bits:
                assert torch.equal(mean, expected[rank][turn]), (turn, rank)
            else:  # the order of additions follows the cuts, or there is nothing to add
                tolerance = 4 * torch.finfo(dtype).eps
                assert torch.allclose(mean, expected[rank][turn], rtol=tolerance, atol=tolerance)
    spare = ["spare.weight", "spare.bias"]
    silent = ["switched.weight", "switched.bias"]
    nobody = [5] + [4] * (len(rings) == 1)  # alone, what rank 0 leaves out is left out
    assert [unused for _, unused in found[-1]] == [
        (silent if turn in nobody else []) + spare for turn in range(len(rounds[0]))
    ]


def test_a_bucket_is_added_before_backward_ends(pair):
    flats = [FlatModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), None) for _ in pair]
    for ring, memory in zip(pair, every(pair, lambda ring: ring.buffer(40)), strict=True):
        flats[ring.rank].packed = memory
    made = every(pair, lambda ring: bucket_mean(ring, flats[ring.rank].packed, [slice(20, 40), slice(0, 20)], 1))
    assert all(isinstance(each, SharedMemoryMean) for each in made)
    for rank, each in enumerate(made):
        flats[rank].packed.fill_(rank + 1.0)
        each.begin(1)
    made[0].submit(0)
    assert made[0]._open == [0, 1]  # rank 1 has not given it
    made[1].submit(0)
    assert made[1]._open == [1]  # it has its part already, nobody has finished
    made[0].submit(1)
    assert made[0]._open == [1]
    made[1].submit(1)
    for mean in every(pair, lambda ring: made[ring.rank].finish(torch.zeros(1, dtype=torch.uint8)).clone()):
        assert (mean == 1.5).all()


def test_between_hosts_buckets_leave_in_the_order_of_rank_0s_first_backward():
    rings = form(2, prefer="tcp")
    seen = []

    def work(ring):
        flat = FlatModel(net(), ring.buffer)
        buckets = Buckets(flat, ring, 1e-6)
        assert isinstance(buckets._pieces, SentBuckets)
        for turn in range(3):
            buckets.begin(1)
            loss_of(flat.model, ring.rank, turn, swap=ring.rank == 0).backward()
            before = len(buckets._pieces._under_way) - 1
            buckets.finish()
            seen.append((ring.rank, turn, before, list(buckets._pieces._order)))

    every(rings, work)
    [order] = {tuple(order) for _, _, _, order in seen}
    assert order != tuple(range(len(order)))  # `first` comes before `last` in rank 0's backward
    assert [before for rank, turn, before, _ in seen if turn == 0] == [0, 0]  # the first one teaches
    assert all(before > 0 for rank, turn, before, _ in seen if rank == 0 and turn)
    for ring in rings:
        ring.close()


@pytest.mark.parametrize("held", [1, 1 << 14])
@pytest.mark.parametrize("bucket_mb", SIZES)
def test_gradients_that_come_in_parts(rings, bucket_mb, held, monkeypatch):
    """Two backwards, re-entrant checkpoints and whole graphs: what comes late is added, what is expected is awaited."""

    monkeypatch.setattr("rayps.worker.exchange.buckets.HELD_ELEMENTS", held)

    def twice(model, x):
        model(x).sum().backward()
        return model(2 * x).sum()

    def again(model, x):
        return checkpoint(model.first, checkpoint(model.first, x, use_reentrant=True), use_reentrant=True).sum()

    def graph(model, x):
        loss = model(x).square().sum()
        grads = torch.autograd.grad(loss, [model.first.weight, model.scale], create_graph=True)
        return loss + sum(g.square().sum() for g in grads)

    ways = [again, twice, twice, graph, again, twice]

    def work(ring):
        ring_model, own = FlatModel(net(torch.float64), ring.buffer), net(torch.float64)
        buckets, own_flat = Buckets(ring_model, ring, bucket_mb), FlatModel(own)
        found = []
        for turn, way in enumerate(ways):
            x = torch.full((2, 5), 0.1 * turn + ring.rank, dtype=torch.float64, requires_grad=True)
            buckets.begin(1 + ring.rank)
            way(ring_model.model, x).backward()
            mean = buckets.finish()[0].clone()
            own_flat.drop_grad()
            way(own, x).backward()
            found.append((mean, ring.mean(Gradient(own_flat.collect_grad(), 1 + ring.rank)).clone()))
        return found

    for pairs in every(rings, work):
        for mean, expected in pairs:
            assert torch.allclose(mean, expected, rtol=1e-12, atol=1e-12)


def test_gradients_of_a_sparse_embedding():
    rings = form(2)

    def work(ring):
        table = nn.Embedding(6, 3, sparse=True)
        flat = FlatModel(table, ring.buffer)
        buckets = Buckets(flat, ring)
        for _ in range(2):
            buckets.begin(1)
            table(torch.tensor([ring.rank, 5, 5])).sum().backward()
            mean, unused = buckets.finish()
        return mean.view(6, 3)[:, 0].tolist(), unused

    assert every(rings, work) == [([0.5, 0.5, 0, 0, 0, 2.0], [])] * 2
    for ring in rings:
        ring.close()


@pytest.mark.parametrize("prefer", ["shm", "tcp"])
def test_a_rank_that_goes_in_the_middle_leaves_nobody_waiting(prefer):
    rings = form(3, timeout=300, prefer=prefer)  # a rank that waits for it fails the test

    def work(ring):
        flat = FlatModel(net(), ring.buffer)
        buckets = Buckets(flat, ring, 1e-6)
        for turn in range(4):
            buckets.begin(1)
            loss_of(flat.model, ring.rank, turn).backward()
            if ring.rank == 1 and turn == 2:
                ring.close()
                return
            buckets.finish()

    found = errors(rings, work)
    assert found[1] is None
    for rank in (0, 2):
        assert isinstance(found[rank], PeerLost) and "rank 1" in str(found[rank])
    for ring in rings:
        ring.close()


def test_the_cuts_go_from_the_last_parameter_to_the_first():
    layout = Layout.of((f"p{i}", torch.empty(n)) for i, n in enumerate([10, 1, 1, 100, 5]))
    assert cut(layout, float("inf")) == [[4, 3, 2, 1, 0]]
    assert cut(layout, 1) == [[4], [3], [2], [1], [0]]
    assert cut(layout, 40) == [[4, 3], [2, 1, 0]]


# ---- in a run


class Spare(Small):
    """One layer is never used, one only in every other call."""

    def model(self):
        model = super().model()
        model.spare, model.now_and_then = nn.Linear(2, 2).double(), nn.Linear(5, 5).double()
        model.forward = lambda x: model[2](model[1](model[0](x)))
        return model

    def loss(self, model, batch):
        x = batch.x if batch.x[0, 0] < 0 else model.now_and_then(batch.x)
        return ((model(x) - batch.y) ** 2).mean()


def by_hand(work, workers, epochs):
    """Plain torch on one process: the workers' gradients in turn, weighted, none where nobody has one."""
    torch.manual_seed(0)
    model = work.model()
    optimizer = work.optimizer(list(model.parameters()))
    for epoch in range(epochs):
        dealt = [list(work.data().batches(rank=r, size=workers, seed=0, epoch=epoch)) for r in range(workers)]
        for parts in zip(*dealt, strict=True):
            optimizer.zero_grad()
            total = sum(batch.size for batch in parts)
            for batch in parts:
                if batch.size:
                    (work.loss(model, batch) * batch.size / total).backward()
            optimizer.step()
    return model


@pytest.mark.parametrize("compression", [None, "top_k:1.0"], ids=str)
@pytest.mark.parametrize("bucket_mb", [0, 1e-6, None])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_optimizer_skips_what_no_rank_has_used(optimizer, bucket_mb, compression):
    work = Spare(optimizer=optimizer)
    result = train(work, AllReduce(bucket_mb=bucket_mb, compression=compression), workers=2, epochs=2)
    torch.manual_seed(0)
    begin = work.model()
    found = result.model()
    assert torch.equal(found.spare.weight, begin.spare.weight)
    assert distance(found, by_hand(work, 2, 2)) < (1e-6 if compression else EXACT)  # top_k sends float32


def clip(params):
    nn.utils.clip_grad_norm_(params, 0.05)


def writes(kind):
    class Writes(torch.optim.SGD):
        def step(self, closure=None):
            clip(self.param_groups[0]["params"])
            return super().step(closure)

    if kind == "own step":
        return lambda params: Writes(params, lr=0.3)
    if kind == "foreach":
        return lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, foreach=True)

    def hooked(params):
        optimizer = torch.optim.SGD(params, lr=0.3)
        optimizer.register_step_pre_hook(lambda *_: clip(params))
        return optimizer

    return hooked


class Writing(Small):
    def optimizer(self, params):
        return writes(self.kind)(list(params))


@pytest.mark.parametrize("kind", ["own step", "hook", "foreach"])
def test_an_optimizer_that_writes_its_gradients_spoils_nobodys(kind):
    work = Writing(optimizer=kind)
    result = train(work, AllReduce(bucket_mb=1e-6), workers=3, epochs=3)
    model, expected, _ = plain(work, 3, epochs=3)
    assert distance(result.model(), model) < EXACT
    assert result.history.column("loss").to_pylist() == pytest.approx(expected, abs=EXACT)


def test_torchs_own_optimizers_read_the_mean_where_it_lies():
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    for kind, reads in [(torch.optim.SGD, True), (torch.optim.Adam, True), (torch.optim.AdamW, True)]:
        assert step_and_compare(kind([p], lr=0.1), [p]) is reads
    for kind in ("own step", "hook", "foreach"):
        assert not step_and_compare(writes(kind)([p]), [p])


def test_the_events_say_how_gradients_leave():
    for strategy, words in [
        (AllReduce(), "while backward continues, in 1 bucket: ranks of one host read the buckets"),
        (AllReduce(bucket_mb=1e-6), "while backward continues, in 4 buckets: as bucket_mb says"),
        (AllReduce(bucket_mb=0), "after backward, in 1 bucket: as bucket_mb says"),
    ]:
        result = train(Small(n=12), strategy, workers=2, epochs=1)
        assert [event for event in result.events if event["kind"] == "choice" and words in event["message"]], words


@pytest.mark.parametrize(
    ("options", "early", "words"),
    [
        ({"prefer": "shm"}, True, "in shared memory"),
        ({"prefer": "tcp"}, True, "between hosts"),
        ({"backend": "gloo"}, False, "process group"),
    ],
)
def test_buckets_are_chosen_by_what_the_ring_goes_over(options, early, words):
    rings = form(2, **options)

    def work(ring):
        flat = FlatModel(net(), ring.buffer)
        buckets = Buckets(flat, ring)
        for turn in range(2):
            buckets.begin(ring.rank)
            loss_of(flat.model, ring.rank, turn).backward()
            mean = buckets.finish()[0].clone()
        return buckets.early, buckets.choice["message"], mean

    alone = FlatModel(net())
    loss_of(alone.model, 1, 1).backward()
    only = alone.collect_grad()[:-1]  # rank 0 has no samples, so the mean is rank 1's gradient
    for found in every(rings, work):
        assert found[0] == early and words in found[1]
        assert torch.allclose(found[2], only, atol=1e-6)
    for ring in rings:
        ring.close()


@pytest.mark.parametrize("given", [-1, True, "big", float("inf"), float("nan")])
def test_bad_sizes_of_buckets(given):
    with pytest.raises(ConfigError, match="bucket_mb"):
        AllReduce(bucket_mb=given)


def test_the_size_of_buckets_is_read_from_text():
    assert parse("all_reduce:bucket_mb=2.5")[0].strategy == AllReduce(bucket_mb=2.5)
    assert parse("all_reduce:bucket_mb=none")[0].strategy == AllReduce()
