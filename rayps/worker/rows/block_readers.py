"""Readers of single blocks (`rayps.core.rows.step_rows.RowBlock`): by the numbers of their rows, or in sequence."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rayps.core.job.records import Event
from rayps.core.rows.step_rows import Places, RowBlock, RowCut
from rayps.data.base import Batch, Data, Place, Position
from rayps.data.loader import Loader
from rayps.data.single_rows import stacks_of

Reads: TypeAlias = Iterator[tuple[Batch, Position | None]]


class BlockReader(Protocol):
    """Reads the rows of blocks."""

    def read(self, block: RowBlock) -> Batch:
        """Return the rows of a block, with several micro-batches as one step. Raises DataError if one is invalid."""

    def events(self) -> list[Event]:
        """Return the events since the last call."""

    def close(self) -> None:
        """End the processes and threads."""


class NumberReader:
    """Takes the rows of any block by their numbers. `cut` says which they are."""

    def __init__(self, data: Data, cut: RowCut, seed: int, accumulate: int) -> None:
        self._data, self._cut, self._seed, self._accumulate = data, cut, seed, accumulate
        self._order: tuple[int, NDArray[np.int64]] | None = None  # an epoch, and its row numbers in order

    def read(self, block: RowBlock) -> Batch:
        """Return the rows of a block: see `BlockReader`."""
        if self._order is None or self._order[0] != block.epoch:
            self._order = block.epoch, self._data.order(self._seed, block.epoch)
        order = self._order[1]
        parts = tuple(self._data.take(order[_make_index(places)]) for places in self._cut.places(block))
        return parts[0] if self._accumulate == 1 else step_of(parts)

    def events(self) -> list[Event]:
        """Return []."""
        return []

    def close(self) -> None:
        """Do nothing."""


class StackReader:
    """Takes the rows of a block each alone, in stacks of at most `most` rows. The places of `draws` are row numbers."""

    def __init__(self, data: Data, draws: RowCut, most: int) -> None:
        self._data, self._draws, self._most = data, draws, most

    def read(self, block: RowBlock) -> Batch:
        """Return the rows of a block, which may be none: see `BlockReader`."""
        drawn = np.concatenate([np.asarray(places, dtype=np.int64) for places in self._draws.places(block)])
        return step_of(stacks_of(self._data, drawn, self._most))

    def events(self) -> list[Event]:
        """Return []."""
        return []

    def close(self) -> None:
        """Do nothing."""


class SequenceReader:
    """Reads the blocks of each part of an epoch in sequence, in loader processes or a thread if it is read ahead.

    A block before the last one of its part, and any block but the next one if `jumps`, is found by reading the part
    anew from this block on.
    """

    def __init__(self, data: Data, seed: int, accumulate: int, *, jumps: bool = False) -> None:
        self._data, self._seed, self._accumulate, self._jumps = data, seed, accumulate, jumps
        self._loader = Loader(data) if data.ahead is not None else None
        self._epoch = -1
        # from a part of the epoch to the number of its next block, and an open iterator over the blocks
        self._open: dict[int, tuple[int, Reads]] = {}

    @property
    def processes(self) -> int:
        """The number of loader processes."""
        return 0 if self._loader is None else self._loader.processes

    def read(self, block: RowBlock) -> Batch:
        """Return the rows of a block: see `BlockReader`."""
        if block.epoch != self._epoch:
            self._epoch = block.epoch
            self._open.clear()
        at, reads = self._open.get(block.part, (block.number + 1, iter(())))
        if at > block.number or (self._jumps and at < block.number):
            at, reads = block.number, self.open(block)
        for _ in range(at, block.number + 1):
            batch, _ = next(reads)
        self._open[block.part] = block.number + 1, reads
        return batch

    def open(self, block: RowBlock, position: Position | None = None) -> Reads:
        """Return the blocks of a part from `block` on, each with the position in the data after it, or None.

        `position`: one that was returned for a block before this one.
        """
        place, start = Place(block.part, block.parts, self._seed, block.epoch), block.number * self._accumulate
        if self._loader is not None:
            found = self._loader.read(place, start, position)
        elif not self._data.has_length:
            found = self._data.part(place, start, position)
        else:
            batches = self._data.batches(
                rank=place.rank, size=place.size, seed=place.seed, epoch=place.epoch, start=start
            )
            found = ((batch, None) for batch in batches)
        return found if self._accumulate == 1 else _group(found, self._accumulate)

    def events(self) -> list[Event]:
        """Return the events of the loader since the last call."""
        return [] if self._loader is None else self._loader.take_events()

    def close(self) -> None:
        """End the loader's processes and threads."""
        if self._loader is not None:
            self._loader.close()


def step_of(parts: tuple[Batch, ...]) -> Batch:
    """Return the batch of one step with these micro-batches."""
    return Batch(None, None, sum(part.size for part in parts), parts)


def _group(reads: Reads, size: int) -> Reads:
    """Yield groups of `size` batches as one step, each with the position after its last batch."""
    while group := list(islice(reads, size)):
        yield step_of(tuple(batch for batch, _ in group)), group[-1][1]


def _make_index(places: Places) -> slice | NDArray[np.int64]:
    """Return what selects these places of an order."""
    if isinstance(places, range) and places:
        return slice(places.start, places.stop, places.step)
    return np.asarray(places, dtype=np.int64)
