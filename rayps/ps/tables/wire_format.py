"""The wire format of table requests, and the mapping from ids to segments. No I/O.

A piece is the part of a request for one segment. It contains n, flags and dim (int64 each), then n ids (int64, strictly
ascending), then, with the flag COUNTS, n counts (uint32, padded to 8 bytes). A count is how often the id occurred in
the batch. A push also contains n rows [n, dim]. The answer to a pull consists of n rows. Rows have the table's dtype,
or bfloat16 with the flag HALF. A piece of 0 bytes has no ids.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rayps_client.errors import ConfigError
from rayps_client.values import Buffer
from torch import Tensor

from rayps.ps.protocol.space import SparseTable

COUNTS = 1  # flag: the piece has counts; without them a push counts each id once, and a pull counts nothing
HALF = 2  # flag: rows are sent as bfloat16, in a push and in the answer to a pull
_ROWS = 4  # flag: the piece is a push and contains rows
_HEADER = struct.Struct("<3q")
_HEAD = _HEADER.size
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "float64": torch.float64}

Ids = NDArray[np.int64]  # [n]
Counts = NDArray[np.uint32]  # [n]: how often each id occurs in a batch
Slots = NDArray[np.int64]  # [n]: row numbers within a store or an index
Rows = NDArray[np.generic]  # [n, dim] of the table's dtype, or [n, width] of a field's
Bytes = NDArray[np.uint8]
Allocator = Callable[[int], Bytes]  # allocates a number of bytes


def allocate(size: int) -> Bytes:
    """Allocate `size` bytes of ordinary memory, which is not cleared."""
    return np.empty(size, np.uint8)


class TablePull(NamedTuple):
    """A decoded pull. If `counts` is not None, the pull counts as a use of its rows."""

    ids: Ids
    counts: Counts | None
    half: bool


class TablePush(NamedTuple):
    """A decoded push: the ids [n], how often each id occurred in the batch [n], and the gradients of rows [n, dim]."""

    ids: Ids
    counts: Counts
    rows: Tensor


def mix(ids: Ids) -> NDArray[np.uint64]:
    """Hash int64 [n] to uint64 [n] by the finaliser of splitmix64 (Steele et al., 2014)."""
    x = ids.view(np.uint64)
    part = x >> _SHIFTS[0]
    x = x ^ part
    x *= _FACTORS[0]
    np.right_shift(x, _SHIFTS[1], out=part)
    x ^= part
    x *= _FACTORS[1]
    np.right_shift(x, _SHIFTS[2], out=part)
    x ^= part
    return x


def bucket(ids: Ids, segments: int) -> Slots:
    """Return the segment of each id, int64 [n]: a number from 0 to `segments` - 1.

    It depends on the upper half of the id's hash; `HashIndex` uses the lower half.
    """
    if segments == 1:
        return np.zeros(len(ids), np.int64)
    found = ((mix(ids) >> np.uint64(32)) * np.uint64(segments)) >> np.uint64(32)
    return found.view(np.int64)


def split(ids: Ids, segments: int) -> tuple[Slots, list[int]]:
    """Return a stable order [n] that groups the ids by segment, and the `segments` + 1 bounds of the groups."""
    if segments == 1:
        return np.arange(len(ids)), [0, len(ids)]
    held = bucket(ids, segments)
    order = np.argsort(held.astype(np.uint16 if segments <= 1 << 16 else np.int64), kind="stable")
    bounds = np.zeros(segments + 1, np.int64)
    np.cumsum(np.bincount(held, minlength=segments), out=bounds[1:])
    return order, bounds.tolist()


def view_cells(rows: Rows) -> NDArray[np.generic]:
    """Return a view of rows [n, width] as n cells, one item for each row, because numpy copies cells faster."""
    return rows.view(_make_cell_dtype(rows.shape[1] * rows.itemsize)).reshape(-1)


@functools.cache
def _make_cell_dtype(size: int) -> np.dtype[np.generic]:
    return np.dtype(np.complex128) if size == 16 else np.dtype((np.void, size))  # numpy copies 16 bytes at once


def make_block_allocator(room: Allocator, size: int) -> Allocator:
    """Allocate one block of `size` bytes by `room`; return an allocator that takes consecutive parts of it."""
    left = room(size)

    def take(count: int) -> Bytes:
        nonlocal left
        found, left = left[:count], left[count:]
        return found

    return take


def _make_piece(flags: int, dim: int, ids: Ids, counts: Counts | None, tail: int, room: Allocator) -> tuple[Bytes, int]:
    """Return a piece with room for `tail` bytes of rows, which are not written yet, and the offset of the rows."""
    n = len(ids)
    rows = _HEAD + 8 * n + (0 if counts is None else (4 * n + 7) // 8 * 8)
    found = room(rows + (tail + 7) // 8 * 8)
    _HEADER.pack_into(found.data, 0, n, flags | (0 if counts is None else COUNTS), dim)
    found[_HEAD : _HEAD + 8 * n].view(np.int64)[:] = ids
    if counts is not None:
        found[_HEAD + 8 * n : _HEAD + 12 * n].view(np.uint32)[:] = counts
    return found, rows


def encode_pull(ids: Ids, counts: Counts | None = None, half: bool = False, room: Allocator = allocate) -> Bytes:
    """Encode a pull. With `counts` the pull stores missing rows and counts a use of all its rows."""
    return _make_piece(HALF if half else 0, 0, ids, counts, 0, room)[0]


def encode_push(
    ids: Ids, rows: Rows | Tensor, counts: Counts | None = None, half: bool = False, room: Allocator = allocate
) -> Bytes:
    """Encode a push. `rows` [n, dim] are the gradients: a numpy array or a tensor on the CPU, one row for each id."""
    given: Rows = rows.detach().numpy() if isinstance(rows, Tensor) else rows
    n, dim = len(ids), given.shape[1]
    if half:
        given = torch.from_numpy(given).to(torch.bfloat16).view(torch.int16).numpy()
    size = n * dim * given.itemsize
    found, at = _make_piece(_ROWS | (HALF if half else 0), dim, ids, counts, size, room)
    if size:
        found[at : at + size].view(given.dtype).reshape(n, dim)[:] = given
    found[at + size :] = 0
    return found


def _read_head(data: Buffer, table: SparseTable, push: bool) -> tuple[Bytes, int, int, int]:
    if not len(data):  # no ids: the push only advances the clock
        return np.zeros(0, np.uint8), 0, 0, 0
    raw = np.frombuffer(data, np.uint8)
    if len(raw) < _HEAD:
        raise table.error(ConfigError, f"a request has {len(raw)} bytes; expected at least {_HEAD}")
    n, flags, dim = _HEADER.unpack_from(data)
    if bool(flags & _ROWS) != push:
        raise table.error(ConfigError, f"expected {'a push, which has rows' if push else 'a pull, which has no rows'}")
    if n < 0 or _HEAD + n * (12 if flags & COUNTS else 8) > len(raw):
        raise table.error(ConfigError, f"a request of {len(raw)} bytes is too short for {n} ids")
    return raw, n, flags, dim


def _read_ids(raw: Bytes, n: int, flags: int, table: SparseTable) -> tuple[Ids, Counts | None, int]:
    end = _HEAD + 8 * n
    if not n:
        return np.empty(0, np.int64), None, end
    ids = raw[_HEAD:end].view(np.int64)
    if not ids.flags.aligned:  # numpy would copy unaligned memory for each operation
        ids = ids.copy()
    if int(ids[0]) < 0:
        raise table.error(ConfigError, f"id {int(ids[0])} is negative: give ids from 0 to 2**63 - 1", id=int(ids[0]))
    if n > 1 and not (ids[1:] > ids[:-1]).all():
        at = int(np.argmin(ids[1:] > ids[:-1]))
        raise table.error(
            ConfigError,
            f"id {int(ids[at + 1])} follows {int(ids[at])}: give strictly ascending ids "
            "(sum the gradients of equal ids first)",
        )
    if not flags & COUNTS:
        return ids, None, end
    return ids, raw[end : end + 4 * n].view(np.uint32), end + (4 * n + 7) // 8 * 8


def decode_pull(data: Buffer, table: SparseTable) -> TablePull:
    """Decode a pull; the arrays are views of `data`.

    Raises:
        ConfigError: an id is negative, ids do not ascend, or the piece is not a pull.
    """
    raw, n, flags, _ = _read_head(data, table, push=False)
    ids, counts, _ = _read_ids(raw, n, flags, table)
    return TablePull(ids, counts, bool(flags & HALF))


def decode_push(data: Buffer, table: SparseTable) -> TablePush:
    """Decode a push. The arrays are views of `data`; bfloat16 rows are converted to the table's dtype.

    Raises:
        ConfigError: an id is negative, ids do not ascend, the piece is not a push, the rows have another dim than the
            table, or a row is not finite.
    """
    raw, n, flags, dim = _read_head(data, table, push=True)
    ids, counts, at = _read_ids(raw, n, flags, table)
    dtype = DTYPES[table.dtype]
    if not n:
        return TablePush(ids, np.empty(0, np.uint32), torch.empty(0, table.dim, dtype=dtype))
    if dim != table.dim:
        raise table.error(
            ConfigError, f"the pushed rows have {dim} elements; the table's dim is {table.dim}", dim=table.dim
        )
    size = n * dim * (2 if flags & HALF else dtype.itemsize)
    if at + size > len(raw):
        raise table.error(
            ConfigError,
            f"a push has {len(raw) - at} bytes of rows for {n} ids; expected {size} ({table.dtype} [{n}, {dim}])",
        )
    if counts is None:
        counts = np.ones(n, np.uint32)
    held = raw[at : at + size]
    if flags & HALF:
        rows = torch.from_numpy(held.view(np.int16).copy()).view(torch.bfloat16).to(dtype).view(n, dim)
    else:
        rows = _view_tensor(held.view(np.float32 if dtype is torch.float32 else np.float64).reshape(n, dim))
    if not math.isfinite(float(rows.sum())):  # a cheap test; only a sum that is not finite needs the exact one
        wrong = torch.isfinite(rows).all(1).logical_not().nonzero().view(-1)
        if len(wrong):
            first = int(ids[int(wrong[0])])
            raise table.error(
                ConfigError,
                f"the gradient of id {first} is not finite ({len(wrong)} ids have such gradients): nothing was applied",
                id=first,
            )
    return TablePush(ids, counts, rows)


class _Writable:
    """A read-only array that is declared writable, because torch warns about read-only memory. It is never written."""

    def __init__(self, array: Rows) -> None:
        self.array = array  # keeps the memory alive
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def _view_tensor(array: Rows) -> Tensor:
    """Return a tensor that shares the array's memory."""
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Writable(array)))


def encode_rows(rows: Rows, half: bool = False) -> Bytes:
    """Encode the answer to a pull: rows [n, dim] as bytes."""
    if half:
        rows = torch.from_numpy(rows).to(torch.bfloat16).view(torch.int16).numpy()
    return rows.reshape(-1).view(np.uint8)


def decode_rows(data: Buffer | Bytes, n: int, table: SparseTable, half: bool = False) -> Tensor:
    """Decode the answer to a pull as a tensor [n, dim] of the table's dtype. It is a view of `data`, unless `half`.

    Raises:
        ConfigError: `data` has another number of bytes than n rows.
    """
    dtype = DTYPES[table.dtype]
    size = n * table.dim * (2 if half else dtype.itemsize)
    if len(data) != size:
        raise table.error(ConfigError, f"received {len(data)} bytes for {n} rows; expected {size}")
    if not n:
        return torch.empty(0, table.dim, dtype=dtype)
    raw = np.frombuffer(data, np.uint8)
    if half:
        return torch.from_numpy(raw.view(np.int16).copy()).view(torch.bfloat16).to(dtype).view(n, table.dim)
    return _view_tensor(raw.view(np.float32 if dtype is torch.float32 else np.float64).reshape(n, table.dim))


def encode_empty_push(table: SparseTable, room: Allocator = allocate) -> Bytes:
    """Encode a push without ids, which only advances the clock of a segment that the step does not change."""
    return _make_piece(_ROWS, table.dim, np.empty(0, np.int64), None, 0, room)[0]
