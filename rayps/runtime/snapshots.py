"""After which round every member keeps its share of a checkpoint until the driver has it. Pure.

Rounds may take a millisecond and the driver's question a hundred: members that kept their newest shares only would
seldom hold one in common. So the driver names a round ahead of all, and doubles its lead when it was too late.
"""

from __future__ import annotations

from rayps.core.calendar import Boundary


class SnapshotSchedule:
    """The round that is waited for: at the generation's boundaries, or (after `hurry`) as soon as can be."""

    def __init__(self, boundary: Boundary) -> None:
        self.round = 0  # none yet
        self._boundary = boundary
        self._lead = 1  # rounds
        self._hurry = False

    def hurry(self) -> None:
        """From now on, meet at any round."""
        self._hurry, self.round = True, 0

    def look(self, members: list[tuple[int, list[int]]], collected: int) -> int:
        """The round to keep. Each member who must give its share of one round is (how far it came, what it holds).

        `collected` is the round of the newest state that the driver has.
        """
        if self.round > collected:
            if not any(reached > self.round and self.round not in held for reached, held in members):
                return self.round
            self._lead *= 2  # somebody was past it before hearing of it
        soonest = max(reached for reached, _ in members) + self._lead
        self.round = min(soonest, self._boundary.end) if self._hurry else self._boundary.following(soonest)
        return self.round
