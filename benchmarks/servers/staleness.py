"""Measure the adaptive staleness bound beside fixed ones, with slow workers: the time until a target loss is reached.

The scenes are those of `benchmarks.servers.stragglers`. In `momentum`, worker 0 is slow as in `one_slow`, and the
optimizer has momentum and a large learning rate, so that old pushes disturb the others. The bench reads the parameters
from the shard several times a second, and records when the loss on test images is first at most the target.

`simulate_staleness` does the same in virtual time: see `benchmarks.servers.virtual_staleness`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from rayps_client.errors import ConfigError, TrainingError
from torch import nn
from torch.nn import functional

from benchmarks.servers.stragglers import BATCH, FOLDER, SlowDigits
from benchmarks.servers.virtual_staleness import VirtualJob
from rayps.bench.table import BenchRow, Opt, Workers
from rayps.cluster.local import Cluster
from rayps.core.job.records import Point
from rayps.core.job.user_module import pack
from rayps.core.rows.phase_rounds import Boundary
from rayps.core.strategy.adaptive_staleness import FIRST
from rayps.core.strategy.topology import AUTO, servers_of
from rayps.data import parquet
from rayps.ps.client.session import Session
from rayps.ps.protocol.messages import GroupMessage
from rayps.runtime.driver.bound_mover import BoundMover
from rayps.runtime.driver.worker_group import WorkerGroup
from rayps.runtime.records.journal import Journal
from rayps.strategies.catalogue import parse
from rayps.tensors.flat import FlatModel
from rayps.worker.plan import EvaluationPlan, Orders, SnapshotPlan

SCENES = ("come_and_go", "one_slow", "momentum")
STALENESS: tuple[int | str | None, ...] = (0, 2, 8, None, AUTO)
TARGET = 0.45  # mean cross-entropy on the test images
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class StalenessRow(BenchRow):
    """One staleness in one scene. Figures are medians over the seeds."""

    columns: ClassVar[str] = (
        "scene | staleness | seconds | times_best: x best fixed | rounds | moves | last: last bounds"
    )

    scene: str
    staleness: str  # as in the strategy's text form
    workers: int
    pace: float  # seconds of a normal round
    target: float
    seeds: int
    seconds: float  # seconds until the target was reached
    times_best: float  # seconds / seconds of the fastest fixed staleness
    rounds: float  # rounds until the target was reached, as the mean over the workers
    moves: float  # number of moves of the bound
    last: str  # the bounds at the end, one for each seed


class MomentumDigits(SlowDigits):
    """A workload: `SlowDigits` with momentum and a learning rate near the largest stable one."""

    def optimizer(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(params, lr=0.2, momentum=0.9)


@dataclass(frozen=True, slots=True)
class StalenessRun:
    """The figures of one run."""

    seconds: float
    rounds: float
    bounds: tuple[int | None, ...]  # the bounds that followed each other; one if the bound did not move


def bench_staleness(
    cluster: Cluster,
    workers: int = 4,
    scenes: Sequence[str] = SCENES,
    *,
    pace: float = 0.1,
    seeds: Sequence[int] = range(5),
    target: float = TARGET,
    folder: Path | None = None,
    limit: float = 300.0,
) -> list[StalenessRow]:
    """Measure each of `scenes` with each staleness and each of `seeds`. A run may last at most `limit` seconds.

    A run that does not reach the target counts `limit` seconds.

    Raises:
        ConfigError: there is no such scene, or `folder` has no digits.
        TrainingError: a worker or the shard failed.
    """
    rows: list[StalenessRow] = []
    for scene, work in make_workloads(scenes, folder or FOLDER, pace):
        group = _Bounded(cluster, work, workers)
        found: dict[int | str | None, list[StalenessRun]] = {staleness: [] for staleness in STALENESS}
        try:
            for turn, seed in enumerate(seeds):
                for i in range(len(STALENESS)):
                    staleness = STALENESS[(turn + i) % len(STALENESS)]
                    found[staleness].append(group.run(staleness, seed, target, limit))
        finally:
            group.close()
        rows += _make_rows(scene, workers, pace, target, found)
    return rows


def simulate_staleness(
    workers: int = 4,
    scenes: Sequence[str] = SCENES,
    *,
    pace: float = 0.1,
    seeds: Sequence[int] = range(5),
    target: float = TARGET,
    folder: Path | None = None,
    limit: float = 300.0,
) -> list[StalenessRow]:
    """Return the rows of `bench_staleness` in virtual time. Raises as it does."""
    rows: list[StalenessRow] = []
    for scene, work in make_workloads(scenes, folder or FOLDER, pace):
        data = parquet(
            work.folder / "digits.parquet", features="pixels", label="digit", scale=1 / 255, batch_size=BATCH
        )
        found: dict[int | str | None, list[StalenessRun]] = {}
        for staleness in STALENESS:
            strategy = parse({"name": "parameter_server", "staleness": staleness})[0].strategy
            for seed in seeds:
                job = VirtualJob(work, data, strategy, workers, seed=seed)
                found.setdefault(staleness, []).append(_simulate(job, staleness, target, limit))
        rows += _make_rows(scene, workers, pace, target, found)
    return rows


def _simulate(job: VirtualJob, staleness: int | str | None, target: float, limit: float) -> StalenessRun:
    work, evaluate_at = job.workload, 0.0
    test = next(iter(work.evaluation_data().batches(rank=0, size=1, seed=0, epoch=0)))
    while job.now < limit:
        job.advance()
        if job.now >= evaluate_at:
            evaluate_at = job.now + 2 * work.pace
            if job.loss(test) <= target:
                break
    rounds = sum(job.shard.ledger.marks.values()) / job.shard.size
    first = FIRST if staleness == AUTO else staleness
    return StalenessRun(job.now, rounds, (first, *(event["new"] for event in job.events)))  # type: ignore[arg-type]


def make_workloads(scenes: Sequence[str], folder: Path, pace: float) -> list[tuple[str, SlowDigits]]:
    """Return each scene with its workload. Raises ConfigError if there is no such scene, or `folder` has no digits."""
    for scene in scenes:
        if scene not in SCENES:
            raise ConfigError(f"no scene {scene!r}; use some of {', '.join(SCENES)}", field="scenes")
    if not (folder / "digits.parquet").is_file():
        raise ConfigError(f"there is no digits.parquet in {folder}: give the folder with --data", field="data")
    kinds = {"momentum": (MomentumDigits, "one_slow")}
    found = [(scene, kinds.get(scene, (SlowDigits, scene))) for scene in scenes]
    return [(scene, kind(folder, inner, pace)) for scene, (kind, inner) in found]


class _Bounded:
    """Workers and a shard that train with one staleness after another."""

    def __init__(self, cluster: Cluster, workload: SlowDigits, workers: int) -> None:
        self._group = WorkerGroup(cluster, pack(workload), workers, {"cpu": 1.0}, capture=False)
        self._generation = 0
        self._group.start(timeout=60.0)
        self._start = self._group.initial(seed=0)
        self._start.positions = [0] * workers
        self._flat = FlatModel(workload.model())
        test = workload.evaluation_data()
        self._test = next(iter(test.batches(rank=0, size=1, seed=0, epoch=0)))

    def run(self, staleness: int | str | None, seed: int, target: float, limit: float) -> StalenessRun:
        """Train with this staleness until the loss is at most `target`; return the run's figures."""
        self._generation += 1
        strategy = parse({"name": "parameter_server", "shards": 1, "staleness": staleness})[0].strategy
        self._group.begin(
            Orders(self._generation, strategy, seed, 1_000_000, SnapshotPlan(Boundary(0, -1)), EvaluationPlan(0), 60.0),
            self._start,
        )
        journal = Journal()
        mover = BoundMover(journal)
        mover.begin(strategy)
        watcher = self._group.reader()
        began = time.monotonic()
        try:
            while (found := self._measure_loss(watcher))[0] > target and time.monotonic() - began < limit:
                mover.follow(self._group, self._poll())
                time.sleep(POLL_SECONDS)
            seconds = time.monotonic() - began
        finally:
            watcher.close()
        servers = servers_of(strategy)
        assert servers is not None, "parameter_server has servers"
        steps = found[1] / (1 if servers.in_step else len(self._group.workers))
        return StalenessRun(seconds, steps, (servers.staleness, *(event["new"] for event in journal.events)))

    def close(self) -> None:
        """Stop workers and shards."""
        self._group.close()

    def _poll(self) -> list[Point]:
        points = self._group.poll()
        for member in self._group.members:
            error = getattr(member.facts, "error", None)
            if member.dead or error is not None:
                raise TrainingError(f"{member.name} failed: {member.dead or error}")
        return points

    def _measure_loss(self, watcher: Session) -> tuple[float, int]:
        """Return the test loss of the shard's current parameters, and its optimizer's number of steps."""
        found = watcher.exchange(GroupMessage.READ, {0: b""})
        self._flat.vector.copy_(torch.frombuffer(bytearray(found.pieces[0]), dtype=self._start.layout.dtype))
        with torch.no_grad():
            loss = functional.cross_entropy(self._flat.model(self._test.x), self._test.y)
        return float(loss), found.version


def _make_rows(
    scene: str, workers: int, pace: float, target: float, found: dict[int | str | None, list[StalenessRun]]
) -> list[StalenessRow]:
    seconds = {staleness: statistics.median(run.seconds for run in runs) for staleness, runs in found.items()}
    best = min(each for staleness, each in seconds.items() if staleness != AUTO)
    return [
        StalenessRow(
            scene,
            _write_staleness(staleness),
            workers,
            pace,
            target,
            len(runs),
            seconds[staleness],
            seconds[staleness] / best,
            statistics.median(run.rounds for run in runs),
            statistics.median(len(run.bounds) - 1 for run in runs),
            ", ".join(_write_staleness(run.bounds[-1]) for run in runs),
        )
        for staleness, runs in found.items()
    ]


def _write_staleness(staleness: int | str | None) -> str:
    return "none" if staleness is None else str(staleness)


def bench_adaptive(
    cluster: Cluster | None,
    workers: Workers = 4,
    scenes: Annotated[
        Sequence[str],
        Opt(
            "come_and_go (each worker takes 5 times as long in a random tenth of its rounds), one_slow (worker 0 "
            "takes 3 times as long), momentum (one_slow, with momentum and a large learning rate)."
        ),
    ] = SCENES,
    *,
    pace: Annotated[float, Opt("Seconds of an ordinary round, in which the worker sleeps.")] = 0.1,
    seeds: Annotated[int, Opt("Number of seeds with which each staleness is measured.")] = 5,
    first: Annotated[int, Opt("The first seed.")] = 0,
    target: Annotated[float, Opt("The loss on the test images that ends a run.")] = TARGET,
    limit: Annotated[float, Opt("The longest time of a run, in seconds.")] = 300.0,
    folder: Annotated[Path | None, Opt("Folder with digits.parquet; default: examples/data.", "--data")] = None,
    virtual: Annotated[
        bool, Opt("In virtual time: the result depends on the seeds alone, and no cluster is needed.")
    ] = False,
) -> list[StalenessRow]:
    """Measure on a cluster, or in virtual time. Raises the errors of `bench_staleness`."""
    chosen = range(first, first + seeds)
    if virtual:
        return simulate_staleness(workers, scenes, pace=pace, target=target, seeds=chosen, folder=folder, limit=limit)
    assert cluster is not None
    return bench_staleness(cluster, workers, scenes, pace=pace, target=target, seeds=chosen, folder=folder, limit=limit)
