"""A hash index from ids to slots, by open addressing, vectorised over many ids. Pure numpy.

A cell contains the slot of an id. A lookup usually reads one cell and one key. Each row needs 10 to 24 bytes of cells
and 8 bytes of keys. The index assigns the slots; the slot freed last is reused first. A deleted cell is marked, and
disappears when the index is rebuilt. Probe steps of 1, 2, 3, ... reach every cell of a table whose size is a power of
two (Knuth, "The Art of Computer Programming", vol. 3, section 6.4, exercise 20).
"""

from __future__ import annotations

import numpy as np

from rayps.ps.tables.wire_format import Ids, Slots, mix

ABSENT = 0  # the slot returned for an id that is not in the index
_GONE = 1  # a cell whose key was deleted
FIRST = 2  # the first slot that is assigned
_LEAST = 64
_SPARSE = 3  # at most one cell in three is filled: a vectorised lookup takes as long as its longest probe
_STEPS = 5  # probes of each id in one vectorised step of a lookup


class HashIndex:
    """A map from ids to slots. Slots are whole numbers from `FIRST` on, nearly without gaps."""

    def __init__(self) -> None:
        self._cells = np.zeros(_LEAST, np.int32)
        self.keys = np.full(_LEAST, -1, np.int64)  # the id of each slot; -1 if the slot is free
        self.top = FIRST  # slots from `top` on were never assigned
        self._free: list[Slots] = []  # arrays of free slots below `top`
        self._filled = 0  # cells that are not empty
        self._live = 0
        self._shared = False
        self.deletions = 0  # calls that deleted ids: a slot found before the last one may belong to another id now

    def __len__(self) -> int:
        return self._live

    @property
    def nbytes(self) -> int:
        """The bytes of memory that cells and keys use."""
        return int(self._cells.nbytes + self.keys.nbytes)

    def find(self, ids: Ids) -> Slots:
        """Return the slot of each id, int64 [n]; `ABSENT` for an id that is not in the index."""
        cells, keys, mask = self._cells, self.keys, len(self._cells) - 1
        place = self._find_first(ids)
        slots = cells.take(place).astype(np.int64)
        rest = (keys.take(slots, mode="clip") != ids).nonzero()[0]
        if len(rest):
            rest = rest[slots.take(rest) != ABSENT]
        at, wanted, step = place.take(rest), ids.take(rest), 0
        while len(rest):  # several probes at a time, because each pass costs a dozen numpy calls even for a few ids
            ways = at[:, None] + np.arange(step + 1, step + 1 + _STEPS).cumsum()
            ways &= mask
            found = cells.take(ways)
            equal = keys.take(found) == wanted[:, None]  # at most once for each id: an empty cell ends its sequence
            slots[rest] = ABSENT
            slots[rest[equal.nonzero()[0]]] = found[equal]
            if np.count_nonzero(equal) == len(rest):
                break
            more = (~(equal | (found == ABSENT)).any(1)).nonzero()[0]
            rest, at, wanted = rest.take(more), ways[more, -1], wanted.take(more)
            step += _STEPS
        return slots

    def _find_first(self, ids: Ids) -> Slots:
        """Return the first cell of each id's probe sequence."""
        place = mix(ids)
        place &= np.uint64(len(self._cells) - 1)
        return place.view(np.int64)

    def insert(self, ids: Ids) -> Slots:
        """Insert distinct ids that are not in the index; return their slots, int64 [n]."""
        count = len(ids)
        self._copy_shared()
        if (self._filled + count) * _SPARSE > len(self._cells):
            self._rebuild(self._live + count)
        slots = self._assign(count)
        self.keys[slots] = ids
        self._place(ids, slots)
        self._live += count
        return slots

    def delete(self, ids: Ids) -> Slots:
        """Delete distinct ids that are in the index; return the slots that they had, int64 [n]."""
        self._copy_shared()
        cells, mask = self._cells, len(self._cells) - 1
        slots = self.find(ids)
        place = self._find_first(ids)
        rest, step = np.arange(len(ids)), 0
        while len(rest):
            step += 1
            rest = rest[cells[place[rest]] != slots[rest]]
            place[rest] = (place[rest] + step) & mask
        cells[place] = _GONE
        self.keys[slots] = -1
        if len(slots):
            self.deletions += 1
            self._free.append(slots)
        self._live -= len(ids)
        return slots

    def slots(self) -> Slots:
        """Return the slots in use, ascending."""
        return np.flatnonzero(self.keys[: self.top] >= 0)

    def branch(self) -> HashIndex:
        """Return a copy; both share memory until one of them changes."""
        other = HashIndex()
        other._cells, other.keys, other.top = self._cells, self.keys, self.top
        other._free, other._filled, other._live = list(self._free), self._filled, self._live
        self._shared = other._shared = True
        return other

    def _copy_shared(self) -> None:
        if self._shared:
            self._cells, self.keys, self._shared = self._cells.copy(), self.keys.copy(), False

    def _assign(self, count: int) -> Slots:
        parts, wanted = [], count
        while wanted and self._free:
            last = self._free.pop()
            parts.append(last[max(0, len(last) - wanted) :])
            if len(last) > wanted:
                self._free.append(last[: len(last) - wanted])
            wanted -= len(parts[-1])
        parts.append(np.arange(self.top, self.top + wanted))
        self.top += wanted
        if self.top > len(self.keys):
            wider = np.full(max(self.top, len(self.keys) * 3 // 2), -1, np.int64)
            wider[: len(self.keys)] = self.keys
            self.keys = wider
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def _rebuild(self, wanted: int) -> None:
        size = _LEAST
        while size < (wanted + wanted // 4) * _SPARSE:  # room to grow: a rebuild costs as much as all inserts
            size *= 2
        self._cells = np.zeros(size, np.int32)
        self._filled = 0
        held = self.slots()
        self._place(self.keys[held], held)

    def _place(self, ids: Ids, slots: Slots) -> None:
        """Write each slot into the first free cell of its id's probe sequence.

        If several slots want the same cell, the last one gets it, and the others try their next cells.
        """
        cells, mask = self._cells, len(self._cells) - 1
        place = self._find_first(ids)
        rest, step = slots.astype(np.int32), 0
        while len(rest):
            step += 1
            before = cells[place]
            free = before <= _GONE
            cells[place[free]] = rest[free]
            missed = cells[place] != rest
            self._filled += int(np.count_nonzero(~missed & (before == ABSENT)))
            rest, place = rest[missed], (place[missed] + step) & mask
