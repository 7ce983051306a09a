"""The usual exchange in few calls: push the whole gradient, and pull the whole vector, through servers' mailboxes."""

from __future__ import annotations

import select
import time
from collections.abc import Mapping
from typing import Any

from rayps.core.errors import LinkError
from rayps.ps.client.connections import ServerConnection, ServerConnections
from rayps.ps.protocol.mailbox import (
    ANSWERED,
    BY_MEMORY,
    OFFSET_BITS,
    ROWS,
    STEPS,
    WAITS,
    GradientBuffer,
    WorkerMailbox,
    WorkerMemory,
    copy_whole,
    head_of,
)
from rayps.ps.protocol.rows import Bytes
from rayps.ps.protocol.segment_map import SpaceMap
from rayps.ps.protocol.space import Space
from rayps.tensors.packing import flat_bytes

_LOOK_MS = 1000  # milliseconds between two checks of the deadline


class TurnPart:
    """The part of a `Turn` that concerns one server: the request, and where its values are copied."""

    __slots__ = ("_landing", "_offers", "_reads", "box", "head", "line", "segments", "words")

    def __init__(self, line: ServerConnection, box: WorkerMailbox, segments: list[int], head: bytes) -> None:
        self.line, self.box, self.segments, self.head = line, box, segments, head
        self.words = box.words
        self._landing: Mapping[int, Any] | None = None
        self._offers = -1  # number of memories that the server had offered when `_reads` was made
        self._reads: list[
            tuple[memoryview, Bytes, Bytes]
        ] = []  # a segment's words, its values, and their landing place

    @property
    def answered(self) -> bool:
        """Whether the answer has arrived."""
        found: bool = self.words[ANSWERED] == self.box.tag
        return found

    def take(self, landing: Mapping[int, Any], torn: bool) -> tuple[int, int, int] | None:
        """Copy the values of an answer to their landing places; return the answer's version, lead and durable step.

        None: the answer comes by message, or a segment changed during every attempt to read it. Raises LinkError: the
        server did not offer its memory of a segment.
        """
        version, lead, durable, where, offers = self.box.answer()
        if where != BY_MEMORY:
            return None
        if offers != self._offers or landing is not self._landing:
            box = self.box
            if not box.readable:
                return None
            self._reads = [box.place_of(index, landing[index]) for index in self.segments if index in landing]
            self._landing, self._offers = landing, offers
        for words, values, place in self._reads:
            before = words[STEPS]
            place[:] = values
            if not torn and (before & 1 or words[STEPS] != before) and not copy_whole(words, values, place):
                return None
        return version, lead, durable


class Turn:
    """The prepared requests of an exchange of the whole vector, one for each server.

    They are valid for one map, one set of connections and one gradient buffer.
    """

    def __init__(
        self, parts: list[TurnPart], memory: WorkerMemory, gradients: GradientBuffer, found: SpaceMap, changes: int
    ) -> None:
        self.parts, self.gradients = parts, gradients
        self._memory, self._map, self._changes = memory, found, changes
        self._poll = select.poll()
        self._poll.register(memory.wakeup, select.POLLIN)
        for part in parts:
            self._poll.register(part.line.link.fileno(), select.POLLIN)

    @classmethod
    def of(cls, lines: ServerConnections, space: Space) -> Turn | None:
        """Prepare the requests; return None if there are tables, or not all servers are joined and share memory."""
        memory, layout = lines.memory, space.layout
        if memory is None or layout is None or space.segments > len(space.cuts):
            return None
        gradients, item = memory.gradient(layout.size, layout.dtype), layout.dtype.itemsize
        number = memory.number(gradients)
        parts = []
        for server, segments in lines.map.by_server(range(space.segments)).items():
            line = None if server is None else lines.open.get(server)
            if line is None or line.mailbox is None or not line.joined or len(segments) > ROWS:
                return None
            try:
                if not line.mailbox.ready or not line.mailbox.offer():
                    return None
            except LinkError:  # the server has died: `Session.exchange` detects it, and repeats what the server lacks
                return None
            rows = [
                (
                    index,
                    lines.map.holdings[index].generation,
                    number << OFFSET_BITS | space.cuts[index][0] * item,
                    (space.cuts[index][1] - space.cuts[index][0]) * item,
                    0,
                    0,
                )
                for index in segments
            ]
            parts.append(TurnPart(line, line.mailbox, segments, head_of(rows)))
        return cls(parts, memory, gradients, lines.map, lines.changes)

    def good(self, lines: ServerConnections) -> bool:
        """Return whether map, connections and gradient buffer are those for which the requests were prepared."""
        return self._map is lines.map and self._changes == lines.changes and self.gradients is self._memory.gradients

    def free(self) -> bool:
        """Return whether no connection has a request in flight."""
        for part in self.parts:
            line, box = part.line, part.box
            if part.words[ANSWERED] != box.tag or line.flights or line.link.queued:
                return False
        return True

    def wait(self, lines: ServerConnections, part: TurnPart) -> bool:
        """Wait for the answer of a server; return False if a link becomes readable first, or the deadline passes."""
        words, tag, wakeup = part.words, part.box.tag, self._memory.wakeup
        while words[ANSWERED] != tag:
            words[WAITS] = 1
            lines.fence()
            ready = [] if words[ANSWERED] == tag else self._poll.poll(_LOOK_MS)
            words[WAITS] = 0
            for descriptor, _ in ready:
                if descriptor != wakeup.fileno():
                    return part.answered
                wakeup.clear()
            if not ready and (lines.ended or time.monotonic() > lines.deadline):
                return part.answered
        return True


class SharedGradient:
    """A session's whole gradient, in memory that servers of this host read, and the prepared requests that push it."""

    def __init__(self, lines: ServerConnections) -> None:
        self._lines = lines
        self._plan: Turn | None = None
        self._whole: tuple[GradientBuffer, dict[int, Any]] | None = None

    def buffer(self) -> GradientBuffer | None:
        """Return the memory of the gradient; None if no connected server is on this host."""
        lines = self._lines
        if self._plan is not None and self._plan.good(lines):
            return self._plan.gradients
        memory, layout = lines.memory, lines.space.layout
        if memory is None or layout is None:
            return None
        near = any(line.mailbox is not None and line.mailbox.ready for line in lines.open.values())
        return memory.gradient(layout.size, layout.dtype) if near else None

    def pieces(self, gradients: GradientBuffer) -> dict[int, Any]:
        """Return the pieces of a push of the whole gradient, by segment."""
        if self._whole is None or self._whole[0] is not gradients:
            laid, item = flat_bytes(gradients.whole), gradients.whole.element_size()
            self._whole = gradients, {i: laid[a * item : b * item] for i, (a, b) in enumerate(self._lines.space.cuts)}
        return self._whole[1]

    def turn(self, pieces: Mapping[int, Any]) -> Turn | None:
        """Return the requests that push `pieces`; None if this is not the whole gradient, or requests are in flight."""
        lines, plan = self._lines, self._plan
        if plan is None or not plan.good(lines):
            plan = self._plan = Turn.of(lines, lines.space) if lines.open else None
        laid = plan is not None and self._whole is not None and self._whole[1] is pieces
        return plan if plan is not None and laid and plan.free() else None
