"""Measure shares of rows by speed: the seconds of a round if one worker is slower than the others.

Workers train a small model by all_reduce. For each row a worker sleeps, which uses no CPU, and worker 0 sleeps longer.
The bench measures the rounds with equal shares and with `balance=True`, beside the shortest possible round, in which
all workers end together.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from rayps_client.errors import ConfigError
from torch import Tensor, nn

from rayps.bench.table import BenchRow, Opt
from rayps.cluster.local import Cluster
from rayps.data import Batch, Data, tensors
from rayps.runtime.training import train
from rayps.workload.base import Workload

BATCH = 32  # rows of a worker in a round with equal shares


@dataclass(frozen=True, slots=True)
class BalanceRow(BenchRow):
    """One job. `seconds` is the median over the rounds of its second half."""

    columns: ClassVar[str] = (
        "shares | seconds: seconds a round | times_equal: x equal | bound_seconds: bound | of_bound: of bound | rows"
    )

    shares: str  # "equal" or "balanced"
    workers: int
    row_seconds: float  # seconds that the fast workers sleep for a row
    slower: float  # how many times as long worker 0 sleeps
    seconds: float  # of a round
    times_equal: float  # seconds with equal shares / seconds
    bound_seconds: float  # the shortest possible round
    of_bound: float  # bound_seconds / seconds
    rows: str  # the shares at the end, one for each worker


class SlowRows(Workload):
    """A workload: a linear regression whose loss sleeps for each row, longer on worker 0."""

    def __init__(self, rows: int, row_seconds: float, slower: float) -> None:
        self.rows, self.row_seconds, self.slower = rows, row_seconds, slower

    def model(self) -> nn.Module:
        """Return a model of 9 parameters."""
        return nn.Linear(8, 1)

    def data(self) -> Data:
        """Return random rows."""
        x = torch.randn(self.rows, 8, generator=torch.Generator().manual_seed(0))
        return tensors(x, x.sum(dim=1, keepdim=True), batch_size=BATCH)

    def evaluation_data(self) -> Data:
        """Return few rows."""
        return tensors(torch.zeros(4, 8), torch.zeros(4, 1), batch_size=4)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the squared error, after a sleep. The thread of a worker's rounds has the worker's name."""
        slower = self.slower if threading.current_thread().name == "worker-0" else 1.0
        time.sleep(batch.size * self.row_seconds * slower)
        found: Tensor = ((model(batch.x) - batch.y) ** 2).mean()
        return found

    def optimizer(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(params, lr=0.01)


def bench_balance(
    cluster: Cluster,
    workers: Annotated[int, Opt("Workers, of which worker 0 is slower.")] = 4,
    *,
    row_seconds: Annotated[float, Opt("Seconds that a fast worker sleeps for a row.")] = 0.001,
    slower: Annotated[float, Opt("How many times as long worker 0 sleeps.")] = 2.0,
    rounds: Annotated[int, Opt("Rounds of each job, of which the second half is measured.")] = 80,
) -> list[BalanceRow]:
    """Measure jobs of `rounds` rounds with equal and with balanced shares.

    Raises:
        ConfigError: there is only one worker.
    """
    if workers < 2:
        raise ConfigError(f"workers is {workers}: give at least 2, of which one is slower", field="workers")
    block = workers * BATCH
    bound = block * row_seconds / (workers - 1 + 1 / slower)
    work, seconds, rows = SlowRows(10 * block, row_seconds, slower), dict[str, float](), dict[str, str]()
    for name, balance in (("equal", False), ("balanced", True)):
        result = train(work, workers=workers, steps=rounds, balance=balance, cluster=cluster, progress=False)
        half = result.history.column("seconds").to_pylist()[rounds // 2 :]
        seconds[name] = statistics.median(half)
        changes = [event["shares"] for event in result.events if event["kind"] == "shares"]
        rows[name] = ", ".join(map(str, changes[-1] if changes else [BATCH] * workers))
    return [
        BalanceRow(
            name,
            workers,
            row_seconds,
            slower,
            seconds[name],
            seconds["equal"] / seconds[name],
            bound,
            bound / seconds[name],
            rows[name],
        )
        for name in seconds
    ]
