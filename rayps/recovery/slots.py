"""A worker's committed states, in memory that outlives its process while a neighbour of its host holds it.

After each step the worker copies its state (parameters, the optimizer's moments, buffers, random state) into one of a
few slots in turn. The round's number is written last and seals the slot, so whoever is killed while it writes leaves
the states of the rounds before. A slot is one shared segment without a name: passing its descriptor is all that a
mirror on the same host costs, and its bytes are what goes to another host.

Workers of a grid differ by at most one round: who has the mean gradient of round t steps, who has not does not. So two
slots are enough for everyone to go back to a round that all have.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

import torch
from torch import Tensor

from rayps.comm.link.memory import Memory
from rayps.core import failpoint
from rayps.core.errors import LinkError
from rayps.core.records import Point
from rayps.core.values import Buffer
from rayps.tensors.local_state import by_name, moments_of
from rayps.tensors.optim import Moments, ParamState

SLOTS = 2
_MAGIC = b"raypsvlt"
# magic, line, round (-1: not sealed), bytes of the table, where the facts are, their bytes
_HEAD = struct.Struct("<8sqqqqq")
_ROUND = 16  # where it stands
_ALIGN = 64
OWN = ("buffer/", "rng")  # what a twin does not have: tensors whose name begins so


class StateFacts(TypedDict, total=False):
    """What a state has beside tensors, as JSON."""

    numbers: dict[str, ParamState]  # of the optimizer, by parameter
    points: list[Point]  # that the driver may not have heard


@dataclass(slots=True)
class CommittedState:
    """What a worker had after `round` batches: tensors by name, and JSON-ready facts. `line` as in `StateSlots`."""

    line: int
    round: int
    tensors: dict[str, Tensor]
    facts: StateFacts = field(default_factory=StateFacts)

    @property
    def whole(self) -> bool:
        """Whether it is more than what a twin lacks."""
        return "params" in self.tensors

    @property
    def moments(self) -> Moments:
        """The optimizer's state by parameter name."""
        return moments_of(self.tensors, self.facts.get("numbers", {}))

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers by name."""
        return {k.removeprefix("buffer/"): v for k, v in self.tensors.items() if k.startswith("buffer/")}

    @property
    def rng(self) -> Tensor | None:
        """The random state, if it is in here."""
        return self.tensors.get("rng")


def tensors_of(
    params: Tensor, moments: Moments, buffers: Mapping[str, Tensor], rng: Tensor, points: list[Point]
) -> tuple[dict[str, Tensor], StateFacts]:
    """Return the tensors and values that `StateSlots.commit` takes, without a copy.

    `moments` are by parameter name; `points` may not have reached the driver yet.
    """
    named, numbers = by_name(moments)
    tensors = {"params": params} | named
    tensors |= {f"buffer/{name}": value for name, value in buffers.items()}
    tensors["rng"] = rng
    return tensors, {"numbers": numbers, "points": points}


class StateSlots:
    """The newest states of one worker. Any thread may read; one writes.

    A *line* is one course of a run: from a snapshot on, through all mendings. States of another line are of no use.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        """Raises LinkError where there is no shared memory."""
        self._slots = [_Slot() for _ in range(slots)]
        self._lock = threading.Lock()
        self._line, self._writer = -1, 0
        self.bytes = 0  # of the latest state

    @property
    def descriptors(self) -> list[int]:
        """Of the slots, for `SharedLink.offer_descriptor`."""
        return [slot.fd for slot in self._slots]

    def open(self, line: int, upto: int, writer: int) -> None:
        """From now on only `writer` may commit; states of another line or above round `upto` are forgotten."""
        with self._lock:
            self._line, self._writer = line, writer
            for slot in self._slots:
                found = slot.sealed()
                if found is not None and (found[0] != line or found[1] > upto):
                    slot.unseal()

    def shut(self) -> None:
        """Nobody may commit until `open`."""
        with self._lock:
            self._writer = 0

    def commit(self, writer: int, rounds: int, tensors: dict[str, Tensor], facts: StateFacts) -> bool:
        """Keep a state in place of the oldest one; False where `writer` may not (its generation has ended).

        Raises LinkError (no memory), TypeError (a fact that JSON does not know).
        """
        with self._lock:
            if writer != self._writer:
                return False
            if not any(slot.sealed() == (self._line, rounds) for slot in self._slots):
                oldest = min(self._slots, key=_Slot.age)
                self.bytes = oldest.write(self._line, rounds, tensors, json.dumps(facts).encode())
        return True

    def rounds(self) -> list[int]:
        """The rounds whose states are here, in order."""
        with self._lock:
            found = [slot.sealed() for slot in self._slots]
            return sorted(at[1] for at in found if at is not None and at[0] == self._line)

    def blob(self, rounds: int) -> memoryview | None:
        """The state after `rounds` as bytes where they lie: good until its slot's turn comes again."""
        with self._lock:
            for slot in self._slots:
                if slot.sealed() == (self._line, rounds):
                    return slot.view
        return None

    def read(self, rounds: int) -> CommittedState | None:
        """A copy of the state after `rounds`."""
        blob = self.blob(rounds)
        return None if blob is None else parse(bytes(blob))

    def close(self) -> None:
        """Give the memory up; who holds a descriptor keeps it. Safe to call twice."""
        with self._lock:
            self._writer = 0
            for slot in self._slots:
                slot.close()


class _Slot:
    """One segment and where each tensor lies in it."""

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
        return self._memory.view[: _size(self._memory.view)]

    def sealed(self) -> tuple[int, int] | None:
        """Line and round of what is in here."""
        return _sealed(self._memory.view)

    def age(self) -> int:
        found = self.sealed()
        return -1 if found is None else found[1]

    def unseal(self) -> None:
        struct.pack_into("<q", self._memory.view, _ROUND, -1)

    def write(self, line: int, rounds: int, tensors: dict[str, Tensor], facts: bytes) -> int:
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
        failpoint.passing("vault: half a commit")
        view[self._end : self._end + len(facts)] = facts
        _HEAD.pack_into(view, 0, _MAGIC, line, -1, len(self._table), self._end, len(facts))
        struct.pack_into("<q", view, _ROUND, rounds)
        return self._end + len(facts)

    def _lay_out(self, shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]], extra: int) -> None:
        sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in shapes.values()]
        kinds = [[name, str(dtype).removeprefix("torch."), list(shape)] for name, (dtype, shape) in shapes.items()]
        self._table = json.dumps(kinds).encode()
        at = _aligned(_HEAD.size + len(self._table))
        offsets = []
        for size in sizes:
            offsets.append(at)
            at = _aligned(at + size)
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
                words = f"cannot keep {size} bytes of a worker's state ({error.strerror})"
                raise LinkError(words, size=size) from error
            self._memory.close()
            self._memory = grown

    def close(self) -> None:
        self._places, self._shapes = [], {}
        self._memory.close()


def parse(blob: Buffer) -> CommittedState | None:
    """The state in a slot's bytes, as views of them; None where it is not sealed. Raises LinkError when it is torn."""
    view = memoryview(blob)
    if view.readonly:  # torch wants memory that it may write to
        view = memoryview(bytearray(view))
    found = _sealed(view)
    if found is None:
        return None
    _, _, _, table, end, extra = _HEAD.unpack_from(view)
    try:
        tensors, at = dict[str, Tensor](), _aligned(_HEAD.size + table)
        for name, kind, shape in json.loads(bytes(view[_HEAD.size : _HEAD.size + table])):
            dtype, count = getattr(torch, kind), math.prod(shape)
            flat = torch.frombuffer(view, dtype=dtype, count=count, offset=at) if count else torch.empty(0, dtype=dtype)
            tensors[name] = flat.view(shape)
            at = _aligned(at + count * dtype.itemsize)
        facts = json.loads(bytes(view[end : end + extra]))
    except (ValueError, TypeError, AttributeError) as error:
        raise LinkError(f"{len(view)} bytes are no worker's state: {error}") from error
    return CommittedState(*found, tensors, facts)


def look(fd: int) -> CommittedState | None:
    """A copy of the state in a segment that a neighbour passed; None where it is not sealed. Its owner may live."""
    size = os.fstat(fd).st_size
    memory = Memory(os.dup(fd), size, read_only=True)
    try:
        before = _sealed(memory.view)
        if before is None:
            return None
        copy = bytearray(memory.view[: _size(memory.view)])
        return parse(copy) if _sealed(memory.view) == before else None
    finally:
        memory.close()


def glance(fd: int) -> tuple[int, int] | None:
    """Line and round of the state in a segment that a neighbour passed."""
    return _sealed(memoryview(os.pread(fd, _HEAD.size, 0)))


def pack(state: CommittedState, only: tuple[str, ...] | None = None) -> bytearray:
    """A state as a slot's bytes; `only` the tensors whose names begin so."""
    chosen = {k: v for k, v in state.tensors.items() if only is None or k.startswith(only)}
    facts = state.facts if only is None else {"points": state.facts.get("points", [])}
    slot = _Slot()
    try:
        size = slot.write(state.line, state.round, chosen, json.dumps(facts).encode())
        return bytearray(slot.view[:size])
    finally:
        slot.close()


def _sealed(view: memoryview) -> tuple[int, int] | None:
    if len(view) < _HEAD.size:
        return None
    magic, line, rounds, *_ = _HEAD.unpack_from(view)
    return (line, rounds) if magic == _MAGIC and rounds >= 0 else None


def _size(view: memoryview) -> int:
    *_, end, extra = _HEAD.unpack_from(view)
    return int(end + extra)


def _aligned(at: int) -> int:
    return -(-at // _ALIGN) * _ALIGN
