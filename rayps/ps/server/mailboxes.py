"""The mailboxes of a server's workers on its own host: requests are taken out of them, answers put into them.

A request out of a mailbox is a `PeerRequest` without payload, whose pieces lie in the worker's memory; all else treats
it as one that came by message. See `rayps.ps.protocol.mailbox`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from rayps.comm.link.memory import Fence, Memory
from rayps.comm.link.shared_memory_link import SharedLink
from rayps.ps.protocol.mailbox import ASKED, ASLEEP, BY_MEMORY, BY_MESSAGE, MailboxCall, ServerMailbox, offered
from rayps.ps.protocol.messages import SegmentPayload
from rayps.ps.protocol.shared_memory import AVAILABLE, PAGE
from rayps.ps.server.assignments import AssignedSpace
from rayps.ps.server.connection import PeerRequest, ServerPeer

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
