"""What the manager knows about a segment: who holds it, who is to get it, and what its servers said. Pure data.

A *seat* changes in two ways: a decision is applied to it (`rayps.ps.manager.decide`), or a server reports about it
(`hear`). A report of another generation than the seat's changes nothing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum

from rayps.ps.protocol.messages import Event, Role

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
