"""The rows of one segment: values, optimizer state, last use and true counts beside each other, found by id. Pure.

A row that nobody stored has its first value all the same: `read` gives it, and `make` stores it. Rows beyond a limit
lie on disk, those used longest ago, until `warm` brings them back. Call it under `lock`.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables.disk import Disk
from rayps.ps.tables.hash_index import ABSENT, HashIndex
from rayps.ps.tables.initial_rows import initial
from rayps.ps.tables.pages import BITS, ROWS, Field, Pages, places, release
from rayps.ps.tables.row_optimizers import Knobs, RowRule
from rayps.ps.tables.wire_format import Counts, Ids, cells
from rayps.tensors.finite import first_not_finite, is_finite

_BLOCK = 4096  # rows stepped at a time: they stay in the cache
_LEAST = 64  # rows of a segment that are in memory whatever the limit
LIFE = (Field("life", 2, "int64"),)  # uses by true counts, version of the last use
USES, USED = range(2)


_threads = threading.local()


def _scratch(*fields: Any) -> list[Any]:
    """This thread's memory for a block of a gradient and of fields: new memory would have to be mapped each time."""
    held: dict[Any, list[Any]] = _threads.__dict__
    if fields not in held:
        held.clear()
        held[fields] = [np.empty((_BLOCK, each.width), each.dtype) for each in (fields[0], *fields[1])]
    return held[fields]


@dataclass(slots=True)
class Columns:
    """Rows as arrays, in the order of their ids: what is dumped, saved and loaded."""

    ids: Ids
    rows: Any  # [n, dim]
    state: dict[str, Any]  # by field of the optimizer: [n, width]
    life: Any  # int64 [n, 2]: uses, version of the last use

    def take(self, places: Any) -> Columns:
        """Some of them, by an array of numbers, or a slice, which is a view."""
        if isinstance(places, slice):
            state = {name: value[places] for name, value in self.state.items()}
            return Columns(self.ids[places], self.rows[places], state, self.life[places])
        state = {name: _taken(value, places) for name, value in self.state.items()}
        return Columns(self.ids[places], _taken(self.rows, places), state, _taken(self.life, places))


def _taken(values: Any, places: Any) -> Any:
    found = np.empty((len(places), values.shape[1]), values.dtype)
    if len(places):
        np.take(cells(np.ascontiguousarray(values)), places, out=cells(found), mode="clip")
    return found


class RowStore:
    """Rows by id; beyond `memory` bytes on disk, in `folder`."""

    def __init__(self, table: SparseTable, rule: RowRule, memory: int | None = None, folder: str | None = None) -> None:
        self.table, self.rule = table, rule
        self.fields = (Field("rows", table.dim, table.dtype), *rule.fields, *LIFE)
        self._index = HashIndex()
        self._pages = Pages(self.fields)
        self._adopt(np.zeros(0, np.int64), plain=True)
        self.row_bytes = self._pages.row_bytes + 24  # with its key and cells of the index
        self._limit = None if memory is None else max(_LEAST, memory // self.row_bytes)
        self._folder = folder
        self._disk: Disk | None = None

    def _adopt(self, table: Any, plain: bool) -> None:
        self._held = [table]  # the page table, in a list that whoever gives the pages back reads last
        self._nbytes = 0
        self._plain = plain  # the pages are in order: a slot is its own place
        weakref.finalize(self, release, self._pages, self._held).atexit = False

    def __len__(self) -> int:
        return len(self._index) + self.cold

    @property
    def cold(self) -> int:
        """Rows that lie on disk."""
        return 0 if self._disk is None else len(self._disk)

    @property
    def lock(self) -> threading.RLock:
        """Guards the memory, which branches share."""
        return self._pages.lock

    @property
    def nbytes(self) -> int:
        """Bytes in memory of the rows, their state and the index; a page that is shared counts by its users."""
        if self.lock.acquire(blocking=False):  # who reports the load must not wait for a long dump: it says the last
            try:
                users = self._pages.users[self._held[0]]
                shares = float((1.0 / np.maximum(users, 1)).sum())
                disk = 0 if self._disk is None else self._disk.nbytes
                self._nbytes = int(shares * ROWS * self._pages.row_bytes) + self._index.nbytes + disk
            finally:
                self.lock.release()
        return self._nbytes

    def find(self, ids: Ids) -> Any:
        """The slot of each id, `ABSENT` where it is not in memory. Those found are good while `lost` is the same."""
        return self._index.find(ids)

    @property
    def lost(self) -> int:
        """Deletions so far. Slots that were found are good until it is another number."""
        return self._index.lost

    def read(self, ids: Ids, slots: Any) -> Any:
        """The rows of ascending ids, which `find` found there, [n, dim]; first values of those that are not stored."""
        found = np.empty((len(ids), self.table.dim), self.table.dtype)
        missing = np.flatnonzero(slots == ABSENT)
        if len(missing) < len(ids):
            self._take("rows", self._places(slots), found)
        if len(missing):
            found[missing] = initial(self.table, ids[missing])
            if self.cold:
                held, values = self.cold_rows(ids[missing])
                found[np.searchsorted(ids, held)] = values["rows"]
        return found

    def cold_rows(self, ids: Ids) -> tuple[Ids, dict[str, Any]]:
        """Those of the ids whose rows lie on disk, ascending, and their values by field; they stay there."""
        assert self._disk is not None
        return self._disk.peek(ids)

    def warm(self, ids: Ids) -> bool:
        """Bring rows back from the disk, where some of these lie there; whether some did."""
        if not self.cold:
            return False
        held, values = self.cold_rows(ids)
        if len(held):
            self._fill(held, values)
            self._disk.delete(held)  # type: ignore[union-attr]  # some lie there
        return len(held) > 0

    def cool(self) -> None:
        """Put the rows used longest ago on disk, where there are more in memory than may be."""
        if self._limit is None or len(self._index) <= self._limit:
            return
        if self._disk is None:
            self._disk = Disk(self.fields, self._folder)
        slots = self._index.slots()
        place = self._places(slots)
        used = self._gather("life", place)[:, USED]
        coldest = np.argpartition(used, len(used) - self._limit * 7 // 8)[: len(used) - self._limit * 7 // 8]
        for lo in range(0, len(coldest), _BLOCK):
            some = coldest[lo : lo + _BLOCK]
            values = {field.name: self._gather(field.name, place[some]) for field in self.fields}
            self._disk.put(self._index.keys[slots[some]], values)
        self._index.delete(self._index.keys[slots[coldest]])

    def make(self, ids: Ids, uses: Any, version: int) -> Any:
        """Store rows that are not there, with their first values and `uses` before now; their slots."""
        slots = self._index.insert(ids)
        self._reach(self._index.top)
        place = self._own(slots)
        self._put("rows", place, initial(self.table, ids))
        for field in self.rule.fields:
            self._pages.columns[field.name].rows[place] = field.start
        life = np.full((len(ids), 2), version, np.int64)
        life[:, USES] = uses
        self._put("life", place, life)
        return slots

    def use(self, slots: Any, counts: Counts, version: int) -> None:
        """Count uses of rows, as often as each id really came."""
        place = self._own(slots)
        life = self._gather("life", place)
        life[:, USES] += counts
        life[:, USED] = version
        self._put("life", place, life)

    def step(self, slots: Any, grad: Tensor, scale: float, now: Knobs | None = None) -> int | None:
        """Let the optimizer step these rows by `scale` times a gradient [n, dim], which is only read.

        `now`: the numbers of the optimizer for this step; None = its own. Returns the number among them of the first
        row that is not finite after the step, with its state; None = all are.
        """
        now = self.rule.knobs if now is None else now
        fault: int | None = None
        place = self._own(slots)
        fields = self.fields[:-1]  # all but the life
        spare = _scratch(self.fields[0], fields)
        for lo in range(0, len(place), _BLOCK):
            part = place[lo : lo + _BLOCK]
            held = {field.name: value[: len(part)] for field, value in zip(fields, spare[1:], strict=True)}
            for name, value in held.items():
                self._take(name, part, value)
            state = {name: torch.from_numpy(value) for name, value in held.items()}
            g = torch.mul(grad[lo : lo + _BLOCK], scale, out=torch.from_numpy(spare[0][: len(part)]))
            self.rule.step(state["rows"], state, g, now)
            if fault is None and not all(map(is_finite, state.values())):
                wrong = [first_not_finite(value) // value.shape[1] for value in state.values() if not is_finite(value)]
                fault = lo + min(wrong)
            for name, value in held.items():
                self._put(name, part, value)
        return fault

    def delete(self, ids: Ids) -> None:
        """Forget rows, all of which are stored."""
        if self._disk is not None:
            there = self._index.find(ids) == ABSENT
            self._disk.delete(ids[there])
            ids = ids[~there]
        self._index.delete(ids)

    def life(self) -> tuple[Ids, Any]:
        """Ids and life [n, 2] of all rows that are stored, in no order."""
        slots = self._index.slots()
        ids, life = self._index.keys[slots], self._gather("life", self._places(slots))
        if not self.cold:
            return ids, life
        held, other = self._disk.column("life")  # type: ignore[union-attr]  # some lie there
        return np.concatenate([ids, held]), np.concatenate([life, other])

    def export(self, ids: Ids | None = None) -> Columns:
        """All rows, or those of `ids`, which are stored; in the order of the ids."""
        slots = self._index.slots() if ids is None else self._index.find(ids)
        slots = slots[slots != ABSENT]
        slots = slots[np.argsort(self._index.keys[slots])]
        place = self._places(slots)
        state = {field.name: self._gather(field.name, place) for field in self.rule.fields}
        found = Columns(self._index.keys[slots], self._gather("rows", place), state, self._gather("life", place))
        if self._disk is None or not self.cold:
            return found
        held, values = self._disk.all() if ids is None else self._disk.peek(ids)
        state = {name: np.concatenate([value, values[name]]) for name, value in state.items()}
        rows, life = np.concatenate([found.rows, values["rows"]]), np.concatenate([found.life, values["life"]])
        both = np.concatenate([found.ids, held])
        return Columns(both, rows, state, life).take(np.argsort(both))

    def load(self, columns: Columns) -> None:
        """Store rows that are not there, with everything that belongs to them."""
        step = len(columns.ids) if self._limit is None else max(1, self._limit)
        for lo in range(0, len(columns.ids), max(1, step)):
            part = slice(lo, lo + step)
            values = {name: value[part] for name, value in columns.state.items()}
            self._fill(columns.ids[part], {**values, "rows": columns.rows[part], "life": columns.life[part]})
            self.cool()

    def _fill(self, ids: Ids, values: dict[str, Any]) -> None:
        slots = self._index.insert(ids)
        self._reach(self._index.top)
        place = self._own(slots)
        for name, value in values.items():
            self._put(name, place, value)

    def branch(self) -> RowStore:
        """Another store with the same rows; pages are shared until one of them writes to them."""
        other = RowStore.__new__(RowStore)
        other.table, other.rule, other.fields, other.row_bytes = self.table, self.rule, self.fields, self.row_bytes
        other._limit, other._folder = self._limit, self._folder
        other._index, other._pages = self._index.branch(), self._pages
        other._disk = None if self._disk is None else self._disk.branch()
        self._pages.users[self._held[0]] += 1
        other._adopt(self._held[0].copy(), plain=False)
        self._plain = False
        return other

    def _reach(self, top: int) -> None:
        held = self._held[0]
        missing = -(-top // ROWS) - len(held)
        if missing > 0:
            fresh = self._pages.give(missing)
            self._plain = self._plain and bool(fresh[0] == len(held)) and bool(fresh[-1] == len(held) + missing - 1)
            self._held[0] = np.concatenate([held, fresh])

    def _places(self, slots: Any) -> Any:
        return slots if self._plain else places(self._held[0], slots)

    def _own(self, slots: Any) -> Any:
        """Where rows are that will be written: pages that others have too are copied first."""
        if self._plain:
            return slots
        table = self._held[0]
        pages = np.unique(slots >> BITS)
        shared = pages[self._pages.users[table[pages]] > 1]
        if len(shared):
            table[shared] = self._pages.copy(table[shared])
        return places(table, slots)

    def _gather(self, name: str, place: Any) -> Any:
        column = self._pages.columns[name]
        found = np.empty((len(place), column.width), column.dtype)
        self._take(name, place, found)
        return found

    def _take(self, name: str, place: Any, out: Any) -> None:
        if len(place):
            np.take(self._pages.columns[name].cells, place, out=cells(out), mode="clip")

    def _put(self, name: str, place: Any, values: Any) -> None:
        if len(place):
            self._pages.columns[name].cells[place] = cells(np.ascontiguousarray(values))
