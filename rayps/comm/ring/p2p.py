"""Messages with tensors of any shape and dtype between two ranks of a ring, for the stages of a pipeline.

The receiver need not know shapes or dtypes in advance. A message has a description: the sender's text `form`, and each
tensor's shape, dtype and whether it needs a gradient. The description is sent in full the first time, and as a number
afterwards. A message of one tensor then consists of a header and the tensor's bytes.

Sending does not wait for the receiver. A thread sends the bytes that cannot be sent at once, while this rank computes.
Two ranks can therefore send each other more than the socket buffers hold.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from select import poll
from typing import NamedTuple, TypeAlias

import torch
from rayps_client.errors import ConfigError, LinkError
from rayps_client.values import Buffer
from torch import Tensor

from rayps.comm.link import Link, Message
from rayps.comm.ring.mesh import Mesh
from rayps.comm.ring.messages import RingMessage, Want

BACKLOG_BYTES = 128 << 20  # if more bytes are queued to one rank, `give` waits
KNOWN = 4096  # most descriptions that are numbered for each receiver; further ones are sent in full each time
SPIN_SECONDS = 200e-6  # seconds during which a rank polls for a message and yields its core, before it sleeps
_ALIGN = 64  # alignment in bytes of each tensor in a message
_SEND_SECONDS = 0.05  # longest pause of the sending thread while messages are queued

_DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class TensorHeader(NamedTuple):
    """A message's description: the sender's text `form`, one part for each tensor, and the `size` of all in bytes.

    A part is (dtype, shape, whether the tensor needs a gradient, offset in bytes).
    """

    form: str
    parts: tuple[tuple[torch.dtype, tuple[int, ...], bool, int], ...]
    size: int


_Spec: TypeAlias = tuple[torch.dtype, torch.Size, bool]
_Form: TypeAlias = tuple[str, torch.dtype, torch.Size, bool] | tuple[str, tuple[_Spec, ...]]  # key of a header


class TensorMessage(NamedTuple):
    """A received message: the tensors, whether each needs a gradient (`wants`), and the sender's text `form`."""

    tensors: list[Tensor]
    wants: list[bool]
    form: str


class PointToPoint:
    """Sends and receives messages with tensors over one mesh. It is the value of `Ring.parcels`."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.bytes = 0  # bytes of tensors sent
        self.messages = 0  # number of messages sent
        self.seconds = 0.0  # seconds spent waiting
        # for each receiving rank: the descriptions that were sent to that rank, with their numbers
        self._sent: dict[int, dict[_Form, tuple[int, TensorHeader]]] = {}
        self._received: dict[int, dict[int, TensorHeader]] = {}  # for each sending rank: its descriptions by number
        self._pending: set[int] = set()  # ranks to which messages may be queued
        self._due = threading.Event()
        self._over = False
        self._thread: threading.Thread | None = None
        mesh.at_end(self._end)

    def give(self, to: int, tag: int, tensors: Sequence[Tensor], form: str = "") -> None:
        """Send tensors to rank `to` as one message with `tag`. Messages arrive in the order of the calls.

        The tensors must not change until `settle` has returned. The call waits only if more than `BACKLOG_BYTES` are
        queued to rank `to`. Raises PeerLost if a rank is lost, PeerTimeout if rank `to` does not receive in time.
        """
        number, header, new = self._describe(to, tensors, form)
        head = _pack(header) if new else b""
        payload = _collect_bytes(tensors, header, head)
        message = Message(RingMessage.PARCEL, tag=tag, a=number, b=len(head))
        with self._mesh.guarded():
            link = self._mesh.link(to)
            if link.queued > BACKLOG_BYTES:
                self._wait({to}, {})
            link.queue(message, payload, copy=False)
            if waits := link.queued > 0:
                self._pending.add(to)
        self.bytes += sum(t.nbytes for t in tensors)
        self.messages += 1
        if waits:
            self._start()

    def take(self, frm: int, tag: int) -> TensorMessage:
        """Receive the next message with `tag` from rank `frm`.

        Raises PeerLost if a rank is lost, PeerTimeout if the message does not arrive in time.
        """
        found: list[Message] = []
        with self._mesh.guarded():
            want = (RingMessage.PARCEL, tag, 0, found)
            if not self._poll_briefly(frm, want):
                self._wait(set(), {frm: want})
            message = found[0]
            header = self._read_header(frm, message)
        body = memoryview(message.payload)[message.b :]
        if len(body) != header.size:
            raise LinkError(
                f"rank {frm} sent {len(body)} bytes of tensors, but its header announced {header.size}",
                peer=f"rank {frm}",
            )
        tensors = [
            torch.frombuffer(body, dtype=dtype, count=count, offset=offset).view(shape)
            if (count := math.prod(shape))
            else torch.empty(shape, dtype=dtype)
            for dtype, shape, _, offset in header.parts
        ]
        return TensorMessage(tensors, [wants for _, _, wants, _ in header.parts], header.form)

    def settle(self) -> None:
        """Wait until all messages have been sent.

        Raises PeerLost if a rank is lost, PeerTimeout if a rank does not receive in time.
        """
        if not self._pending:
            return
        with self._mesh.guarded():
            self._wait({peer for peer in self._pending if self._mesh.link(peer).queued}, {})
            self._pending.clear()

    def _poll_briefly(self, frm: int, want: Want) -> bool:
        """Poll for at most `SPIN_SECONDS`; return whether the message `want` has arrived.

        Usually the message arrives in less time than this rank would need to sleep and wake up.
        """
        if self._mesh.arrived(frm, want):
            return True
        start = now = time.perf_counter()
        arrived = False
        while not arrived and now - start < SPIN_SECONDS:
            os.sched_yield()
            arrived = self._mesh.arrived(frm, want)
            now = time.perf_counter()
        self.seconds += now - start
        self._mesh.seconds_waiting += now - start
        return arrived

    def _wait(self, sending: set[int], wants: dict[int, Want]) -> None:
        before = self._mesh.seconds_waiting
        try:
            self._mesh.finish(sending, wants)
        finally:
            self.seconds += self._mesh.seconds_waiting - before

    # Descriptions of messages

    def _describe(self, to: int, tensors: Sequence[Tensor], form: str) -> tuple[int, TensorHeader, bool]:
        key: _Form
        if len(tensors) == 1:
            (t,) = tensors
            key = form, t.dtype, t.shape, t.requires_grad
        else:
            key = form, tuple((t.dtype, t.shape, t.requires_grad) for t in tensors)
        known = self._sent.setdefault(to, {})
        found = known.get(key)
        if found is not None:
            return *found, False
        at, parts = 0, []
        for t in tensors:
            if t.dtype not in _CODES or t.layout != torch.strided:
                raise ConfigError(
                    f"a message cannot contain a tensor of dtype {t.dtype} and layout {t.layout}: convert it to a "
                    "dense tensor of a common dtype first"
                )
            parts.append((t.dtype, tuple(t.shape), t.requires_grad, at))
            at += t.nbytes if len(tensors) == 1 else -(-t.nbytes // _ALIGN) * _ALIGN
        header = TensorHeader(form, tuple(parts), at)
        if len(known) >= KNOWN:
            return -1, header, True
        known[key] = (len(known), header)
        return len(known) - 1, header, True

    def _read_header(self, frm: int, message: Message) -> TensorHeader:
        known = self._received.setdefault(frm, {})
        if message.b:
            header = _unpack(bytes(message.payload[: message.b]))
            if message.a >= 0:
                known[message.a] = header
            return header
        # the description was sent in full in a message with another tag, which has arrived but was not received yet
        if message.a not in known:
            for other in self._mesh.early.waiting(frm, RingMessage.PARCEL):
                if other.b and other.a >= 0:
                    self._read_header(frm, other)
        return known[message.a]

    # Sending while this rank computes

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_queued, name="parcels", daemon=True)
            self._thread.start()
        self._due.set()

    def _send_queued(self) -> None:
        """Send queued messages until the connections of the ring (the mesh) are closed or have failed.

        This runs in a thread of its own. An error here makes the mesh fail. The thread then ends, and the next call of
        the mesh from the worker's thread raises the error.
        """
        with suppress(LinkError):
            while not self._over:
                self._due.wait()
                with self._mesh.guarded():
                    links = self._unsent()
                    watch = poll()
                    for _, link in links:
                        watch.register(link.fileno(), link.interest)
                    if not links:
                        self._due.clear()
                        continue
                watch.poll(int(1000 * _SEND_SECONDS))

    def _unsent(self) -> list[tuple[int, Link]]:
        """Send the queued bytes that the connections accept; return the (rank, connection) pairs with bytes left."""
        waiting = []
        for peer in list(self._pending):
            link = self._mesh.link(peer)
            link.absorb()
            link.flush()
            # `absorb` may have read control messages, which a later poll of the descriptor would not report
            self._mesh.listen(peer)
            if link.queued:
                waiting.append((peer, link))
            else:
                self._pending.discard(peer)
        return waiting

    def _end(self) -> None:
        self._over = True
        self._due.set()


def _collect_bytes(tensors: Sequence[Tensor], header: TensorHeader, head: bytes) -> Buffer:
    """Return a message's payload: the memory of the tensor if there is one tensor and no `head`, else a copy of all."""
    if not head and len(tensors) == 1:
        return _view_bytes(tensors[0])
    whole = torch.empty(len(head) + header.size, dtype=torch.uint8)
    into = whole.numpy().data
    into[: len(head)] = head
    for t, (*_, offset) in zip(tensors, header.parts, strict=True):
        if t.numel():
            at = len(head) + offset
            into[at : at + t.nbytes] = _view_bytes(t)
    return into


def _view_bytes(t: Tensor) -> memoryview:
    if not t.numel():
        return memoryview(b"")
    flat = t.detach()
    if flat.device.type != "cpu" or flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg().cpu()
    return flat.contiguous().view(-1).view(torch.uint8).numpy().data


def _pack(header: TensorHeader) -> bytes:
    """Return the description as JSON, padded to a multiple of `_ALIGN` bytes."""
    parts = [[_CODES[dtype], list(shape), wants, offset] for dtype, shape, wants, offset in header.parts]
    text = json.dumps([header.form, parts, header.size]).encode()
    return text.ljust(-(-len(text) // _ALIGN) * _ALIGN)


def _unpack(raw: bytes) -> TensorHeader:
    form, parts, size = json.loads(raw)
    return TensorHeader(form, tuple((_DTYPES[code], tuple(shape), wants, at) for code, shape, wants, at in parts), size)
