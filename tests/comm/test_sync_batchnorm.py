"""BatchNorm over all workers: the law is torch's BatchNorm on the union of the batches."""

import contextlib
import copy
import shutil

import pytest
import torch
from rayps_client.errors import ConfigError, WorkloadError
from small_work import Small, train
from small_work import rows as vectors
from test_iterable import Stream, rounds_of
from test_ring import every, form
from torch import nn

import rayps
from rayps.worker.exchange.sync_batchnorm import RingBatchNorm, synchronize


@contextlib.contextmanager
def formed(n):
    rings = form(n)
    try:
        yield rings
    finally:
        for ring in rings:
            ring.close()


def network():
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(),
        nn.Linear(3 * 16, 5), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 1),
    ).double()  # fmt: skip


def rows(n):
    g = torch.Generator().manual_seed(8)
    return torch.randn(n, 2, 4, 4, generator=g).double(), torch.randn(n, 1, generator=g).double()


def union(counts):
    model, (x, y) = network(), rows(sum(counts))
    loss = (model(x) - y).square().mean()
    loss.backward()
    return model, loss.item()


def one(ring, counts, model):
    """One worker's part: its gradient, weighted as a ring weights it, and its model."""
    x, y = rows(sum(counts))
    sync = synchronize(model, ring)
    at, n = sum(counts[: ring.rank]), counts[ring.rank]
    sync.rows = float(n)
    mine = slice(at, at + n) if n else slice(0, 1)
    loss = (model(x[mine]) - y[mine]).square().mean()
    loss.backward()
    weight = n / sum(counts)
    return [p.grad * weight for p in model.parameters()], model, loss.item() * weight


@pytest.mark.parametrize("counts", [(4, 4), (5, 2), (3, 0), (1, 6), (2, 3, 4), (4, 0, 1)])
def test_gradients_and_statistics_are_those_of_the_union(counts):
    expected, loss = union(counts)
    with formed(len(counts)) as rings:
        models = [network() for _ in counts]  # drawn one after another: threads share torch's random state
        found = every(rings, lambda ring: one(ring, counts, models[ring.rank]))
    assert sum(each[2] for each in found) == pytest.approx(loss, abs=1e-12)
    for i, p in enumerate(expected.parameters()):
        assert torch.allclose(sum(grads[i] for grads, _, _ in found), p.grad, atol=1e-12, rtol=0)
    for _, model, _ in found:
        for name, value in expected.named_buffers():
            assert torch.allclose(dict(model.named_buffers())[name].double(), value.double(), atol=1e-12, rtol=0), name


def test_names_do_not_change_and_evaluation_is_plain():
    with formed(1) as [ring]:
        model, plain = network(), network()
        synchronize(model, ring)
        assert isinstance(model[1], RingBatchNorm)
        assert list(model.state_dict()) == list(plain.state_dict())
        x, _ = rows(4)
        assert torch.equal(model.eval()(x), plain.eval()(x))
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
        assert synchronize(nn.Linear(1, 1), ring) is None


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4, track_running_stats=False)])
def test_layers_without_parameters_or_running_statistics(layer):
    x = torch.randn(6, 4)
    with formed(1) as [ring]:
        model = nn.Sequential(copy.deepcopy(layer))
        synchronize(model, ring)
        assert torch.allclose(model(x), layer(x), atol=1e-6)
        assert torch.allclose(model.eval()(x), layer.eval()(x), atol=1e-6)


def test_a_layer_with_two_names_is_one_layer():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = self.second = nn.BatchNorm1d(3)

        def forward(self, x):
            return self.second(self.first(x) + 1)

    x, plain = torch.randn(6, 3), Twice()
    with formed(1) as [ring]:
        model = copy.deepcopy(plain)
        synchronize(model, ring)
        assert isinstance(model.second, RingBatchNorm)
        assert model.first is model.second
        assert torch.allclose(model(x), plain(x), atol=1e-6)


class Alone:
    """The ring of one worker, which leaves tensors on their device."""

    size = 1

    def sum(self, t):
        return t

    def all_gather(self, t):
        return t


def test_sums_are_made_on_the_device_of_the_batch():
    x, model = torch.randn(6, 2, 4, 4, dtype=torch.float64), network()
    synchronize(model, Alone())
    with torch.device("meta"):  # of tensors that are made without a device
        model(x).sum().backward()
    assert all(p.grad is not None and p.grad.device.type == "cpu" for p in model.parameters())


class Own(Small):
    """A workload with a given model."""

    def __init__(self, make, synchronizes):
        super().__init__()
        self.make, self.sync_batchnorm = make, synchronizes

    def model(self):
        return self.make().double()


def test_layers_that_would_not_be_synchronized_are_refused():
    def torchs():
        return nn.Sequential(nn.Linear(5, 4), nn.SyncBatchNorm(4), nn.Linear(4, 1))

    for strategy in ("all_reduce", "parameter_server", "local_sgd"):
        with pytest.raises(ConfigError, match=r"layer '1' is a torch\.nn\.SyncBatchNorm.*\nset sync_batchnorm = True"):
            train(Own(torchs, False), strategy, workers=2)
    train(Own(torchs, False), workers=1)
    plain = train(Own(lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), True), workers=2)
    assert train(Own(torchs, True), workers=2).metrics == plain.metrics
    with pytest.raises(ConfigError, match=r"returned a BatchNorm1d .* return torch\.nn\.Sequential\(layer\)"):
        train(Own(lambda: nn.BatchNorm1d(5), True), workers=2)


class Normed(Small):
    """A network with a synchronized layer."""

    sync_batchnorm = True

    def model(self):
        return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1)).double()


def on_the_union(work, workers, epochs):
    """Torch's BatchNorm in one process, on the union of the workers' batches."""
    torch.manual_seed(0)
    model, data, losses = work.model(), work.data(), []
    optimizer = work.optimizer(list(model.parameters()))
    for epoch in range(epochs):
        for parts in zip(
            *(data.batches(rank=r, size=workers, seed=0, epoch=epoch) for r in range(workers)), strict=True
        ):
            x, y = torch.cat([b.x for b in parts]), torch.cat([b.y for b in parts])
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=work.precision == "bf16"):
                output = model(x)
            loss = (output - y).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("strategy", ["all_reduce", "all_reduce:bucket_mb=0.0001", "hybrid"])
@pytest.mark.parametrize(("n", "batch", "workers"), [(36, 3, 2), (38, 3, 3), (5, 2, 4), (3, 1, 4)])
def test_a_run_equals_one_process_on_the_union_of_the_batches(strategy, n, batch, workers):
    work = Normed(n=n, batch=batch, optimizer="momentum")
    result = train(work, strategy, workers=workers, epochs=3)
    model, losses = on_the_union(work, workers, epochs=3)
    assert result.history.column("loss").to_pylist() == pytest.approx(losses, abs=1e-11)
    found = result.snapshot.state_dict()
    for name, value in model.state_dict().items():
        assert torch.allclose(found[name].double(), value.double(), atol=1e-11, rtol=0), name


@pytest.mark.skipif(shutil.which("g++") is None, reason="the default backend needs g++")
@pytest.mark.parametrize(
    ("strategy", "compiled", "n", "workers"),
    [  # "aot_eager" has the same graphs without the compiler of C++, which takes a minute
        pytest.param("all_reduce", True, 18, 2, marks=pytest.mark.soak),
        ("all_reduce", "aot_eager", 38, 3),
        ("hybrid", "aot_eager", 38, 3),
    ],
)
def test_a_compiled_run_equals_one_that_is_not(strategy, compiled, n, workers):
    from torch._dynamo.utils import counters  # loads the compiler

    torch._dynamo.reset()  # with graphs of earlier tests, torch may decline to compile more of them
    counters.clear()
    work = Normed(n=n, batch=3, optimizer="momentum")
    expected = train(work, strategy, workers=workers, epochs=2)
    work.compile = compiled
    found = train(work, strategy, workers=workers, epochs=2, timeout=300)
    assert counters["stats"]["unique_graphs"], "nothing was compiled"
    losses = expected.history["loss"].to_pylist()
    assert found.history["loss"].to_pylist() == pytest.approx(losses, abs=1e-11)
    assert found.metrics == pytest.approx(expected.metrics, abs=1e-11)
    states, others = expected.snapshot.state_dict(), found.snapshot.state_dict()
    assert list(states) == list(others)
    for name, value in states.items():
        assert torch.allclose(others[name].double(), value.double(), atol=1e-11, rtol=0), name


class Streams(Normed):
    """Worker r has `lengths[r]` rows, and the data set has no length."""

    def __init__(self, lengths, **options):
        super().__init__(**options)
        self.lengths = lengths

    def data(self):
        return rayps.data.iterable(Stream(self.lengths), batch_size=self.batch, ends="last", shard="own")

    def evaluation_data(self):
        return rayps.data.tensors(*vectors(12), batch_size=4)


@pytest.mark.parametrize("lengths", [(14, 7), (9, 0), (9, 0, 4), (5, 0, 0)])
@pytest.mark.parametrize("strategy", ["all_reduce", "all_reduce:compression=top_k:1.0"])
def test_a_rank_without_any_batch_takes_part(lengths, strategy):
    work = Streams(lengths, batch=3, optimizer="momentum")
    torch.manual_seed(0)
    model = work.model()
    optimizer = work.optimizer(list(model.parameters()))
    for epoch in range(3):
        for parts in rounds_of(lengths, 3, epoch, "last"):
            x, y = (torch.cat(each) for each in zip(*(part for part in parts if part is not None), strict=True))
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
    result = train(work, strategy, workers=len(lengths), epochs=3)
    found = result.snapshot.state_dict()
    bound = 1e-11 if strategy == "all_reduce" else 1e-6  # top_k sends numbers in float32
    for name, value in model.state_dict().items():
        assert torch.allclose(found[name].double(), value.double(), atol=bound, rtol=0), name


@pytest.mark.parametrize("compression", ["fp16", "int8", "top_k:1.0"])
@pytest.mark.parametrize(("n", "batch", "workers"), [(38, 3, 3), (5, 2, 4)])
def test_compressed_gradients_leave_the_statistics_exact(compression, n, batch, workers):
    work = Normed(n=n, batch=batch)
    result = train(work, f"all_reduce:compression={compression}", workers=workers, epochs=2)
    model, losses = on_the_union(work, workers, epochs=2)
    bound = 1e-6 if compression == "top_k:1.0" else 0.05
    assert result.history.column("loss").to_pylist() == pytest.approx(losses, abs=bound)
    assert result.snapshot.state_dict()["1.running_mean"].tolist() == pytest.approx(
        model[1].running_mean.tolist(), abs=bound
    )


class Bf16(Normed):
    precision = "bf16"

    def model(self):
        return super().model().float()

    def data(self):
        x, y = vectors(self.n)
        return rayps.data.tensors(x.float(), y.float(), batch_size=self.batch)

    def loss(self, model, batch):
        found = model(batch.x)
        assert found.dtype == torch.bfloat16  # also for a batch that does not count
        return (found.float() - batch.y).square().mean()

    def evaluate(self, model, batch):
        return {}


@pytest.mark.parametrize(("n", "batch", "workers"), [(36, 3, 2), (38, 3, 3), (5, 2, 4)])
def test_in_bf16_a_run_equals_autocast_on_the_union(n, batch, workers):
    work = Bf16(n=n, batch=batch)
    model, losses = on_the_union(work, workers, epochs=2)
    result = train(work, workers=workers, epochs=2)
    assert result.history.column("loss").to_pylist() == pytest.approx(losses, abs=0.02)
    found = result.snapshot.state_dict()
    for name, value in model.state_dict().items():
        assert torch.allclose(found[name].double(), value.double(), atol=0.02, rtol=0), name


class Pairs(Normed):
    def loss(self, model, batch):
        return (model(batch.x) - batch.y).square().sum(), 2 * batch.size


def test_micro_batches_and_pairs_are_refused():
    work = Normed()
    work.accumulate = 2
    with pytest.raises(ConfigError, match=r"sync_batchnorm is True and accumulate is 2.*set accumulate to 1"):
        train(work, workers=2)
    with pytest.raises(WorkloadError, match=r"pair \(sum, weight\), and sync_batchnorm is True: return the mean"):
        train(Pairs(), workers=2)


def test_without_it_the_statistics_are_each_workers_own():
    work = Normed(n=36)
    work.sync_batchnorm = False
    _, losses = on_the_union(work, 2, epochs=1)
    assert train(work, workers=2).history.column("loss").to_pylist() != pytest.approx(losses, abs=1e-6)


@pytest.mark.parametrize("strategy", ["parameter_server", "local_sgd", "hogwild", "pipeline:stages=2", "fedavg"])
def test_other_strategies_refuse_it(strategy):
    with pytest.raises(ConfigError, match=r"sync_batchnorm needs .* use all_reduce"):
        train(Normed(), strategy, workers=2)


def test_it_is_true_or_false():
    work = Normed()
    work.sync_batchnorm = "yes"
    with pytest.raises(ConfigError, match="sync_batchnorm is 'yes'"):
        train(work, workers=2)
