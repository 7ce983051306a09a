"""The backend of a ring that is rayps's own: which algorithm folds a vector, and over what.

Between ranks of one host vectors are read where they lie (`rayps.ring.board`); otherwise they travel over links
(`rayps.ring.algorithms`). `auto` measures the candidates when the ring is formed and keeps a table by size.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor

from rayps.errors import ConfigError
from rayps.ring.algorithms import ALGORITHMS, Part, add, largest
from rayps.ring.board import Board, tensor_of
from rayps.ring.mesh import Mesh

NAMES = ("auto", *ALGORITHMS, "hierarchical")
_HALF = (torch.float16, torch.bfloat16)
_PROBES = (1 << 10, 16 << 10, 128 << 10, 1 << 20)  # bytes
_TRIES = 5
_SLOW_SECONDS = 0.05  # a candidate that takes longer is not tried again


class Own:
    """Folds vectors for one ring."""

    def __init__(self, mesh: Mesh, algorithm: str, table: dict[str, Any] | None) -> None:
        self.must_know(algorithm)
        self._mesh = mesh
        self._hosts = _hosts(mesh)
        mine = next(group for group in self._hosts if mesh.rank in group)
        self._local = Board(mesh, mine) if len(mine) > 1 else None
        self.board = self._local if len(self._hosts) == 1 else None
        if self._local is not None:
            mesh.at_end(self._local.close)
        mesh.begin()
        self.algorithm = algorithm
        self.choices: dict[str, Any] = {
            "algorithm": algorithm, "transport": "shm" if self.board else _transport(mesh), "ranks": mesh.size,
            "hosts": self._hosts,
        }  # fmt: skip
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
        """Inside each host, then around a ring of one rank a host, then inside again."""
        wide = x.float() if x.dtype in _HALF else x
        if self._local is not None:
            self._local.reduce(wide, kind)
        leaders = [group[0] for group in self._hosts]
        if self._mesh.rank in leaders and len(leaders) > 1:
            ALGORITHMS["ring"](Part(self._mesh, leaders), wide, add if kind == "add" else largest)
        if self._local is not None and len(leaders) > 1:
            self._local.spread(wide)
        if wide is not x:
            x.copy_(wide)

    def _measure(self) -> list[dict[str, Any]]:
        """Time every candidate at a few sizes; all ranks agree on the slowest rank's view."""
        names = ["one_shot", "two_shot"] if self.board else ["ring", "tree", "one_shot", "two_shot"]
        if 1 < len(self._hosts) < self._mesh.size:
            names.append("hierarchical")
        rows: list[dict[str, Any]] = []
        slow: set[str] = set()
        for size in _PROBES:
            times = torch.full((len(names),), 1e9, dtype=torch.float64)
            for i, name in enumerate(names):
                if name not in slow:
                    times[i] = self._time(name, size)
            self._mesh.begin()
            self._run("one_shot", times, "max")
            best = int(times.argmin())
            slow |= {name for name, t in zip(names, times.tolist(), strict=True) if t > _SLOW_SECONDS}
            if len(slow) == len(names):
                slow.remove(names[best])
            seen = {name: t for name, t in zip(names, times.tolist(), strict=True) if t < 1e9}
            rows.append({"up_to": 2 * size, "algorithm": names[best], "seconds": seen})
        rows[-1]["up_to"] = None
        return rows

    def _time(self, name: str, size: int) -> float:
        x = torch.zeros(size // 4)
        times: list[float] = []
        while len(times) < _TRIES + 1:
            self._mesh.begin()
            start = time.perf_counter()
            self._run(name, x, "add")
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])  # the first one touches new pages


def _transport(mesh: Mesh) -> str:
    return "+".join(sorted(set(mesh.transports.values()))) or "none"


def _hosts(mesh: Mesh) -> list[list[int]]:
    """Ranks in groups that share a host; they find out by telling each other whom they reach by shared memory."""
    if mesh.size == 1:
        return [[0]]
    seen = torch.zeros(mesh.size, mesh.size, dtype=torch.int64)
    seen[mesh.rank] = torch.tensor([mesh.transports.get(peer, "shm") == "shm" for peer in range(mesh.size)])
    ALGORITHMS["star"](mesh, seen.view(-1), add)
    groups = [[peer for peer in range(mesh.size) if row[peer]] for row in seen.tolist()]
    if any(groups[peer] != group for group in groups for peer in group):
        return [[rank] for rank in range(mesh.size)]  # not all see the same: trust nobody's view
    return [group for rank, group in enumerate(groups) if group[0] == rank]
