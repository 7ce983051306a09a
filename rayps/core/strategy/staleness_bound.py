"""Which worker may start which round: the vector clock of a group of workers. Pure; no I/O, no threads.

A worker's clock is the number of rounds it has pushed without a gap: its mark in a `Ledger` of
`rayps.core.job.repeated_pushes`. Bounded staleness lets a worker pull while its clock is at most `staleness` ahead of
the slowest clock (Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS
2013). A staleness of 0 is a barrier; None means fully asynchronous.

If workers join and leave, only the clocks of the *active* ranks count. A rank that joins is given a clock that is not
below the slowest one, so the slowest clock never decreases. When the slowest rank leaves, pulls that waited for it can
be served.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class PushCount:
    """How far a run is whose ranks join and leave: by its pushes, because a rank's steps do not tell.

    A round is `share` pushes, whichever ranks they are of. `done` pushes were applied, of `end` in the whole run. None:
    the number is not known.
    """

    share: int = 1
    end: int | None = None
    done: int | None = None

    @property
    def round(self) -> int:
        """The round of the next push. A push of what compression had left out may come after the last one."""
        done = self.done or 0
        return (done if self.end is None else min(done, max(0, self.end - 1))) // self.share

    def to_json(self) -> list[int]:
        """Return the numbers; 0 for an end that is not known."""
        return [self.share, self.end or 0, self.done or 0]

    @classmethod
    def from_json(cls, found: Sequence[int]) -> PushCount:
        """Return what `to_json` has written. Raises ValueError or TypeError if it is not that."""
        share, end, done = map(int, found)
        return cls(share, end or None, done)

    def plus(self, pushes: int) -> PushCount:
        """Return the count after `pushes` more."""
        return replace(self, done=(self.done or 0) + pushes)


@dataclass(slots=True)
class ActiveRanks:
    """The ranks whose clocks count. `floor` is the slowest clock while there is no such rank.

    `pushes` counts the pushes of all ranks, for the schedule of the learning rate.
    """

    ranks: set[int] = field(default_factory=set)
    floor: int = 0
    pushes: PushCount = PushCount()

    def copy(self) -> ActiveRanks:
        """Return a copy."""
        return replace(self, ranks=set(self.ranks))


@dataclass(frozen=True, slots=True)
class MovedBound:
    """A bound that replaces the strategy's while a job trains.

    `since`: for each rank, the clock from which leads count too. A pull is served if its rank's lead is within the
    bound either from there on or in all. If only the lead in all counted, a bound that follows a greater one, or none,
    would stop the fast workers until the slow ones have made up for the rounds that they were behind before. If only
    the lead from there on counted, slow workers could wait for workers that have ended.
    """

    staleness: int | None
    since: tuple[int, ...]


class Clock:
    """Rounds pushed by each rank, and the bound on their difference."""

    def __init__(self, done: Mapping[int, int], staleness: int | None, active: ActiveRanks | None = None) -> None:
        """Use `done`, the dict from rank to clock, without a copy: each call sees the owner's newest changes.

        `active` has the ranks whose clocks count, also without a copy. None means all ranks.
        """
        self.staleness = staleness
        self.done = done
        self.active = active
        self._since: tuple[int, ...] = ()

    def move(self, bound: MovedBound | None) -> None:
        """Replace the bound from now on; None leaves it unchanged."""
        if bound is not None:
            self.staleness, self._since = bound.staleness, bound.since

    @property
    def slowest(self) -> int:
        """The smallest clock of the active ranks."""
        done, active = self.done, self.active
        if active is None:
            return min(done.values(), default=0)
        return min((done[rank] for rank in active.ranks), default=active.floor)

    def lead(self, rank: int) -> int:
        """Return how many rounds `rank` is ahead of the slowest rank."""
        return self.done[rank] - self.slowest

    def may_pull(self, rank: int, step: int | None = None) -> bool:
        """Return whether a pull of `rank` may be served now.

        `step`: the number of rounds that the worker has pushed by its own count. It is below the clock if the worker
        replaced one that died during a push: the worker must pull to repeat the push on the servers that lack it.
        """
        if self.staleness is None:
            return True
        own = self.done[rank] if step is None else min(self.done[rank], step)
        if own - self.slowest <= self.staleness:
            return True
        if not self._since:
            return False
        counted = self.done if self.active is None else self.active.ranks
        slowest = min((self.done[each] - self._from(each) for each in counted), default=0)
        return own - self._from(rank) - slowest <= self.staleness

    def _from(self, rank: int) -> int:
        """Return the clock of a rank from which its lead counts."""
        return self._since[rank] if rank < len(self._since) else 0

    def laggards(self) -> list[int]:
        """Return the active ranks with the smallest clock: the other ranks wait for them."""
        slowest, active = self.slowest, self.done if self.active is None else self.active.ranks
        return sorted(rank for rank in active if self.done[rank] == slowest)
