"""Compare ADMM on rows sorted by label with parallel SGD, shuffled and not shuffled.

The model of handwritten digits is a network 784-hidden-10, or a convex one without a hidden layer; batches are float32.
Under ADMM, and under parallel SGD without a shuffle, each worker has one contiguous part of the digits sorted by label
in all epochs: with four workers, two or three of the ten labels. `all_reduce` is the reference, because its workers get
rows of all labels. Workers are threads, and no Ray is used. Seconds depend on this machine; accuracies do not.

The columns `data`, `moved` and `line` show the cost of a shuffle. `data` is the time in which workers wait for batches,
as the mean over the workers; all rows are in this process's memory. If each worker stored only its own rows, a shuffle
would also send rows. `moved` is computed as (N - 1)/N of all rows in each epoch after the first, for N workers, with
785 bytes for an image and its label. `line` is the time to send these rows at a link's rate.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from rayps_client.errors import ConfigError
from torch import nn

import rayps
from benchmarks.federated.robust import FOLDER, RobustDigits, read_digits
from rayps.bench.table import BenchRow, ImagesFolder, Opt, Workers
from rayps.cluster.local import LocalCluster
from rayps.core.strategy.strategy_families import Fixed
from rayps.data import Data
from rayps.runtime.training import train
from rayps.strategies.catalogue import parse, wire

ROW_BYTES = 785  # bytes of an image and its label in MNIST's files


@dataclass(frozen=True, slots=True)
class ADMMRow(BenchRow):
    """One strategy. `best`, `last`, `bytes`, `data` and `seconds` are means over the seeds."""

    columns: ClassVar[str] = (
        "strategy | rows: a worker's rows | meetings: synchronizations | best: best accuracy | "
        "last: at the end | least: worst seed | bytes: MB sent | data: s for batches | moved: MB of rows | "
        "line: s on the link | seconds | primal: primal residual"
    )

    strategy: str
    rows: str  # "sorted by label": workers have the same rows in all epochs; "dealt anew": other rows in each epoch
    epochs: int
    seeds: int
    meetings: int  # number of synchronizations
    best: float  # the best accuracy of all epochs
    last: float  # the accuracy after the last epoch
    least: float  # the lowest `last` of all seeds
    bytes: float  # models or gradients that all workers send in a run, in 10^6 bytes
    data: float  # seconds in which a worker waits for batches
    moved: float  # rows that shuffles would send, in 10^6 bytes
    line: float  # seconds to send these rows
    seconds: float  # seconds of a run, including evaluations
    primal: float | None  # ADMM's primal residual at the last synchronization


class SortedDigits(RobustDigits):
    """Classify images of digits. Without a shuffle, a worker has one contiguous part of the rows sorted by label."""

    def __init__(self, folder: Path, workers: int, rows: int, batch: int, lr: float, hidden: int) -> None:
        super().__init__(folder, "sorted", workers, rows, batch, lr)
        self.hidden = hidden

    def model(self) -> nn.Module:
        """Return a network with one hidden layer, or with none."""
        if not self.hidden:
            return nn.Linear(784, 10)
        return nn.Sequential(nn.Linear(784, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 10))

    def data(self) -> Data:
        """Return the training images, divided into one shard by label for each worker."""
        x, y = read_digits(self.folder, learnt=True, rows=self.count)
        return rayps.data.tensors(x, y, batch_size=self.batch, client=rayps.data.shards(1, clients=self.clients))


def list_contenders(epochs: int, steps: int, penalty: float) -> list[str]:
    """Return the strategies to compare. They synchronize at different intervals.

    The intervals are: every step, only at the end, each epoch (of `steps` steps), and a tenth of an epoch.
    """
    tenth = max(1, steps // 10)
    kinds = [(1, "true"), (epochs, "true"), (1, "false"), (epochs, "false"), (epochs * steps // tenth, "false")]
    averaged = [f"parallel_sgd:rounds={count},shuffle={shuffle}" for count, shuffle in dict.fromkeys(kinds)]
    admm = [f"admm:penalty={penalty:g},balance=false,local_steps={k}" for k in (steps, tenth)]
    return ["all_reduce", *averaged, *admm]


def bench_admm(
    workers: Workers = 4,
    strategies: Annotated[
        Sequence[str],
        Opt(
            "A strategy as text; repeat the option for more. By default all_reduce, parallel_sgd with and without "
            "a shuffle, and admm.",
            "--strategy",
            split="",
        ),
    ] = (),
    *,
    epochs: Annotated[int, Opt("Epochs.")] = 20,
    rows: Annotated[int, Opt("Images to learn from.")] = 6000,
    batch: Annotated[int, Opt("Rows of a worker's batch.")] = 32,
    lr: Annotated[float, Opt("The learning rate.")] = 0.1,
    hidden: Annotated[int, Opt("Width of the hidden layer; 0 = none, a convex model.")] = 64,
    penalty: Annotated[float, Opt("ADMM's penalty.")] = 1.0,
    seeds: Annotated[int, Opt("Runs of each strategy, with seeds 0, 1, ...")] = 1,
    rate: Annotated[
        float, Opt("Rate of each worker's link in bits per second, for the time to send a shuffle's rows.")
    ] = 1e9,
    folder: ImagesFolder = None,
) -> list[ADMMRow]:
    """Measure each strategy. `rate` is the rate of each worker's link, in bits per second.

    Raises:
        ConfigError: a strategy cannot be read, a number is too small, or there are no digits.
    """
    folder = FOLDER if folder is None else folder
    for field, given in (("workers", workers), ("epochs", epochs), ("rows", rows), ("seeds", seeds)):
        if given < (2 if field == "workers" else 1):
            raise ConfigError(f"{field} is {given}: give {2 if field == 'workers' else 1} or more", field=field)
    work = SortedDigits(folder, workers, rows, batch, lr, hidden)
    found = []
    for text in strategies or list_contenders(epochs, work.data().steps(workers), penalty):
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
    met = columns.get("met", [1] * result.history.num_rows)  # without this column, workers synchronize in every step
    return {
        "best": max(accuracies),
        "last": accuracies[-1],
        "bytes": sum(columns["bytes"]),
        "meetings": sum(met),
        "data": sum(columns.get("data", [])),
        "seconds": time.perf_counter() - began,
        "primal": columns["primal"][-1] if "primal" in columns else None,
    }
