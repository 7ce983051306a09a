"""The rows of one segment by id: values, optimizer state, last use and use counts.

For a row that is not stored, `read` returns the initial value, and `make` stores it. If the rows exceed a memory limit,
the least recently used rows are moved to disk, until `load_from_disk` loads them again. Hold `lock` during every call.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables.disk import Disk, FieldValues
from rayps.ps.tables.hash_index import ABSENT, HashIndex
from rayps.ps.tables.initial_rows import draw_initial
from rayps.ps.tables.pages import BITS, ROWS, Field, Pages, find_places, release
from rayps.ps.tables.row_optimizers import OptimizerOptions, RowRule
from rayps.ps.tables.wire_format import Counts, Ids, Rows, Slots, view_cells
from rayps.tensors.finite import find_not_finite, is_finite

_BLOCK = 4096  # rows stepped at a time: they stay in the processor's cache
_LEAST = 64  # rows of a segment that may be in memory even if the limit is lower
LIFE = (Field("life", 2, "int64"),)  # the number of uses, and the version of the last use
USES, USED = range(2)


_T = TypeVar("_T", bound=np.generic)
_threads = threading.local()


def _lend_scratch(fields: tuple[Field, ...]) -> list[Rows]:
    """Return memory for a block of rows of each field. A thread gets the same memory again, which saves mapping it."""
    if getattr(_threads, "fields", None) != fields:
        _threads.fields = fields
        _threads.blocks = [np.empty((_BLOCK, each.width), each.dtype) for each in fields]
    blocks: list[Rows] = _threads.blocks
    return blocks


@dataclass(slots=True)
class Columns:
    """Rows as arrays, in the order of their ids. Rows are dumped, saved and loaded in this form."""

    ids: Ids
    rows: Rows  # [n, dim]
    state: FieldValues  # from each field of the optimizer's state to [n, width]
    life: NDArray[np.int64]  # [n, 2]: number of uses, and version of the last use

    def take(self, places: Slots | slice) -> Columns:
        """Return the rows at some indices as copies, or the rows of a slice as views."""
        if isinstance(places, slice):
            state = {name: value[places] for name, value in self.state.items()}
            return Columns(self.ids[places], self.rows[places], state, self.life[places])
        state = {name: _take(value, places) for name, value in self.state.items()}
        return Columns(self.ids[places], _take(self.rows, places), state, _take(self.life, places))


def _take(values: NDArray[_T], places: Slots) -> NDArray[_T]:
    found: NDArray[_T] = np.empty((len(places), values.shape[1]), values.dtype)
    if len(places):
        np.take(view_cells(np.ascontiguousarray(values)), places, out=view_cells(found), mode="clip")
    return found


class RowStore:
    """Rows by id. Rows that do not fit into `memory` bytes are on disk, in `folder`; if `memory` is None, none are."""

    def __init__(self, table: SparseTable, rule: RowRule, memory: int | None = None, folder: str | None = None) -> None:
        self.table, self.rule = table, rule
        self.fields = (Field("rows", table.dim, table.dtype), *rule.fields, *LIFE)
        self._index = HashIndex()
        self._pages = Pages(self.fields)
        self._set_page_table(np.zeros(0, np.int64), plain=True)
        self.row_bytes = self._pages.row_bytes + 24  # includes the row's key and cells in the index
        self._limit = None if memory is None else max(_LEAST, memory // self.row_bytes)
        self._folder = folder
        self._disk: Disk | None = None

    def _set_page_table(self, table: Slots, plain: bool) -> None:
        self._held: list[Slots] = [table]  # the page table, in a list that the finalizer reads
        self._nbytes = 0
        self._plain = plain  # whether the pages are in order, so that each slot is also its row number
        weakref.finalize(self, release, self._pages, self._held).atexit = False

    def __len__(self) -> int:
        return len(self._index) + self.rows_on_disk

    @property
    def rows_on_disk(self) -> int:
        """The number of rows on disk."""
        return 0 if self._disk is None else len(self._disk)

    @property
    def lock(self) -> threading.RLock:
        """The lock of the memory that this store and its branches share."""
        return self._pages.lock

    @property
    def nbytes(self) -> int:
        """The bytes of memory of rows, state and index. The bytes of a shared page are divided among its users.

        While another thread has the lock, the last computed value is returned, because a load report must not wait for
        a long dump.
        """
        if self.lock.acquire(blocking=False):
            try:
                users = self._pages.users[self._held[0]]
                shares = float((1.0 / np.maximum(users, 1)).sum())
                disk = 0 if self._disk is None else self._disk.nbytes
                self._nbytes = int(shares * ROWS * self._pages.row_bytes) + self._index.nbytes + disk
            finally:
                self.lock.release()
        return self._nbytes

    def find(self, ids: Ids) -> Slots:
        """Return the slot of each id, int64 [n]; `ABSENT` for a row that is not in memory.

        Slots are valid while `deletions` is unchanged.
        """
        return self._index.find(ids)

    @property
    def deletions(self) -> int:
        """The number of deletions so far. When it changes, slots found earlier are invalid."""
        return self._index.deletions

    def read(self, ids: Ids, slots: Slots, out: Rows | None = None) -> Rows:
        """Return the rows [n, dim] of ascending ids, given the slots that `find` returned.

        A row that is not stored has its initial value. If `out`, an array [n, dim] of the table's dtype, is given, the
        rows are written to it.
        """
        found: Rows = np.empty((len(ids), self.table.dim), self.table.dtype) if out is None else out
        whole = slots.all()
        if whole or slots.any():
            self._take("rows", self._find_places(slots), found)
        if not whole:
            missing = np.flatnonzero(slots == ABSENT)
            found[missing] = draw_initial(self.table, ids[missing])
            if self._disk is not None and self.rows_on_disk:
                held, values = self._disk.peek(ids[missing])
                found[np.searchsorted(ids, held)] = values["rows"]
        return found

    def load_from_disk(self, ids: Ids) -> bool:
        """Load those rows of `ids` that are on disk into memory; return whether there were any."""
        if self._disk is None or not self.rows_on_disk:
            return False
        held, values = self._disk.peek(ids)
        if len(held):
            self._fill(held, values)
            self._disk.delete(held)
        return len(held) > 0

    def move_to_disk(self) -> None:
        """If more rows are in memory than the limit allows, move the least recently used ones to disk."""
        if self._limit is None or len(self._index) <= self._limit:
            return
        if self._disk is None:
            self._disk = Disk(self.fields, self._folder)
        slots = self._index.slots()
        place = self._find_places(slots)
        used = self._gather("life", place)[:, USED]
        coldest = np.argpartition(used, len(used) - self._limit * 7 // 8)[: len(used) - self._limit * 7 // 8]
        for lo in range(0, len(coldest), _BLOCK):
            some = coldest[lo : lo + _BLOCK]
            values = {field.name: self._gather(field.name, place[some]) for field in self.fields}
            self._disk.put(self._index.keys[slots[some]], values)
        self._index.delete(self._index.keys[slots[coldest]])

    def make(self, ids: Ids, uses: NDArray[np.int64], version: int) -> Slots:
        """Store rows that are not stored yet, with their initial values; return their slots, int64 [n].

        `uses` [n] is the number of earlier uses of each row.
        """
        slots = self._index.insert(ids)
        self._grow(self._index.top)
        place = self._make_writable(slots)
        self._put("rows", place, draw_initial(self.table, ids))
        for field in self.rule.fields:
            self._pages.columns[field.name].rows[place] = field.start
        life = np.full((len(ids), 2), version, np.int64)
        life[:, USES] = uses
        self._put("life", place, life)
        return slots

    def count_uses(self, slots: Slots, counts: Counts, version: int) -> None:
        """Add `counts` (how often each id occurred in the batch) to the rows' use counts; set their last use."""
        place = self._make_writable(slots)
        life = self._read_life(place)
        life[:, USES] += counts
        life[:, USED] = version
        self._put("life", place, life)

    def step(self, slots: Slots, grad: Tensor, scale: float, now: OptimizerOptions | None = None) -> int | None:
        """Step rows with the optimizer by `scale` times the gradient `grad` [n, dim], which does not change.

        `now`: the optimizer's options for this step; None means the table's options. Return the index of the first row
        whose value or state is not finite after the step, or None if all are finite.
        """
        now = self.rule.options if now is None else now
        fault: int | None = None
        place = self._make_writable(slots)
        fields = self.fields[:-1]  # all fields except `life`
        spare = _lend_scratch((self.fields[0], *fields))
        for lo in range(0, len(place), _BLOCK):
            part = place[lo : lo + _BLOCK]
            held = {field.name: value[: len(part)] for field, value in zip(fields, spare[1:], strict=True)}
            for name, value in held.items():
                self._take(name, part, value)
            state = {name: torch.from_numpy(value) for name, value in held.items()}
            g = torch.mul(grad[lo : lo + _BLOCK], scale, out=torch.from_numpy(spare[0][: len(part)]))
            self.rule.step(state["rows"], state, g, now)
            if fault is None and not all(map(is_finite, state.values())):
                wrong = [find_not_finite(value) // value.shape[1] for value in state.values() if not is_finite(value)]
                fault = lo + min(wrong)
            for name, value in held.items():
                self._put(name, part, value)
        return fault

    def delete(self, ids: Ids) -> None:
        """Delete the rows of these ids, all of which must be stored."""
        if self._disk is not None:
            there = self._index.find(ids) == ABSENT
            self._disk.delete(ids[there])
            ids = ids[~there]
        self._index.delete(ids)

    def life(self) -> tuple[Ids, NDArray[np.int64]]:
        """Return the ids [n] of all stored rows, in any order, and [n, 2]: use count and version of the last use."""
        slots = self._index.slots()
        ids, life = self._index.keys[slots], self._read_life(self._find_places(slots))
        if self._disk is None or not self.rows_on_disk:
            return ids, life
        held, other = self._disk.column("life")
        return np.concatenate([ids, held]), np.concatenate([life, other.view(np.int64)])

    def export(self, ids: Ids | None = None) -> Columns:
        """Return all stored rows, or the stored rows of `ids`, in the order of their ids."""
        slots = self._index.slots() if ids is None else self._index.find(ids)
        slots = slots[slots != ABSENT]
        slots = slots[np.argsort(self._index.keys[slots])]
        place = self._find_places(slots)
        state = {field.name: self._gather(field.name, place) for field in self.rule.fields}
        found = Columns(self._index.keys[slots], self._gather("rows", place), state, self._read_life(place))
        if self._disk is None or not self.rows_on_disk:
            return found
        held, values = self._disk.all() if ids is None else self._disk.peek(ids)
        state = {name: np.concatenate([value, values[name]]) for name, value in state.items()}
        rows = np.concatenate([found.rows, values["rows"]])
        life = np.concatenate([found.life, values["life"].view(np.int64)])
        both = np.concatenate([found.ids, held])
        return Columns(both, rows, state, life).take(np.argsort(both))

    def load(self, columns: Columns) -> None:
        """Add rows that are not stored yet, with their optimizer state, use counts and last use."""
        step = len(columns.ids) if self._limit is None else max(1, self._limit)
        for lo in range(0, len(columns.ids), max(1, step)):
            part = slice(lo, lo + step)
            values = {name: value[part] for name, value in columns.state.items()}
            self._fill(columns.ids[part], {**values, "rows": columns.rows[part], "life": columns.life[part]})
            self.move_to_disk()

    def _fill(self, ids: Ids, values: FieldValues) -> None:
        slots = self._index.insert(ids)
        self._grow(self._index.top)
        place = self._make_writable(slots)
        for name, value in values.items():
            self._put(name, place, value)

    def branch(self) -> RowStore:
        """Return a copy; both stores share each page until one of them writes to it."""
        other = RowStore.__new__(RowStore)
        other.table, other.rule, other.fields, other.row_bytes = self.table, self.rule, self.fields, self.row_bytes
        other._limit, other._folder = self._limit, self._folder
        other._index, other._pages = self._index.branch(), self._pages
        other._disk = None if self._disk is None else self._disk.branch()
        self._pages.users[self._held[0]] += 1
        other._set_page_table(self._held[0].copy(), plain=False)
        self._plain = False
        return other

    def _grow(self, top: int) -> None:
        held = self._held[0]
        missing = -(-top // ROWS) - len(held)
        if missing > 0:
            fresh = self._pages.allocate(missing)
            self._plain = self._plain and bool(fresh[0] == len(held)) and bool(fresh[-1] == len(held) + missing - 1)
            self._held[0] = np.concatenate([held, fresh])

    def _find_places(self, slots: Slots) -> Slots:
        return slots if self._plain else find_places(self._held[0], slots)

    def _make_writable(self, slots: Slots) -> Slots:
        """Return the row numbers of rows that the caller will write. Shared pages of these rows are copied first."""
        if self._plain:
            return slots
        table = self._held[0]
        pages = np.unique(slots >> BITS)
        shared = pages[self._pages.users[table[pages]] > 1]
        if len(shared):
            table[shared] = self._pages.copy(table[shared])
        return find_places(table, slots)

    def _read_life(self, place: Slots) -> NDArray[np.int64]:
        return self._gather("life", place).view(np.int64)

    def _gather(self, name: str, place: Slots) -> Rows:
        column = self._pages.columns[name]
        found: Rows = np.empty((len(place), column.width), column.dtype)
        self._take(name, place, found)
        return found

    def _take(self, name: str, place: Slots, out: Rows) -> None:
        if len(place):
            self._pages.columns[name].cells.take(place, out=view_cells(out), mode="clip")

    def _put(self, name: str, place: Slots, values: Rows) -> None:
        if len(place):
            column, held = self._pages.columns[name].cells, view_cells(np.ascontiguousarray(values))
            if column.dtype.kind == "V":  # `put` is faster than an assignment here, but slower for numbers
                column.put(place, held, mode="clip")
            else:
                column[place] = held
