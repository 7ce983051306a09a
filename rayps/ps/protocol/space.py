"""A space: what one job keeps on a server group, and how it is cut into segments.

Segments are numbered: first those of the dense vector, then those of each table in turn.

A segment on a server (`ServedSegment`) is a state machine without sockets and threads: what `push` returns, applied in
the same order to a backup by `replay`, makes the backup equal to the bit. So a backup, a move and a recovery are one
operation: a state, then the pushes that followed it.
"""

from __future__ import annotations

import base64
import io
import os
import pickle
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

import rayps
from rayps.core.errors import ConfigError
from rayps.core.server_updates import PlainServers
from rayps.core.strategy import ServerHalf
from rayps.core.topology import Servers, servers_of
from rayps.ps.protocol.segment_map import StaticMap
from rayps.tensors.flat import Entry, Layout
from rayps.tensors.learning_rate import Recipe, Ticks
from rayps.tensors.optim import Factory
from rayps.tensors.subset_optimizer import SubsetFactory


@dataclass(frozen=True, slots=True)
class SparseTable:
    """A sparse table of rows [dim] by 64-bit id, cut into `segments` by a hash of the id.

    `optimizer` is a name and its numbers, e.g. {"name": "adagrad", "lr": 0.1}; `policy` the life of a row (see
    `rayps.ps.tables.row_lifecycle`), in plain data; `init` how a row begins, e.g. {"name": "uniform", "scale": 0.05}.
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
    factory (`rayps.workload.base.pack`), which may have a schedule, and `ticks` says which epoch a round is of;
    `strategy` decides staleness and what a server does with pushes.
    """

    name: str
    number: int
    workers: int
    strategy: ServerHalf
    layout: Layout | None = None
    cuts: tuple[tuple[int, int], ...] = ()
    factory: bytes = b""
    tables: tuple[SparseTable, ...] = ()
    quota: Quota = field(default_factory=Quota)
    branch_of: str | None = None
    ticks: Ticks = field(default_factory=Ticks)

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", self.strategy.server_half)

    @property
    def servers(self) -> Servers:
        """The topology of the space's parameters: consistency, update, replay."""
        found = servers_of(self.strategy)
        if found is None:
            raise ConfigError(
                f"space {self.name!r} follows {self.strategy.name}, which keeps nothing on servers: give a strategy "
                "whose topology is Servers(...)",
                field="strategy",
            )
        return found

    @property
    def segments(self) -> int:
        """How many segments there are."""
        return len(self.cuts) + sum(table.segments for table in self.tables)

    def table(self, name: str) -> tuple[SparseTable, int]:
        """A table and the number of its first segment. Raises ConfigError."""
        first = len(self.cuts)
        for table in self.tables:
            if table.name == name:
                return table, first
            first += table.segments
        known = ", ".join(repr(table.name) for table in self.tables) or "none"
        raise ConfigError(f"there is no table {name!r}; the tables are {known}", field="table")

    def table_of(self, index: int) -> tuple[SparseTable, int] | None:
        """The table that a segment belongs to and which of its segments this is; None = the dense vector."""
        index -= len(self.cuts)
        if index < 0:
            return None
        for table in self.tables:
            if index < table.segments:
                return table, index
            index -= table.segments
        raise ConfigError(f"space {self.name!r} has no segment {index}", field="segment")

    def unpack_factory(self) -> Factory:
        """The packed optimizer factory. Runs the user's code, and raises what that raises.

        Classes of rayps are found where they are now, if the factory was packed by a version that had them elsewhere.
        """
        found: Factory = _Unpickler(io.BytesIO(self.factory)).load()
        return found

    def to_json(self) -> dict[str, Any]:
        """The space as JSON-ready data without class paths; see `from_json`.

        A strategy whose servers do something else than `PlainServers` is pickled.

        Raises:
            ConfigError: an option of a table is not plain data.
        """
        layout = self.layout
        return {
            "name": self.name,
            "number": self.number,
            "workers": self.workers,
            "strategy": _strategy_json(self.strategy),
            "layout": None
            if layout is None
            else {
                "dtype": str(layout.dtype).removeprefix("torch."),
                "entries": [[each.name, each.lo, each.hi, list(each.shape)] for each in layout.entries],
            },
            "cuts": [list(bounds) for bounds in self.cuts],
            "factory": base64.b64encode(self.factory).decode("ascii"),
            "tables": [{name: _plain(value, table) for name, value in asdict(table).items()} for table in self.tables],
            "quota": asdict(self.quota),
            "branch_of": self.branch_of,
            "ticks": [*self.ticks.origin, self.ticks.steps],
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Space:
        """The space that `to_json` wrote. Raises KeyError, TypeError, ValueError, ConfigError: it did not."""
        layout = found["layout"]
        first_round, first_epoch, steps = found["ticks"]
        return cls(
            found["name"],
            found["number"],
            found["workers"],
            _strategy(found["strategy"]),
            None if layout is None else Layout(tuple(_entry(*each) for each in layout["entries"]), _dtype(layout)),
            tuple((lo, hi) for lo, hi in found["cuts"]),
            base64.b64decode(found["factory"], validate=True),
            tuple(SparseTable(**table) for table in found["tables"]),
            Quota(**found["quota"]),
            found["branch_of"],
            Ticks((first_round, first_epoch), steps),
        )


# classes that are not public, and in packed factories
_MOVED = {kind.__name__: kind for kind in (Recipe, Layout, Entry, Ticks, SubsetFactory)}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            if module.partition(".")[0] != "rayps":
                raise
            if name in rayps.__all__:
                return getattr(rayps, name)
            found = _MOVED.get(name) or getattr(rayps.data, name, None)
            if found is None:
                raise
            return found


def _entry(name: str, lo: int, hi: int, shape: list[int]) -> Entry:
    return Entry(name, lo, hi, tuple(shape))


def _dtype(layout: dict[str, Any]) -> torch.dtype:
    found = getattr(torch, layout["dtype"], None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"there is no dtype {layout['dtype']!r}")
    return found


def _strategy_json(given: ServerHalf) -> dict[str, Any]:
    half = given.server_half
    if isinstance(half, PlainServers):
        return half.to_wire()
    return {"pickle": base64.b64encode(pickle.dumps(given)).decode("ascii")}


def _strategy(found: dict[str, Any]) -> ServerHalf:
    if "pickle" not in found:
        return PlainServers.from_wire(found)
    strategy = pickle.loads(base64.b64decode(found["pickle"], validate=True))
    if not isinstance(strategy, ServerHalf):
        raise ValueError(f"a {type(strategy).__name__} is not a strategy")
    return strategy


def _plain(value: Any, table: SparseTable) -> Any:
    """What JSON gives back as it was written: text keys, lists, numbers of Python."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(each, table) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each, table) for each in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(getattr(value, "item", None)):  # a number of numpy or torch
        return _plain(value.item(), table)
    raise ConfigError(
        f"table {table.name!r} has the option {value!r} of type {type(value).__name__}: give numbers, text, lists and "
        "dicts only",
        field="table",
    )


@dataclass(frozen=True, slots=True)
class SpaceRank:
    """A rank's place in a space on an elastic server group; a later incarnation of the rank fences this one."""

    door: dict[str, Any] | StaticMap  # the manager's address and the group's secret, or where the segments are
    space: Space
    incarnation: int


class ServedSegment(Protocol):
    """One segment of a space, as its primary and as a copy."""

    seq: int  # how many changes were applied: what `push` gave back, one by one
    operations: int  # pushes and pulls, for the load; rows of them, for a table
    copied: bool  # whether changes go to copies; where not, they come back empty

    @property
    def version(self) -> int:
        """Steps that the optimizer has taken here."""

    @property
    def rows(self) -> int:
        """Of a table; elements of the dense vector."""

    @property
    def nbytes(self) -> int:
        """Bytes of parameters, optimizer state and index."""

    def push(self, rank: int, step: int, weight: float, data: memoryview) -> list[bytes]:
        """File a push, which may close rounds; what copies must apply for it, in order ([]: known, or nothing yet).

        Raises ValueError, ConfigError: it cannot be; nothing was applied.
        """

    def check(self, rank: int, step: int, weight: float, data: memoryview) -> None:
        """Raises what `push` would, so that a request of several segments has effect in all of them or in none."""

    def replay(self, change: memoryview) -> None:
        """On a copy: apply one item of what `push` gave on the primary."""

    def may_pull(self, rank: int) -> bool:
        """Whether a pull of `rank` may be served now."""

    def laggards(self) -> list[int]:
        """The ranks that pulls wait for."""

    def pull(self, rank: int, data: memoryview, out: memoryview | None = None) -> tuple[Any, int, list[bytes]]:
        """Return a buffer with the requested values, the lead of `rank`, and what the backups must apply.

        The buffer is `out` where the values fit. The lead is the number of rounds that `rank` is ahead of the slowest.
        Backups apply the rows that this pull created or counted.
        """

    def read(self, data: memoryview) -> Any:
        """The same outside the clock; changes nothing."""

    def marks(self) -> dict[int, int]:
        """By rank: its next step here."""

    def durable(self, rank: int) -> int:
        """The step of this rank below which all pushes are applied here (copies have what is applied)."""

    def dump(self) -> bytes:
        """The whole state, for a copy, a move, a branch or a checkpoint."""

    def load(self, state: Any) -> None:
        """Become what `dump` gave."""

    def part(self, rounds: int) -> bytes | None:
        """The state after `rounds`, if it is kept (see `keep`)."""

    def keep(self, rounds: Sequence[int]) -> None:
        """After which rounds to keep a state."""

    def branch(self) -> ServedSegment:
        """Another segment that begins with the same values and goes its own way; memory is shared until it differs.

        The branch's clock begins anew, at step 0 for all ranks.
        """
