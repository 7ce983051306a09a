"""The memory of rows: columns in pages, shared by stores and copied on write. No I/O.

A store numbers its rows by slots. Its page table maps a slot to a page of the columns. A branch copies only the page
table; both stores then share a page until one of them writes to it. In a store that was never branched, slots are row
numbers of the columns, and the page table is not needed.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayps.ps.tables.wire_format import Rows, Slots, view_cells

BITS = 6
ROWS = 1 << BITS  # rows of a page; few, because a write copies a whole page, and the ids of a push are in many pages
_MASK = ROWS - 1


class Field(NamedTuple):
    """A column of a table: the number of elements (`width`) of each row, their dtype, and their value in a new row."""

    name: str
    width: int
    dtype: str
    start: float = 0


class _Column:
    """An array [rows, width] that grows without a copy: the operating system remaps its memory."""

    def __init__(self, field: Field) -> None:
        self.width, self.dtype = field.width, np.dtype(field.dtype)
        self._memory: mmap.mmap | None = None
        self.rows: Rows = np.empty((0, self.width), self.dtype)
        self.cells = view_cells(self.rows)

    def grow(self, rows: int) -> None:
        """Grow to `rows` rows; the new rows are zeros."""
        size = rows * self.width * self.dtype.itemsize
        old, held = self.rows, len(self.rows)
        self.rows = self.cells = old[:0].copy()
        try:
            if self._memory is None:
                raise BufferError
            del old
            self._memory.resize(size)
        except (
            BufferError,
            SystemError,
            ValueError,
        ):  # another thread is reading the memory, or the system cannot remap it
            before = None if self._memory is None else _view_array(self._memory, self.dtype, held, self.width)
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE") and size >= 1 << 22:
                self._memory.madvise(mmap.MADV_HUGEPAGE)  # rows are read in random order: fewer TLB misses
            if before is not None:
                _view_array(self._memory, self.dtype, held, self.width)[:] = before
        self.rows = _view_array(self._memory, self.dtype, rows, self.width)
        self.cells = view_cells(self.rows)


def _view_array(memory: mmap.mmap, dtype: np.dtype[np.generic], rows: int, width: int) -> Rows:
    return np.frombuffer(memory, dtype, rows * width).reshape(rows, width)


class Pages:
    """The memory of a store and its branches, by columns. Hold `lock` during every call and while using the result."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self.fields = tuple(fields)
        self.columns = {field.name: _Column(field) for field in self.fields}
        self.lock = threading.RLock()
        self.users: NDArray[np.int32] = np.zeros(0, np.int32)  # for each page the number of stores that use it
        self._top = 0  # pages allocated so far
        self._free: list[int] = []
        self.row_bytes = sum(field.width * np.dtype(field.dtype).itemsize for field in self.fields)

    def allocate(self, count: int) -> Slots:
        """Allocate `count` pages with one user each; return their numbers, int64 [count].

        Their content is undefined.
        """
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

    def drop(self, pages: Slots) -> None:
        """Remove one user of each page; a page without users is free."""
        self.users[pages] -= 1
        self._free.extend(pages[self.users[pages] == 0].tolist())

    def copy(self, pages: Slots) -> Slots:
        """Copy shared pages for one store, and release the originals for it; return the numbers of the copies."""
        found = self.allocate(len(pages))
        within = np.arange(ROWS)
        source, target = ((each[:, None] << BITS) + within for each in (pages, found))
        for column in self.columns.values():
            column.cells[target.reshape(-1)] = column.cells[source.reshape(-1)]
        self.drop(pages)
        return found


def find_places(table: Slots, slots: Slots) -> Slots:
    """Return the row numbers in the columns of a store's slots; `table` is the store's page table."""
    found: Slots = (table[slots >> BITS] << BITS) + (slots & _MASK)
    return found


def release(pages: Pages, held: list[Slots]) -> None:
    """Release the pages of a store that is garbage-collected; `held` contains the store's page table."""
    with pages.lock:
        pages.drop(held[0])
