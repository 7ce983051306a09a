"""Which rows a worker takes in each of its steps, as values. Pure; no I/O.

An epoch has an order of all rows. It is divided into *parts*, and a part is cut into *blocks*, the rows of one step. A
block is a number of micro-batches. Two questions are asked apart:

    which block a step takes     ByRank | ByLease | ByPortion     (`StepRows`)
    which rows a block has       EvenCut | ShareCut               (`RowCut`)

A third cut draws the rows in secret (`rayps.worker.rows.private_rows.RowDraws`). Data without row numbers has no cut:
the batches of a part are read in sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

from rayps.core.rows.backup_portions import NOTHING, PortionsPlan, PortionsWalk
from rayps.core.rows.leases import RowLease
from rayps.core.rows.row_shares import RowShares, deal_places

Places: TypeAlias = Sequence[int]  # places in the order of an epoch


class RowBlock(NamedTuple):
    """What a worker takes in `step`: block `number` of `part`, one of the `parts` of `epoch`."""

    step: int
    epoch: int
    number: int
    part: int = 0
    parts: int = 1

    def has_rows_of(self, other: RowBlock) -> bool:
        """Return whether both are the same block of the same epoch."""
        return self[1:] == other[1:]


class StepRows(Protocol):
    """Which block a worker takes in each step.

    `seeds`: whether random numbers are seeded by the block, because they must not depend on who takes it. `repeats`:
    whether a step may take the block of the step before again.
    """

    seeds: ClassVar[bool]
    repeats: ClassVar[bool]

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step, and the number of the step within it."""

    def block(self, step: int) -> RowBlock | None:
        """Return the block of a step; None if the worker takes no rows in it."""

    def is_known(self, step: int) -> bool:
        """Return whether the block of a later step is known now, so that it can be read in advance."""


class RowCut(Protocol):
    """Which rows a block has."""

    def places(self, block: RowBlock) -> tuple[Places, ...]:
        """Return the places of the rows of each micro-batch."""


# ---- which block a step takes


@dataclass(frozen=True, slots=True)
class ByRank:
    """Worker `rank` of `size` takes the blocks of its part in order. Epochs of `steps` steps begin at `origin`.

    `origin` is a step and its epoch.
    """

    rank: int
    size: int
    steps: int
    origin: tuple[int, int] = (0, 0)
    seeds: ClassVar[bool] = False
    repeats: ClassVar[bool] = False

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step, and the number of the step within it."""
        began, before = self.origin
        epoch, index = divmod(step - began, self.steps)
        return before + epoch, index

    def block(self, step: int) -> RowBlock:
        """Return the block of a step."""
        return RowBlock(step, *self.epoch_of(step), self.rank, self.size)

    def is_known(self, step: int) -> bool:
        """Return True."""
        return True


@dataclass(frozen=True, slots=True)
class ByLease:
    """A worker takes the blocks of its leases, which are in the order of their steps. An epoch is one part."""

    leases: tuple[RowLease, ...] = ()
    seeds: ClassVar[bool] = True
    repeats: ClassVar[bool] = False

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return the epoch and the block of a step: of the newest leased step before it if it is not leased yet."""
        for lease in reversed(self.leases):
            if lease.first <= step:
                return lease.block_of(min(step, lease.end - 1))
        return self.leases[0].block_of(self.leases[0].first) if self.leases else (0, 0)

    def block(self, step: int) -> RowBlock:
        """Return the block of a step."""
        return RowBlock(step, *self.epoch_of(step))

    def is_known(self, step: int) -> bool:
        """Return whether a step is leased."""
        return any(lease.first <= step < lease.end for lease in self.leases)


class ByPortion:
    """Worker `rank` takes the portion that it has before the next step of `walk`: see `backup_portions`."""

    seeds: ClassVar[bool] = False
    repeats: ClassVar[bool] = True

    def __init__(self, rank: int, plan: PortionsPlan, start: int) -> None:
        """Begin with step `start`."""
        self._rank, self._plan = rank, plan
        self.walk = PortionsWalk(plan, start)

    def begin_at(self, step: int, state: Sequence[int] | None) -> None:
        """Continue at a step, with the state of a snapshot there. A state of another run is ignored."""
        try:
            self.walk = PortionsWalk(self._plan, step, state)
        except ValueError:  # the snapshot is of another number of workers, or of a run without backup workers
            self.walk = PortionsWalk(self._plan, step)

    @property
    def has_portion(self) -> bool:
        """Whether this worker has rows in the next step."""
        return self.walk.now.held[self._rank] != NOTHING

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step, and the number of the step within it."""
        return ByRank(0, 1, self._plan.steps, self._plan.origin).epoch_of(step)

    def block(self, step: int) -> RowBlock | None:
        """Return the block of a step, which is the next one of `walk`; None if the worker has no portion."""
        if not self.has_portion:
            return None
        share, number = self.walk.now.place(self.walk.now.held[self._rank])
        return RowBlock(step, self.epoch_of(step)[0], number, share, self._plan.shares)

    def is_known(self, step: int) -> bool:
        """Return False: it depends on the members of the step before."""
        return False


# ---- which rows a block has


@dataclass(frozen=True, slots=True)
class EvenCut:
    """Part p of P has the places p, p + P, p + 2P... A block has `accumulate` micro-batches of `batch_size` rows.

    The last micro-batch of a part may be smaller, unless `drop_last` leaves it out; each part has equally many.
    """

    rows: int
    batch_size: int
    accumulate: int = 1
    drop_last: bool = False

    def places(self, block: RowBlock) -> tuple[range, ...]:
        """Return the places of the rows of each micro-batch."""
        own, each = range(block.part, self.rows, block.parts), self.batch_size
        most = -(-self.rows // block.parts)  # rows of the largest part
        batches = most // each if self.drop_last else -(-most // each)
        first = block.number * self.accumulate
        found = (own[at * each : (at + 1) * each] for at in range(first, min(first + self.accumulate, batches)))
        return tuple(part[:0] if self.drop_last and len(part) < each else part for part in found)


@dataclass(frozen=True, slots=True)
class ShareCut:
    """Part r has the share of rank r of each round's block of `shares`, in micro-batches of at most `batch_size` rows.

    A share is cut into micro-batches as equal as possible. All ranks have equally many; some may be empty.
    """

    rows: int
    batch_size: int
    shares: RowShares

    @property
    def accumulate(self) -> int:
        """The number of micro-batches of a block."""
        return -(-max(self.shares.shares) // self.batch_size)

    def places(self, block: RowBlock) -> tuple[Places, ...]:
        """Return the places of the rows of each micro-batch."""
        low, high = self.shares.bounds(block.epoch, block.number, self.rows)
        own = _deal(self.shares.shares, block.part)
        most = -(-len(own) // max(1, -(-len(own) // self.batch_size)))  # rows of a micro-batch
        taken = [low + place for place in own if place < high - low]
        return tuple(taken[at * most : (at + 1) * most] for at in range(self.accumulate))


@lru_cache(maxsize=64)
def _deal(shares: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return tuple(deal_places(shares, rank))
