"""The most frequent exchange in few calls: push the whole gradient and pull the whole vector, through mailboxes."""

from __future__ import annotations

import select
import time
from collections.abc import Mapping

from rayps_client.errors import LinkError

from rayps.ps.client.connections import ServerConnection, ServerConnections
from rayps.ps.protocol.mailbox import (
    ANSWERED,
    BY_MEMORY,
    OFFSET_BITS,
    ROWS,
    STEPS,
    WAITS,
    GradientBuffer,
    Landing,
    WorkerMailbox,
    WorkerMemory,
    copy_whole,
    head_of,
)
from rayps.ps.protocol.rows import Bytes, PieceBytes
from rayps.ps.protocol.segment_map import SpaceMap
from rayps.ps.protocol.space import Space
from rayps.tensors.packing import view_bytes

_LOOK_MS = 1000  # milliseconds between two checks of the deadline


class WholeExchangePart:
    """The part of a `WholeExchange` that concerns one server: the request, and where its values are copied."""

    __slots__ = ("_offers", "_outputs", "_reads", "connection", "head", "mailbox", "segments", "words")

    def __init__(self, connection: ServerConnection, mailbox: WorkerMailbox, segments: list[int], head: bytes) -> None:
        self.connection, self.mailbox, self.segments, self.head = connection, mailbox, segments, head
        self.words = mailbox.words
        self._outputs: Mapping[int, PieceBytes | Landing] | None = None
        self._offers = -1  # number of memories that the server had offered when `_reads` was made
        self._reads: list[tuple[memoryview, Bytes, Bytes]] = []  # a segment's words, its values, and the output buffer

    @property
    def answered(self) -> bool:
        """Whether the answer has arrived."""
        found: bool = self.words[ANSWERED] == self.mailbox.tag
        return found

    def copy_values(
        self, outputs: Mapping[int, PieceBytes | Landing], mixed_versions: bool
    ) -> tuple[int, int, int] | None:
        """Copy the values of an answer to `outputs`; return the answer's version, lead and durable step.

        Returns None if the answer comes by message, or a segment changed during every attempt to read it. Raises
        LinkError if the server did not offer its memory of a segment.
        """
        version, lead, durable, where, offers = self.mailbox.answer()
        if where != BY_MEMORY:
            return None
        if offers != self._offers or outputs is not self._outputs:
            mailbox = self.mailbox
            if not mailbox.readable:
                return None
            self._reads = [mailbox.place_of(index, outputs[index]) for index in self.segments if index in outputs]
            self._outputs, self._offers = outputs, offers
        for words, values, place in self._reads:
            before = words[STEPS]
            place[:] = values
            if not mixed_versions and (before & 1 or words[STEPS] != before) and not copy_whole(words, values, place):
                return None
        return version, lead, durable


class WholeExchange:
    """The prepared requests of an exchange of the whole vector, one for each server.

    The requests are valid for one map, one set of connections and one gradient buffer.
    """

    def __init__(
        self,
        parts: list[WholeExchangePart],
        memory: WorkerMemory,
        gradients: GradientBuffer,
        found: SpaceMap,
        changes: int,
    ) -> None:
        self.parts, self.gradients = parts, gradients
        self._memory, self._map, self._changes = memory, found, changes
        self._poll = select.poll()
        self._poll.register(memory.wakeup, select.POLLIN)
        for part in parts:
            self._poll.register(part.connection.link.fileno(), select.POLLIN)

    @classmethod
    def of(cls, connections: ServerConnections, space: Space) -> WholeExchange | None:
        """Prepare the requests. Return None if the space has tables, or a server is not joined or shares no memory."""
        memory, layout = connections.memory, space.layout
        if memory is None or layout is None or space.segments > len(space.cuts):
            return None
        gradients, item = memory.gradient(layout.size, layout.dtype), layout.dtype.itemsize
        number = memory.number(gradients)
        parts = []
        for server, segments in connections.map.by_server(range(space.segments)).items():
            connection = None if server is None else connections.open.get(server)
            if connection is None or connection.mailbox is None or not connection.joined or len(segments) > ROWS:
                return None
            try:
                if not connection.mailbox.ready or not connection.mailbox.offer():
                    return None
            except LinkError:  # the server has died: `Session.exchange` detects this, and repeats the lost pushes
                return None
            rows = [
                (
                    index,
                    connections.map.holders[index].generation,
                    number << OFFSET_BITS | space.cuts[index][0] * item,
                    (space.cuts[index][1] - space.cuts[index][0]) * item,
                    0,
                    0,
                )
                for index in segments
            ]
            parts.append(WholeExchangePart(connection, connection.mailbox, segments, head_of(rows)))
        return cls(parts, memory, gradients, connections.map, connections.changes)

    def is_valid(self, connections: ServerConnections) -> bool:
        """Return whether map, connections and gradient buffer are those for which the requests were prepared."""
        return (
            self._map is connections.map
            and self._changes == connections.changes
            and self.gradients is self._memory.gradients
        )

    def is_idle(self) -> bool:
        """Return whether no connection has a request in flight."""
        for part in self.parts:
            connection, mailbox = part.connection, part.mailbox
            if part.words[ANSWERED] != mailbox.tag or connection.flights or connection.link.queued:
                return False
        return True

    def wait(self, connections: ServerConnections, part: WholeExchangePart) -> bool:
        """Wait for a server's answer; return False if a link becomes readable before, or the deadline passes."""
        words, tag, wakeup = part.words, part.mailbox.tag, self._memory.wakeup
        while words[ANSWERED] != tag:
            words[WAITS] = 1
            connections.fence()
            ready = [] if words[ANSWERED] == tag else self._poll.poll(_LOOK_MS)
            words[WAITS] = 0
            for descriptor, _ in ready:
                if descriptor != wakeup.fileno():
                    return part.answered
                wakeup.clear()
            if not ready and (connections.ended or time.monotonic() > connections.deadline):
                return part.answered
        return True


class SharedGradient:
    """A session's whole gradient, in memory that servers of this host read, and the prepared requests that push it."""

    def __init__(self, connections: ServerConnections) -> None:
        self._connections = connections
        self._plan: WholeExchange | None = None
        self._whole: tuple[GradientBuffer, dict[int, PieceBytes]] | None = None

    def buffer(self) -> GradientBuffer | None:
        """Return the memory of the gradient, or None if no connected server is on this host."""
        connections = self._connections
        if self._plan is not None and self._plan.is_valid(connections):
            return self._plan.gradients
        memory, layout = connections.memory, connections.space.layout
        if memory is None or layout is None:
            return None
        shares = any(
            connection.mailbox is not None and connection.mailbox.ready for connection in connections.open.values()
        )
        return memory.gradient(layout.size, layout.dtype) if shares else None

    def pieces(self, gradients: GradientBuffer) -> dict[int, PieceBytes]:
        """Return a push of the whole gradient as a dict from segment to piece."""
        if self._whole is None or self._whole[0] is not gradients:
            shared, item = view_bytes(gradients.whole), gradients.whole.element_size()
            self._whole = (
                gradients,
                {i: shared[a * item : b * item] for i, (a, b) in enumerate(self._connections.space.cuts)},
            )
        return self._whole[1]

    def exchange_of(self, pieces: Mapping[int, PieceBytes]) -> WholeExchange | None:
        """Return the exchange that pushes `pieces`, the result of the method `pieces`.

        Returns None if `pieces` is something else, requests are in flight, or not all servers share memory.
        """
        connections, plan = self._connections, self._plan
        if plan is None or not plan.is_valid(connections):
            plan = self._plan = WholeExchange.of(connections, connections.space) if connections.open else None
        shared = plan is not None and self._whole is not None and self._whole[1] is pieces
        return plan if plan is not None and shared and plan.is_idle() else None
