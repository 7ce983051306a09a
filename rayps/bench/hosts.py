"""Measure all-reduce between hosts with links of a given rate, and compare it with the links' limit.

The hosts are network namespaces (`rayps.bench.netns`); the ranks are plain processes in them.
"""

from __future__ import annotations

import secrets
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from rayps_client.errors import ConfigError

from rayps.bench.netns import Hosts, bits
from rayps.bench.parallel_calls import call_all
from rayps.bench.table import BenchRow, Opt, read_sizes
from rayps.comm.link import Listener
from rayps.comm.ring import Ring
from rayps.comm.ring.choose_algorithm import NAMES
from rayps.comm.ring.describe import RingChoices

_MAX_PACING_RATE = 47  # Linux's SO_MAX_PACING_RATE, bytes per second; accepted connections inherit it
_START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class HostsRow(BenchRow):
    """One algorithm at one size. `seconds` is the slowest rank's time, as the median of the repetitions."""

    columns: ClassVar[str] = (
        "bytes | algorithm | transport: over | hosts | ranks: ranks a host | streams | seconds | "
        "bandwidth: bytes/s | limit: link's limit | share: of limit"
    )

    bytes: int
    algorithm: str
    transport: str
    hosts: int
    ranks: int  # number of ranks on each host
    streams: int  # TCP connections between two ranks
    seconds: float
    bandwidth: float  # bytes / seconds, in bytes per second
    limit: float  # least seconds on these links: 2(H-1)/H x bytes / rate, for H hosts
    share: float  # limit / seconds


class HostRank:
    """An actor: one rank of a ring between hosts."""

    def __init__(self, rank: int, address: str, secret: bytes, timeout: float, stream_rate: str | None = None) -> None:
        torch.set_num_threads(1)
        self._rank, self._secret, self._timeout = rank, secret, timeout
        self._listener = Listener(f"rank {rank}", secret, host=address)
        for listening in self._listener.sockets if stream_rate is not None else []:
            listening.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, int(bits(str(stream_rate)) / 8))
        self._ring: Ring | None = None

    def address(self) -> str:
        """Return this rank's address."""
        return self._listener.address

    def form(self, addresses: list[str], streams: int = 0, generation: int = 0, algorithm: str = "auto") -> RingChoices:
        """Form the ring and close an earlier one; return the transport and algorithms that the ring chose."""
        if self._ring is not None:
            self._ring.close()
        self._ring = Ring.form(
            self._rank,
            addresses,
            self._listener,
            secret=self._secret,
            generation=generation,
            timeout=self._timeout,
            streams=streams,
            algorithm=algorithm,
        )
        return self._ring.choices

    def measure(self, size: int, algorithms: list[str], repeats: int) -> dict[str, list[float]]:
        """Return for each algorithm the seconds of every repetition at `size` bytes. The algorithms alternate."""
        ring = self._ring
        assert ring is not None, "call form() first"
        x = torch.empty(max(1, size // 4))
        seconds: dict[str, list[float]] = {name: [] for name in algorithms}
        for _ in range(repeats):
            for name in algorithms:
                x.fill_(self._rank + 1.0)
                ring.barrier()
                start = time.perf_counter()
                ring.sum(x, algorithm=name)
                seconds[name].append(time.perf_counter() - start)
                assert x[0] == x[-1] == ring.size * (ring.size + 1) / 2, f"{name} returned a wrong sum"
        return seconds


def bench_hosts(
    hosts: int,
    ranks: int,
    rate: str,
    sizes: Sequence[int],
    algorithms: Sequence[str],
    *,
    streams: int = 0,
    stream_rate: str | None = None,
    repeats: int = 5,
    timeout: float = 120.0,
) -> list[HostsRow]:
    """Measure all-reduce over `hosts` hosts of `ranks` ranks on links of `rate`: a row for each size and algorithm.

    `streams` is the number of TCP connections between two ranks; 0 means as many as a measurement finds necessary to
    fill the link. `stream_rate` limits the rate of each connection, as many clouds do. `timeout` is in seconds.

    Raises:
        ConfigError: there is no such algorithm, or there are too few hosts or ranks.
        ClusterError: this machine cannot make network namespaces.
        LinkError: a rank did not answer within `timeout`.
    """
    for algorithm in algorithms:
        if algorithm not in NAMES:
            raise ConfigError(f"no algorithm {algorithm!r}; use some of {', '.join(NAMES)}", algorithm=algorithm)
    if hosts < 2 or ranks < 1:
        raise ConfigError(
            f"hosts is {hosts} and ranks on each host is {ranks}: give at least 2 hosts, and 1 rank on each",
            hosts=hosts,
            ranks=ranks,
        )
    secret, rows = secrets.token_bytes(32), list[HostsRow]()
    with Hosts(hosts, rate) as net:
        places = [host for host in range(hosts) for _ in range(ranks)]
        actors = [
            net.spawn(host, "rayps.bench.hosts:HostRank", rank, net.addresses[host], secret, timeout, stream_rate)
            for rank, host in enumerate(places)
        ]
        for actor in actors:
            actor.started.result(_START_SECONDS)
        addresses = call_all(actors, "address", timeout=_START_SECONDS)
        choices = call_all(actors, "form", addresses, streams, timeout=timeout)[0]
        for size in sizes:
            seconds = call_all(actors, "measure", size, list(algorithms), repeats, timeout=10 * timeout)
            limit = 2 * (hosts - 1) / hosts * size / (bits(rate) / 8)
            for name in algorithms:
                median = statistics.median(map(max, zip(*(rank[name] for rank in seconds), strict=True)))
                rows.append(
                    HostsRow(
                        size,
                        name,
                        choices["transport"],
                        hosts,
                        ranks,
                        choices["streams"],
                        median,
                        size / median,
                        limit,
                        limit / median,
                    )
                )
    return rows


def bench_ranks(
    hosts: Annotated[int, Opt("Number of hosts; they are network namespaces, which need root.")] = 2,
    ranks: Annotated[Sequence[int], Opt("Numbers of ranks on each host to measure, e.g. 1,2.")] = (1, 2),
    rate: Annotated[str, Opt("The rate of each host's network link, in each direction.")] = "1gbit",
    sizes: Annotated[
        Sequence[int], Opt("Sizes of the vector, e.g. 10KB,1MB (1 KB = 1000 bytes).", read=read_sizes, text="100MB")
    ] = (100_000_000,),
    algorithms: Annotated[Sequence[str], Opt("auto, ring, hierarchical, two_shot, tree, one_shot, star.")] = (
        "ring",
        "hierarchical",
        "auto",
    ),
    streams: Annotated[
        int, Opt("TCP connections between two ranks; 0: as many as a measurement finds necessary to fill the link.")
    ] = 0,
    stream_rate: Annotated[str | None, Opt("The largest rate of one TCP connection, e.g. 300mbit.")] = None,
    repeats: Annotated[int, Opt("Number of measurements of each algorithm and size.")] = 5,
) -> list[HostsRow]:
    """Measure all-reduce for each number of ranks on a host. Raises the errors of `bench_hosts`."""
    return [
        row
        for count in ranks
        for row in bench_hosts(
            hosts, count, rate, sizes, algorithms, streams=streams, stream_rate=stream_rate, repeats=repeats
        )
    ]
