"""One end of a connection between two peers: framed messages with deadlines, a generation and back-pressure.

A message consists of a fixed 64-byte header and a payload of raw bytes; nothing is pickled. Only one thread at a time
may use a connection. `rayps.comm.link.listener` creates connections. The code that uses them defines the messages.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from rayps_client.errors import LinkError, PeerLost, PeerTimeout, StaleGeneration
from rayps_client.values import Buffer

from rayps.comm.link.tcp_facts import read_tcp_facts
from rayps.core.time.member_times import LineFacts

EMPTY = memoryview(b"")
QUEUE_LIMIT = 256 << 20  # most bytes that may be queued on a connection
WAKE_BYTES = 256 << 10  # bytes of a payload that arrive by TCP before a thread that waits for the payload wakes up
REFUSED = -1  # kind of an internal message: the receiver refused a message because of its generation
# kind, flags, generation, tag, a, b, weight, payload bytes, bytes taken out of the peer's lane, unused
HEADER = struct.Struct("<hHIqqqdQQQ")


Payload: TypeAlias = Buffer | NDArray[np.uint8]  # contiguous memory


@dataclass(slots=True)
class Message:
    """One message: the header's fields, and a payload of raw bytes, which may be empty.

    `kind` is 0 or more. The code that sends and receives messages defines the meaning of kind, tag, a, b and weight.
    """

    kind: int
    tag: int = 0
    a: int = 0
    b: int = 0
    weight: float = 0.0
    payload: memoryview | bytearray = EMPTY


def as_bytes(buffer: Payload) -> memoryview:
    """Return a view of any contiguous buffer as flat bytes."""
    view = buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)
    if view.nbytes == 0:
        return EMPTY
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def allocate_payload(size: int) -> memoryview:
    """Allocate memory for a payload of `size` bytes; its content is undefined."""
    return np.empty(size, dtype=np.uint8).data if size else EMPTY


class Link(ABC):
    """One end of a connection to `peer`, over any transport. Only one thread at a time may use it."""

    def __init__(self, sock: socket.socket, peer: str, generation: int, transport: str) -> None:
        sock.setblocking(False)
        self.peer = peer
        self.generation = generation
        self.transport = transport
        self.bytes_sent = 0
        self.bytes_received = 0
        self.queue_limit = QUEUE_LIMIT
        self._sock = sock
        self._poll = select.poll()
        self._out: deque[memoryview] = deque()

    def fileno(self) -> int:
        """Return the socket's descriptor for a selector, or -1 once the link is closed."""
        return self._sock.fileno()

    @property
    def closed(self) -> bool:
        """Whether this side has closed the connection."""
        return self._sock.fileno() < 0

    @property
    def line(self) -> LineFacts | None:
        """What the kernel counts for this connection; None if it is not by TCP, or closed. Any thread may read it."""
        return read_tcp_facts(self._sock) if self.transport == "tcp" else None

    @property
    @abstractmethod
    def queued(self) -> int:
        """The number of bytes that are queued and not sent yet."""

    @property
    def interest(self) -> int:
        """The `poll` events of the socket to wait for while bytes are queued."""
        return select.POLLOUT

    @property
    def ended(self) -> bool:
        """Whether the peer has closed the connection while messages from it can still be read."""
        return False

    @abstractmethod
    def absorb(self) -> None:
        """Read the peer's reports of how much space it has for further payloads."""

    # Sending

    def send(self, message: Message, payload: Payload | None = None, *, timeout: float) -> None:
        """Send a message, and wait until all its bytes have been sent.

        Raises PeerTimeout if no byte can be sent for `timeout` seconds, PeerLost if the connection has ended.
        """
        self._append(message, payload)
        self.flush()
        while left := self.queued:
            self.wait(self.interest, timeout, f"accept the remaining {left} bytes of a message")
            self.absorb()
            self.flush()

    def queue(self, message: Message, payload: Payload | None = None, *, copy: bool = True) -> None:
        """Send the bytes that can be sent without waiting, and queue the others for `flush`.

        With `copy=False` the payload must not change before `flush` has returned True. Raises PeerTimeout if the queue
        is full.
        """
        size = len(as_bytes(message.payload if payload is None else payload))
        waiting = self.queued
        if waiting and waiting + size > self.queue_limit:
            raise PeerTimeout(
                f"{self.peer!r} has not read {waiting} bytes, and {size} more do not fit in the queue, which holds "
                f"at most {self.queue_limit} (the knob is `queue_limit`)",
                peer=self.peer,
                queued=waiting,
                limit=self.queue_limit,
            )
        self._append(message, payload)
        self.flush()
        if copy and self.queued:
            self._copy_last_payload()

    @abstractmethod
    def flush(self) -> bool:
        """Send the bytes that the peer accepts without waiting; return whether all queued bytes were sent.

        Raises PeerLost if the connection has ended.
        """

    @abstractmethod
    def _append(self, message: Message, payload: Payload | None) -> None:
        """Queue a message without copying its payload."""

    @abstractmethod
    def _copy_last_payload(self) -> None:
        """Copy the payload that was queued last, so that the caller may change its buffer."""

    # Receiving

    @abstractmethod
    def try_recv(self, into: Payload | None = None) -> Message | None:
        """Receive as `recv` does, but do not wait; return None while the message is not complete."""

    @abstractmethod
    def peek(self) -> Message | None:
        """Return the header of the next message, without its payload, or None if the header has not arrived.

        Raises PeerLost if the connection has ended, StaleGeneration if the peer refused a message of this side.
        """

    @property
    @abstractmethod
    def head(self) -> Message | None:
        """The header that `peek` has returned, of a message that has not been received yet; else None."""

    @property
    @abstractmethod
    def pending_bytes(self) -> int:
        """The payload size of the message that `peek` returned."""

    @abstractmethod
    def drain(self) -> bool:
        """Read and drop all messages; return True if the peer has closed the connection."""

    def recv(self, timeout: float, into: Payload | None = None) -> Message:
        """Wait for the next message and return it. If `into` is given, the message's payload is read into this buffer.

        Raises:
            PeerTimeout: no byte arrived for `timeout` seconds.
            PeerLost: the connection has ended.
            StaleGeneration: the message has another generation, or the peer refused a message of this side.
            LinkError: the payload has another size than `into`.
        """
        while True:
            message = self.try_recv(into)
            if message is not None:
                return message
            self.wait(select.POLLIN | (select.POLLOUT if self._out else 0), timeout, "send a message")
            if self._out:
                with contextlib.suppress(PeerLost):  # raised again once the messages that the peer sent have been read
                    self.flush()

    def feed(self) -> list[Message]:
        """Read the socket and return all messages that are complete, with each payload in new memory.

        A message of another generation is dropped, and a refusal is sent to its sender. Raises PeerLost if the
        connection has ended, StaleGeneration if the peer refused a message of this side.
        """
        messages: list[Message] = []
        while True:
            try:
                message = self.try_recv()
            except StaleGeneration as error:
                if error.data.get("refused"):
                    raise
                continue
            except PeerLost:
                if messages:
                    return messages  # the loss is raised by the next call
                raise
            if message is None:
                return messages
            messages.append(message)

    def _answer_stale(self, generation: int) -> StaleGeneration:
        self._append(Message(REFUSED, a=generation, b=self.generation), None)
        self.flush()
        return StaleGeneration(
            f"a message of {self.peer!r} has generation {generation}, but the group is at generation "
            f"{self.generation}: the message was dropped",
            peer=self.peer,
            generation=generation,
            expected=self.generation,
        )

    def _explain_refusal(self, generation: int, current: int) -> StaleGeneration:
        return StaleGeneration(
            f"{self.peer!r} refused a message of this side with generation {generation}, because {self.peer!r} is at "
            f"generation {current}",
            peer=self.peer,
            generation=generation,
            expected=current,
            refused=True,
        )

    # The socket

    def wait(self, events: int, timeout: float, doing: str = "answer") -> None:
        """Sleep until the socket is ready for `events`. Raises PeerTimeout after `timeout` seconds."""
        if self.closed:
            raise self._explain_loss(None)
        self._poll.register(self._sock, events)
        if not self._poll.poll(max(0, math.ceil(timeout * 1000))):
            raise PeerTimeout(
                f"{self.peer!r} did not {doing} within {timeout:g} s (the knob is `timeout`)",
                peer=self.peer,
                seconds=timeout,
            )

    def _explain_loss(self, error: OSError | None) -> PeerLost:
        if self.closed:
            return PeerLost(f"the connection to {self.peer!r} was closed on this side", peer=self.peer)
        why = f" ({error.strerror})" if error is not None and error.strerror else ""
        return PeerLost(f"{self.peer!r} closed the connection or died{why}", peer=self.peer)

    def hang_up(self, *, more_to_send: bool = False) -> None:
        """Shut the connection down. A thread of either side that waits on the connection then raises PeerLost.

        Any thread may call `hang_up`, but only the thread that uses the link may call `close`. With `more_to_send`,
        this side can still send.
        """
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD if more_to_send else socket.SHUT_RDWR)

    def send_last(self, end: float, read: bool) -> None:
        """Send the queued bytes, at most until the `time.monotonic` deadline `end`. Call it before `close`.

        If a side closes a TCP connection while it has unread data, TCP discards the bytes that the peer has not read.
        With `read`, this method therefore reads and drops data until the peer closes. Raises PeerTimeout if the peer
        does not read the queued bytes in time, PeerLost if the connection has ended.
        """
        self.flush()
        self.drain()
        while self.queued and (left := end - time.monotonic()) > 0:
            self.wait(self.interest, left)
            self.drain()
            self.flush()
        if self.transport == "tcp" and read:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)
            while not self.drain() and (left := end - time.monotonic()) > 0:
                self.wait(select.POLLIN, left)

    def close(self) -> None:
        """Close this end and drop the queued bytes. Safe to call twice."""
        self._sock.close()
        self._out.clear()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(slots=True)
class _PartialMessage:
    """A message whose header and `filled` bytes of whose payload have been read."""

    message: Message
    size: int
    refused: int  # the message's generation if it differs from the connection's, else -1
    target: memoryview | None = None  # memory for the payload
    into: object | None = None
    filled: int = 0


class SocketLink(Link):
    """A `Link` whose payloads follow their headers on the socket."""

    def __init__(self, sock: socket.socket, peer: str, generation: int, transport: str) -> None:
        super().__init__(sock, peer, generation, transport)
        self._queued = 0
        self._header = memoryview(bytearray(HEADER.size))
        self._got = 0  # bytes of the next header that have been read
        self._next: _PartialMessage | None = None
        self._low = 1  # the number of bytes for which a poll of the socket waits

    # Sending

    @property
    def queued(self) -> int:
        """The number of bytes that are queued and not sent yet."""
        return self._queued

    def flush(self) -> bool:
        """Send the bytes that the peer accepts without waiting; return whether all queued bytes were sent.

        Raises PeerLost if the connection has ended.
        """
        out = self._out
        while out:
            try:
                sent = self._sock.sendmsg([out[i] for i in range(min(len(out), 16))])
            except BlockingIOError:
                return False
            except OSError as error:
                raise self._explain_loss(error) from error
            self.bytes_sent += sent
            self._queued -= sent
            while out and sent >= len(out[0]):
                sent -= len(out.popleft())
            if sent:
                out[0] = out[0][sent:]
        return True

    def _copy_last_payload(self) -> None:
        self._out[-1] = memoryview(bytes(self._out[-1]))

    def _append(self, message: Message, payload: Payload | None) -> None:
        view = as_bytes(message.payload if payload is None else payload)
        head = HEADER.pack(
            message.kind, 0, self.generation, message.tag, message.a, message.b, message.weight, len(view), 0, 0
        )
        self._out.append(memoryview(head))
        if len(view):
            self._out.append(view)
        self._queued += len(head) + len(view)

    def absorb(self) -> None:
        """Do nothing: a plain socket needs no reports, because the kernel limits how much it accepts."""

    # Receiving

    def try_recv(self, into: Payload | None = None) -> Message | None:
        """Receive as `recv` does, but do not wait; return None while the message is not complete."""
        if self.peek() is None:
            return None
        item = self._next
        assert item is not None, "peek found a header"
        if item.target is None:
            item.target, item.into = choose_landing(self.peer, item.size, into if item.refused < 0 else None)
        target = item.target
        while item.filled < item.size:
            count = self._read(target[item.filled :])
            if count < 0:
                self._wake_at(item.size - item.filled)
                return None
            item.filled += count
        self._next = None
        self._wake_at(1)
        if item.refused >= 0:
            raise self._answer_stale(item.refused)
        if into is not None and into is not item.into and len(target):
            as_bytes(into)[:] = target
        item.message.payload = target
        return item.message

    def peek(self) -> Message | None:
        """Return the header of the next message, without its payload, or None if the header has not arrived.

        Raises PeerLost if the connection has ended, StaleGeneration if the peer refused a message of this side.
        """
        if self._next is None and self._read_header():
            kind, _, generation, tag, a, b, weight, size, _, _ = HEADER.unpack(self._header)
            if kind == REFUSED:
                raise self._explain_refusal(a, b)
            refused = generation if generation != self.generation else -1
            self._next = _PartialMessage(Message(kind, tag, a, b, weight), size, refused)
        return self.head

    @property
    def head(self) -> Message | None:
        """The header that `peek` has returned, of a message that has not been received yet; else None."""
        return None if self._next is None else self._next.message

    @property
    def pending_bytes(self) -> int:
        """The payload size in bytes of the message that `peek` returned; 0 if there is none."""
        return 0 if self._next is None else self._next.size

    def _read_header(self) -> bool:
        while self._got < HEADER.size:
            count = self._read(self._header[self._got :])
            if count < 0:
                return False
            self._got += count
        self._got = 0
        return True

    def _wake_at(self, size: int) -> None:
        """Make a poll of the socket wait until `size` bytes, but at most `WAKE_BYTES`, have arrived.

        The kernel reports a slow line's data after each packet. A thread that wakes up each time uses several times the
        processor time of the copies. A peer that sends fewer bytes within a timeout therefore counts as silent.
        """
        low = min(size, WAKE_BYTES) if self.transport == "tcp" else 1
        if low != self._low:
            self._low = low
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low)

    def _read(self, view: memoryview) -> int:
        """Read into `view`; return the number of bytes read, or -1 if no data has arrived."""
        try:
            count = self._sock.recv_into(view)
        except BlockingIOError:
            return -1
        except OSError as error:
            raise self._explain_loss(error) from error
        if count == 0:
            raise self._explain_loss(None)
        self.bytes_received += count
        return count

    def drain(self) -> bool:
        """Read and drop all messages; return True if the peer has closed the connection."""
        scrap = memoryview(bytearray(1 << 16))
        try:
            while self._read(scrap) > 0:
                pass
        except PeerLost:
            return True
        return False

    def close(self) -> None:
        """Close this end and drop the queued bytes. Safe to call twice."""
        super().close()
        self._queued = 0


def choose_landing(peer: str, size: int, into: Payload | None) -> tuple[memoryview, Payload | None]:
    """Return the memory into which a payload of `size` bytes is read, and `into`.

    The memory is that of `into`, or new memory if `into` is None. Raises LinkError if `into` has another size.
    """
    if into is None:
        return allocate_payload(size), None
    view = as_bytes(into)
    if len(view) != size:
        raise LinkError(
            f"{peer!r} sent {size} bytes where {len(view)} were expected", peer=peer, given=size, expected=len(view)
        )
    return view, into


def measure_time_left(deadline: float) -> float:
    """Return the seconds until a `time.monotonic` deadline, at least 0."""
    return max(0.0, deadline - time.monotonic())
