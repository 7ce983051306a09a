"""What a worker keeps of its pushes until they are durable, so that it can say them again. Pure: no sockets.

A push that a server has only filed (a round that waits for others) is not with the copies yet. When its segment gets
another primary, what that one lacks is said again from here; where it is known, the ledger drops it. Memory is
bounded: beyond `limit` bytes the oldest pushes are forgotten, and counted in `dropped`.
"""

from __future__ import annotations

import weakref
from bisect import insort
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from rayps.comm.link.socket_link import Payload, as_bytes
from rayps.ps.protocol.mailbox import Bytes, rounded

LEAST_BLOCK = 1 << 14  # bytes; a smaller copy is an ordinary one
COPY_CHUNK = 1 << 25
COPY_LIMIT = 1 << 29


@dataclass(slots=True)
class StepPush:
    """One step's push: its pieces by segment, of those where it is not durable yet. They must not change."""

    step: int
    weight: float
    pieces: dict[int, memoryview]


class CopyMemory:
    """Memory for the copies of pushes, reused as soon as a copy is no longer referenced.

    A new page of memory costs several times the copy into it. So blocks are cut from large allocations, which numpy
    places on huge pages, and are never returned to the system.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Bytes]] = {}  # by size
        self._rest: Bytes = np.empty(0, np.uint8)
        self._bytes = 0

    def copy(self, piece: Payload) -> memoryview:
        """A copy of a piece, in ordinary memory where it is small or `COPY_LIMIT` is reached."""
        view = as_bytes(piece)
        size = rounded(len(view))
        free = self._free.setdefault(size, [])
        if len(view) < LEAST_BLOCK or not (free or self._room(size)):
            return memoryview(bytes(view))
        if free:
            block = free.pop()
        else:
            block, self._rest = self._rest[:size], self._rest[size:]
        found = block[: len(view)]
        found[:] = view
        weakref.finalize(found, free.append, block).atexit = False
        return found.data

    def _room(self, size: int) -> bool:
        """Whether the rest has room for a block, after a new allocation where necessary."""
        wanted = max(COPY_CHUNK, size)
        if len(self._rest) < size and self._bytes + wanted <= COPY_LIMIT:
            self._rest = np.empty(wanted, np.uint8)
            self._bytes += wanted
        return len(self._rest) >= size


class ReplayBuffer:
    """The pushes of one worker that are not durable everywhere, by segment, oldest first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self.dropped = 0  # pushes that were forgotten before they were durable
        self.since = 0  # those below this step
        self._by_segment: dict[int, deque[tuple[int, float, memoryview]]] = {}
        self._before: dict[int, int] = {}  # by segment: the step after the last one that is not kept

    def keep(self, step: int, weight: float, pieces: dict[int, memoryview], first: int | None = None) -> None:
        """Keep a push; all of one step is one push. Forgets the oldest where it is too much.

        A push that stands for several steps is named by the last of them, `step`; `first` is the first of them.
        """
        for index, piece in pieces.items():
            held = self._by_segment.setdefault(index, deque())
            if not held:
                self._before[index] = step if first is None else first
            if not held or held[-1][0] < step:
                held.append((step, weight, piece))
            elif all(known != step for known, _, _ in held):
                insort(held, (step, weight, piece), key=lambda entry: entry[0])
            else:
                continue  # the same bytes
            self.bytes += len(piece)
        while self.bytes > self.limit:
            oldest = min(held[0][0] for held in self._by_segment.values() if held)
            self.durable(self._by_segment, oldest + 1)
            self.dropped, self.since = self.dropped + 1, oldest + 1

    def durable(self, segments: Collection[int], mark: int) -> None:
        """Forget what need not be said again: of these segments, the steps below `mark`."""
        for index in segments:
            held = self._by_segment.get(index)
            while held and held[0][0] < mark:
                self._before[index] = held[0][0] + 1
                self.bytes -= len(held.popleft()[2])

    def among(self, segments: Collection[int]) -> set[int]:
        """Those of these segments that something is kept of."""
        return {index for index in segments if self._by_segment.get(index)}

    def first(self, segment: int) -> int | None:
        """The earliest step that is kept of a segment, also as the first one of a push; None: nothing is kept."""
        return self._before[segment] if self._by_segment.get(segment) else None

    def of(self, segments: Collection[int], marks: Mapping[int, int] | None = None) -> list[StepPush]:
        """What is to be said again of these segments, in order; with `marks`, from this step of the segment on."""
        found: dict[int, StepPush] = {}
        for index in segments:
            first = 0 if marks is None else marks.get(index, 0)
            for step, weight, piece in self._by_segment.get(index, ()):
                if step >= first:
                    found.setdefault(step, StepPush(step, weight, {})).pieces[index] = piece
        return [found[step] for step in sorted(found)]
