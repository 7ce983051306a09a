"""Measure the parameter server: pushes and pulls between Ray actors, over rayps' links and by Ray actor calls.

Contenders alternate in the same actors. The functions return rows and print nothing.
"""

from __future__ import annotations

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

CONTENDERS = ("own", "resident", "message", "ray")
START_SECONDS = 0.3  # seconds until all workers have joined


@dataclass(frozen=True, slots=True)
class ServerRow(BenchRow):
    """One contender at one size. `turns` is the number of turns (a push and a pull) per second of all workers."""

    columns: ClassVar[str] = "bytes | contender: transport | turns: turns/s | bandwidth: bytes/s | times_ray: x ray"

    bytes: int
    contender: str
    workers: int
    shards: int
    repeats: int
    turns: float
    bandwidth: float  # bytes per second, both directions
    times_ray: float | None  # turns / turns of `ray`; None if `ray` did not take part


class RayShard:
    """The contender without rayps: an actor that stores a shard and is called through Ray."""

    def __init__(self, n: int) -> None:
        self._params = np.zeros(n, np.float32)

    def push_pull(self, grad: NDArray[np.float32]) -> NDArray[np.float32]:
        """Apply an SGD step with `grad`; return the shard's parameters."""
        self._params -= 0.01 * grad
        return self._params


class ServerBench:
    """An actor: one worker that pushes and pulls."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self._rank = rank

    def turns_by_links(self, group: ServerGroup, turns: int, kind: str, start: float) -> tuple[float, float]:
        """Start `turns` turns over links at the wall-clock time `start`; return the wall-clock start and end.

        `kind` "own" pushes an ordinary tensor. "resident" pushes a tensor in shared memory, which the shards read in
        place. "message" sends the messages that are used between hosts, but through shared memory.
        """
        server = group.join(self._rank, resident=kind != "message")
        grad = server.buffer() if kind == "resident" else torch.empty(group.layout.size)
        out = torch.empty(group.layout.size)
        torch.rand(len(grad), out=grad)
        server.push_pull(grad, out=out)
        began = _await(start)
        for _ in range(turns):
            server.push_pull(grad, out=out)
        ended = time.time()
        server.close()
        return began, ended

    def turns_by_calls(self, shards: list[ActorHandle], n: int, turns: int, start: float) -> tuple[float, float]:
        """Start `turns` turns by actor calls at the wall-clock time `start`; return the wall-clock start and end."""
        grad, out = np.random.default_rng(0).random(n, np.float32), np.empty(n, np.float32)
        cuts = cut_slices(n, len(shards))

        def turn() -> None:
            replies = [shard.call("push_pull", grad[cut]) for shard, cut in zip(shards, cuts, strict=True)]
            for reply, cut in zip(replies, cuts, strict=True):
                out[cut] = reply.result(60.0)

        turn()
        began = _await(start)
        for _ in range(turns):
            turn()
        return began, time.time()


def bench_server(
    cluster: Cluster,
    workers: int,
    shards: int,
    sizes: Sequence[int],
    contenders: Sequence[str] = CONTENDERS,
    *,
    repeats: int = 5,
) -> list[ServerRow]:
    """Measure asynchronous pushes and pulls of whole vectors: a row for each of `sizes` (bytes) and `contenders`.

    Raises:
        ConfigError: there is no such contender.
    """
    for contender in contenders:
        if contender not in CONTENDERS:
            raise ConfigError(f"no contender {contender!r}; use some of {', '.join(CONTENDERS)}")
    actors = [cluster.spawn("rayps.bench.server:ServerBench", rank) for rank in range(workers)]
    try:
        rows: list[ServerRow] = []
        for size in sizes:
            rows += _at_size(cluster, actors, shards, max(shards, size // 4), contenders, repeats)
        return rows
    finally:
        for actor in actors:
            cluster.kill(actor)


def _at_size(
    cluster: Cluster, actors: list[ActorHandle], shards: int, n: int, contenders: Sequence[str], repeats: int
) -> list[ServerRow]:
    size = len(actors)
    group = ServerGroup(torch.zeros(n), shards=shards, optimizer=_sgd, staleness=None, workers=size, cluster=cluster)
    handles = [cluster.spawn("rayps.bench.server:RayShard", c.stop - c.start) for c in cut_slices(n, shards)]
    counts = {name: _turns(4 * n, name) for name in contenders}
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    try:
        for _ in range(repeats):
            for name in contenders:
                start = time.time() + START_SECONDS
                if name == "ray":
                    replies = [actor.call("turns_by_calls", handles, n, counts[name], start) for actor in actors]
                else:
                    replies = [actor.call("turns_by_links", group, counts[name], name, start) for actor in actors]
                spans = [reply.result(600.0) for reply in replies]
                seconds = max(end for _, end in spans) - min(begin for begin, _ in spans)
                rates[name].append(len(actors) * counts[name] / seconds)
    finally:
        group.close()
        for handle in handles:
            cluster.kill(handle)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    ray = medians.get("ray")
    return [
        ServerRow(4 * n, name, len(actors), shards, repeats, rate, 2 * 4 * n * rate, rate / ray if ray else None)
        for name, rate in medians.items()
    ]


def _await(start: float) -> float:
    """Sleep until the wall clock shows `start`, so that all workers start together; return the time."""
    time.sleep(max(0.0, start - time.time()))
    return time.time()


def _turns(size: int, contender: str) -> int:
    slow, swift = (300, 10_000) if size <= 1 << 16 else (60, 3000) if size <= 2 << 20 else (8, 60)
    return slow if contender == "ray" else max(slow, swift // 4) if contender == "message" else swift


def _sgd(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)
