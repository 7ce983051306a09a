"""All-reduce between ranks of one host: each rank's data is in shared memory, where the other ranks read it.

Each rank writes only its own data and reads the others' data. A rank that was suspended and continues after an abort
therefore cannot corrupt the data of others. Each rank has two halves of memory, which it uses in turn. The other ranks
read what a rank writes into a half before barrier b, and have read it when they enter barrier b+1. The rank writes into
this half again only after barrier b+1.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from rayps_client.errors import LinkError
from torch import Tensor

from rayps.comm.link.memory import Memory
from rayps.comm.link.shared_memory_link import SharedLink
from rayps.comm.ring.barrier import WORDS, Barrier
from rayps.comm.ring.mesh import Mesh
from rayps.core.partition import find_bounds

PIECE_BYTES = 1 << 20  # a vector is copied to and from shared memory in parts of this size, which stay in the cache
_MANY_BYTES = 1 << 19  # size of the parts of a vector of several parts: both halves of all ranks must stay in the cache
SMALL_BYTES = 64 << 10  # up to this size, one barrier with N times the additions is faster than two barriers
_BLOCK = 1 << 15  # number of elements added at a time, so that they stay in the L1 cache
_SLOTS, _TABLE, _WAKEUPS = 1, 2, 3  # keys under which ranks offer each other memory; buffers have keys from 10 on
_ROW = struct.Struct("<5q")  # the collective that a rank announces: number, kind, bytes, buffer, offset

_KINDS = {
    dtype: torch.empty(0, dtype=dtype).numpy().dtype
    for dtype in (torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
}

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.generic]
Weights = NDArray[np.float64]
Fold = np.ufunc  # (a, b, out=)


@dataclass(slots=True)
class Resident:
    """A buffer: one vector in shared memory for each rank, and the memory for their sum."""

    start: int  # address of this rank's vector
    parts: list[Bytes]  # the vectors of all ranks, in the order of ranks
    out: Bytes  # the sum or the mean


class SharedMemoryFold:
    """The shared memory and the eventfds of the ranks `group` of one host. All these ranks must make the same calls."""

    def __init__(self, mesh: Mesh, group: list[int]) -> None:
        self._mesh = mesh
        self._group = group
        self._place = group.index(mesh.rank)
        self._others = [peer for peer in group if peer != mesh.rank]
        self._offers = 10
        self.residents: list[Resident] = []
        self.bytes_shared = 0  # bytes that other ranks have read from this rank's memory
        slots = self._share(_SLOTS, 2 * PIECE_BYTES)
        shared = self._share_one(_TABLE, 2 * PIECE_BYTES + len(group) * (2 * _ROW.size + (2 + WORDS) * 8))
        self._slots = [[each[:PIECE_BYTES], each[PIECE_BYTES:]] for each in slots]
        self._out = [shared[:PIECE_BYTES], shared[PIECE_BYTES : 2 * PIECE_BYTES]]
        rows, numbers = np.split(shared[2 * PIECE_BYTES :], [2 * len(group) * _ROW.size])
        self._rows = [half.data for half in np.split(rows, 2)]
        self._weights = np.split(numbers.view(np.float64)[: 2 * len(group)], 2)
        words = numbers.view(np.int64)[2 * len(group) :]
        self._barrier = Barrier(mesh, group, words, *self._exchange_wakeups())
        self._row = b""

    # Setting up

    def _find_link(self, peer: int) -> SharedLink:
        link = self._mesh.link(peer)
        assert isinstance(link, SharedLink)
        return link

    def _share(self, key: int, size: int) -> list[Bytes]:
        """Allocate `size` bytes of shared memory on each rank of the group; return it in the order of ranks."""
        mine = Memory.create(size)
        for peer in self._others:
            self._find_link(peer).offer(key, mine)
        self._sync()
        mine.close_descriptor()
        return [
            _view_bytes(mine if rank == self._mesh.rank else self._find_link(rank).memories.pop(key))
            for rank in self._group
        ]

    def _share_one(self, key: int, size: int) -> Bytes:
        """Return `size` bytes of memory that the first rank of the group allocates and all ranks share."""
        if self._place:
            self._sync()
            return _view_bytes(self._find_link(self._group[0]).memories.pop(key))
        memory = Memory.create(size)
        for peer in self._others:
            self._find_link(peer).offer(key, memory)
        self._sync()
        memory.close_descriptor()
        return _view_bytes(memory)

    def _exchange_wakeups(self) -> tuple[list[int], list[list[int]]]:
        """Create this rank's two eventfds and exchange them with the other ranks.

        Return this rank's eventfds, and two lists of the other ranks' eventfds.
        """
        mine = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2)]
        try:
            for peer in self._others:
                for parity, wakeup in enumerate(mine):
                    self._find_link(peer).offer_descriptor(_WAKEUPS + parity, wakeup)
            self._sync()
        except BaseException:
            for wakeup in mine:
                os.close(wakeup)
            raise
        return mine, [
            [self._find_link(peer).descriptors.pop(_WAKEUPS + parity) for peer in self._others] for parity in (0, 1)
        ]

    def _sync(self) -> None:
        nothing = [(peer, memoryview(b"")) for peer in self._others]
        self._mesh.exchange(nothing, nothing)

    def buffer(self, size: int) -> Bytes:
        """Allocate a vector of `size` bytes on each rank; return this rank's. `reduce_resident` sums the vectors.

        All ranks must call `buffer` with the same size.
        """
        key, self._offers = self._offers, self._offers + 2
        parts = self._share(key, size)
        out = self._share_one(key + 1, size)
        mine = parts[self._place]
        self.residents.append(Resident(mine.ctypes.data, parts, out))
        return mine

    def exposed(self, size: int) -> list[Bytes]:
        """Allocate `size` zero bytes on each rank, which the other ranks can read; return all ranks' memory.

        All ranks must call `exposed` with the same size.
        """
        key, self._offers = self._offers, self._offers + 1
        return self._share(key, size)

    def common(self, size: int) -> Bytes:
        """Allocate `size` zero bytes that every rank reads and writes.

        All ranks must call `common` with the same size.
        """
        key, self._offers = self._offers, self._offers + 1
        return self._share_one(key, size)

    @property
    def has_buffers(self) -> bool:
        """Whether `buffer` has been called."""
        return bool(self.residents)

    # Agreeing

    def barrier(self) -> None:
        """Wait until every rank of the group has entered; earlier writes are then visible to all ranks.

        Raises LinkError if another rank dies, gives up or does not enter in time.
        """
        self._barrier.wait()

    @property
    def parity(self) -> int:
        """The half of its memory (0 or 1) into which this rank writes before its next barrier."""
        return self._barrier.turn & 1

    def announce(self, kind: int, size: int, where: tuple[int, int] = (-1, 0), weight: float = 1.0) -> None:
        """Write to shared memory which collective this rank will run next. `agree` compares this after the barrier."""
        parity = self.parity
        self._row = _ROW.pack(self._mesh.number, kind, size, *where)
        self._rows[parity][self._place * _ROW.size : (self._place + 1) * _ROW.size] = self._row
        self._weights[parity][self._place] = weight

    def agree(self, parity: int) -> None:
        """Raise LinkError if the ranks announced different collectives in the half `parity`."""
        rows = self._rows[parity]
        if rows == self._row * len(self._group):
            return
        others = [_ROW.unpack_from(rows, i * _ROW.size) for i in range(len(self._group))]
        i = next(i for i, row in enumerate(others) if row != others[self._place])
        raise LinkError(
            f"rank {self._group[i]} runs another collective ({others[i][2]} bytes) than this rank "
            f"({others[self._place][2]} bytes): all ranks must make the same calls with the same sizes",
            peer=f"rank {self._group[i]}",
        )

    def meet(self, kind: int, size: int, where: tuple[int, int] = (-1, 0), weight: float = 1.0) -> Weights:
        """Announce a collective, wait for all ranks, compare; return the weights that the ranks have announced."""
        parity = self.parity
        self.announce(kind, size, where, weight)
        self.barrier()
        self.agree(parity)
        return self._weights[parity].copy()

    # Adding

    def reduce(self, x: Tensor, fold: str) -> None:
        """Reduce `x` to the sum ("add") or maximum ("max") over the group, in place."""
        size = x.numel() * x.element_size()
        self.one_shot(x, fold) if size <= SMALL_BYTES else self.two_shot(x, fold)

    def one_shot(self, x: Tensor, fold: str) -> None:
        """Reduce with one barrier for each part. Every rank adds all data, N times the additions of `two_shot`."""
        data = _view_data(x)
        for a in range(0, max(1, len(data)), PIECE_BYTES):
            piece = data[a : a + PIECE_BYTES]
            parity = self.parity
            self._put(piece, len(data), 1)
            self.bytes_shared += len(self._others) * len(piece)
            fold_parts([slots[parity][: len(piece)] for slots in self._slots], piece, x.dtype, fold)

    def two_shot(self, x: Tensor, fold: str) -> None:
        """Reduce with two barriers for each part. Each rank adds 1/N of the data, then reads the other ranks' sums.

        The next part is written before the sums of the current part are read. Both parts then share a barrier.
        """
        if x.numel() == 0:
            return
        data, width = _view_data(x), x.element_size()
        step = PIECE_BYTES if len(data) <= PIECE_BYTES else _MANY_BYTES
        pieces = [slice(a, min(a + step, len(data))) for a in range(0, len(data), step)]
        self._put(data[pieces[0]], len(data), 2)
        for i, piece in enumerate(pieces):
            parity = 1 - self.parity
            size = piece.stop - piece.start
            lo, hi = find_bounds(size // width, len(self._group), self._place)
            own = slice(lo * width, hi * width)
            self.bytes_shared += self.bytes_by_two_shot(size)
            fold_parts([slots[parity][own] for slots in self._slots], self._out[parity][own], x.dtype, fold)
            if i + 1 < len(pieces):
                self._put(data[pieces[i + 1]], len(data), 2)
            else:
                self.barrier()
            data[piece] = self._out[parity][:size]

    def spread(self, x: Tensor, root: int = 0) -> None:
        """Copy the vector of the rank whose index in the group is `root` into `x` on all ranks."""
        data = _view_data(x)
        for a in range(0, max(1, len(data)), PIECE_BYTES):
            piece = data[a : a + PIECE_BYTES]
            parity = self.parity
            if self._place == root:
                self._slots[root][parity][: len(piece)] = piece
                self.bytes_shared += len(self._others) * len(piece)
            self.meet(5, len(data))
            if self._place != root:
                piece[:] = self._slots[root][parity][: len(piece)]

    def bytes_by_two_shot(self, size: int) -> int:
        """Return how many bytes the other ranks read from this rank when `two_shot` reduces `size` bytes."""
        return 2 * len(self._others) * size // len(self._group)

    def _put(self, piece: Bytes, total: int, kind: int) -> None:
        parity = self.parity
        self._slots[self._place][parity][: len(piece)] = piece
        self.meet(kind, total)

    # In place

    def find(self, x: Tensor) -> tuple[int, int] | None:
        """Return the number of the buffer that contains `x`, and the offset in bytes, or None if no buffer does."""
        start, size = x.data_ptr(), x.nbytes
        for i, resident in enumerate(self.residents):
            offset = start - resident.start
            if offset >= 0 and offset + size <= len(resident.out):
                return (i, offset) if size else None
        return None

    def reduce_resident(
        self, where: tuple[int, int], dtype: torch.dtype, size: int, fold: str, weight: float | None = None
    ) -> Bytes:
        """Reduce the `size` bytes at `where` (buffer, offset) over the group; return the result, in shared memory.

        If `weight`, this rank's weight, is given, the result is the weighted mean. The result is valid until the
        buffer's next reduction.
        """
        number, offset = where
        resident = self.residents[number]
        announced = self.meet(3 if weight is None else 4, size, where, 0.0 if weight is None else weight)
        weights = None if weight is None else announced
        width = dtype.itemsize
        lo, hi = find_bounds(size // width, len(self._group), self._place)
        own = slice(offset + lo * width, offset + hi * width)
        fold_parts([each[own] for each in resident.parts], resident.out[own], dtype, fold, weights)
        self.bytes_shared += self.bytes_by_two_shot(size)
        self.barrier()
        return resident.out[offset : offset + size]

    def close(self) -> None:
        """Close the eventfds. The memory is freed when no tensor of any rank uses it any more."""
        self._barrier.close()
        self.residents.clear()


def _view_bytes(memory: Memory) -> Bytes:
    return np.frombuffer(memory.view, dtype=np.uint8)


def _view_data(x: Tensor) -> Bytes:
    return x.view(torch.uint8).numpy() if x.numel() else np.empty(0, np.uint8)


def tensor_of(data: Bytes, dtype: torch.dtype) -> Tensor:
    """Return a tensor over bytes of shared memory; the memory stays mapped while the tensor exists."""
    return torch.from_numpy(data).view(dtype) if len(data) else torch.empty(0, dtype=dtype)


def fold_parts(parts: list[Bytes], out: Bytes, dtype: torch.dtype, fold: str, weights: Weights | None = None) -> None:
    """Reduce `parts`, in the order of ranks, into `out`. An overflow results in infinity or NaN, without a warning."""
    with np.errstate(all="ignore"):
        _fold_quietly(parts, out, dtype, fold, weights)


def _fold_quietly(parts: list[Bytes], out: Bytes, dtype: torch.dtype, fold: str, weights: Weights | None) -> None:
    if dtype in (torch.float16, torch.bfloat16):
        _fold_wide(parts, out, dtype, fold, weights)
        return
    kind = _KINDS[dtype]
    sources = [each.view(kind) for each in parts]
    target = out.view(kind)
    step: Fold = np.add if fold == "add" else np.maximum
    if weights is not None:
        _fold_weighted(sources, target, weights)
        return
    if len(sources) == 1:
        target[:] = sources[0]
        return
    if len(target) <= _BLOCK:
        step(sources[0], sources[1], out=target)
        for source in sources[2:]:
            step(target, source, out=target)
        return
    for at in range(0, len(target), _BLOCK):
        block = slice(at, at + _BLOCK)
        into = target[block]
        step(sources[0][block], sources[1][block], out=into)
        for source in sources[2:]:
            step(into, source[block], out=into)


def _fold_weighted(sources: list[Numbers], target: Numbers, weights: Weights) -> None:
    total = float(weights.sum())
    shares = [(source, float(w) / total) for source, w in zip(sources, weights, strict=True) if w]
    if not shares:
        target[:] = 0
        return
    scratch = np.empty(min(_BLOCK, len(target)), target.dtype)
    for at in range(0, len(target), _BLOCK):
        block = slice(at, at + _BLOCK)
        into = target[block]
        np.multiply(shares[0][0][block], shares[0][1], out=into)
        for source, share in shares[1:]:
            scaled = scratch[: len(into)]
            np.multiply(source[block], share, out=scaled)
            np.add(into, scaled, out=into)


def _fold_wide(parts: list[Bytes], out: Bytes, dtype: torch.dtype, fold: str, weights: Weights | None) -> None:
    """Reduce vectors of half precision in float32, and round the result once."""
    shares = [1.0] * len(parts) if weights is None else [float(w / (weights.sum() or 1.0)) for w in weights]
    sources = [(tensor_of(each, dtype), share) for each, share in zip(parts, shares, strict=True) if share]
    target = tensor_of(out, dtype)
    if not sources:
        target.zero_()
    for at in range(0, len(target), _BLOCK):
        block = slice(at, at + _BLOCK)
        wide = [source[block].float() * share for source, share in sources]
        if not wide:
            return
        for other in wide[1:]:
            if fold == "add":
                wide[0].add_(other)
            else:
                torch.maximum(wide[0], other, out=wide[0])
        target[block].copy_(wide[0])
