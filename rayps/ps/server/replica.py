"""The copy's half: take a state, and every change behind it, from the primary of a segment."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from rayps.core.failpoint import passing
from rayps.ps.protocol.messages import GroupMessage, SegmentPayload, unpack
from rayps.ps.server.assignments import AssignedSpace, Assignments
from rayps.ps.server.connection import PeerRequest
from rayps.ps.server.replication import MARK

log = logging.getLogger(__name__)


def take(holdings: Assignments, held: AssignedSpace, request: PeerRequest) -> list[int]:
    """Apply STATE or FORWARD; return the segments on which it had no effect.

    The reasons: the message is older than the segment, an earlier message is missing, or it cannot be applied.
    """
    if request.kind == GroupMessage.STATE:
        refused = [] if _tried(held, request.b, lambda: _state(holdings, held, request)) else [request.b]
    else:
        changes = [SegmentPayload(request.b, int(request.weight), request.payload)]
        if request.b < 0:
            changes = unpack(request.payload)
        refused = [c.segment for c in changes if not _tried(held, c.segment, partial(_forward, held, request, c))]
    passing("copy: applied, not acknowledged")
    return refused


def _tried(held: AssignedSpace, index: int, work: Callable[[], bool]) -> bool:
    try:
        return work()
    except Exception as error:  # whatever it is, this copy is not what it should be, and the next state replaces it
        log.error("segment %d of space %d cannot be copied", index, held.number, exc_info=error)
        if index in held.holdings:
            held.holdings[index].source = None
        return False


def _state(holdings: Assignments, held: AssignedSpace, request: PeerRequest) -> bool:
    index, generation = request.b, int(request.weight)
    if not 0 <= index < held.space.segments:
        return False
    known = held.holdings.get(index)
    by_mark = len(request.payload) == MARK.size
    if by_mark:
        has = known is not None and known.usable and known.segment is not None and (known.segment.seq, known.line)
        if not has or has != MARK.unpack(request.payload):
            return False
    segment = None if by_mark else held.make(index)
    if segment is not None:
        segment.load(request.payload)
    holding = holdings.is_to_be_copy(held, index, generation, request.guest)
    if holding is None:
        return False
    if segment is not None:
        holding.segment, holding.line = segment, generation
        holding.usable = request.weight == generation
    return True


def _forward(held: AssignedSpace, request: PeerRequest, change: SegmentPayload) -> bool:
    holding = held.holdings.get(change.segment)
    if holding is None or holding.segment is None or holding.source is not request.guest:
        return False
    if change.generation < holding.generation:
        return False
    holding.segment.replay(change.data)
    holding.generation = holding.line = change.generation
    return True
