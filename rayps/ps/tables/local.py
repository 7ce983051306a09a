"""A space's tables in this process, for one worker: the same segments as on servers, without links.

What a single process learns with it is the law that runs on servers are held against.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayps.comm.link.socket_link import EMPTY, as_bytes
from rayps.core.errors import ConfigError
from rayps.ps.client.session import SegmentReplies
from rayps.ps.protocol.messages import GroupMessage
from rayps.ps.protocol.space import Space
from rayps.ps.tables.table_segment import TableSegment


class InProcess:
    """Stands where a `Talk` stands: rank 0 of one worker, whose exchanges are calls. Not for several threads."""

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
        pieces: Mapping[int, Any],
        *,
        step: int = 0,
        weight: float = 0.0,
        landing: Mapping[int, Any] | None = None,
    ) -> SegmentReplies:
        """Do what servers would with the pieces. Raises ConfigError, ValueError: nothing was applied."""
        views = {index: memoryview(as_bytes(piece)) for index, piece in pieces.items()}
        answers: dict[int, Any] = dict.fromkeys(views, EMPTY)
        if kind is GroupMessage.PUSH:
            for index, view in views.items():
                self.segments[index].check(0, step, weight, view)
            for index, view in views.items():
                self.segments[index].push(0, step, weight, view)
        elif kind in (GroupMessage.PULL, GroupMessage.READ):
            for index, view in views.items():
                segment = self.segments[index]
                value = segment.read(view) if kind is GroupMessage.READ else segment.pull(0, view)[0]
                place = None if landing is None else landing.get(index)
                if place is None:
                    answers[index] = value
                else:
                    as_bytes(place)[:] = as_bytes(value)
        else:
            raise ConfigError(f"tables in this process cannot do {kind.name}")
        versions = [self.segments[index].version for index in views]
        return SegmentReplies(answers, 0, min(versions, default=0), step)

    def reader(self) -> InProcess:
        """Itself."""
        return self

    def hang_up(self) -> None:
        """There is nobody to leave."""

    def close(self) -> None:
        """There is nobody to leave."""
