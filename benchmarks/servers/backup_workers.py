"""Measure backup workers: seconds of a step if workers are slow in random rounds, beside the formula.

A worker's gradient takes `pace` seconds, and with probability 0.1 five times as long. The time is spent in 20 layers
that sleep, which uses no CPU. Whether a gradient is slow does not depend on its rows: a gradient that is computed again
is slow with the same probability. In each 20 gradients of a worker exactly 2 are slow, so that short runs differ less.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import comb
from typing import Any, ClassVar

import torch
from rayps_client.errors import ConfigError, TrainingError
from rayps_client.values import JsonObject
from torch import Tensor, nn

from rayps.bench.table import BenchRow
from rayps.cluster.local import Cluster
from rayps.core.job.records import Point
from rayps.core.job.user_module import pack
from rayps.core.rows.phase_rounds import Boundary
from rayps.data import Batch, Data
from rayps.data import tensors as in_tensors
from rayps.runtime.driver.worker_group import WorkerGroup
from rayps.strategies.catalogue import parse
from rayps.worker.plan import EvaluationPlan, Orders, SnapshotPlan
from rayps.workload.base import Workload

CHANCE = 0.1  # of a slow gradient
FACTOR = 5.0  # by which it takes longer
STRATEGIES = ("all_reduce", "parameter_server")
LAYERS = 20
_BLOCK = 20  # gradients, of which CHANCE are slow
_WARM = 5  # first steps, which are not measured
_POLL_SECONDS = 0.2
_MADE = itertools.count()


@dataclass(frozen=True, slots=True)
class BackupRow(BenchRow):
    """Workers with or without backup workers. Seconds are means over the steps of a run."""

    columns: ClassVar[str] = (
        "strategy | workers | backup | seconds: seconds a step | formula | dropped: late a step | "
        "times_none: x members alone | times_formula: by formula | times_finishing: if late ones finish | "
        "times_all: x all workers"
    )

    strategy: str
    workers: int  # all workers
    backup: int  # so many of them are no members of a step
    pace: float  # seconds of a normal gradient
    steps: int
    seconds: float  # of a step
    formula: float  # seconds of a step, by `compute_step_seconds`
    dropped: float  # gradients that came late, for each step
    times_none: float | None  # seconds of the same members without backup workers / seconds
    times_formula: float | None  # the same by the formula
    times_finishing: float | None  # the same by simulation, if late workers computed their gradients to the end
    times_all: float | None  # seconds of as many workers without backup workers / seconds


def compute_step_seconds(members: int, backup: int, *, chance: float = CHANCE, factor: float = FACTOR) -> float:
    """Return the expected time of a step, in units of a normal gradient, by formula.

    The first `members` of `members` + `backup` workers count. Each worker takes 1, and with probability `chance` it
    takes `factor`, independently; all begin together. The step takes `factor` if more than `backup` are slow. Nothing
    else takes time: a late worker abandons its gradient at once, and a step without gradients takes none.
    """
    workers = members + backup
    fast = sum(comb(workers, slow) * chance**slow * (1 - chance) ** (workers - slow) for slow in range(backup + 1))
    return factor - (factor - 1) * fast


def simulate_step_seconds(members: int, backup: int, *, steps: int = 20_000) -> float:
    """Return a step's time as `compute_step_seconds` does, by simulation, if late workers compute gradients to the end.

    A worker that was late then begins the present step.
    """
    draw, workers = random.Random(0), members + backup

    def duration() -> float:
        return FACTOR if draw.random() < CHANCE else 1.0

    now = 0.0
    ends, at = [duration() for _ in range(workers)], [0] * workers  # when a worker's gradient ends, and its step
    for step in range(steps):
        arrived: list[int] = []
        while len(arrived) < members:
            rank = min((rank for rank in range(workers) if rank not in arrived), key=ends.__getitem__)
            now = max(now, ends[rank])
            if at[rank] == step:
                arrived.append(rank)
            else:
                at[rank], ends[rank] = step, now + duration()
        for rank in arrived:
            at[rank], ends[rank] = step + 1, now + duration()
    return now / steps


class Pause(nn.Module):
    """A layer that sleeps, then returns its input. `seconds` is set before each gradient."""

    seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Sleep."""
        if self.training:
            time.sleep(self.seconds)
        return x


class SlowAtRandom(Workload):
    """A linear regression with layers that sleep."""

    def __init__(self, pace: float, seed: int) -> None:
        self.pace, self.seed = pace, seed

    def model(self) -> nn.Module:
        """Return a linear layer behind layers that sleep."""
        return _SleepingModel(self.pace, f"{self.seed} {os.getpid()} {next(_MADE)}")

    def data(self) -> Data:
        """Return rows for more steps than are run, so that no epoch ends."""
        x = torch.randn(200_000, 4, generator=torch.Generator().manual_seed(self.seed))
        return in_tensors(x, x.sum(dim=1, keepdim=True), batch_size=8)

    def evaluation_data(self) -> Data:
        """Return a few rows."""
        x = torch.zeros(8, 4)
        return in_tensors(x, x.sum(dim=1, keepdim=True), batch_size=8)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean square error."""
        return nn.functional.mse_loss(model(batch.x), batch.y)

    def optimizer(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(params, lr=0.01)


class _SleepingModel(nn.Sequential):
    def __init__(self, pace: float, seed: str) -> None:
        super().__init__(*(Pause() for _ in range(LAYERS)), nn.Linear(4, 1))
        self._pace, self._factors = pace, yield_factors(seed)

    def forward(self, x: Any) -> Any:
        """Sleep `pace` seconds, or FACTOR times as long, then apply the linear layer."""
        seconds = self._pace * next(self._factors) / LAYERS
        for layer in self:
            if isinstance(layer, Pause):
                layer.seconds = seconds
        return super().forward(x)  # type: ignore[no-untyped-call]


def yield_factors(seed: str) -> Iterator[float]:
    """Yield the factors by which a worker's gradients take longer: in each block, CHANCE of them are FACTOR."""
    draw, slow = random.Random(seed), round(CHANCE * _BLOCK)
    while True:
        yield from draw.sample([FACTOR] * slow + [1.0] * (_BLOCK - slow), _BLOCK)


def bench_backup_workers(
    cluster: Cluster,
    members: int = 4,
    backup: int = 1,
    *,
    strategy: str = "all_reduce",
    pace: float = 0.1,
    steps: int = 300,
    turn: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[BackupRow]:
    """Measure `members` workers, the first of as many with `backup` more, and all of these workers.

    Workers have started before a run. `turn()` is entered for each run, such as a lock of the machine.

    Raises:
        ConfigError: there is no such strategy, or it refuses the number of backup workers.
        TrainingError: a run failed.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"strategy is {strategy!r}: give {' or '.join(STRATEGIES)}", field="strategy")
    both = members + backup
    seconds, dropped = dict[tuple[int, int], float](), dict[tuple[int, int], float]()
    kinds = ((members, 0), (both, backup), (both, 0))
    for workers in (members, both):
        group = _MeasuredGroup(cluster, workers, pace)
        try:
            for kind in [kind for kind in kinds if kind[0] == workers]:
                with turn():
                    run = group.run({"name": strategy, "backup": kind[1] or None}, steps)
                seconds[kind], dropped[kind] = run
        finally:
            group.close()
    formula = {(workers, spared): pace * compute_step_seconds(workers - spared, spared) for workers, spared in kinds}
    found, (alone, _, every) = list[BackupRow](), kinds
    for kind in kinds:
        ratios = [
            seconds[alone] / seconds[kind],
            formula[alone] / formula[kind],
            simulate_step_seconds(members, 0) / simulate_step_seconds(members, backup),
            seconds[every] / seconds[kind],
        ]
        times = ratios if kind[1] else [None] * len(ratios)
        found.append(BackupRow(strategy, *kind, pace, steps, seconds[kind], formula[kind], dropped[kind], *times))
    return found


class _MeasuredGroup:
    """Workers that run one strategy after another."""

    def __init__(self, cluster: Cluster, workers: int, pace: float) -> None:
        self._group = WorkerGroup(cluster, pack(SlowAtRandom(pace, workers)), workers, {"cpu": 1.0}, capture=False)
        self._group.start(timeout=60.0)
        self._start = self._group.initial(seed=0)
        self._start.positions = [0] * workers
        self._generation = 0

    def run(self, strategy: JsonObject, steps: int) -> tuple[float, float]:
        """Return the mean seconds of a step, and the gradients that came late for each step."""
        self._generation += 1
        parsed, end = parse(strategy)[0].strategy, _WARM + steps
        orders = Orders(self._generation, parsed, 0, end, SnapshotPlan(Boundary(0, -1)), EvaluationPlan(0), 60.0)
        self._group.begin(orders, self._start)
        points: list[Point] = []
        while len(points) < end * len(self._group.workers):
            points += [point for point in self._group.poll() if point["kind"] == "round"]
            for member in [*self._group.workers, *self._group.shards]:
                error = getattr(member.facts, "error", None)
                if member.dead or error is not None:
                    raise TrainingError(f"{member.name} failed: {member.dead or error}")
            time.sleep(_POLL_SECONDS)
        points = [point for point in points if point["round"] >= _WARM]
        late = sum(point.get("said", {}).get("dropped", 0) for point in points)
        return sum(point["seconds"] for point in points) / len(points), late / len(points)

    def close(self) -> None:
        """Stop workers and servers."""
        self._group.close()
