"""From which workers' memory a generation continues. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Handover:
    """How a generation continues: from the state after `round`, which the ranks `holders` have in memory.

    The ranks are those of the new generation.
    """

    round: int
    holders: tuple[int, ...]

    def lacking(self, size: int) -> list[int]:
        """Return the ranks, of `size`, that do not hold the state."""
        return [rank for rank in range(size) if rank not in self.holders]

    def among(self, order: Sequence[int | None]) -> Handover | None:
        """Return the same for other workers; None if no holder is one of them.

        `order` has for each new rank the rank before, or None for a worker that joins.
        """
        holders = tuple(rank for rank, old in enumerate(order) if old in self.holders)
        return Handover(self.round, holders) if holders else None
