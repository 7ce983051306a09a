"""Measure all-reduce. Contenders alternate in one run between the same actors, under the same load of the machine.

The functions return rows and print nothing; the command line prints them as tables.
"""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from rayps_client.errors import ConfigError
from torch import Tensor

from rayps.bench.parallel_calls import call_all
from rayps.bench.peer import peer
from rayps.bench.table import BenchRow, Opt, read_sizes
from rayps.cluster.local import ActorHandle, Cluster
from rayps.comm.ring import Ring
from rayps.comm.ring.choose_algorithm import NAMES
from rayps.comm.ring.ring import Backend

RESIDENT = "resident"  # a contender whose vector is in shared memory; the ranks read the sum in place
MPICH = "mpich"
CONTENDERS = (*NAMES, RESIDENT, "gloo", "nccl", MPICH)
_COPY_BYTES = 100 << 20
_BATCHED_BYTES = 2 << 20  # up to this size ten consecutive calls are timed together, because one call is too short


@dataclass(frozen=True, slots=True)
class RingRow(BenchRow):
    """One contender at one size. Times are medians of the slowest rank's time; bandwidths are bytes per second."""

    columns: ClassVar[str] = (
        "bytes | algorithm | transport: over | seconds | bandwidth: bytes/s | "
        "copy_bandwidth: machine's copy | ratio: of copy | times_gloo: x gloo | times_mpich: x mpich"
    )

    bytes: int
    algorithm: str
    transport: str
    workers: int
    repeats: int
    seconds: float
    bandwidth: float  # bytes / seconds
    copy_bandwidth: float  # bytes per second that one process copies in this machine's memory
    ratio: float  # bandwidth / copy_bandwidth
    times_gloo: float | None  # gloo's seconds / seconds; None if gloo did not take part
    times_mpich: float | None  # MPICH's seconds / seconds; None if MPICH did not take part


class RingBench:
    """An actor: one rank, which takes part in the measurement of every contender."""

    def __init__(self, name: str, rank: int, size: int, timeout: float) -> None:
        torch.set_num_threads(1)
        self._name, self._rank, self._size, self._timeout = name, rank, size, timeout
        self._rings: dict[str, Ring] = {}

    def prepare(self, algorithms: list[str]) -> dict[str, str]:
        """Form the rings; return each contender's transport."""
        own = self._join("own")
        for algorithm in algorithms:
            torch_backend: Backend | None = "gloo" if algorithm == "gloo" else "nccl" if algorithm == "nccl" else None
            self._rings[algorithm] = own if torch_backend is None else self._join(torch_backend)
        self._own = own
        return {algorithm: str(ring.choices["transport"]) for algorithm, ring in self._rings.items()}

    def _join(self, backend: Backend) -> Ring:
        return Ring.join(
            f"{self._name}-{backend}", self._rank, self._size, timeout=self._timeout, backend=backend, host=None
        )

    def begin(self, size: int) -> None:
        """Make vectors of `size` bytes for the next turns."""
        n = max(1, size // 4)
        self._x = torch.ones(n)
        shared = self._own.buffer(n) if RESIDENT in self._rings else self._x
        self._calls = calls_of(size)
        self._work: dict[str, Callable[[], Tensor]] = {}
        for name, ring in self._rings.items():
            if name == RESIDENT:
                self._work[name] = lambda ring=ring: ring.total(shared)  # type: ignore[misc]
            elif name in ("gloo", "nccl"):
                self._work[name] = lambda ring=ring: ring.sum(self._x)  # type: ignore[misc]
            else:
                self._work[name] = lambda ring=ring, name=name: ring.sum(self._x, algorithm=name)  # type: ignore[misc]

    def turn(self, number: int) -> dict[str, float]:
        """Run every contender once; return the seconds of an all-reduce of each. The order depends on `number`."""
        names, seconds = list(self._work), dict[str, float]()
        # the order changes with each turn, so that no contender always follows the same one
        for name in names[number % len(names) :] + names[: number % len(names)]:
            self._x.fill_(0.0)
            run = self._work[name]
            run()  # warm-up: touches new pages
            self._own.barrier()
            start = time.perf_counter()
            for _ in range(self._calls):
                run()
            seconds[name] = (time.perf_counter() - start) / self._calls
        return seconds

    def niceness(self) -> int:
        """Return this process's niceness. Ray raises the niceness of its workers."""
        return os.nice(0)

    def copy_bandwidth(self) -> float:
        """Return the best bytes per second that one process copies in memory."""
        source, target = np.ones(_COPY_BYTES, np.uint8), np.zeros(_COPY_BYTES, np.uint8)
        times = []
        for _ in range(9):
            start = time.perf_counter()
            np.copyto(target, source)
            times.append(time.perf_counter() - start)
        return _COPY_BYTES / min(times)  # the shortest time, on which other processes have the least influence

    def close(self) -> None:
        """Close the rings."""
        for ring in {id(ring): ring for ring in self._rings.values()}.values():
            ring.close()


def bench_ring(
    cluster: Cluster,
    workers: Annotated[int, Opt("The number of ranks.")] = 4,
    sizes: Annotated[
        Sequence[int],
        Opt(
            "Sizes of the vector, e.g. 10KB,1MB (1 KB = 1000 bytes).", read=read_sizes, text="1KB,100KB,1MB,10MB,100MB"
        ),
    ] = (1000, 100_000, 1_000_000, 10_000_000, 100_000_000),
    algorithms: Annotated[
        Sequence[str],
        Opt("Contenders: auto, resident, ring, tree, one_shot, two_shot, star, hierarchical, gloo, nccl, mpich."),
    ] = ("auto", RESIDENT, "ring", "tree", "one_shot", "gloo"),
    *,
    repeats: int | None = None,
    timeout: float = 120.0,
) -> list[RingRow]:
    """Measure all-reduce between `workers` actors of `cluster`: a row for each of `sizes` (bytes) and `algorithms`.

    `algorithms` are names of `Ring.form`, or `resident`, `gloo`, `nccl`, `mpich`. `timeout` is in seconds.

    Raises:
        ConfigError: there is no such contender, MPICH is not installed, or `workers` is below 1.
        ClusterError: an actor or MPICH failed.
        LinkError: a rank did not answer within `timeout`.
    """
    for algorithm in algorithms:
        if algorithm not in CONTENDERS:
            raise ConfigError(f"no contender {algorithm!r}; use some of {', '.join(CONTENDERS)}", algorithm=algorithm)
    if workers < 1:
        raise ConfigError(f"workers is {workers}: give at least 1", workers=workers)
    name = f"bench-{secrets.token_hex(4)}"
    ours = [algorithm for algorithm in algorithms if algorithm != MPICH]
    actors: list[ActorHandle] = []
    mpich: Any = None
    try:
        for rank in range(workers):
            actors.append(cluster.spawn("rayps.bench.ring:RingBench", name, rank, workers, timeout))
        transports = call_all(actors, "prepare", ours, timeout=2 * timeout)[0] | {MPICH: MPICH}
        if MPICH in algorithms:
            mpich = peer("mpich:Mpich", workers, timeout, actors[0].call("niceness").result(timeout))
        copy = actors[0].call("copy_bandwidth").result(timeout)
        rows: list[RingRow] = []
        for size in sizes:
            call_all(actors, "begin", size, timeout=timeout)
            turns: list[dict[str, float]] = []
            for number in range(repeats or _repeats(size)):
                found = call_all(actors, "turn", number, timeout=10 * timeout)
                turns.append({algorithm: max(seconds[algorithm] for seconds in found) for algorithm in ours})
                if mpich is not None:
                    turns[-1][MPICH] = mpich.turn(size, calls_of(size))
            rows += _rows(size, turns, [transports[algorithm] for algorithm in algorithms], (workers, copy), algorithms)
        call_all(actors, "close", timeout=timeout)
        return rows
    finally:
        for actor in actors:
            cluster.kill(actor)
        if mpich is not None:
            mpich.close()


def calls_of(size: int) -> int:
    """Return the number of consecutive all-reduces of `size` bytes in one turn."""
    return 10 if size <= _BATCHED_BYTES else 1


def _repeats(size: int) -> int:
    return 30 if size <= 2 << 20 else 9 if size <= 32 << 20 else 5


def _rows(
    size: int, turns: list[dict[str, float]], transports: list[str], machine: tuple[int, float], names: Sequence[str]
) -> list[RingRow]:
    workers, copy = machine
    medians = {name: statistics.median(turn[name] for turn in turns) for name in names}
    rows = []
    for name, transport in zip(names, transports, strict=True):
        seconds = medians[name]
        times = [medians[peer] / seconds if peer in medians else None for peer in ("gloo", MPICH)]
        rows.append(
            RingRow(
                size, name, transport, workers, len(turns), seconds, size / seconds, copy, size / seconds / copy, *times
            )
        )
    return rows
