"""A worker's link to one server, and what is under way on it: requests that were said and are not answered yet."""

from __future__ import annotations

import select
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rayps.comm.link import Link, Message
from rayps.comm.link.socket_link import as_bytes
from rayps.ps.protocol.mailbox import WorkerMailbox
from rayps.ps.protocol.messages import GroupMessage, SegmentPayload, pack_head

POOLED_BYTES = 1 << 14  # smaller payloads are not worth keeping memory for
PUSHES = frozenset({GroupMessage.PUSH, GroupMessage.PUSH_PULL})
PATIENT = frozenset(
    {GroupMessage.PULL, GroupMessage.PUSH_PULL, GroupMessage.READ, GroupMessage.FLUSH}
)  # these say how long their answer may wait
BY_MAILBOX = frozenset({GroupMessage.PUSH, GroupMessage.PULL, GroupMessage.PUSH_PULL, GroupMessage.READ})


@dataclass(slots=True)
class SegmentRequest:
    """Track one request to several segments, which may be on several servers.

    `unsaid` are the segments to which it must be sent, for the first time or again; `open` counts those without an
    answer.
    """

    kind: GroupMessage
    step: int
    weight: float
    pieces: dict[int, Any]  # buffers; once said, of a push, where they lie in `buffers`
    landing: dict[int, Any] | None = None
    answers: dict[int, Any] = field(default_factory=dict)
    unsaid: dict[int, None] = field(default_factory=dict)  # in order
    open: int = 0
    lead: int = 0
    version: int | None = None
    durable: int | None = None
    buffers: list[Any] = field(default_factory=list)
    kept: bool = False  # some of its memory is kept by others
    by_message: bool = False  # it must not go by mailbox
    torn: bool = False  # what is read of a segment may be of several versions

    def __post_init__(self) -> None:
        self.unsaid = dict.fromkeys(self.pieces)
        self.open = len(self.pieces)


@dataclass(slots=True)
class InFlight:
    """What of an ask was said to one server."""

    ask: SegmentRequest
    segments: list[int]
    by_mailbox: bool = False
    outs: dict[int, Any] = field(default_factory=dict)  # where rows are put that do not land in their place at once

    def reopen(self) -> None:
        """It is to be said again."""
        self.ask.unsaid.update(dict.fromkeys(self.segments))


class ServerConnection:
    """One server, as a worker speaks to it."""

    def __init__(self, server: str, link: Link, mailbox: WorkerMailbox | None = None) -> None:
        self.server, self.link, self.mailbox = server, link, mailbox
        self.flights: dict[int, InFlight] = {}  # by tag
        self.marks: dict[int, int] = {}  # by segment: the rank's next step there, as of joining
        self.joined = False
        self.joining = -1  # tag of the JOIN that is not answered
        self._scratch = np.empty(0, np.uint8)

    def say(self, message: Message, payload: Any) -> None:
        """Send what leaves at once; the rest leaves while answers are awaited. Raises LinkError."""
        self.link.queue(message, payload, copy=False)

    @property
    def waits(self) -> bool:
        """Whether a request in the mailbox is not answered."""
        return self.mailbox is not None and not self.mailbox.answered

    @property
    def heard(self) -> bool:
        """Whether the answer to a request that is under way can be read out of the mailbox."""
        box = self.mailbox
        if box is None or not box.answered:
            return False
        flight = self.flights.get(box.tag)
        return flight is not None and flight.by_mailbox and box.readable

    def close(self) -> None:
        """Close the link, and give up the mailbox."""
        self.link.close()
        if self.mailbox is not None:
            self.mailbox.close()

    @property
    def events(self) -> int:
        """What to wait for."""
        return select.POLLIN | (self.link.interest if self.link.queued else 0)

    def next(self) -> Message | None:
        """The next message, if it is here; the payload of an answer that has its places is good until the next call.

        Raises LinkError.
        """
        link = self.link
        head = link.peek()
        if head is None:
            return None
        flight = self.flights.get(head.tag)
        into = None
        if flight is not None and flight.ask.landing is not None and head.kind == GroupMessage.VALUE:
            size = link.pending_bytes
            if size >= POOLED_BYTES:
                if len(self._scratch) != size:
                    self._scratch = np.empty(size, np.uint8)
                into = self._scratch
        return link.try_recv(into)


class BufferPool:
    """Memory for payloads, used again: a fresh one costs as much as the copy into it."""

    def __init__(self) -> None:
        self._free: dict[int, list[Any]] = {}

    def take(self, size: int) -> Any:
        """Memory of `size` bytes, not cleared."""
        free = self._free.get(size)
        return free.pop() if free else memoryview(np.empty(size, np.uint8))  # type: ignore[arg-type]

    def give(self, buffers: list[Any]) -> None:
        """Take memory back that nobody reads any more."""
        for buffer in buffers:
            if len(buffer) >= POOLED_BYTES:
                free = self._free.setdefault(len(buffer), [])
                if len(free) < 4:
                    free.append(buffer)

    def clear(self) -> None:
        """Forget it: other sizes will be needed."""
        self._free.clear()


def gather(pieces: list[SegmentPayload], pool: BufferPool) -> tuple[Any, list[Any]]:
    """A request's payload as `messages.pack` makes it, in one copy, and where each piece lies in it."""
    head = pack_head(pieces)
    views = [as_bytes(each.data) for each in pieces]
    payload = pool.take(len(head) + sum(map(len, views)))
    at = len(head)
    payload[:at] = head
    places = []
    for view in views:
        place = payload[at : at + len(view)]
        place[:] = view
        places.append(place)
        at += len(view)
    return payload, places
