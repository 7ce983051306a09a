"""One version of the whole vector out of shards that step on their own: the shard's half. Pure; no sockets, no clock.

Whoever wants to read several shards as of one moment holds them, and each says how far it has come with every rank.
A shard that is held applies no further push, but for those that it lacks of the largest of these answers: each of them
has been applied elsewhere, so it is under way. When all have come so far, all hold the same pushes, and are read. One
reader at a time, granted by the first shard, so that two never wait for each other. The idea is the consistent cut of
Chandy and Lamport, "Distributed snapshots: determining global states of distributed systems", TOCS 1985.
"""

from __future__ import annotations

from collections.abc import Sequence

from rayps.core.ledger import Ledger


class ConsistentCut:
    """Whether a shard is held by a reader, and which pushes it still takes."""

    def __init__(self, ledger: Ledger) -> None:
        self.holder: object | None = None
        self.deadline = 0.0
        self._ledger = ledger
        self._target: list[int] | None = None

    def hold(self, reader: object, deadline: float) -> list[int]:
        """Hold the shard; how far it has come with each rank. Only while nobody else holds it."""
        assert self.holder is None or self.holder is reader
        self.holder, self.deadline, self._target = reader, deadline, None
        return [self._ledger.reach(rank) for rank in self._ledger.marks]

    def aim(self, target: Sequence[int]) -> None:
        """Come as far as this with each rank. Raises ValueError."""
        if len(target) != len(self._ledger.marks):
            raise ValueError(f"a cut names {len(target)} ranks, and there are {len(self._ledger.marks)}")
        self._target = list(target)

    def admits(self, rank: int, step: int) -> bool:
        """Whether a push may be applied now."""
        if self.holder is None or self._ledger.seen(rank, step):
            return True
        return self._target is not None and step < self._target[rank]

    def missing(self) -> list[int]:
        """The ranks of whom a push has not arrived yet that another shard has applied."""
        if self._target is None:
            return []
        return [rank for rank, mark in self._ledger.marks.items() if mark < self._target[rank]]

    def release(self) -> None:
        """Take pushes as they come."""
        self.holder, self._target = None, None


def furthest(reached: Sequence[Sequence[int]]) -> list[int]:
    """How far the furthest shard has come with each rank."""
    return [max(of_rank) for of_rank in zip(*reached, strict=True)]
