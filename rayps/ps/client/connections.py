"""A worker's connections to the servers of a space.

`ServerConnection` is one of them, with the requests that were sent and not answered yet. `ServerConnections` opens them
when they are needed, closes them when a server dies, and tries again in time.
"""

from __future__ import annotations

import select
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rayps.comm.link import Link, Message, connect
from rayps.comm.link.memory import Fence
from rayps.comm.link.socket_link import as_bytes
from rayps.core.errors import LinkError, PeerLost, PeerTimeout
from rayps.core.failpoint import passing
from rayps.ps.client.map_subscription import Door, subscribe
from rayps.ps.protocol.mailbox import AVAILABLE, WAITS, WorkerMailbox, WorkerMemory, mailbox
from rayps.ps.protocol.messages import GroupMessage, SegmentPayload, error_of, pack_head, read_numbers
from rayps.ps.protocol.segment_map import SpaceMap, StaticMap
from rayps.ps.protocol.space import Space

CALL_SECONDS = (0.1, 2.0)  # first and longest try to reach a server; it may be dead, and the map not say so yet
PROBE_SECONDS = 0.002  # to find out whether a server that was lost listens at all
PAUSE_SECONDS = (0.005, 0.1)  # first and longest pause before a server that refused or was lost is asked again
NAP_SECONDS = 0.05  # between two looks where nobody holds a segment


class _Trouble:
    """A server that refused or was lost: when to try again."""

    def __init__(self) -> None:
        self.pause, self.call, self.until = PAUSE_SECONDS[0], CALL_SECONDS[0], 0.0

    def again(self) -> None:
        self.until = time.monotonic() + self.pause
        self.pause = min(2 * self.pause, PAUSE_SECONDS[1])


class ServerConnections:
    """By server, the links of one holder of a rank, and the map that says whom to ask."""

    def __init__(
        self,
        door: Door,
        space: Space,
        rank: int,
        incarnation: int,
        name: str,
        timeout: float,
        *,
        resident: bool = True,
        first: Callable[[str], int] | None = None,
    ) -> None:
        """With `resident`, share memory with servers of this host.

        `first(server)` gives the first step that can be pushed again to a server, which gives up the steps below.
        """
        self.space, self.rank, self.name, self.timeout = space, rank, name, timeout
        self.watch = subscribe(door, space.number, name, timeout)
        self.map: SpaceMap = self.watch.map
        self.open: dict[str, ServerConnection] = {}
        self.ended = False
        self.breaks = 0  # times that a server was lost, or segments got another holder
        self.changes = 0  # of `open`
        self.deadline = 0.0
        self.memory = WorkerMemory() if resident and AVAILABLE else None
        self.fence = Fence()
        self._incarnation, self._first = incarnation, first
        self.troubles: dict[str, _Trouble] = {}  # by server: those that refused or were lost
        self._joins = 0

    def newer(self) -> set[int] | None:
        """Take over a newer map, if there is one: the segments that have another primary or generation."""
        found = self.watch.look()
        if found is None:
            return None
        old, self.map = self.map, found
        self.troubles.clear()
        changed = {
            index
            for index, (a, b) in enumerate(zip(old.holdings, found.holdings, strict=True))
            if (a.primary, a.generation) != (b.primary, b.generation)
        }
        self.breaks += bool(changed)
        for line in list(self.open.values()):
            if found.addresses.get(line.server) != old.addresses.get(line.server):  # another process has its name
                self.lose(line)
        return changed

    def line(self, server: str) -> ServerConnection | None:
        """The link to a server, on which this rank has said who it is; None while it cannot be reached, or refuses."""
        trouble = self.troubles.get(server)
        if trouble is not None and time.monotonic() < trouble.until:
            return None
        known = self.open.get(server)
        if known is not None:
            return known
        address = self.map.addresses.get(server)
        if address is None or self.ended:
            return None
        try:
            link = self._call(address, trouble or self._trouble(server), known_trouble=trouble is not None)
        except LinkError as error:
            raise PeerLost(f"{server!r} closed the connection or died: {error}", peer=server) from error
        if link is None:
            return None
        self.changes += 1
        line = self.open[server] = ServerConnection(server, link, mailbox(link, self.memory))
        self.join(line)
        return self.open.get(server)

    def _call(self, address: str, trouble: _Trouble, known_trouble: bool) -> Link | None:
        """A link to a server, or None. One that does not listen takes no time: a newer map may come meanwhile.

        Raises LinkError: it does not listen, and will not be replaced.
        """
        patience = min(trouble.call, max(0.001, self.deadline - time.monotonic()))
        for seconds in (PROBE_SECONDS, patience) if known_trouble else (patience,):
            try:
                return connect(address, name=self.name, secret=self.watch.door["secret"], generation=0, timeout=seconds)
            except PeerTimeout:
                continue  # it listens, and is slow
            except LinkError:
                if self.watch.final:
                    raise
                break
        trouble.call = min(2 * trouble.call, CALL_SECONDS[1])
        trouble.again()
        return None

    def join(self, line: ServerConnection) -> None:
        """Say who this is; JOINED is to come."""
        self._joins -= 1
        line.joined, line.joining = False, self._joins
        try:
            more = struct.pack("<dq", self.timeout, -1 if self._first is None else self._first(line.server))
            line.say(
                Message(GroupMessage.JOIN, line.joining, self.space.number, self.rank, float(self._incarnation)), more
            )
        except LinkError:
            self.lose(line)

    def lose(self, line: ServerConnection) -> None:
        """A link has failed: what was under way on it is to be said again."""
        if self.open.pop(line.server, None) is not None:
            self.breaks += 1
            self.changes += 1
            if line.waits and self.memory is not None:
                self.memory.retire()
            line.close()
            for flight in line.flights.values():
                flight.reopen()
            line.flights.clear()
            self.refused(line.server)
            passing("talk: lost, not said again")

    def refused(self, server: str) -> None:
        """Do not ask this server for a moment: what was said to it cannot be there, or not yet."""
        self._trouble(server).again()

    def answered(self, server: str) -> None:
        """Record that this server has the segments that the map assigns to it."""
        self.troubles.pop(server, None)

    def wait(self, unsaid: list[int]) -> None:
        """Sleep until something arrives, or `unsaid` may be said again. Raises PeerTimeout, PeerLost."""
        now = time.monotonic()
        if self.ended:
            raise PeerLost(f"{self.name} has been ended on this side", peer=self.name)
        if now > self.deadline:
            raise self._late(unsaid)
        ends = self.deadline
        if unsaid:
            self.watch.seek()
            ends = min(ends, *(t.until for t in self.troubles.values() if t.until > now), now + NAP_SECONDS)
        poll = select.poll()
        boxes = [line.mailbox for line in self.open.values() if line.mailbox is not None and line.waits]
        for line in self.open.values():
            poll.register(line.link.fileno(), line.events)
        if not self.watch.lost:
            poll.register(self.watch.fileno(), select.POLLIN)
        if boxes and self.memory is not None:
            poll.register(self.memory.wakeup, select.POLLIN)
        for box in boxes:
            box.words[WAITS] = 1
        self.fence()
        if not any(line.heard for line in self.open.values()):
            poll.poll(max(1, int(1000 * (ends - now))))
        for box in boxes:
            box.words[WAITS] = 0
        if boxes and self.memory is not None:
            self.memory.hush()

    def hang_up(self) -> None:
        """End what another thread waits for in here. Any thread may call it."""
        self.ended = True
        self.watch.hang_up()
        for line in list(self.open.values()):
            line.link.hang_up()

    def close(self) -> None:
        """Close all. Safe to call twice."""
        self.ended = True
        for line in list(self.open.values()):
            line.close()
        self.open.clear()
        self.watch.close()
        if self.memory is not None:
            self.memory.close()

    def _trouble(self, server: str) -> _Trouble:
        return self.troubles.setdefault(server, _Trouble())

    def _late(self, unsaid: list[int]) -> PeerTimeout:
        silent = {
            line.server: sorted({index for flight in line.flights.values() for index in flight.segments})
            for line in self.open.values()
            if line.flights
        }
        said = [f"server {name!r} did not answer for {named(which)}" for name, which in silent.items()]
        segments = sorted({*unsaid, *(index for which in silent.values() for index in which)})
        if unsaid:
            holders = ", ".join(str(each) for each in sorted(map(str, self.map.by_server(sorted(set(unsaid))))))
            lost = ", and the manager is lost" if self.watch.lost else ""
            said.append(f"{named(sorted(set(unsaid)))} could not be asked for (held by {holders}{lost})")
        return PeerTimeout(
            f"space {self.space.name!r}: {'; '.join(said)} within {self.timeout:g} s (the knob is `timeout`)",
            peer=next(iter(silent), "manager"),
            seconds=self.timeout,
            segments=segments,
        )


def take_seat(door: StaticMap, space: Space, rank: int, timeout: float) -> int:
    """Become the next holder of a rank where there is no manager: the server of segment 0 counts the incarnations.

    Raises:
        PeerTimeout, PeerLost: it does not answer.
    """
    found = door.map
    server = str(found.holdings[0].primary)
    link = connect(found.addresses[server], name=f"worker-{rank}", secret=door.secret, generation=0, timeout=timeout)
    try:
        link.send(Message(GroupMessage.SEAT, 1, space.number, rank), timeout=timeout)
        reply = link.recv(timeout)
    finally:
        link.close()
    if reply.kind == GroupMessage.ERROR:
        raise error_of(reply)
    return read_numbers(reply.payload)[0]


def named(segments: list[int]) -> str:
    """Some segments, in words."""
    shown = ", ".join(map(str, segments[:8])) + (f" and {len(segments) - 8} more" if len(segments) > 8 else "")
    return f"segment{'s' if len(segments) != 1 else ''} {shown}"


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
