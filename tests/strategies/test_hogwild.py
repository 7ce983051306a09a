"""Hogwild: one worker is serial to the bit, several apply every step, and touch only what their gradients are of."""

import threading
import time

import pytest
import torch
from rayps_client.errors import ConfigError, PeerTimeout, RaypsError
from small_work import OPTIMIZERS, Small, Watched, distance, kinds, plain, train
from test_ring import every
from test_ring import form as formed
from torch import nn

import rayps
from rayps import AllReduce, Hogwild
from rayps.strategies.catalogue import parse
from rayps.tensors.flat import FlatModel


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_worker_is_serial_to_the_bit(optimizer):
    work = Small(n=40, optimizer=optimizer)
    result = train(work, Hogwild(), workers=1, epochs=2)
    model, losses, _ = plain(work, epochs=2)
    assert distance(result.model(), model) == 0
    assert result.history.column("loss").to_pylist() == losses


class Still(Small):
    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.0)


def test_without_a_rate_nothing_changes():
    torch.manual_seed(7)
    start = Still().model()
    result = train(Still(n=60, jitter=0.001), Hogwild(), workers=3, epochs=2, seed=7)
    assert distance(result.model(), start) == 0
    assert sum(result.history.column("samples").to_pylist()) == 120


class Rows(rayps.Workload):
    """A table of which each batch of one row touches the row of its own number: gradients that never meet."""

    def __init__(self, n=90, rate=0.25, twice=False, pause=0.0, optimizer=torch.optim.SGD):
        self.n, self.rate, self.twice, self.pause, self.kind = n, rate, twice, pause, optimizer

    def model(self):
        return nn.Embedding(self.n, 3, sparse=True).double()

    def data(self):
        return rayps.data.tensors(
            torch.arange(self.n), torch.linspace(-1, 1, self.n, dtype=torch.float64), batch_size=3
        )

    def loss(self, model, batch):
        time.sleep(self.pause)
        return ((model(batch.x) - batch.y[:, None]) ** 2).mean()

    def optimizer(self, params):
        return self.kind(params, lr=self.rate)


def serial(work, workers, epochs):
    """What one process makes of everyone's batches, one after the other."""
    torch.manual_seed(0)
    model = work.model()
    optimizer, data = work.optimizer(model.parameters()), work.data()
    for epoch in range(epochs):
        for rank in range(workers):
            for batch in data.batches(rank=rank, size=workers, seed=0, epoch=epoch):
                if batch.size:
                    optimizer.zero_grad()
                    work.loss(model, batch).backward()
                    optimizer.step()
    return model


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_rows_that_never_meet_are_serial_to_the_bit(workers, optimizer):
    """Within an epoch each row is one worker's; in the next it may be another's, who need not wait for the first."""
    work, epochs = Rows(optimizer=optimizer), 1 if workers > 1 or optimizer is torch.optim.Adagrad else 3
    result = train(work, Hogwild(), workers=workers, epochs=epochs, checkpoint_every=7)
    assert distance(result.model(), serial(work, workers, epochs)) == 0


def test_a_dense_step_beside_them_does_not_write_their_rows():
    """A parameter without a gradient, and the rows that a batch does not hold, are not touched at all."""
    shared = torch.zeros(12, dtype=torch.float64)
    model = nn.ModuleDict({"a": nn.Embedding(3, 2, sparse=True), "b": nn.Linear(2, 3)}).double()
    del model["b"].bias
    model["b"].register_parameter("bias", None)
    flat = FlatModel(model, home=lambda n, dtype: shared[:n], keeps_sparse=True)
    assert flat.vector.data_ptr() == shared.data_ptr()
    optimizer = torch.optim.SGD(flat.parameters, lr=1.0)
    flat.drop_grad()
    model["a"](torch.tensor([1])).sum().backward()
    flat.collect_grad()
    assert model["a"].weight.grad.is_sparse
    model["b"].weight.grad = None
    before, versions = shared.clone(), model["b"].weight._version
    optimizer.step()
    assert (before - shared).nonzero().flatten().tolist() == [2, 3]
    assert model["b"].weight._version == versions


class Apart(Small):
    """A separable convex problem: one coordinate a column, all pulled to a target."""

    def model(self):
        model = nn.Linear(8, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        return model

    def data(self):
        x = torch.eye(8, dtype=torch.float64).repeat(12, 1)
        return rayps.data.tensors(x, x @ torch.arange(8.0, dtype=torch.float64)[:, None], batch_size=self.batch)

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.5)


@pytest.mark.parametrize("workers", [2, 4])
def test_several_workers_find_the_solution(workers):
    result = train(Apart(batch=2), Hogwild(), workers=workers, epochs=40)
    assert distance(result.model(), torch.arange(8.0, dtype=torch.float64)) < 1e-6


def test_nobody_waits_for_the_slow_one_and_the_result_has_all_steps():
    """A worker whose batches are slow is far behind when the others are done, and its rows are in the result."""

    class Uneven(Rows):
        def loss(self, model, batch):
            time.sleep(0.2 if threading.current_thread().name == "worker-2" else 0)
            return super().loss(model, batch)

    seen = []

    def look(progress):
        seen.append([worker["round"] for worker in progress["workers"]])

    work = Uneven(n=180)
    result = train(work, Hogwild(), workers=3, epochs=1, progress=look)
    assert distance(result.model(), serial(Rows(n=180), 3, 1)) == 0
    assert any(max(rounds) - min(rounds) > 2 for rounds in seen if len(rounds) == 3), seen


def test_checkpoints_can_be_gone_on_from_by_any_strategy(tmp_path):
    work = Small(n=48, optimizer="adam")
    train(work, Hogwild(), workers=2, epochs=1, checkpoint=tmp_path)
    resumed = train(work, AllReduce(), workers=2, epochs=3, checkpoint=tmp_path, resume=True)
    again = train(work, Hogwild(), workers=2, epochs=4, checkpoint=tmp_path, resume=True)
    assert resumed.history.column("round").to_pylist() == list(range(8, 24))
    assert again.history.column("round").to_pylist() == list(range(24, 32))
    mixed = train(work, [(1, Hogwild()), (1, AllReduce()), (1, Hogwild())], workers=2)
    assert mixed.metrics["loss"] < 1.5 * plain(work, 2, epochs=3)[2][-1]


def test_resumed_alone_it_is_the_unbroken_run(tmp_path):
    work = Small(n=40, optimizer="adam")
    whole = train(work, Hogwild(), workers=1, steps=20)
    train(work, Hogwild(), workers=1, steps=9, checkpoint=tmp_path)
    assert (
        distance(train(work, Hogwild(), workers=1, steps=20, checkpoint=tmp_path, resume=True).model(), whole.model())
        == 0
    )


@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_means_going_on_from_the_last_checkpoint(victim):
    work = Small(n=60, pause=0.004, tag=f"hogwild-death-{victim}")
    cluster = Watched()
    cluster.kill_when(work.tag, 40, ("WorkerActor", victim))
    result = train(work, Hogwild(), cluster, workers=3, epochs=3)
    assert [e["lost"] for e in result.events if e["kind"] == "restarted"] == [[f"worker-{victim}"]]
    assert result.history.column("round").to_pylist() == list(range(21))
    assert result.metrics["loss"] < 1.5 * plain(work, 3, epochs=3)[2][-1]
    assert "replaced" not in kinds(result)


# ------------------------------------------------------------------------------------------- what the ring gives


def form(size, work, **options):
    """What `work(ring)` gives on each rank."""
    rings = formed(size, **options)
    try:
        return every(rings, work)
    finally:
        for ring in rings:
            ring.close()


def test_a_common_vector_is_one_memory():
    def work(ring):
        mine = ring.common(1000, torch.float64)
        progress = ring.progress()
        mine[ring.rank * 10 : ring.rank * 10 + 10] = ring.rank + 1.0
        progress.reach(5)
        progress.meet(5)
        return mine[:40].tolist(), ring.common(0).numel()

    expected = [1.0] * 10 + [2.0] * 10 + [3.0] * 10 + [0.0] * 10
    assert form(3, work) == [(expected, 0)] * 3


def test_ranks_that_share_no_memory_are_told_the_way_out():
    def work(ring):
        with pytest.raises(ConfigError, match=r"3 ranks share no memory.*on one host: use fewer workers.*all_reduce"):
            ring.common(10)
        with pytest.raises(ConfigError, match="share no memory"):
            ring.progress()
        return ring.sum(torch.ones(2)).tolist()  # and the ring is as before

    assert form(3, work, prefer="tcp") == [[3.0, 3.0]] * 3


def test_who_makes_no_round_is_named():
    def work(ring):
        progress = ring.progress()
        progress.reach(3 + ring.rank)
        if ring.rank:
            with pytest.raises(PeerTimeout, match=r"rank 0 has completed 3 of 4 rounds.*timeout") as caught:
                progress.meet(4)
            return caught.value.data["peer"]
        progress.meet(3)
        return None

    assert form(2, work, timeout=0.5) == [None, "worker:0"]


def test_the_meeting_ends_with_the_ring():
    def work(ring):
        progress = ring.progress()
        if ring.rank == 0:
            threading.Timer(0.2, ring.abort).start()
            with pytest.raises(RaypsError, match="abort"):
                progress.meet(1)
        return True

    assert form(2, work) == [True, True]


def test_options_and_models_that_it_cannot_have():
    assert parse("hogwild")[0].strategy == Hogwild()
    assert Hogwild().topology.in_step
    with pytest.raises(ConfigError, match="hogwild has no option 'shards'"):
        parse("hogwild:shards=2")
    with pytest.raises(ConfigError, match="on meta: this strategy needs it on the CPU"):
        FlatModel(nn.Linear(2, 2, device="meta"), home=lambda n, dtype: torch.zeros(n, dtype=dtype))
