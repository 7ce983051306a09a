"""The memory of rows: columns in pages, copied on write where several stores share them. Pure.

A store counts its rows by slots; its page table says in which page of the columns a slot lies. A branch takes the page
table, so that a page belongs to both until one of them writes to it. A store that was never branched has its pages in
order, and needs no table.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rayps.ps.tables.wire_format import cells

BITS = 6
ROWS = 1 << BITS  # of a page: few, as ids touch rows anywhere and a page is copied whole
_MASK = ROWS - 1


class Field(NamedTuple):
    """A column of a table: its elements for each row, and what a new row has in them."""

    name: str
    width: int
    dtype: str
    start: float = 0


class _Column:
    """An array [rows, width] that grows without a copy: the system moves the pages of its memory to a longer place."""

    def __init__(self, field: Field) -> None:
        self.width, self.dtype = field.width, np.dtype(field.dtype)
        self._memory: Any = None
        self.rows = np.empty((0, self.width), self.dtype)
        self.cells = cells(self.rows)

    def grow(self, rows: int) -> None:
        """Give it room for so many rows; new ones are zeros."""
        size = rows * self.width * self.dtype.itemsize
        old, held = self.rows, len(self.rows)
        self.rows = self.cells = old[:0].copy()
        try:
            if self._memory is None:
                raise BufferError
            del old
            self._memory.resize(size)
        except (BufferError, SystemError, ValueError):  # somebody reads it at this moment, or the system cannot
            before = None if self._memory is None else self._array(held)
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE") and size >= 1 << 22:
                self._memory.madvise(mmap.MADV_HUGEPAGE)  # rows lie anywhere: fewer of the processor's table walks
            if before is not None:
                self._array(held)[:] = before
        self.rows = self._array(rows)
        self.cells = cells(self.rows)

    def _array(self, rows: int) -> Any:
        return np.frombuffer(self._memory, self.dtype, rows * self.width).reshape(rows, self.width)


class Pages:
    """The columns of a store and of its branches. Hold `lock` while calling anything or using what it gave."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self.fields = tuple(fields)
        self.columns = {field.name: _Column(field) for field in self.fields}
        self.lock = threading.RLock()
        self.users = np.zeros(0, np.int32)  # by page: stores that have it
        self._top = 0  # pages that were ever given
        self._free: list[int] = []
        self.row_bytes = sum(field.width * np.dtype(field.dtype).itemsize for field in self.fields)

    def give(self, count: int) -> Any:
        """So many pages with one user each, int64. What is in them is not said."""
        again = [self._free.pop() for _ in range(min(count, len(self._free)))]
        fresh = np.arange(self._top, self._top + count - len(again))
        self._top += len(fresh)
        if self._top > len(self.users):
            room = max(self._top, len(self.users) * 3 // 2, 16)
            for column in self.columns.values():
                column.grow(room * ROWS)
            self.users = np.concatenate([self.users, np.zeros(room - len(self.users), np.int32)])
        found = np.concatenate([np.array(sorted(again), np.int64), fresh]) if again else fresh
        self.users[found] = 1
        return found

    def drop(self, pages: Any) -> None:
        """One user fewer for each of these pages."""
        self.users[pages] -= 1
        self._free.extend(pages[self.users[pages] == 0].tolist())

    def copy(self, pages: Any) -> Any:
        """Pages with the same content, for one user alone, who had these with others before."""
        found = self.give(len(pages))
        within = np.arange(ROWS)
        source, target = ((each[:, None] << BITS) + within for each in (pages, found))
        for column in self.columns.values():
            column.cells[target.reshape(-1)] = column.cells[source.reshape(-1)]
        self.drop(pages)
        return found


def places(table: Any, slots: Any) -> Any:
    """Where slots lie in the columns, by a store's page table."""
    return (table[slots >> BITS] << BITS) + (slots & _MASK)


def release(pages: Pages, held: list[Any]) -> None:
    """Give back a store's pages, when nobody has the store any more."""
    with pages.lock:
        pages.drop(held[0])
