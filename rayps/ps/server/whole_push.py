"""The commonest request in few calls: a push of whole dense segments and their pull, out of a mailbox.

It does what `rayps.ps.server.requests` does with such a request, to the bit, where nothing is odd: every segment is
served here in the generation asked for, is in memory of its own, and has no copies. Otherwise there is no `WholePush`,
and nothing has changed.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rayps.core.ledger import WINDOW
from rayps.ps.protocol.shared_memory import SharedSlice
from rayps.ps.server.assignments import AssignedSegment, AssignedSpace
from rayps.ps.server.dense_segment import DenseSegment
from rayps.ps.server.mailboxes import MailboxHead
from rayps.ps.server.replicated_shard import PUSHED, ReplicatedShard

# one segment and what is pushed to it; a plain tuple, as one is made for each segment of each request
_Target = tuple[AssignedSegment, DenseSegment, ReplicatedShard, Tensor]


class WholePush:
    """One such request: `apply` first, then `pulled` as soon as `may_pull`."""

    __slots__ = ("_rank", "_step", "_targets")

    def __init__(self, rank: int, step: int, targets: list[_Target]) -> None:
        self._rank, self._step, self._targets = rank, step, targets

    @classmethod
    def of(cls, held: AssignedSpace, head: MailboxHead, rank: int, step: int, weight: float) -> WholePush | None:
        """None where the request must go the long way, which also says what is wrong with it."""
        if head.whole is None or not 0 <= weight < float("inf"):
            return None
        here, targets = held.holdings, list[_Target]()
        for index, generation, value in head.whole:
            holding = here.get(index)
            if holding is None or not holding.serves or holding.generation != generation or not holding.usable:
                return None
            segment = holding.segment
            shard = segment.alone if isinstance(segment, DenseSegment) else None
            if shard is None or holding.copies or not isinstance(segment, DenseSegment):
                return None
            mark = shard.ledger.marks.get(rank)
            if mark is None or (step - mark >= WINDOW and not shard.spans):
                return None
            targets.append((holding, segment, shard, value))
        return cls(rank, step, targets)

    def apply(self, weight: float) -> None:
        """File the push in all segments; one that they know has no effect."""
        rank, step = self._rank, self._step
        for _, segment, shard, value in self._targets:
            segment.operations += 2  # the pull too
            shard.writes = False
            if shard.push(rank, step, value, weight, 0, True) and shard.by == PUSHED:
                shard.seq += 1

    @property
    def current(self) -> bool:
        """Whether the segments are still those that were pushed to."""
        return all(
            holding.serves and holding.segment is segment and segment.alone is shard and not holding.copies
            for holding, segment, shard, _ in self._targets
        )

    @property
    def touched(self) -> list[AssignedSegment]:
        """The segments."""
        return [holding for holding, _, _, _ in self._targets]

    def unknown(self, offered: Mapping[int, object]) -> list[tuple[int, SharedSlice]]:
        """The segments whose memory, as it is now, is not among what was offered, by index; and that memory."""
        return [
            (holding.index, shard.slice)
            for holding, _, shard, _ in self._targets
            if offered.get(holding.index) is not shard.slice
        ]

    @property
    def may_pull(self) -> bool:
        """Whether the clocks of all segments allow the pull."""
        rank, step = self._rank, self._step
        for _, _, shard, _ in self._targets:
            if shard.ledger.marks[rank] <= step or not shard.may_pull(rank):
                return False
        return True

    def pulled(self) -> tuple[int, int, int]:
        """Count the pull; the least version, the lead in rounds, and the step below which all pushes are durable.

        The memory of what was pushed is the worker's again.
        """
        rank, lead, version, durable = self._rank, 0, 1 << 62, 1 << 62
        for holding, _, shard, _ in self._targets:
            lead = max(lead, shard.pulled(rank))
            shard.own(rank)
            version = min(version, shard.version)
            durable = min(durable, holding.durable(rank))
        return version, lead, durable
