"""A workload as people train it, beside the plain torch loop that it replaces: equal within rounding after each epoch.

A convolutional network with BatchNorm, dropout, random flips, groups without weight decay, momentum, label smoothing,
clipping, warm-up and cosine, an average of the weights, and a smaller last batch. On one worker the twin is a plain
loop. On two workers it is what DDP computes: each rank has BatchNorm statistics of its own batches and its own random
numbers, all take the step of the mean gradient, and rank 0 is evaluated.
"""

import contextlib
import copy

import pytest
import torch
from process_cluster import ProcessCluster
from safetensors.torch import save_file
from small_work import GPUS, train
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import rayps
from rayps.cluster.local import LocalCluster
from rayps.core.rows.rank_seed import derive_rank_seed
from rayps.runtime.results.saved_model import export_checkpoint

EPOCHS = 3
AVERAGES = {"none": None, "ema": rayps.EMA(0.9), "swa": rayps.SWA(start=5, every=3)}


def images(n, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (n,), generator=generator)
    x = torch.randn(n, 2, 6, 6, generator=generator, dtype=torch.float64)
    return x + 0.7 * functional.one_hot(y, 4).double().repeat_interleave(18, 1).view(n, 2, 6, 6), y


def network(drop):
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Conv2d(6, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(drop), nn.Linear(64, 4),
    ).double()  # fmt: skip


class Images(rayps.Workload):
    clip_norm = 1.0

    def __init__(self, n=37, average=None, draws=False):
        self.n, self.average, self.draws = n, average, draws

    def model(self):
        return network(0.2 if self.draws else 0.0)

    def data(self):
        return rayps.data.tensors(*images(self.n, 0), batch_size=5)

    def evaluation_data(self):
        return rayps.data.tensors(*images(51, 1), batch_size=8, shuffle=False)

    def loss(self, model, batch):
        x = batch.x
        if model.training and self.draws:
            x = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(3), x)
        return functional.cross_entropy(model(x), batch.y, label_smoothing=0.1)

    def optimizer(self, params):
        groups = [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": 1e-2},
            {"params": [p for p in params if p.dim() <= 1]},
        ]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)

    def schedule(self, optimizer):
        warm, cosine = (
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5),
            lr_scheduler.CosineAnnealingLR(optimizer, 15),
        )
        return lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[5])

    def evaluate(self, model, batch):
        return {"accuracy": (model(batch.x).argmax(1) == batch.y).double().mean()}


def measured(work, model):
    """The mean loss and the accuracy over all of the evaluation data."""
    model.eval()
    data = work.evaluation_data()
    with torch.no_grad():
        loss = functional.cross_entropy(model(data.x), data.y, label_smoothing=0.1).item()
        accuracy = (model(data.x).argmax(1) == data.y).double().mean().item()
    model.train()
    return loss, accuracy


class Twin:
    """Plain torch: one model for each rank, the parameters of rank 0's for all of them."""

    def __init__(self, work, ranks, seed=0):
        torch.manual_seed(seed)
        first = work.model()
        self.work, self.seed = work, seed
        self.models = [first, *(copy.deepcopy(first) for _ in range(ranks - 1))]
        self.optimizer = work.optimizer(list(first.parameters()))
        self.scheduler = work.schedule(self.optimizer)
        average = work.average
        # torch's own mean for SWA has a weight in float32 and refuses counts of batches
        kind = {"avg_fn": lambda held, new, count: held + (new - held) / (count + 1)}
        if isinstance(average, rayps.EMA):
            kind = {"multi_avg_fn": get_ema_multi_avg_fn(average.decay)}
        self.averaged = None if average is None else AveragedModel(first, use_buffers=True, **kind)
        self.random, self.losses, self.evaluations = [], [], []
        for rank in range(ranks):
            torch.manual_seed(derive_rank_seed(seed, rank))
            self.random.append(torch.get_rng_state())

    def train(self):
        data, ranks = self.work.data(), len(self.models)
        for epoch in range(EPOCHS):
            dealt = (data.batches(rank=r, size=ranks, seed=self.seed, epoch=epoch) for r in range(ranks))
            for batches in zip(*dealt, strict=True):
                self.step(batches)
            self.evaluations.append(measured(self.work, self.evaluated))
        return self

    def step(self, batches):
        rows = sum(batch.size for batch in batches)
        self.optimizer.zero_grad()
        self.losses.append(0.0)
        params = list(self.models[0].parameters())
        for rank, (model, batch) in enumerate(zip(self.models, batches, strict=True)):
            if not batch.size:
                continue
            torch.set_rng_state(self.random[rank])
            loss = self.work.loss(model, batch)
            for p, grad in zip(params, torch.autograd.grad(loss, list(model.parameters())), strict=True):
                part = grad * (batch.size / rows)
                p.grad = part if p.grad is None else p.grad + part
            self.random[rank] = torch.get_rng_state()
            self.losses[-1] += loss.item() * batch.size / rows
        if self.work.clip_norm is not None:
            nn.utils.clip_grad_norm_(params, self.work.clip_norm)
        self.optimizer.step()
        self.scheduler.step()
        for model in self.models[1:]:
            with torch.no_grad():
                for p, q in zip(model.parameters(), params, strict=True):
                    p.copy_(q)
        if self.averaged is not None and self.work.average.due(len(self.losses)):
            self.averaged.update_parameters(self.models[0])

    @property
    def evaluated(self):
        return self.models[0] if self.averaged is None else self.averaged.module


def same(found, expected, rounding=1e-11):
    """Compare all parameters and buffers; counts of batches are not averaged by rayps, and no evaluation reads them."""
    held = expected.state_dict()
    for name, value in found.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(
                value, held[name], rtol=rounding, atol=rounding, msg=lambda m, n=name: f"{n}: {m}"
            )


def evaluations(result):
    columns = (result.history[f"evaluation_{name}"].to_pylist() for name in ("loss", "accuracy"))
    return [pair for pair in zip(*columns, strict=True) if pair[0] is not None]


def compare(work, strategy, ranks, **options):
    twin = Twin(work, ranks).train()
    result = train(work, strategy, workers=ranks, epochs=EPOCHS, **options)
    assert result.history["loss"].to_pylist() == pytest.approx(twin.losses, abs=1e-11)
    same(result.model(), twin.models[0])
    if work.average is not None:
        same(result.model(average=True), twin.averaged.module)
    return twin, result


@pytest.mark.parametrize("draws", [False, True], ids=["still", "draws"])
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server:shards=2", "local_sgd:period=2"])
def test_one_worker_is_the_plain_loop(strategy, average, draws):
    twin, result = compare(Images(average=AVERAGES[average], draws=draws), strategy, 1)
    for found, expected in zip(evaluations(result), twin.evaluations, strict=True):
        assert found == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize("n", [44, 45, 41], ids=["equal", "unequal", "empty"])  # the ranks' last batches
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("strategy", ["all_reduce", "all_reduce:bucket_mb=0.0001", "parameter_server:shards=2"])
def test_two_workers_are_ranks_of_ddp(strategy, average, n):
    """And the evaluations in between are of rank 0's buffers, which are saved, where workers are in step."""
    work, in_step = Images(n=n, average=AVERAGES[average]), not strategy.startswith("parameter_server")
    if not in_step:
        work.clip_norm = None  # servers clip each push
    twin, result = compare(work, strategy, 2)
    for found, expected in list(zip(evaluations(result), twin.evaluations, strict=True))[0 if in_step else -1 :]:
        assert found == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize("shard", ["optimizer", "gradients", "parameters"])
def test_a_sharded_state_changes_nothing(shard, tmp_path):
    """FSDP2 needs processes, since one process has one process group of torch, and draws other first parameters."""
    work, options = Images(n=44), {}
    if shard == "parameters":
        torch.manual_seed(0)
        save_file(work.model().state_dict(), tmp_path / "first.safetensors")
        options["start_from"] = tmp_path / "first.safetensors"
    with contextlib.closing(ProcessCluster() if shard == "parameters" else LocalCluster(gpus=GPUS)) as cluster:
        twin, result = compare(work, f"all_reduce:shard={shard}", 2, cluster=cluster, **options)
    for found, expected in zip(evaluations(result), twin.evaluations, strict=True):
        assert found == pytest.approx(expected, abs=1e-11)


class Masked(nn.Module):
    """A network with a mask of -inf and a constant, which an average must leave as they are."""

    def __init__(self):
        super().__init__()
        self.net = network(0.0)
        self.register_buffer("mask", torch.tensor([0, 0, 0, 0, -torch.inf]))
        self.register_buffer("scale", torch.tensor([0.3], dtype=torch.bfloat16))

    def forward(self, x):
        return (nn.functional.pad(self.net(x), (0, 1)) + self.mask)[:, :4] * self.scale.double()


class MaskedImages(Images):
    def model(self):
        return Masked()


class ClientImages(Images):
    clip_norm = None

    def data(self):
        return rayps.data.tensors(*images(self.n, 0), batch_size=5, client=rayps.data.iid(4))


@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server", "local_sgd:period=4", "fedavg"])
def test_the_average_of_buffers_is_measured_exported_and_resumed(strategy, tmp_path):
    work = (ClientImages if strategy == "fedavg" else MaskedImages)(n=44, average=rayps.EMA(0.9))
    folder, best = tmp_path / "states", [rayps.BestCheckpoint()]
    whole = train(
        work, strategy, workers=2, steps=8, checkpoint=folder, evaluate_every=4, keep_checkpoints=9, callbacks=best
    )
    raw, averaged = whole.model(), whole.model(average=True)
    assert (whole.metrics["loss"], whole.metrics["accuracy"]) == pytest.approx(measured(work, averaged), abs=1e-12)
    export_checkpoint(whole.checkpoint, tmp_path / "model", None, average=True)
    same(rayps.load_state(work.model(), tmp_path / "model"), averaged, 0)
    same(train(work, strategy, workers=2, steps=8, resume=folder / "step-00000004").model(average=True), averaged, 0)
    differs = {name for name, value in raw.named_buffers() if not torch.equal(value, averaged.get_buffer(name))}
    assert differs == {name for name, _ in raw.named_buffers() if "running" in name}
