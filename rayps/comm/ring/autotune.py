"""The backend of a ring that is rayps's own: which algorithm folds a vector, and over what.

Between ranks of one host vectors are read where they lie (`rayps.comm.ring.shared_memory`); otherwise they travel
over links
(`rayps.comm.ring.algorithms`). `auto` measures the candidates when the ring is formed and keeps a table by size.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

from rayps.comm.ring.algorithms import ALGORITHMS, Idle, Subgroup, add, around, keep, largest
from rayps.comm.ring.describe import ProbeRow, RingChoices
from rayps.comm.ring.mesh import Mesh
from rayps.comm.ring.shared_memory import SharedMemoryFold, tensor_of
from rayps.core.errors import ConfigError
from rayps.core.records import RingTable

NAMES = ("auto", *ALGORITHMS, "hierarchical")
_HALF = (torch.float16, torch.bfloat16)
_PROBES = (1 << 10, 16 << 10, 128 << 10, 1 << 20)  # bytes
_LARGE_PROBE = 4 << 20  # between hosts also this: what a line allows is seen only when it is full
_TRIES, _LARGE_TRIES = 5, 3
_SLOW_SECONDS = 0.05  # a candidate that takes longer is not tried again
_STREAMS = (1, 2, 4)
_SLOW_LINE_SECONDS = 0.5  # for the large probe: so slow a line is filled by one stream
_WORTH = 0.8  # more streams, or an algorithm that sends more, must need at most this share of the time


class Autotuner:
    """Folds vectors for one ring."""

    def __init__(self, mesh: Mesh, algorithm: str, table: RingTable | None, streams: int = 0) -> None:
        self.must_know(algorithm)
        self._mesh = mesh
        self._hosts, most_streams = _hosts(mesh)
        mine = next(group for group in self._hosts if mesh.rank in group)
        self._local = SharedMemoryFold(mesh, mine) if len(mine) > 1 else None
        self.board = self._local if len(self._hosts) == 1 else None
        if self._local is not None:
            mesh.at_end(self._local.close)
        mesh.begin()
        self.algorithm = algorithm
        self.choices: RingChoices = {
            "algorithm": algorithm,
            "transport": "shm" if self.board else _transport(mesh),
            "ranks": mesh.size,
            "hosts": self._hosts,
            "streams": streams or 1,
        }
        if most_streams > 1 and not streams:
            self.choices["streams"], self.choices["streams_seconds"] = self._count_streams()
        if algorithm != "auto" or mesh.size == 1:
            return
        self.choices["table"] = table["table"] if table else self._measure()
        self.choices["why"] = "given" if table else "measured when the ring was formed; the fastest by size"
        self._limits = [(int(row["up_to"] or 1 << 62), str(row["algorithm"])) for row in self.choices["table"]]

    def must_know(self, algorithm: str | None) -> None:
        """Raises ConfigError for the name of no algorithm."""
        if algorithm is not None and algorithm not in NAMES:
            raise ConfigError(f"no algorithm {algorithm!r}; use one of {', '.join(NAMES)}", algorithm=algorithm)

    def fold(self, x: Tensor, kind: str, algorithm: str | None = None) -> None:
        """Fold a flat CPU vector over the ranks in place; `kind` is "add" or "max"."""
        if algorithm is None and self.board is not None and self.board.has_buffers:
            where = self.board.find(x)
            if where is not None:
                x.copy_(tensor_of(self.board.reduce_resident(where, x.dtype, x.nbytes, kind), x.dtype))
                return
        name = algorithm or self.algorithm
        if name == "auto":
            size = x.numel() * x.element_size()
            name = next(name for limit, name in self._limits if size <= limit)
        self._run(name, x, kind)

    def _run(self, name: str, x: Tensor, kind: str) -> None:
        if self.board is not None and name in ("one_shot", "two_shot"):
            (self.board.one_shot if name == "one_shot" else self.board.two_shot)(x, kind)
            return
        if name == "hierarchical":
            self._by_host(x, kind)
            return
        wide = x.float() if x.dtype in _HALF else x
        ALGORITHMS[name](self._mesh, wide, add if kind == "add" else largest)
        if wide is not x:
            x.copy_(wide)

    def _by_host(self, x: Tensor, kind: str) -> None:
        """Inside each host, then around a ring of one rank a host, then inside again: a segment after the other."""
        wide = x.float() if x.dtype in _HALF else x
        leaders = [group[0] for group in self._hosts]
        board, host = self._local, next(i for i, group in enumerate(self._hosts) if self._mesh.rank in group)

        def before(segment: Tensor) -> None:
            if board is not None:
                board.reduce(segment, kind)

        def after(segment: Tensor) -> None:
            if board is not None:
                board.spread(segment)

        if len(leaders) == 1:
            before(wide)
        elif self._mesh.rank == leaders[host]:
            around(Subgroup(self._mesh, leaders), wide, add if kind == "add" else largest, before, after)
        else:
            around(Idle(host, len(leaders)), wide, keep, before, after)
        if wide is not x:
            x.copy_(wide)

    def _count_streams(self) -> tuple[int, dict[int, float]]:
        """How many TCP links between two ranks fill the line, and the seconds that were measured."""
        seconds: dict[int, float] = {}
        for count in _STREAMS:
            self._mesh.use_streams(count)
            seconds[count] = self._slowest([self._time("ring", _LARGE_PROBE)])[0]
            if seconds[count] > _SLOW_LINE_SECONDS:
                break
        best = next(count for count in seconds if seconds[count] * _WORTH <= min(seconds.values()))
        self._mesh.use_streams(best, for_good=True)
        return best, seconds

    def _measure(self) -> list[ProbeRow]:
        """Time every candidate at a few sizes; all ranks agree on the slowest rank's view."""
        # in the order of the bytes that they read or send
        names = ["two_shot", "one_shot"] if self.board else ["ring", "two_shot", "tree", "one_shot"]
        if 1 < len(self._hosts) < self._mesh.size:
            names.insert(0, "hierarchical")
        rows: list[ProbeRow] = []
        slow: set[str] = set()
        for size in _PROBES if self.board else (*_PROBES, _LARGE_PROBE):
            tried = [name for name in names if name not in slow]
            times = self._slowest([self._time(name, size) for name in tried])
            seconds = dict(zip(tried, times, strict=True))
            rows.append({"up_to": 2 * size, "algorithm": min(seconds, key=seconds.__getitem__), "seconds": seconds})
            slow |= {name for name in tried if seconds[name] > _SLOW_SECONDS and name != rows[-1]["algorithm"]}
        # beyond the largest probe what sends more falls behind
        rows[-1]["algorithm"] = next(name for name in tried if seconds[name] * _WORTH <= min(times))
        rows[-1]["up_to"] = None
        return rows

    def _slowest(self, seconds: list[float]) -> list[float]:
        """Everyone's view of the slowest rank's seconds."""
        times = torch.tensor(seconds, dtype=torch.float64)
        self._mesh.begin()
        self._run("one_shot", times, "max")
        return [float(each) for each in times]

    def _time(self, name: str, size: int) -> float:
        x = torch.zeros(size // 4)
        times: list[float] = []
        large = size >= _LARGE_PROBE
        while len(times) < (_LARGE_TRIES if large else _TRIES) + 1:
            self._mesh.begin()
            start = time.perf_counter()
            self._run(name, x, "add")
            times.append(time.perf_counter() - start)
        # the first one touches new pages; of few tries the fastest is the least disturbed
        return min(times[1:]) if large else statistics.median(times[1:])


def _transport(mesh: Mesh) -> str:
    return "+".join(sorted(set(mesh.transports.values()))) or "none"


def _hosts(mesh: Mesh) -> tuple[list[list[int]], int]:
    """Ranks in groups that share a host, and the most streams that any two ranks have.

    They find out by telling each other whom they reach by shared memory.
    """
    size = mesh.size
    if size == 1:
        return [[0]], 1
    seen = torch.zeros(size, size + 1, dtype=torch.int64)
    seen[mesh.rank, :size] = torch.tensor([mesh.transports.get(peer, "shm") == "shm" for peer in range(size)])
    seen[mesh.rank, size] = mesh.streams
    ALGORITHMS["star"](mesh, seen.view(-1), add)
    groups = [[peer for peer in range(size) if row[peer]] for row in seen.tolist()]
    most = int(seen[:, size].max())
    if any(groups[peer] != group for group in groups for peer in group):
        return [[rank] for rank in range(size)], most  # not all see the same: trust nobody's view
    return [group for rank, group in enumerate(groups) if group[0] == rank], most
