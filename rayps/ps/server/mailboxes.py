"""The mailboxes of a server's workers on its own host: requests are taken out of them, answers put into them.

A request out of a mailbox is a `PeerRequest` without payload, whose pieces lie in the worker's memory; all else treats
it as one that came by message. See `rayps.ps.protocol.mailbox`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from rayps.comm.link.memory import Fence, Memory
from rayps.comm.link.shared_memory_link import SharedLink
from rayps.ps.protocol.mailbox import ASKED, ASLEEP, BY_MEMORY, BY_MESSAGE, ServerMailbox, offered
from rayps.ps.protocol.messages import SegmentPayload
from rayps.ps.protocol.shared_memory import AVAILABLE, PAGE
from rayps.ps.server.assignments import AssignedSpace
from rayps.ps.server.connection import PeerRequest, ServerPeer

_EMPTY = memoryview(b"")


class Mailboxes:
    """Those of one server. For its loop's thread."""

    def __init__(self, wakeup: int) -> None:
        """`wakeup` is the eventfd that ends the loop's sleep."""
        self._wakeup = wakeup
        self._page = Memory.create(PAGE) if AVAILABLE else None
        self._words = memoryview(bytearray(PAGE)).cast("q") if self._page is None else self._page.view[:PAGE].cast("q")
        self._peers: list[ServerPeer] = []
        self._heads: dict[ServerPeer, tuple[AssignedSpace, list[SegmentPayload], list[memoryview]]] = {}
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

    def take(self, peer: ServerPeer, held: AssignedSpace | None) -> PeerRequest:
        """The new request of a mailbox. Raises ValueError: it cannot be."""
        box = peer.box
        assert box is not None
        call, rows, fresh = box.take()
        request = PeerRequest(peer, call.kind, call.tag, call.step, call.patience, call.weight, None)
        if held is None:
            return request
        known = self._heads.get(peer)
        if fresh or known is None or known[0] is not held:
            self._heads.pop(peer, None)
            known = self._heads[peer] = held, *_read(box, held, rows)
        request.pieces, request.outs = known[1], known[2]
        return request

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

    @contextlib.contextmanager
    def sleeping(self) -> Iterator[bool]:
        """While the loop sleeps; False where it must not, for a request has come."""
        self._words[ASLEEP] = 1
        self._fence()
        try:
            yield not self.asked()
        finally:
            self._words[ASLEEP] = 0

    def hush(self) -> None:
        """Take the wakeup back."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)


def _read(
    box: ServerMailbox, held: AssignedSpace, rows: list[list[int]]
) -> tuple[list[SegmentPayload], list[memoryview]]:
    """The pieces that a head names, and where their answers go."""
    space = held.space
    dense, dtype = len(space.cuts), None if space.layout is None else space.layout.dtype
    pieces, outs = [], []
    for segment, generation, place, size, out, room in rows:
        if dtype is not None and 0 <= segment < dense:
            pieces.append(SegmentPayload(segment, generation, box.tensor_at(place, size, dtype)))
        else:
            pieces.append(SegmentPayload(segment, generation, box.bytes_at(place, size)))
        outs.append(box.bytes_at(out, room) if room else _EMPTY)
    return pieces, outs
