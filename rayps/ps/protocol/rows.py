"""Rows of a dense table by id: how a worker divides rows among shards, and how a shard reads and steps its rows. Pure.

A table is a parameter of two or more dimensions within the flat vector; a row is one index of its first dimension. Ids
are sorted and made unique once, so that the rows of one shard are adjacent in every message. Pushed rows of the same id
are summed. The worker and the shard retain the last few lists of ids. A list that is used again is neither sorted nor
checked again. Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014 (key caching).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import torch
from rayps_client.errors import ConfigError
from rayps_client.values import Buffer
from torch import Tensor, nn

from rayps.core.job.user_code import user_code
from rayps.core.partition import cut_slices
from rayps.tensors.flat import Layout
from rayps.tensors.optim import SlicedOptimizer

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
PieceBytes: TypeAlias = Buffer | Bytes  # the bytes of a piece, wherever they are

KEPT_LISTS = 4  # number of lists of ids that a worker retains, and that a shard retains for each worker
SEGMENTS = 32  # segments of a large vector, by default
SEGMENT_BYTES = 1 << 17  # smallest segment by default: each one adds about 30 microseconds to a request


@dataclass(frozen=True, slots=True)
class TableInVector:
    """The position of a table in the vector: its number in the layout, its first element, its rows and their width."""

    name: str
    entry: int
    lo: int
    rows: int
    width: int  # elements of a row

    def part(self, lo: int, hi: int) -> tuple[int, int]:
        """Return the rows [first, last) that are within the elements [lo, hi) of the vector.

        Raises:
            ConfigError: one of these bounds lies within a row.
        """
        start, stop = max(lo, self.lo), min(hi, self.lo + self.rows * self.width)
        if start >= stop:
            return 0, 0
        if (start - self.lo) % self.width or (stop - self.lo) % self.width:
            raise ConfigError(
                f"rows of {self.name!r} have {self.width} elements and are cut between servers: use fewer shards (in a "
                f"server group: segments), so that each holds many of the {self.rows} rows"
            )
        return (start - self.lo) // self.width, (stop - self.lo) // self.width


def table_of(layout: Layout, name: str | None = None) -> TableInVector:
    """Return the table of that name, or the only table of the layout if `name` is None.

    Raises:
        ConfigError: there is no such table; or no name is given, and there are several tables or none.
    """
    tables = {e.name: i for i, e in enumerate(layout.entries) if len(e.shape) >= 2 and e.hi > e.lo}
    if name is None and len(tables) == 1:
        name = next(iter(tables))
    if name is None or name not in tables:
        asked = "rows were requested without table=NAME" if name is None else f"there is no table {name!r}"
        known = ", ".join(map(repr, tables)) or "none: a table is a parameter of two or more dimensions"
        raise ConfigError(f"{asked}; the tables are {known}", field="table")
    entry = layout.entries[tables[name]]
    return TableInVector(name, tables[name], entry.lo, entry.shape[0], (entry.hi - entry.lo) // entry.shape[0])


def cut_shards(layout: Layout, shards: int, most: float = 1 / 16) -> list[tuple[int, int]]:
    """Return the elements [lo, hi) of each shard: equal parts, with bounds moved back to the beginning of a row.

    A bound within a row that is larger than the fraction `most` of a shard's part is not moved. The rows of that table
    can then not be pushed or pulled by id. Raises ConfigError if `shards` is below 1.
    """
    widest = int(layout.size // shards * most)
    bounds = [_find_row_begin(layout, cut.stop, widest) for cut in cut_slices(layout.size, shards)]
    return list(zip([0, *bounds[:-1]], bounds, strict=True))


def cut(layout: Layout, segments: int | None = None) -> tuple[tuple[int, int], ...]:
    """Return the elements [lo, hi) of each segment.

    By default there are 32 segments, or fewer for a small vector, but at least 8. An empty vector (a column of a model
    may own no parameters) has one empty segment, whose clock counts the column's pushes.

    Raises:
        ConfigError: `segments` is below 1 or above the number of elements.
    """
    if segments is None:
        if not layout.size:
            return ((0, 0),)
        segments = min(SEGMENTS, max(8, layout.size * layout.dtype.itemsize // SEGMENT_BYTES), layout.size)
    if isinstance(segments, bool) or not isinstance(segments, int) or not 1 <= segments <= layout.size:
        raise ConfigError(
            f"segments is {segments!r}: give a number from 1 to {layout.size}, the parameters' number of elements",
            field="segments",
        )
    return tuple(cut_shards(layout, segments, 1 / 2))  # a server has many segments, so they need not be of equal size


def _find_row_begin(layout: Layout, bound: int, widest: int) -> int:
    for entry in layout.entries:
        if entry.lo < bound < entry.hi and len(entry.shape) >= 2:
            width = table_of(layout, entry.name).width
            return bound - (bound - entry.lo) % width if width <= widest else bound
    return bound


class Ids:
    """The row ids of a request: as the user gave them (`given`), and as they are sent (`unique`, int64, sorted)."""

    def __init__(self, given: Tensor, table: TableInVector) -> None:
        """Sort the ids, and remove duplicates.

        Raises ConfigError if the ids are not whole numbers in one dimension, or the table has no row for one of them.
        """
        if given.dim() != 1 or given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
            raise ConfigError(
                f"ids are a tensor of {given.dtype} with shape {tuple(given.shape)}: give whole numbers with shape [n]"
            )
        self.table = table
        self.given = given.detach().to("cpu", torch.int64, copy=True)
        self.unique = self.given
        self._order: Tensor | None = (
            None  # the permutation that sorts the given ids; None if they are sorted and unique already
        )
        self._places = self.given  # the index in `unique` of each given id, unless they are sorted
        self._repeated = False
        if not bool((self.given[1:] > self.given[:-1]).all()):
            self.unique, self._order = torch.sort(self.given, stable=True)
            new = torch.ones(len(given), dtype=torch.bool)
            torch.ne(self.unique[1:], self.unique[:-1], out=new[1:])
            self._places = torch.empty_like(self.given)
            self._places[self._order] = torch.cumsum(new, 0) - 1
            self._repeated = not bool(new.all())
            if self._repeated:
                self.unique = self.unique[new]
        if len(self.unique) and not 0 <= int(self.unique[0]) <= int(self.unique[-1]) < table.rows:
            wrong = int(self.unique[0] if self.unique[0] < 0 else self.unique[-1])
            raise ConfigError(f"there is no row {wrong} in {table.name!r}: its rows are 0 to {table.rows - 1}")

    @property
    def sorted(self) -> bool:
        """Whether the given ids are sorted and unique already."""
        return self._order is None

    def same(self, given: Tensor, table: TableInVector) -> bool:
        """Return whether this object was made from ids of the same values, and for the same table."""
        return table == self.table and given.shape == self.given.shape and torch.equal(given, self.given)

    def summed(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Sum rows [len(given), width] by id; return the sums, and the permutation that sorts them by id.

        The permutation is None if the sums are sorted already. The function `take_piece` returns a range of this
        result.
        """
        rows = rows.contiguous()
        if not self._repeated:
            return rows, self._order
        total = torch.zeros(len(self.unique), self.table.width, dtype=rows.dtype)
        return total.index_put_((self._places,), rows, accumulate=True), None

    def spread(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Return rows [len(unique), width] in the order of the given ids, [len(given), width].

        Returns `rows` itself if it is in this order already. Otherwise returns a copy, which is in `out` if given.
        """
        if self._order is None:
            return rows
        spread = torch.empty(len(self.given), rows.shape[1], dtype=rows.dtype) if out is None else out
        np.take(_view_cells(rows), self._places.numpy(), out=_view_cells(spread), mode="clip")
        return spread

    def cut(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return for each shard the range [first, last) of `unique` that has the shard's ids.

        `ranges` has the elements [lo, hi) of each shard. Raises as `TableInVector.part`.
        """
        parts = [self.table.part(lo, hi) for lo, hi in ranges]
        places = torch.searchsorted(self.unique, torch.tensor(parts, dtype=torch.int64)).tolist()
        return [(first, last) for first, last in places]


@dataclass(frozen=True, slots=True)
class ShardRows:
    """Some rows of the part of a table that one shard holds.

    `entry` is the table's number in the layout. The part begins at the shard's element `start`; `ids` are the indices
    of the rows in the part.
    """

    entry: int
    start: int
    width: int
    ids: Tensor  # int64, sorted and unique

    @property
    def elements(self) -> int:
        """The number of elements of these rows."""
        return len(self.ids) * self.width

    def of(self, vector: Tensor) -> Tensor:
        """Return these rows of the shard's vector, as a new tensor [len(ids), width]."""
        if not vector.is_cpu:
            return self._view_table(vector)[self.ids.to(vector.device)]
        return _take(self._view_table(vector), self.ids)

    def copy(self, vector: Bytes, into: Bytes) -> None:
        """Copy these rows of the shard's vector to `into`; both are arrays of bytes."""
        if len(self.ids):
            cell = np.dtype((np.void, len(into) // len(self.ids)))
            first = self.start * (cell.itemsize // self.width)
            whole = (len(vector) - first) // cell.itemsize * cell.itemsize
            np.take(vector[first : first + whole].view(cell), self.ids.numpy(), out=into.view(cell), mode="clip")

    def add(self, vector: Tensor, rows: Tensor, alpha: float) -> None:
        """Add `alpha * rows` to these rows of the shard's vector."""
        self.put(vector, self.of(vector).add_(rows.view(-1, self.width), alpha=alpha))

    def put(self, vector: Tensor, rows: Tensor) -> None:
        """Replace these rows of the shard's vector by `rows`."""
        if not vector.is_cpu:
            self._view_table(vector)[self.ids.to(vector.device)] = rows.view(-1, self.width)
        elif len(self.ids):
            _view_cells(self._view_table(vector))[self.ids.numpy()] = _view_cells(
                rows.contiguous().view(-1, self.width)
            )

    def _view_table(self, vector: Tensor) -> Tensor:
        whole = (vector.numel() - self.start) // self.width
        return vector[self.start : self.start + whole * self.width].view(whole, self.width)

    def within(self, wider: ShardRows) -> ShardRows:
        """Return the same rows, with their indices in `wider` as ids; `wider` must contain all of them."""
        return ShardRows(self.entry, 0, self.width, torch.searchsorted(wider.ids, self.ids))


def _view_cells(rows: Tensor) -> Any:
    """Return rows [n, width] as n cells of bytes in the same memory, which numpy copies faster than torch."""
    if not rows.numel():
        return np.empty(0, np.dtype((np.void, 1)))
    return rows.view(-1).view(torch.uint8).numpy().view(np.dtype((np.void, rows.shape[1] * rows.element_size())))


def take_piece(rows: tuple[Tensor, Tensor | None], first: int, last: int, out: Tensor | None = None) -> Tensor:
    """Return the rows `first` to `last` of `rows`, a result of `Ids.summed`: flat, sorted by id, in `out` if given."""
    values, order = rows
    count = (last - first) * values.shape[1]
    if order is None:
        part = values[first:last].view(-1)
        return part if out is None else out[:count].copy_(part)
    found = torch.empty(count, dtype=values.dtype) if out is None else out[:count]
    np.take(
        _view_cells(values), order[first:last].numpy(), out=_view_cells(found.view(-1, values.shape[1])), mode="clip"
    )
    return found


def _take(rows: Tensor, places: Tensor) -> Tensor:
    found = torch.empty(len(places), rows.shape[1], dtype=rows.dtype)
    if len(places):
        np.take(_view_cells(rows), places.numpy(), out=_view_cells(found), mode="clip")
    return found


Area = tuple[int, int] | ShardRows  # the elements of a shard that a push changes: [a, b), or rows


def gather(pushes: Sequence[tuple[Tensor, Area]], size: int) -> tuple[list[Tensor], Area]:
    """Extend the pushes of one round with zeros, so that all have the same area; return the values and this area.

    `pushes` are values, each with the area that it changes. If all are rows of one table, the area of the result is the
    union of these rows; otherwise it is a range. A push of a range must already have values for all `size` elements of
    the shard. A push that changes nothing counts as zeros.
    """
    several = [area for _, area in pushes if isinstance(area, ShardRows)]
    spans = [area for _, area in pushes if not isinstance(area, ShardRows) and area[0] < area[1]]
    if not several:
        hull = (min(a for a, _ in spans), max(b for _, b in spans)) if spans else (0, 0 if pushes else size)
        return [value for value, _ in pushes], hull
    if not spans and all(rows.entry == several[0].entry for rows in several):
        wide = unite_rows(several)
        return [_spread(value, area, wide) for value, area in pushes], wide
    return [_make_dense(value, area, size) for value, area in pushes], (0, size)


def _spread(value: Tensor, area: Area, wide: ShardRows) -> Tensor:
    if isinstance(area, ShardRows) and len(area.ids) == len(wide.ids):
        return value
    found = torch.zeros(wide.elements, dtype=value.dtype)
    if isinstance(area, ShardRows):
        area.within(wide).put(found, value)
    return found


def _make_dense(value: Tensor, area: Area, size: int) -> Tensor:
    if not isinstance(area, ShardRows):
        return value
    found = torch.zeros(size, dtype=value.dtype)
    area.put(found, value)
    return found


def unite_rows(several: Sequence[ShardRows]) -> ShardRows:
    """Return the rows that at least one of `several` contains; all must be of one table."""
    first = several[0]
    ids = first.ids
    if any(not torch.equal(rows.ids, ids) for rows in several[1:]):
        ids = torch.unique(torch.cat([rows.ids for rows in several]))
    return ShardRows(first.entry, first.start, first.width, ids)


def find_rows_here(layout: Layout, lo: int, hi: int, entry: int, ids: Tensor) -> ShardRows:
    """Return the rows with these ids of a table, as rows of the shard that holds the elements lo to hi.

    `entry` is the table's number in the layout; ids count from the first row of the whole table. Raises as
    `local_rows`.
    """
    return local_rows(layout, lo, hi, entry, ids - _find_table(layout, entry).part(lo, hi)[0])


def local_rows(layout: Layout, lo: int, hi: int, entry: int, ids: Tensor) -> ShardRows:
    """Return the rows with these ids of a table, as rows of the shard that holds the elements lo to hi.

    `entry` is the table's number in the layout; ids count from the first of the table's rows on this shard.

    Raises:
        ValueError: the layout has no such table, or the ids are not sorted, not unique, or not all on this shard.
    """
    table = _find_table(layout, entry)
    first, last = table.part(lo, hi)
    inside = len(ids) == 0 or 0 <= int(ids[0]) <= int(ids[-1]) < last - first
    if not inside or not bool((ids[1:] > ids[:-1]).all()):
        raise ValueError(
            f"ids of {table.name!r} must be sorted, unique and among the rows {first} to {last - 1} of this shard"
        )
    return ShardRows(entry, table.lo + first * table.width - lo, table.width, ids)


def _find_table(layout: Layout, entry: int) -> TableInVector:
    if not 0 <= entry < len(layout.entries):
        raise ValueError(f"there is no parameter number {entry}: the layout has {len(layout.entries)}, numbered from 0")
    return table_of(layout, layout.entries[entry].name)


@dataclass(frozen=True, slots=True)
class Listed:
    """A list of ids in `IdLists`, divided among the shards.

    `number` is the list's index in `IdLists`. `cuts` has for each shard the range of its ids in `ids.unique`. `parts`
    has (shard, rows) for each shard that holds some of the rows. `new`: this is the first use of the list.
    """

    number: int
    ids: Ids
    cuts: list[tuple[int, int]]
    parts: list[tuple[int, ShardRows]]
    new: bool
    pulls: dict[int, Any] = field(
        default_factory=dict
    )  # shard -> the encoded pull of its rows, once they have been pulled


class IdLists:
    """The last few lists of ids of one worker, each with a number below `KEPT_LISTS`.

    A new list replaces the oldest.
    """

    def __init__(self, layout: Layout, ranges: Sequence[tuple[int, int]]) -> None:
        self._layout, self._ranges = layout, ranges
        self._lists: list[Listed | None] = [None] * KEPT_LISTS
        self._next = 0

    def find(self, given: Tensor, table: str | None = None) -> Listed:
        """Return the list with these ids, or a new list if none of the last lists has them.

        Raises ConfigError if there is no such table or row, or the ids are not whole numbers in one dimension.
        """
        wanted = table_of(self._layout, table)
        for listed in self._lists:
            if listed is not None and listed.ids.same(given, wanted):
                return listed
        ids, number = Ids(given, wanted), self._next
        cuts = ids.cut(self._ranges)
        parts = [
            (i, find_rows_here(self._layout, lo, hi, wanted.entry, ids.unique[first:last]))
            for i, ((lo, hi), (first, last)) in enumerate(zip(self._ranges, cuts, strict=True))
            if first < last
        ]
        found = Listed(number, ids, cuts, parts, True)
        self._lists[number] = replace(found, new=False)
        self._next = (number + 1) % KEPT_LISTS
        return found


def step_rows(
    sliced: SlicedOptimizer, rows: ShardRows, grad: Tensor, scale: float = 1.0, decays: float | None = None
) -> None:
    """Let the shard's optimizer step only these rows, by `scale` times `grad`, [len(rows.ids), width] or flat.

    The optimizer's state changes only for these rows. So SGD without momentum and Adagrad give the same result as a
    dense gradient that is zero in all other rows. Momentum and Adam are lazy, as `torch.optim.SparseAdam`: the state of
    a row decays only in steps of that row. Weight decay too applies only to these rows, multiplied by `decays` (see
    `SlicedOptimizer.step`). A row that all workers push decays as much as with synchronous workers, and any other row
    less. A state that is one number for all rows, such as Adam's `step`, advances with every call.
    """
    leaf, cut = next((leaf, cut) for leaf, cut in sliced.leaves() if cut.start <= rows.start < cut.stop)
    local = ShardRows(rows.entry, rows.start - cut.start, rows.width, rows.ids)
    optimizer, values = sliced.optimizer, leaf.detach()
    rate = sliced.plain_rate(leaf)
    if rate is not None:
        local.add(values, grad, rate * scale)
        return
    few = nn.Parameter(local.of(values))
    few.grad = grad.view_as(few) if scale == 1.0 else grad.view_as(few) * scale
    state = optimizer.state.get(leaf, {})
    optimizer.state[few] = {key: local.of(v) if _is_per_element(v, leaf) else v for key, v in state.items()}
    whole = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [few] if any(p is leaf for p in group["params"]) else []
    try:
        with sliced.decaying(abs(scale) if decays is None else decays), user_code("optimizer.step"):
            optimizer.step()
    finally:
        for group, params in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = params
        moved = optimizer.state.pop(few)
    local.put(values, few.detach())
    for key, value in moved.items():
        if _is_per_element(value, few):
            if not _is_per_element(state.get(key), leaf):
                state[key] = torch.zeros_like(values)
            local.put(state[key], value)
        else:
            state[key] = value
    optimizer.state[leaf] = state


def _is_per_element(value: object, leaf: Tensor) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() == leaf.numel()
