"""The mailboxes of a server's workers on its own host: requests are taken out of them, answers put into them.

A request out of a mailbox is a `PeerRequest` without payload, whose pieces lie in the worker's memory; all else treats
it as one that came by message. See `rayps.ps.protocol.mailbox`.

`WholePush` serves the commonest request in few calls: a push of whole dense segments and their pull. It does what
`rayps.ps.server.requests` does with it, to the bit, where every segment is served here in the generation asked for, is
in memory of its own, and has no copies. Otherwise there is no `WholePush`, and nothing has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from rayps.comm.link.memory import Fence, Memory
from rayps.comm.link.shared_memory_link import SharedLink
from rayps.core.ledger import WINDOW
from rayps.ps.protocol.mailbox import (
    ASKED,
    ASLEEP,
    AVAILABLE,
    BY_MEMORY,
    BY_MESSAGE,
    PAGE,
    MailboxCall,
    ServerMailbox,
    SharedSlice,
    offered,
)
from rayps.ps.protocol.messages import SegmentPayload
from rayps.ps.server.assignments import AssignedSegment, AssignedSpace
from rayps.ps.server.connection import PeerRequest, ServerPeer
from rayps.ps.server.dense_segment import DenseSegment
from rayps.ps.server.shard import PUSHED, ReplicatedShard

_EMPTY = memoryview(b"")


class MailboxHead(NamedTuple):
    """The head of a mailbox, read for one space: the pieces, and where their answers go.

    `whole` has segment, generation and elements of each, where all are whole dense segments; else it is None.
    """

    held: AssignedSpace
    pieces: list[SegmentPayload]
    outs: list[memoryview]
    whole: list[tuple[int, int, Tensor]] | None

    @classmethod
    def of(cls, box: ServerMailbox, held: AssignedSpace, rows: list[list[int]]) -> MailboxHead:
        """Find the memory that the rows name. Raises ValueError: it was not offered."""
        space = held.space
        dense, dtype = len(space.cuts), None if space.layout is None else space.layout.dtype
        pieces: list[SegmentPayload] = []
        outs: list[memoryview] = []
        whole: list[tuple[int, int, Tensor]] = []
        for segment, generation, place, size, out, room in rows:
            if dtype is not None and 0 <= segment < dense:
                value = box.tensor_at(place, size, dtype)
                pieces.append(SegmentPayload(segment, generation, value))
                if value.numel() == space.cuts[segment][1] - space.cuts[segment][0]:
                    whole.append((segment, generation, value))
            else:
                pieces.append(SegmentPayload(segment, generation, box.bytes_at(place, size)))
            outs.append(box.bytes_at(out, room) if room else _EMPTY)
        distinct = len({segment for segment, _, _ in whole}) == len(pieces)
        return cls(held, pieces, outs, whole if distinct else None)


class Mailboxes:
    """Those of one server. For its loop's thread."""

    def __init__(self, wakeup: int) -> None:
        """`wakeup` is the eventfd that ends the loop's sleep."""
        self._wakeup = wakeup
        self._page = Memory.create(PAGE) if AVAILABLE else None
        self._words = memoryview(bytearray(PAGE)).cast("q") if self._page is None else self._page.view[:PAGE].cast("q")
        self._peers: list[ServerPeer] = []
        self._heads: dict[ServerPeer, MailboxHead] = {}
        self._answered: list[ServerMailbox] = []
        self._fence = Fence()

    def open(self, peer: ServerPeer) -> None:
        """Take over the mailbox that a worker offers, if it does."""
        link = peer.link
        if self._page is not None and peer.box is None and isinstance(link, SharedLink) and offered(link):
            peer.box = ServerMailbox(link, self._page, self._wakeup)
            self._peers.append(peer)

    def close(self, peer: ServerPeer) -> None:
        """A worker has gone."""
        if peer.box is not None:
            self._peers.remove(peer)
            self._heads.pop(peer, None)
            peer.box.close()
            peer.box = None

    def asked(self) -> list[ServerPeer]:
        """Whose mailbox has a new request."""
        return [peer for peer in self._peers if peer.box is not None and peer.box.words[ASKED] != peer.box.seen]

    def take(self, peer: ServerPeer, held: AssignedSpace | None) -> tuple[MailboxCall, MailboxHead | None]:
        """The new request of a mailbox; no head where its space is not here. Raises ValueError: it cannot be."""
        box = peer.box
        assert box is not None
        call, rows, fresh = box.take()
        if held is None:
            return call, None
        known = self._heads.get(peer)
        if fresh or known is None or known.held is not held:
            self._heads.pop(peer, None)
            known = self._heads[peer] = MailboxHead.of(box, held, rows)
        return call, known

    def answer(self, request_peer: ServerPeer, version: int, lead: int, durable: int, *, by_message: bool) -> None:
        """Answer the open request of a mailbox."""
        box = request_peer.box
        assert box is not None
        box.answer(version, lead, durable, BY_MESSAGE if by_message else BY_MEMORY)
        self._answered.append(box)

    def wake(self) -> None:
        """Wake whom was answered: after all of them, for the one that wakes may take this processor at once."""
        if self._answered:
            answered, self._answered = self._answered, []
            self._fence()
            for box in answered:
                box.wake()

    def sleeps(self) -> bool:
        """Say that the loop sleeps from now on; False where it must not, as a request has come. `awake` must follow."""
        self._words[ASLEEP] = 1
        self._fence()
        return not self.asked()

    def awake(self) -> None:
        """Say that the loop does not sleep any more."""
        self._words[ASLEEP] = 0


def request_of(peer: ServerPeer, call: MailboxCall, head: MailboxHead | None) -> PeerRequest:
    """A request in a mailbox as one that is served like a message."""
    request = PeerRequest(peer, call.kind, call.tag, call.step, call.patience, call.weight, None)
    if head is not None:
        request.pieces, request.outs = head.pieces, head.outs
    return request


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
