"""The law of finite results: no success and no checkpoint holds parameters, rows or moments that are not finite."""

import hashlib
import json
import math
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from federated_work import Fed
from rayps_client.errors import CheckpointError, TrainingError
from small_work import Small, plain, train
from torch import nn

import rayps
from rayps import ADMM, AllReduce, DiLoCo, Downpour, Hogwild, Hybrid, LocalSGD, ParallelSGD, ParameterServer
from rayps.core.strategy.replica import Pipeline, TensorParallel
from rayps.core.strategy.topology import SharedVector
from rayps.strategies.catalogue import CATALOGUE
from rayps.strategies.federated import Federated
from rayps.tensors.checkpoints import checkpoint
from rayps.tensors.checkpoints.checkpoint_manifest import hash_manifest
from rayps.tensors.finite import is_finite

EXACT = 1e-12
SERVERS = [
    ParameterServer(shards=2),
    ParameterServer(shards=2, staleness=2),
    ParameterServer(shards=2, staleness=None),
    ParameterServer(shards=2, replicas=0),
    ParameterServer(shards=2, replicas=1),
    ParameterServer(shards=2, replicas=0, staleness=2),
]
STRATEGIES = [
    AllReduce(),
    AllReduce(bucket_mb=0),
    AllReduce(bucket_mb=1e-4),
    AllReduce(compression="int8"),
    *SERVERS,
    ParameterServer(shards=2, compression="fp16"),
    Downpour(shards=2),
    Downpour(n_push=3, n_fetch=2),
    Hogwild(),
    LocalSGD(period=3),
    ParallelSGD(),
    ParallelSGD(rounds=2, merge="best"),
    DiLoCo(period=4),
    ADMM(local_steps=4),
]
REPLICAS = [
    AllReduce(replica=Pipeline(stages=2)),
    AllReduce(replica=TensorParallel(size=2)),
    ParameterServer(shards=2, replica=Pipeline(stages=2)),
]
TABLES = [
    Hybrid(),
    Hybrid(staleness=0),
    ParameterServer(shards=2, replicas=0),
    ParameterServer(shards=2, replicas=1, staleness=2),
    ParameterServer(shards=2, replicas=0, staleness=None),
]
FEDERATED = [name for name, kind in CATALOGUE.items() if issubclass(kind, Federated) and name != "statistics"]


class Spoilt(torch.autograd.Function):
    """The identity, whose gradient is not a number."""

    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.full_like(grad, ctx.value), None


class Sick(Small):
    """The gradient of worker `rank` is spoilt from its loss number `at` on; every loss is finite."""

    def __init__(self, at=1, rank=1, value=math.nan, **options):
        super().__init__(**options)
        self.at, self.rank, self.value = at, rank, value
        self.calls = 0

    def spoils(self):
        if threading.current_thread().name != f"worker-{self.rank}" or not torch.is_grad_enabled():
            return False
        self.calls += 1
        return self.calls >= self.at

    def loss(self, model, batch):
        output = model(batch.x)
        if self.spoils():
            output = Spoilt.apply(output, self.value)
        return ((output - batch.y) ** 2).mean()


class Deep(Sick):
    def model(self):
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def saved(folder):
    """Every checkpoint in a folder is whole, and finite."""
    found = []
    for path in sorted(folder.glob("step-*")):
        for name, value in checkpoint.load(path).tensors.items():
            assert is_finite(value), (path, name)
        found.append(path.name)
    return found


def fails(work, strategy, folder, *, workers=2, **options):
    with pytest.raises(TrainingError) as caught:
        train(work, strategy, workers=workers, checkpoint=folder, **options)
    saved(folder)
    return caught.value


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_gradient_that_is_not_finite_in_the_last_round_is_no_success(tmp_path, strategy, value):
    error = fails(Sick(at=6, value=value), strategy, tmp_path, steps=6)
    assert (error.data["rank"], error.data["round"]) == (1, 5), error
    assert "worker-1" in str(error)
    assert "round 5" in str(error)
    assert error.data["parameter"] in str(error)
    assert error.data["parameter"] in ("0.weight", "0.bias", "2.weight", "2.bias")


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_at_a_checkpoints_round_the_newest_checkpoint_stays_good_and_resume_goes_on(tmp_path, strategy):
    train(Small(), strategy, workers=2, steps=2, checkpoint=tmp_path)
    error = fails(Sick(at=3), strategy, tmp_path, steps=8, checkpoint_every=5, resume=True)
    assert error.data["round"] == 4
    result = train(Small(), strategy, workers=2, steps=8, checkpoint=tmp_path, resume=True)
    assert saved(tmp_path)[-1] == "step-00000008"
    assert all(is_finite(p) for p in result.model().parameters())
    if strategy == AllReduce():
        assert (result.snapshot.params - plain_vector(steps=8)).abs().max() < EXACT


def plain_vector(**options):
    model, _, _ = plain(Small(), 2, **options)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("strategy", REPLICAS, ids=str)
@pytest.mark.parametrize("rank", [1, 3])
def test_a_replica_of_several_workers_too(tmp_path, strategy, rank):
    at = 4 if isinstance(strategy.replica, Pipeline) else 1  # the last micro-batch
    error = fails(Deep(at=at, rank=rank, n=24, batch=6), strategy, tmp_path, workers=4, steps=1)
    assert error.data["round"] == 0
    assert error.data["rank"] in ((0, 1) if rank == 1 else (2, 3))  # a worker of the same replica


def not_finite_in(path):
    """The columns of a table's Parquet file in which a value is not finite."""
    found = []
    for batch in pq.ParquetFile(path).iter_batches():
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            values = column.flatten() if isinstance(column, pa.FixedSizeListArray) else column
            if pa.types.is_floating(values.type) and not np.isfinite(values.to_numpy(zero_copy_only=False)).all():
                found.append(name)
    return found


class Large(Small):
    """The last gradients are finite, but too large for what the optimizer makes of them."""

    def __init__(self, at, scale, optimizer, **options):
        super().__init__(**options)
        self.at, self.scale, self.own, self.calls = at, scale, optimizer, 0

    def optimizer(self, params):
        return self.own(params)

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if threading.current_thread().name.startswith("worker-") and torch.is_grad_enabled():
            self.calls += 1
            if self.calls > 2 * (self.at - 1):
                return loss.detach() + self.scale * (loss - loss.detach())
        return loss


def adam(params):
    return torch.optim.Adam(params, lr=0.01)


def steep(params):
    return torch.optim.SGD(params, lr=1e30)


OVERFLOWS = [
    AllReduce(),
    *SERVERS[:5],
    Downpour(),
    Hogwild(),
    LocalSGD(period=2),
    LocalSGD(period=4),
    DiLoCo(period=2),
    ParallelSGD(),
    ADMM(local_steps=2),
    AllReduce(replica=TensorParallel(size=2)),
]


@pytest.mark.parametrize("strategy", OVERFLOWS, ids=str)
@pytest.mark.parametrize(("optimizer", "what"), [(adam, "exp_avg_sq"), (steep, "parameter")], ids=["moment", "step"])
def test_a_step_that_overflows_is_no_success(tmp_path, strategy, optimizer, what):
    workers = 1 if optimizer is steep and not in_step(strategy) else 2  # else another worker's loss may say it first
    error = fails(Large(1, 1e300, optimizer), strategy, tmp_path, steps=1, workers=workers)
    assert error.data["round"] == 0
    assert error.data["parameter"] in str(error)
    assert what in str(error) or (what == "exp_avg_sq" and isinstance(strategy, (DiLoCo, Downpour)))


def in_step(strategy):
    return strategy.topology.in_step and not isinstance(strategy.topology, SharedVector)


class Masked(Small):
    """Has a buffer that holds -inf, as causal masks do."""

    def model(self):
        model = super().model()
        model.register_buffer("mask", torch.full((3, 3), -math.inf))
        return model


@pytest.mark.parametrize("strategy", [AllReduce(), ParameterServer(shards=2), LocalSGD(period=2)], ids=str)
def test_buffers_may_hold_infinities(tmp_path, strategy):
    train(Masked(), strategy, workers=2, steps=4, checkpoint=tmp_path)
    result = train(Masked(), strategy, workers=2, steps=8, checkpoint=tmp_path, resume=True)
    assert result.snapshot.round == 8


class Unborn(Small):
    def model(self):
        model = super().model()
        with torch.no_grad():
            model[0].bias[2] = math.nan
        return model


def test_a_model_that_begins_with_nan_is_refused():
    with pytest.raises(rayps.RaypsError, match=r"0\.bias.*before the first round") as caught:
        train(Unborn(), AllReduce(), workers=2, steps=1)
    assert caught.value.data["parameter"] == "0.bias"


class Ailing(Fed):
    """Clients for whom `ill` says so have a gradient that is not a number."""

    def __init__(self, ill, **options):
        super().__init__(**options)
        self.ill = ill

    def loss(self, model, batch):
        output = model(batch.x)
        if self.ill == "all" or (batch.x[:, 0] == self.data().x[0, 0]).any():
            output = Spoilt.apply(output, math.nan)
        return ((output - batch.y) ** 2).mean()


@pytest.mark.parametrize("ill", ["one", "all"])
@pytest.mark.parametrize("name", FEDERATED)
def test_a_client_whose_gradient_is_not_finite_is_rejected_by_name(tmp_path, name, ill):
    result = train(Ailing(ill), name, workers=2, steps=3, checkpoint=tmp_path, checkpoint_every=1)
    assert all(is_finite(p) for p in result.model().parameters())
    saved(tmp_path)
    told = [event for event in result.events if event["kind"] == "cohort" and event["rejected"]]
    assert told
    assert "not finite" in told[0]["message"]


# ---- checkpoints that do not state that they are finite


def spoil(path, prefix, name=None, flag=False):
    """Put a NaN into a tensor of this file; the manifest states no more that the tensors are finite."""
    file = path / f"{prefix}.safetensors"
    tensors = safetensors.torch.load_file(file)
    key = name or next(k for k, v in tensors.items() if v.is_floating_point() and v.numel())
    tensors[key].view(-1)[0] = math.nan
    safetensors.torch.save_file(tensors, file)
    reseal(path, flag)
    return key


def reseal(path, flag=False):
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    manifest.pop("sha256")
    if not flag:
        manifest.pop("finite", None)
    for part in ("files", "beside"):
        for name, facts in manifest[part].items():
            facts |= {
                "size": (path / name).stat().st_size,
                "sha256": hashlib.sha256((path / name).read_bytes()).hexdigest(),
            }
    text = json.dumps({**manifest, "sha256": hash_manifest(manifest)})
    (path / checkpoint.MANIFEST).write_text(text)


class Momentum(Small):
    def __init__(self, **options):
        super().__init__(optimizer="momentum", **options)


@pytest.mark.parametrize(
    ("prefix", "strategy"),
    [
        ("model", AllReduce()),
        ("optim", AllReduce()),
        ("own", LocalSGD(period=2)),
        ("shared", DiLoCo(period=2)),
        ("model", ParameterServer(shards=2)),
        ("model", ParameterServer(shards=2, replicas=0)),
    ],
    ids=str,
)
def test_resume_falls_back_to_the_newest_good_checkpoint(tmp_path, prefix, strategy):
    train(Momentum(), strategy, workers=2, steps=3, checkpoint=tmp_path)
    train(Momentum(), strategy, workers=2, steps=6, checkpoint=tmp_path, resume=True)
    newest = tmp_path / "step-00000006"
    spoil(newest, prefix)
    for resume, more in ((newest, {}), (True, {"checkpoint": tmp_path})):
        result = train(Momentum(), strategy, workers=2, steps=9, resume=resume, **more)
        resumed = next(event for event in result.events if event["kind"] == "resumed")
        assert "step-00000003" in resumed["message"]
        told = [e["message"] for e in result.events if e["kind"] == "warning" and str(newest) in e["message"]]
        assert len(told) == 1
        assert "does not state that its tensors are finite" in told[0]
        assert result.history.column("round").to_pylist() == list(range(3, 9))
    found = checkpoint.newest(tmp_path)
    assert found.name == "step-00000009"
    assert all(map(is_finite, checkpoint.load(found).tensors.values()))


def test_where_no_checkpoint_is_good_resume_says_so(tmp_path):
    train(Momentum(), workers=2, steps=3, checkpoint=tmp_path)
    spoil(tmp_path / "step-00000003", "model")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        train(Momentum(), workers=2, steps=6, checkpoint=tmp_path, resume=True)


class Half(Sick):
    def model(self):
        return super().model().to(torch.bfloat16)

    def data(self):
        data = super().data()
        return rayps.data.tensors(data.x.bfloat16(), data.y.bfloat16(), batch_size=self.batch)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("kind", [Sick, Half])
@pytest.mark.parametrize("strategy", [AllReduce(), AllReduce(bucket_mb=1e-4)], ids=["one", "many"])
def test_a_ring_names_the_rank_among_several(tmp_path, strategy, kind, rank):
    error = fails(kind(at=3, rank=rank), strategy, tmp_path, workers=3, steps=4)
    assert (error.data["rank"], error.data["round"]) == (rank, 2)


class Opposed(Large):
    """Every worker's gradient is finite; their sum is not."""

    def model(self):
        return super().model().float()

    def data(self):
        data = super().data()
        return rayps.data.tensors(data.x.float(), data.y.float(), batch_size=self.batch)


def test_a_sum_that_overflows_names_the_parameter(tmp_path):
    work = Opposed(1, 0.0, lambda params: torch.optim.SGD(params, lr=0.1))
    work.loss = lambda model, batch: Huge.apply(model(batch.x)).mean()
    with pytest.raises(TrainingError) as caught:
        train(work, AllReduce(bucket_mb=1e-4), workers=2, steps=1, checkpoint=tmp_path)
    assert "parameter" in caught.value.data
    assert not saved(tmp_path)


class Huge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 0

    @staticmethod
    def backward(ctx, grad):
        return torch.full_like(grad, 3e38)
