"""The interface of a table client's session, and an implementation without servers: all segments in this process.

Tests compare runs on servers with a run in one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from rayps_client.errors import ConfigError

from rayps.comm.link.socket_link import EMPTY, as_bytes
from rayps.ps.client.session import SegmentReplies
from rayps.ps.protocol.messages import GroupMessage
from rayps.ps.protocol.rows import PieceBytes
from rayps.ps.protocol.space import Space
from rayps.ps.tables.table_segment import TableSegment
from rayps.ps.tables.wire_format import Bytes


class TableSession(Protocol):
    """The interface of a session for tables. `rayps.ps.client.session.Session` and `InProcess` implement it."""

    timeout: float

    def exchange(
        self,
        kind: GroupMessage,
        pieces: Mapping[int, PieceBytes],
        *,
        step: int = 0,
        weight: float = 0.0,
        outputs: Mapping[int, PieceBytes] | None = None,
    ) -> SegmentReplies:
        """Send the pieces to their segments and wait for the answers. Raises LinkError if a server fails.

        `outputs` maps a segment to the memory into which its answer is written.
        """

    def allocate(self, size: int) -> Bytes:
        """Allocate `size` bytes for a piece or for received rows, in memory that servers of this host can access."""
        ...

    def reader(self) -> TableSession:
        """Return a session of the same rank for another thread."""

    def hang_up(self) -> None:
        """Make exchanges that wait for answers fail at once."""

    def close(self) -> None:
        """Close the connections."""


class InProcess:
    """A session of the only worker, rank 0. It calls segments in this process. Only one thread may use it."""

    timeout = 60.0

    def __init__(self, space: Space) -> None:
        self.space, self.rank = space, 0
        self.segments: dict[int, TableSegment] = {}
        for index in range(len(space.cuts), space.segments):
            found = space.table_of(index)
            assert found is not None
            self.segments[index] = TableSegment(*found, space.strategy, 1)

    def exchange(
        self,
        kind: GroupMessage,
        pieces: Mapping[int, PieceBytes],
        *,
        step: int = 0,
        weight: float = 0.0,
        outputs: Mapping[int, PieceBytes] | None = None,
    ) -> SegmentReplies:
        """Serve one push, pull or read on the segments of this process.

        `pieces` maps a segment to the request's bytes for it; `outputs` maps a segment to the memory for its answer.
        Raises ConfigError if `kind` is another one, and ConfigError or ValueError if a piece is invalid. If a piece of
        a push is invalid, no piece was applied.
        """
        views = {index: memoryview(as_bytes(piece)) for index, piece in pieces.items()}
        answers: dict[int, PieceBytes] = dict.fromkeys(views, EMPTY)
        if kind is GroupMessage.PUSH:
            for index, view in views.items():
                self.segments[index].check(0, step, weight, view)
            for index, view in views.items():
                self.segments[index].push(0, step, weight, view)
        elif kind in (GroupMessage.PULL, GroupMessage.READ):
            for index, view in views.items():
                segment = self.segments[index]
                place = None if outputs is None or index not in outputs else memoryview(as_bytes(outputs[index]))
                value = segment.read(view) if kind is GroupMessage.READ else segment.pull(0, view, place)[0]
                if place is None:
                    answers[index] = value
                elif value is not place:
                    place[:] = as_bytes(value)
        else:
            raise ConfigError(f"tables in this process do not support requests of kind {kind.name}")
        versions = [self.segments[index].version for index in views]
        return SegmentReplies(answers, 0, min(versions, default=0), step)

    def allocate(self, size: int) -> Bytes:
        """Allocate `size` bytes of ordinary memory."""
        return np.empty(size, np.uint8)

    def reader(self) -> InProcess:
        """Return this session."""
        return self

    def hang_up(self) -> None:
        """Do nothing: an exchange does not wait."""

    def close(self) -> None:
        """Do nothing: there are no connections."""
