"""A connection between two processes of one host whose payloads are sent through shared memory.

Headers and small payloads are sent on the unix socket. Each side has a *lane*, a few megabytes of shared memory. It
copies payloads into its lane in chunks, while the peer copies earlier chunks out. Every header contains the number of
bytes that the header's sender has copied out of the receiver's lane so far. From this number the receiver knows the
free space of its lane without a further message.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
from collections import deque
from collections.abc import Iterator
from typing import Final, TypeAlias

from rayps_client.errors import LinkError

from rayps.comm.link.memory import Memory
from rayps.comm.link.socket_link import EMPTY, HEADER, REFUSED, Link, Message, Payload, as_bytes, choose_landing

LANE_BYTES = 4 << 20
CHUNK_BYTES = LANE_BYTES // 4
INLINE_BYTES = 2048
# kinds of internal messages: a chunk is in the lane; bytes were copied out of the lane; a descriptor is sent
_CHUNK, _CREDIT, _OFFER = -2, -3, -4
_LANE = 0  # the key under which a side offers its lane
_BY_LANE = 1  # flag: the payload is in the lane
_READ_ONLY = 2  # flag of an offer: the receiver maps the memory for reading only
_FLAGS: Final = 1  # index of `flags` among a header's fields
_SIZE: Final = 7  # index of the payload's size
_ANCILLARY = socket.CMSG_SPACE(8 * array.array("i").itemsize)
HeaderFields: TypeAlias = tuple[int, int, int, int, int, int, float, int, int, int]  # as HEADER unpacks them


class _LaneMessage:
    """A message whose header has arrived, and the positions of its payload."""

    __slots__ = ("chunks", "filled", "generation", "into", "message", "size", "target")

    def __init__(self, message: Message, size: int, generation: int) -> None:
        self.message = message
        self.size = size
        self.generation = generation
        self.chunks: deque[tuple[int, int]] = deque()  # (offset, size) of each chunk in the lane that is not copied yet
        self.filled = 0  # number of payload bytes that have been copied out
        self.target: memoryview | None = None
        self.into: object | None = None


class OutgoingLane:
    """The lane of this side: a circular buffer into which it copies payloads, and which the peer reads in order."""

    def __init__(self) -> None:
        self.memory = Memory.create(LANE_BYTES)
        self._place = 0  # offset of the next chunk
        self._total = 0  # number of bytes ever put into the lane
        self._freed = 0  # number of bytes that the peer has ever copied out

    def put(self, view: memoryview, done: int) -> tuple[int, int]:
        """Copy the next chunk of a payload into the lane; return the chunk's (offset, size).

        The first `done` bytes of the payload are in the lane already. The size is 0 if the lane has too little space.
        """
        if self._total == self._freed:
            self._place = 0  # the lane is empty: start at offset 0, whose bytes are still in the cache
        left, free = len(view) - done, self.memory.size - (self._total - self._freed)
        if free < min(left, CHUNK_BYTES // 4):
            return self._place, 0  # many small chunks would cost more than waiting for a larger one
        place = self._place
        size = min(left, CHUNK_BYTES, free, self.memory.size - place)
        self.memory.view[place : place + size] = view[done : done + size]
        self._total += size
        self._place = (place + size) % self.memory.size
        return place, size

    def record_freed(self, count: int) -> None:
        """Record that the peer has copied `count` bytes in total out of the lane. A smaller, older count is ignored."""
        self._freed = max(self._freed, count)


class IncomingLane:
    """The peer's lane, out of which this side copies payloads."""

    def __init__(self) -> None:
        self.memory: Memory | None = None  # None until the peer has offered its memory
        self.taken = 0  # number of bytes ever copied out of the lane
        self.reported = 0  # the value of `taken` that was last reported to the peer

    def copy_out(self, place: int, target: memoryview) -> bool:
        """Copy the bytes at offset `place` into `target`. Return False if the lane does not have these bytes."""
        size = len(target)
        if self.memory is None or place + size > self.memory.size:
            return False
        target[:] = self.memory.view[place : place + size]
        self.taken += size
        return True


class _HeaderReader:
    """Reads the socket: headers, small payloads, descriptors, and the end of the connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.descriptors: deque[int] = deque()
        self.ended = False
        self.cause: OSError | None = None  # why the connection ended
        self._sock = sock
        self._raw = memoryview(bytearray(1 << 16))
        self._end = 0

    def read(self) -> tuple[int, bool]:
        """Read from the socket; return the number of bytes read, and whether the socket may have more.

        The number is 0 if no data has arrived or the connection has ended (see `ended`).
        """
        try:
            count, descriptors, _, _ = self._sock.recvmsg_into([self._raw[self._end :]], _ANCILLARY)
        except BlockingIOError:
            return 0, False
        except OSError as error:
            self.ended, self.cause = True, error
            return 0, False
        for _, _, data in descriptors:
            rights = array.array("i")
            rights.frombytes(data[: len(data) - len(data) % rights.itemsize])
            self.descriptors.extend(rights)
        if count == 0:
            self.ended = True
            return 0, False
        self._end += count
        full = self._end == len(self._raw)
        return count, full or count >= len(self._raw) // 2 or bool(descriptors)  # after a short read it is empty

    def headers(self) -> Iterator[tuple[HeaderFields, bytes]]:
        """Yield the fields of each complete header, and the payload that followed it on the socket (may be empty)."""
        raw, at = self._raw, 0
        while self._end - at >= HEADER.size:
            fields: HeaderFields = HEADER.unpack_from(raw, at)
            inline = 0 if fields[_FLAGS] & _BY_LANE else fields[_SIZE]
            if self._end - at - HEADER.size < inline:
                break
            at += HEADER.size + inline
            yield fields, bytes(raw[at - inline : at]) if inline else b""
        if at:
            rest = bytes(raw[at : self._end])
            raw[: len(rest)] = rest
            self._end = len(rest)

    def close(self) -> None:
        """Close the descriptors that have arrived but whose offers were not processed."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()


class _Offers:
    """Offers: descriptors that one side sends to the other. Contains those not sent yet, and the numbers of offers."""

    __slots__ = ("made", "taken", "unsent")

    def __init__(self) -> None:
        self.unsent: deque[tuple[memoryview, int]] = deque()  # (queued header, the descriptor to send with it)
        self.made = self.taken = 0  # numbers of offers that this side made, and that it received


class SharedLink(Link):
    """A `Link` whose payloads are sent through shared memory."""

    def __init__(self, sock: socket.socket, peer: str, generation: int) -> None:
        super().__init__(sock, peer, generation, "shm")
        self.memories: dict[int, Memory] = {}  # from an offer's key to the memory that the peer offered
        self.descriptors: dict[int, int] = {}  # from key to other descriptors of the peer, which this side must close
        self._offers = _Offers()
        # messages not sent yet: message, payload, number of payload bytes in the lane (-1: the header is not queued)
        self._todo: deque[tuple[Message, memoryview, int]] = deque()
        self._lane: OutgoingLane | None = None
        self._incoming = IncomingLane()
        self._reader = _HeaderReader(sock)
        self._inbox: deque[_LaneMessage] = deque()
        self._refusals: deque[tuple[int, int]] = deque()  # (generation that the peer refused, the peer's generation)

    @property
    def offers_made(self) -> int:
        """The number of offers that this side has made."""
        return self._offers.made

    @property
    def offers_taken(self) -> int:
        """The number of the peer's offers that have arrived."""
        return self._offers.taken

    # Sending

    @property
    def queued(self) -> int:
        """The number of bytes that are queued and not sent yet."""
        waiting = sum(HEADER.size + len(view) - max(done, 0) for _, view, done in self._todo) if self._todo else 0
        return waiting + sum(len(part) for part in self._out) if self._out else waiting

    @property
    def interest(self) -> int:
        """The `poll` events to wait for while bytes are queued: space in the socket, or a report about the lane."""
        return select.POLLOUT | select.POLLIN if self._out else select.POLLIN

    def _append(self, message: Message, payload: Payload | None) -> None:
        view = as_bytes(message.payload if payload is None else payload)
        self._todo.append((message, view, -1))

    def _copy_last_payload(self) -> None:
        if self._todo:
            message, view, done = self._todo[-1]
            if len(view):
                self._todo[-1] = (message, memoryview(bytes(view)), done)

    def flush(self) -> bool:
        """Send what can be sent without waiting; return False if bytes still wait for space in the socket, else True.

        Bytes that wait for space in the lane do not change the result, but they are included in `queued`. They are sent
        when `feed` or `recv` reads the peer's report of free space.
        """
        while self._send_socket() and self._todo:
            message, view, done = self._todo[0]
            if done < 0:
                done = self._begin(message, view)
            done = self._fill_lane(view, done)
            if done < len(view):
                self._todo[0] = (message, view, done)
                return self._send_socket()
            self._todo.popleft()
        return not self._out

    def _begin(self, message: Message, view: memoryview) -> int:
        """Queue the header and a small payload on the socket; return the number of payload bytes queued.

        The number is 0 for a larger payload, which is sent through the lane afterwards.
        """
        by_lane = len(view) > INLINE_BYTES
        if by_lane and self._lane is None:
            self._lane = OutgoingLane()
            self.offer(_LANE, self._lane.memory)
        self._put(message, len(view), _BY_LANE if by_lane else 0)
        if by_lane:
            return 0
        if len(view):
            self._out.append(view if view.readonly else memoryview(bytes(view)))
        return len(view)

    def _put(self, message: Message, size: int = 0, flags: int = 0) -> None:
        m, taken = message, self._incoming.taken
        self._incoming.reported = taken
        header = HEADER.pack(m.kind, flags, self.generation, m.tag, m.a, m.b, m.weight, size, taken, 0)
        self._out.append(memoryview(header))

    def _fill_lane(self, view: memoryview, done: int) -> int:
        lane = self._lane
        while done < len(view) and lane is not None:
            place, size = lane.put(view, done)
            if not size:
                break
            self._put(Message(_CHUNK, a=place, b=size))
            self.bytes_sent += size
            done += size
            if done < len(view) and not self._send_socket():
                break
        return done

    def offer(self, key: int, memory: Memory, *, read_only: bool = False) -> None:
        """Share `memory` with the peer, where it appears as `memories[key]`. Keys below 1 are reserved."""
        self._offer(key, memory.size, memory.fd, _READ_ONLY if read_only else 0)

    def offer_descriptor(self, key: int, descriptor: int) -> None:
        """Send a copy of a file descriptor to the peer, where it appears as `descriptors[key]`."""
        self._offer(key, 0, descriptor)

    def _offer(self, key: int, size: int, descriptor: int, flags: int = 0) -> None:
        self._offers.made += 1
        copy = os.dup(descriptor)  # the caller may close `descriptor` before the offer is sent
        self._put(Message(_OFFER, a=key, b=size), flags=flags)
        self._offers.unsent.append((self._out[-1], copy))

    def _send_socket(self) -> bool:
        while self._out:
            parts, descriptors = self._find_next_parts()
            try:
                sent = self._sock.sendmsg(parts, descriptors)
            except BlockingIOError:
                return False
            except OSError as error:
                raise self._explain_loss(error) from error
            if descriptors:
                os.close(self._offers.unsent.popleft()[1])
            self.bytes_sent += sent
            while self._out and sent >= len(self._out[0]):
                sent -= len(self._out.popleft())
            if sent:
                self._out[0] = self._out[0][sent:]
        return True

    def _find_next_parts(self) -> tuple[list[memoryview], list[tuple[int, int, array.array[int]]]]:
        """Return the buffers for one system call: those before the next offer, or an offer and its descriptor."""
        if not self._offers.unsent:
            return [self._out[i] for i in range(min(len(self._out), 16))], []
        carrier, descriptor = self._offers.unsent[0]
        parts: list[memoryview] = []
        for part in self._out:
            if part is carrier:
                break
            parts.append(part)
        if parts:
            return parts[:16], []
        return [carrier], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]

    # Receiving

    @property
    def head(self) -> Message | None:
        """The header that `peek` has returned, of a message that has not been received yet; else None."""
        return self._inbox[0].message if self._inbox else None

    @property
    def pending_bytes(self) -> int:
        """The payload size of the message that `peek` returned."""
        return self._inbox[0].size

    @property
    def ended(self) -> bool:
        """Whether the peer has closed the connection. Messages that the peer sent before can still be read."""
        return self._reader.ended

    def peek(self) -> Message | None:
        """Return the header of the next message, without its payload, or None if it has not arrived."""
        if not self._inbox:
            self.absorb()
        if self._refusals:
            raise self._explain_refusal(*self._refusals.popleft())
        if not self._inbox and self._reader.ended:
            raise self._explain_loss(self._reader.cause)
        return self.head

    def try_recv(self, into: Payload | None = None) -> Message | None:
        """Receive as `recv` does, without waiting; return None while the message is not complete."""
        if self.peek() is None:
            return None
        item = self._inbox[0]
        stale = item.generation != self.generation
        if item.target is None:
            item.target, item.into = choose_landing(self.peer, item.size, None if stale else into)
        self._copy_out(item)
        if item.filled < item.size:
            self.absorb()
            self._copy_out(item)
            if item.filled < item.size:
                if self._reader.ended:
                    raise self._explain_loss(self._reader.cause)
                return None
        self._inbox.popleft()
        if stale:
            raise self._answer_stale(item.generation)
        if into is not None and into is not item.into and item.target is not None:
            as_bytes(into)[:] = item.target
        item.message.payload = item.target if item.target is not None else EMPTY
        return item.message

    def _copy_out(self, item: _LaneMessage) -> None:
        assert item.target is not None
        if isinstance(item.message.payload, bytes):  # the payload came on the socket
            item.target[:] = item.message.payload
            item.message.payload = EMPTY
            item.filled = item.size
        while item.chunks:
            place, size = item.chunks.popleft()
            target = item.target[item.filled : item.filled + size]
            if len(target) < size or not self._incoming.copy_out(place, target):
                raise LinkError(
                    f"{self.peer!r} announced {size} bytes at offset {place}, which are outside its shared "
                    "memory or its message",
                    peer=self.peer,
                )
            item.filled += size
        if self._incoming.taken - self._incoming.reported >= CHUNK_BYTES:
            self._put(Message(_CREDIT))
            with contextlib.suppress(LinkError):  # the peer may have closed; messages that it sent before are valid
                self._send_socket()

    def absorb(self) -> None:
        """Read all headers that have arrived, then send queued bytes for which the peer has reported space.

        Received payloads stay in shared memory.
        """
        self._read_headers()
        if self._todo or self._out:
            with contextlib.suppress(LinkError):  # the next read raises the error again, with its reason
                self.flush()

    def _read_headers(self) -> None:
        more = not self._reader.ended
        while more:
            count, more = self._reader.read()
            self.bytes_received += count
            for fields, payload in self._reader.headers():
                self._process_header(fields, payload)

    def _process_header(self, fields: HeaderFields, payload: bytes) -> None:
        kind, flags, generation, tag, a, b, weight, size, credit, _ = fields
        if self._lane is not None:
            self._lane.record_freed(credit)
        if kind < 0:
            self._process_internal(kind, flags, a, b)
            return
        message = Message(kind, tag, a, b, weight)
        if payload:
            message.payload = payload  # type: ignore[assignment]
        self._inbox.append(_LaneMessage(message, size, generation))

    def _process_internal(self, kind: int, flags: int, a: int, b: int) -> None:
        if kind == _CHUNK and self._inbox:
            self._inbox[-1].chunks.append((a, b))
            self.bytes_received += b
        elif kind == _OFFER and self._reader.descriptors:
            descriptor = self._reader.descriptors.popleft()
            self._offers.taken += 1
            if b == 0:
                self.descriptors[a] = descriptor
                return
            memory = Memory.attach(descriptor, b, read_only=bool(flags & _READ_ONLY))
            memory.close_descriptor()
            if a == _LANE:
                self._incoming.memory = memory
            else:
                self.memories[a] = memory
        elif kind == REFUSED:
            self._refusals.append((a, b))

    def drain(self) -> bool:
        """Read and drop all messages; return True if the peer has closed the connection."""
        self.absorb()
        return self._reader.ended

    def close(self) -> None:
        """Close this end and drop the queued bytes. Safe to call twice."""
        super().close()
        self._todo.clear()
        lanes = [lane.memory for lane in (self._lane, self._incoming) if lane is not None and lane.memory is not None]
        for memory in [*self.memories.values(), *lanes]:
            memory.close()
        self.memories.clear()
        self._lane, self._incoming.memory = None, None
        for descriptor in (*self.descriptors.values(), *(fd for _, fd in self._offers.unsent)):
            os.close(descriptor)
        self.descriptors.clear()
        self._offers.unsent.clear()
        self._reader.close()
