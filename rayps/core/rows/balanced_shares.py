"""How many rows of a round each rank takes, so that unequal ranks end the round together. Pure; no I/O.

The gradients of a round are weighted by their rows, so the mean over the workers does not depend on the shares.
"""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from collections.abc import Sequence

GAIN = 0.1  # the least part by which a round must become shorter, so that the shares change
LEAST_SECONDS = 0.001  # the same in seconds
MOST = 4.0  # the largest share, relative to an even one
WINDOW = 10  # rounds of each rank over which its seconds per row are measured first
LONGEST_WINDOW = 320


def balance_shares(
    shares: Sequence[int], seconds: Sequence[float], *, gain: float = GAIN, most: float = MOST
) -> tuple[int, ...] | None:
    """Return better shares of a round's rows, or None if the round would not become shorter by enough.

    Enough is the part `gain` of it, and `LEAST_SECONDS`.

    `shares[rank]` is the number of rows that a rank takes now, and `seconds[rank]` how long it takes for one row. The
    sum of the shares is kept. A rank takes at least one row, and at most `most` times the rows of an even share. Among
    such shares, the result has the shortest round, which lasts as long as its slowest rank.
    """
    rows, ranks = sum(shares), len(shares)
    largest = max(-(-rows // ranks), int(most * rows / ranks))
    found = [1] * ranks
    ends = [(2 * each, rank) for rank, each in enumerate(seconds)]  # when the rank would end with one more row
    heapq.heapify(ends)
    for _ in range(rows - ranks):
        _, rank = heapq.heappop(ends)
        found[rank] += 1
        if found[rank] < largest:
            heapq.heappush(ends, ((found[rank] + 1) * seconds[rank], rank))
    now = estimate_round_seconds(shares, seconds)
    saved = now - estimate_round_seconds(found, seconds)
    return tuple(found) if saved >= max(gain * now, LEAST_SECONDS) else None


def estimate_round_seconds(shares: Sequence[int], seconds: Sequence[float]) -> float:
    """Return how long the slowest rank takes for its share."""
    return max(share * each for share, each in zip(shares, seconds, strict=True))


class RowSpeeds:
    """The seconds that each rank takes for a row, as medians over its last `window` rounds."""

    def __init__(self, ranks: int, window: int = WINDOW) -> None:
        """Begin with no rounds."""
        self._window = window
        self._rounds: list[deque[float]] = [deque(maxlen=window) for _ in range(ranks)]

    def add(self, rank: int, seconds: float, rows: int) -> None:
        """Add a round in which a rank computed and read for `seconds` seconds, without its waits for other ranks."""
        if rows:
            self._rounds[rank].append(seconds / rows)

    @property
    def seconds(self) -> list[float] | None:
        """For each rank, the seconds for one row; None until each rank has `window` rounds."""
        if any(len(rounds) < self._window for rounds in self._rounds):
            return None
        return [statistics.median(rounds) for rounds in self._rounds]
