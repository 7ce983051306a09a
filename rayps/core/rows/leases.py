"""Which worker takes which batches, if workers do not run in step and may join, leave and die at any time. Pure.

An epoch is a permutation of all rows. It is cut into *blocks* of the rows of one round of one worker. A *lease* gives a
range of blocks to one worker, which pushes the gradient of one block in each of its steps. A step is done when all
servers have applied its push. When a worker leaves or dies, the blocks of its steps that are not done come back, and
are leased again. So each block of each epoch is applied once, whichever workers there were.

A worker may die when only some servers have its push. The block then comes back with the identity of this push. Before
another worker gets the block, each server that has the earlier push records the new one as a repetition
(`rayps.core.job.repeated_pushes.Ledger.repeats`), so that the block counts once on every server.

A server that dies may be restored from a snapshot. Workers that take part then push again what it lacks. The blocks of
workers that have left since the snapshot come back, in the same way as those of a push that only some servers have.

The state of the leases at a snapshot follows from the marks in the snapshot's ledgers: the history of the leases tells
which blocks were not done then. A run can therefore continue with any number of workers.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from rayps_client.errors import CheckpointError
from rayps_client.values import JsonObject

LEASE_SECONDS = 1.0  # how long a lease should last
LEAST_SECONDS = 0.25  # the shortest useful lease: the driver's polls take a part of it
MOST_BLOCKS = 256  # in one lease. A worker has at most two, and a server accepts fewer than `WINDOW` steps after a gap


class PushId(NamedTuple):
    """The identity of a push."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True, order=True)
class BlockRange:
    """Blocks `lo` to `hi` - 1 of an epoch.

    `earlier` has the pushes of the block, then only one, by workers that left before all servers had them.
    """

    epoch: int
    lo: int
    hi: int
    earlier: tuple[PushId, ...] = ()

    def __len__(self) -> int:
        return self.hi - self.lo

    def parted(self, count: int) -> tuple[BlockRange, BlockRange | None]:
        """Return the first `count` blocks, and the others, or None if there are none."""
        if count >= len(self):
            return self, None
        return replace(self, hi=self.lo + count), replace(self, lo=self.lo + count)


@dataclass(frozen=True, slots=True)
class RowLease:
    """Blocks for one worker: block `blocks.lo` + i is that of its step `first` + i."""

    first: int
    blocks: BlockRange

    @property
    def end(self) -> int:
        """The step after the lease."""
        return self.first + len(self.blocks)

    def block_of(self, step: int) -> tuple[int, int]:
        """Return the epoch and the number of the block of a step."""
        return self.blocks.epoch, self.blocks.lo + step - self.first


class Marks(NamedTuple):
    """A rank's next step on the servers: the lowest and the highest of all servers. Steps below `low` are done."""

    low: int
    high: int


class Leases:
    """The blocks from `begin` to `end`, which are pairs (epoch, block), and who has them."""

    def __init__(self, blocks: int, end: tuple[int, int], begin: tuple[int, int] = (0, 0)) -> None:
        """Begin with the block `begin`, and end before the block `end`. Each epoch has `blocks` blocks.

        Raises:
            ValueError: an epoch has no blocks.
        """
        if blocks < 1:
            raise ValueError(f"an epoch has {blocks} blocks: at least 1 is needed")
        self.blocks, self.end = blocks, end
        self._next = begin  # the first block that was never leased
        self._returned: list[BlockRange] = []  # in order
        # for each rank that takes part: its leases since the last saved snapshot, in the order of their steps
        self._held: dict[int, list[RowLease]] = {}
        # done leases since the last saved snapshot, with their ranks, of workers that have left
        self._left: list[tuple[int, RowLease]] = []
        self._step: dict[int, int] = {}  # for each rank that takes part: the step after its last lease
        self._done: dict[int, int] = {}  # for each rank that takes part: all its steps below this one are done
        self._used: dict[int, int] = {}  # for each rank that has left: the step after all steps of its workers

    # ---- workers

    @property
    def ranks(self) -> list[int]:
        """The ranks that take part, in order."""
        return sorted(self._step)

    def join(self, rank: int, first: int) -> None:
        """Let a rank take part from its step `first` on."""
        self._step[rank] = self._done[rank] = first
        self._held[rank] = []

    def least_first(self, rank: int) -> int:
        """Return the least first step for a worker that joins as `rank`, so that no two pushes have one identity.

        Servers that were all restored from a snapshot do not know which steps an earlier worker of the rank has used.
        Steps that were leased and not pushed are used again: the clock of a rank counts its pushes.
        """
        return self._used.get(rank, 0)

    def leave(self, rank: int, marks: Marks, rest: int | None = None) -> list[BlockRange]:
        """End the part of a rank, no later push of which will be applied. Return the blocks that come back.

        `rest`: the step as which the worker was told to push what compression has left out, if it was.
        """
        told = 0 if rest is None else rest + 1
        # restored servers may know less than a worker that waits, and that keeps its pushes until it joins again
        self._used[rank] = max(self._used.get(rank, 0), marks.high, self._done[rank], told)
        del self._step[rank], self._done[rank]
        return self._split_done([(rank, lease, marks) for lease in self._held.pop(rank)])

    def restore(self, marks: Mapping[int, Marks]) -> list[BlockRange]:
        """Take back the blocks of ranks that have left that a server's restored state lacks; return these blocks.

        `marks` is that of the newest saved snapshot, from which the server was restored. Servers that have the push of
        such a block ignore its repetition. Workers that take part push again what the server lacks.
        """
        left, self._left = self._left, []
        return self._split_done([(rank, lease, Marks(marks[rank].low, lease.end)) for rank, lease in left])

    def _split_done(self, leases: Iterable[tuple[int, RowLease, Marks]]) -> list[BlockRange]:
        """Keep the done part of leases of ranks that have left, and return the blocks of the rest, which come back."""
        back: list[BlockRange] = []
        for rank, lease, marks in leases:
            done = max(0, min(marks.low - lease.first, len(lease.blocks)))
            if done:
                self._left.append((rank, replace(lease, blocks=lease.blocks.parted(done)[0])))
            back += _find_undone(rank, lease, marks)
        for each in back:
            insort(self._returned, each)
        return back

    def lease(self, rank: int, count: int) -> list[RowLease]:
        """Give a rank up to `count` more blocks, those that came back first. Return [] if there is no block to give."""
        found: list[RowLease] = []
        while count > 0 and (blocks := self._take(count)) is not None:
            found.append(RowLease(self._step[rank], blocks))
            self._step[rank] += len(blocks)
            count -= len(blocks)
        self._held[rank] += found
        return found

    def _take(self, count: int) -> BlockRange | None:
        if self._returned:
            taken, rest = self._returned.pop(0).parted(count)
            if rest is not None:
                insort(self._returned, rest)
            return taken
        epoch, block = self._next
        if self._next >= self.end:
            return None
        hi = min(self.blocks if epoch < self.end[0] else self.end[1], block + count)
        self._next = (epoch + 1, 0) if hi == self.blocks else (epoch, hi)
        return BlockRange(epoch, block, hi)

    def advance(self, rank: int, step: int) -> None:
        """Record that all servers have applied the steps of a rank below `step`."""
        if rank in self._done:
            self._done[rank] = max(self._done[rank], min(step, self._step[rank]))

    # ---- facts

    def held(self, rank: int, step: int) -> int:
        """Return how many blocks a rank has at or after its step `step`."""
        return max(0, self._step[rank] - max(step, self._done[rank]))

    def end_of(self, rank: int) -> int:
        """Return the step after the last lease of a rank that takes part."""
        return self._step[rank]

    @property
    def unleased(self) -> int:
        """The number of blocks that no rank has."""
        (epoch, block), (end, last) = self._next, self.end
        return max(0, (end - epoch) * self.blocks + last - block) + sum(map(len, self._returned))

    def done(self, marks: Mapping[int, Marks]) -> int:
        """Return how many blocks are done in a state with these marks, from the first of the run on: see `undone`."""
        epoch, block = self._next
        return epoch * self.blocks + block - sum(map(len, self.undone(marks)))

    @property
    def finished(self) -> bool:
        """Whether all blocks are done."""
        return self.unleased == 0 and all(self._done[rank] >= step for rank, step in self._step.items())

    @property
    def epoch(self) -> int:
        """The epoch of the oldest block that is not done; that of `end` if all are done."""
        open_epochs = [each.epoch for each in self._returned]
        open_epochs += [
            lease.blocks.epoch for rank in self._step for lease in self._held[rank] if lease.end > self._done[rank]
        ]
        return min([*open_epochs, self._next[0]])

    # ---- snapshots

    def saved(self, marks: Mapping[int, Marks]) -> None:
        """Drop the history that no later snapshot needs, because there is a snapshot with these marks."""
        low = {rank: each.low for rank, each in marks.items()}
        for rank, leases in self._held.items():
            self._held[rank] = [lease for lease in leases if lease.end > low.get(rank, 0)]
        self._left = [(rank, lease) for rank, lease in self._left if lease.end > low.get(rank, 0)]

    def undone(self, marks: Mapping[int, Marks]) -> list[BlockRange]:
        """Return the blocks that were leased and are not done in a state with these marks, in order.

        `marks` has each rank that has had leases since the last saved snapshot.
        """
        back = list(self._returned)
        for rank, lease in [*((rank, lease) for rank, held in self._held.items() for lease in held), *self._left]:
            back += _find_undone(rank, lease, marks[rank])
        return join_ranges(sorted(back))

    def to_json(self, marks: Mapping[int, Marks], share: int = 1) -> JsonObject:
        """Return the blocks that are not done in a state with these marks, as JSON data.

        `share`: how many blocks are a round.
        """
        return {
            "blocks": self.blocks,
            "done": self.done(marks),
            "share": share,
            "next": list(self._next),
            "undone": [
                [each.epoch, each.lo, each.hi, [list(push) for push in each.earlier]] for each in self.undone(marks)
            ],
        }

    @classmethod
    def from_json(cls, data: JsonObject, end: tuple[int, int], *, ranks: int | None = None) -> Self:
        """Return the leases of a run that continues from `to_json`'s data until block `end`. No rank has a block.

        `ranks`: how many ranks there are now. A block whose push by another rank only some servers have counts as done,
        because the ledgers do not have this rank any more.

        Raises:
            CheckpointError: `data` is damaged.
        """
        try:
            saved: Any = data
            epoch, block = map(int, saved["next"])
            found = cls(int(saved["blocks"]), end, (epoch, block))
            for number, lo, hi, pushes in saved["undone"]:
                earlier = tuple(PushId(int(rank), int(step)) for rank, step in pushes)
                if ranks is None or all(push.rank < ranks for push in earlier):
                    found._returned.append(BlockRange(int(number), int(lo), int(hi), earlier))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's leases are damaged: {str(data)[:100]!r}") from error
        found._returned.sort()
        return found


def rounds_of(saved: JsonObject, pushes: int | None = None) -> int | None:
    """Return the number of complete rounds of a state, from `Leases.to_json`'s data; None if no block was counted.

    `pushes`: return the rounds that so many pushes are.
    """
    done, share = saved.get("done") if pushes is None else pushes, saved.get("share")
    return done // share if isinstance(done, int) and isinstance(share, int) else None


def _find_undone(rank: int, lease: RowLease, marks: Marks) -> Iterator[BlockRange]:
    """Yield the blocks of a lease that are not done with these marks.

    A block whose push only some servers have is yielded alone, with the identity of this push.
    """
    first, blocks = max(lease.first, marks.low), lease.blocks
    for step in range(first, min(lease.end, marks.high)):
        lo = blocks.lo + step - lease.first
        yield BlockRange(blocks.epoch, lo, lo + 1, (*blocks.earlier, PushId(rank, step)))
    rest = max(first, marks.high)
    if rest < lease.end:
        yield replace(blocks, lo=blocks.lo + rest - lease.first)


def join_ranges(ranges: Sequence[BlockRange]) -> list[BlockRange]:
    """Return ranges in order, with those that follow each other joined, except blocks with earlier pushes."""
    found: list[BlockRange] = []
    for each in ranges:
        last = found[-1] if found else None
        if last is not None and last.epoch == each.epoch and last.hi == each.lo and not (last.earlier or each.earlier):
            found[-1] = replace(last, hi=each.hi)
        else:
            found.append(each)
    return found


def choose_lease_size(seconds: float | None, left: int, workers: int, gap: float = 0.0) -> int:
    """Return how many blocks the next lease of a worker should have.

    `seconds`: how long one of its rounds takes, or None if this is not known yet. `left`: how many blocks no worker
    has. `workers`: the number of workers. `gap`: the longest time between two occasions to give a lease.

    A lease lasts about `LEASE_SECONDS`, and at least twice `gap`, so that a worker that gets its next lease when half
    of its lease is left does not wait for it. Near the end, leases are half an equal share of what is left, but not
    shorter than `LEAST_SECONDS`, so that all workers end at about the same time (Polychronopoulos and Kuck, "Guided
    self-scheduling", IEEE Transactions on Computers 1987).
    """
    if seconds is None:
        return 1
    share = math.ceil(left / (2 * max(1, workers)))
    return min(_count_blocks(max(LEASE_SECONDS, 2 * gap), seconds), max(_count_blocks(LEAST_SECONDS, seconds), share))


def _count_blocks(duration: float, seconds: float) -> int:
    return max(1, min(MOST_BLOCKS, round(duration / max(seconds, 1e-6))))
