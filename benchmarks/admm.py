"""Compare ADMM on rows sorted by label with parallel SGD, shuffled and not shuffled.

Handwritten digits, a network 784-hidden-10 (or without a hidden layer: convex), batches in float32. Each worker has one
contiguous part of the digits sorted by label: with four workers, two or three of the ten labels. `all_reduce` is the
result with all rows in one place. No Ray is used; workers are threads: seconds depend on this machine, accuracies do
not.

The cost of a shuffle: `data` are the seconds for batches (mean over workers, in shared memory). If each worker stores
only its own rows, a shuffle also moves rows: `moved` is by formula, (N - 1)/N of all rows at each epoch after the
first, 785 bytes for an image and its label; `line` is the time for it at a link's rate.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

import rayps
from benchmarks.robust import FOLDER, RobustDigits, digits
from rayps.cluster.local import LocalCluster
from rayps.core.errors import ConfigError
from rayps.core.families import Fixed
from rayps.data import Data
from rayps.runtime.training import train
from rayps.strategies.catalogue import parse, wire

ROW_BYTES = 785  # as MNIST's files have them


@dataclass(frozen=True, slots=True)
class ADMMRow:
    """One strategy; accuracies are means over the seeds."""

    strategy: str
    rows: str  # workers keep their rows, sorted by label, or get others each epoch
    epochs: int
    seeds: int
    meetings: int
    best: float  # of all epochs
    last: float
    least: float  # at the end, of all seeds
    bytes: float  # 10^6 bytes that all workers send in a run: models or gradients
    data: float  # seconds
    moved: float  # 10^6 bytes of rows
    line: float  # seconds
    seconds: float  # of a run, with evaluations
    primal: float | None  # at the last synchronization


class SortedDigits(RobustDigits):
    """Which digit an image shows; a run of the rows sorted by label for each worker that keeps its rows."""

    def __init__(self, folder: Path, workers: int, rows: int, batch: int, lr: float, hidden: int) -> None:
        super().__init__(folder, "sorted", workers, rows, batch, lr)
        self.hidden = hidden

    def model(self) -> nn.Module:
        """One hidden layer, or none."""
        if not self.hidden:
            return nn.Linear(784, 10)
        return nn.Sequential(nn.Linear(784, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 10))

    def data(self) -> Data:
        """One shard a worker."""
        x, y = digits(self.folder, learnt=True, rows=self.count)
        return rayps.data.tensors(x, y, batch_size=self.batch, client=rayps.data.shards(1, clients=self.clients))


def contenders(epochs: int, steps: int, penalty: float) -> list[str]:
    """Return strategies that synchronize every step, at the end, once per epoch of `steps` rounds, and ten times."""
    tenth = max(1, steps // 10)
    kinds = [(1, "true"), (epochs, "true"), (1, "false"), (epochs, "false"), (epochs * steps // tenth, "false")]
    averaged = [f"parallel_sgd:rounds={count},shuffle={shuffle}" for count, shuffle in dict.fromkeys(kinds)]
    admm = [f"admm:penalty={penalty:g},balance=false,local_steps={k}" for k in (steps, tenth)]
    return ["all_reduce", *averaged, *admm]


def bench_admm(
    workers: int = 4,
    strategies: Sequence[str] = (),
    *,
    epochs: int = 20,
    rows: int = 6000,
    batch: int = 32,
    lr: float = 0.1,
    hidden: int = 64,
    penalty: float = 1.0,
    seeds: int = 1,
    rate: float = 1e9,
    folder: Path | None = None,
) -> list[ADMMRow]:
    """Measure each strategy; `rate` in bits per second of each worker's link.

    Raises:
        ConfigError: a strategy cannot be read, a number is too small, or there are no digits.
    """
    folder = FOLDER if folder is None else folder
    for field, given in (("workers", workers), ("epochs", epochs), ("rows", rows), ("seeds", seeds)):
        if given < (2 if field == "workers" else 1):
            raise ConfigError(f"{field} is {given}: give {2 if field == 'workers' else 1} or more", field=field)
    work = SortedDigits(folder, workers, rows, batch, lr, hidden)
    found = []
    for text in strategies or contenders(epochs, work.data().steps(workers), penalty):
        (phase,) = parse(text)
        kept = phase.strategy.rows == Fixed()
        runs = [_run(work, wire([phase]), workers, epochs, seed) for seed in range(seeds)]
        moved = 0.0 if kept else (epochs - 1) * work.data().rows() * (workers - 1) / workers * ROW_BYTES
        mean = {name: sum(run[name] for run in runs) / seeds for name in ("best", "last", "bytes", "data", "seconds")}
        found.append(
            ADMMRow(
                text,
                "sorted by label" if kept else "dealt anew",
                epochs,
                seeds,
                runs[0]["meetings"],
                mean["best"],
                mean["last"],
                min(run["last"] for run in runs),
                mean["bytes"] / 1e6,
                mean["data"],
                moved / 1e6,
                8 * moved / workers / rate,
                mean["seconds"],
                runs[0]["primal"],
            )
        )
    return found


def _run(work: SortedDigits, strategy: Any, workers: int, epochs: int, seed: int) -> dict[str, Any]:
    cluster, began = LocalCluster(), time.perf_counter()
    try:
        result = train(
            work, strategy=strategy, workers=workers, epochs=epochs, seed=seed, cluster=cluster, progress=False
        )
    finally:
        cluster.close()
    columns = {
        name: [v for v in result.history[name].to_pylist() if v is not None] for name in result.history.column_names
    }
    accuracies = [*columns.get("evaluation_accuracy", []), result.metrics["accuracy"]]
    met = columns.get("met", [1] * result.history.num_rows)  # without it they synchronize every step
    return {
        "best": max(accuracies),
        "last": accuracies[-1],
        "bytes": sum(columns["bytes"]),
        "meetings": sum(met),
        "data": sum(columns.get("data", [])),
        "seconds": time.perf_counter() - began,
        "primal": columns["primal"][-1] if "primal" in columns else None,
    }
