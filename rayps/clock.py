"""Who may enter which round: the vector clock of a group of workers. Pure; no I/O, no threads.

A worker's clock is the number of rounds it has pushed. Bounded staleness (Ho et al., "More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013) lets a worker pull while
its clock is at most `staleness` ahead of the slowest: 0 is a barrier, None is fully asynchronous.
"""

from __future__ import annotations

from collections.abc import Iterable


class Clock:
    """Rounds pushed by each rank, and how far apart they may drift."""

    def __init__(self, ranks: Iterable[int], staleness: int | None, start: int = 0) -> None:
        self.staleness = staleness
        self.done = dict.fromkeys(ranks, start)

    @property
    def slowest(self) -> int:
        """The smallest clock in the group."""
        return min(self.done.values(), default=0)

    def lead(self, rank: int) -> int:
        """How many rounds `rank` is ahead of the slowest."""
        return self.done[rank] - self.slowest

    def may_pull(self, rank: int) -> bool:
        """Whether a pull of `rank` may be served now."""
        return self.staleness is None or self.lead(rank) <= self.staleness

    def laggards(self) -> list[int]:
        """The ranks that everyone else waits for."""
        slowest = self.slowest
        return sorted(rank for rank, done in self.done.items() if done == slowest)

    def tick(self, rank: int, step: int) -> bool:
        """File that `rank` pushed `step`; False (and no change) when it had pushed it before.

        Raises:
            ValueError: a step was skipped, or the rank is not of this group.
        """
        if rank not in self.done:
            raise ValueError(f"rank {rank} is not one of the ranks {sorted(self.done)}")
        if step < self.done[rank]:
            return False
        if step > self.done[rank]:
            raise ValueError(f"rank {rank} pushed step {step} before step {self.done[rank]}")
        self.done[rank] += 1
        return True

    def advance(self, rank: int, step: int) -> None:
        """Let a rank's clock jump forward to `step` (after a restored shard lost some of its rounds)."""
        self.done[rank] = max(self.done[rank], step)
