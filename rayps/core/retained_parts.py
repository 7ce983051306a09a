"""The parts of checkpoints that a member retains until the driver has fetched them."""

from __future__ import annotations

from typing import TypeVar

KEPT = 2  # the newest one and the one before

P = TypeVar("P")


class RetainedParts(dict[int, P]):
    """A member's parts of checkpoints by round: the newest two, and that of the round for which the driver waits."""

    wanted = 0  # the driver's choice, see `rayps.runtime.snapshots`

    def keep(self, rounds: int, part: P) -> None:
        """Retain the part after `rounds`, and drop older ones."""
        self[rounds] = part
        for old in sorted(self)[:-KEPT]:
            if old != self.wanted:
                del self[old]
