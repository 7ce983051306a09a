"""Accumulation and losses of tokens: k micro-batches on N workers are one padded batch of plain torch."""

import importlib
import re
import threading
from collections import defaultdict

import covers
import pytest
import torch
from rayps_client.errors import ConfigError, TrainingError, WorkloadError
from small_work import Small, distance, plain, train, vector
from token_work import Tokens, apart, joined, law, mean_loss, steps_of, weight_of
from torch import nn

import rayps
from rayps import ADMM, AllReduce, DiLoCo, Downpour, FedAvg, Hogwild, LocalSGD, ParallelSGD, ParameterServer
from rayps.comm.ring import Ring
from rayps.comm.ring.compressed_mean import CompressedRing
from rayps.ps.client.client import GroupServer
from rayps.worker.exchange.buckets import Buckets

EXACT = 1e-11
HALF = 2e-2  # bf16 has 8 bits: another order of additions moves the result by about this much

IN_STEP = [
    AllReduce(),
    AllReduce(bucket_mb=0),
    AllReduce(bucket_mb=1e-4),
    ParameterServer(shards=2),
    ParameterServer(shards=2, replicas=1),
    LocalSGD(warmup=10_000),
]


@covers.pairs
@pytest.mark.parametrize("pairs", [True, False], ids=["tokens", "rows"])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("strategy", IN_STEP, ids=str)
def test_micro_batches_are_one_batch(strategy, accumulate, workers, pairs):
    work = Tokens(accumulate=accumulate, pairs=pairs)
    model, losses = law(work, workers)
    result = train(work, strategy, workers=workers, epochs=2)
    assert distance(result.model(), model) < EXACT
    found = result.history["loss"].to_pylist()
    assert [loss is None for loss in found] == [loss is None for loss in losses]
    assert [loss or 0 for loss in found] == pytest.approx([loss or 0 for loss in losses], abs=EXACT)
    assert len(losses) == 2 * -(-work.data().steps(workers) // accumulate)
    assert sum(result.history["samples"].to_pylist()) == 2 * work.n


class Silent(Tokens):
    """The loss of a micro-batch without tokens is not finite, and has the weight 0."""

    def loss(self, model, batch):
        errors, count = self.errors(model, batch)
        return errors.sum() / 0 if count == 0 else errors.sum(), count


@covers.pairs
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", [Tokens, Silent])
def test_the_micro_batches_of_a_pipeline_are_one_batch(kind, replicas, schedule):
    """Only the last stage knows the numbers of tokens, and all stages take the same step."""
    work = kind(batch=4)
    model, losses = law(work, replicas)
    replica = rayps.Pipeline(stages=2, micro_batches=4, schedule=schedule)
    result = train(work, AllReduce(replica=replica), workers=2 * replicas, epochs=2)
    assert distance(result.model(), model) < EXACT
    assert [loss or 0 for loss in result.history["loss"].to_pylist()] == pytest.approx([x or 0 for x in losses])


def test_a_pipeline_under_servers_weighs_by_tokens():
    work = Tokens(batch=4)
    replica = rayps.Pipeline(stages=2, micro_batches=2)
    result = train(work, ParameterServer(replica=replica), workers=4, epochs=2)
    assert distance(result.model(), law(work, 2)[0]) < EXACT


def test_metrics_of_the_training_in_a_pipeline():
    work = Logged(n=37)
    work.accumulate = 1
    alone = train(work, AllReduce(), workers=1).history
    divided = train(work, AllReduce(replica=rayps.Pipeline(stages=2, micro_batches=3)), workers=2).history
    for name in ("error", "most", "least", "rows"):
        assert divided[name].to_pylist() == pytest.approx(alone[name].to_pylist())


def test_a_pipeline_whose_losses_are_of_two_kinds():
    class Both(Tokens):
        def loss(self, model, batch):
            errors, count = self.errors(model, batch)
            return (errors.sum(), count) if count > 3 else errors.mean()

    with pytest.raises(WorkloadError, match="return the same kind for each"):
        train(Both(batch=4), AllReduce(replica=rayps.Pipeline(stages=2, micro_batches=4)), workers=2)


def test_a_mean_of_means_is_another_result():
    work = Tokens(accumulate=2)
    wrong, _ = law(work, 3, mean_of_means=True)
    result = train(work, AllReduce(), workers=3, epochs=2)
    assert distance(result.model(), law(work, 3)[0]) < EXACT
    assert distance(result.model(), wrong) > 1e-3


@pytest.mark.parametrize("strategy", [AllReduce(), AllReduce(bucket_mb=1e-4), ParameterServer()], ids=str)
def test_one_micro_batch_of_a_mean_has_the_bits_of_plain_torch(strategy):
    work = Small(n=36, optimizer="adam")
    assert distance(train(work, strategy, workers=1, epochs=2).model(), plain(work, epochs=2)[0]) == 0


@pytest.mark.parametrize("k", [2, 3])
def test_equal_micro_batches_have_the_bits_of_the_usual_loop(k):
    class Three(Small):
        accumulate = k

    work = Three(n=36)
    torch.manual_seed(0)
    model = work.model()
    optimizer = work.optimizer(list(model.parameters()))
    batches = list(work.data().batches(rank=0, size=1, seed=0, epoch=0))
    for number, batch in enumerate(batches, 1):
        (work.loss(model, batch) / k).backward()
        if number % k == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert distance(train(work, AllReduce(), workers=1).model(), model) == 0


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("period", [1, 4])
def test_local_sgd_weighs_by_tokens(period, accumulate):
    work = Tokens(accumulate=accumulate, optimizer="sgd")
    result = train(work, LocalSGD(period=period), workers=3, epochs=2)
    assert distance(result.model(), apart(work, 3, period=period)) < EXACT


class Rare(Tokens):
    """Tokens in every fifth row."""

    def data(self):
        found = super().data()
        return rayps.data.tensors(found.x, found.y * (torch.arange(self.n) % 5 == 0), batch_size=self.batch)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_period_without_any_token_leaves_the_parameters(workers):
    work = Rare(n=20, batch=1, optimizer="sgd")
    result = train(work, LocalSGD(period=1), workers=workers, epochs=2)
    assert None in result.history["loss"].to_pylist()  # rounds in which no worker has a token
    assert distance(result.model(), apart(work, workers, period=1)) < EXACT


def test_diloco_and_parallel_sgd_step_by_groups():
    work = Tokens(accumulate=2, optimizer="sgd")
    far = train(work, DiLoCo(period=3, outer_lr=1.0, outer_momentum=0.0), workers=3, epochs=2)
    assert distance(far.model(), apart(work, 3, period=3)) < EXACT  # with rate 1 the outer step is the mean
    once = train(work, ParallelSGD(), workers=1, epochs=2)
    assert distance(once.model(), law(work, 1)[0]) < EXACT


@pytest.mark.parametrize(
    "strategy", [ParameterServer(staleness=3), ParameterServer(staleness=None), Downpour(), Hogwild()], ids=str
)
def test_one_worker_apart_is_plain_torch(strategy):
    work = Tokens(accumulate=2, optimizer="sgd")
    assert distance(train(work, strategy, workers=1, epochs=2).model(), law(work, 1)[0]) < EXACT


def test_admm_steps_by_groups():
    """With one worker and no multiplier yet, the first period steps by g + penalty (x - z)."""
    work = Tokens(accumulate=2, optimizer="sgd", n=12)
    result = train(work, ADMM(penalty=0.5, local_steps=100, balance=False), workers=1, epochs=1)
    torch.manual_seed(0)
    model = work.model()
    z = vector(model)
    for (own,) in steps_of(work, 1, 0, keeps_rows=True):
        model.zero_grad()
        mean_loss(work, model, joined(own)).backward()
        grad = torch.cat([p.grad.reshape(-1) for p in model.parameters()]) + 0.5 * (vector(model) - z)
        nn.utils.vector_to_parameters(vector(model) - 0.1 * grad, model.parameters())
    assert distance(result.model(), model) < EXACT


@pytest.mark.parametrize("workers", [1, 2])
def test_fedavg_accumulates_at_each_client(workers):
    work = Tokens(n=40, accumulate=2, optimizer="sgd", clients=4)
    data = work.data()
    result = train(work, FedAvg(fraction=1.0), workers=workers, epochs=1)
    torch.manual_seed(0)
    first = work.model()
    total = torch.zeros_like(vector(first))
    for k in range(4):
        from rayps_client.row_order import parts

        torch.manual_seed(0)
        model = work.model()
        numbers = data.clients.rows(k)
        for positions in parts(0, k, len(numbers), 2 * work.batch, round=0, epochs=1, steps=None):
            for lo in range(0, len(positions), 2 * work.batch):
                batch = data.clients.batch(numbers[positions[lo : lo + 2 * work.batch]])
                model.zero_grad()
                mean_loss(work, model, batch).backward()
                nn.utils.vector_to_parameters(
                    vector(model) - 0.1 * torch.cat([p.grad.reshape(-1) for p in model.parameters()]),
                    model.parameters(),
                )
        total += vector(model) * len(numbers) / work.n
    assert distance(result.model(), total) < EXACT


@pytest.mark.parametrize("compression", ["fp16", "int8", "top_k:0.9"])
def test_compression_encodes_the_mean_of_the_tokens(compression):
    """The twin: the same step, uncompressed; error feedback keeps the difference small."""
    work = Tokens(accumulate=2, optimizer="sgd")
    model, _ = law(work, 3)
    result = train(work, AllReduce(compression=compression), workers=3, epochs=2)
    assert distance(result.model(), model) < 2e-2
    assert distance(result.model(), law(work, 3, mean_of_means=True)[0]) > distance(result.model(), model)


@pytest.mark.parametrize(
    "strategy",
    [AllReduce(), AllReduce(compression="bf16"), ParameterServer(), ParameterServer(staleness=3), LocalSGD(period=4)],
    ids=str,
)
def test_bf16_with_tokens_and_micro_batches(strategy):
    work = Tokens(accumulate=2, precision="bf16", optimizer="sgd")
    workers = 1 if strategy == ParameterServer(staleness=3) else 2
    result = train(work, strategy, workers=workers, epochs=2)
    expected = apart(work, 2, period=4) if isinstance(strategy, LocalSGD) else law(work, workers)[0]
    assert distance(result.model(), expected) < HALF
    assert result.model()[0].weight.dtype == torch.float32


def test_a_worker_without_tokens_has_no_weight():
    work = Silent(n=12, batch=1)
    assert any(weight_of(work, own) == 0 for step in steps_of(work, 3, 0) for own in step)
    result = train(work, AllReduce(), workers=3)
    assert distance(result.model(), law(Tokens(n=12, batch=1), 3, epochs=1)[0]) < EXACT


def test_evaluation_reduces_as_the_user_says():
    work = Tokens(accumulate=2)
    result = train(work, AllReduce(), workers=3)
    data = work.data()
    errors, count = work.errors(result.model(), rayps.data.Batch(data.x, data.y, work.n))
    assert result.metrics["loss"] == pytest.approx(errors.sum().item() / count.item(), abs=EXACT)
    assert result.metrics["token"] == pytest.approx(result.metrics["loss"], abs=EXACT)
    assert result.metrics["tokens"] == count.item()
    assert result.metrics["worst"] == pytest.approx(errors.max().item(), abs=EXACT)


class Logged(Small):
    accumulate = 2

    def loss(self, model, batch):
        errors = (model(batch.x) - batch.y).abs()
        return {
            "loss": errors.square().mean(),
            "error": errors.mean(),
            "most": rayps.Max(errors.max()),
            "least": rayps.Min(errors.min()),
            "rows": rayps.Sum(batch.size),
        }


def test_metrics_beside_the_loss_are_in_the_history():
    work = Logged(n=37)
    result = train(work, AllReduce(), workers=2)
    torch.manual_seed(0)
    first = next(joined(parts) for parts in [[b for own in steps_of(work, 2, 0)[0] for b in own]])
    errors = (work.model()(first.x) - first.y).abs()
    history = result.history
    assert history["error"][0].as_py() == pytest.approx(errors.mean().item(), abs=EXACT)
    assert history["most"][0].as_py() == pytest.approx(errors.max().item(), abs=EXACT)
    assert history["least"][0].as_py() == pytest.approx(errors.min().item(), abs=EXACT)
    assert history["rows"].to_pylist() == history["samples"].to_pylist()
    assert "most" in result.metrics  # an evaluation computes the loss, and what is beside it


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2", None])
def test_accumulate_is_checked(value):
    work = Small()
    work.accumulate = value
    with pytest.raises(ConfigError, match=r"accumulate of Small is .* whole number of at least 1"):
        train(work)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda loss: (loss, -1), "weight -1"),
        (lambda loss: (loss, float("nan")), "weight nan"),
        (lambda loss: (loss, "many"), "weight str"),
        (lambda loss: (loss.detach(), 3), "without a gradient"),
        (lambda loss: {"error": loss}, "add the loss under the name 'loss'"),
        (lambda loss: {"loss": loss, "seconds": 1.0}, "give the metric another name"),
        (lambda loss: {"loss": loss, "kind": 1.0}, "metric 'kind'.* give the metric another name"),
        (lambda loss: {"loss": loss, "error": "high"}, "returned a str for 'error'"),
        (lambda loss: (loss, 1, 2), "pair"),
    ],
)
def test_what_a_loss_returns_is_checked(given, message):
    class Wrong(Small):
        def loss(self, model, batch):
            return given(super().loss(model, batch))

    with pytest.raises(WorkloadError, match=message):
        train(Wrong())


class Named(Small):
    """The loss returns a metric of a given name beside it."""

    def __init__(self, name, **options):
        super().__init__(**options)
        self.name = name

    def loss(self, model, batch):
        return {"loss": super().loss(model, batch), self.name: 123.0}


class Says(rayps.Strategy):
    """Adds its own number to each round."""

    def round(self, w):
        w.step(w.ring.mean(w.grad(w.batch())))
        w.say(energy=1)


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        ("local_sgd:period=3", "met"),
        ("diloco:period=3", "met"),
        ("parallel_sgd:merge=best,buffers=keep", "best"),
        (Says(), "energy"),
        *(("admm", name) for name in ("met", "primal", "dual", "penalty", "present")),
    ],
)
def test_a_metric_with_the_name_of_a_number_of_the_strategy_is_refused(strategy, name):
    with pytest.raises(WorkloadError, match=rf"a metric '{name}', and the strategy .* give the metric another name"):
        train(Named(name), strategy, workers=2, epochs=2)
    assert train(Named("mine"), strategy, workers=2, epochs=2).history["mine"].to_pylist()[0] == 123.0


class Forked(Small):
    """Two branches; which of them a micro-batch uses depends on its rows, so that a step uses one, both, or none."""

    accumulate = 3

    def model(self):
        made = nn.ModuleDict({"a": nn.Linear(5, 1), "b": nn.Linear(5, 1), "idle": nn.Linear(5, 1)})
        return made.double()

    def loss(self, model, batch):
        branch = model["a"] if batch.x.sum() > 0 else model["b"]
        return ((branch(batch.x) - batch.y) ** 2).mean()

    def evaluate(self, model, batch):
        return {}


def forked_law(work, workers, epochs):
    torch.manual_seed(0)
    model = work.model()
    optimizer = work.optimizer(list(model.parameters()))
    for epoch in range(epochs):
        for step in steps_of(work, workers, epoch):
            parts = [part for own in step for part in own if part.size]
            rows = sum(part.size for part in parts)
            optimizer.zero_grad()
            for part in parts:
                (work.loss(model, part) * (part.size / rows)).backward()
            optimizer.step()
    return model


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("strategy", [AllReduce(), AllReduce(bucket_mb=0), AllReduce(bucket_mb=1e-6)], ids=str)
def test_a_parameter_that_only_some_micro_batches_use(strategy, optimizer):
    work = Forked(n=60, batch=2, optimizer=optimizer)
    result = train(work, strategy, workers=2, epochs=3)
    assert distance(result.model(), forked_law(work, 2, 3)) < EXACT


class Told(Small):
    """Records its losses, among the records of what its worker sends."""

    def __init__(self, accumulate):
        super().__init__(n=4 * 6 * 6)
        self.accumulate = accumulate

    def loss(self, model, batch):
        if torch.is_grad_enabled():  # not in an evaluation
            importlib.import_module("test_accumulate").record("loss")
        return super().loss(model, batch)


RECORDS = defaultdict(list)  # from a worker's thread to its losses and exchanges, in their order
EXCHANGES = [(Buckets, "_send_bucket"), (Ring, "mean"), (CompressedRing, "mean"), (GroupServer, "push")]
EXCHANGES += [(Ring, "max"), (GroupServer, "pull"), (Ring, "sum")]


def record(what):
    RECORDS[threading.get_ident()].append(what)


def recorded(kind, method):
    plainly = getattr(kind, method)

    def call(self, *args, **kwargs):
        record(f"{kind.__name__}.{method}")
        return plainly(self, *args, **kwargs)

    return call


@pytest.mark.parametrize(
    "strategy",
    [
        AllReduce(bucket_mb=0),
        AllReduce(bucket_mb=1e-4),
        AllReduce(compression="fp16"),
        ParameterServer(shards=2),
        ParameterServer(shards=2, staleness=2),
        ParameterServer(shards=2, compression="int8"),
    ],
    ids=str,
)
def test_nothing_is_sent_between_micro_batches(monkeypatch, strategy):
    """A step of 4 micro-batches has the exchanges and the bytes of a step of one batch, around its losses."""
    for kind, method in EXCHANGES:
        monkeypatch.setattr(kind, method, recorded(kind, method))
    found = {}
    for k in (1, 4):
        RECORDS.clear()
        result = train(Told(k), strategy, workers=2, steps=6)
        assert result.history["samples"].to_pylist() == [2 * 3 * k] * 6
        workers = sorted(each for each in RECORDS.values() if "loss" in each)
        assert [each.count("loss") for each in workers] == [6 * k] * 2
        together = [re.sub(rf"(loss ){{{k}}}", "step ", " ".join([*each, ""])) for each in workers]
        assert all("loss" not in each for each in together), "the losses of a step have nothing between them"
        found[k] = together, result.history["bytes"].to_pylist()
    assert found[1] == found[4]
    sent = "GroupServer.push" if isinstance(strategy, ParameterServer) else "CompressedRing.mean"
    if isinstance(strategy, AllReduce) and strategy.compression is None:
        sent = "Buckets._send_bucket"
    per_step = 2 if strategy == AllReduce(bucket_mb=1e-4) else 1
    assert [each.count(sent) for each in found[4][0]] == [6 * per_step] * 2 and all(found[4][1])


@pytest.mark.ray
@pytest.mark.parametrize("strategy", [AllReduce(), ParameterServer(), LocalSGD(period=2)], ids=str)
def test_on_ray(ray_cluster, strategy):
    work = Tokens(accumulate=2, optimizer="sgd")
    result = train(work, strategy, cluster=ray_cluster, workers=2, epochs=2, timeout=300.0)
    expected = apart(work, 2, period=2) if isinstance(strategy, LocalSGD) else law(work, 2)[0]
    assert distance(result.model(), expected) < EXACT


@pytest.fixture
def checked_late(monkeypatch):
    """Losses are checked as on a device: after backward was started."""
    monkeypatch.setattr("rayps.workload.accumulate.is_checked_late", lambda loss: True)


@pytest.mark.parametrize("pairs", [True, False], ids=["tokens", "rows"])
@pytest.mark.parametrize("strategy", [AllReduce(), AllReduce(shard="gradients")], ids=str)
def test_a_loss_that_is_checked_after_backward(checked_late, strategy, pairs):
    work = Tokens(accumulate=2, pairs=pairs)
    model, losses = law(work, 2)
    result = train(work, strategy, workers=2, epochs=2)
    assert distance(result.model(), model) < EXACT
    assert [loss or 0 for loss in result.history["loss"].to_pylist()] == pytest.approx([loss or 0 for loss in losses])


@pytest.mark.parametrize("strategy", [AllReduce(), AllReduce(shard="gradients")], ids=str)
def test_a_loss_that_is_not_finite_is_told_after_backward_too(checked_late, strategy):
    class Infinite(Small):
        def loss(self, model, batch):
            return super().loss(model, batch) / 0

    with pytest.raises(TrainingError, match="the loss became inf on worker-0 at round 0"):
        train(Infinite(), strategy, workers=1)
