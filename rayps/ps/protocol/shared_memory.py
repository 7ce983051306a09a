"""What a worker and a shard of one host hold together: the shard's slice, the worker's gradient, a box of requests.

A request is a few numbers in the box, and its payload lies in the worker's gradient; the answer is a few numbers
beside it, and its payload lies in the shard's slice: each payload is copied once, or not at all. A bell (a counter in
the kernel) is rung only where the other side sleeps: who lies down says so first and then looks once more.

A box holds one request. Its payload, and what the request points to, may change again once it is answered. The slice
has a counter that is odd while the shard steps: a reader who finds it changed has read a mixture, and knows.
"""

from __future__ import annotations

import os
import struct

import numpy as np
import torch
from torch import Tensor

from rayps.comm.link import Link
from rayps.comm.link import memory as link_memory
from rayps.comm.link.memory import Fence, Memory
from rayps.comm.link.shared_memory_link import SharedLink

# The words below are read in the order in which they are written; where that is not so, messages do the work.
AVAILABLE = link_memory.AVAILABLE and link_memory.ORDERED

SLICE, BOX, GRADIENT, BELL = 1, 2, 3, 4  # keys under which memories and bells are offered

PAGE = 4096
SMALL = 1 << 18  # elements
# words (int64) of a slice's first page
STEPS = 0  # twice the number of steps, plus one while one is being taken
ASLEEP = 8  # the shard waits for its bell
# words of a box
ASKED, ANSWERED, LEAD, VERSION, SAYS, DURABLE, WAITS = 0, 8, 9, 10, 11, 12, 16
IN_MEMORY, BY_MESSAGE = 0, 1  # where an answer is (the word SAYS)
REQUEST = struct.Struct("<4qd")  # kind, a, b, elements of the payload, weight; behind the word ASKED
ANSWER = struct.Struct("<4q")  # behind the word ANSWERED
REQUEST_AT, ANSWER_AT = 8 * (ASKED + 1), 8 * (ANSWERED + 1)


class SharedSlice:
    """A shard's parameters, in memory that workers of this host can read where there is such memory.

    With `private` they stay in the memory in which they are given, and nobody else reads it.
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
    """`count` elements of a shared segment, from byte `at`."""
    if count == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory.view, dtype=dtype, count=count, offset=at)


class GradientBuffer:
    """A worker's own: the gradient that shards of this host read where it lies, and the bell that they ring."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.memory = Memory.create((size + 1) * dtype.itemsize)  # pages are taken when they are first touched
        self.gradient = tensor_in(self.memory, dtype, size + 1)  # one more: a ring's gradients have it for the samples
        self.whole = self.gradient[:size]
        # numpy is the shorter way for a few elements, and has no bfloat16; torch copies many in several threads
        self._array = self.whole.numpy() if size <= SMALL and dtype != torch.bfloat16 else None
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._start = self.gradient.data_ptr()

    def holds(self, vector: Tensor, lo: int) -> bool:
        """Whether a vector lies in the gradient's memory already, at element `lo`."""
        return (
            vector.data_ptr() == self._start + lo * self.gradient.element_size()
            and vector.dtype == self.gradient.dtype
            and vector.is_contiguous()
        )

    def lay(self, vector: Tensor, mine: Tensor) -> None:
        """Copy a gradient into `mine`, which is `whole` or a part of the gradient's memory."""
        if self._array is not None and mine is self.whole and vector.dtype == mine.dtype and vector.is_cpu:
            np.copyto(self._array, vector.numpy().reshape(-1))
        else:
            mine.copy_(vector if vector.dim() == 1 else vector.reshape(-1))

    def offer(self, link: SharedLink) -> Memory:
        """Let a shard use this desk; the box that belongs to this link."""
        box = Memory.create(PAGE)
        link.offer(BOX, box)
        link.offer(GRADIENT, self.memory)
        link.offer_descriptor(BELL, self.bell)
        return box

    def close(self) -> None:
        """Give up the memory; what was given out as a tensor stays good."""
        self.memory.close()
        os.close(self.bell)
        self.bell = -1


class RequestMailbox:
    """The shard's side of a box: takes requests out and puts answers in."""

    def __init__(self, link: SharedLink, like: Tensor, lo: int) -> None:
        """Take over what the worker has offered. `like` is the shard's slice, which begins at element `lo`."""
        box, gradient = link.memories.pop(BOX), link.memories.pop(GRADIENT)
        self._bell = link.descriptors.pop(BELL)
        self._view, self.words = box.view, box.view.cast("q")
        self._fence = Fence()
        self.seen = 0  # the last request that was taken out
        self.elements = like.numel()
        self.gradient = tensor_in(gradient, like.dtype, like.numel(), at=lo * like.element_size())

    def take(self) -> tuple[int, int, int, int, float]:
        """The new request: kind, a, b, elements of its payload, weight."""
        self.seen = self.words[ASKED]
        found: tuple[int, int, int, int, float] = REQUEST.unpack_from(self._view, REQUEST_AT)
        return found

    def value(self, offset: int, count: int) -> Tensor:
        """The payload, where it lies. Raises ValueError."""
        if offset == 0 and count == self.elements:
            return self.gradient
        if offset < 0 or count < 0 or offset + count > self.elements:
            raise ValueError(f"a push of {count} elements at {offset} does not fit into {self.elements}")
        return self.gradient[offset : offset + count]

    def answer(self, tag: int, lead: int, version: int, durable: int, says: int = IN_MEMORY) -> None:
        """Answer the request; `wake` must follow."""
        ANSWER.pack_into(self._view, ANSWER_AT, lead, version, says, durable)
        self.words[ANSWERED] = tag

    def wake(self) -> None:
        """Ring where the worker sleeps."""
        self._fence()
        if self.words[WAITS]:
            os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Give up the bell; the memory goes with its last reader."""
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1


def offered(link: Link) -> bool:
    """Whether the worker at the other end has offered its desk and a box."""
    return isinstance(link, SharedLink) and BOX in link.memories and GRADIENT in link.memories
