"""Measure pulls and pushes of many rows of a table by id, over rayps' links and by Ray actor calls.

Contenders alternate in the same actors. `own` uses the same ids each time, as in repeated epochs. `fresh` uses new ids
each time. `ray` calls Ray actors with the same ids each time, sorted and divided among the actors beforehand.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from rayps_client.errors import ConfigError

from rayps.bench.table import BenchRow
from rayps.cluster.local import ActorHandle, Cluster
from rayps.core.partition import cut_slices
from rayps.ps.server_group import ServerGroup

Ids = NDArray[np.int64]
Rows = NDArray[np.float32]  # [ids, width]

CONTENDERS = ("own", "fresh", "ray")
SPARSITY = 4  # rows of the table / rows of a request
_LR = 0.01


@dataclass(frozen=True, slots=True)
class RowsRow(BenchRow):
    """One contender. `turns` is the number of turns (a pull and a push) per second of all workers together."""

    columns: ClassVar[str] = "rows | dim | contender: ids | turns: turns/s | bandwidth: bytes/s | times_ray: x ray"

    rows: int
    dim: int
    contender: str
    workers: int
    shards: int
    repeats: int
    turns: float
    bandwidth: float  # bytes of rows per second, both directions
    times_ray: float | None  # turns / turns of `ray`; None if `ray` did not take part


class RayTable:
    """The contender without rayps: an actor that stores a part of a table and is called through Ray."""

    def __init__(self, rows: int, dim: int) -> None:
        self._table = np.zeros((rows, dim), np.float32)

    def pull(self, ids: Ids) -> Rows:
        """Return the rows with these ids."""
        return self._table[ids]

    def push(self, ids: Ids, rows: Rows) -> None:
        """Apply an SGD step to the rows with these ids, which are unique."""
        self._table[ids] -= _LR * rows


class RowsBench:
    """An actor: one worker that pulls and pushes rows."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self._rank = rank

    def turns_by_links(self, group: ServerGroup, rows: int, turns: int, fresh: bool) -> tuple[float, float]:
        """Make a warm-up turn, then `turns` turns over links; return these turns' wall-clock start and end."""
        server, dim = group.join(self._rank), group.layout.entries[0].shape[1]
        batches = _batches(self._rank, rows, turns + 1 if fresh else 1)
        grad, out = torch.rand(rows, dim), torch.empty(rows, dim)
        began = 0.0
        for turn in range(turns + 1):
            if turn == 1:
                began = time.time()
            ids = torch.from_numpy(batches[turn % len(batches)])
            server.pull(ids, out=out)
            server.push(ids, grad)
        ended = time.time()
        server.close()
        return began, ended

    def turns_by_calls(self, shards: list[ActorHandle], rows: int, dim: int, turns: int) -> tuple[float, float]:
        """Make a warm-up turn, then `turns` turns by actor calls; return these turns' wall-clock start and end."""
        ids = np.sort(_batches(self._rank, rows, 1)[0])
        bounds = [cut.start for cut in cut_slices(rows * SPARSITY, len(shards))]
        places = [*np.searchsorted(ids, bounds).tolist(), rows]
        cuts = [slice(a, b) for a, b in itertools.pairwise(places)]
        local = [ids[cut] - bound for cut, bound in zip(cuts, bounds, strict=True)]
        grad = np.random.default_rng(0).random((rows, dim), np.float32)
        out, began = np.empty_like(grad), 0.0
        for turn in range(turns + 1):
            if turn == 1:
                began = time.time()
            pulls = [shard.call("pull", some) for shard, some in zip(shards, local, strict=True)]
            for reply, cut in zip(pulls, cuts, strict=True):
                out[cut] = reply.result(60.0)
            pushes = [shard.call("push", some, grad[cut]) for shard, some, cut in zip(shards, local, cuts, strict=True)]
            for reply in pushes:
                reply.result(60.0)
        return began, time.time()


def _batches(rank: int, rows: int, count: int) -> list[Ids]:
    """Draw the batches of a rank: unique ids in random order."""
    generator = np.random.default_rng(rank)
    return [generator.permutation(rows * SPARSITY)[:rows] for _ in range(count)]


def bench_rows(
    cluster: Cluster,
    workers: int,
    shards: int,
    rows: int,
    dim: int,
    contenders: Sequence[str] = CONTENDERS,
    *,
    repeats: int = 5,
    turns: int = 40,
) -> list[RowsRow]:
    """Measure asynchronous pulls and pushes of `rows` rows of `dim` floats, from a table with four times as many rows.

    Raises:
        ConfigError: there is no such contender, or a number is below 1.
    """
    for contender in contenders:
        if contender not in CONTENDERS:
            raise ConfigError(f"no contender {contender!r}; use some of {', '.join(CONTENDERS)}")
    if rows < 1 or dim < 1:
        raise ConfigError(f"rows is {rows} and dim is {dim}: give at least 1 of each", field="rows")
    table = torch.zeros(rows * SPARSITY, dim)
    actors = [cluster.spawn("rayps.bench.rows:RowsBench", rank) for rank in range(workers)]
    handles = [
        cluster.spawn("rayps.bench.rows:RayTable", c.stop - c.start, dim) for c in cut_slices(len(table), shards)
    ]
    group = ServerGroup(table, shards=shards, optimizer=_sgd, staleness=None, workers=workers, cluster=cluster)
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    try:
        for _ in range(repeats):
            for name in contenders:
                count = max(3, turns // 4) if name == "ray" else turns
                if name == "ray":
                    replies = [actor.call("turns_by_calls", handles, rows, dim, count) for actor in actors]
                else:
                    replies = [actor.call("turns_by_links", group, rows, count, name == "fresh") for actor in actors]
                spans = [reply.result(600.0) for reply in replies]
                seconds = max(end for _, end in spans) - min(begin for begin, _ in spans)
                rates[name].append(workers * count / seconds)
    finally:
        group.close()
        for handle in [*actors, *handles]:
            cluster.kill(handle)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    ray, size = medians.get("ray"), 2 * 4 * rows * dim
    return [
        RowsRow(rows, dim, name, workers, shards, repeats, rate, size * rate, rate / ray if ray else None)
        for name, rate in medians.items()
    ]


def _sgd(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=_LR)
