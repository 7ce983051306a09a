"""A segment's whole state as bytes: what a copy begins with, what a checkpoint keeps. Pure.

Magic, bytes of a JSON head, the head filled up to 8 bytes, then its arrays one after the other, each filled up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from rayps.core.errors import CheckpointError
from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables.pages import Field
from rayps.ps.tables.row_store import Columns

_MAGIC = b"rayps-t1"
_DTYPES = {"int64", "uint32", "float32", "float64"}


def pack(head: Mapping[str, Any], arrays: Mapping[str, Any]) -> bytes:
    """A head of plain data and arrays by name."""
    shapes = {name: [str(value.dtype), list(value.shape)] for name, value in arrays.items()}
    text = json.dumps({"head": dict(head), "arrays": shapes}).encode()
    text += b" " * (-len(text) % 8)
    parts: list[Any] = [_MAGIC, len(text).to_bytes(8, "little"), text]
    for value in arrays.values():
        flat: Any = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        parts += [memoryview(flat), bytes(-len(flat) % 8)]
    return b"".join(parts)


def unpack(data: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read back what `pack` gave; the arrays are views. Raises CheckpointError."""
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    try:
        if view[:8] != _MAGIC:
            raise ValueError("it does not begin as one")
        at = 16 + int.from_bytes(view[8:16], "little")
        said = json.loads(bytes(view[16:at]))
        arrays: dict[str, Any] = {}
        for name, (dtype, shape) in said["arrays"].items():
            if dtype not in _DTYPES:
                raise ValueError(f"{name} is of {dtype}")
            kind = np.dtype(dtype)
            size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
            arrays[name] = np.frombuffer(view[at : at + size], kind).reshape(shape) if size else np.empty(shape, kind)
            at += size + -size % 8
        return dict(said["head"]), arrays
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the state of a table's segment ({len(view)} bytes) cannot be read: {error}") from error


def as_arrays(columns: Columns) -> dict[str, Any]:
    """Rows as arrays by name, for `pack`."""
    state = {f"state.{name}": value for name, value in columns.state.items()}
    return {"ids": columns.ids, "rows": columns.rows, **state, "life": columns.life}


def as_columns(table: SparseTable, fields: tuple[Field, ...], arrays: Mapping[str, Any]) -> Columns:
    """Read back what `as_arrays` gave.

    Raises:
        CheckpointError: the rows or their optimizer's state are not this table's.
    """
    wanted = {"rows": (table.dim, table.dtype), **{f"state.{f.name}": (f.width, f.dtype) for f in fields}}
    count = len(arrays.get("ids", ()))
    found = {
        name: (value.shape, str(value.dtype))
        for name, value in arrays.items()
        if name in wanted or name.startswith("state.")
    }
    needed = {name: ((count, width), dtype) for name, (width, dtype) in wanted.items()}
    if found != needed or "life" not in arrays:
        raise CheckpointError(
            f"table {table.name!r}: the state holds {found}: {needed} were expected "
            f"(dim, dtype and optimizer of the table)",
            table=table.name,
        )
    state = {f.name: arrays[f"state.{f.name}"] for f in fields}
    return Columns(arrays["ids"], arrays["rows"], state, arrays["life"])
