"""A worker's requests to a server on the same host, through shared memory: nothing is sent on the connection.

A mailbox is a block of shared memory that holds one request at a time: its kind, step and weight, and a *head* with one
row for each segment. A row has the segment, its generation, the place and size of the request's piece, and the place
and size of the answer. A *place* is the number of one of the worker's shared memories, and an offset in that memory.
The worker writes its pieces there, and the server writes the rows of tables there. The worker reads the values of a
dense segment in the server's own shared memory (`SharedSlice`). Any other answer (an error, STALE) is sent as a
message, and the answer in the mailbox says so.

Each side sleeps until its wakeup descriptor (an eventfd) is written. Before it sleeps, a side sets a word in shared
memory (the server ASLEEP, the worker WAITS), and then checks once more for work. The other side writes the descriptor
only if this word is set. While a request is unanswered, the worker must not change the piece, and must not use the
place of the answer. A worker that gives up an unanswered request uses new memory from then on (`WorkerMemory.retire`).
"""

from __future__ import annotations

import os
import struct
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from rayps_client.errors import LinkError
from torch import Tensor

from rayps.comm.link import memory as link_memory
from rayps.comm.link.memory import Memory
from rayps.comm.link.shared_memory_link import SharedLink
from rayps.comm.link.wakeup import Wakeup
from rayps.ps.protocol.rows import Bytes, ShardRows
from rayps.tensors.device import DeviceEvent

# keys under which one side of a link offers a memory or a descriptor to the other side
MAILBOX, SERVER, WAKEUP, MEMORY, SEGMENT = 16, 17, 18, 1 << 10, 1 << 20

MAILBOX_BYTES = 1 << 14
# indices of int64 words in a mailbox: the tag of the last request, before the request itself; the tag of the last
# answer, before the answer itself; and a word that is 1 while the worker sleeps
ASKED, ANSWERED, WAITS = 0, 8, 16
HEAD = 256  # byte at which the head begins
ROW = 6  # words in a row of the head
ROWS = (MAILBOX_BYTES - HEAD) // (8 * ROW)  # most rows of a head
REQUEST = struct.Struct("<5qd")  # kind, number of the head, rows in the head, step, patience in ms, weight
ANSWER = struct.Struct("<5q")  # version, lead, durable, BY_MEMORY or BY_MESSAGE, offers by the server so far
_REQUEST_AT, _ANSWER_AT = 8 * (ASKED + 1), 8 * (ANSWERED + 1)
BY_MEMORY, BY_MESSAGE = 0, 1  # where the values of an answer are
ASLEEP = 0  # index of a word in a server's page; the word is 1 while the server sleeps
OFFSET_BITS = 40  # low bits of a place, which hold the offset; the bits above are the memory's number

CHUNK_BYTES = 1 << 22  # smallest size of a memory for pieces
LIMIT_BYTES = 1 << 28  # most bytes of all memories for pieces of one session
ALIGN = 64  # bytes
TRIES = 20  # attempts to read a slice between two steps of the server, before the server is asked for a copy


class MailboxCall(NamedTuple):
    """A request, as the server reads it from a mailbox."""

    tag: int
    kind: int
    step: int
    patience: int
    weight: float


class _Chunk:
    """One shared memory of a worker, from which blocks are allocated unless `blocks` is False.

    A block that is freed is used again for a block of the same size.
    """

    def __init__(self, memory: Memory, blocks: bool) -> None:
        self.memory, self.size = memory, memory.size
        self.array: Bytes = np.frombuffer(memory.view, np.uint8)
        self.address = int(self.array.__array_interface__["data"][0])
        self.usable = blocks
        self._top = 0
        self._free: dict[int, deque[int]] = {}

    def allocate_block(self, size: int) -> int:
        """Allocate a block of this size; return its offset, or -1 if there is no room."""
        free = self._free.get(size)
        if free:
            return free.popleft()
        if self._top + size > self.size:
            return -1
        self._top += size
        return self._top - size

    def free_block(self, size: int, offset: int) -> None:
        """Free the block of this size at `offset`."""
        self._free.setdefault(size, deque()).append(offset)


class WorkerMemory:
    """The shared memories of one session, in which servers of this host read pieces and write answers."""

    def __init__(self) -> None:
        """Create the wakeup descriptor. Memories are created when they are needed.

        Raises LinkError if shared memory is not available.
        """
        self.wakeup = Wakeup()
        self.chunks: list[_Chunk] = []
        self.gradients: GradientBuffer | None = None
        self._bytes = 0

    def gradient(self, size: int, dtype: torch.dtype) -> GradientBuffer:
        """Return the memory for the dense vector's gradient, of `size` elements; create it at the first call."""
        if self.gradients is None:
            self.gradients = GradientBuffer(size, dtype)
            self.chunks.append(_Chunk(self.gradients.memory, blocks=False))
        return self.gradients

    def allocate(self, size: int) -> Bytes:
        """Return `size` bytes for a piece or an answer, not zeroed. They are reused when no reference to them is left.

        Beyond LIMIT_BYTES the bytes are in ordinary memory, which servers cannot access.
        """
        whole = round_up(size)
        for chunk in self.chunks:
            if chunk.usable and (offset := chunk.allocate_block(whole)) >= 0:
                return self._view_block(chunk, whole, offset, size)
        if self._bytes + whole > LIMIT_BYTES:
            return np.empty(size, np.uint8)
        chunk = _Chunk(Memory.create(max(CHUNK_BYTES, 2 * whole)), blocks=True)
        self._bytes += chunk.size
        self.chunks.append(chunk)
        return self._view_block(chunk, whole, chunk.allocate_block(whole), size)

    @staticmethod
    def _view_block(chunk: _Chunk, whole: int, offset: int, size: int) -> Bytes:
        found: Bytes = np.frombuffer(chunk.memory.view, np.uint8, size, offset)
        weakref.finalize(found, chunk.free_block, whole, offset).atexit = False
        return found

    def place(self, piece: Bytes) -> int:
        """Return the place of a piece, as in the head of a request, or -1 if the piece is in none of these memories."""
        address = int(piece.__array_interface__["data"][0])
        for number, chunk in enumerate(self.chunks):
            if address - chunk.address >= 0 and address + len(piece) <= chunk.address + chunk.size:
                return number << OFFSET_BITS | address - chunk.address
        return -1

    def number(self, gradients: GradientBuffer) -> int:
        """Return the index in `chunks` of the memory of `gradients`."""
        return next(i for i, chunk in enumerate(self.chunks) if chunk.memory is gradients.memory)

    def retire(self) -> None:
        """Stop using the present memories, which a server may still read and write; later calls create new ones."""
        for chunk in self.chunks:
            chunk.usable = False
            chunk.address = 1 << 62  # an address that no piece has: `place` finds nothing here from now on
        self._bytes = 0
        if self.gradients is not None:
            self.gradients.close()
            self.gradients = None

    def close(self) -> None:
        """Close the descriptors. Arrays in the memories stay valid. Safe to call twice."""
        self.wakeup.close()
        if self.gradients is not None:
            self.gradients.close()
            self.gradients = None
        self.chunks = []


def round_up(size: int) -> int:
    """Return the size of a block for `size` bytes: at most an eighth larger, so that freed blocks are used again."""
    if size <= 8 * ALIGN:
        return -(-max(size, 1) // ALIGN) * ALIGN
    step = 1 << (size - 1).bit_length() - 4
    return -(-size // step) * step


class WorkerMailbox:
    """The worker's side of a mailbox: offers it to the server at the other end of `link`, and writes requests to it."""

    def __init__(self, link: SharedLink, memory: WorkerMemory) -> None:
        """Create the mailbox and offer it on the link.

        Raises LinkError if shared memory cannot be created, or the link is lost.
        """
        self.link, self.memory = link, memory
        self._block = Memory.create(MAILBOX_BYTES)
        self._view, self.words = self._block.view, self._block.view.cast("q")
        link.offer(MAILBOX, self._block)
        link.offer_descriptor(WAKEUP, memory.wakeup.fileno())
        self._block.close_descriptor()
        self.tag = 0  # tag of the last request
        self._peer_wakeup: Wakeup | None = None
        self._asleep: memoryview | None = None
        self._offered = 0  # number of memories that were offered
        self._head, self._number, self._rows = b"", 0, 0
        self._slices: dict[int, tuple[memoryview, Bytes]] = {}

    @property
    def ready(self) -> bool:
        """Whether the server reads requests from this mailbox: it has offered its page, which it does before JOINED."""
        if self._asleep is None and SERVER in self.link.memories and WAKEUP in self.link.descriptors:
            self._asleep = self.link.memories.pop(SERVER).view.cast("q")
            self._peer_wakeup = Wakeup(self.link.descriptors.pop(WAKEUP))
        return self._asleep is not None

    @property
    def answered(self) -> bool:
        """Whether the last request is answered, so that the next one may be written."""
        found: bool = self.words[ANSWERED] == self.tag
        return found

    def offer(self) -> bool:
        """Offer the server the memories that were created since the last call; return False if the link is busy."""
        chunks = self.memory.chunks
        while self._offered < len(chunks):
            if chunks[self._offered].memory.fd >= 0:
                self.link.offer(MEMORY + self._offered, chunks[self._offered].memory)
            self._offered += 1
        return self.link.flush() and not self.link.queued

    def put(self, tag: int, kind: int, head: bytes, step: int, patience: int, weight: float) -> None:
        """Write a request. Call `offer` first; afterwards call a memory fence, then `ring`."""
        if head is not self._head:
            if head != self._head:
                self._number += 1
                self._view[HEAD : HEAD + len(head)] = head
            self._head, self._rows = head, len(head) // (8 * ROW)
        REQUEST.pack_into(self._view, _REQUEST_AT, kind, self._number, self._rows, step, patience, weight)
        self.tag = self.words[ASKED] = tag

    def ring(self) -> None:
        """Wake the server if it sleeps."""
        if self._peer_wakeup is not None and self._asleep is not None and self._asleep[ASLEEP]:
            self._peer_wakeup.wake()

    def answer(self) -> tuple[int, int, int, int, int]:
        """Return the answer to the last request: version, lead, durable, BY_MEMORY or BY_MESSAGE, and offers.

        The offers are the number of memories that the server had offered on the link before it answered.
        """
        found: tuple[int, int, int, int, int] = ANSWER.unpack_from(self._view, _ANSWER_AT)
        return found

    @property
    def readable(self) -> bool:
        """Whether the answer's values can be read in memory.

        They can if the answer is BY_MEMORY, and all memories that the server offered before its answer have arrived.
        """
        _, _, _, where, offers = self.answer()
        if where != BY_MEMORY:
            return False
        if self.link.offers_taken < offers:
            self.link.absorb()
        return self.link.offers_taken >= offers

    def slice(self, segment: int) -> tuple[memoryview, Bytes]:
        """Return a segment's words (such as STEPS) and values, in the server's memory.

        Raises LinkError if the server did not offer the segment's memory.
        """
        fresh = self.link.memories.pop(SEGMENT + segment, None)
        if fresh is not None:
            params = np.frombuffer(fresh.view[PAGE:], np.uint8) if fresh.size > PAGE else np.empty(0, np.uint8)
            self._slices[segment] = fresh.view[:PAGE].cast("q"), params
        found = self._slices.get(segment)
        if found is None:
            raise LinkError(
                f"{self.link.peer!r} answered in shared memory, but did not offer its memory of segment {segment}",
                peer=self.link.peer,
            )
        return found

    def place_of(self, segment: int, into: Any, rows: ShardRows | None = None) -> tuple[memoryview, Bytes, Bytes]:
        """Return a segment's words and values, as `slice` does, and the buffer `into` as an array of bytes.

        `into` has room for all values, or for `rows` if given. Raises LinkError if the server did not offer the
        segment, or the segment has another size than `into`.
        """
        words, values = self.slice(segment)
        place = array_of(into)
        if len(values) != len(place) and rows is None:
            raise LinkError(
                f"{self.link.peer!r} holds {len(values)} bytes of segment {segment} where {len(place)} were expected",
                peer=self.link.peer,
                given=len(values),
                expected=len(place),
            )
        return words, values, place

    def read(self, segment: int, into: Any, rows: ShardRows | None = None, *, mixed_versions: bool = False) -> bool:
        """Copy a segment's values, or `rows` of them, to `into`; return whether the copy is valid.

        All values are of one version, and the copy is not valid if the server's optimizer stepped during every attempt.
        With `mixed_versions` there is one attempt, and values that are copied during a step may be of two versions.
        Raises LinkError as `place_of`.
        """
        words, values, place = self.place_of(segment, into, rows)
        if not mixed_versions:
            return copy_whole(words, values, place, rows)
        copy_now(values, place, rows)
        return True

    def start(self, segment: int, into: Landing, *, mixed_versions: bool = False) -> LandingCopy | None:
        """Start a copy of a segment's values to a landing; return None if `read` must copy them.

        Raises LinkError as `place_of`.
        """
        words, values, _ = self.place_of(segment, into)
        before = words[STEPS]
        if before & 1 and not mixed_versions:
            return None
        done = into.receive(values, lasting=True)
        if done is None:  # the host has copied the values
            return LandingCopy(None, -1, words, values, into) if mixed_versions or words[STEPS] == before else None
        return LandingCopy(done, -1 if mixed_versions else before, words, values, into)

    def close(self) -> None:
        """Close the wakeup descriptor. The system frees the memory when no process uses it."""
        if self._peer_wakeup is not None:
            self._peer_wakeup.close()


class LandingCopy(NamedTuple):
    """A copy of a segment's values to a `Landing`, which a device makes while the host continues."""

    event: DeviceEvent | None  # after the copy; None if the copy is done
    steps: int  # STEPS before the copy; -1 if the copy is valid in any case
    words: memoryview  # the segment's words
    values: Bytes  # the segment's values in the server's memory
    place: Landing

    @property
    def done(self) -> bool:
        """Whether the copy is done."""
        return self.event is None or self.event.done

    def wait(self) -> bool:
        """Wait until the copy is done, and repeat it if it is not valid; return whether it is valid then."""
        if self.event is not None:
            self.event.wait()
        return self.steps < 0 or self.words[STEPS] == self.steps or copy_whole(self.words, self.values, self.place)


def copy_whole(words: memoryview, values: Bytes, place: Bytes | Landing, rows: ShardRows | None = None) -> bool:
    """Copy `values`, or `rows` of them, to `place`, all of one version. `words` are the segment's words.

    Return False if the server's optimizer stepped during every attempt.
    """
    for _ in range(TRIES):
        before = words[STEPS]
        if not before & 1:
            copy_now(values, place, rows)
            if words[STEPS] == before:
                return True
        else:
            os.sched_yield()
    return False


def copy_now(values: Bytes, place: Bytes | Landing, rows: ShardRows | None) -> None:
    """Copy `values`, or `rows` of them, to `place`, even if the server's optimizer steps during the copy."""
    if isinstance(place, Landing):
        done = place.receive(values, lasting=True)
        if done is not None:
            done.wait()
    elif rows is None:
        place[:] = values
    else:
        rows.copy(values, place)


class Landing(ABC):
    """A place for the pulled values of a whole dense segment that is not memory of the host, such as on a device."""

    @abstractmethod
    def __len__(self) -> int:
        """The size of the values in bytes."""

    @abstractmethod
    def receive(self, values: Bytes, *, lasting: bool) -> DeviceEvent | None:
        """Copy `values` to this place. Return None if they have been read, else an event before which they are.

        If `lasting`, `values` are memory of a server of this host, in which the next values will be too. Without
        `lasting`, the result is None.
        """


def array_of(buffer: Any) -> Any:
    """Return a buffer as an array of bytes that shares its memory; return a `Landing` itself."""
    if isinstance(buffer, Landing):
        return buffer
    if isinstance(buffer, np.ndarray):
        return buffer if buffer.dtype == np.uint8 and buffer.ndim == 1 else buffer.reshape(-1).view(np.uint8)
    return np.frombuffer(buffer, np.uint8) if len(buffer) else np.empty(0, np.uint8)


def open_mailbox(link: object, memory: WorkerMemory | None) -> WorkerMailbox | None:
    """Create a mailbox and offer it on `link`; return None if the two ends of the link cannot share memory."""
    if memory is None or not AVAILABLE or not isinstance(link, SharedLink):
        return None
    return WorkerMailbox(link, memory)


class ServerMailbox:
    """The server's side of a mailbox: reads requests from it, and writes answers to it."""

    def __init__(self, link: SharedLink, page: Memory, wakeup: int) -> None:
        """Use the mailbox that the worker has offered on `link`.

        Offer the worker the server's `page`, which has the word ASLEEP, and its descriptor `wakeup`.
        """
        self.link = link
        block = link.memories.pop(MAILBOX)
        self._peer_wakeup = Wakeup(link.descriptors.pop(WAKEUP))
        self._view, self.words = block.view, block.view.cast("q")
        self.seen = 0  # tag of the last request that was read
        self.open = 0  # tag of the request that is not answered yet; 0 if there is none
        self.number, self._rows = 0, list[list[int]]()  # number and rows of the head that was read last
        self._memories: dict[int, Memory] = {}
        self.offered: dict[int, object] = {}  # segment -> the memory that the worker was offered
        link.offer(SERVER, page, read_only=True)
        link.offer_descriptor(WAKEUP, wakeup)

    def read_request(self) -> tuple[MailboxCall, list[list[int]], bool]:
        """Read the new request; return it, the rows of its head, and whether the head differs from the last one."""
        tag = self.begin()
        kind, number, rows, step, patience, weight = self.request()
        fresh = number != self.number
        if fresh:
            if not 0 <= rows <= ROWS:
                raise ValueError(f"a request in a mailbox names {rows} segments, and a mailbox has room for {ROWS}")
            words = np.frombuffer(self._view, np.int64, rows * ROW, HEAD)
            self.number, self._rows = number, words.reshape(rows, ROW).tolist()
        return MailboxCall(tag, kind, step, patience, weight), self._rows, fresh

    def request(self) -> tuple[int, int, int, int, int, float]:
        """Read the request: kind, number of the head, rows in the head, step, patience, weight."""
        found: tuple[int, int, int, int, int, float] = REQUEST.unpack_from(self._view, _REQUEST_AT)
        return found

    def begin(self) -> int:
        """Mark the new request as the open one, and return its tag."""
        tag: int = self.words[ASKED]
        self.seen = self.open = tag
        return tag

    def bytes_at(self, place: int, size: int) -> memoryview:
        """Return `size` bytes at a place in the worker's memories. Raises ValueError if they were not offered."""
        if not size:
            return memoryview(b"")
        number, offset = place >> OFFSET_BITS, place & (1 << OFFSET_BITS) - 1
        memory = self._memories.get(number)
        if memory is None:
            if MEMORY + number not in self.link.memories:
                self.link.absorb()
            found = self.link.memories.pop(MEMORY + number, None)
            if found is None:
                raise ValueError(f"a request of {self.link.peer!r} names memory {number}, which it did not offer")
            memory = self._memories[number] = found
        if size < 0 or offset + size > memory.size:
            raise ValueError(
                f"a request of {self.link.peer!r} names {size} bytes from byte {offset} on, in memory {number} of "
                f"{memory.size} bytes"
            )
        return memory.view[offset : offset + size]

    def tensor_at(self, place: int, size: int, dtype: torch.dtype) -> Tensor:
        """Return `size` bytes at a place in the worker's memories as elements of `dtype`.

        Raises ValueError as `bytes_at`, or if the bytes are not a whole number of elements.
        """
        if size % dtype.itemsize:
            raise ValueError(f"a piece of {size} bytes is not a whole number of {dtype} elements")
        view = self.bytes_at(place, size)
        return torch.frombuffer(view, dtype=dtype) if size else torch.empty(0, dtype=dtype)

    def offer(self, segment: int, memory: Memory) -> None:
        """Offer a segment's memory to the worker, which may then read it."""
        self.link.offer(SEGMENT + segment, memory, read_only=True)

    def answer(self, version: int, lead: int, durable: int, where: int = BY_MEMORY) -> None:
        """Write the answer to the open request. Send all offers first; afterwards call a memory fence, then `wake`."""
        ANSWER.pack_into(self._view, _ANSWER_AT, version, lead, durable, where, self.link.offers_made)
        self.words[ANSWERED], self.open = self.open, 0

    def wake(self) -> None:
        """Wake the worker if it sleeps. Call a memory fence first."""
        if self.words[WAITS]:
            self._peer_wakeup.wake()

    def close(self) -> None:
        """Close the worker's wakeup descriptor. The system frees the memory when no process uses it."""
        self._peer_wakeup.close()


def offered(link: object) -> bool:
    """Return whether the worker at the other end of a link has offered a mailbox."""
    return isinstance(link, SharedLink) and MAILBOX in link.memories and WAKEUP in link.descriptors


def head_of(rows: Sequence[Sequence[int]]) -> bytes:
    """Encode the head of a request from its rows."""
    return np.array(rows, np.int64).tobytes()


# The other process must see the words below change in the order in which they are written. Where the processor does not
# guarantee this, requests are sent as messages.
AVAILABLE = link_memory.AVAILABLE and link_memory.ORDERED

PAGE = 4096
SMALL = 1 << 18  # elements of a gradient up to which numpy copies it faster than torch
# indices of int64 words in the first page of a slice
STEPS = 0  # twice the number of optimizer steps, plus one during a step


class SharedSlice:
    """A shard's parameters, in shared memory where it is available, so that workers of this host can read them.

    With `private` the parameters stay in the given tensor, which no other process can read.
    """

    def __init__(self, params: Tensor, *, private: bool = False) -> None:
        params = params.detach().reshape(-1)
        size = params.numel() * params.element_size()
        self.memory = None
        if private:
            self.words, self.params = memoryview(bytearray(8 * (STEPS + 1))).cast("q"), params
            return
        self.memory = Memory.create(PAGE + size) if AVAILABLE else None
        if self.memory is None:
            self.words = memoryview(bytearray(PAGE)).cast("q")
            self.params = params.clone()
            return
        self.words = self.memory.view[:PAGE].cast("q")
        self.params = tensor_in(self.memory, params.dtype, params.numel(), at=PAGE)
        self.params.copy_(params)
        self.memory.seal_writes()


def tensor_in(memory: Memory, dtype: torch.dtype, count: int, at: int = 0) -> Tensor:
    """Return `count` elements of a shared memory, from byte `at` on."""
    if count == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory.view, dtype=dtype, count=count, offset=at)


class GradientBuffer:
    """A worker's memory for its gradient, from which servers of this host read their parts without a copy."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.memory = Memory.create((size + 1) * dtype.itemsize)  # the system allocates a page at its first write
        self.gradient = tensor_in(
            self.memory, dtype, size + 1
        )  # one element more: a ring's gradients have the number of samples there
        self.whole = self.gradient[:size]
        # numpy is faster for a few elements, and has no bfloat16; torch copies many elements in several threads
        self._array = self.whole.numpy() if size <= SMALL and dtype != torch.bfloat16 else None
        self._start = self.gradient.data_ptr()

    def holds(self, vector: Tensor, lo: int) -> bool:
        """Return whether `vector` is stored in this memory already, beginning at element `lo`."""
        return (
            vector.data_ptr() == self._start + lo * self.gradient.element_size()
            and vector.dtype == self.gradient.dtype
            and vector.is_contiguous()
        )

    def copy_in(self, vector: Tensor, target: Tensor) -> None:
        """Copy a gradient into `mine`, which is `whole` or a part of this memory."""
        if self._array is not None and target is self.whole and vector.dtype == target.dtype and vector.is_cpu:
            self._array[:] = vector.numpy() if vector.dim() == 1 else vector.numpy().reshape(-1)
        else:
            target.copy_(vector if vector.dim() == 1 else vector.reshape(-1))

    def close(self) -> None:
        """Close the descriptor. Tensors in the memory stay valid."""
        self.memory.close()
