"""How fast the data plane is: contenders alternate in one run between the same actors, so that they share the weather.

The functions return rows and print nothing; the command line makes tables of them.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rayps.cluster import Cluster, Handle
from rayps.errors import ConfigError
from rayps.ring import Ring
from rayps.ring.own import NAMES

RESIDENT = "resident"  # the vector lies in shared memory and its sum is read where it lies
CONTENDERS = (*NAMES, RESIDENT, "gloo", "nccl")
_COPY_BYTES = 100 << 20
_BATCHED_BYTES = 2 << 20  # up to this size ten calls follow each other, as in training; a clock is too coarse for one


@dataclass(frozen=True, slots=True)
class RingRow:
    """One contender at one size. Times are medians of the slowest rank; bandwidths are bytes per second."""

    bytes: int
    algorithm: str
    transport: str
    workers: int
    repeats: int
    seconds: float
    bandwidth: float  # bytes / seconds
    copy_bandwidth: float  # of this machine's memory, by one process
    ratio: float  # bandwidth / copy_bandwidth
    times_gloo: float | None  # how many times faster than gloo in this run, where gloo took part


class RingBench:
    """An actor: one rank of every contender's ring."""

    def __init__(self, name: str, rank: int, size: int, timeout: float) -> None:
        torch.set_num_threads(1)
        self._name, self._rank, self._size, self._timeout = name, rank, size, timeout
        self._rings: dict[str, Ring] = {}

    def prepare(self, algorithms: list[str]) -> dict[str, str]:
        """Form the rings; over what each contender talks."""
        own = self._join("own")
        for algorithm in algorithms:
            self._rings[algorithm] = self._join(algorithm) if algorithm in ("gloo", "nccl") else own
        self._own = own
        return {algorithm: str(ring.choices["transport"]) for algorithm, ring in self._rings.items()}

    def _join(self, backend: str) -> Ring:
        return Ring.join(
            f"{self._name}-{backend}", self._rank, self._size, timeout=self._timeout, backend=backend, host=None
        )

    def measure(self, size: int, repeats: int) -> dict[str, list[float]]:
        """Seconds of every repetition of every contender at `size` bytes; they take turns, in changing order."""
        seconds: dict[str, list[float]]
        n = max(1, size // 4)
        x = torch.ones(n)
        shared = self._own.buffer(n) if RESIDENT in self._rings else x
        work: dict[str, Callable[[], Any]] = {}
        for name, ring in self._rings.items():
            if name == RESIDENT:
                work[name] = lambda ring=ring: ring.total(shared)  # type: ignore[misc]
            elif name in ("gloo", "nccl"):
                work[name] = lambda ring=ring: ring.sum(x)  # type: ignore[misc]
            else:
                work[name] = lambda ring=ring, name=name: ring.sum(x, algorithm=name)  # type: ignore[misc]
        names, seconds = list(work), {name: [] for name in work}
        calls = 10 if size <= _BATCHED_BYTES else 1
        for turn in range(repeats + 1):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:  # nobody always follows the same one
                x.fill_(0.0)
                run = work[name]
                run()
                self._own.barrier()
                start = time.perf_counter()
                for _ in range(calls):
                    run()
                if turn:  # the first one touches new pages
                    seconds[name].append((time.perf_counter() - start) / calls)
        return seconds

    def copy_bandwidth(self) -> float:
        """Bytes per second that one process copies from memory to memory."""
        source, target = np.ones(_COPY_BYTES, np.uint8), np.zeros(_COPY_BYTES, np.uint8)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            np.copyto(target, source)
            times.append(time.perf_counter() - start)
        return _COPY_BYTES / statistics.median(times)

    def close(self) -> None:
        """Leave the rings."""
        for ring in {id(ring): ring for ring in self._rings.values()}.values():
            ring.close()


def bench_ring(
    cluster: Cluster,
    workers: int,
    sizes: Sequence[int],
    algorithms: Sequence[str],
    *,
    repeats: int | None = None,
    timeout: float = 120.0,
) -> list[RingRow]:
    """All-reduce between `workers` actors of `cluster`: a row for each of `sizes` (bytes) and `algorithms`.

    `algorithms` are names of `Ring.form`, and `resident`, `gloo`, `nccl`. Raises ConfigError, ClusterError, LinkError.
    """
    for algorithm in algorithms:
        if algorithm not in CONTENDERS:
            raise ConfigError(f"no contender {algorithm!r}; use some of {', '.join(CONTENDERS)}", algorithm=algorithm)
    if workers < 1:
        raise ConfigError(f"{workers} workers cannot talk; give at least 1", workers=workers)
    name = f"bench-{secrets.token_hex(4)}"
    actors: list[Handle] = []
    try:
        for rank in range(workers):
            actors.append(cluster.spawn("rayps.bench.ring:RingBench", name, rank, workers, timeout))
        transports = _all(actors, "prepare", list(algorithms), timeout=2 * timeout)[0]
        copy = actors[0].call("copy_bandwidth").result(timeout)
        rows: list[RingRow] = []
        for size in sizes:
            turns = repeats or _repeats(size)
            seconds = _all(actors, "measure", size, turns, timeout=10 * timeout)
            rows += _rows(size, turns, seconds, transports, copy)
        _all(actors, "close", timeout=timeout)
        return rows
    finally:
        for actor in actors:
            cluster.kill(actor)


def _repeats(size: int) -> int:
    return 30 if size <= 2 << 20 else 9 if size <= 32 << 20 else 5


def _all(actors: list[Handle], method: str, *args: Any, timeout: float) -> list[Any]:
    replies = [actor.call(method, *args) for actor in actors]
    return [reply.result(timeout) for reply in replies]


def _rows(
    size: int, repeats: int, seconds: list[dict[str, list[float]]], transports: dict[str, str], copy: float
) -> list[RingRow]:
    medians = {
        name: statistics.median(max(times) for times in zip(*(rank[name] for rank in seconds), strict=True))
        for name in seconds[0]
    }
    gloo = medians.get("gloo")
    return [
        RingRow(
            size, name, transports[name], len(seconds), repeats, median, size / median, copy, size / median / copy,
            gloo / median if gloo else None,
        )
        for name, median in medians.items()
    ]  # fmt: skip
