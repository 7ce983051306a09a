"""What the manager knows about a segment and about a server. Plain data.

A segment's record changes in two ways: a decision is applied to it (`rayps.ps.manager.decide`), or a server reports
about it (`hear`). A report of another generation than the record's changes nothing. A server's record is its
connection, what was sent to it, and its load.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rayps.ps.manager.connections import ManagerConnection
from rayps.ps.protocol.messages import Event, Role
from rayps.ps.protocol.space import Space

SeatId = tuple[int, int]  # number of the space, index of the segment


class ServerState(StrEnum):
    """How a server is."""

    ALIVE = "alive"
    LEAVING = "leaving"  # alive, and to be emptied
    SILENT = "silent"  # not heard: others take over what they have; what only it has is waited for
    AWAY = "away"  # not heard since the manager began again
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server, as a decision needs it."""

    name: str
    host: str = ""  # the machine
    state: ServerState = ServerState.ALIVE


@dataclass(frozen=True, slots=True)
class SegmentAssignment:
    """One segment. The `synced` of its copies have every acknowledged push, the others are in the making."""

    space: int
    index: int
    key: str  # its place on the ring
    primary: str | None = None  # None: not placed yet
    generation: int = 0
    copies: tuple[str, ...] = ()
    synced: frozenset[str] = frozenset()
    born: bool = False  # a primary has said READY since it was placed
    ready: bool = False  # the primary of this generation has
    heir: str | None = None  # whom the primary hands over to
    handed: bool = False  # and it has nothing that the copies have not
    lost: bool = False  # placed afresh after its last holder died; nobody has said since that it was loaded
    parent: SeatId | None = None  # what it is born from, in a branch

    @property
    def id(self) -> SeatId:
        """Space and index."""
        return self.space, self.index

    @property
    def making(self) -> tuple[str, ...]:
        """The copies that are not in sync yet."""
        return tuple(copy for copy in self.copies if copy not in self.synced)

    @property
    def holders(self) -> tuple[str, ...]:
        """Everyone who has, or is to have, some of it."""
        return self.copies if self.primary is None else (self.primary, *self.copies)

    def role(self, server: str) -> Role:
        """What a server is to be for this segment."""
        if server == self.primary:
            return Role.LEAVING if self.heir is not None else Role.PRIMARY
        return Role.COPY if server in self.copies else Role.NONE


def placed(seat: SegmentAssignment, server: str, *, lost: bool = False) -> SegmentAssignment:
    """Empty, on `server`, in a new generation."""
    return dataclasses.replace(
        seat,
        primary=server,
        generation=seat.generation + 1,
        copies=(),
        synced=frozenset(),
        born=False,
        ready=False,
        heir=None,
        handed=False,
        lost=lost or seat.lost,
    )


def promoted(seat: SegmentAssignment, server: str, copies: tuple[str, ...]) -> SegmentAssignment:
    """A new generation under `server`. `copies` stay in sync: it answers nothing before they have what it has."""
    return dataclasses.replace(
        seat,
        primary=server,
        generation=seat.generation + 1,
        copies=copies,
        synced=frozenset(copies),
        ready=False,
        heir=None,
        handed=False,
    )


def with_copy(seat: SegmentAssignment, server: str) -> SegmentAssignment:
    """One more copy, in the making."""
    return dataclasses.replace(seat, copies=(*seat.copies, server))


def without_copy(seat: SegmentAssignment, server: str) -> SegmentAssignment:
    """One copy less."""
    return dataclasses.replace(
        seat, copies=tuple(copy for copy in seat.copies if copy != server), synced=seat.synced - {server}
    )


def handing(seat: SegmentAssignment, heir: str) -> SegmentAssignment:
    """The primary refuses requests from now on, and says when `heir` has everything."""
    return dataclasses.replace(seat, heir=heir, handed=False)


def hear(seat: SegmentAssignment, reporter: str, event: str, generation: int, name: str) -> SegmentAssignment:
    """The seat after a server's report; the same one where the report is not about it as it is now."""
    if generation != seat.generation:
        return seat
    if event == Event.ASKED:  # said by the copy itself, or by a primary that has nothing to begin from
        if reporter == seat.primary and not seat.born:
            return dataclasses.replace(seat, primary=None)
        return without_copy(seat, reporter) if reporter in seat.copies else seat
    if reporter != seat.primary:
        return seat
    if event == Event.READY:
        return seat if seat.ready else dataclasses.replace(seat, ready=True, born=True)
    if event == Event.SYNCED and name in seat.copies and name not in seat.synced:
        return dataclasses.replace(seat, synced=seat.synced | {name})
    if event == Event.HANDED and seat.heir is not None:
        return dataclasses.replace(seat, handed=True)
    if event == Event.COPY_LOST and name in seat.copies:
        return without_copy(seat, name)
    return seat


RATE_SECONDS = 3.0  # rates are of about this long; servers are compared by them, and do not report at one moment
STEP_SECONDS = 0.25

Order = tuple[str, int, tuple[tuple[str, str], ...], bool]  # role, generation, copies and where they are, lost


@dataclass(slots=True)
class Rate:
    """How fast a counter goes up, over the last few seconds. A counter that falls began anew."""

    per_second: float = 0.0
    _seen: deque[tuple[float, float]] = field(default_factory=deque)  # (when, what it was), the newest last

    def see(self, count: float, now: float) -> None:
        """The counter's value now."""
        seen = self._seen
        if seen and count < seen[-1][1]:
            seen.clear()
        if seen and now - seen[-1][0] < STEP_SECONDS:
            return
        seen.append((now, count))
        while len(seen) > 2 and now - seen[1][0] >= RATE_SECONDS:
            seen.popleft()
        span = now - seen[0][0]
        self.per_second = (count - seen[0][1]) / span if span >= RATE_SECONDS / 2 else 0.0


@dataclass(slots=True)
class ServerMember:
    """One server."""

    name: str
    state: ServerState
    address: str = ""
    host: str = ""
    pid: int = 0
    caller: ManagerConnection | None = None
    since: float = 0.0  # when its state began, by time.monotonic
    heard: float = 0.0
    broken: bool = False  # silent because its connection broke, not because it says nothing
    counted: bool = False  # as a death, until it is back
    leaving: bool = False  # to be emptied, as soon as it is heard
    told: dict[SeatId, Order] = field(default_factory=dict)  # on this connection
    spaces: dict[int, Space] = field(default_factory=dict)  # as it was told them
    tag: int = 0  # of the last orders
    added: dict[tuple[SeatId, str], int] = field(default_factory=dict)  # a copy, and the orders that named it first
    load: dict[str, Any] = field(default_factory=dict)
    rates: dict[tuple[int, int | None], Rate] = field(default_factory=dict)  # by space and segment (None: all of them)
    busy: dict[tuple[int, int | None], Rate] = field(default_factory=dict)  # service seconds per second

    @property
    def server(self) -> ServerFacts:
        """As a decision needs it."""
        return ServerFacts(self.name, self.host, self.state)

    @property
    def there(self) -> bool:
        """Whether it can be told something."""
        return self.caller is not None and self.state in (ServerState.ALIVE, ServerState.LEAVING)

    def become(self, state: ServerState) -> None:
        """A new state, from now."""
        self.state, self.since = state, time.monotonic()

    def joined(self, caller: ManagerConnection, told: dict[str, Any]) -> None:
        """It registered: whatever it was told before, it is told again."""
        self.address, self.host, self.pid = told["address"], told.get("host", ""), int(told.get("pid", 0))
        self.caller, self.heard, self.broken = caller, time.monotonic(), False
        self.told, self.spaces, self.added, self.tag = {}, {}, {}, 0

    def beat(self, load: dict[str, Any]) -> list[int]:
        """A heartbeat; the spaces that it holds something of."""
        now = time.monotonic()
        spaces = {int(number): dict(facts) for number, facts in load.get("spaces", {}).items()}
        for number, facts in spaces.items():
            before = self.load.get("spaces", {}).get(number, {})
            self.rates.setdefault((number, None), Rate()).see(float(facts.get("operations", 0)), now)
            self.busy.setdefault((number, None), Rate()).see(float(facts.get("seconds", 0.0)), now)
            segments = facts.get("segments")
            if segments is None:  # not in each heartbeat
                facts["segments"] = before.get("segments", {})
                continue
            facts["segments"] = {int(index): list(values) for index, values in segments.items()}
            for index, values in facts["segments"].items():
                self.rates.setdefault((number, index), Rate()).see(float(values[2]), now)
        self.load = {**load, "spaces": spaces}
        return list(spaces)

    def sizes(self) -> list[tuple[SeatId, int]]:
        """Bytes of all segments that it is primary of."""
        spaces = self.load.get("spaces", {}).items()
        return [
            ((number, index), int(values[0])) for number, facts in spaces for index, values in facts["segments"].items()
        ]

    def rows(self, seat: SeatId) -> int:
        """Its rows."""
        values = self.load.get("spaces", {}).get(seat[0], {}).get("segments", {}).get(seat[1])
        return int(values[1]) if values else 0

    def rate(self, space: int, index: int | None = None) -> float:
        """Operations a second."""
        rate = self.rates.get((space, index))
        return rate.per_second if rate is not None else 0.0

    def busy_rate(self, space: int) -> float:
        """Seconds of service a second."""
        rate = self.busy.get((space, None))
        return rate.per_second if rate is not None else 0.0

    def forget(self, space: int) -> None:
        """A space is closed."""
        self.told = {seat: order for seat, order in self.told.items() if seat[0] != space}
        self.added = {key: tag for key, tag in self.added.items() if key[0][0] != space}
        self.rates = {key: rate for key, rate in self.rates.items() if key[0] != space}
        self.busy = {key: rate for key, rate in self.busy.items() if key[0] != space}
        self.spaces.pop(space, None)
        self.load.get("spaces", {}).pop(space, None)
