"""A space: what one job keeps on a server group, and how it is cut into segments. Plain data.

Segments are numbered through: first those of the dense vector, then those of each table in turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rayps.errors import ConfigError
from rayps.flat import Layout
from rayps.rates import Ticks
from rayps.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Table:
    """A sparse table of rows [dim] by 64-bit id, cut into `segments` by a hash of the id.

    `optimizer` is a name and its numbers, e.g. {"name": "adagrad", "lr": 0.1}; `policy` the life of a row (see
    `rayps.tables.policy`), in plain data; `init` how a row begins, e.g. {"name": "uniform", "scale": 0.05}.
    """

    name: str
    dim: int
    segments: int = 16
    seed: int = 0
    dtype: str = "float32"
    optimizer: dict[str, Any] = field(default_factory=lambda: {"name": "adagrad", "lr": 0.1})
    init: dict[str, Any] = field(default_factory=lambda: {"name": "normal", "scale": 0.01})
    policy: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Quota:
    """What a space may take; None = no limit."""

    bytes: int | None = None  # of parameters, optimizer state and rows, copies not counted
    operations: float | None = None  # requests a second, over all servers


@dataclass(frozen=True, slots=True)
class Space:
    """One job's name on the group. `number` is given by the manager, and never twice.

    `layout` and `cuts` are of the dense vector (None and empty where there is none); `factory` is a packed optimizer
    factory (`rayps.workload.pack`), which may have a schedule, and `ticks` says which epoch a round is of; `strategy`
    decides staleness and what a server does with pushes.
    """

    name: str
    number: int
    workers: int
    strategy: Strategy
    layout: Layout | None = None
    cuts: tuple[tuple[int, int], ...] = ()
    factory: bytes = b""
    tables: tuple[Table, ...] = ()
    quota: Quota = field(default_factory=Quota)
    branch_of: str | None = None
    ticks: Ticks = field(default_factory=Ticks)

    @property
    def segments(self) -> int:
        """How many segments there are."""
        return len(self.cuts) + sum(table.segments for table in self.tables)

    def table(self, name: str) -> tuple[Table, int]:
        """A table and the number of its first segment. Raises ConfigError."""
        first = len(self.cuts)
        for table in self.tables:
            if table.name == name:
                return table, first
            first += table.segments
        known = ", ".join(repr(table.name) for table in self.tables) or "none"
        raise ConfigError(f"there is no table {name!r}; the tables are {known}", field="table")

    def table_of(self, index: int) -> tuple[Table, int] | None:
        """The table that a segment belongs to and which of its segments this is; None = the dense vector."""
        index -= len(self.cuts)
        if index < 0:
            return None
        for table in self.tables:
            if index < table.segments:
                return table, index
            index -= table.segments
        raise ConfigError(f"space {self.name!r} has no segment {index}", field="segment")
