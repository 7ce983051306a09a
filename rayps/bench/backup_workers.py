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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import torch
from torch import Tensor, nn

import rayps
from rayps.cluster.local import Cluster
from rayps.core.errors import ConfigError
from rayps.data import Batch, Data
from rayps.data import tensors as in_tensors
from rayps.workload.base import Workload

CHANCE = 0.1  # of a slow gradient
FACTOR = 5.0  # by which it takes longer
STRATEGIES = ("all_reduce", "parameter_server")
LAYERS = 20
_BLOCK = 20  # gradients, of which CHANCE are slow
_WARM = 5  # first steps, which are not measured
_MADE = itertools.count()


@dataclass(frozen=True, slots=True)
class BackupRow:
    """Workers with or without backup workers. Seconds are means over the steps of a run."""

    strategy: str
    workers: int  # all workers
    backup: int  # so many of them are no members of a step
    pace: float  # seconds of a normal gradient
    steps: int
    seconds: float  # of a step
    formula: float  # seconds of a step, by `step_seconds`
    dropped: float  # gradients that came late, for each step
    times_none: float | None  # seconds of the same members without backup workers / seconds
    times_formula: float | None  # the same by the formula
    times_all: float | None  # seconds of as many workers without backup workers / seconds


def step_seconds(members: int, backup: int, *, chance: float = CHANCE, factor: float = FACTOR) -> float:
    """Return the expected time of a step, in units of a normal gradient, by formula.

    The first `members` of `members` + `backup` workers count. Each worker takes 1, and with probability `chance` it
    takes `factor`, independently; all begin together. The step takes `factor` if more than `backup` are slow. Nothing
    else takes time: a late worker abandons its gradient at once, and a step without gradients takes none.
    """
    workers = members + backup
    fast = sum(comb(workers, slow) * chance**slow * (1 - chance) ** (workers - slow) for slow in range(backup + 1))
    return factor - (factor - 1) * fast


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
        self._pace, self._factors = pace, factors(seed)

    def forward(self, x: Any) -> Any:
        """Sleep `pace` seconds, or FACTOR times as long, then apply the linear layer."""
        seconds = self._pace * next(self._factors) / LAYERS
        for layer in self:
            if isinstance(layer, Pause):
                layer.seconds = seconds
        return super().forward(x)  # type: ignore[no-untyped-call]


def factors(seed: str) -> Iterator[float]:
    """Yield the factors by which a worker's gradients take longer: in each block, CHANCE of them are FACTOR."""
    draw, slow = random.Random(seed), round(CHANCE * _BLOCK)
    while True:
        yield from draw.sample([FACTOR] * slow + [1.0] * (_BLOCK - slow), _BLOCK)


def bench_backup_workers(
    cluster: Cluster, workers: int = 4, backup: int = 1, *, strategy: str = "all_reduce", pace: float, steps: int
) -> list[BackupRow]:
    """Measure `workers` members without and with `backup` backup workers, and as many workers without.

    Raises:
        ConfigError: there is no such strategy, or it refuses the number of backup workers.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"strategy is {strategy!r}: give {' or '.join(STRATEGIES)}", field="strategy")
    both = workers + backup
    found = [_run(cluster, strategy, *each, pace, steps) for each in ((workers, 0), (both, backup), (both, 0))]
    seconds = [row[0] for row in found]
    by_formula = [step_seconds(workers, 0), step_seconds(workers, backup), step_seconds(both, 0)]
    rows = []
    for i, (count, spared) in enumerate(((workers, 0), (both, backup), (both, 0))):
        with_backup = i == 1
        rows.append(
            BackupRow(
                strategy,
                count,
                spared,
                pace,
                steps,
                seconds[i],
                pace * by_formula[i],
                found[i][1],
                seconds[0] / seconds[1] if with_backup else None,
                by_formula[0] / by_formula[1] if with_backup else None,
                seconds[2] / seconds[1] if with_backup else None,
            )
        )
    return rows


def _run(cluster: Cluster, strategy: str, workers: int, backup: int, pace: float, steps: int) -> tuple[float, float]:
    """Return the mean seconds of a step, and the gradients that came late for each step."""
    given = {"name": strategy, "backup": backup or None}
    result = rayps.train(
        SlowAtRandom(pace, workers + backup),
        strategy=given,
        workers=workers,
        steps=_WARM + steps,
        cluster=cluster,
        progress=False,
    )
    seconds = result.history.column("seconds").to_pylist()[_WARM:]  # the mean over workers, whose sums are equal
    dropped = result.history.column("dropped").to_pylist()[_WARM:] if backup else [0]
    return sum(seconds) / len(seconds), sum(dropped) / len(dropped)
