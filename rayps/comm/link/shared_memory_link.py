"""A link between two processes of one host whose payloads travel through shared memory.

Headers and doorbells go over the unix socket. Each side owns a *lane*, a few megabytes of shared memory, into which
it copies payloads in chunks while the peer copies earlier chunks out; every header carries how much has been taken
out, so that room is known without a message of its own. Small payloads stay on the socket.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
from collections import deque
from typing import Any

from rayps.comm.link.memory import Memory
from rayps.comm.link.socket_link import EMPTY, HEADER, REFUSED, Link, Message, as_bytes, new_payload
from rayps.core.errors import LinkError

LANE_BYTES = 4 << 20
CHUNK_BYTES = LANE_BYTES // 4
INLINE_BYTES = 2048
_CHUNK, _CREDIT, _OFFER = -2, -3, -4  # internal kinds
_LANE = 0  # the key under which a lane is offered
_BY_LANE = 1  # flag: the payload comes by lane
_READ_ONLY = 2  # flag of an offer
_ANCILLARY = socket.CMSG_SPACE(8 * array.array("i").itemsize)


class _Incoming:
    """A message whose header has arrived, and where its payload is."""

    __slots__ = ("arrived", "chunks", "filled", "generation", "into", "message", "size", "target")

    def __init__(self, message: Message, size: int, generation: int) -> None:
        self.message = message
        self.size = size
        self.generation = generation
        self.chunks: deque[tuple[int, int]] = deque()
        self.arrived = 0  # bytes whose chunks have arrived
        self.filled = 0  # bytes that have been copied out
        self.target: memoryview | None = None
        self.into: Any = None


class SharedLink(Link):
    """A `Link` whose payloads travel through shared memory."""

    def __init__(self, sock: socket.socket, peer: str, generation: int) -> None:
        super().__init__(sock, peer, generation, "shm")
        self.memories: dict[int, Memory] = {}  # what the peer has offered, by key
        self.descriptors: dict[int, int] = {}  # the same for other descriptors; the taker closes them
        self._todo: deque[tuple[Message, memoryview, int]] = deque()  # not on the wire yet; bytes already in lane
        self._lane: Memory | None = None
        self._place = 0  # where in the lane the next chunk goes
        self._given = 0  # bytes put into the lane, ever
        self._returned = 0  # of these, bytes the peer has taken out
        self._taken = 0  # bytes taken out of the peer's lane, ever
        self._told = 0  # of these, bytes the peer knows about
        self._inbox: deque[_Incoming] = deque()
        self._raw = memoryview(bytearray(1 << 16))
        self._end = 0
        self._descriptors: deque[int] = deque()
        self._passing: deque[tuple[memoryview, int]] = deque()  # parts of the wire that carry a descriptor
        self._refusals: deque[tuple[int, int]] = deque()
        self._eof = False
        self._eof_cause: OSError | None = None

    # Sending

    @property
    def queued(self) -> int:
        """Bytes that wait to leave."""
        waiting = sum(HEADER.size + len(view) - max(done, 0) for _, view, done in self._todo) if self._todo else 0
        return waiting + sum(len(part) for part in self._out) if self._out else waiting

    @property
    def interest(self) -> int:
        """What to wait for while something is queued: room on the socket, or room in the lane (a message)."""
        return select.POLLOUT | select.POLLIN if self._out else select.POLLIN

    def _append(self, message: Message, payload: Any) -> None:
        view = as_bytes(message.payload if payload is None else payload)
        self._todo.append((message, view, -1))

    def _own_queue(self) -> None:
        if self._todo:
            message, view, done = self._todo[-1]
            if len(view):
                self._todo[-1] = (message, memoryview(bytes(view)), done)

    def flush(self) -> bool:
        """Send what leaves now; False when the rest waits for the socket, True otherwise.

        What waits for room in the lane leaves when the peer's answer is read (`feed`, `recv`); `queued` counts it.
        """
        while self._drain_wire() and self._todo:
            message, view, done = self._todo[0]
            if done < 0:
                done = self._begin(message, view)
            done = self._fill_lane(view, done)
            if done < len(view):
                self._todo[0] = (message, view, done)
                return self._drain_wire()
            self._todo.popleft()
        return not self._out

    def _begin(self, message: Message, view: memoryview) -> int:
        """Put the header on the wire, and the payload too where it is small; bytes that need no lane."""
        by_lane = len(view) > INLINE_BYTES
        if by_lane and self._lane is None:
            self._lane = Memory.create(LANE_BYTES)
            self.offer(_LANE, self._lane)
        self._put(message, len(view), _BY_LANE if by_lane else 0)
        if by_lane:
            return 0
        if len(view):
            self._out.append(view if view.readonly else memoryview(bytes(view)))
        return len(view)

    def _put(self, message: Message, size: int = 0, flags: int = 0) -> None:
        m = message
        self._told = self._taken
        self._out.append(
            memoryview(HEADER.pack(m.kind, flags, self.generation, m.tag, m.a, m.b, m.weight, size, self._taken, 0))
        )

    def _fill_lane(self, view: memoryview, done: int) -> int:
        lane = self._lane
        while done < len(view) and lane is not None:
            if self._given == self._returned:
                self._place = 0  # nobody reads the lane: begin where it is still in the cache
            free = lane.size - (self._given - self._returned)
            if free < min(len(view) - done, CHUNK_BYTES // 4):
                break  # many small chunks would cost more than the wait for a larger one
            size = min(len(view) - done, CHUNK_BYTES, free, lane.size - self._place)
            lane.view[self._place : self._place + size] = view[done : done + size]
            self._put(Message(_CHUNK, a=self._place, b=size))
            self._given += size
            self.bytes_sent += size
            self._place = (self._place + size) % lane.size
            done += size
            if done < len(view) and not self._drain_wire():
                break
        return done

    def offer(self, key: int, memory: Memory, *, read_only: bool = False) -> None:
        """Let the peer use `memory`: it appears in its `memories[key]`. Keys below 1 are the link's own."""
        self._offer(key, memory.size, memory.fd, _READ_ONLY if read_only else 0)

    def offer_descriptor(self, key: int, descriptor: int) -> None:
        """Pass a descriptor: a copy appears in the peer's `descriptors[key]`."""
        self._offer(key, 0, descriptor)

    def _offer(self, key: int, size: int, descriptor: int, flags: int = 0) -> None:
        copy = os.dup(descriptor)  # the caller may close its own before this one leaves
        self._put(Message(_OFFER, a=key, b=size), flags=flags)
        self._passing.append((self._out[-1], copy))

    def _drain_wire(self) -> bool:
        while self._out:
            parts, descriptors = self._next_parts()
            try:
                sent = self._sock.sendmsg(parts, descriptors)
            except BlockingIOError:
                return False
            except OSError as error:
                raise self._lost(error) from error
            if descriptors:
                os.close(self._passing.popleft()[1])
            self.bytes_sent += sent
            while self._out and sent >= len(self._out[0]):
                sent -= len(self._out.popleft())
            if sent:
                self._out[0] = self._out[0][sent:]
        return True

    def _next_parts(self) -> tuple[list[memoryview], list[Any]]:
        """What one call may send: up to an offer, or an offer alone with its descriptor."""
        if not self._passing:
            return [self._out[i] for i in range(min(len(self._out), 16))], []
        carrier, descriptor = self._passing[0]
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
        """The header that `peek` found and whose message has not been taken yet."""
        return self._inbox[0].message if self._inbox else None

    @property
    def pending_bytes(self) -> int:
        """The payload size of the message that `peek` returned."""
        return self._inbox[0].size

    @property
    def ended(self) -> bool:
        """Whether the peer is gone; what it sent before can still be read."""
        return self._eof

    def peek(self) -> Message | None:
        """The header of the next message, without its payload; None when it has not arrived."""
        if not self._inbox:
            self.absorb()
        if self._refusals:
            raise self._refused(*self._refusals.popleft())
        if not self._inbox and self._eof:
            raise self._lost(self._eof_cause)
        return self.head

    def try_recv(self, into: Any = None) -> Message | None:
        """As `recv`, without waiting: None while the message is not complete."""
        if self.peek() is None:
            return None
        item = self._inbox[0]
        stale = item.generation != self.generation
        if item.target is None:
            self._choose_target(item, None if stale else into)
        self._copy_out(item)
        if item.filled < item.size:
            self.absorb()
            self._copy_out(item)
            if item.filled < item.size:
                if self._eof:
                    raise self._lost(self._eof_cause)
                return None
        self._inbox.popleft()
        if stale:
            raise self._stale(item.generation)
        if into is not None and into is not item.into and item.target is not None:
            as_bytes(into)[:] = item.target
        item.message.payload = item.target if item.target is not None else EMPTY
        return item.message

    def _choose_target(self, item: _Incoming, into: Any) -> None:
        if into is None:
            item.target = new_payload(item.size)
            return
        view = as_bytes(into)
        if len(view) != item.size:
            raise LinkError(
                f"{self.peer!r} sent {item.size} bytes where {len(view)} were expected",
                peer=self.peer,
                given=item.size,
                expected=len(view),
            )
        item.target, item.into = view, into

    def _copy_out(self, item: _Incoming) -> None:
        if isinstance(item.message.payload, bytes):  # came on the socket
            assert item.target is not None
            item.target[:] = item.message.payload
            item.message.payload = EMPTY
            item.filled = item.size
        while item.chunks:
            lane = self.memories.get(_LANE)
            assert item.target is not None
            place, size = item.chunks.popleft()
            if lane is None or place + size > lane.size or item.filled + size > item.size:
                raise LinkError(f"{self.peer!r} pointed outside its shared memory", peer=self.peer)
            item.target[item.filled : item.filled + size] = lane.view[place : place + size]
            item.filled += size
            self._taken += size
        if self._taken - self._told >= CHUNK_BYTES:
            self._put(Message(_CREDIT))
            with contextlib.suppress(LinkError):  # the peer may be gone, what it sent is still good
                self._drain_wire()

    def absorb(self) -> None:
        """Read every header that is there; payloads stay in shared memory. Then send what found room."""
        self._read_headers()
        if self._todo or self._out:
            with contextlib.suppress(LinkError):  # found again, with its reason, when the next byte is read
                self.flush()

    def _read_headers(self) -> None:
        while not self._eof:
            try:
                count, descriptors, _, _ = self._sock.recvmsg_into([self._raw[self._end :]], _ANCILLARY)
            except BlockingIOError:
                break
            except OSError as error:
                self._eof, self._eof_cause = True, error
                break
            for _, _, data in descriptors:
                rights = array.array("i")
                rights.frombytes(data[: len(data) - len(data) % rights.itemsize])
                self._descriptors.extend(rights)
            if count == 0:
                self._eof = True
                break
            self.bytes_received += count
            self._end += count
            full = self._end == len(self._raw)
            self._parse()
            if not full and count < len(self._raw) // 2 and not descriptors:
                break  # a short read: the socket is empty

    def _parse(self) -> None:
        raw, at = self._raw, 0
        while self._end - at >= HEADER.size:
            kind, flags, generation, tag, a, b, weight, size, credit, _ = HEADER.unpack_from(raw, at)
            inline = 0 if flags & _BY_LANE else size
            if self._end - at - HEADER.size < inline:
                break
            at += HEADER.size
            self._returned = max(self._returned, credit)
            if kind >= 0:
                message = Message(kind, tag, a, b, weight)
                if inline:
                    message.payload = bytes(raw[at : at + inline])  # type: ignore[assignment]
                self._inbox.append(_Incoming(message, size, generation))
            else:
                self._obey(kind, flags, a, b)
            at += inline
        if at:
            rest = bytes(raw[at : self._end])
            raw[: len(rest)] = rest
            self._end = len(rest)

    def _obey(self, kind: int, flags: int, a: int, b: int) -> None:
        if kind == _CHUNK and self._inbox:
            self._inbox[-1].chunks.append((a, b))
            self._inbox[-1].arrived += b
            self.bytes_received += b
        elif kind == _OFFER and self._descriptors:
            descriptor = self._descriptors.popleft()
            if b == 0:
                self.descriptors[a] = descriptor
                return
            self.memories[a] = Memory.attach(descriptor, b, read_only=bool(flags & _READ_ONLY))
            self.memories[a].close_descriptor()
        elif kind == REFUSED:
            self._refusals.append((a, b))

    def drain(self) -> bool:
        """Read and forget what is there; True when the peer has hung up."""
        self.absorb()
        return self._eof

    def close(self) -> None:
        """Close this end; what is queued is dropped. Safe to call twice."""
        super().close()
        self._todo.clear()
        for memory in [*self.memories.values(), *([self._lane] if self._lane else [])]:
            memory.close()
        self.memories.clear()
        self._lane = None
        for descriptor in (*self.descriptors.values(), *self._descriptors, *(fd for _, fd in self._passing)):
            os.close(descriptor)
        self.descriptors.clear()
        self._descriptors.clear()
        self._passing.clear()
