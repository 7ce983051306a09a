"""The mailboxes of a server's workers on its own host: requests are taken out of them, answers put into them.

A request out of a mailbox is a `PeerRequest` without payload, whose pieces lie in the worker's memory; all else treats
it as one that came by message. See `rayps.ps.protocol.mailbox`.

`WholePush` serves the commonest request in few calls: a push of whole dense segments and their pull. It does what
`rayps.ps.server.requests` does with it, to the bit, where every segment is served here in the generation asked for, is
in memory of its own, and has no copies. What it needs is looked up once for each head of a mailbox; otherwise there is
no `WholePush`, or it does not take the request, and nothing has changed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rayps.comm.link.memory import Fence, Memory
from rayps.comm.link.shared_memory_link import SharedLink
from rayps.core.repeated_pushes import WINDOW
from rayps.ps.protocol.mailbox import ASKED, ASLEEP, AVAILABLE, PAGE, MailboxCall, ServerMailbox, SharedSlice, offered
from rayps.ps.protocol.messages import Role, SegmentPayload
from rayps.ps.server.assignments import AssignedSegment, AssignedSpace
from rayps.ps.server.connection import PeerRequest, ServerPeer
from rayps.ps.server.dense_segment import DenseSegment, Shard

_EMPTY = memoryview(b"")
_INFINITE, _INFINITE_STEP = float("inf"), 1 << 62


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
                count = space.cuts[segment][1] - space.cuts[segment][0]
                plain = size in (0, count * dtype.itemsize)  # else a piece with a head: see `rayps.ps.protocol.pieces`
                value = box.tensor_at(place, size, dtype if plain else torch.uint8)
                pieces.append(SegmentPayload(segment, generation, value))
                if plain and value.numel() == count:
                    whole.append((segment, generation, value))
            else:
                pieces.append(SegmentPayload(segment, generation, box.bytes_at(place, size)))
            outs.append(box.bytes_at(out, room) if room else _EMPTY)
        distinct = len({segment for segment, _, _ in whole}) == len(pieces)
        return cls(held, pieces, outs, whole if distinct else None)


class Mailboxes:
    """The mailboxes of one server. For the thread of its loop."""

    def __init__(self, wakeup: int) -> None:
        """`wakeup` is the eventfd that ends the loop's sleep."""
        self._wakeup = wakeup
        self._page = Memory.create(PAGE) if AVAILABLE else None
        self._words = memoryview(bytearray(PAGE)).cast("q") if self._page is None else self._page.view[:PAGE].cast("q")
        self._open: list[tuple[ServerPeer, ServerMailbox, memoryview]] = []
        self._heads: dict[ServerPeer, MailboxHead] = {}
        self.answered: list[ServerMailbox] = []  # to be woken
        self._fence = Fence()

    def open(self, peer: ServerPeer) -> None:
        """Take over the mailbox that a worker offers, if it does."""
        link = peer.link
        if self._page is not None and peer.box is None and isinstance(link, SharedLink) and offered(link):
            peer.box = ServerMailbox(link, self._page, self._wakeup)
            self._open.append((peer, peer.box, peer.box.words))

    def close(self, peer: ServerPeer) -> None:
        """Close the mailbox of a worker that has disconnected."""
        if peer.box is not None:
            self._open = [each for each in self._open if each[0] is not peer]
            self._heads.pop(peer, None)
            peer.push = None
            peer.box.close()
            peer.box = None

    def asked(self) -> list[ServerPeer]:
        """Return the connections whose mailbox has a new request."""
        return [peer for peer, box, words in self._open if words[ASKED] != box.seen]

    def take(self, peer: ServerPeer, held: AssignedSpace | None) -> tuple[MailboxCall, MailboxHead | None]:
        """Take the new request out of a mailbox, without a head if its space is not here.

        Raises ValueError: it is invalid.
        """
        box = peer.box
        assert box is not None
        call, rows, fresh = box.take()
        if held is None:
            return call, None
        known = self._heads.get(peer)
        if fresh or known is None or known.held is not held:
            self._heads.pop(peer, None)
            peer.push = None
            known = self._heads[peer] = MailboxHead.of(box, held, rows)
        return call, known

    def wake(self) -> None:
        """Wake the workers that were answered.

        Called after all answers, because a woken worker may take this processor.
        """
        if self.answered:
            answered, self.answered = self.answered, []
            self._fence()
            for box in answered:
                box.wake()

    def sleeps(self) -> bool:
        """Announce that the loop sleeps; return False if a request has come meanwhile. `awake` must follow."""
        self._words[ASLEEP] = 1
        self._fence()
        return not self.asked()

    def awake(self) -> None:
        """Announce that the loop does not sleep any more."""
        self._words[ASLEEP] = 0


def request_of(peer: ServerPeer, call: MailboxCall, head: MailboxHead | None) -> PeerRequest:
    """Return a request in a mailbox as a `PeerRequest`, which is served like a message."""
    request = PeerRequest(peer, call.kind, call.tag, call.step, call.patience, call.weight, None)
    if head is not None:
        request.pieces, request.outs = head.pieces, head.outs
    return request


# one segment, its generation, and what is pushed to it; a plain tuple, as all are read at each request
_Target = tuple[AssignedSegment, int, DenseSegment, Shard, Tensor]


class WholePush:
    """A push of whole dense segments and their pull, of one rank, prepared once for one head of a mailbox.

    If `takes` accepts a request, `apply` files the push, and `pulled` answers as soon as `may_pull`.
    """

    __slots__ = ("_targets", "head", "offered", "rank")

    def __init__(self, head: MailboxHead, rank: int, targets: list[_Target]) -> None:
        self.head, self.rank, self._targets = head, rank, targets
        self.offered = False  # whether the worker knows the memory of all segments

    @classmethod
    def of(cls, held: AssignedSpace, head: MailboxHead, rank: int) -> WholePush | None:
        """Prepare the requests with this head.

        Return None if they must be served by `RequestHandler`, which raises the errors.
        """
        if head.whole is None:
            return None
        here, targets = held.holdings, list[_Target]()
        for index, generation, value in head.whole:
            holding = here.get(index)
            segment = None if holding is None else holding.segment
            shard = segment.alone if isinstance(segment, DenseSegment) else None
            if holding is None or not isinstance(segment, DenseSegment) or shard is None:
                return None
            if rank not in shard.ledger.marks:
                return None
            targets.append((holding, generation, segment, shard, value))
        return cls(head, rank, targets)

    def takes(self, step: int, weight: float) -> bool:
        """Whether a request can be served so: the segments are served here as before, and the push is a valid one."""
        if not 0 <= weight < _INFINITE:
            return False
        rank, here = self.rank, self.head.held.holdings
        for holding, generation, segment, shard, _ in self._targets:
            if (
                holding.segment is not segment
                or segment.alone is not shard
                or holding.generation != generation
                or holding.role is not Role.PRIMARY
                or not holding.usable
                or holding.copies
                or here.get(holding.index) is not holding
                or (step - shard.ledger.marks[rank] >= WINDOW and not shard.spans)
            ):
                return False
        return True

    def apply(self, step: int, weight: float) -> None:
        """File the push in all segments; one that they know has no effect."""
        rank = self.rank
        for _, _, segment, shard, value in self._targets:
            segment.operations += 2  # the pull too
            shard.changes.recording = False
            shard.push(rank, step, value, weight, 0, True)

    @property
    def touched(self) -> list[AssignedSegment]:
        """Return the segments of the request."""
        return [holding for holding, _, _, _, _ in self._targets]

    @property
    def slices(self) -> list[tuple[int, SharedSlice]]:
        """The segments' memory, by index."""
        return [(holding.index, shard.slice) for holding, _, _, shard, _ in self._targets]

    def may_pull(self, step: int) -> bool:
        """Return whether the push of `step` is filed, and the clocks of all segments allow the pull after it."""
        rank = self.rank
        for _, _, _, shard, _ in self._targets:
            if shard.ledger.marks[rank] <= step or not (shard.clock.staleness is None or shard.clock.may_pull(rank)):
                return False
        return True

    def pulled(self) -> tuple[int, int, int]:
        """Count the pull; the least version, the lead in rounds, and the step below which all pushes are durable.

        The memory of what was pushed is the worker's again.
        """
        rank, lead, version, durable = self.rank, 0, _INFINITE_STEP, _INFINITE_STEP
        for holding, _, _, shard, _ in self._targets:
            ahead, kept = shard.pulled(rank), holding.durable(rank)
            shard.own(rank)
            lead = ahead if ahead > lead else lead
            version = shard.version if shard.version < version else version
            durable = kept if kept < durable else durable
        return version, lead, durable
