"""The inbound connections of a server, and their requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rayps.comm.link import Link
from rayps.core.errors import StaleGeneration
from rayps.ps.protocol.mailbox import ServerMailbox
from rayps.ps.protocol.messages import SegmentPayload
from rayps.ps.server.assignments import AssignedSegment

if TYPE_CHECKING:
    from rayps.ps.server.mailboxes import WholePush

PATIENCE = 60.0  # seconds that a pull may wait if its worker gives no limit
NOT_JOINED = -2  # the rank of a connection that has not joined, or is fenced


class ServerPeer:
    """A connection of a worker, a reader, or another server's primaries."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.descriptor = link.fileno()
        self.space = -1
        self.rank = NOT_JOINED
        self.incarnation = 0
        self.patience = PATIENCE
        self.full = False  # its send buffer is full
        self.paused = False  # it is not read until its space has room
        self.gone = False
        self.applied = 0  # as a primary's link: the last message that is applied
        self.box: ServerMailbox | None = None
        self.push: WholePush | None = None  # what its mailbox asked last, prepared to be asked again


@dataclass(slots=True, eq=False)
class PeerRequest:
    """A request of a connection."""

    guest: ServerPeer
    kind: int
    tag: int
    a: int
    b: int
    weight: float
    payload: Any  # None: it came by mailbox, and its pieces lie in the worker's memory
    pieces: list[SegmentPayload] = field(default_factory=list)
    outs: list[memoryview] = field(default_factory=list)  # by mailbox: where the answer of each piece goes
    lent: list[AssignedSegment] = field(default_factory=list)  # by mailbox: segments that may use its memory still
    whole: WholePush | None = None  # by mailbox: the pull of such a push
    deadline: float = 0.0


def fenced(guest: ServerPeer) -> StaleGeneration:
    """Return the error for a connection whose rank a newer worker has taken."""
    return StaleGeneration(
        f"{guest.link.peer} does not hold its rank any more: a newer worker has joined with this rank",
        peer=guest.link.peer,
    )
