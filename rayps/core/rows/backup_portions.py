"""Which rows each worker computes in a step with backup workers. Pure; no I/O.

The rows of an epoch are divided as for N workers: into N shares of S batches each. Portion q is batch q // N of share
q % N. N + b workers take the portions in order: at first worker r takes portion r. After each step, its members take
the next portions, in the order of ranks. A worker that was dropped keeps its portion and computes it again. Therefore
each portion is applied once in an epoch, and an epoch has S steps of N portions, as with N workers. In the last step
only N workers have a portion; all of them are members, however late.

Which portion a worker has follows from the members of the steps before. All workers know these, and compute the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

NOTHING = -1  # the portion of a worker that has none


@dataclass(frozen=True, slots=True)
class Portions:
    """The portions of all workers before one step.

    `held[r]` is the portion of rank r, or `NOTHING`. `following` is the first portion that no worker has taken, and
    `count` the number of portions of the epoch.
    """

    shares: int
    count: int
    following: int
    held: tuple[int, ...]

    @classmethod
    def at(cls, index: int, *, shares: int, workers: int, steps: int) -> Portions:
        """Return the portions before step `index` of an epoch of `steps` steps, if no worker was dropped before."""
        count = shares * steps
        first = min(index * shares, count)
        held = tuple(first + rank if first + rank < count else NOTHING for rank in range(workers))
        return cls(shares, count, min(first + workers, count), held)

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks that have a portion."""
        return tuple(rank for rank, portion in enumerate(self.held) if portion != NOTHING)

    @property
    def needed(self) -> int:
        """The number of members of the step."""
        return min(self.shares, len(self.holders))

    def dropped(self, members: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks that have a portion, and are not `members` of the step."""
        return tuple(rank for rank in self.holders if rank not in set(members))

    def after(self, members: Sequence[int]) -> Portions:
        """Return the portions after a step with these members. Raises ValueError if they cannot be its members."""
        if len(members) != self.needed or not set(members) <= set(self.holders):
            raise ValueError(
                f"ranks {list(members)} cannot be the members of a step: {self.needed} of the ranks "
                f"{list(self.holders)} have a portion and count"
            )
        held, following = list(self.held), self.following
        for rank in sorted(members):
            held[rank] = following if following < self.count else NOTHING
            following += held[rank] != NOTHING
        return replace(self, following=following, held=tuple(held))

    def place(self, portion: int) -> tuple[int, int]:
        """Return the share of a portion, and the number of its batch within the share."""
        return portion % self.shares, portion // self.shares

    def to_list(self) -> list[int]:
        """Return the state as whole numbers, for a snapshot: `following`, then the portion of each rank."""
        return [self.following, *self.held]

    def restored(self, state: Sequence[int]) -> Portions:
        """Return these portions with the state that `to_list` returned.

        Raises ValueError if the state is of another number of workers or of another epoch.
        """
        following, *held = state
        found = replace(self, following=following, held=tuple(held))
        taken = [portion for portion in held if portion != NOTHING]
        applied = following - len(taken)
        if (
            len(held) != len(self.held)
            or len(set(taken)) != len(taken)
            or not all(0 <= portion < following <= self.count for portion in taken)
            or applied != self.following - len(self.holders)
        ):
            raise ValueError(f"the portions {list(state)} are not those of {len(self.held)} workers before this step")
        return found


class PortionsPlan(NamedTuple):
    """What the portions of a run follow from: N, all workers, and the epochs, which are counted from `origin`."""

    shares: int
    workers: int
    steps: int  # of an epoch
    origin: tuple[int, int]  # the round and the epoch at the start of the phase

    def before(self, step: int) -> Portions:
        """Return the portions before a step of the run, if no worker was dropped before in the step's epoch."""
        index = (step - self.origin[0]) % self.steps
        return Portions.at(index, shares=self.shares, workers=self.workers, steps=self.steps)


class PortionsWalk:
    """The portions before each step of a run. `step` is the next step, and `now` are the portions before it."""

    def __init__(self, plan: PortionsPlan, step: int, state: Sequence[int] | None = None) -> None:
        """Begin before `step`. `state` is what `state` returned there; None means that no worker was dropped."""
        self.plan, self.step, self.now = plan, step, plan.before(step)
        if state is not None:
            self.now = self.now.restored(state)

    @property
    def state(self) -> list[int] | None:
        """The portions before the next step, for a snapshot; None if they follow from the step alone."""
        return None if self.now == self.plan.before(self.step) else self.now.to_list()

    def advance(self, members: Sequence[int]) -> None:
        """Go on to the next step, after a step with these members. Raises ValueError if they cannot be its members."""
        after = self.now.after(members)
        self.step += 1
        self.now = after if (self.step - self.plan.origin[0]) % self.plan.steps else self.plan.before(self.step)

    def copy(self) -> PortionsWalk:
        """Return a walk from the same step, which goes on by itself."""
        return PortionsWalk(self.plan, self.step, self.state)
