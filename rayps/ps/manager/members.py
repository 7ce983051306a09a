"""What a manager knows about its servers (connection, state, sent orders, load) and its workers (connection)."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rayps_client.errors import LinkError

from rayps.comm.link import Link, Message
from rayps.ps.manager.assign_segments import UP, SegmentId, ServerFacts, ServerState
from rayps.ps.manager.record import ServerRecord
from rayps.ps.protocol.messages import SegmentOrder
from rayps.ps.protocol.space import Space

RATE_SECONDS = 3.0  # time over which a rate is measured
STEP_SECONDS = 0.25  # least time between two values that a rate records


class ManagerConnection:
    """A connection of a server or a worker to the manager."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.server: str | None = None  # the server that registered over this connection
        self.watching: set[int] = set()  # spaces whose map is sent to this worker each time it changes
        self.lost = False

    def send(self, message: Message, payload: Any = b"") -> None:
        """Send what can be sent at once, and queue the rest. A failure is detected at the next read."""
        if not self.lost:
            try:
                self.link.queue(message, payload)
            except LinkError:
                self.lost = True


@dataclass(slots=True)
class Rate:
    """The increase of a counter per second over the last RATE_SECONDS, measured anew if the counter restarts at 0."""

    per_second: float = 0.0
    _values: deque[tuple[float, float]] = field(default_factory=deque)  # (time, value), the newest last

    def observe(self, value: float, now: float) -> None:
        """Record the counter's value at time `now`, in seconds."""
        values = self._values
        if values and value < values[-1][1]:
            values.clear()
        if values and now - values[-1][0] < STEP_SECONDS:
            return
        values.append((now, value))
        while len(values) > 2 and now - values[1][0] >= RATE_SECONDS:
            values.popleft()
        span = now - values[0][0]
        self.per_second = (value - values[0][1]) / span if span >= RATE_SECONDS / 2 else 0.0


class SegmentLoad(NamedTuple):
    """The load of one segment in a heartbeat of its primary; `operations` and `changes` are counters."""

    bytes: int
    rows: int
    operations: int
    changes: int


class ServerLoad:
    """A server's last heartbeat (see `rayps.ps.server.outbound`), and the rates of the counters in it."""

    def __init__(self) -> None:
        self.bytes, self.cpu = 0, 0.0
        self.account: dict[str, float] = {}  # seconds of the server's loop, by part: see `rayps.core.time.time_account`
        self.memory, self.host_bytes = 0.0, 0  # the share of the host's memory in use, and the bytes of this memory
        self.spaces: dict[int, dict[str, Any]] = {}  # number of a space -> the space's part of the heartbeat
        self.segments: dict[SegmentId, SegmentLoad] = {}  # the segments of which the server is primary
        self._rates: dict[tuple[int, int | str], Rate] = {}  # by space, and segment index or name of the counter

    def heartbeat(self, body: dict[str, Any], now: float) -> None:
        """Record a heartbeat that arrived at the time `now`, in seconds."""
        self.bytes, self.cpu = int(body.get("bytes", 0)), float(body.get("cpu", 0.0))
        self.account = {str(part): float(seconds) for part, seconds in body.get("account", {}).items()}
        self.memory, self.host_bytes = float(body.get("memory", 0.0)), int(body.get("host_bytes", 0))
        self.spaces = {int(number): facts for number, facts in body.get("spaces", {}).items()}
        self.segments = {}
        for number, facts in self.spaces.items():
            for count in ("operations", "seconds"):
                self._rates.setdefault((number, count), Rate()).observe(float(facts.get(count, 0)), now)
            for index, values in facts.get("segments", {}).items():
                load = self.segments[number, int(index)] = SegmentLoad(*map(int, values))
                self._rates.setdefault((number, int(index)), Rate()).observe(load.operations, now)

    @property
    def busy(self) -> float:
        """The share of time in which the server's loop serves requests."""
        return sum(self.rate(space, "seconds") for space in self.spaces)

    @property
    def touches(self) -> float:
        """Pushes and pulls of segments of parameters, and rows of tables, per second."""
        return sum(self.rate(*segment) for segment in self.segments)

    def rate(self, space: int, what: int | str = "operations") -> float:
        """Return the increase per second of a counter of a space, or of the operations of one of its segments.

        `what`: a segment's index or the name of the space's counter, "operations" or "seconds" (of service).
        """
        rate = self._rates.get((space, what))
        return 0.0 if rate is None else rate.per_second

    def forget(self, space: int) -> None:
        """Remove a closed space from the load and the rates."""
        self.spaces.pop(space, None)
        self.segments = {segment: load for segment, load in self.segments.items() if segment[0] != space}
        self._rates = {key: rate for key, rate in self._rates.items() if key[0] != space}


@dataclass(slots=True)
class SentOrders:
    """The orders that the manager has sent to a server over the server's present connection."""

    tag: int = 0  # tag of the last ORDERS message
    orders: dict[SegmentId, SegmentOrder] = field(default_factory=dict)
    spaces: dict[int, Space] = field(default_factory=dict)
    # (segment, server of a backup) -> tag of the first ORDERS that named this backup
    first: dict[tuple[SegmentId, str], int] = field(default_factory=dict)

    # segment -> tag of the ORDERS with its order NONE, until the server has reported DROPPED
    dropping: dict[SegmentId, int] = field(default_factory=dict)

    def forget(self, space: int) -> None:
        """Remove the orders about a closed space."""
        self.spaces.pop(space, None)
        self.dropping = {segment: tag for segment, tag in self.dropping.items() if segment[0] != space}
        self.orders = {segment: order for segment, order in self.orders.items() if segment[0] != space}
        self.first = {key: tag for key, tag in self.first.items() if key[0][0] != space}


@dataclass(slots=True)
class ServerMember:
    """One server of the group: its state, its connection, the orders sent and its load."""

    name: str
    record: ServerRecord
    state: ServerState
    since: float = field(default_factory=lambda: time.monotonic())  # when the state began
    connection: ManagerConnection | None = None
    last_message: float = 0.0  # when the last message came; 0 if none has come
    broken: bool = False  # SILENT because its connection broke, not because it sent nothing
    counted: bool = False  # whether it was counted as dead; the count is undone if the server returns
    sent: SentOrders = field(default_factory=SentOrders)
    load: ServerLoad = field(default_factory=ServerLoad)

    @property
    def facts(self) -> ServerFacts:
        """Return the facts about the server that decisions need."""
        return ServerFacts(self.name, self.record.host, self.state)

    @property
    def connected(self) -> bool:
        """Whether messages can be sent to the server."""
        return self.connection is not None and self.state in UP

    def become(self, state: ServerState) -> None:
        """Set the state, which begins now."""
        self.state, self.since = state, time.monotonic()

    def register(self, connection: ManagerConnection, record: ServerRecord) -> None:
        """Use a new connection of the server, over which all orders will be sent again."""
        self.record, self.connection, self.sent = record, connection, SentOrders()
        self.last_message, self.broken = time.monotonic(), False
        self.become(ServerState.LEAVING if record.leaving else ServerState.ALIVE)

    def forget(self, space: int) -> None:
        """Remove a closed space from the sent orders and the load."""
        self.sent.forget(space)
        self.load.forget(space)
