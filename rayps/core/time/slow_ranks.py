"""Which rank is much slower than the others, for long. Pure; no I/O."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

SLOW = 2.0  # a rank is slow if its rounds take at least this many times as long as those of the others
WINDOW = 20  # rounds of each rank in an interval
INTERVALS = 3  # intervals in succession in which a rank is slow before it is reported
LEAST_SECONDS = 10.0  # the shortest time of a rank's own work in these intervals


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that was slow in `rounds` rounds.

    `seconds` is the median of its own seconds in a round, which has `rows` rows, and `others` that of the other ranks.
    """

    rank: int
    rounds: int
    seconds: float
    rows: float
    others: float


@dataclass(slots=True)
class _Own:
    """A rank's rounds in this interval, and in how many intervals before it was slow."""

    seconds: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    slow: int = 0
    total: float = 0.0  # seconds of the slow intervals
    reported: bool = False


class SlowRanks:
    """Finds slow ranks by the seconds that each rank computes and reads in a round, without its waits for others."""

    def __init__(self, ranks: int) -> None:
        """Begin with no rounds."""
        self._own = [_Own() for _ in range(ranks)]

    def add(self, rank: int, seconds: float, rows: int) -> list[SlowRank]:
        """Add a round of a rank. Return the ranks that are found to be slow now; each is returned once.

        A rank that was not slow in an interval may be returned again later.
        """
        self._own[rank].seconds.append(seconds)
        self._own[rank].rows.append(rows)
        if len(self._own) < 2 or any(len(own.seconds) < WINDOW for own in self._own):
            return []
        medians = [statistics.median(own.seconds) for own in self._own]
        found = [slow for each in range(len(self._own)) if (slow := self._close(each, medians)) is not None]
        for own in self._own:
            own.seconds, own.rows = [], []
        return found

    def _close(self, rank: int, medians: list[float]) -> SlowRank | None:
        own = self._own[rank]
        others = statistics.median(each for other, each in enumerate(medians) if other != rank)
        if medians[rank] < SLOW * others:
            own.slow, own.total, own.reported = 0, 0.0, False
            return None
        own.slow, own.total = own.slow + 1, own.total + sum(own.seconds)
        if own.reported or own.slow < INTERVALS or own.total < LEAST_SECONDS:
            return None
        own.reported = True
        return SlowRank(rank, own.slow * WINDOW, medians[rank], statistics.mean(own.rows), others)
