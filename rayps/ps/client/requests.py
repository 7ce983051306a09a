"""Send a request to one server, and read the answer: through shared memory if possible, else by message.

To a server on the same host, a request is written into a mailbox (`rayps.ps.protocol.mailbox`). Its pieces are in
memory that the server reads, and the worker copies values from the server's memory. To other servers the pieces are
sent as one payload.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
from rayps_client.errors import LinkError

from rayps.comm.link import Message
from rayps.comm.link.socket_link import EMPTY, as_bytes
from rayps.ps.client.connections import (
    POOLED_BYTES,
    PUSHES,
    InFlight,
    SegmentRequest,
    ServerConnection,
    ServerConnections,
)
from rayps.ps.protocol.mailbox import ROWS, Landing, LandingCopy, WorkerMailbox, WorkerMemory, array_of, head_of
from rayps.ps.protocol.messages import GroupMessage, SegmentPayload, pack_head
from rayps.ps.protocol.rows import PieceBytes

_BY_MAILBOX = frozenset({GroupMessage.PUSH, GroupMessage.PULL, GroupMessage.PUSH_PULL, GroupMessage.READ})


class AnswerCopy(NamedTuple):
    """The values of one segment in the answer to a request, on their way to a device."""

    request: SegmentRequest
    segment: int
    copy: LandingCopy


class RequestSender:
    """Sends requests on the connections of a session, and reads the answers that arrive in mailboxes."""

    def __init__(self, connections: ServerConnections) -> None:
        self.pool = BufferPool()
        self._connections = connections
        self._item = 0 if connections.space.layout is None else connections.space.layout.dtype.itemsize
        self._tag = 0
        self._unsignalled: list[WorkerMailbox] = []  # mailboxes with a request for which the server was not woken yet
        self.copies: deque[AnswerCopy] = deque()  # answers on their way to a device, in the order of the copies

    def next_tag(self) -> int:
        """Return the tag of a new request; the answer has the same tag."""
        self._tag += 1
        return self._tag

    def send(self, connection: ServerConnection, request: SegmentRequest, segments: list[int], patience: int) -> None:
        """Send the part of a request for these segments of one server. Call `signal` afterwards.

        `patience` is the time that the server may delay the answer, in milliseconds. If the connection fails, it is
        closed, and the segments remain unsent.
        """
        if not self._send_by_mailbox(connection, request, segments, patience):
            self._send_by_message(connection, request, segments, patience)

    def signal(self) -> None:
        """Wake the servers that sleep and have a request in their mailbox."""
        if self._unsignalled:
            self._connections.fence()
            for mailbox in self._unsignalled:
                mailbox.ring()
            self._unsignalled = []

    def _send_by_message(
        self, connection: ServerConnection, request: SegmentRequest, segments: list[int], patience: int
    ) -> None:
        holders = self._connections.map.holders
        pieces = [SegmentPayload(index, holders[index].generation, request.pieces[index]) for index in segments]
        payload, places = gather(pieces, self.pool)
        request.buffers.append(payload)
        if (
            request.kind in PUSHES
        ):  # the push may be retained and repeated: refer to bytes that the caller cannot change
            request.pieces.update(zip(segments, places, strict=True))
        tag = self._put_in_flight(connection, InFlight(request, segments))
        try:
            connection.send(Message(request.kind, tag, request.step, patience, request.weight), payload)
        except LinkError:
            self._connections.lose(connection)

    def _send_by_mailbox(
        self, connection: ServerConnection, request: SegmentRequest, segments: list[int], patience: int
    ) -> bool:
        """Write a request to the server's mailbox; return False if it must be sent by message."""
        mailbox, memory = connection.mailbox, self._connections.memory
        if memory is None or mailbox is None or request.kind not in _BY_MAILBOX or request.by_message:
            return False
        if not connection.joined or len(segments) > ROWS:
            return False
        if request.repeated or any(flight.request.repeated for flight in connection.flights.values()):
            return False  # a request in a mailbox would overtake the pushes that are repeated by message
        if not mailbox.ready or not mailbox.answered or mailbox.tag in connection.flights or connection.link.queued:
            return False
        rows, outs = [], dict[int, PieceBytes]()
        for index in segments:
            row = self._make_row(memory, request, index, outs)
            if row is None:
                return False
            rows.append(row)
        try:
            if not mailbox.offer():
                return False
        except LinkError:
            self._connections.lose(connection)
            return True
        tag = self._put_in_flight(connection, InFlight(request, segments, True, outs))
        mailbox.put(tag, request.kind, head_of(rows), request.step, patience, request.weight)
        self._unsignalled.append(mailbox)
        return True

    def _make_row(
        self, memory: WorkerMemory, request: SegmentRequest, index: int, outs: dict[int, PieceBytes]
    ) -> tuple[int, ...] | None:
        """Return a segment's row in the head of a mailbox, or None if the request must be sent by message.

        If the server cannot access the buffer for a table's rows, `outs` gets other memory, from which the rows are
        copied later.
        """
        dense, place, size = index < len(self._connections.space.cuts), 0, 0
        if not dense and request.kind != GroupMessage.PUSH:
            output = None if request.outputs is None else request.outputs.get(index)
            if output is None:  # the answer's size is not known
                return None
            out = array_of(output)
            if (place := memory.place(out)) < 0:
                out = outs[index] = memory.allocate(len(out))
                place = memory.place(out)
            size = len(out)
            if place < 0 and size:
                return None
        piece = array_of(request.pieces[index])
        headed = dense and len(piece) not in (0, self._bytes_of(index)) and index not in request.asked_rows
        if headed and (request.kind != GroupMessage.PUSH or memory.place(piece) < 0):
            return None  # the server could not read this form of a piece in the worker's memory
        at = memory.place(piece) if len(piece) else 0
        if at < 0:
            copy = memory.allocate(len(piece))
            copy[:] = piece
            request.pieces[index] = copy
            if (at := memory.place(copy)) < 0:
                return None
        return index, self._connections.map.holders[index].generation, at, len(piece), place, size

    def _put_in_flight(self, connection: ServerConnection, flight: InFlight) -> int:
        tag = self.next_tag()
        connection.flights[tag] = flight
        for index in flight.segments:
            del flight.request.unsent[index]
        return tag

    def read(self, mailbox: WorkerMailbox, flight: InFlight) -> dict[int, PieceBytes | Landing]:
        """Copy the values of an answer from shared memory to the request's `outputs`.

        Copies to a device are started and added to `copies`. Return a dict from segment to output buffer, for the
        segments whose values changed during every attempt. Their values must be requested by message.
        """
        request, dense = flight.request, len(self._connections.space.cuts)
        changed: dict[int, PieceBytes | Landing] = {}
        for index in flight.segments:
            place = None if request.outputs is None else request.outputs.get(index)
            if index >= dense:
                if index in flight.outs:
                    array_of(place)[:] = flight.outs[index]
            else:
                if place is None:
                    place = np.empty(self._bytes_of(index), np.uint8)
                    request.answers[index] = place.data
                rows, mixed = request.asked_rows.get(index), request.mixed_versions
                copy = mailbox.start(index, place, mixed_versions=mixed) if isinstance(place, Landing) else None
                if copy is not None:
                    self.copies.append(AnswerCopy(request, index, copy))
                elif not mailbox.read(index, place, rows, mixed_versions=mixed):
                    changed[index] = place
            request.answers.setdefault(index, EMPTY)
        return changed

    def _bytes_of(self, index: int) -> int:
        a, b = self._connections.space.cuts[index]
        return (b - a) * self._item


class BufferPool:
    """Memory for payloads. It is reused, because the first write to new pages costs as much as copying a payload."""

    def __init__(self) -> None:
        self._free: dict[int, list[Any]] = {}

    def allocate(self, size: int) -> Any:
        """Return memory of `size` bytes, not zeroed."""
        free = self._free.get(size)
        return free.pop() if free else np.empty(size, np.uint8).data

    def release(self, buffers: list[Any]) -> None:
        """Return buffers to the pool. No other object may use them any more."""
        for buffer in buffers:
            if len(buffer) >= POOLED_BYTES:
                free = self._free.setdefault(len(buffer), [])
                if len(free) < 4:
                    free.append(buffer)

    def clear(self) -> None:
        """Free all memory. Call this when later requests will have other sizes."""
        self._free.clear()


def gather(pieces: list[SegmentPayload], pool: BufferPool) -> tuple[Any, list[Any]]:
    """Return a payload as `messages.pack` makes it, in memory of `pool`, and a view of each piece in it."""
    head = pack_head(pieces)
    views = [as_bytes(each.data) for each in pieces]
    payload = pool.allocate(len(head) + sum(map(len, views)))
    at = len(head)
    payload[:at] = head
    places = []
    for view in views:
        place = payload[at : at + len(view)]
        place[:] = view
        places.append(place)
        at += len(view)
    return payload, places
