"""Compare consistent pulls, which read all servers as of one moment, with independent pulls.

Staleness is bounded. A turn is a push and a pull of the whole vector. The two contenders alternate in the same actors.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from rayps.bench.table import BenchRow
from rayps.cluster.local import ActorHandle, Cluster
from rayps.ps.server_group import ServerGroup

STALENESS = 8
CONTENDERS = ("independent", "consistent")


@dataclass(frozen=True, slots=True)
class ReadsRow(BenchRow):
    """One contender at one size. `turns` is the number of turns per second of all workers together."""

    columns: ClassVar[str] = "bytes | contender: pulls | turns: turns/s | share: of independent"

    bytes: int
    contender: str
    workers: int
    shards: int
    repeats: int
    turns: float
    share: float  # turns / turns of independent pulls


class ReadsBench:
    """An actor: one worker that pushes and pulls."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self._rank = rank

    def turns(self, group: ServerGroup, turns: int, consistent: bool) -> tuple[float, float]:
        """Make a warm-up turn, then `turns` turns; return these turns' wall-clock start and end."""
        server = group.join(self._rank)
        grad, out = server.buffer(), torch.empty(group.layout.size)
        began = 0.0
        for turn in range(turns + 1):
            if turn == 1:
                began = time.time()
            server.push(grad)
            server.pull(out=out, consistent=consistent)
        ended = time.time()
        server.close()
        return began, ended


def bench_reads(
    cluster: Cluster, workers: int, shards: int, sizes: Sequence[int], *, repeats: int = 5
) -> list[ReadsRow]:
    """Measure independent and consistent pulls of each of `sizes` (bytes): two rows per size."""
    actors = [cluster.spawn("rayps.bench.reads:ReadsBench", rank) for rank in range(workers)]
    try:
        found: list[ReadsRow] = []
        for size in sizes:
            found += _at_size(cluster, actors, shards, max(shards, size // 4), repeats)
        return found
    finally:
        for actor in actors:
            cluster.kill(actor)


def _at_size(cluster: Cluster, actors: list[ActorHandle], shards: int, n: int, repeats: int) -> list[ReadsRow]:
    workers, turns = len(actors), 300 if n <= 1 << 16 else 60 if n <= 1 << 19 else 6
    rates: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with ServerGroup(
        torch.zeros(n), shards=shards, staleness=STALENESS, workers=workers, cluster=cluster
    ) as group:  # one group for all turns: every worker makes the same number, so no clock falls behind
        for _ in range(repeats):
            for name in CONTENDERS:
                replies = [actor.call("turns", group, turns, name == "consistent") for actor in actors]
                spans = [reply.result(600.0) for reply in replies]
                seconds = max(end for _, end in spans) - min(begin for begin, _ in spans)
                rates[name].append(workers * turns / seconds)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    return [
        ReadsRow(4 * n, name, workers, shards, repeats, rate, rate / medians["independent"])
        for name, rate in medians.items()
    ]
