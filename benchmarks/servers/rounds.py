"""Measure rounds a second of whole jobs: which strategy is how fast with the same model, and plain torch beside it.

A turn runs each strategy once, so that load of the machine meets all of them alike. A job's rate is of the later half
of its rounds, as the workers time them: the start of processes does not count.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from rayps.bench.mlp import Mlp
from rayps.bench.table import BenchRow, Opt, Strategies, Workers
from rayps.cluster.local import Cluster
from rayps.runtime.training import train

PLAIN = "plain torch"
STRATEGIES = (
    "all_reduce",
    "parameter_server:shards=2",
    "parameter_server:shards=2,staleness=3",
    "parameter_server:shards=2,staleness=3,consistent=true",
    "parameter_server:shards=2,staleness=none",
)


@dataclass(frozen=True, slots=True)
class RoundsRow(BenchRow):
    """One contender. `rate` is the median of the turns, `share` the median of each turn's ratio to the first's rate."""

    columns: ClassVar[str] = "contender | parameters | rate: rounds/s | lowest | highest | share: of the first"

    contender: str
    parameters: int
    rate: float  # rounds a second of one worker; of plain torch: steps a second of one process
    lowest: float
    highest: float
    share: float


def bench_rounds(
    cluster: Cluster,
    workers: Workers = 2,
    hidden: Annotated[int, Opt("Width of the MLP: 64 makes 9 thousand parameters, 430 makes 218 thousand.")] = 430,
    strategies: Strategies = STRATEGIES,
    *,
    rounds: Annotated[int, Opt("Rounds of each job, of which the later half counts.", "--steps")] = 1500,
    turns: Annotated[int, Opt("Turns; each runs every contender once.")] = 5,
) -> list[RoundsRow]:
    """Train an MLP of this width under each of `strategies` in turns, and in plain torch; return a row for each."""
    rates: dict[str, list[float]] = {name: [] for name in (PLAIN, *strategies)}
    for _ in range(turns):
        rates[PLAIN].append(_measure_plain_rate(hidden, rounds))
        for name in strategies:
            rates[name].append(_measure_job_rate(cluster, workers, hidden, name, rounds))
    size = sum(each.numel() for each in Mlp(hidden, 1).model().parameters())
    first = rates[strategies[0]]
    return [
        RoundsRow(
            name,
            size,
            statistics.median(found),
            min(found),
            max(found),
            statistics.median(own / other for own, other in zip(found, first, strict=True)),
        )
        for name, found in rates.items()
    ]


def _measure_job_rate(cluster: Cluster, workers: int, hidden: int, strategy: str, rounds: int) -> float:
    """Return the rounds a second of a worker, in the later half of a job's rounds."""
    work = Mlp(hidden, workers)
    result = train(work, strategy=strategy, workers=workers, cluster=cluster, steps=rounds, progress=False)
    seconds = result.history.column("seconds").to_pylist()
    return 1 / statistics.fmean(seconds[len(seconds) // 2 :])


def _measure_plain_rate(hidden: int, rounds: int) -> float:
    """Return the steps a second of plain torch in this process, with one thread, in the later half of the steps."""
    work, threads = Mlp(hidden, 1), torch.get_num_threads()
    model = work.model()
    optimizer = work.optimizer(list(model.parameters()))
    torch.set_num_threads(1)
    taken: list[float] = []
    try:
        for epoch in range(rounds):  # an epoch has at least one step
            if len(taken) >= rounds:
                break
            for batch in work.data().batches(rank=0, size=1, seed=0, epoch=epoch):
                began = time.perf_counter()
                optimizer.zero_grad()
                work.loss(model, batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                taken.append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    return 1 / statistics.fmean(taken[rounds // 2 :])
