"""Measure gradient compression: all-reduce of a gradient, uncompressed and compressed, on links of a given rate.

The hosts are network namespaces (`rayps.bench.netns`). Ranks on one host use shared memory. The contender `auto` uses
the compression that training would choose, and its row has the reason. All contenders alternate in one run.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from rayps_client.errors import ConfigError
from rayps_client.values import JsonObject

from rayps.bench.hosts import HostRank
from rayps.bench.netns import Hosts
from rayps.bench.parallel_calls import call_all
from rayps.bench.table import BenchRow, Opt, read_size
from rayps.comm.ring import Ring
from rayps.comm.ring.compressed_mean import CompressedRing, choose_compressed_ring
from rayps.core.strategy.compression import compression_of
from rayps.tensors.flat import Gradient

OFF = "off"
_START_SECONDS = 60.0
_RUN_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class CompressionRow(BenchRow):
    """One contender. `seconds` is the slowest rank's time for one mean, as the median of the repetitions."""

    columns: ClassVar[str] = "compression | seconds | sent: bytes sent | times_off: x off | picked | why"

    bytes: int
    compression: str
    hosts: int
    ranks: int  # number of ranks on each host
    rate: str  # rate of each host's link, in each direction
    seconds: float
    sent: float  # bytes that a rank sends, or writes to shared memory, for one mean
    times_off: float  # time without compression / time
    picked: str  # the compression that was used; it differs from `compression` for auto
    why: str  # the reason for `picked`


class CompressionRank(HostRank):
    """An actor: one rank of the ring over which every compression is measured."""

    def means(self, size: int, names: list[str], repeats: int) -> dict[str, tuple[list[float], float, JsonObject]]:
        """Measure each compression in `names`.

        Return for each name: the seconds of every repetition, the bytes that this rank sent for one mean, and an event
        with the compression used and its reason.
        """
        ring = self._ring
        assert ring is not None, "call form() first"
        gradient = Gradient(ring.buffer(max(1, size // 4) + 1), samples=32)
        ways: dict[str, tuple[Ring | CompressedRing, JsonObject]] = {
            name: (ring, {"compression": OFF, "message": "given"})
            if name == OFF
            else choose_compressed_ring(ring, name, gradient)
            for name in names
        }
        found: dict[str, tuple[list[float], float, JsonObject]] = {}
        for name, (_, event) in ways.items():
            found[name] = ([], 0.0, event)
        sample = torch.randn(len(gradient.packed))
        for turn in range(repeats + 1):
            for name, (way, event) in ways.items():
                gradient.packed.copy_(sample)
                ring.barrier()
                before, start = ring.bytes_sent, time.perf_counter()
                way.mean(gradient, in_place=False)
                seconds = time.perf_counter() - start
                if turn:  # warm-up: touches new pages
                    found[name] = ([*found[name][0], seconds], float(ring.bytes_sent - before), event)
        return found


def bench_compression(
    hosts: Annotated[int, Opt("Number of hosts; they are network namespaces, which need root.")] = 2,
    ranks: Annotated[int, Opt("Ranks on each host.")] = 1,
    rate: Annotated[str, Opt("The rate of each host's network link, in each direction.")] = "100mbit",
    size: Annotated[int, Opt("Size of the gradient.", read=read_size, text="10MB")] = 10_000_000,
    names: Annotated[Sequence[str], Opt("fp16, bf16, int8, top_k, top_k:FRACTION, auto; off is always measured.")] = (
        "fp16",
        "bf16",
        "int8",
        "top_k",
        "auto",
    ),
    *,
    repeats: Annotated[int, Opt("Number of measurements of each compression.")] = 5,
) -> list[CompressionRow]:
    """Measure each compression in `names`, and "off". `size` is the gradient's number of bytes (float32).

    Raises:
        ConfigError: there is no such compression, or fewer than two ranks.
        ClusterError: this machine cannot make network namespaces.
    """
    names = [OFF, *(name for name in names if name != OFF)]
    for name in names[1:]:
        compression_of(name)
    if hosts < 1 or ranks < 1 or hosts * ranks < 2 or repeats < 1:
        raise ConfigError(
            f"hosts is {hosts}, ranks on each host is {ranks}, repeats is {repeats}: give at least 2 ranks on all "
            "hosts together, and 1 repeat"
        )
    secret = secrets.token_bytes(32)
    with Hosts(hosts, rate) as net:
        places = [host for host in range(hosts) for _ in range(ranks)]
        actors = [
            net.spawn(host, "benchmarks.network.compression:CompressionRank", rank, net.addresses[host], secret, 120.0)
            for rank, host in enumerate(places)
        ]
        for actor in actors:
            actor.started.result(_START_SECONDS)
        call_all(actors, "form", call_all(actors, "address", timeout=_START_SECONDS), timeout=_START_SECONDS)
        found = call_all(actors, "means", size, names, repeats, timeout=_RUN_SECONDS)
    medians = {
        name: statistics.median(map(max, zip(*(rank[name][0] for rank in found), strict=True))) for name in names
    }
    return [
        CompressionRow(
            size,
            name,
            hosts,
            ranks,
            rate,
            medians[name],
            max(rank[name][1] for rank in found),
            medians[OFF] / medians[name],
            found[0][name][2]["compression"],
            found[0][name][2]["message"],
        )
        for name in names
    ]
