"""The copy's half: take a state, and every change behind it, from the primary of a segment."""

from __future__ import annotations

from rayps.elastic.copies import MARK
from rayps.elastic.guests import Request
from rayps.elastic.holdings import Held, Holdings
from rayps.elastic.messages import Kind
from rayps.failpoint import passing


def take(holdings: Holdings, held: Held, request: Request) -> bool:
    """Apply STATE or FORWARD; False, and no effect, where it is of the past, or a copy lacks what was before it.

    Raises:
        CheckpointError, ValueError: it cannot be read.
    """
    done = _state(holdings, held, request) if request.kind == Kind.STATE else _forward(held, request)
    if done:
        passing("copy: applied, not acknowledged")
    return done


def _state(holdings: Holdings, held: Held, request: Request) -> bool:
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
    return True


def _forward(held: Held, request: Request) -> bool:
    index, generation = request.b, int(request.weight)
    holding = held.holdings.get(index)
    if holding is None or holding.segment is None or holding.source is not request.guest:
        return False
    if generation < holding.generation:
        return False
    holding.segment.replay(request.payload)
    holding.generation = holding.line = generation
    return True
