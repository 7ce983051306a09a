"""A worker's connections to the servers of a space.

`ServerConnection` is one connection with its requests in flight. `ServerConnections` opens a connection when a request
needs it, closes it when the server dies, and limits the attempts to connect to an unreachable server.
"""

from __future__ import annotations

import contextlib
import json
import math
import select
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rayps_client.errors import LinkError, PeerLost, PeerTimeout

from rayps.comm.link import Link, Message, connect
from rayps.comm.link.memory import Fence
from rayps.comm.link.socket_link import EMPTY, as_bytes
from rayps.comm.link.wakeup import Wakeup
from rayps.core.failpoint import passing
from rayps.ps.protocol.mailbox import AVAILABLE, WAITS, Landing, WorkerMailbox, WorkerMemory, array_of, open_mailbox
from rayps.ps.protocol.messages import JOIN_PAYLOAD, GroupMessage, error_of, read_numbers, unpack
from rayps.ps.protocol.rows import PieceBytes, ShardRows
from rayps.ps.protocol.segment_map import SpaceMap, StaticMap, StaticSubscription
from rayps.ps.protocol.space import Space

# seconds of the first, and of the longest, attempt to connect to a server: a dead server may still be in the map
CALL_SECONDS = (0.1, 2.0)
PROBE_SECONDS = 0.002  # longest time to find out whether a server that was lost accepts connections at all
# seconds of the first, and of the longest, pause before the next request to a server that refused one or was lost
PAUSE_SECONDS = (0.005, 0.1)
NAP_SECONDS = 0.05  # seconds between two checks while a segment has no primary
POOLED_BYTES = 1 << 14  # memory for smaller payloads is not reused


class _Backoff:
    """The pauses, of growing length, between attempts to use a server that refused a request or was lost."""

    def __init__(self) -> None:
        self.pause, self.connect_seconds, self.until = PAUSE_SECONDS[0], CALL_SECONDS[0], 0.0

    def extend(self) -> None:
        """Begin a pause, and double the length of the next one."""
        self.until = time.monotonic() + self.pause
        self.pause = min(2 * self.pause, PAUSE_SECONDS[1])


class ServerConnections:
    """The connections of one incarnation of a rank to the servers of a space, and the map of the space."""

    def __init__(
        self,
        source: MapSource,
        space: Space,
        rank: int,
        incarnation: int,
        name: str,
        timeout: float,
        *,
        resident: bool = True,
        first: Callable[[str], int] | None = None,
    ) -> None:
        """Subscribe to the map. `timeout` is in seconds. With `resident`, share memory with servers of this host.

        `first(server)` returns the first step that this worker can repeat to a server. The server counts missing pushes
        below this step as lost.
        """
        self.space, self.rank, self.name, self.timeout = space, rank, name, timeout
        self.map_subscription = subscribe(source, space.number, name, timeout)
        self.map: SpaceMap = self.map_subscription.map
        self.open: dict[str, ServerConnection] = {}
        self.ended = False
        self.breaks = 0  # counts lost connections, and maps that changed the primary or generation of a segment
        self.changes = 0  # counts changes of `open`
        self.deadline = 0.0
        self.memory = WorkerMemory() if resident and AVAILABLE else None
        self.fence = Fence()
        self._incarnation, self._first = incarnation, first
        self.backoffs: dict[str, _Backoff] = {}  # server -> its pauses, if it refused a request or was lost
        self._joins = 0

    def newer(self) -> set[int] | None:
        """Apply a newer map and return the segments whose primary or generation changed, or None if there is none."""
        found = self.map_subscription.poll()
        if found is None:
            return None
        old, self.map = self.map, found
        changed = {
            index
            for index, (a, b) in enumerate(zip(old.holders, found.holders, strict=True))
            if (a.primary, a.generation) != (b.primary, b.generation)
        }
        received = {found.holders[index].primary for index in changed}
        # the pauses of servers about which the map says nothing new continue: an attempt to connect to a dead server
        # takes up to CALL_SECONDS
        self.backoffs = {
            server: backoff
            for server, backoff in self.backoffs.items()
            if server not in received and found.addresses.get(server) == old.addresses.get(server)
        }
        self.breaks += bool(changed)
        for connection in list(self.open.values()):
            if found.addresses.get(connection.server) != old.addresses.get(
                connection.server
            ):  # this name now belongs to another process
                self.lose(connection)
        return changed

    def to(self, server: str) -> ServerConnection | None:
        """Return the connection to a server. If there is none, open it and send JOIN.

        Returns None if the server is unreachable, or the pause before the next attempt has not ended.

        Raises:
            PeerLost: the server died, and will not be replaced.
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
            link = self._connect(address, backoff or self._find_backoff(server), known_trouble=backoff is not None)
        except LinkError as error:
            raise PeerLost(f"{server!r} closed the connection or died: {error}", peer=server) from error
        if link is None:
            return None
        self.changes += 1
        made = self.open[server] = ServerConnection(server, link, open_mailbox(link, self.memory))
        self.join(made)
        return self.open.get(server)

    def _connect(self, address: str, backoff: _Backoff, known_trouble: bool) -> Link | None:
        """Connect to a server; return None if it is too slow, or does not listen.

        `known_trouble`: the server was lost or has refused a request, so a short first attempt checks whether it
        listens. Raises LinkError if the server does not listen, and will not be replaced.
        """
        patience = min(backoff.connect_seconds, max(0.001, self.deadline - time.monotonic()))
        for seconds in (PROBE_SECONDS, patience) if known_trouble else (patience,):
            try:
                secret = self.map_subscription.contact["secret"]
                return connect(address, name=self.name, secret=secret, generation=0, timeout=seconds)
            except PeerTimeout:
                continue  # the server may listen, but is slow
            except LinkError:
                if self.map_subscription.final:
                    raise
                break
        backoff.connect_seconds = min(2 * backoff.connect_seconds, CALL_SECONDS[1])
        backoff.extend()
        return None

    def join(self, connection: ServerConnection) -> None:
        """Send JOIN with this rank and incarnation. The server will answer JOINED."""
        self._joins -= 1
        connection.joined, connection.joining = False, self._joins
        try:
            more = JOIN_PAYLOAD.pack(self.timeout, -1 if self._first is None else self._first(connection.server))
            connection.send(
                Message(GroupMessage.JOIN, connection.joining, self.space.number, self.rank, float(self._incarnation)),
                more,
            )
        except LinkError:
            self.lose(connection)

    def lose(self, connection: ServerConnection) -> None:
        """Close a connection that failed, and mark its requests in flight as unsent."""
        if self.open.pop(connection.server, None) is not None:
            self.breaks += 1
            self.changes += 1
            if connection.pending and self.memory is not None:
                self.memory.retire()
            connection.close()
            for flight in connection.flights.values():
                flight.mark_unsent()
            connection.flights.clear()
            self.refused(connection.server)
            passing("session: lost, not sent again")

    def refused(self, server: str) -> None:
        """Begin a pause in which this server is sent nothing, because it does not serve the segments, or not yet."""
        self._find_backoff(server).extend()

    def answered(self, server: str) -> None:
        """Record that this server serves its segments: it may be sent requests without a pause."""
        self.backoffs.pop(server, None)

    def wait(self, unsent: list[int], also: Wakeup | None = None, most: float = math.inf) -> None:
        """Wait until an answer or a map arrives, or until requests to the segments `unsent` may be tried again.

        The wait also ends when `also` is woken, and after `most` seconds.

        Raises:
            PeerTimeout: the deadline has passed; the error names the servers that did not answer.
            PeerLost: `hang_up` was called.
        """
        now = time.monotonic()
        if self.ended:
            raise PeerLost(f"{self.name} has ended its own connections (hang_up or close)", peer=self.name)
        if now > self.deadline:
            raise self._explain_late(unsent)
        ends = min(self.deadline, now + most)
        if unsent:
            self.map_subscription.reconnect()
            ends = min(ends, *(each.until for each in self.backoffs.values() if each.until > now), now + NAP_SECONDS)
        poll = select.poll()
        mailboxes = [
            connection.mailbox
            for connection in self.open.values()
            if connection.mailbox is not None and connection.pending
        ]
        for connection in self.open.values():
            poll.register(connection.link.fileno(), connection.events)
        if not self.map_subscription.lost:
            poll.register(self.map_subscription.fileno(), select.POLLIN)
        if mailboxes and self.memory is not None:
            poll.register(self.memory.wakeup, select.POLLIN)
        if also is not None:
            poll.register(also, select.POLLIN)
        for mailbox in mailboxes:
            mailbox.words[WAITS] = 1
        self.fence()
        if not self.readable and not any(connection.unread for connection in self.open.values()):
            poll.poll(max(0 if most == 0 else 1, int(1000 * (ends - now))))
        for mailbox in mailboxes:
            mailbox.words[WAITS] = 0
        if mailboxes and self.memory is not None:
            self.memory.wakeup.clear()

    @property
    def readable(self) -> bool:
        """Whether a mailbox has the answer to a request in flight."""
        return any(connection.readable for connection in self.open.values())

    def hang_up(self) -> None:
        """End every wait of another thread with PeerLost. Any thread may call this."""
        self.ended = True
        self.map_subscription.hang_up()
        for connection in list(self.open.values()):
            connection.link.hang_up()

    def close(self) -> None:
        """Close all connections, the subscription to the map, and the shared memory. Safe to call twice."""
        self.ended = True
        self.map_subscription.hang_up()  # a thread that catches up would wait on closed descriptors until its deadline
        for connection in list(self.open.values()):
            connection.close()
        self.open.clear()
        self.map_subscription.close()
        if self.memory is not None:
            self.memory.close()

    def _find_backoff(self, server: str) -> _Backoff:
        return self.backoffs.setdefault(server, _Backoff())

    def _explain_late(self, unsent: list[int]) -> PeerTimeout:
        silent = {
            connection.server: sorted({index for flight in connection.flights.values() for index in flight.segments})
            for connection in self.open.values()
            if connection.flights
        }
        reasons = [
            f"server {name!r} did not answer requests to {name_segments(which)}" for name, which in silent.items()
        ]
        segments = sorted({*unsent, *(index for which in silent.values() for index in which)})
        if unsent:
            holders = ", ".join(sorted(server or "no server" for server in self.map.by_server(unsent)))
            lost = "; the manager is unreachable" if self.map_subscription.lost else ""
            reasons.append(
                f"no request could be sent to {name_segments(sorted(set(unsent)))} (held by {holders}{lost})"
            )
        return PeerTimeout(
            f"space {self.space.name!r}: {'; '.join(reasons)} within {self.timeout:g} s (the knob is `timeout`)",
            peer=next(iter(silent), "manager"),
            seconds=self.timeout,
            segments=segments,
        )


def take_rank(source: StaticMap, space: Space, rank: int, timeout: float) -> int:
    """Return a new incarnation of a rank, in a space without a manager. The server of segment 0 counts incarnations.

    Raises:
        PeerTimeout, PeerLost: the server does not answer.
    """
    found = source.map
    server = str(found.holders[0].primary)
    link = connect(found.addresses[server], name=f"worker-{rank}", secret=source.secret, generation=0, timeout=timeout)
    try:
        link.send(Message(GroupMessage.TAKE_RANK, 1, space.number, rank), timeout=timeout)
        reply = link.recv(timeout)
    finally:
        link.close()
    if reply.kind == GroupMessage.ERROR:
        raise error_of(reply)
    return read_numbers(reply.payload)[0]


def name_segments(segments: list[int]) -> str:
    """Return a list of segments as text for an error; it names at most eight of them."""
    shown = ", ".join(map(str, segments[:8])) + (f" and {len(segments) - 8} more" if len(segments) > 8 else "")
    return f"segment{'s' if len(segments) != 1 else ''} {shown}"


PUSHES = frozenset({GroupMessage.PUSH, GroupMessage.PUSH_PULL})


@dataclass(slots=True)
class SegmentRequest:
    """One request to several segments, which may be on several servers.

    `unsent` are the segments to which the request must be sent, for the first time or again. `open` is the number of
    segments that have not answered.
    """

    kind: GroupMessage
    step: int
    weight: float
    pieces: dict[int, PieceBytes]  # segment -> buffer; after a push was sent by message, a view of one of `buffers`
    outputs: dict[int, PieceBytes | Landing] | None = None  # segment -> writable buffer for its values
    answers: dict[int, PieceBytes] = field(default_factory=dict)
    unsent: dict[int, None] = field(default_factory=dict)  # an ordered set
    open: int = 0
    lead: int = 0
    version: int | None = None
    durable: int | None = None
    buffers: list[Any] = field(default_factory=list)  # payloads of sent messages; their memory is reused afterwards
    repeated: bool = False  # a push from the replay buffer, which owns its memory
    by_message: bool = False  # it must be sent as a message, not by mailbox
    mixed_versions: bool = False  # the values of one segment may be of several versions
    asked_rows: Mapping[int, ShardRows] = field(default_factory=dict)  # segment -> rows that a pull asks for

    def __post_init__(self) -> None:
        self.unsent = dict.fromkeys(self.pieces)
        self.open = len(self.pieces)

    def answered(self, segments: list[int], message: Message) -> None:
        """Record that these segments have answered. `copy_values` then takes the values of the answer."""
        durable = int(message.weight)
        self.open -= len(segments)
        self.durable = durable if self.durable is None else min(durable, self.durable)
        if message.kind == GroupMessage.VALUE:
            self.lead = max(self.lead, message.b)
            self.version = message.a if self.version is None else min(message.a, self.version)
        else:
            self.answers.update(dict.fromkeys(segments, EMPTY))

    def copy_values(self, server: str, payload: PieceBytes) -> None:
        """Copy the values of an answer to the buffers in `outputs`. Raises LinkError if the sizes differ."""
        for index, _, data in unpack(payload):
            place = None if self.outputs is None else self.outputs.get(index)
            if place is None:
                self.answers[index] = data if self.outputs is None else memoryview(bytes(data))
                continue
            view = place if isinstance(place, Landing) else as_bytes(place)
            if len(view) != len(data):
                raise LinkError(
                    f"{server!r} sent {len(data)} bytes of segment {index} where {len(view)} were expected",
                    peer=server,
                    given=len(data),
                    expected=len(view),
                )
            if isinstance(view, Landing):
                view.receive(array_of(data), lasting=False)
            else:
                view[:] = data
            self.answers[index] = EMPTY


@dataclass(slots=True)
class InFlight:
    """The part of a request that was sent to one server and is not answered."""

    request: SegmentRequest
    segments: list[int]
    by_mailbox: bool = False
    # segment -> memory in which the server writes its rows first
    outs: dict[int, PieceBytes] = field(default_factory=dict)

    def mark_unsent(self) -> None:
        """Mark this part of the request as unsent."""
        self.request.unsent.update(dict.fromkeys(self.segments))


class ServerConnection:
    """A worker's connection to one server, the requests in flight on it, and the mailbox if both share memory."""

    def __init__(self, server: str, link: Link, mailbox: WorkerMailbox | None = None) -> None:
        self.server, self.link, self.mailbox = server, link, mailbox
        self.flights: dict[int, InFlight] = {}  # tag -> part of a request
        self.marks: dict[int, int] = {}  # segment -> the rank's next step when it joined
        self.joined = False
        self.joining = -1  # tag of the unanswered JOIN
        self._scratch = np.empty(0, np.uint8)
        self._seen = 0  # bytes that the link had received when `next` last found no complete message

    def send(self, message: Message, payload: PieceBytes | None) -> None:
        """Send what the socket accepts now. The rest is sent while the session waits for answers.

        Raises LinkError if the connection is lost.
        """
        self.link.queue(message, payload, copy=False)

    @property
    def pending(self) -> bool:
        """Whether a request in the mailbox is not answered."""
        return self.mailbox is not None and not self.mailbox.answered

    @property
    def readable(self) -> bool:
        """Whether the mailbox has the answer to a request in flight."""
        mailbox = self.mailbox
        if mailbox is None or not mailbox.answered:
            return False
        flight = self.flights.get(mailbox.tag)
        return flight is not None and flight.by_mailbox and mailbox.readable

    @property
    def unread(self) -> bool:
        """Whether a message was received, together with offers of memory, since `next` last found none.

        `poll` does not report such a message, because the socket is empty.
        """
        return self.link.head is not None and self.link.bytes_received != self._seen

    def close(self) -> None:
        """Close the link and the mailbox."""
        self.link.close()
        if self.mailbox is not None:
            self.mailbox.close()

    @property
    def events(self) -> int:
        """The `poll` events to wait for: input, and what the link needs to send its queued bytes."""
        return select.POLLIN | (self.link.interest if self.link.queued else 0)

    def next(self) -> Message | None:
        """Return the next message, or None if none has arrived. Raises LinkError if the connection is lost.

        The payload of a VALUE whose request has `outputs` is valid until the next call.
        """
        link = self.link
        head = link.peek()
        if head is None:
            self._seen = link.bytes_received
            return None
        flight = self.flights.get(head.tag)
        into = None
        if flight is not None and flight.request.outputs is not None and head.kind == GroupMessage.VALUE:
            size = link.pending_bytes
            if size >= POOLED_BYTES:
                if len(self._scratch) != size:
                    self._scratch = np.empty(size, np.uint8)
                into = self._scratch
        found = link.try_recv(into)
        if found is None:
            self._seen = link.bytes_received
        return found


ManagerContact = (
    dict[str, Any] | Callable[[], dict[str, Any]]
)  # {"address", "secret"} of a manager, or a function that returns it
MapSource = ManagerContact | StaticMap  # where the map of a space comes from

RETRY_SECONDS = 0.2  # seconds between two attempts to find a manager that was lost
FIND_SECONDS = 0.25  # limit of one such attempt in seconds


class MapSubscription:
    """One space's map, updated over a link to the manager. For one thread.

    An outdated map is safe, because servers refuse requests to segments that they do not hold. So this object connects
    to a manager that was lost only while a request waits for a newer map.

    Raises:
        PeerLost, PeerTimeout: no manager answers.
        NotFound: the manager has no such space.
    """

    final = False  # the manager may replace a server that dies

    def __init__(self, contact: ManagerContact, space: int, name: str, timeout: float) -> None:
        self.contact: dict[str, Any] = contact() if callable(contact) else contact
        self._find = contact if callable(contact) else None
        self._space, self._name = space, name
        self._link: Link | None = None
        self._next = 0.0  # time of the next attempt to connect to a lost manager
        deadline = time.monotonic() + timeout
        self._connect(timeout)
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

    def poll(self) -> SpaceMap | None:
        """Return a newer map, or None if none has arrived. Does not wait. Raises NotFound if the space is closed."""
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

    def reconnect(self) -> None:
        """Try to connect to a manager that was lost, at most once in RETRY_SECONDS. Do nothing while connected."""
        now = time.monotonic()
        if self._link is None and now >= self._next:
            self._next = now + RETRY_SECONDS
            with contextlib.suppress(LinkError):
                if self._find is not None:
                    self.contact = self._find()
                self._connect(FIND_SECONDS)

    @property
    def lost(self) -> bool:
        """Whether there is no connection to the manager."""
        return self._link is None

    def fileno(self) -> int:
        """Return the descriptor that is readable when `poll` may return a map, or -1 while the manager is lost."""
        return -1 if self._link is None else self._link.fileno()

    def hang_up(self) -> None:
        """End every wait of another thread for a map. Any thread may call this."""
        if (link := self._link) is not None:
            link.hang_up()

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        self._drop()

    def _connect(self, timeout: float) -> None:
        where = self.contact
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


def subscribe(source: MapSource, space: int, name: str, timeout: float) -> MapSubscription | StaticSubscription:
    """Return a subscription to the map of the space with this number. Raises as `MapSubscription`."""
    if isinstance(source, StaticMap):
        return source.subscribe()
    return MapSubscription(source, space, name, timeout)


def _map_of(message: Message, known: SpaceMap | None) -> SpaceMap | None:
    """Return the map in a message if it is newer than `known`, else None. Raises the error that the manager sent."""
    if message.kind == GroupMessage.ERROR:
        raise error_of(message)
    if message.kind != GroupMessage.MAP:
        return None
    found = SpaceMap.from_json(json.loads(bytes(message.payload)))
    return found if known is None or found.version > known.version else None
