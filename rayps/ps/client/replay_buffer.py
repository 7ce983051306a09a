"""A worker's pushes that are not durable yet, retained so that they can be pushed again. Pure: no sockets.

A push that waits for the rest of its round is acknowledged before the backups have it. When a segment gets another
primary, the worker repeats the retained pushes that the new primary lacks. The segment's ledger ignores a push that the
segment has already. Beyond `limit` bytes the oldest pushes are evicted, and counted in `dropped`. An evicted push that
only a dead server had is lost.
"""

from __future__ import annotations

import weakref
from bisect import insort
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from rayps.comm.link.socket_link import Payload, as_bytes
from rayps.ps.protocol.mailbox import round_up
from rayps.ps.protocol.rows import Bytes, PieceBytes

LEAST_BLOCK = 1 << 14  # bytes; a smaller copy is in ordinary memory
COPY_CHUNK = 1 << 21  # bytes that are allocated at once
COPY_LIMIT = 1 << 29  # most bytes that are allocated


@dataclass(slots=True)
class StepPush:
    """The push of one step: a dict from segment to piece, for the segments in which the push is not durable.

    The bytes of the pieces must not change.
    """

    step: int
    weight: float
    pieces: dict[int, PieceBytes]


class CopyMemory:
    """Memory for the copies of pushes, reused as soon as a copy is no longer referenced.

    The first write to a new page takes several times as long as the copy, so blocks are not returned to the system.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Bytes]] = {}  # size in bytes -> free blocks
        self._rest: Bytes = np.empty(0, np.uint8)
        self._bytes = 0

    def copy(self, piece: Payload) -> memoryview:
        """Return a copy of a piece. A small copy, or one beyond `COPY_LIMIT`, is in ordinary memory."""
        view = as_bytes(piece)
        size = round_up(len(view))
        free = self._free.setdefault(size, [])
        if len(view) < LEAST_BLOCK or not (free or self._make_room(size)):
            return memoryview(bytes(view))
        if free:
            block = free.pop()
        else:
            block, self._rest = self._rest[:size], self._rest[size:]
        found = block[: len(view)]
        found[:] = view
        weakref.finalize(found, free.append, block).atexit = False
        return found.data

    def _make_room(self, size: int) -> bool:
        """Return whether a block of `size` bytes is available; allocate a new chunk, within the limit, if necessary."""
        wanted = max(COPY_CHUNK, size)
        if len(self._rest) < size and self._bytes + wanted <= COPY_LIMIT:
            self._rest = np.empty(wanted, np.uint8)
            self._bytes += wanted
        return len(self._rest) >= size


class ReplayBuffer:
    """The pushes of one worker that are not durable in all segments: for each segment a list, with the oldest first.

    `limit` is in bytes; 0 means that no push is retained. With `tracks`, the acknowledged steps are recorded even if
    `limit` is 0, because `oldest` needs them.
    """

    def __init__(self, limit: int, *, tracks: bool = False) -> None:
        self.limit = limit
        self.records = tracks or limit > 0  # whether `acknowledged` has anything to record
        self._tracks = tracks
        self.bytes = 0
        self.dropped = 0  # pushes that were evicted before they were durable
        self.since = 0  # all evicted pushes are below this step
        self._by_segment: dict[int, deque[tuple[int, float, PieceBytes]]] = {}
        self._before: dict[int, int] = {}  # segment -> the first step that retained pushes cover
        self._copies = CopyMemory()
        self._next: dict[int, int] = {}  # segment -> the step after the last acknowledged one

    def joined(self, marks: Mapping[int, int]) -> None:
        """Record `marks`, the rank's next step in each segment as servers reported it, where it is not known yet."""
        for index, mark in marks.items():
            self._next.setdefault(index, mark)

    def acknowledged(self, push: StepPush, durable: int, *, copy: bool) -> bool:
        """Record a push that servers have acknowledged; return whether its pieces are retained.

        All steps below `durable` are durable in the push's segments. With `copy`, copies of the pieces are retained,
        because the caller will overwrite their memory.
        """
        segments, step = push.pieces.keys(), push.step
        first = min((self._next.get(index, step) for index in segments), default=step)
        self._next.update(dict.fromkeys(segments, step + 1))
        self.durable(segments, durable)
        if durable > step or not self.limit:
            return False
        pieces = push.pieces
        if copy:
            pieces = {index: self._copies.copy(piece) for index, piece in pieces.items()}
        self.retain(step, push.weight, pieces, min(first, step))
        return True

    def retain(self, step: int, weight: float, pieces: Mapping[int, PieceBytes], first: int | None = None) -> None:
        """Retain a push. Pieces of the same step are one push. Evicts the oldest pushes beyond the limit.

        `first`: the first of the steps that the push covers, if it covers several; `step` is the last of these steps.
        """
        for index, piece in pieces.items():
            pushes = self._by_segment.setdefault(index, deque())
            if not pushes:
                self._before[index] = step if first is None else first
            if not pushes or pushes[-1][0] < step:
                pushes.append((step, weight, piece))
            elif all(known != step for known, _, _ in pushes):
                insort(pushes, (step, weight, piece), key=lambda entry: entry[0])
            else:
                continue  # the piece is retained already
            self.bytes += len(piece)
        while self.bytes > self.limit:
            oldest = min(pushes[0][0] for pushes in self._by_segment.values() if pushes)
            self.durable(self._by_segment, oldest + 1)
            self.dropped, self.since = self.dropped + 1, oldest + 1

    def durable(self, segments: Collection[int], mark: int) -> None:
        """Free the pushes to these segments below step `mark`, which need not be repeated any more."""
        for index in segments:
            pushes = self._by_segment.get(index)
            while pushes and pushes[0][0] < mark:
                self._before[index] = pushes[0][0] + 1
                self.bytes -= len(pushes.popleft()[2])

    def concerned(self, segments: Collection[int]) -> set[int]:
        """Return the segments, of these with a new primary, whose primary must be asked for this rank's next step.

        The primary is asked by a JOIN. It may lack a retained push, which the worker then repeats. With `tracks` it may
        also lack a push of an earlier worker of this rank, which this buffer does not have. The JOIN counts that push
        as lost, because otherwise consistent pulls of other ranks would wait for it.
        """
        return {index for index in segments if self._by_segment.get(index) or (self._tracks and index in self._next)}

    def first(self, segment: int) -> int | None:
        """Return the first step of a segment that retained pushes cover, or None if no push is retained."""
        return self._before[segment] if self._by_segment.get(segment) else None

    def oldest(self, segments: Iterable[int]) -> int:
        """Return the first step that can be repeated to any of these segments, or -1 if one of them has had no push."""
        found = [(self.first(index), index) for index in segments]
        return min((self._next.get(index, -1) if first is None else first for first, index in found), default=-1)

    def of(self, segments: Collection[int], marks: Mapping[int, int] | None = None) -> list[StepPush]:
        """Return the retained pushes to these segments, in the order of steps.

        `marks`: a dict from segment to the first step to return; the default is 0.
        """
        found: dict[int, StepPush] = {}
        for index in segments:
            first = 0 if marks is None else marks.get(index, 0)
            for step, weight, piece in self._by_segment.get(index, ()):
                if step >= first:
                    found.setdefault(step, StepPush(step, weight, {})).pieces[index] = piece
        return [found[step] for step in sorted(found)]
