"""A space: the part of a server group that belongs to one job, and how it is cut into segments.

Segments are numbered: first those of the dense vector, then those of each table in turn.

A segment on a server (`ServedSegment`) is a state machine without sockets and threads. A backup that replays the
changes that `push` returned on the primary, in the same order, is equal to the primary, bit for bit. So a backup, a
move and a recovery are the same operation: send the segment's state, then the changes that followed it.
"""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from rayps_client.errors import ConfigError, RaypsError
from rayps_client.values import Json

from rayps.core.strategy.apply_pushes import PlainServers
from rayps.core.strategy.staleness_bound import MovedBound
from rayps.core.strategy.strategy import ServerHalf
from rayps.core.strategy.topology import Servers, servers_of
from rayps.ps.protocol.members import MemberChange
from rayps.ps.protocol.segment_map import StaticMap
from rayps.tensors.flat import Entry, Layout
from rayps.tensors.learning_rate import Ticks
from rayps.tensors.optim import Factory

_Error = TypeVar("_Error", bound=RaypsError)


@dataclass(frozen=True, slots=True)
class SparseTable:
    """A sparse table of rows [dim] by 64-bit id, cut into `segments` by a hash of the id.

    `optimizer`: a name and its options, e.g. {"name": "adagrad", "lr": 0.1}. `policy`: when rows are admitted and
    evicted (`rayps.ps.tables.row_lifecycle`). `init`: the distribution from which a row's first values are drawn, with
    `seed`, e.g. {"name": "uniform", "scale": 0.05}.
    """

    name: str
    dim: int
    segments: int = 16
    seed: int = 0
    dtype: str = "float32"
    optimizer: dict[str, Any] = field(default_factory=lambda: {"name": "adagrad", "lr": 0.1})
    init: dict[str, Any] = field(default_factory=lambda: {"name": "normal", "scale": 0.01})
    policy: dict[str, Any] = field(default_factory=dict)

    def error(self, kind: type[_Error], text: str, **data: Json) -> _Error:
        """Return an error about this table: its message and its data name the table."""
        return kind(f"table {self.name!r}: {text}", table=self.name, **data)


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of a space; None means no limit."""

    bytes: int | None = None  # bytes of parameters, optimizer state and rows, without backups
    operations: float | None = None  # pushes and pulls a second, on all servers together


@dataclass(frozen=True, slots=True)
class Space:
    """The parameters of one job on a server group: a dense vector, sparse tables, or both, cut into segments.

    `number` is assigned by the manager, and never given to another space. `layout` and `cuts` (the elements [lo, hi) of
    each segment) describe the dense vector; without a dense vector they are None and empty. `factory`: a packed
    optimizer factory (`rayps.core.job.user_module.pack`), with or without a learning-rate schedule. `ticks`: the epoch
    of each round. `strategy`: the staleness, and how a server applies pushes. `branch_of`: the name of the space from
    which this one was branched, or None. `bound`: the staleness bound now, if it is not that of the strategy.
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
    bound: MovedBound | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", self.strategy.server_half)

    @property
    def servers(self) -> Servers:
        """The topology of the space's strategy: consistency, update, replay.

        Raises ConfigError if the strategy stores nothing on servers.
        """
        found = servers_of(self.strategy)
        if found is None:
            raise ConfigError(
                f"the strategy of space {self.name!r} is {self.strategy.name}, which stores nothing on servers: give a "
                "strategy whose topology is Servers(...)",
                field="strategy",
            )
        return found

    @property
    def segments(self) -> int:
        """The number of segments of the dense vector and of all tables."""
        return len(self.cuts) + sum(table.segments for table in self.tables)

    def table(self, name: str) -> tuple[SparseTable, int]:
        """Return a table and the number of its first segment. Raises ConfigError if there is no such table."""
        first = len(self.cuts)
        for table in self.tables:
            if table.name == name:
                return table, first
            first += table.segments
        known = ", ".join(repr(table.name) for table in self.tables) or "none"
        raise ConfigError(f"there is no table {name!r}; the tables are {known}", field="table")

    def table_of(self, index: int) -> tuple[SparseTable, int] | None:
        """Return the table of a segment and the segment's number in the table, or None for the dense vector's segments.

        Raises ConfigError if there is no such segment.
        """
        at = index - len(self.cuts)
        if at < 0:
            return None
        for table in self.tables:
            if at < table.segments:
                return table, at
            at -= table.segments
        raise ConfigError(
            f"space {self.name!r} has no segment {index}: it has {self.segments} segments, numbered from 0",
            field="segment",
        )

    def unpack_factory(self) -> Factory:
        """Unpack the optimizer factory. This runs the user's code, and raises the exceptions of that code."""
        found: Factory = pickle.loads(self.factory)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the space as JSON-ready data without class paths, for `from_json`.

        A strategy whose server half is not `PlainServers` is pickled.

        Raises:
            ConfigError: an option of a table is not plain data.
        """
        layout = self.layout
        return {
            "name": self.name,
            "number": self.number,
            "workers": self.workers,
            "strategy": _write_strategy(self.strategy),
            "layout": None
            if layout is None
            else {
                "dtype": str(layout.dtype).removeprefix("torch."),
                "entries": [astuple(entry) for entry in layout.entries],
            },
            "cuts": self.cuts,
            "factory": base64.b64encode(self.factory).decode("ascii"),
            "tables": [
                {name: _write_plain(value, table) for name, value in asdict(table).items()} for table in self.tables
            ],
            "quota": asdict(self.quota),
            "branch_of": self.branch_of,
            "ticks": [*self.ticks.origin, self.ticks.steps],
            "bound": None if self.bound is None else [self.bound.staleness, *self.bound.since],
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Space:
        """Return the space that `to_json` wrote.

        Raises:
            KeyError, TypeError, ValueError, ConfigError: `found` is not the JSON data of a space.
        """
        layout = found["layout"]
        first_round, first_epoch, steps = found["ticks"]
        bound = found["bound"]
        return cls(
            found["name"],
            found["number"],
            found["workers"],
            _read_strategy(found["strategy"]),
            None if layout is None else _read_layout(layout),
            tuple((lo, hi) for lo, hi in found["cuts"]),
            base64.b64decode(found["factory"], validate=True),
            tuple(SparseTable(**table) for table in found["tables"]),
            Quota(**found["quota"]),
            found["branch_of"],
            Ticks((first_round, first_epoch), steps),
            None if bound is None else MovedBound(bound[0], tuple(bound[1:])),
        )


def _read_layout(found: dict[str, Any]) -> Layout:
    dtype = getattr(torch, found["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"the dtype {found['dtype']!r} of a layout is not a dtype of torch")
    return Layout(tuple(Entry(name, lo, hi, tuple(shape)) for name, lo, hi, shape in found["entries"]), dtype)


def _write_strategy(given: ServerHalf) -> dict[str, Any]:
    half = given.server_half
    if isinstance(half, PlainServers):
        return half.to_wire()
    return {"pickle": base64.b64encode(pickle.dumps(given)).decode("ascii")}


def _read_strategy(found: dict[str, Any]) -> ServerHalf:
    if "pickle" not in found:
        return PlainServers.from_wire(found)
    strategy = pickle.loads(base64.b64decode(found["pickle"], validate=True))
    if not isinstance(strategy, ServerHalf):
        raise ValueError(f"the pickled strategy of a space is a {type(strategy).__name__}, which is not a strategy")
    return strategy


def _write_plain(value: Any, table: SparseTable) -> Any:
    """Return an option as data that JSON can encode and decode without a change: text keys, lists, Python's numbers."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, dict):
        return {str(key): _write_plain(each, table) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_write_plain(each, table) for each in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(getattr(value, "item", None)):  # a number of numpy or torch
        return _write_plain(value.item(), table)
    raise ConfigError(
        f"table {table.name!r} has the option {value!r} of type {type(value).__name__}: give numbers, text, lists and "
        "dicts only",
        field="table",
    )


@dataclass(frozen=True, slots=True)
class SpaceRank:
    """What a worker needs in order to join a space as a rank. Servers refuse earlier incarnations of the same rank."""

    source: dict[str, Any] | StaticMap  # the manager's address and the group's secret, or the map
    space: Space
    incarnation: int


class ServedSegment(Protocol):
    """One segment of a space on a server: the interface of a primary and of a backup."""

    seq: int  # number of changes applied; a change is one item of the list that `push` returns
    operations: int  # the load so far: the number of pushes and pulls, or for a table the number of rows in them
    copied: bool  # whether there are backups; if not, the changes that `push` returns are empty

    @property
    def version(self) -> int:
        """The number of optimizer steps."""

    @property
    def rows(self) -> int:
        """The number of rows of a table, or of elements of the dense vector."""

    @property
    def nbytes(self) -> int:
        """The size in bytes of parameters, optimizer state and, of a table, the index of ids."""

    def push(self, rank: int, step: int, weight: float, data: memoryview) -> list[bytes]:
        """Record a push, which may complete rounds; return the changes that backups must replay, in order.

        Returns [] if the push is a repeated one, or has no effect before the rest of its round arrives. Raises
        ValueError or ConfigError if the push is invalid; then nothing was applied.
        """

    def check(self, rank: int, step: int, weight: float, data: memoryview) -> None:
        """Raise the errors that `push` would raise.

        Called for each segment of a request before the first push, so that the request is applied to all segments or to
        none.
        """

    def replay(self, change: memoryview) -> None:
        """On a backup: apply one change that `push` or `pull` returned on the primary."""

    def may_pull(self, rank: int, step: int | None = None) -> bool:
        """Return whether a pull of `rank`, which counts `step` pushes of its own, may be served now."""

    def laggards(self) -> list[int]:
        """Return the slowest ranks. Pulls of other ranks wait for the pushes of these ranks."""

    def move_bound(self, bound: MovedBound) -> None:
        """Replace the staleness bound from now on."""

    def pull(self, rank: int, data: memoryview, out: memoryview | None = None) -> tuple[Any, int, list[bytes]]:
        """Return a buffer with the requested values, the lead of `rank`, and the changes that backups must replay.

        The buffer is `out` if the values fit into it. The lead is the number of rounds that `rank` is ahead of the
        slowest rank. A pull from a table is a change if it counts uses of rows, or creates rows.
        """

    def read(self, data: memoryview) -> Any:
        """Return a buffer with the requested values, without waiting for the clock. The segment does not change."""

    def marks(self) -> dict[int, int]:
        """Return a dict from each rank to its next step."""

    def durable(self, rank: int) -> int:
        """Return the step of this rank below which all pushes are applied here, and thus sent to all backups.

        A push that waits for the rest of its round is not applied yet.
        """

    def dump(self) -> bytes:
        """Return the whole state, for a backup, a move, a branch or a checkpoint."""

    def load(self, state: Any) -> None:
        """Replace the state by one that `dump` returned."""

    def part(self, rounds: int) -> bytes | None:
        """Return the state after `rounds` rounds, or None if it was not retained (see `keep`)."""

    @property
    def closed(self) -> int:
        """The number of rounds that all ranks that take part have pushed."""

    def change_members(self, change: MemberChange) -> list[bytes]:
        """Apply a change of the ranks that take part; return the changes that backups must replay.

        Raises ConfigError if the strategy applies whole rounds, and ValueError if there is no such rank.
        """

    def keep(self, rounds: Sequence[int]) -> None:
        """Retain the state after each of these rounds, when the round closes."""

    def branch(self, space: Space | None = None, *, factory: Factory | None = None) -> ServedSegment:
        """Return another segment with the same values. The two share memory until one of them changes.

        The clock of the branch starts at step 0 for all ranks. It may belong to another space, with an optimizer
        schedule (`factory`) of its own.
        """

    @property
    def evicted(self) -> int:
        """The number of rows of a table that were evicted so far; 0 for the dense vector."""

    def changed_since(self, version: int) -> bytes:
        """Return the rows of a table that changed after `version`, encoded. Raises ConfigError for the dense vector."""
