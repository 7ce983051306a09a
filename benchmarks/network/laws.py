"""Measure bytes and time of every algorithm for several numbers of workers; compare them with textbook formulas.

Every worker and every shard is a process on its own host: a network namespace with a link of a given rate. The kernel
counts the bytes on each link. The formula for the time is that of the busiest link.
"""

from __future__ import annotations

import itertools
import math
import pickle
import secrets
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from rayps_client.errors import ConfigError

from benchmarks.network.shards import HostShard, HostWorker
from benchmarks.picture import Chart, ChartLine, draw_page
from rayps.bench.hosts import HostRank
from rayps.bench.netns import Hosts, NamespaceActor, bits
from rayps.bench.parallel_calls import call_all
from rayps.bench.table import BenchRow, Opt, read_size
from rayps.ps.server_group import ServerGroup

ALGORITHMS = ("ring", "two_shot", "tree", "star", "one_shot")
_START_SECONDS = 120.0
_TURN_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class LawRow(BenchRow):
    """One way of communication, measured and by formula (`*_law`). Seconds are medians."""

    columns: ClassVar[str] = (
        "way | workers | shards | slow: slow link | busiest: bytes of busiest | busiest_law: formula | "
        "total: bytes of all | total_law: formula | seconds | seconds_law: formula | times_law: x formula"
    )

    way: str  # an algorithm of a ring, or "server"
    workers: int
    shards: int  # 0 for a ring
    bytes: int  # size of the vector
    slow: str  # the rate of the last worker's link if it is slower than the others; else ""
    busiest: float  # bytes that the busiest rank, or the busiest shard, sends in one turn
    busiest_law: float
    total: float  # bytes that all hosts send in one turn
    total_law: float
    seconds: float
    seconds_law: float
    times_law: float  # seconds / seconds_law


@dataclass(frozen=True, slots=True)
class Law:
    """The bytes of one turn by the textbook formulas."""

    busiest: float  # bytes that the busiest rank or shard sends
    total: float  # bytes that all hosts send
    line: float  # bytes that the busiest link carries one after another


def compute_law(way: str, workers: int, size: float, shards: int = 0) -> Law:
    """Return the bytes of one turn with a vector of `size` bytes, by the textbook formulas.

    `way` is an algorithm of a ring, for which a turn is an all-reduce, or "server", for which a turn is a push and a
    pull of the whole vector by every worker. For "server", `Law.busiest` is the number for the busiest shard.

    Raises:
        ConfigError: there is no formula for `way`.
    """
    n, depth = workers, math.ceil(math.log2(workers)) if workers else 0
    laws: dict[str, Callable[[], Law]] = {
        "ring": lambda: Law(2 * (n - 1) / n * size, 2 * (n - 1) * size, 2 * (n - 1) / n * size),
        "two_shot": lambda: Law(2 * (n - 1) / n * size, 2 * (n - 1) * size, 2 * (n - 1) / n * size),
        "tree": lambda: Law(depth * size, 2 * (n - 1) * size, 2 * depth * size),
        "star": lambda: Law((n - 1) * size, 2 * (n - 1) * size, 2 * (n - 1) * size),
        "one_shot": lambda: Law((n - 1) * size, n * (n - 1) * size, (n - 1) * size),
        "server": lambda: Law(n * size / shards, 2 * n * size, 2 * max(n / shards, 1) * size),
    }
    if way not in laws or (way == "server" and shards < 1):
        raise ConfigError(f"there is no formula for {way!r} with {shards} shards; use {', '.join(laws)}", way=way)
    return laws[way]()


class LawActor(HostRank):
    """An actor on a host: a rank of a ring, a worker of a server, or a shard."""

    def __init__(self, rank: int, address: str, secret: bytes, timeout: float) -> None:
        super().__init__(rank, address, secret, timeout)
        self._host = address
        self._worker = HostWorker(rank)
        self._shard: HostShard | None = None

    def worker(self, method: str, *args: Any) -> Any:
        """Call a method of this actor as a worker of a parameter server."""
        return getattr(self._worker, method)(*args)

    def serve(self, *args: Any) -> None:
        """Make this actor a shard of a parameter server."""
        self._shard = HostShard(self._host, *args)

    def shard(self, method: str, *args: Any) -> Any:
        """Call a method of this actor as a shard."""
        return getattr(self._shard, method)(*args)


class _ShardHandle:
    """The handle of a shard on one of the hosts, with which a ServerGroup calls it."""

    def __init__(self, actor: NamespaceActor) -> None:
        self._actor, self.name = actor, actor.name

    def call(self, method: str, *args: Any) -> Any:
        return self._actor.call("shard", method, *args)


class _HostsOfLaws:
    """The methods of a cluster that a ServerGroup needs. `spawn` makes the next actor a shard."""

    def __init__(self, actors: Sequence[NamespaceActor]) -> None:
        self._actors = itertools.cycle(actors)

    def spawn(self, target: str, *args: Any, **_: Any) -> _ShardHandle:
        actor = next(self._actors)
        actor.call("serve", *args).result(_START_SECONDS)
        return _ShardHandle(actor)

    def share(self, value: Any) -> bytes:
        return pickle.dumps(value)

    def kill(self, handle: _ShardHandle) -> None:
        handle.call("close").result(_START_SECONDS)


class _Bench:
    """The hosts of a run and their actors: first the workers, then the shards."""

    def __init__(self, hosts: Hosts, workers: int, shards: int, size: int, rate: str, repeats: int) -> None:
        self._hosts, self._size, self._rate, self._repeats = hosts, size, rate, repeats
        self._generations = itertools.count()
        secret = secrets.token_bytes(32)
        actors = [
            hosts.spawn(i, "benchmarks.network.laws:LawActor", i, hosts.addresses[i], secret, 60.0)
            for i in range(workers + shards)
        ]
        for actor in actors:
            actor.started.result(_START_SECONDS)
        self._workers, self._shards = actors[:workers], actors[workers:]

    def ring(self, algorithms: Sequence[str], workers: int, slow: str = "") -> list[LawRow]:
        """Measure an all-reduce of the first `workers` workers with each algorithm; return a row for each.

        `slow` is the rate of the last worker's link during the measurement, or "" if all links have the same rate.
        """
        ranks, rows = self._workers[:workers], list[LawRow]()
        addresses = call_all(ranks, "address", timeout=_START_SECONDS)
        call_all(ranks, "form", addresses, 1, next(self._generations), "ring", timeout=_START_SECONDS)
        if slow:
            self._hosts.shape(workers - 1, slow)
        for name in algorithms:
            before = self._sent()
            found = call_all(ranks, "measure", self._size, [name], self._repeats, timeout=_TURN_SECONDS)
            left = [(b - a) / self._repeats for a, b in zip(before, self._sent(), strict=True)]
            seconds = statistics.median(map(max, zip(*(rank[name] for rank in found), strict=True)))
            rows.append(self._make_row(name, workers, 0, slow, max(left), sum(left), seconds))
        if slow:
            self._hosts.shape(workers - 1, self._rate)
        return rows

    def server(self, workers: int, shards: int) -> LawRow:
        """Measure an asynchronous push and pull of the whole vector by the first `workers` workers."""
        ranks, where = self._workers[:workers], _HostsOfLaws(self._shards)
        with ServerGroup(
            torch.zeros(self._size // 4),
            shards=shards,
            optimizer=_make_sgd,
            staleness=None,
            workers=workers,
            cluster=where,  # type: ignore[arg-type]
        ) as group:
            call_all(ranks, "worker", "join", group, timeout=_TURN_SECONDS)
            before = self._sent()
            turns = [call_all(ranks, "worker", "turn", timeout=_TURN_SECONDS) for _ in range(self._repeats)]
            left = [(b - a) / self._repeats for a, b in zip(before, self._sent(), strict=True)]
            call_all(ranks, "worker", "leave", timeout=_START_SECONDS)
        seconds = statistics.median(max(end for _, end in turn) - min(begin for begin, _ in turn) for turn in turns)
        busiest = max(left[len(self._workers) :])
        return self._make_row("server", workers, shards, "", busiest, sum(left), seconds)

    def _sent(self) -> list[int]:
        return [self._hosts.sent(host) for host in range(len(self._hosts.addresses))]

    def _make_row(
        self, way: str, workers: int, shards: int, slow: str, busiest: float, total: float, seconds: float
    ) -> LawRow:
        law = compute_law(way, workers, self._size, shards)
        expected = law.line / (bits(slow or self._rate) / 8)
        return LawRow(
            way,
            workers,
            shards,
            self._size,
            slow,
            busiest,
            law.busiest,
            total,
            law.total,
            seconds,
            expected,
            seconds / expected,
        )


def bench_laws(
    workers: Annotated[Sequence[int], Opt("Numbers of workers to measure.")] = (2, 4, 8),
    shards: Annotated[Sequence[int], Opt("Numbers of shards of a parameter server to measure; 0: no server.")] = (
        1,
        2,
        4,
        8,
    ),
    *,
    algorithms: Sequence[str] = ALGORITHMS,
    size: Annotated[int, Opt("Size of the vector.", read=read_size, text="1MB")] = 1_000_000,
    rate: Annotated[str, Opt("The rate of each host's network link, in each direction.")] = "100mbit",
    slow_link: Annotated[str | None, Opt("Also measure the ring with one worker's link at this rate.")] = None,
    repeats: Annotated[int, Opt("Number of repetitions of each measurement.")] = 3,
    picture: Annotated[Path | None, Opt("Draw the results into this SVG file.")] = None,
) -> list[LawRow]:
    """Measure each algorithm, and a server with each number of shards, for each number of workers; return a row each.

    If `slow_link` is a rate, also measure the ring with one worker's link at that rate. `picture`: a file for a chart
    of the rows.

    Raises:
        ConfigError: there is no such algorithm, a number is too small, or a rate cannot be read.
        ClusterError: this machine cannot make network namespaces, or an actor failed.
    """
    shards = [each for each in shards if each]
    if min(workers, default=0) < 2 or min(shards, default=1) < 1 or repeats < 1:
        raise ConfigError(
            f"the numbers of workers are {list(workers)}, those of shards {list(shards)}, repeats is {repeats}: "
            "give at least 2 workers, 1 shard and 1 repeat"
        )
    for name in algorithms:
        compute_law(name, 2, size)
    bits(slow_link or rate)
    most, servers = max(workers), max(shards, default=0)
    rows: list[LawRow] = []
    with Hosts(most + servers, rate) as hosts:
        bench = _Bench(hosts, most, servers, size // 4 * 4, rate, repeats)
        for count in workers:
            rows += bench.ring(algorithms, count)
        for count in workers if slow_link else ():
            rows += bench.ring(["ring"], count, str(slow_link))
        rows += [bench.server(count, each) for each in shards for count in workers]
    if picture is not None:
        picture.write_text(draw(rows), encoding="utf-8")
    return rows


def draw(rows: Sequence[LawRow]) -> str:
    """Return charts of the rows as SVG: dots are measurements, lines are the textbook formulas."""
    rings = [row for row in rows if row.way != "server" and not row.slow]
    slow = [row for row in rows if row.slow]
    servers = [row for row in rows if row.way == "server"]

    def lines(some: Sequence[LawRow], name: Callable[[LawRow], str], what: str, unit: float) -> list[ChartLine]:
        return [
            ChartLine(
                each,
                [(row.workers, getattr(row, what) / unit) for row in some if name(row) == each],
                [(row.workers, getattr(row, f"{what}_law") / unit) for row in some if name(row) == each],
            )
            for each in dict.fromkeys(map(name, some))
        ]

    def shard_name(row: LawRow) -> str:
        return f"{row.shards} shard{'s' if row.shards > 1 else ''}"

    def slow_name(row: LawRow) -> str:
        return f"one at {row.slow}" if row.slow else "all alike"

    charts = [
        Chart("Bytes that leave the busiest rank", "workers", "MB", lines(rings, lambda r: r.way, "busiest", 1e6)),
        Chart("Bytes that leave all ranks", "workers", "MB", lines(rings, lambda r: r.way, "total", 1e6)),
        Chart("Time of an all-reduce", "workers", "seconds", lines(rings, lambda r: r.way, "seconds", 1)),
        Chart("Bytes that leave the busiest shard", "workers", "MB", lines(servers, shard_name, "busiest", 1e6)),
        Chart("Time of a push and a pull", "workers", "seconds", lines(servers, shard_name, "seconds", 1)),
    ]
    if slow:
        alike = [row for row in rings if row.way == "ring"]
        charts.append(
            Chart(
                "The ring follows its slowest line",
                "workers",
                "seconds",
                lines([*alike, *slow], slow_name, "seconds", 1),
            )
        )
    return draw_page(charts)


def _make_sgd(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)
