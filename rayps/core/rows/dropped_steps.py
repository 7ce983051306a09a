"""How often each rank was dropped from steps, and which ranks are dropped many times in a row. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

LATE_LIMIT = 10  # steps in a row


@dataclass(frozen=True, slots=True)
class LateWorkers:
    """What follows if a worker is dropped many times in a row.

    It is reported after `limit` steps, and if `replace`, the driver once gives its rank a new process.
    """

    limit: int = LATE_LIMIT
    replace: bool = False


class DroppedSteps:
    """Counts the dropped steps of each rank.

    `limit` is the number of steps in a row after which a rank is reported. It is reported again after twice as many.
    """

    def __init__(self, size: int, limit: int = LATE_LIMIT) -> None:
        self.limit = limit
        self.steps = 0  # the number of all steps
        self.counts = [0] * size  # the number of dropped steps of each rank
        self.in_a_row = [0] * size
        self._reports = [limit] * size  # the number of steps in a row at which the rank is reported next

    def add(self, dropped: Collection[int], idle: Collection[int] = ()) -> list[int]:
        """Add one step. Return the ranks to report now, which were dropped many times in a row.

        A rank that was `idle`, because it had no rows, is neither a member nor dropped.
        """
        self.steps += 1
        found = []
        for rank in range(len(self.counts)):
            if rank in dropped:
                self.counts[rank] += 1
                self.in_a_row[rank] += 1
                if self.in_a_row[rank] >= self._reports[rank]:
                    self._reports[rank] *= 2
                    found.append(rank)
            elif rank not in idle:
                self.in_a_row[rank], self._reports[rank] = 0, self.limit
        return found

    def summary(self) -> str:
        """Return the counts as text, such as `worker-3 in 12, worker-0 in 2 of 40 steps`; "" if there are none."""
        ranks = sorted((rank for rank, count in enumerate(self.counts) if count), key=lambda r: (-self.counts[r], r))
        named = ", ".join(f"worker-{rank} in {self.counts[rank]}" for rank in ranks)
        return f"{named} of {self.steps} steps" if named else ""
