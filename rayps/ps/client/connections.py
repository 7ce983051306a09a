"""A worker's connections to the servers of a space.

`ServerConnection` is one connection with its requests in flight. `ServerConnections` opens a connection when a request
needs it, closes it when the server dies, and limits how often an unreachable server is called.
"""

from __future__ import annotations

import contextlib
import json
import select
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rayps.comm.link import Link, Message, connect
from rayps.comm.link.memory import Fence
from rayps.comm.link.socket_link import EMPTY, as_bytes
from rayps.core.errors import LinkError, PeerLost, PeerTimeout
from rayps.core.failpoint import passing
from rayps.ps.protocol.mailbox import AVAILABLE, WAITS, WorkerMailbox, WorkerMemory, mailbox
from rayps.ps.protocol.messages import GroupMessage, error_of, read_numbers, unpack
from rayps.ps.protocol.rows import ShardRows
from rayps.ps.protocol.segment_map import SpaceMap, StaticMap, StaticSubscription
from rayps.ps.protocol.space import Space

CALL_SECONDS = (0.1, 2.0)  # first and longest attempt to connect to a server, which may be dead and still in the map
PROBE_SECONDS = 0.002  # to detect whether a server that was lost listens at all
PAUSE_SECONDS = (0.005, 0.1)  # first and longest pause before the next request to a server that refused or was lost
NAP_SECONDS = 0.05  # between two checks while a segment has no primary
POOLED_BYTES = 1 << 14  # memory for smaller payloads is not reused


class _Backoff:
    """When to try a server again that refused a request or was lost: with growing pauses."""

    def __init__(self) -> None:
        self.pause, self.call, self.until = PAUSE_SECONDS[0], CALL_SECONDS[0], 0.0

    def extend(self) -> None:
        """Wait for the next, longer pause."""
        self.until = time.monotonic() + self.pause
        self.pause = min(2 * self.pause, PAUSE_SECONDS[1])


class ServerConnections:
    """The connections of one holder of a rank, by server, and the map of the space's segments."""

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

        `first(server)` returns the first step that can be repeated to a server, which counts the steps below as lost.
        """
        self.space, self.rank, self.name, self.timeout = space, rank, name, timeout
        self.watch = subscribe(door, space.number, name, timeout)
        self.map: SpaceMap = self.watch.map
        self.open: dict[str, ServerConnection] = {}
        self.ended = False
        self.breaks = 0  # counts lost servers, and maps in which segments have another holder
        self.changes = 0  # counts changes of `open`
        self.deadline = 0.0
        self.memory = WorkerMemory() if resident and AVAILABLE else None
        self.fence = Fence()
        self._incarnation, self._first = incarnation, first
        self.backoffs: dict[str, _Backoff] = {}  # by server: those that refused a request or were lost
        self._joins = 0

    def newer(self) -> set[int] | None:
        """Apply a newer map, if there is one; return the segments whose primary or generation changed."""
        found = self.watch.look()
        if found is None:
            return None
        old, self.map = self.map, found
        self.backoffs.clear()
        changed = {
            index
            for index, (a, b) in enumerate(zip(old.holdings, found.holdings, strict=True))
            if (a.primary, a.generation) != (b.primary, b.generation)
        }
        self.breaks += bool(changed)
        for line in list(self.open.values()):
            if found.addresses.get(line.server) != old.addresses.get(line.server):  # another process with this name
                self.lose(line)
        return changed

    def to(self, server: str) -> ServerConnection | None:
        """Return the connection to a server, opened with a JOIN; None while it is unreachable or backs off.

        Raises:
            PeerLost: it died, and will not be replaced.
        """
        backoff = self.backoffs.get(server)
        if backoff is not None and time.monotonic() < backoff.until:
            return None
        known = self.open.get(server)
        if known is not None:
            return known
        address = self.map.addresses.get(server)
        if address is None or self.ended:
            return None
        try:
            link = self._call(address, backoff or self._backoff(server), known_trouble=backoff is not None)
        except LinkError as error:
            raise PeerLost(f"{server!r} closed the connection or died: {error}", peer=server) from error
        if link is None:
            return None
        self.changes += 1
        made = self.open[server] = ServerConnection(server, link, mailbox(link, self.memory))
        self.join(made)
        return self.open.get(server)

    def _call(self, address: str, backoff: _Backoff, known_trouble: bool) -> Link | None:
        """Connect to a server; None if it is slow or, after a short probe, does not listen.

        Raises LinkError: it does not listen, and will not be replaced.
        """
        patience = min(backoff.call, max(0.001, self.deadline - time.monotonic()))
        for seconds in (PROBE_SECONDS, patience) if known_trouble else (patience,):
            try:
                return connect(address, name=self.name, secret=self.watch.door["secret"], generation=0, timeout=seconds)
            except PeerTimeout:
                continue  # it listens but is slow
            except LinkError:
                if self.watch.final:
                    raise
                break
        backoff.call = min(2 * backoff.call, CALL_SECONDS[1])
        backoff.extend()
        return None

    def join(self, line: ServerConnection) -> None:
        """Send a JOIN with this rank and incarnation; the server answers JOINED."""
        self._joins -= 1
        line.joined, line.joining = False, self._joins
        try:
            more = struct.pack("<dq", self.timeout, -1 if self._first is None else self._first(line.server))
            line.send(
                Message(GroupMessage.JOIN, line.joining, self.space.number, self.rank, float(self._incarnation)), more
            )
        except LinkError:
            self.lose(line)

    def lose(self, line: ServerConnection) -> None:
        """Close a connection that failed; its requests in flight must be sent again."""
        if self.open.pop(line.server, None) is not None:
            self.breaks += 1
            self.changes += 1
            if line.pending and self.memory is not None:
                self.memory.retire()
            line.close()
            for flight in line.flights.values():
                flight.reopen()
            line.flights.clear()
            self.refused(line.server)
            passing("session: lost, not sent again")

    def refused(self, server: str) -> None:
        """Send nothing to this server for a moment: it does not have the segments, or not yet."""
        self._backoff(server).extend()

    def answered(self, server: str) -> None:
        """Record that this server has the segments that the map assigns to it."""
        self.backoffs.pop(server, None)

    def wait(self, unsent: list[int]) -> None:
        """Block until a message or a map arrives, or requests to the segments `unsent` may be sent again.

        Raises:
            PeerTimeout: the deadline has passed; it names the silent servers.
            PeerLost: `hang_up` was called.
        """
        now = time.monotonic()
        if self.ended:
            raise PeerLost(f"{self.name} has been ended on this side", peer=self.name)
        if now > self.deadline:
            raise self._late(unsent)
        ends = self.deadline
        if unsent:
            self.watch.seek()
            ends = min(ends, *(each.until for each in self.backoffs.values() if each.until > now), now + NAP_SECONDS)
        poll = select.poll()
        boxes = [line.mailbox for line in self.open.values() if line.mailbox is not None and line.pending]
        for line in self.open.values():
            poll.register(line.link.fileno(), line.events)
        if not self.watch.lost:
            poll.register(self.watch.fileno(), select.POLLIN)
        if boxes and self.memory is not None:
            poll.register(self.memory.wakeup, select.POLLIN)
        for box in boxes:
            box.words[WAITS] = 1
        self.fence()
        if not any(line.readable for line in self.open.values()):
            poll.poll(max(1, int(1000 * (ends - now))))
        for box in boxes:
            box.words[WAITS] = 0
        if boxes and self.memory is not None:
            self.memory.hush()

    def hang_up(self) -> None:
        """End every wait of another thread with PeerLost. Any thread may call it."""
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

    def _backoff(self, server: str) -> _Backoff:
        return self.backoffs.setdefault(server, _Backoff())

    def _late(self, unsent: list[int]) -> PeerTimeout:
        silent = {
            line.server: sorted({index for flight in line.flights.values() for index in flight.segments})
            for line in self.open.values()
            if line.flights
        }
        reasons = [f"server {name!r} did not answer for {named(which)}" for name, which in silent.items()]
        segments = sorted({*unsent, *(index for which in silent.values() for index in which)})
        if unsent:
            holders = ", ".join(sorted(map(str, self.map.by_server(unsent))))
            lost = "; the manager is unreachable" if self.watch.lost else ""
            reasons.append(f"no request could be sent for {named(sorted(set(unsent)))} (held by {holders}{lost})")
        return PeerTimeout(
            f"space {self.space.name!r}: {'; '.join(reasons)} within {self.timeout:g} s (the knob is `timeout`)",
            peer=next(iter(silent), "manager"),
            seconds=self.timeout,
            segments=segments,
        )


def take_seat(door: StaticMap, space: Space, rank: int, timeout: float) -> int:
    """Return a new incarnation of a rank where there is no manager: the server of segment 0 counts them.

    Raises:
        PeerTimeout, PeerLost: that server does not answer.
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
    """Return a list of segments for a message, at most eight of them."""
    shown = ", ".join(map(str, segments[:8])) + (f" and {len(segments) - 8} more" if len(segments) > 8 else "")
    return f"segment{'s' if len(segments) != 1 else ''} {shown}"


PUSHES = frozenset({GroupMessage.PUSH, GroupMessage.PUSH_PULL})


@dataclass(slots=True)
class SegmentRequest:
    """One request to several segments, which may be on several servers.

    `unsent` are the segments to which it must be sent, for the first time or again; `open` counts those without an
    answer.
    """

    kind: GroupMessage
    step: int
    weight: float
    pieces: dict[int, Any]  # buffers; of a push that was sent, where they lie in `buffers`
    landing: dict[int, Any] | None = None  # by segment: writable buffers for the values
    answers: dict[int, Any] = field(default_factory=dict)
    unsent: dict[int, None] = field(default_factory=dict)  # in order
    open: int = 0
    lead: int = 0
    version: int | None = None
    durable: int | None = None
    buffers: list[Any] = field(default_factory=list)  # payloads of messages, to be used again
    repeated: bool = False  # a push out of the replay buffer, which owns its memory
    by_message: bool = False  # it must not go by mailbox
    torn: bool = False  # what is read of a segment may be of several versions
    asked_rows: Mapping[int, ShardRows] = field(default_factory=dict)  # that the pieces of a pull ask for, by segment

    def __post_init__(self) -> None:
        self.unsent = dict.fromkeys(self.pieces)
        self.open = len(self.pieces)

    def answered(self, segments: list[int], message: Message) -> None:
        """Record an answer of these segments, without its values."""
        durable = int(message.weight)
        self.open -= len(segments)
        self.durable = durable if self.durable is None else min(durable, self.durable)
        if message.kind == GroupMessage.VALUE:
            self.lead = max(self.lead, message.b)
            self.version = message.a if self.version is None else min(message.a, self.version)
        else:
            self.answers.update(dict.fromkeys(segments, EMPTY))

    def land(self, server: str, payload: Any) -> None:
        """Copy the values of an answer to their places. Raises LinkError: they have another size."""
        for index, _, data in unpack(payload):
            place = None if self.landing is None else self.landing.get(index)
            if place is None:
                self.answers[index] = data if self.landing is None else memoryview(bytes(data))
                continue
            view = as_bytes(place)
            if len(view) != len(data):
                raise LinkError(
                    f"{server!r} sent {len(data)} bytes of segment {index} where {len(view)} were expected",
                    peer=server,
                    given=len(data),
                    expected=len(view),
                )
            view[:] = data
            self.answers[index] = EMPTY


@dataclass(slots=True)
class InFlight:
    """The part of a request that was sent to one server and is not answered."""

    request: SegmentRequest
    segments: list[int]
    by_mailbox: bool = False
    outs: dict[int, Any] = field(default_factory=dict)  # where rows are put that do not land in their place at once

    def reopen(self) -> None:
        """Mark it as unsent."""
        self.request.unsent.update(dict.fromkeys(self.segments))


class ServerConnection:
    """A worker's connection to one server, its requests in flight there, and the mailbox where memory is shared."""

    def __init__(self, server: str, link: Link, mailbox: WorkerMailbox | None = None) -> None:
        self.server, self.link, self.mailbox = server, link, mailbox
        self.flights: dict[int, InFlight] = {}  # by tag
        self.marks: dict[int, int] = {}  # by segment: the rank's next step there when it joined
        self.joined = False
        self.joining = -1  # tag of the unanswered JOIN
        self._scratch = np.empty(0, np.uint8)

    def send(self, message: Message, payload: Any) -> None:
        """Send what the socket takes; the rest leaves while answers are awaited. Raises LinkError."""
        self.link.queue(message, payload, copy=False)

    @property
    def pending(self) -> bool:
        """Whether a request in the mailbox is not answered."""
        return self.mailbox is not None and not self.mailbox.answered

    @property
    def readable(self) -> bool:
        """Whether the mailbox has the answer to a request in flight."""
        box = self.mailbox
        if box is None or not box.answered:
            return False
        flight = self.flights.get(box.tag)
        return flight is not None and flight.by_mailbox and box.readable

    def close(self) -> None:
        """Close the link and the mailbox."""
        self.link.close()
        if self.mailbox is not None:
            self.mailbox.close()

    @property
    def events(self) -> int:
        """The poll events to wait for."""
        return select.POLLIN | (self.link.interest if self.link.queued else 0)

    def next(self) -> Message | None:
        """Return the next message, None if none has arrived.

        The payload of a VALUE with landing places is valid until the next call.

        Raises LinkError.
        """
        link = self.link
        head = link.peek()
        if head is None:
            return None
        flight = self.flights.get(head.tag)
        into = None
        if flight is not None and flight.request.landing is not None and head.kind == GroupMessage.VALUE:
            size = link.pending_bytes
            if size >= POOLED_BYTES:
                if len(self._scratch) != size:
                    self._scratch = np.empty(size, np.uint8)
                into = self._scratch
        return link.try_recv(into)


ManagerDoor = (
    dict[str, Any] | Callable[[], dict[str, Any]]
)  # {"address", "secret"} of a manager, or a function that returns it
Door = ManagerDoor | StaticMap  # where the map of a space comes from

RETRY_SECONDS = 0.2  # between two attempts to find a manager that was lost
FIND_SECONDS = 0.25  # limit of one such attempt


class MapSubscription:
    """One space's map, updated over a link to the manager. For one thread.

    An outdated map is safe: servers refuse requests to segments that they do not hold. So a manager that was lost is
    looked for only while a request waits for a newer map.

    Raises:
        PeerLost, PeerTimeout: no manager answers.
        NotFound: it knows no such space.
    """

    final = False  # the manager may replace a server that dies

    def __init__(self, door: ManagerDoor, space: int, name: str, timeout: float) -> None:
        self.door: dict[str, Any] = door() if callable(door) else door
        self._find = door if callable(door) else None
        self._space, self._name = space, name
        self._link: Link | None = None
        self._next = 0.0  # when to look for a lost manager again
        deadline = time.monotonic() + timeout
        self._call(timeout)
        found: SpaceMap | None = None
        while found is None and (link := self._link) is not None:
            message = link.recv(max(0.0, deadline - time.monotonic()))
            found = _map_of(message, None)
        if found is None:
            raise PeerTimeout(
                f"the manager of the server group sent no map of space {space} within {timeout:g} s (the knob is "
                "`timeout`)",
                peer="manager",
                seconds=timeout,
            )
        self.map = found

    def look(self) -> SpaceMap | None:
        """Return a newer map, None if none has arrived; does not wait. Raises NotFound: the space is closed."""
        link = self._link
        if link is None:
            return None
        newer, messages = None, list[Message]()
        try:
            messages = link.feed()
        except LinkError:
            self._drop()
        for message in messages:
            newer = _map_of(message, newer or self.map) or newer
        if newer is not None:
            self.map = newer
        return newer

    def seek(self) -> None:
        """Connect to a manager that was lost, at most every RETRY_SECONDS; does nothing while connected."""
        now = time.monotonic()
        if self._link is None and now >= self._next:
            self._next = now + RETRY_SECONDS
            with contextlib.suppress(LinkError):
                if self._find is not None:
                    self.door = self._find()
                self._call(FIND_SECONDS)

    @property
    def lost(self) -> bool:
        """Whether there is no connection to the manager."""
        return self._link is None

    def fileno(self) -> int:
        """Readable when `look` may find something; -1 while the manager is lost."""
        return -1 if self._link is None else self._link.fileno()

    def hang_up(self) -> None:
        """End every wait of another thread. Any thread may call it."""
        if (link := self._link) is not None:
            link.hang_up()

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        self._drop()

    def _call(self, timeout: float) -> None:
        where = self.door
        link = connect(where["address"], name=self._name, secret=where["secret"], generation=0, timeout=timeout)
        try:
            link.send(Message(GroupMessage.WATCH, a=self._space), timeout=timeout)
        except BaseException:
            link.close()
            raise
        self._link = link

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


def subscribe(door: Door, space: int, name: str, timeout: float) -> MapSubscription | StaticSubscription:
    """Follow the map of a space. Raises as `MapSubscription`."""
    if isinstance(door, StaticMap):
        return door.subscribe()
    return MapSubscription(door, space, name, timeout)


def _map_of(message: Message, known: SpaceMap | None) -> SpaceMap | None:
    """Return the map in a message if it is newer than the known one. Raises the error that the manager sent."""
    if message.kind == GroupMessage.ERROR:
        raise error_of(message)
    if message.kind != GroupMessage.MAP:
        return None
    found = SpaceMap.from_json(json.loads(bytes(message.payload)))
    return found if known is None or found.version > known.version else None
