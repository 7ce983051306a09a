"""A worker's committed states in shared memory, which remains while another process holds its descriptor.

After each step the worker copies its state (parameters, the optimizer's moments, buffers, random state) into one of a
few slots in turn. A slot is one unnamed segment of shared memory. The round's number is written last and seals the
slot. If the process is killed during the copy, the states of the earlier rounds are intact. For a backup on the same
host, only the segment's descriptor is passed. For a backup on another host, the segment's bytes are sent.

The rounds of a grid's workers differ by at most one: a worker that has received the mean gradient of round t has
stepped, and a worker that has not received it has not. Therefore two slots are enough for all workers to return to a
common round.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import threading
from dataclasses import dataclass, field
from typing import TypedDict

import torch
from rayps_client.errors import LinkError
from rayps_client.values import Buffer
from torch import Tensor

from rayps.comm.link.memory import Memory
from rayps.core import failpoint
from rayps.core.job.records import Point
from rayps.tensors.optim import ParamState
from rayps.tensors.training_state import BUFFER, PARAMS, RANDOM, TrainingState, below

SLOTS = 2
_MAGIC = b"raypsvlt"
# magic, base generation, round (-1 if not sealed), bytes of the tensors' table, offset of the facts, bytes of the facts
_HEAD = struct.Struct("<8sqqqqq")
_ROUND = 16  # offset of the round's number in the header
_ALIGN = 64
OWN = (BUFFER, RANDOM)  # prefixes of the names of tensors that differ between a worker and its counterparts


class StateFacts(TypedDict, total=False):
    """The JSON-ready values of a state, which are stored after its tensors."""

    numbers: dict[str, ParamState]  # from a parameter's name to the numbers in its optimizer state
    points: list[Point]  # points that the driver may not have received


@dataclass(slots=True)
class CommittedState:
    """A worker's state after `round` batches: a dict of named tensors, and JSON-ready facts.

    `base_generation` is the newest generation, at the time of the state, that started from a snapshot: see
    `StateSlots`.
    """

    base_generation: int
    round: int
    tensors: dict[str, Tensor]
    facts: StateFacts = field(default_factory=StateFacts)

    @property
    def whole(self) -> bool:
        """Whether the state is complete. If False, it is the part that a counterpart lacks."""
        return PARAMS in self.tensors

    @property
    def state(self) -> TrainingState:
        """The worker's state, if it is whole."""
        return TrainingState.of(self.tensors, self.facts.get("numbers", {}))

    @property
    def buffers(self) -> dict[str, Tensor]:
        """A dict of the model's buffers, with their names as keys."""
        return below(BUFFER, self.tensors)

    @property
    def rng(self) -> Tensor | None:
        """The state of the random generator, or None if this state does not include it."""
        return self.tensors.get(RANDOM)


class StateSlots:
    """The slots with the newest states of one worker. Any thread may read, and one thread writes.

    Each state has a *base generation*: the newest generation that started from a snapshot. A generation that starts
    from committed states (a rebuild) keeps the base generation of these states. After all workers have returned to a
    snapshot, states of earlier base generations cannot be used.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        """Create empty slots. Raises LinkError if the system has no shared memory."""
        self._slots = [_Slot() for _ in range(slots)]
        self._lock = threading.Lock()
        self._base, self._writer = -1, 0
        self.bytes = 0  # bytes of the newest state

    @property
    def descriptors(self) -> list[int]:
        """The descriptors of the slots, for `SharedLink.offer_descriptor`."""
        return [slot.fd for slot in self._slots]

    def open(self, base_generation: int, upto: int, writer: int) -> None:
        """Allow commits only by generation `writer`. Drop states of another base generation or above round `upto`."""
        with self._lock:
            self._base, self._writer = base_generation, writer
            for slot in self._slots:
                found = slot.sealed()
                if found is not None and (found[0] != base_generation or found[1] > upto):
                    slot.unseal()

    def refuse_commits(self) -> None:
        """Refuse commits until `open`."""
        with self._lock:
            self._writer = 0

    def commit(self, writer: int, rounds: int, tensors: dict[str, Tensor], facts: StateFacts) -> bool:
        """Store a state in place of the oldest one, unless a slot has this state already. Return True.

        If generation `writer` has ended, store nothing and return False.

        Raises:
            LinkError: the system has too little shared memory.
            TypeError: a fact cannot be written as JSON.
        """
        with self._lock:
            if writer != self._writer:
                return False
            if not any(slot.sealed() == (self._base, rounds) for slot in self._slots):
                oldest = min(self._slots, key=_Slot.age)
                self.bytes = oldest.write(self._base, rounds, tensors, json.dumps(facts).encode())
        return True

    def rounds(self) -> list[int]:
        """Return the rounds of the states in the slots, ascending."""
        with self._lock:
            found = [slot.sealed() for slot in self._slots]
            return sorted(at[1] for at in found if at is not None and at[0] == self._base)

    def blob(self, rounds: int) -> memoryview | None:
        """Return a view of the bytes of the state after `rounds` rounds, or None if no slot has this state.

        The view is valid until the slot is overwritten.
        """
        with self._lock:
            for slot in self._slots:
                if slot.sealed() == (self._base, rounds):
                    return slot.view
        return None

    def read(self, rounds: int) -> CommittedState | None:
        """Return a copy of the state after `rounds` rounds, or None if no slot has this state."""
        blob = self.blob(rounds)
        return None if blob is None else parse(bytes(blob))

    def close(self) -> None:
        """Release the memory in this process. A worker with a descriptor can still read it. Safe to call twice."""
        with self._lock:
            self._writer = 0
            for slot in self._slots:
                slot.close()


class _Slot:
    """One segment of shared memory, and the position of each tensor in it."""

    def __init__(self) -> None:
        self._memory = Memory.create(mmap.PAGESIZE)
        self._shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._places: list[Tensor] = []
        self._table = b""
        self._end = 0

    @property
    def fd(self) -> int:
        return self._memory.fd

    @property
    def view(self) -> memoryview:
        return self._memory.view[: _read_size(self._memory.view)]

    def sealed(self) -> tuple[int, int] | None:
        """Return the base generation and round of the slot's state, or None if the slot is not sealed."""
        return _read_seal(self._memory.view)

    def age(self) -> int:
        found = self.sealed()
        return -1 if found is None else found[1]

    def unseal(self) -> None:
        struct.pack_into("<q", self._memory.view, _ROUND, -1)

    def write(self, base_generation: int, rounds: int, tensors: dict[str, Tensor], facts: bytes) -> int:
        self.unseal()
        shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        if shapes != self._shapes or self._end + len(facts) > self._memory.size:
            self._lay_out(shapes, len(facts))
        view = self._memory.view
        with torch.no_grad():
            given = [tensor.detach() for tensor in tensors.values() if tensor.numel()]
            if all(tensor.device.type == "cpu" for tensor in given):
                torch._foreach_copy_(self._places, given)  # one call for hundreds of small tensors
            else:
                for place, tensor in zip(self._places, given, strict=True):
                    place.copy_(tensor)
        failpoint.passing("state slots: half a commit")
        view[self._end : self._end + len(facts)] = facts
        _HEAD.pack_into(view, 0, _MAGIC, base_generation, -1, len(self._table), self._end, len(facts))
        struct.pack_into("<q", view, _ROUND, rounds)
        return self._end + len(facts)

    def _lay_out(self, shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]], extra: int) -> None:
        sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in shapes.values()]
        kinds = [[name, str(dtype).removeprefix("torch."), list(shape)] for name, (dtype, shape) in shapes.items()]
        self._table = json.dumps(kinds).encode()
        at = _align(_HEAD.size + len(self._table))
        offsets = []
        for size in sizes:
            offsets.append(at)
            at = _align(at + size)
        self._end = at
        self._places = []
        self._grow(at + 2 * extra)
        view = self._memory.view
        view[_HEAD.size : _HEAD.size + len(self._table)] = self._table
        self._places = [
            torch.frombuffer(view, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)
            for (dtype, shape), offset in zip(shapes.values(), offsets, strict=True)
            if math.prod(shape)
        ]
        self._shapes = shapes

    def _grow(self, size: int) -> None:
        if size > self._memory.size:
            try:
                os.ftruncate(self._memory.fd, size)
                grown = Memory(os.dup(self._memory.fd), size)
            except OSError as error:
                words = f"cannot allocate {size} bytes of shared memory for a worker's state ({error.strerror})"
                raise LinkError(words, size=size) from error
            self._memory.close()
            self._memory = grown

    def close(self) -> None:
        self._places, self._shapes = [], {}
        self._memory.close()


def parse(blob: Buffer) -> CommittedState | None:
    """Return the state in a slot's bytes, or None if the slot is not sealed. Its tensors are views of the bytes.

    Raises LinkError if the bytes are damaged.
    """
    view = memoryview(blob)
    if view.readonly:  # torch needs writable memory
        view = memoryview(bytearray(view))
    found = _read_seal(view)
    if found is None:
        return None
    _, _, _, table, end, extra = _HEAD.unpack_from(view)
    try:
        tensors, at = dict[str, Tensor](), _align(_HEAD.size + table)
        for name, kind, shape in json.loads(bytes(view[_HEAD.size : _HEAD.size + table])):
            dtype, count = getattr(torch, kind), math.prod(shape)
            flat = torch.frombuffer(view, dtype=dtype, count=count, offset=at) if count else torch.empty(0, dtype=dtype)
            tensors[name] = flat.view(shape)
            at = _align(at + count * dtype.itemsize)
        facts = json.loads(bytes(view[end : end + extra]))
    except (ValueError, TypeError, AttributeError) as error:
        raise LinkError(f"a worker's state of {len(view)} bytes is damaged and cannot be read: {error}") from error
    return CommittedState(*found, tensors, facts)


def read_state(fd: int) -> CommittedState | None:
    """Return a copy of the state in another worker's segment, given the segment's descriptor.

    Return None if the segment is not sealed, or if its owner wrote to it during the copy.
    """
    size = os.fstat(fd).st_size
    memory = Memory(os.dup(fd), size, read_only=True)
    try:
        before = _read_seal(memory.view)
        if before is None:
            return None
        copy = bytearray(memory.view[: _read_size(memory.view)])
        return parse(copy) if _read_seal(memory.view) == before else None
    finally:
        memory.close()


def read_position(fd: int) -> tuple[int, int] | None:
    """Return the base generation and round of the state in another worker's segment, or None if it is not sealed."""
    return _read_seal(memoryview(os.pread(fd, _HEAD.size, 0)))


def pack(state: CommittedState, only: tuple[str, ...] | None = None) -> bytearray:
    """Return a state as a slot's bytes.

    `only`: prefixes of the names of the tensors to include; None means all tensors.
    """
    chosen = {k: v for k, v in state.tensors.items() if only is None or k.startswith(only)}
    facts = state.facts if only is None else {"points": state.facts.get("points", [])}
    slot = _Slot()
    try:
        size = slot.write(state.base_generation, state.round, chosen, json.dumps(facts).encode())
        return bytearray(slot.view[:size])
    finally:
        slot.close()


def _read_seal(view: memoryview) -> tuple[int, int] | None:
    if len(view) < _HEAD.size:
        return None
    magic, base_generation, rounds, *_ = _HEAD.unpack_from(view)
    return (base_generation, rounds) if magic == _MAGIC and rounds >= 0 else None


def _read_size(view: memoryview) -> int:
    *_, end, extra = _HEAD.unpack_from(view)
    return int(end + extra)


def _align(at: int) -> int:
    return -(-at // _ALIGN) * _ALIGN
