"""Measure how a push and a pull scale with the number of shards, each on its own host with a link of a given rate.

The hosts are network namespaces (`rayps.bench.netns`). The workers share one host, whose link is fast enough for all
shards. The limit is the time that one shard's link needs for a push and then for a pull, because a shard answers only
after it has received the whole push.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import pickle
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from rayps_client.errors import ConfigError

from rayps.bench.netns import Hosts, NamespaceActor, bits
from rayps.bench.parallel_calls import call_all
from rayps.bench.table import BenchRow, Opt, read_size
from rayps.ps.server.shard_actor import ShardActor, ShardPlan
from rayps.ps.server_group import ServerGroup, SharedParameters
from rayps.tensors.snapshot import Snapshot

_START_SECONDS = 60.0
_TURN_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class ShardsRow(BenchRow):
    """One number of shards at one size. `seconds` is the median of a turn: a push and a pull of the whole vector."""

    columns: ClassVar[str] = (
        "bytes | shards | workers | rate: link | seconds | limit: link's limit | of_limit: of limit | "
        "times_first: x first | memory: bytes a shard"
    )

    bytes: int
    shards: int
    workers: int
    rate: str  # rate of each shard's link, in each direction
    repeats: int
    seconds: float
    limit: float  # least seconds on these links: 2 x workers x bytes / shards / rate
    of_limit: float  # limit / seconds
    times_first: float  # seconds with the first number of shards / seconds
    memory: float  # the most bytes that the parameters added to the memory of a shard's process


class HostShard(ShardActor):
    """A shard actor that listens on its host's address and measures its memory."""

    def __init__(self, address: str, index: int, secret: bytes, factory: bytes) -> None:
        super().__init__(index, secret, factory, threads=1, host=address)
        warm = torch.nn.Parameter(torch.zeros(1))
        warm.grad = torch.ones(1)
        _make_sgd([warm]).step()  # loads the optimizer's modules, which do not count as the parameters' memory
        self._before = _measure_resident()

    def begin(self, plan: ShardPlan, snapshot: bytes | Snapshot) -> None:
        """Start the shard. The snapshot may be pickled bytes, because a pipe would send its tensors as descriptors."""
        super().begin(plan, snapshot if isinstance(snapshot, Snapshot) else pickle.loads(snapshot))

    def memory(self) -> float:
        """Return the bytes of memory that the process has gained since the shard was made."""
        return _measure_resident() - self._before


class HostWorker:
    """An actor: one worker that pushes and pulls."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self._rank = rank
        self._server: SharedParameters | None = None
        self._gradient = torch.empty(0)

    def join(self, group: ServerGroup) -> None:
        """Connect to the shards, and make a warm-up turn, which touches new memory pages."""
        self._server = group.join(self._rank)
        self._gradient = torch.rand(group.layout.size)
        self._server.push_pull(self._gradient)

    def turn(self) -> tuple[float, float]:
        """Push and pull once; return the start and end by the wall clock."""
        assert self._server is not None, "join comes first"
        began = time.time()
        self._server.push_pull(self._gradient)
        return began, time.time()

    def leave(self) -> None:
        """Close the links."""
        if self._server is not None:
            self._server.close()


class _OnHosts:
    """The methods of a cluster that a ServerGroup needs. `spawn` starts each shard on the next host."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts, self._next = hosts, itertools.count(1)
        self.shards: list[NamespaceActor] = []

    def spawn(self, target: str, *args: Any, **_: Any) -> NamespaceActor:
        host = next(self._next)
        actor = self._hosts.spawn(host, "benchmarks.network.shards:HostShard", self._hosts.addresses[host], *args)
        actor.started.result(_START_SECONDS)
        self.shards.append(actor)
        return actor

    def share(self, value: Snapshot) -> bytes:
        return pickle.dumps(value)

    def kill(self, handle: NamespaceActor) -> None:
        handle.kill()


def bench_shards(
    counts: Annotated[Sequence[int], Opt("Numbers of shards to measure; each shard has its own host.")] = (1, 2, 4),
    *,
    rate: Annotated[str, Opt("The rate of each shard's network link, in each direction.")] = "100mbit",
    size: Annotated[int, Opt("Size of the parameters.", read=read_size, text="20MB")] = 20_000_000,
    workers: Annotated[int, Opt("Workers, all on one host with a fast link.")] = 1,
    repeats: Annotated[int, Opt("Number of measurements for each number of shards.")] = 5,
    worker_rate: str = "10gbit",
) -> list[ShardsRow]:
    """Measure each number of shards in `counts`. `size` is the parameters' number of bytes (float32).

    Raises:
        ConfigError: a number is below 1, or a rate cannot be read.
        ClusterError: this machine cannot make network namespaces.
    """
    if min([*counts, workers, repeats], default=0) < 1:
        raise ConfigError(
            f"the numbers of shards are {list(counts)}, workers is {workers}, repeats is {repeats}: give at least 1 of "
            "each"
        )
    line = bits(rate) / 8
    found = [_with_shards(count, rate, size, workers, repeats, worker_rate) for count in counts]
    rows = []
    for count, (seconds, memory) in zip(counts, found, strict=True):
        limit = 2 * workers * size / count / line
        rows.append(
            ShardsRow(
                size, count, workers, rate, repeats, seconds, limit, limit / seconds, found[0][0] / seconds, memory
            )
        )
    return rows


def _with_shards(count: int, rate: str, size: int, workers: int, repeats: int, worker_rate: str) -> tuple[float, float]:
    """Measure one number of shards; return the median seconds of a turn, and `ShardsRow.memory`."""
    with Hosts(1 + count, rate, slow={0: worker_rate}) as hosts:
        where = _OnHosts(hosts)
        with ServerGroup(
            torch.zeros(size // 4),
            shards=count,
            optimizer=_make_sgd,
            staleness=None,
            workers=workers,
            cluster=where,  # type: ignore[arg-type]
        ) as group:
            actors = [hosts.spawn(0, "benchmarks.network.shards:HostWorker", rank) for rank in range(workers)]
            for actor in actors:
                actor.started.result(_START_SECONDS)
            call_all(actors, "join", group, timeout=_TURN_SECONDS)
            turns = [call_all(actors, "turn", timeout=_TURN_SECONDS) for _ in range(repeats)]
            memory = max(shard.call("memory").result(_START_SECONDS) for shard in where.shards)
            call_all(actors, "leave", timeout=_TURN_SECONDS)
    spans = [max(end for _, end in turn) - min(begin for begin, _ in turn) for turn in turns]
    return statistics.median(spans), memory


def _measure_resident() -> float:
    """Return this process's private memory in bytes, after freed memory was returned to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024.0 * sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def _make_sgd(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)
