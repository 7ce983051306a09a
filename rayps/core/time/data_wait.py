"""Decide when to warn that workers wait for data. Pure: the rounds come as metric points."""

from __future__ import annotations

from collections import deque

from rayps.core.job.records import Point

SKIPPED = 5  # first rounds, in which files are opened and loader processes start
ROUNDS = 20  # rounds over which the share is computed
MOST_SHARE = 0.2  # of the time of these rounds
LEAST_SECONDS = 0.5  # waits in these rounds that are not worth a warning


class DataWait:
    """Adds up the time that rounds spend waiting for data, and returns one warning if it stays large."""

    def __init__(self) -> None:
        self._seen = 0
        self._warned = False
        self._rounds: deque[tuple[float, float]] = deque(maxlen=ROUNDS)  # (seconds for data, seconds)

    def add(self, point: Point) -> str | None:
        """Add a round of the group. Return the warning, once, if the waits are long; else None."""
        self._seen += 1
        if self._warned or self._seen <= SKIPPED or "data" not in point:
            return None
        self._rounds.append((point["data"], point["seconds"]))
        waited, seconds = (sum(column) for column in zip(*self._rounds, strict=True))
        if len(self._rounds) < ROUNDS or waited < LEAST_SECONDS or waited <= MOST_SHARE * seconds:
            return None
        self._warned = True
        return (
            f"workers waited for data in {waited / seconds:.0%} of the time of the last {ROUNDS} rounds: let processes "
            "read ahead by data().loaded_by(2), or give loaded_by more workers or a larger prefetch (under federated "
            "strategies, which read a client's rows when they are needed: keep the rows in memory, or use more workers)"
        )
