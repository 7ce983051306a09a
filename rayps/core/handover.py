"""From which workers' memory a generation continues. Pure."""

from __future__ import annotations

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
