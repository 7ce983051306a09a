"""Pieces of tables as they travel, and which segment an id belongs to. Pure.

A piece is n, flags and the elements of a row (int64 each), then n ids (int64, ascending, none twice), then, where the
flags say so, n raw counts (uint32, filled up to 8 bytes): how often each id stood in the batch. A push goes on with n
rows, a pull is answered by n rows and nothing else. Rows are of the table's dtype, or bfloat16 where the flags say so.
A piece of no bytes names no ids.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rayps.core.errors import ConfigError
from rayps.ps.protocol.space import SparseTable

COUNTS = 1  # flag: raw counts are there; a push without them counts each id once, a pull without them counts nothing
HALF = 2  # flag: rows travel as bfloat16, those of a pull's answer too
_ROWS = 4  # flag: a push, so rows follow
_HEAD = 24
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "float64": torch.float64}

Ids = Any  # a numpy array of int64
Counts = Any  # a numpy array of uint32


class TablePull(NamedTuple):
    """Which rows are asked for; `counts` is None where the asking is no use of a row."""

    ids: Ids
    counts: Counts | None
    half: bool


class TablePush(NamedTuple):
    """Gradients of rows [n, dim], and how often each id stood in the batch."""

    ids: Ids
    counts: Counts
    rows: Tensor


def mix(ids: Ids) -> Any:
    """A hash of int64 as uint64, all of whose bits are good (the finaliser of splitmix64, Steele et al., 2014)."""
    x = ids.view(np.uint64)
    x = x ^ (x >> np.uint64(30))
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def bucket(ids: Ids, segments: int) -> Any:
    """The segment, 0 to `segments` - 1, of each id: int64 [n]. From the hash's upper half; an index takes the lower."""
    if segments == 1:
        return np.zeros(len(ids), np.int64)
    found = ((mix(ids) >> np.uint64(32)) * np.uint64(segments)) >> np.uint64(32)
    return found.view(np.int64)


def split(ids: Ids, segments: int) -> tuple[Any, list[int]]:
    """An order that puts the ids of each segment together and keeps theirs, and the segments + 1 bounds in it."""
    if segments == 1:
        return np.arange(len(ids)), [0, len(ids)]
    held = bucket(ids, segments)
    order = np.argsort(held.astype(np.uint16 if segments <= 1 << 16 else np.int64), kind="stable")
    bounds = np.zeros(segments + 1, np.int64)
    np.cumsum(np.bincount(held, minlength=segments), out=bounds[1:])
    return order, bounds.tolist()


def cells(rows: Any) -> Any:
    """Rows [n, width] as n cells of bytes in the same memory: numpy moves these several times as fast."""
    return rows.view(_cell(rows.shape[1] * rows.itemsize)).reshape(-1)


@functools.cache
def _cell(size: int) -> Any:
    return np.dtype(np.complex128) if size == 16 else np.dtype((np.void, size))  # numpy moves 16 bytes at once


def _piece(flags: int, dim: int, ids: Ids, counts: Counts | None, tail: int) -> tuple[Any, int]:
    """A piece without its rows, and where these begin; `tail` bytes of rows, filled up to 8."""
    n = len(ids)
    rows = _HEAD + 8 * n + (0 if counts is None else (4 * n + 7) // 8 * 8)
    found = np.empty(rows + (tail + 7) // 8 * 8, np.uint8)
    found[:_HEAD].view(np.int64)[:] = n, flags | (0 if counts is None else COUNTS), dim
    found[_HEAD : _HEAD + 8 * n].view(np.int64)[:] = ids
    if counts is not None:
        found[_HEAD + 8 * n : _HEAD + 12 * n].view(np.uint32)[:] = counts
    return found, rows


def encode_pull(ids: Ids, counts: Counts | None = None, half: bool = False) -> Any:
    """The piece of a pull, a buffer. With `counts` the pull is a use of the rows: it makes and counts them."""
    return _piece(HALF if half else 0, 0, ids, counts, 0)[0]


def encode_push(ids: Ids, rows: Any, counts: Counts | None = None, half: bool = False, order: Any = None) -> Any:
    """The piece of a push, a buffer: gradients [n, dim], a numpy array or a tensor on the CPU, summed by id.

    Where `order` is given, `rows` are those of more ids, and ids[i] has rows[order[i]]; `counts` are of `ids`.
    """
    given = rows.detach().numpy() if isinstance(rows, Tensor) else rows
    n, dim = len(ids), given.shape[1]
    if half:
        given = torch.from_numpy(given).to(torch.bfloat16).view(torch.int16).numpy()
    size = n * dim * given.itemsize
    found, at = _piece(_ROWS | (HALF if half else 0), dim, ids, counts, size)
    if size:
        place = found[at : at + size].view(given.dtype).reshape(n, dim)
        if order is None:
            place[:] = given
        else:
            np.take(cells(np.ascontiguousarray(given)), order, out=cells(place), mode="clip")
    found[at + size :] = 0
    return found


def _head(data: Any, name: str, push: bool) -> tuple[Any, int, int, int]:
    if not len(data):  # nothing here, only the step
        return np.zeros(0, np.uint8), 0, 0, 0
    raw = np.frombuffer(data, np.uint8)
    if len(raw) < _HEAD:
        raise ConfigError(f"table {name!r}: a piece has {len(raw)} bytes: at least {_HEAD} were expected", table=name)
    n, flags, dim = raw[:_HEAD].view(np.int64).tolist()
    if bool(flags & _ROWS) != push:
        raise ConfigError(f"table {name!r}: a {'push with' if push else 'pull without'} rows was expected", table=name)
    if n < 0 or _HEAD + n * (12 if flags & COUNTS else 8) > len(raw):
        raise ConfigError(f"table {name!r}: a piece of {len(raw)} bytes cannot hold {n} ids", table=name)
    return raw, n, flags, dim


def _ids(raw: Any, n: int, flags: int, name: str) -> tuple[Ids, Counts | None, int]:
    end = _HEAD + 8 * n
    if not n:
        return np.empty(0, np.int64), None, end
    ids = raw[_HEAD:end].view(np.int64)
    if not ids.flags.aligned:  # every sum over them would copy them
        ids = ids.copy()
    if int(ids[0]) < 0:
        raise ConfigError(
            f"table {name!r}: id {int(ids[0])} is negative: ids are whole numbers from 0 to 2**63 - 1",
            table=name,
            id=int(ids[0]),
        )
    if n > 1 and not (ids[1:] > ids[:-1]).all():
        at = int(np.argmin(ids[1:] > ids[:-1]))
        raise ConfigError(
            f"table {name!r}: id {int(ids[at + 1])} comes after {int(ids[at])}: ids must be ascending, "
            "and none twice (sum the gradients of one id first)",
            table=name,
        )
    if not flags & COUNTS:
        return ids, None, end
    return ids, raw[end : end + 4 * n].view(np.uint32), end + (4 * n + 7) // 8 * 8


def decode_pull(data: Any, table: SparseTable) -> TablePull:
    """Read a pull's piece; views of `data`.

    Raises:
        ConfigError: a negative id, ids that do not ascend, or a piece that is no pull; it names the table.
    """
    raw, n, flags, _ = _head(data, table.name, push=False)
    ids, counts, _ = _ids(raw, n, flags, table.name)
    return TablePull(ids, counts, bool(flags & HALF))


def decode_push(data: Any, table: SparseTable) -> TablePush:
    """Read a push's piece; views of `data` but for bfloat16 rows, which become the table's dtype.

    Raises:
        ConfigError: as `decode_pull`; rows of another dimension than the table's, or a row that is not finite.
    """
    raw, n, flags, dim = _head(data, table.name, push=True)
    ids, counts, at = _ids(raw, n, flags, table.name)
    dtype = DTYPES[table.dtype]
    if not n:
        return TablePush(ids, np.empty(0, np.uint32), torch.empty(0, table.dim, dtype=dtype))
    if dim != table.dim:
        raise ConfigError(
            f"table {table.name!r}: rows of {dim} elements came: it has {table.dim} (dim)",
            table=table.name,
            dim=table.dim,
        )
    size = n * dim * (2 if flags & HALF else dtype.itemsize)
    if at + size > len(raw):
        raise ConfigError(
            f"table {table.name!r}: {len(raw) - at} bytes of rows came for {n} ids: {size} were expected "
            f"({table.dtype} [{n}, {dim}])",
            table=table.name,
        )
    if counts is None:
        counts = np.ones(n, np.uint32)
    held = raw[at : at + size]
    if flags & HALF:
        rows = torch.from_numpy(held.view(np.int16).copy()).view(torch.bfloat16).to(dtype).view(n, dim)
    else:
        rows = _tensor(held.view(np.float32 if dtype is torch.float32 else np.float64).reshape(n, dim))
    if not math.isfinite(float(rows.sum())):  # the sum finds nearly always that all are: this costs little
        wrong = torch.isfinite(rows).all(1).logical_not().nonzero().view(-1)
        if len(wrong):
            first = int(ids[int(wrong[0])])
            raise ConfigError(
                f"table {table.name!r}: the gradient of id {first} is not finite, and {len(wrong) - 1} "
                "more: nothing was applied",
                table=table.name,
                id=first,
            )
    return TablePush(ids, counts, rows)


class _Writable:
    """An array's memory, said to be writable: torch warns of what is not, and nobody writes to what has come."""

    def __init__(self, array: Any) -> None:
        self.array = array  # lives as long as what is made of this
        said = dict(array.__array_interface__)
        said["data"] = (said["data"][0], False)
        self.__array_interface__ = said


def _tensor(array: Any) -> Tensor:
    """A tensor of the same memory."""
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Writable(array)))


def encode_rows(rows: Any, half: bool = False) -> Any:
    """The answer to a pull: rows [n, dim] as a buffer."""
    if not half:
        return rows.reshape(-1).view(np.uint8)
    return torch.from_numpy(rows).to(torch.bfloat16).view(torch.int16).numpy().reshape(-1).view(np.uint8)


def decode_rows(data: Any, n: int, table: SparseTable, half: bool = False) -> Tensor:
    """Read a pull's answer: a tensor [n, dim] of the table's dtype, a view where it came in that dtype.

    Raises:
        ConfigError: it holds another number of bytes.
    """
    dtype = DTYPES[table.dtype]
    size = n * table.dim * (2 if half else dtype.itemsize)
    if len(data) != size:
        raise ConfigError(
            f"table {table.name!r}: {len(data)} bytes came for {n} rows: {size} were expected", table=table.name
        )
    if not n:
        return torch.empty(0, table.dim, dtype=dtype)
    raw = np.frombuffer(data, np.uint8)
    if half:
        return torch.from_numpy(raw.view(np.int16).copy()).view(torch.bfloat16).to(dtype).view(n, table.dim)
    return _tensor(raw.view(np.float32 if dtype is torch.float32 else np.float64).reshape(n, table.dim))


def empty_push(table: SparseTable) -> Any:
    """The piece of a segment that a step does not touch: its clock advances with it."""
    return _piece(_ROWS, table.dim, np.empty(0, np.int64), None, 0)[0]
