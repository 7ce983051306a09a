"""Measure row-level differential privacy beside Opacus: accuracy on digits at given epsilons, and the time of a step.

Both train the small convolutional network of Opacus's MNIST example (26,010 parameters) by DP-SGD, with the same lot,
clip, noise, rate and number of steps. Its activation is tanh, which loses less by clipping (Papernot et al.). The noise
is the least with which the steps stay within epsilon, as rayps's accountant finds it; Opacus then reports what its own
accountant (PRV) finds for the same steps. Opacus is not a dependency of rayps: `pip install opacus`.

Opacus: Yousefpour et al., "Opacus: User-friendly differential privacy library in PyTorch", 2021. Tanh: Papernot,
Thakurta, Song, Chien, Erlingsson, "Tempered sigmoid activations for deep learning with differential privacy", 2021.
"""

from __future__ import annotations

import importlib
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from rayps_client.errors import ConfigError
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.algorithms.learning import Images, load
from rayps import data
from rayps.bench.table import BenchRow, Opt
from rayps.cluster.local import LocalCluster
from rayps.data import Batch, Data
from rayps.privacy import accountant
from rayps.privacy.mechanism import Mechanism
from rayps.privacy.options import dp
from rayps.runtime.training import train
from rayps.strategies.all_reduce import AllReduce
from rayps.workload.base import Workload

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "data"
CONTENDERS = ("rayps", "opacus")
DELTA = 1e-5
_WARM = 3  # steps that are not timed


@dataclass(frozen=True, slots=True)
class Setup:
    """What both contenders have in common. `steps` of `planned` steps are run; the noise is for all of them."""

    noise: float
    lot: int
    physical: int
    clip: float
    rate: float
    planned: int
    steps: int
    seed: int
    threads: int


@dataclass(frozen=True, slots=True)
class PrivacyRow(BenchRow):
    """One run. `spent` is epsilon of its steps, as the contender's own accountant finds it."""

    columns: ClassVar[str] = "epsilon | contender | noise | steps | accuracy | spent | step_ms: ms a step"

    contender: str
    epsilon: float
    noise: float
    steps: int
    accuracy: float
    spent: float
    step_ms: float  # median time of a step, in milliseconds

    @property
    def note(self) -> str:
        """The row in a line."""
        accuracy = f"accuracy {self.accuracy:.4f}, {self.step_ms:.1f} ms a step"
        return f"{self.contender} at epsilon {self.epsilon:g}: {accuracy}"


class PrivateDigits(Workload):
    """Which digit an image shows, by a small convolutional network."""

    def __init__(self, images: Images, lot: int, rate: float) -> None:
        self.images, self.lot, self.rate = images, lot, rate

    def model(self) -> nn.Module:
        """Return two convolutions and two linear layers."""
        return make_network()

    def data(self) -> Data:
        """Return the training images in lots."""
        return data.tensors(self.images.x, self.images.y, batch_size=self.lot)

    def evaluation_data(self) -> Data:
        """Return the test images, which count as public."""
        return data.tensors(self.images.test_x, self.images.test_y, batch_size=1000)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the cross-entropy."""
        return functional.cross_entropy(model(batch.x), batch.y)

    def optimizer(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(params, lr=self.rate)

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the accuracy."""
        return {"accuracy": (model(batch.x).argmax(dim=1) == batch.y).float().mean()}


def make_network() -> nn.Module:
    """Return the network of Opacus's MNIST example with tanh, for rows of 784 pixels."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 16, 8, 2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


def bench_privacy(
    folder: Annotated[
        str, Opt("A folder with digits.parquet and digits_test.parquet, or with MNIST's idx.gz files.", "--data")
    ] = str(EXAMPLES),
    epsilons: Annotated[Sequence[float], Opt("Values of epsilon, e.g. 8,3,1.", "--epsilon")] = (8.0, 3.0, 1.0),
    contenders: Annotated[Sequence[str], Opt("rayps, opacus.")] = CONTENDERS,
    *,
    epochs: Annotated[float, Opt("Epochs, for which the noise is found.")] = 10.0,
    steps: Annotated[int | None, Opt("Run only so many of their steps, to measure the time.")] = None,
    lot: Annotated[int, Opt("Rows that are drawn in a step on average.")] = 1200,
    physical: Annotated[int, Opt("Rows whose gradients are in memory at once.")] = 1200,
    clip: Annotated[float, Opt("The largest norm of a row's gradient.")] = 0.5,
    rate: Annotated[float, Opt("Learning rate of SGD.")] = 8.0,
    seed: Annotated[int, Opt("Seed of the parameters.")] = 0,
    threads: Annotated[int | None, Opt("Threads of torch; by default one for each processor.")] = None,
    report: Callable[[PrivacyRow], None] = lambda row: None,
) -> list[PrivacyRow]:
    """Measure each contender at each epsilon. The noise is for `epochs`; `steps` runs only so many of their steps.

    Both use `threads` threads of torch, by default one for each processor.

    Raises:
        ConfigError: there are no images in `folder`, a contender is unknown, or its library is not installed.
    """
    for name in contenders:
        if name not in CONTENDERS:
            raise ConfigError(f"contender {name!r} is unknown: give {', '.join(CONTENDERS)}", field="contenders")
    images, rows = load(folder), list[PrivacyRow]()
    planned = round(epochs * len(images.x) / lot)
    probability = lot / len(images.x)
    for epsilon in epsilons:
        noise = accountant.find_noise(lambda z: Mechanism("poisson", z, probability), epsilon, DELTA, planned)
        cores = threads or os.cpu_count() or 1
        setup = Setup(noise, lot, physical, clip, rate, planned, min(planned, steps or planned), seed, cores)
        for name in contenders:
            row = (_measure_rayps if name == "rayps" else _measure_opacus)(images, epsilon, setup)
            rows.append(row)
            report(row)
    return rows


def _measure_rayps(images: Images, epsilon: float, setup: Setup) -> PrivacyRow:
    spec = dp(noise_multiplier=setup.noise, clip=setup.clip, delta=DELTA, physical_batch=setup.physical)
    cluster = LocalCluster()
    try:
        result = train(
            PrivateDigits(images, setup.lot, setup.rate),
            strategy=AllReduce(privacy=spec),
            steps=setup.steps,
            evaluate_every=setup.steps,
            seed=setup.seed,
            resources={"cpu": setup.threads},
            cluster=cluster,
            progress=False,
        )
    finally:
        cluster.close()
    assert result.privacy is not None, "the run is private"
    seconds = result.history.column("seconds").to_pylist()
    accuracy, spent = result.metrics["accuracy"], float(str(result.privacy["epsilon"]))
    return PrivacyRow("rayps", epsilon, setup.noise, setup.steps, accuracy, spent, _find_median(seconds))


def _measure_opacus(images: Images, epsilon: float, setup: Setup) -> PrivacyRow:
    try:
        opacus: Any = importlib.import_module("opacus")
        memory: Any = importlib.import_module("opacus.utils.batch_memory_manager")
    except ImportError as error:
        raise ConfigError(
            "opacus is not installed: pip install opacus, or leave it out of --contenders", field="contenders"
        ) from error
    warnings.filterwarnings("ignore", module="opacus")
    warnings.filterwarnings("ignore", module="torch")
    torch.manual_seed(setup.seed)
    torch.set_num_threads(setup.threads)
    model = make_network()
    rows = torch.utils.data.TensorDataset(images.x, images.y)
    engine = opacus.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=setup.rate),
        data_loader=torch.utils.data.DataLoader(rows, batch_size=setup.lot),
        noise_multiplier=setup.noise,
        max_grad_norm=setup.clip,
    )
    seconds, done = list[float](), 0
    while done < setup.steps:
        with memory.BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=setup.physical, optimizer=optimizer
        ) as lots:
            began = time.perf_counter()
            for x, y in lots:
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if optimizer._is_last_step_skipped:  # a lot of several physical batches
                    continue
                now = time.perf_counter()
                seconds.append(now - began)
                began, done = now, done + 1
                if done == setup.steps:
                    break
    model.eval()
    with torch.no_grad():
        right = model(images.test_x).argmax(dim=1) == images.test_y
    accuracy, spent = float(right.float().mean()), float(engine.get_epsilon(DELTA))
    return PrivacyRow("opacus", epsilon, setup.noise, setup.steps, accuracy, spent, _find_median(seconds))


def _find_median(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds[_WARM:] or seconds)
