"""Measure client-level privacy: accuracy by epsilon at the population that there is, and scaled to larger populations.

The clients are the writers of MNIST's images (`mnist_writer_ids.npz`), or equal parts of the digits in
`examples/data` if there are no writers. The model is a linear head on fixed features of an image, which no data was
needed for: the energies of four edge directions in 7 x 7 cells. Each writer trains one local epoch.

`measured` rows are private runs: their epsilon is spent. `scaled` rows simulate a larger population as pfl-research
does (Granqvist et al., "pfl-research: simulation framework for accelerating research in private federated learning",
NeurIPS 2024, section 4.4): a round still trains the cohort m that there is, and the noise is that which the mean of a
cohort K m of a population K N would have. Epsilon is that of the larger population. Such a run is no private run.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

import rayps
from rayps.bench.table import BenchRow, Opt
from rayps.cluster.local import Cluster
from rayps.data import Batch, Data
from rayps.privacy.account import solve_noise
from rayps.privacy.mechanism import Mechanism
from rayps.privacy.options import dp
from rayps.runtime.training import train
from rayps.strategies.fedavg import FedAvg
from rayps.workload.base import Workload

FOLDER = Path(rayps.__file__).resolve().parent.parent / "examples" / "data"
CELLS, DIRECTIONS = 7, 4
PARTS = 300  # clients if there are no writers

Rows = tuple[Tensor, Tensor, NDArray[np.int64]]  # features, labels, clients


@dataclass(frozen=True, slots=True)
class PrivateRow(BenchRow):
    """One run."""

    columns: ClassVar[str] = (
        "kind: run | epsilon | population: clients | cohort: a round | noise: noise multiplier | accuracy | "
        "seconds: s a round"
    )

    kind: str  # measured, scaled or open
    epsilon: float  # infinity without noise
    population: int
    cohort: float  # expected clients of a round of this population
    noise: float  # noise multiplier
    accuracy: float  # of the head on test images, at the end
    seconds: float  # of a round, median


class Head(Workload):
    """A linear head on fixed features of digits, which are divided among writers."""

    def __init__(self, folder: Path, lr: float) -> None:
        self.folder, self.lr = folder, lr

    def model(self) -> nn.Module:
        """Return the head."""
        return nn.Linear(CELLS * CELLS * DIRECTIONS, 10)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy."""
        return functional.cross_entropy(model(batch.x), batch.y)

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the accuracy."""
        return {"accuracy": (model(batch.x).argmax(dim=1) == batch.y).double().mean()}

    def optimizer(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(params, lr=self.lr)

    def data(self) -> Data:
        """Return the writers' images."""
        x, y, who = read_rows(self.folder, training=True)
        return rayps.data.tensors(x, y, batch_size=10, client=who)

    def evaluation_data(self) -> Data:
        """Return test images."""
        x, y, _ = read_rows(self.folder, training=False)
        return rayps.data.tensors(x, y, batch_size=500)


def read_rows(folder: Path, training: bool) -> Rows:
    """Return features [n, 196], labels [n] and the client of each image."""
    part, stem = ("train", "train") if training else ("test", "t10k")
    if (folder / f"{stem}-images-idx3-ubyte.gz").exists():
        raw = gzip.decompress((folder / f"{stem}-images-idx3-ubyte.gz").read_bytes())
        images = np.frombuffer(raw, np.uint8, offset=16).reshape(-1, 28, 28)
        labels = np.frombuffer(
            gzip.decompress((folder / f"{stem}-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8
        )
        writers = folder.parent / "mnist_writers" / "mnist_writer_ids.npz"
        who = np.load(writers)[f"{part}_writer"] if writers.exists() else np.arange(len(labels)) % PARTS
    else:
        table = pq.read_table(folder / ("digits.parquet" if training else "digits_test.parquet"))
        images = np.asarray(table["pixels"].to_pylist(), dtype=np.uint8).reshape(-1, 28, 28)
        labels = table["digit"].to_numpy()
        who = np.arange(len(labels)) % PARTS
    return compute_features(images), torch.from_numpy(labels.astype(np.int64)), who.astype(np.int64)


def compute_features(images: NDArray[np.uint8]) -> Tensor:
    """Return for each image the energies of four edge directions in 7 x 7 cells, centred, with the norm 8."""
    found = []
    for at in range(0, len(images), 4096):
        x = torch.from_numpy(images[at : at + 4096].astype(np.float32) / 255)[:, None]
        kernels = torch.tensor(
            [
                [[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]],
                [[-1, -2, -1], [0, 0, 0], [1, 2, 1]],
                [[0, 1, 2], [-1, 0, 1], [-2, -1, 0]],
                [[2, 1, 0], [1, 0, -1], [0, -1, -2]],
            ],
            dtype=torch.float32,
        )[:, None]
        edges = functional.conv2d(x, kernels, padding=1).abs()
        cells = functional.adaptive_avg_pool2d(edges, CELLS).flatten(1)
        energies = cells.sqrt()
        found.append(functional.normalize(energies - energies.mean(dim=1, keepdim=True), dim=1) * 8)
    return torch.cat(found)


def bench_private_clients(
    cluster: Cluster | None,
    folder: Annotated[
        Path,
        Opt(
            "A folder with MNIST's four files, beside a folder mnist_writers with mnist_writer_ids.npz. By default "
            "examples/data, with 300 equal parts as clients.",
            "--data",
        ),
    ] = FOLDER,
    *,
    epsilons: Annotated[Sequence[float], Opt("Budgets.")] = (8.0, 4.0, 2.0, 1.0),
    scales: Annotated[Sequence[int], Opt("Factors by which the population is scaled.")] = (10, 100),
    rounds: Annotated[int, Opt("Rounds.")] = 40,
    fraction: Annotated[float, Opt("The probability with which a client is drawn.")] = 0.2,
    clip: Annotated[float, Opt("The largest norm of an update.")] = 1.0,
    lr: Annotated[float, Opt("The clients' learning rate.")] = 0.2,
    delta: Annotated[float, Opt("Delta; divided by the scale for larger populations.")] = 1e-4,
    workers: Annotated[int, Opt("Workers; their number changes only the time.")] = 2,
) -> list[PrivateRow]:
    """Train one run without noise, one for each epsilon, and one for each scale of the population at each epsilon."""
    found = []
    clients = len(np.unique(read_rows(folder, training=True)[2]))

    def run(noise: float | None) -> tuple[float, float]:
        privacy = None if noise is None else dp(noise_multiplier=noise, clip=clip, delta=delta)
        strategy = FedAvg(fraction=fraction, privacy=privacy)
        result = train(
            Head(folder, lr),
            strategy=strategy,
            workers=workers,
            epochs=rounds,
            cluster=cluster,
            progress=False,
            evaluate_every=rounds,
        )
        times = np.diff(result.history.column("time").to_numpy())
        return result.metrics["accuracy"], float(np.median(times)) if len(times) else float("nan")

    accuracy, seconds = run(None)
    found.append(PrivateRow("open", float("inf"), clients, fraction * clients, 0.0, accuracy, seconds))
    for epsilon in epsilons:
        for scale in (1, *scales):
            # a population `scale` times as large, with the same fraction: the same noise multiplier, on a larger sum
            mechanism = solve_noise(
                dp(epsilon=epsilon, rounds=rounds, delta=delta / scale),
                lambda noise: Mechanism("poisson", noise, fraction),
            )
            accuracy, seconds = run(mechanism.noise_multiplier / scale)
            kind = "measured" if scale == 1 else "scaled"
            found.append(
                PrivateRow(
                    kind,
                    epsilon,
                    clients * scale,
                    fraction * clients * scale,
                    mechanism.noise_multiplier,
                    accuracy,
                    seconds,
                )
            )
    return found
