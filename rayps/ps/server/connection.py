"""The connections that a server has accepted, and the requests that arrive on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rayps_client.errors import StaleGeneration

from rayps.comm.link import Link
from rayps.ps.protocol.mailbox import ServerMailbox
from rayps.ps.protocol.messages import SegmentPayload
from rayps.ps.server.assignments import AssignedSegment

if TYPE_CHECKING:
    from rayps.ps.server.mailboxes import WholePush

PATIENCE = 60.0  # seconds that a pull may wait if its worker gives no limit
NOT_JOINED = -2  # the rank of a connection that has not sent JOIN


class ServerPeer:
    """A connection that the server has accepted, from a worker, a reader, or a primary whose backup this server is."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.descriptor = link.fileno()
        self.space = -1
        self.rank = NOT_JOINED
        self.incarnation = 0
        self.patience = PATIENCE
        self.full = False  # its send buffer is full
        self.paused = False  # whether reading from it waits until its space's queue has room
        self.gone = False
        self.applied = 0  # tag of the last STATE or FORWARD message that was applied, if it is from a primary
        self.mailbox: ServerMailbox | None = None
        self.push: WholePush | None = None  # prepared for repetitions of the mailbox's last request


@dataclass(slots=True, eq=False)
class PeerRequest:
    """A request that arrived by message or by mailbox. `a`, `b` and `weight` depend on its kind: see `GroupMessage`."""

    peer: ServerPeer
    kind: int
    tag: int
    a: int
    b: int
    weight: float
    payload: Any  # None if the request came by mailbox; its pieces are then in the worker's memory
    pieces: list[SegmentPayload] = field(default_factory=list)
    outs: list[memoryview] = field(default_factory=list)  # memory for each piece's answer, if it came by mailbox
    referencing: list[AssignedSegment] = field(default_factory=list)  # segments that may still read its pieces
    whole: WholePush | None = None  # the `WholePush` whose parked pull this is
    deadline: float = 0.0
    parked: float = 0.0  # the `time.monotonic` at which it was parked


def explain_fenced(peer: ServerPeer) -> StaleGeneration:
    """Return the error for a request on a connection whose rank now belongs to a newer worker process."""
    return StaleGeneration(
        f"{peer.link.peer} does not hold its rank any more: a newer worker has joined with this rank",
        peer=peer.link.peer,
    )
