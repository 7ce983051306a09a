"""What others need of sparse tables: the functions of `rayps.ps.tables`, which only jobs with tables load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rayps_client.values import Buffer
from torch import Tensor, nn

from rayps.core.rooms import face_of
from rayps.data.base import Batch
from rayps.ps.client.connections import MapSource
from rayps.ps.client.session import Session
from rayps.ps.protocol.members import MemberChange
from rayps.ps.protocol.space import ServedSegment, Space, SparseTable
from rayps.tensors.learning_rate import Recipe
from rayps.tensors.optim import Factory
from rayps.workload.base import Workload

Lookups = Callable[[Batch], Mapping[str, Tensor]]  # from a batch to the ids of each table: see `Workload.lookups`


class ModelTables(Protocol):
    """One worker's client of all tables of its model: see `rayps.ps.tables.client.Tables`."""

    def begin(self, step: int) -> None:
        """Begin the round whose push has the number `step`."""

    def ahead(self, batch: Batch | None) -> None:
        """Announce the batch of the next round."""

    def pieces(self) -> dict[int, Buffer]:
        """Return the next push as a dict from every segment of all tables to its piece; then begin an empty push."""

    def gradient_fault(self) -> tuple[str, int] | None:
        """Return the first (table, id) whose gradient in the next push is not finite, or None if all are finite."""

    def square(self) -> Tensor:
        """Return the squared Euclidean norm of the next push of all tables."""

    def scale(self, factor: float) -> None:
        """Multiply the next push of all tables by `factor`."""

    def push(self, step: int, weight: float) -> None:
        """Push this round's gradients. Raises LinkError if this push or the one before fails."""

    def settle(self) -> None:
        """Wait until all pushes are acknowledged. Raises LinkError if one fails."""

    def point(self) -> dict[str, float]:
        """Return the seconds of all pulls since the last call, and those that overlapped computation."""

    def close(self) -> None:
        """End what runs beside the worker."""


class TableCopy(Protocol):
    """A copy of the rows of one table of a space: see `rayps.ps.tables.follower.Follower`."""

    def update(self) -> int:
        """Apply the changes since the last update; return how many rows were changed, created or evicted."""

    def __len__(self) -> int: ...

    def get(self, ids: Iterable[int]) -> Tensor:
        """Return the rows with these ids, [number of ids, dim]; zeros for an id without a row."""

    def close(self) -> None:
        """Close the connections to the servers."""


@dataclass(frozen=True, slots=True)
class TableFace:
    """The functions of the room of sparse tables. Where they are defined, they say what they raise."""

    # of a table on servers
    check: Callable[[SparseTable], None]  # raises ConfigError if an option of the table is not valid
    make_segment: Callable[[Space, int, Factory | None], ServedSegment]
    first_state: Callable[[Space, int, Sequence[int]], bytes]
    skip_steps: Callable[[Buffer, Mapping[int, int], Sequence[MemberChange]], tuple[Buffer, int]]
    write: Callable[[Path, SparseTable, Iterable[Buffer]], list[Path]]
    read: Callable[[Path, SparseTable, int, Iterable[int], Sequence[int] | None], Iterator[tuple[int, bytes]]]
    follow: Callable[[MapSource, Space, str, float], TableCopy]
    # of a model with tables
    tables_of: Callable[[nn.Module], tuple[SparseTable, ...]]
    try_out: Callable[[Workload, nn.Module], None]
    try_schedule: Callable[[SparseTable, Recipe], None]
    bind: Callable[[nn.Module, Session, Space, Lookups | None], ModelTables]
    step: Callable[[nn.Module], None]
    save: Callable[[nn.Module, Path], None]
    load: Callable[[nn.Module, Path], nn.Module]
    load_states: Callable[[nn.Module, Mapping[str, Iterable[Buffer]]], nn.Module]


def find_tables() -> TableFace:
    """Return the functions of sparse tables. Raises ConfigError if this installation lacks them."""
    found = face_of("sparse tables")
    assert isinstance(found, TableFace)
    return found
