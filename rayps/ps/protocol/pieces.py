"""The piece of a push or a pull that concerns one dense segment, as bytes. Pure: tensors, no sockets.

An empty piece has no elements (of a pull: asks for all). A piece of the segment's size has all of its elements. Any
other piece begins with a head that names its form: a range of elements, rows of one parameter by id, or encoded
elements. Messages, replay buffers and backups carry every form alike, and a repeated push consists of the same bytes.
Pulls are not encoded: all workers read the same parameters, bit for bit.
"""

from __future__ import annotations

import enum
import struct
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rayps.comm.compress import ErrorFeedback, decoded
from rayps.ps.protocol.rows import Area, ShardRows, local_rows
from rayps.tensors.flat import Layout
from rayps.tensors.packing import flat_bytes, tensor_of

_HEAD = struct.Struct("<5q")  # form, three numbers, bytes of the body
_ALIGN = 8


class Form(enum.IntEnum):
    """The form of a piece with a head, with its numbers and its body."""

    RANGE = 1  # offset, elements; body of a push: the elements
    ROWS = 2  # number of the parameter, ids; body: ids (int32) from the segment's first row; of a push also the rows
    CODED = 3  # offset, elements, number of the codec; body: the encoded elements


class DensePiece(NamedTuple):
    """A decoded push of one segment: elements from `offset` on, or of `rows`."""

    value: Tensor
    offset: int = 0
    rows: ShardRows | None = None

    @property
    def area(self) -> Area:
        """The elements of the segment that it changes."""
        return (self.offset, self.offset + self.value.numel()) if self.rows is None else self.rows


def _piece(plain: int, form: Form, numbers: tuple[int, int, int], *body: Any) -> bytes:
    """Return a piece with a head, padded so that it is not as long as the segment's `plain` bytes."""
    size = sum(len(part) for part in body)
    padding = -size % _ALIGN
    if _HEAD.size + size + padding == plain:
        padding += _ALIGN
    return b"".join([_HEAD.pack(form, *numbers, size), *body, bytes(padding)])


def range_piece(offset: int, count: int, plain: int, value: Any = b"") -> bytes:
    """Return a piece for `count` elements from `offset` on. `value`: their bytes, to push; none, to pull."""
    return _piece(plain, Form.RANGE, (offset, count, 0), value)


def rows_piece(rows: ShardRows, plain: int, value: Any = b"") -> bytes:
    """Return a piece for rows by id. `value`: their bytes, to push; none, to pull."""
    ids = rows.ids.numpy().astype(np.int32).tobytes()
    return _piece(plain, Form.ROWS, (rows.entry, len(rows.ids), 0), ids, bytes(-len(ids) % _ALIGN), value)


def coded_piece(memory: ErrorFeedback, value: Tensor, lo: int, offset: int, weight: float, plain: int) -> bytes:
    """Return an encoded push of elements that begin at `lo` of the whole vector, at `offset` of the segment.

    The encoding's error is added to the worker's next push (`rayps.comm.compress.ErrorFeedback`). A push of weight 0
    has no effect: it consists of zeros, and the error is kept for the next one.
    """
    n = value.numel()
    if weight:
        data = memory.encode(value.to(memory.residual.device), lo)
    else:
        data = memory.codec.encode(torch.zeros(n, dtype=memory.residual.dtype))
    return _piece(plain, Form.CODED, (offset, n, memory.codec.code), flat_bytes(data.cpu()).data)


def area_piece(value: Tensor, area: Area, size: int) -> bytes:
    """Return an applied push for a backup to apply; `Extent.read_push` returns the area and its elements.

    `value` has the segment's `size` elements, or the area's rows.
    """
    plain = size * value.element_size()
    if isinstance(area, ShardRows):
        return rows_piece(area, plain, flat_bytes(value.contiguous()).data)
    lo, hi = area
    if hi - lo == size:
        return flat_bytes(value.contiguous()).tobytes()
    return range_piece(lo, hi - lo, plain, flat_bytes(value[lo:hi].contiguous()).data) if lo < hi else b""


class Extent(NamedTuple):
    """The elements [lo, hi) of a vector with this layout: one segment."""

    layout: Layout
    lo: int
    hi: int

    @property
    def size(self) -> int:
        """Bytes of all elements."""
        return (self.hi - self.lo) * self.layout.dtype.itemsize

    def read_push(self, data: memoryview) -> DensePiece:
        """Decode the piece of a push. Raises ValueError, ConfigError: it does not fit this segment."""
        dtype = self.layout.dtype
        if len(data) in (0, self.size):
            return DensePiece(tensor_of(data, dtype))
        form, a, b, c, body = self._read(data)
        if form is Form.ROWS:
            rows, at = self._rows(a, b, body)
            return DensePiece(_elements(body[at:], rows.elements, dtype), rows=rows)
        self._must_fit(a, b)
        if form is Form.RANGE:
            return DensePiece(_elements(body, b, dtype), a)
        return DensePiece(decoded(c, tensor_of(body, torch.uint8), b, dtype), a)

    def read_pull(self, data: memoryview) -> Area:
        """Return what a pull asks for. Raises ValueError, ConfigError: it does not fit this segment."""
        if not len(data):
            return 0, self.hi - self.lo
        form, a, b, _, body = self._read(data)
        if form is Form.ROWS:
            return self._rows(a, b, body)[0]
        self._must_fit(a, b)
        return a, a + b

    def _read(self, data: memoryview) -> tuple[Form, int, int, int, memoryview]:
        if len(data) >= _HEAD.size:
            form, a, b, c, size = _HEAD.unpack_from(data)
            if form in iter(Form) and 0 <= size <= len(data) - _HEAD.size:
                return Form(form), a, b, c, memoryview(data)[_HEAD.size : _HEAD.size + size]
        raise ValueError(f"a piece of {len(data)} bytes does not fit into a segment of {self.size} bytes")

    def _rows(self, entry: int, count: int, body: memoryview) -> tuple[ShardRows, int]:
        size = 4 * count
        if count < 0 or size > len(body):
            raise ValueError(f"{count} row ids do not fit into {len(body)} bytes")
        ids = torch.from_numpy(np.frombuffer(body[:size], np.int32).astype(np.int64))
        return local_rows(self.layout, self.lo, self.hi, entry, ids), size + -size % _ALIGN

    def _must_fit(self, offset: int, count: int) -> None:
        if offset < 0 or count < 0 or offset + count > self.hi - self.lo:
            raise ValueError(f"{count} elements at {offset} do not fit into {self.hi - self.lo}")


def _elements(body: memoryview, count: int, dtype: torch.dtype) -> Tensor:
    if len(body) != count * dtype.itemsize:
        raise ValueError(f"{len(body)} bytes are not {count} elements of {dtype}")
    return tensor_of(body, dtype)
