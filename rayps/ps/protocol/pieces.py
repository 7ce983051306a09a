"""A piece: the part of a push or a pull that concerns one dense segment, as bytes. Pure: tensors, no sockets.

An empty piece pushes nothing, or pulls the whole segment. A piece as long as the segment pushes all of its elements.
Any other piece begins with a head that names its form: a range of elements, rows of one parameter by id, or a range of
compressed elements. Messages, replay buffers and backups treat all forms alike, and a repeated push consists of the
same bytes. Pulled values are not compressed, so that all workers read the same parameters, bit for bit.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayps.comm.compress import ErrorFeedback, decode
from rayps.ps.protocol.rows import Area, Bytes, ShardRows, local_rows, take_piece
from rayps.tensors.flat import Layout
from rayps.tensors.packing import tensor_of, view_bytes

_HEAD = struct.Struct("<5q")  # form, three numbers, bytes of the body
_ALIGN = 8
KEPT_IDS = 1 << 21  # most ids that `KnownRows` retains for one segment; they take 24 MB


class Form(enum.IntEnum):
    """The form of a piece that has a head. The comments say which numbers the head has, and what the body is."""

    RANGE = 1  # offset, number of elements; body of a push: the elements, of a pull: empty
    # number of the parameter, number of ids; body: the ids (int32, 0 = the table's first row in the segment), and then,
    # in a push, the rows
    ROWS = 2
    CODED = 3  # offset, number of elements, number of the codec; body: the compressed elements


class DensePiece(NamedTuple):
    """A decoded push to one segment: `value` has its elements from `offset` on, or those of `rows`."""

    value: Tensor
    offset: int = 0
    rows: ShardRows | None = None

    @property
    def area(self) -> Area:
        """Return the elements of the segment that the push changes."""
        return (self.offset, self.offset + self.value.numel()) if self.rows is None else self.rows


def _make_piece(plain: int, form: Form, numbers: tuple[int, int, int], *body: Any) -> bytes:
    """Return a piece with a head, padded so that its length differs from `plain`, the segment's size in bytes.

    A piece of that length would be read as one without a head.
    """
    size = sum(len(part) for part in body)
    padding = -size % _ALIGN
    if _HEAD.size + size + padding == plain:
        padding += _ALIGN
    return b"".join([_HEAD.pack(form, *numbers, size), *body, bytes(padding)])


def make_range_piece(offset: int, count: int, plain: int, value: Any = b"") -> bytes:
    """Return a piece that pushes `count` elements from `offset` on; `value` is their bytes.

    Without `value` the piece pulls these elements. `plain` is the segment's size in bytes.
    """
    return _make_piece(plain, Form.RANGE, (offset, count, 0), value)


def make_rows_piece(rows: ShardRows, plain: int, value: Any = b"") -> bytes:
    """Return a piece that pushes `rows` by id; `value` is their bytes.

    Without `value` the piece pulls these rows. `plain` is the segment's size in bytes.
    """
    ids = rows.ids.numpy().astype(np.int32).tobytes()
    return _make_piece(plain, Form.ROWS, (rows.entry, len(rows.ids), 0), ids, bytes(-len(ids) % _ALIGN), value)


def encode_rows_push(
    rows: ShardRows, plain: int, summed: tuple[Tensor, Tensor | None], first: int, room: Callable[[int], Bytes]
) -> Bytes:
    """Encode a push of rows as `make_rows_piece` does, in the memory that `room(size in bytes)` returns.

    `summed` is the result of `Ids.summed`; the values of `rows` are its rows from `first` on.
    """
    count, values = len(rows.ids), summed[0]
    padding, size = -4 * count % _ALIGN, rows.elements * values.element_size()
    at = _HEAD.size + 4 * count + padding
    end = at + size + -size % _ALIGN
    found = room(end + _ALIGN if end == plain else end)
    _HEAD.pack_into(found.data, 0, Form.ROWS, rows.entry, count, 0, at - _HEAD.size + size)
    found[_HEAD.size : _HEAD.size + 4 * count].view(np.int32)[:] = rows.ids.numpy()
    found[_HEAD.size + 4 * count : at] = 0
    found[at + size :] = 0
    if count:
        take_piece(summed, first, first + count, tensor_of(found[at : at + size].data, values.dtype))
    return found


def make_coded_piece(memory: ErrorFeedback, value: Tensor, lo: int, offset: int, weight: float, plain: int) -> bytes:
    """Return a piece that pushes the elements `value` in compressed form.

    `value` begins at element `lo` of the whole vector, which is element `offset` of the segment. `memory` adds the
    error of this encoding to the worker's next push. A push of weight 0 has no effect: the piece has zeros in place of
    `value`, and the error in `memory` does not change.
    """
    n = value.numel()
    if weight:
        data = memory.encode(value.to(memory.residual.device), lo)
    else:
        data = memory.codec.encode(torch.zeros(n, dtype=memory.residual.dtype))
    return _make_piece(plain, Form.CODED, (offset, n, memory.codec.code), view_bytes(data.cpu()).data)


def encode_area_piece(value: Tensor, area: Area, size: int) -> bytes:
    """Encode a push that the primary has applied, for its backups; `Extent.read_push` decodes it.

    `value` has all `size` elements of the segment, or the rows of `area`. Only the elements in `area` are encoded.
    """
    plain = size * value.element_size()
    if isinstance(area, ShardRows):
        return make_rows_piece(area, plain, view_bytes(value.contiguous()).data)
    lo, hi = area
    if hi - lo == size:
        return view_bytes(value.contiguous()).tobytes()
    return make_range_piece(lo, hi - lo, plain, view_bytes(value[lo:hi].contiguous()).data) if lo < hi else b""


class KnownRows:
    """The last lists of row ids that one segment received and checked. A repeated list is not checked again.

    Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, section 5.1.1 (key caching).
    """

    def __init__(self, lists: int) -> None:
        """Retain at most `lists` lists, with at most `KEPT_IDS` ids in all."""
        self._lists, self._ids = lists, 0
        self._known: dict[tuple[int, ...], tuple[NDArray[np.int32], ShardRows]] = {}  # the list used last is the last

    def find(self, entry: int, ids: NDArray[np.int32]) -> ShardRows | None:
        """Return the rows with these ids of the parameter number `entry`, or None if the list is not known."""
        key = self._make_key(entry, ids)
        found = self._known.get(key)
        if found is None or not np.array_equal(found[0], ids):
            return None
        self._known[key] = self._known.pop(key)
        return found[1]

    def add(self, entry: int, ids: NDArray[np.int32], rows: ShardRows) -> None:
        """Add a list that was checked; drop the least recently used lists beyond the limits."""
        key = self._make_key(entry, ids)
        self._forget(key)
        self._known[key] = ids.copy(), rows
        self._ids += len(ids)
        while self._known and (len(self._known) > self._lists or self._ids > KEPT_IDS):
            self._forget(next(iter(self._known)))

    def _forget(self, key: tuple[int, ...]) -> None:
        if key in self._known:
            self._ids -= len(self._known.pop(key)[0])

    @staticmethod
    def _make_key(entry: int, ids: NDArray[np.int32]) -> tuple[int, ...]:
        count = len(ids)
        return (entry, count, *(int(ids[at]) for at in (0, count // 2, count - 1))) if count else (entry, 0)


class Extent(NamedTuple):
    """The elements [lo, hi) of a vector with this layout: one segment."""

    layout: Layout
    lo: int
    hi: int

    @property
    def size(self) -> int:
        """Bytes of all elements."""
        return (self.hi - self.lo) * self.layout.dtype.itemsize

    def read_push(self, data: memoryview, known: KnownRows | None = None) -> DensePiece:
        """Decode the piece of a push. A list of ids that `known` has is not checked again.

        Raises ValueError or ConfigError if the piece does not fit this segment.
        """
        dtype = self.layout.dtype
        if len(data) in (0, self.size):
            return DensePiece(tensor_of(data, dtype))
        form, a, b, c, body = self._read(data)
        if form is Form.ROWS:
            rows, at = self._read_rows(a, b, body, known)
            return DensePiece(_read_elements(body[at:], rows.elements, dtype), rows=rows)
        self._must_fit(a, b)
        if form is Form.RANGE:
            return DensePiece(_read_elements(body, b, dtype), a)
        return DensePiece(decode(c, tensor_of(body, torch.uint8), b, dtype), a)

    def read_pull(self, data: memoryview, known: KnownRows | None = None) -> Area:
        """Return the elements or rows that the piece of a pull asks for; `known` as in `read_push`.

        Raises ValueError or ConfigError if the piece does not fit this segment.
        """
        if not len(data):
            return 0, self.hi - self.lo
        form, a, b, _, body = self._read(data)
        if form is Form.ROWS:
            return self._read_rows(a, b, body, known)[0]
        self._must_fit(a, b)
        return a, a + b

    def _read(self, data: memoryview) -> tuple[Form, int, int, int, memoryview]:
        if len(data) >= _HEAD.size:
            form, a, b, c, size = _HEAD.unpack_from(data)
            if form in iter(Form) and 0 <= size <= len(data) - _HEAD.size:
                return Form(form), a, b, c, memoryview(data)[_HEAD.size : _HEAD.size + size]
        raise ValueError(
            f"a piece of {len(data)} bytes does not fit into a segment of {self.size} bytes: it must be empty, or as "
            "long as the segment, or begin with a valid head"
        )

    def _read_rows(
        self, entry: int, count: int, body: memoryview, known: KnownRows | None = None
    ) -> tuple[ShardRows, int]:
        size = 4 * count
        if count < 0 or size > len(body):
            raise ValueError(f"a piece names {count} row ids, which do not fit into its {len(body)} bytes")
        ids = np.frombuffer(body[:size], np.int32)
        found = None if known is None else known.find(entry, ids)
        if found is None:
            found = local_rows(self.layout, self.lo, self.hi, entry, torch.from_numpy(ids.astype(np.int64)))
            if known is not None:
                known.add(entry, ids, found)
        return found, size + -size % _ALIGN

    def _must_fit(self, offset: int, count: int) -> None:
        if offset < 0 or count < 0 or offset + count > self.hi - self.lo:
            raise ValueError(
                f"a piece of {count} elements from element {offset} on does not fit into a segment of "
                f"{self.hi - self.lo} elements"
            )


def _read_elements(body: memoryview, count: int, dtype: torch.dtype) -> Tensor:
    if len(body) != count * dtype.itemsize:
        raise ValueError(f"a piece has {len(body)} bytes of values, where {count} elements of {dtype} were expected")
    return tensor_of(body, dtype)
