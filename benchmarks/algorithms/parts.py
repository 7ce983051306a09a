"""Compare the accuracy of a workload with that of the plain script it was ported from, with its parts on one by one.

A small residual network with BatchNorm on real digits: alone, then with warm-up and a cosine, then with an exponential
moving average of the weights. Both forms draw the same first parameters from a seed. The plain script then draws its
own order of rows and trains one process on batches as large as those of all workers together: what differs is noise,
or a fault. `tests/worker/test_plain_twin.py` compares both on the same rows, where they are equal.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from rayps_client.errors import ConfigError
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.optim.swa_utils import AveragedModel

from benchmarks.algorithms.learning import FOLDER, Images, load
from rayps.bench.table import BenchRow, ImagesFolder, Opt
from rayps.cluster.local import LocalCluster
from rayps.data import Batch, Data, tensors
from rayps.runtime.training import train
from rayps.tensors.weight_average import EMA
from rayps.workload.base import Workload

PARTS = ("batchnorm", "schedule", "ema")  # each with those before it


@dataclass(frozen=True, slots=True)
class PartsRow(BenchRow):
    """Mean accuracies in percent over the seeds, on test images; `last` is None without an average."""

    columns: ClassVar[str] = (
        "parts | seeds | plain: plain torch | rayps | difference | error: standard error | last: last statistics"
    )

    parts: str
    seeds: int
    plain: float
    rayps: float
    difference: float  # the mean of rayps less plain, with the same first parameters
    error: float  # the standard error of this mean
    last: (
        float | None
    )  # the plain script's average of the weights with the last statistics of BatchNorm, not their average

    @property
    def note(self) -> str:
        """The row in a line."""
        return f"{self.parts}: plain {self.plain:.2f}, rayps {self.rayps:.2f}, difference {self.difference:+.2f}"


class Block(nn.Module):
    """Two convolutions with BatchNorm beside a shortcut."""

    def __init__(self, given: int, made: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(given, made, 3, stride, 1, bias=False), nn.BatchNorm2d(made), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(made, made, 3, 1, 1, bias=False), nn.BatchNorm2d(made))
        self.beside = nn.Sequential(nn.Conv2d(given, made, 1, stride, bias=False), nn.BatchNorm2d(made))

    def forward(self, x: Tensor) -> Tensor:
        """Return activations [rows, made, height / stride, width / stride]."""
        return functional.relu(self.second(self.first(x)) + self.beside(x))


class Residual(Workload):
    """Classify images of digits with a small residual network."""

    def __init__(self, images: Images, batch: int, steps: int, decay: float | None, *, paced: bool) -> None:
        self.images, self.batch, self.steps = images, batch, steps
        self.paced, self.decay = paced, decay
        self.average = None if decay is None else EMA(decay)

    def model(self) -> nn.Module:
        """Return the network."""
        stem = [nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
        blocks = [Block(8, 8, 1), Block(8, 16, 2), Block(16, 32, 2)]
        return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))

    def data(self) -> Data:
        """Return the training images."""
        return tensors(self.images.x, self.images.y, batch_size=self.batch)

    def evaluation_data(self) -> Data:
        """Return the test images."""
        return tensors(self.images.test_x, self.images.test_y, batch_size=500)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the cross-entropy."""
        return functional.cross_entropy(model(batch.x), batch.y)

    def optimizer(self, params: Sequence[nn.Parameter]) -> Optimizer:
        """Return SGD with momentum and weight decay."""
        return SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)

    def schedule(self, optimizer: Optimizer) -> lr_scheduler.LRScheduler | None:
        """Return a warm-up over a tenth of the steps and a cosine."""
        if not self.paced:
            return None
        warm = max(1, self.steps // 10)
        first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=warm)
        rest = lr_scheduler.CosineAnnealingLR(optimizer, max(1, self.steps - warm))
        return lr_scheduler.SequentialLR(optimizer, [first, rest], milestones=[warm])

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, float | Tensor]:
        """Return the share of images that are classified correctly."""
        return {"accuracy": (model(batch.x).argmax(dim=1) == batch.y).float().mean()}


def bench_parts(
    parts: Annotated[Sequence[str], Opt("Parts, each with those before it: batchnorm, schedule, ema.")] = PARTS,
    *,
    folder: ImagesFolder = None,
    seeds: Annotated[Sequence[int], Opt("Seeds, at least two, e.g. 0,1,2.")] = (0, 1, 2, 3, 4),
    rows: Annotated[int, Opt("Training images.", least=1)] = 4000,
    epochs: Annotated[int, Opt("Epochs of each run.", least=1)] = 4,
    batch: int = 16,
    workers: Annotated[int, Opt("Workers, which are threads.", least=1)] = 2,
    decay: Annotated[float, Opt("Decay of the average.")] = 0.99,
    report: Callable[[PartsRow], None] = lambda row: None,
) -> list[PartsRow]:
    """Train both forms with each seed and return a row for each of `parts`; `report` is called with each row.

    `batch` is the number of rows of a worker's batch, `rows` that of the training images that are used, and `decay`
    that of the average.

    Raises:
        ConfigError: there is no such part, or fewer than two seeds, or a file is missing.
    """
    for name in parts:
        if name not in PARTS:
            raise ConfigError(f"no part {name!r}; use some of {', '.join(PARTS)}", field="parts")
    if len(seeds) < 2:
        raise ConfigError("a standard error needs at least two seeds", field="seeds")
    whole = load(str(folder or FOLDER))
    images = Images(whole.x[:rows], whole.y[:rows], whole.test_x, whole.test_y)
    found = []
    for name in parts:
        steps = epochs * -(-len(images.x) // (batch * workers))
        work = Residual(images, batch, steps, decay if name == "ema" else None, paced=name != "batchnorm")
        scripts = [train_plain(work, seed, epochs, batch * workers) for seed in seeds]
        ours = [_train(work, seed, epochs, workers) for seed in seeds]
        differences = [own - script for own, (script, _) in zip(ours, scripts, strict=True)]
        last = [value for _, value in scripts if value is not None]
        row = PartsRow(
            name,
            len(seeds),
            statistics.mean(script for script, _ in scripts),
            statistics.mean(ours),
            statistics.mean(differences),
            statistics.stdev(differences) / len(seeds) ** 0.5,
            statistics.mean(last) if last else None,
        )
        found.append(row)
        report(row)
    return found


def _train(work: Residual, seed: int, epochs: int, workers: int) -> float:
    cluster = LocalCluster()
    try:
        result = train(work, workers=workers, epochs=epochs, seed=seed, progress=False, cluster=cluster)
    finally:
        cluster.close()
    return 100 * result.metrics["accuracy"]


def train_plain(work: Residual, seed: int, epochs: int, batch: int) -> tuple[float, float | None]:
    """Train in plain torch; return the accuracy in percent, and that of the average with the last statistics.

    The second is None without an average.
    """
    torch.manual_seed(seed)
    model = work.model()
    optimizer = work.optimizer(list(model.parameters()))
    schedule = work.schedule(optimizer)
    averages = []
    if (decay := work.decay) is not None:
        averages = [AveragedModel(model, avg_fn=_make_average(decay), use_buffers=buffers) for buffers in (True, False)]
    for _ in range(epochs):
        model.train()
        for rows in torch.split(torch.randperm(len(work.images.x)), batch):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(work.images.x[rows]), work.images.y[rows])
            torch.autograd.backward(loss)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            for average in averages:
                average.update_parameters(model)
    if not averages:
        return _measure_accuracy(work, model), None
    return _measure_accuracy(work, averages[0]), _measure_accuracy(work, averages[1])


def _make_average(decay: float) -> Callable[[Tensor, Tensor, Tensor | int], Tensor]:
    return lambda held, new, count: decay * held + (1 - decay) * new


@torch.no_grad()
def _measure_accuracy(work: Residual, model: nn.Module) -> float:
    model.eval()
    right = (model(work.images.test_x).argmax(dim=1) == work.images.test_y).float().mean()
    return 100 * float(right)
