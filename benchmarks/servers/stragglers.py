"""Measure staleness with slow workers: the time until a model reaches a target accuracy.

Workers and a shard learn handwritten digits (`examples/data`) by softmax regression. In each round a worker sleeps,
which uses no CPU: it sleeps `pace` seconds in a normal round, and longer in a slow one. The bench reads the parameters
from the shard several times a second, and records when they first reach the target accuracy on test images.

- `come_and_go`: in a random tenth of its rounds each worker takes 5 times as long.
- `one_slow`: worker 0 takes 3 times as long throughout.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from rayps_client.errors import ConfigError, TrainingError
from torch import Tensor, nn
from torch.nn import functional

import rayps
from benchmarks.servers.backup_workers import bench_backup_workers
from rayps.bench.table import BenchRow, Opt, Workers
from rayps.cluster.local import Cluster
from rayps.core.job.records import Point
from rayps.core.job.user_module import pack
from rayps.core.rows.phase_rounds import Boundary
from rayps.data import Batch, Data, parquet
from rayps.data.base import random_of
from rayps.ps.client.session import Session
from rayps.ps.protocol.messages import GroupMessage
from rayps.runtime.driver.worker_group import WorkerGroup
from rayps.strategies.catalogue import parse
from rayps.tensors.flat import FlatModel
from rayps.worker.plan import EvaluationPlan, Orders, SnapshotPlan
from rayps.workload.base import Workload

SCENES = ("come_and_go", "one_slow")
STALENESS: tuple[int | None, ...] = (0, 8, None)
TARGET = 0.88  # accuracy on the test images
LEARNING_RATE = 0.1  # learning rate of plain SGD, the same for every staleness
BATCH = 32
POLL_SECONDS = 0.2
FOLDER = Path(rayps.__file__).resolve().parent.parent / "examples" / "data"


@dataclass(frozen=True, slots=True)
class StragglersRow(BenchRow):
    """One staleness in one scene. Figures are medians over the repeats, which have different seeds."""

    columns: ClassVar[str] = (
        "scene | staleness | seconds | rounds | idle: idle share | times_synchronous: x synchronous"
    )

    scene: str
    staleness: str  # as in the strategy's text form
    workers: int
    pace: float  # seconds of a normal round
    target: float
    repeats: int
    seconds: float  # seconds until the target was reached
    rounds: float  # rounds until the target was reached, as the mean over the workers
    idle: float  # share of the workers' time in which they waited in pulls and pushes
    times_synchronous: float | None  # seconds of staleness 0 / seconds


class Paced(Data):
    """A data source that delays each batch of another data source, to make some workers slow."""

    def __init__(self, rows: Data, scene: str, pace: float) -> None:
        self._rows, self._scene, self._pace = rows, scene, pace
        self.batch_size = rows.batch_size

    def check(self) -> None:
        """Check the other data source. Raises DataError if it cannot be used."""
        self._rows.check()

    def rows(self) -> int:
        """Return the number of rows in an epoch, over all ranks."""
        return self._rows.rows()

    def batches(self, *, rank: int, size: int, seed: int, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of the other data source; sleep before each batch."""
        slow = draw_factors(self._scene, rank, self.steps(size), seed, epoch)
        batches = self._rows.batches(rank=rank, size=size, seed=seed, epoch=epoch, start=start)
        for factor, batch in zip(slow[start:], batches, strict=True):
            time.sleep(factor * self._pace)
            yield batch


def draw_factors(scene: str, rank: int, steps: int, seed: int, epoch: int) -> list[float]:
    """Return, for each of a rank's rounds in an epoch, the factor by which the round is longer than normal."""
    if scene == "one_slow":
        return [3.0 if rank == 0 else 1.0] * steps
    slow = set(random_of(seed, epoch, rank).choice(steps, max(1, steps // 10), replace=False).tolist())
    return [5.0 if step in slow else 1.0 for step in range(steps)]


class SlowDigits(Workload):
    """A workload: softmax regression on digits, with delayed batches."""

    def __init__(self, folder: Path, scene: str, pace: float) -> None:
        self.folder, self.scene, self.pace = folder, scene, pace

    def model(self) -> nn.Module:
        """Return a model of 7,850 parameters, which are all zero, so every seed starts from the same model."""
        model = nn.Linear(784, 10)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        return model

    def data(self) -> Data:
        """Return the 10,000 training images, with delayed batches."""
        return Paced(_read_digits(self.folder / "digits.parquet", BATCH), self.scene, self.pace)

    def evaluation_data(self) -> Data:
        """Return 2,000 test images."""
        return _read_digits(self.folder / "digits_test.parquet", 2000)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the cross-entropy."""
        return functional.cross_entropy(model(batch.x), batch.y)

    def optimizer(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(params, lr=LEARNING_RATE)


def _read_digits(path: Path, batch: int) -> Data:
    return parquet(path, features="pixels", label="digit", scale=1 / 255, batch_size=batch)


def bench_stragglers(
    cluster: Cluster,
    workers: int = 4,
    scenes: Sequence[str] = SCENES,
    *,
    pace: float = 0.1,
    repeats: int = 3,
    target: float = TARGET,
    folder: Path | None = None,
    limit: float = 300.0,
) -> list[StragglersRow]:
    """Measure each of `scenes` with each staleness. A run may last at most `limit` seconds.

    Raises:
        ConfigError: there is no such scene, or `folder` has no digits.
        TrainingError: a run failed, or did not reach the target within the limit.
    """
    folder = folder or FOLDER
    for scene in scenes:
        if scene not in SCENES:
            raise ConfigError(f"no scene {scene!r}; use some of {', '.join(SCENES)}", field="scenes")
    if not (folder / "digits.parquet").is_file():
        raise ConfigError(f"there is no digits.parquet in {folder}: give the folder with --data", field="data")
    rows: list[StragglersRow] = []
    for scene in scenes:
        group = _SlowGroup(cluster, SlowDigits(folder, scene, pace), workers)
        try:
            found = _take_turns(group, repeats, target, limit)
        finally:
            group.close()
        rows += _make_rows(scene, workers, pace, target, found)
    return rows


@dataclass(frozen=True, slots=True)
class _Run:
    seconds: float
    rounds: float
    idle: float


class _SlowGroup:
    """Workers and a shard that train with one staleness after another."""

    def __init__(self, cluster: Cluster, workload: SlowDigits, workers: int) -> None:
        self._group = WorkerGroup(cluster, pack(workload), workers, {"cpu": 1.0}, capture=False)
        self._generation = 0
        self._group.start(timeout=60.0)
        self._start = self._group.initial(seed=0)
        self._start.positions = [0] * workers
        self._flat = FlatModel(workload.model())
        test = workload.evaluation_data()
        self._test = next(test.batches(rank=0, size=1, seed=0, epoch=0))

    def run(self, staleness: int | None, seed: int, target: float, limit: float) -> _Run:
        """Train with this staleness until the accuracy reaches `target`; return the run's figures."""
        self._generation += 1
        strategy = parse({"name": "parameter_server", "shards": 1, "staleness": staleness})[0].strategy
        snapshots, end = SnapshotPlan(Boundary(0, -1)), 1_000_000
        self._group.begin(
            Orders(self._generation, strategy, seed, end, snapshots, EvaluationPlan(0), 60.0), self._start
        )
        watcher = self._group.reader()
        points: list[Point] = []
        began = time.monotonic()
        try:
            while (accuracy_and_steps := self._measure_accuracy(watcher))[0] < target:
                if time.monotonic() - began > limit:
                    raise TrainingError(f"accuracy {target} was not reached within {limit:g} s under {strategy}")
                points += self._poll()
                time.sleep(POLL_SECONDS)
            seconds = time.monotonic() - began
        finally:
            watcher.close()
        for _ in range(3):  # the last metric points are still in transit
            time.sleep(POLL_SECONDS)
            points += self._poll()
        points = [point for point in points if point["round"]]  # the first round includes the start
        idle = sum(point["wait"] for point in points) / sum(point["seconds"] for point in points)
        return _Run(seconds, accuracy_and_steps[1] / (1 if staleness == 0 else len(self._group.workers)), idle)

    def close(self) -> None:
        """Stop workers and shards."""
        self._group.close()

    def _poll(self) -> list[Point]:
        points = self._group.poll()
        for member in [*self._group.workers, *self._group.shards]:
            error = getattr(member.facts, "error", None)
            if member.dead or error is not None:
                raise TrainingError(f"{member.name} failed: {member.dead or error}")
        return [point for point in points if point["kind"] == "round"]

    def _measure_accuracy(self, watcher: Session) -> tuple[float, int]:
        """Return the accuracy of the shard's current parameters, and its optimizer's number of steps."""
        found = watcher.exchange(GroupMessage.READ, {0: b""})
        self._flat.vector.copy_(torch.frombuffer(bytearray(found.pieces[0]), dtype=self._start.layout.dtype))
        with torch.no_grad():
            predicted = self._flat.model(self._test.x).argmax(dim=1)
        return float((predicted == self._test.y).float().mean()), found.version


def _take_turns(group: _SlowGroup, repeats: int, target: float, limit: float) -> dict[int | None, list[_Run]]:
    found: dict[int | None, list[_Run]] = {staleness: [] for staleness in STALENESS}
    for turn in range(repeats):
        order = [STALENESS[(turn + i) % len(STALENESS)] for i in range(len(STALENESS))]
        for staleness in order:
            found[staleness].append(group.run(staleness, turn, target, limit))
    return found


def _make_rows(
    scene: str, workers: int, pace: float, target: float, found: dict[int | None, list[_Run]]
) -> list[StragglersRow]:
    seconds = {staleness: statistics.median(run.seconds for run in runs) for staleness, runs in found.items()}
    names = {staleness: "none" if staleness is None else str(staleness) for staleness in found}
    return [
        StragglersRow(
            scene,
            names[staleness],
            workers,
            pace,
            target,
            len(runs),
            seconds[staleness],
            statistics.median(run.rounds for run in runs),
            statistics.median(run.idle for run in runs),
            seconds[0] / seconds[staleness],
        )
        for staleness, runs in found.items()
    ]


def bench_slow_workers(
    cluster: Cluster,
    workers: Workers = 4,
    scenes: Annotated[
        Sequence[str],
        Opt(
            "come_and_go (each worker takes 5 times as long in a random tenth of its "
            "rounds), one_slow (worker 0 takes 3 times as long)."
        ),
    ] = SCENES,
    *,
    pace: Annotated[float, Opt("Seconds of an ordinary round, in which the worker sleeps.")] = 0.1,
    repeats: Annotated[int, Opt("Number of runs of each scene and staleness, with different seeds.")] = 3,
    folder: Annotated[Path | None, Opt("Folder with digits.parquet; default: examples/data.", "--data")] = None,
    backup: Annotated[int, Opt("Backup workers: if above 0, measure a step with and without them instead.")] = 0,
    strategy: Annotated[str, Opt("The strategy with backup workers: all_reduce or parameter_server.")] = "all_reduce",
    steps: Annotated[int, Opt("Steps of each run with backup workers.")] = 300,
) -> Sequence[BenchRow]:
    """Measure the time to equal accuracy, or what backup workers save. Raises the errors of the measurement."""
    if backup:
        return bench_backup_workers(cluster, workers, backup, strategy=strategy, pace=pace, steps=steps)
    return bench_stragglers(cluster, workers, scenes, pace=pace, repeats=repeats, folder=folder)
