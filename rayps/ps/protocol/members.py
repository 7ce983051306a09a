"""Changes of the ranks that take part in a space, which the job's driver sends to all segments (MEMBERS).

A segment applies a change between two pushes, and sends it to its backups like a push. A change that a segment has
applied already has no further effect, so a request can be repeated.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rayps_client.errors import StaleGeneration

from rayps.core.job.repeated_pushes import Ledger
from rayps.core.strategy.staleness_bound import PushCount
from rayps.ps.protocol.messages import pack_numbers, read_numbers


class MemberChangeKind(enum.IntEnum):
    """What a change does: see the methods of `rayps.core.job.repeated_pushes.Ledger`."""

    # BEGIN: see `MemberChange.begin`
    BEGIN = 1  # ranks join and leave from now on; none takes part yet, and the slowest clock is `step`
    ADMIT = 2  # the worker `rank` joins, with a first step of at least `step`
    REMOVE = 3  # the worker `rank` has left: its later pushes are refused, and its clock does not count
    REPEAT = 4  # the push (`rank`, `step`) repeats the pushes `earlier`
    RESUME = 6  # a restored state lacks that the worker `rank` has joined with the first step `step`
    END = 5  # all workers have left: the state after round `step` is retained, and is the last


@dataclass(frozen=True, slots=True)
class MemberChange:
    """One change. `earlier` has pushes as pairs (rank, step)."""

    kind: MemberChangeKind
    rank: int = -1
    step: int = 0
    earlier: tuple[tuple[int, int], ...] = ()

    @classmethod
    def begin(cls, floor: int, pushes: PushCount) -> MemberChange:
        """Return the change with which ranks join and leave from now on: see `Ledger.begin_members`."""
        share, end, done = pushes.to_json()
        return cls(MemberChangeKind.BEGIN, done, floor, ((share, end),))

    def encode(self) -> bytes:
        """Return the change as bytes."""
        return pack_numbers([self.kind, self.rank, self.step, *(number for push in self.earlier for number in push)])

    @classmethod
    def decode(cls, data: Any) -> MemberChange:
        """Return the change that `encode` encoded. Raises ValueError if `data` is not a change."""
        found = read_numbers(data)
        if len(found) < 3 or len(found) % 2 == 0:
            raise ValueError(f"a change of members has {len(found)} numbers: 3 are expected, and pairs")
        kind, rank, step, *rest = found
        return cls(MemberChangeKind(kind), rank, step, tuple(zip(rest[::2], rest[1::2], strict=True)))

    def apply_to(self, ledger: Ledger) -> None:
        """Apply the change to a segment's ledger. Raises ValueError as `Ledger.admit`."""
        match self.kind:
            case MemberChangeKind.BEGIN:
                [(share, end)] = self.earlier
                ledger.begin_members(self.step, PushCount.from_json((share, end, self.rank)))
            case MemberChangeKind.ADMIT:
                first = ledger.admit(self.rank, self.step)
                if ledger.skipped is not None:  # a schedule counts the newcomer's steps from where the others are
                    others = [rank for rank in ledger.active.ranks if rank != self.rank] if ledger.active else []
                    slowest = min(others, key=ledger.marks.__getitem__, default=self.rank)
                    ledger.skipped[self.rank] = min(first, ledger.skipped[slowest])
            case MemberChangeKind.REMOVE:
                ledger.remove(self.rank)
            case MemberChangeKind.RESUME:
                ledger.readmit(self.rank, self.step)
            case MemberChangeKind.REPEAT:
                ledger.expect_repeat(self.rank, self.step, self.earlier)
            case MemberChangeKind.END:
                ledger.end_members(self.step)


def explain_left(rank: int) -> StaleGeneration:
    """Return the error for a push of a worker that has left, or has not joined."""
    return StaleGeneration(
        f"worker-{rank} has left the job, or has not joined it: its pushes are not applied", peer=f"worker-{rank}"
    )


def with_members(ledger: Ledger, changes: Sequence[MemberChange]) -> Ledger:
    """Return a ledger of a saved state as its segment begins with it: `changes` say which ranks take part now.

    Without changes, all ranks take part, and none joins or leaves.
    """
    found = ledger.copy()
    if not changes:
        found.active = None
    for change in changes:
        change.apply_to(found)
    return found
