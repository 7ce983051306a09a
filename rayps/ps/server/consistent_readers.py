"""The server's half of consistent reads: a reader sees all dense segments of a space with the same pushes applied.

Segments on different servers apply pushes independently, so a reader proceeds in two steps:

1. It holds each segment (HOLD). A held segment reports, for each rank, one more than the highest step that it has
   applied, and delays further pushes.
2. It sends every held segment the largest of these numbers for each rank (AIM). The segment then also applies the
   pushes below these numbers. They will arrive, because another segment has applied each of them. When all segments
   have applied them, all have the same pushes, and the reader reads the segments.

A server lets one reader at a time hold a space. Every reader first sends HOLD to the server of the first segment, so
two readers never wait for each other. A hold ends when the reader releases it or disconnects, when its deadline passes,
or when a held segment is moved to another server. In the last two cases the reader tries again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rayps_client.errors import PeerTimeout

from rayps.core.job.repeated_pushes import Ledger
from rayps.ps.protocol.messages import GroupMessage, SegmentPayload, pack, pack_numbers, read_numbers
from rayps.ps.server.assignments import AssignedSegment, AssignedSpace
from rayps.ps.server.connection import PeerRequest, ServerPeer
from rayps.ps.server.dense_segment import DenseSegment

BEHIND_SECONDS = 0.5  # longest wait for a push that another server has applied; then the reader must try again


class ReaderReplies(Protocol):
    """What `ConsistentReaders` calls to answer readers, and to serve pushes that waited for readers."""

    def reply(
        self, request: PeerRequest, kind: GroupMessage, touched: list[AssignedSegment], *, payload: bytes | bytearray
    ) -> None:
        """Answer a request."""

    def fail(self, assigned_space: AssignedSpace | None, request: PeerRequest, error: Exception) -> None:
        """Answer a request with an error."""

    def serve_delayed(self, assigned_space: AssignedSpace, request: PeerRequest) -> None:
        """Serve a push that waited for a reader."""


class ConsistentCut:
    """Decides which pushes a segment still applies while a reader holds it. Pure.

    The idea is the consistent cut of Chandy and Lamport, "Distributed snapshots: determining global states of
    distributed systems", TOCS 1985.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._target: list[int] | None = None

    def reached(self) -> list[int]:
        """Return for each rank that takes part one more than the highest step that this segment has applied."""
        ledger = self._ledger
        return [ledger.reach(rank) if ledger.takes_part(rank) else 0 for rank in ledger.marks]

    def aim(self, target: Sequence[int]) -> None:
        """Admit the pushes below `target`, which has for each rank the largest result of `reached` on any segment.

        Raises ValueError if `target` has another number of ranks.
        """
        if len(target) != len(self._ledger.marks):
            raise ValueError(
                f"an AIM request has steps of {len(target)} ranks, but the space has {len(self._ledger.marks)} ranks"
            )
        self._target = list(target)

    def admits(self, rank: int, step: int) -> bool:
        """Return whether a push may be applied now. A repeated push always may, because the ledger drops it."""
        return self._ledger.seen(rank, step) or (self._target is not None and step < self._target[rank])

    def missing(self) -> list[int]:
        """Return the ranks that have a push below the target which this segment has not applied."""
        if self._target is None:
            return []
        behind = [rank for rank, mark in self._ledger.marks.items() if mark < self._target[rank]]
        return [rank for rank in behind if self._ledger.takes_part(rank)]


@dataclass(slots=True)
class _Hold:
    """One reader's hold of the space: the reader, the deadline, and a `ConsistentCut` for each held segment."""

    reader: ServerPeer
    deadline: float
    cuts: dict[int, ConsistentCut]
    aimed: PeerRequest | None = None  # an AIM that is not answered yet

    def missing(self) -> list[int]:
        """Return the ranks of which another server has a push that has not arrived on this server."""
        return sorted({rank for cut in self.cuts.values() for rank in cut.missing()})


class ConsistentReaders:
    """The reader that holds a space on this server, the readers that wait to hold it, and the delayed pushes."""

    def __init__(self, assigned_space: AssignedSpace, replies: ReaderReplies) -> None:
        self._assigned_space, self._replies = assigned_space, replies
        self._hold: _Hold | None = None
        self._waiting: list[PeerRequest] = []  # HOLD requests that are not granted yet
        self._delayed: list[PeerRequest] = []  # pushes that wait for the reader

    @property
    def busy(self) -> bool:
        """Whether a reader holds the space, or waits for it."""
        return self._hold is not None or bool(self._waiting)

    def admits(self, push: PeerRequest) -> bool:
        """Return whether a push may be applied now. If not, add it to the delayed pushes."""
        add_request = self._hold
        if add_request is None:
            return True
        touched = [add_request.cuts[piece.segment] for piece in push.pieces if piece.segment in add_request.cuts]
        if all(cut.admits(push.peer.rank, push.a) for cut in touched):
            return True
        self._delayed.append(push)
        return False

    def add_request(self, request: PeerRequest) -> None:
        """Add a HOLD request. When the reader may hold the space, answer with the steps applied, by segment and rank.

        Raises ValueError if the connection is of a reader without a rank, or a segment is not of the dense vector.
        """
        if request.peer.rank < 0:
            raise ValueError(f"{request.peer.link.peer} joined as a reader and has no clock: send READ, not HOLD")
        add_request = self._hold
        if (
            add_request is not None
            and add_request.reader is request.peer
            and any(p.segment in add_request.cuts for p in request.pieces)
        ):
            self._end_hold()  # the reader's last attempt failed, and this is the next
        # a reader that the first server has admitted must wait on another server only if the first server was replaced
        request.deadline = time.monotonic() + (request.peer.patience if request.a else BEHIND_SECONDS)
        self._waiting.append(request)
        self._grant()

    def aim(self, request: PeerRequest) -> None:
        """Answer once the named segments have applied the pushes below the steps in the request.

        Raises PeerTimeout if the reader does not hold these segments any more.
        """
        add_request = self._hold
        if (
            add_request is None
            or add_request.reader is not request.peer
            or any(p.segment not in add_request.cuts for p in request.pieces)
        ):
            raise PeerTimeout(
                f"{request.peer.link.peer} no longer holds space {self._assigned_space.space.name!r}: its hold ended "
                f"after {request.peer.patience:g} s (raise `timeout`), or because a segment was moved",
                peer=request.peer.link.peer,
                seconds=request.peer.patience,
                behind=True,
            )
        for piece in request.pieces:
            add_request.cuts[piece.segment].aim(read_numbers(piece.data))
        add_request.aimed = request
        add_request.deadline = min(add_request.deadline, time.monotonic() + BEHIND_SECONDS)
        self._serve_delayed()
        self.check()

    def release(self, peer: ServerPeer) -> None:
        """End this reader's hold of the space."""
        if self._hold is not None and self._hold.reader is peer:
            self._end_hold()

    def check(self) -> None:
        """After a push: answer the AIM whose target is reached, and let the next reader hold the space if it may."""
        add_request = self._hold
        if add_request is not None and add_request.aimed is not None and not add_request.missing():
            aimed, add_request.aimed = add_request.aimed, None
            add_request.deadline = time.monotonic() + aimed.peer.patience  # time to read the segments
            self._replies.reply(
                aimed, GroupMessage.ACK, [self._assigned_space.by_index[p.segment] for p in aimed.pieces], payload=b""
            )
        self._grant()

    def forget(self, peer: ServerPeer) -> None:
        """Drop the requests and the hold of a connection that is lost."""
        self._delayed = [request for request in self._delayed if request.peer is not peer]
        self._waiting = [request for request in self._waiting if request.peer is not peer]
        self.release(peer)

    def stop_serving(self, segment: int) -> list[PeerRequest]:
        """End the hold of a segment that is no longer served here.

        Return the waiting requests for this segment, which the caller must refuse.
        """
        gone = [r for r in [*self._waiting, *self._delayed] if any(p.segment == segment for p in r.pieces)]
        self._waiting = [request for request in self._waiting if request not in gone]
        self._delayed = [request for request in self._delayed if request not in gone]
        if self._hold is not None and segment in self._hold.cuts:
            aimed = self._hold.aimed
            gone += [] if aimed is None else [aimed]
            self._end_hold()
        return gone

    def expire(self, now: float) -> None:
        """Refuse requests that have waited too long, and end a hold that has lasted too long."""
        for request in [waiting for waiting in self._waiting if waiting.deadline < now]:
            self._waiting.remove(request)
            self._replies.fail(self._assigned_space, request, self._explain_too_late(request))
        add_request = self._hold
        if add_request is not None and add_request.deadline < now:
            aimed, missing = add_request.aimed, add_request.missing()
            self._end_hold()
            if aimed is not None:
                self._replies.fail(self._assigned_space, aimed, self._cut_off(aimed, missing))

    def _find_segment(self, index: int) -> DenseSegment:
        segment = self._assigned_space.by_index[index].segment
        if not isinstance(segment, DenseSegment):
            raise ValueError(
                f"segment {index} of space {self._assigned_space.space.name!r} belongs to a table: HOLD is for "
                "segments of the dense vector"
            )
        return segment

    def _grant(self) -> None:
        """Let the next reader hold the space, if no other reader does and the clock lets this one pull.

        All waiting requests of that reader are granted together, because otherwise it would wait for its own hold.
        """
        for request in list(self._waiting):
            add_request = self._hold
            if request not in self._waiting or (add_request is not None and add_request.reader is not request.peer):
                continue
            segments = {piece.segment: self._find_segment(piece.segment) for piece in request.pieces}
            if add_request is None:
                if request.a and not all(
                    segment.may_pull(request.peer.rank, request.a - 1) for segment in segments.values()
                ):
                    continue
                add_request = self._hold = _Hold(request.peer, time.monotonic() + request.peer.patience, {})
            self._waiting.remove(request)
            add_request.cuts |= {index: ConsistentCut(segment.ledger) for index, segment in segments.items()}
            pieces = [
                SegmentPayload(p.segment, p.generation, pack_numbers(add_request.cuts[p.segment].reached()))
                for p in request.pieces
            ]
            touched = [self._assigned_space.by_index[index] for index in segments]
            self._replies.reply(request, GroupMessage.VALUE, touched, payload=pack(pieces))

    def _end_hold(self) -> None:
        self._hold = None
        self._serve_delayed()
        self._grant()

    def _serve_delayed(self) -> None:
        """Serve the pushes that waited, in the order in which they came."""
        waiting, self._delayed = self._delayed, []
        for push in waiting:
            self._replies.serve_delayed(self._assigned_space, push)

    def _explain_too_late(self, request: PeerRequest) -> PeerTimeout:
        behind = sorted({rank for p in request.pieces for rank in self._find_segment(p.segment).laggards()})
        names = ", ".join(f"rank {rank}" for rank in behind)
        return PeerTimeout(
            f"{request.peer.link.peer} could not read space {self._assigned_space.space.name!r} consistently in time, "
            f"because it waited for {names} to push, or for another reader to finish: raise `timeout` if this may take "
            "longer",
            peer=names,
            ranks=behind,
            behind=not request.a,
        )

    def _cut_off(self, aimed: PeerRequest, missing: list[int]) -> PeerTimeout:
        return PeerTimeout(
            f"{aimed.peer.link.peer} waited for a push of rank {', '.join(map(str, missing))} that another server has "
            "received and this server has not: the worker may have died before it had pushed to all servers.\nraise "
            "`timeout` if the push may take longer, or pull with consistent=False",
            peer=f"worker-{missing[0]}" if missing else "server",
            seconds=aimed.peer.patience,
            behind=True,
        )
