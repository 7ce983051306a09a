"""What a worker keeps of its pushes until they are durable, so that it can say them again. Pure: no sockets.

A push that a server has only filed (a round that waits for others) is not with the copies yet. When its segment gets
another primary, it is said again from here; where it is known, the ledger drops it. Memory is bounded: beyond `limit`
bytes the oldest pushes are forgotten, and counted in `dropped`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(slots=True)
class Push:
    """One step's push: its pieces by segment, of those where it is not durable yet. They must not change."""

    step: int
    weight: float
    pieces: dict[int, memoryview]


class Kept:
    """The pushes of one worker that are not durable everywhere, oldest first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self.dropped = 0  # pushes that were forgotten before they were durable
        self.since = 0  # those below this step
        self._pushes: deque[Push] = deque()

    def keep(self, step: int, weight: float, pieces: dict[int, memoryview]) -> None:
        """Keep a push; all of one step is one push. Forgets the oldest where it is too much."""
        last = self._pushes[-1] if self._pushes else None
        if last is None or last.step != step:
            last = Push(step, weight, {})
            self._pushes.append(last)
        self.bytes += sum(len(piece) for index, piece in pieces.items() if index not in last.pieces)
        last.pieces |= pieces
        while self.bytes > self.limit and self._pushes:
            oldest = self._pushes.popleft()
            self.bytes -= sum(map(len, oldest.pieces.values()))
            self.dropped, self.since = self.dropped + 1, oldest.step + 1

    def durable(self, segments: Collection[int], mark: int) -> None:
        """Forget what need not be said again: of these segments, the steps below `mark`."""
        pushes = self._pushes
        if not pushes or pushes[0].step >= mark:
            return
        for push in pushes:
            if push.step >= mark:
                break
            for index in segments:
                piece = push.pieces.pop(index, None)
                self.bytes -= 0 if piece is None else len(piece)
        while pushes and not pushes[0].pieces:
            pushes.popleft()

    def of(self, segments: Collection[int]) -> list[Push]:
        """What is to be said again of these segments, in order."""
        wanted, found = set(segments), []
        for push in self._pushes:
            pieces = {index: piece for index, piece in push.pieces.items() if index in wanted}
            if pieces:
                found.append(Push(push.step, push.weight, pieces))
        return found
