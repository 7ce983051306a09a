"""The complete state of a segment as bytes, for backups and checkpoints. No I/O.

The format is: 8 bytes that identify it, the length of the JSON head, the head, and the arrays. The head and each array
are padded to a multiple of 8 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypedDict

import numpy as np
from rayps_client.errors import CheckpointError
from rayps_client.values import Buffer

from rayps.core.job.repeated_pushes import Ledger, LedgerJson
from rayps.ps.protocol.members import MemberChange, with_members
from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables.pages import Field
from rayps.ps.tables.row_store import Columns
from rayps.ps.tables.wire_format import Rows

_MAGIC = b"rayps-t1"
_DTYPES = {"int64", "uint32", "float32", "float64"}


class LifeHead(TypedDict):
    """The part of a `RowLifecycle`'s state that is stored as JSON; the other part is arrays."""

    evicted: int
    known_from: int
    log: list[list[int]]  # [version, number of ids evicted in it]


class SegmentHead(TypedDict):
    """The part of a segment's state that is stored as JSON; the other part is arrays."""

    table: str
    index: int
    segments: int
    seq: int
    version: int
    ledger: LedgerJson
    life: LifeHead


def pack(head: SegmentHead, arrays: Mapping[str, Rows]) -> bytes:
    """Encode a head of JSON data, and arrays by name, as bytes."""
    shapes = {name: [str(value.dtype), list(value.shape)] for name, value in arrays.items()}
    text = json.dumps({"head": dict(head), "arrays": shapes}).encode()
    text += b" " * (-len(text) % 8)
    parts: list[Buffer] = [_MAGIC, len(text).to_bytes(8, "little"), text]
    for value in arrays.values():
        flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        parts += [flat.data, bytes(-len(flat) % 8)]
    return b"".join(parts)


def unpack(data: Buffer) -> tuple[SegmentHead, dict[str, Rows]]:
    """Decode the result of `pack`; the arrays are views of `data`. Raises CheckpointError if `data` is not valid."""
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    try:
        if view[:8] != _MAGIC:
            raise ValueError(f"it does not begin with {_MAGIC!r}")
        at = 16 + int.from_bytes(view[8:16], "little")
        found = json.loads(bytes(view[16:at]))
        head: SegmentHead = found["head"]
        arrays: dict[str, Rows] = {}
        for name, (dtype, shape) in found["arrays"].items():
            if dtype not in _DTYPES:
                raise ValueError(f"{name} has dtype {dtype}")
            kind = np.dtype(dtype)
            size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
            arrays[name] = np.frombuffer(view[at : at + size], kind).reshape(shape) if size else np.empty(shape, kind)
            at += size + -size % 8
        return head, arrays
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"cannot read the state of a table segment ({len(view)} bytes): {error}") from error


def as_arrays(columns: Columns) -> dict[str, Rows]:
    """Return rows as arrays by name, for `pack`."""
    state = {f"state.{name}": value for name, value in columns.state.items()}
    return {"ids": columns.ids, "rows": columns.rows, **state, "life": columns.life}


def as_columns(table: SparseTable, fields: tuple[Field, ...], arrays: Mapping[str, Rows]) -> Columns:
    """Return the rows that `as_arrays` converted to arrays.

    Raises:
        CheckpointError: the rows or the optimizer state do not fit this table.
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
        raise table.error(
            CheckpointError,
            f"the state contains {found}; expected {needed} (from the table's dim, dtype and optimizer)",
        )
    state = {f.name: arrays[f"state.{f.name}"] for f in fields}
    ids, life = (arrays[name].astype(np.int64, copy=False) for name in ("ids", "life"))
    return Columns(ids, arrays["rows"], state, life)


def skip_steps(segment: Buffer, skips: Mapping[int, int], members: Sequence[MemberChange] = ()) -> tuple[Buffer, int]:
    """Change the state of a table's segment: missing pushes of each rank below the step `skips[rank]` count as applied.

    `members` are applied to the ledger too. Return the new state, and the number of the missing pushes, which are lost.
    """
    if not skips and not members:
        return segment, 0
    head, arrays = unpack(segment)
    ledger = Ledger.from_json(head["ledger"])
    missing = sum(ledger.skip(rank, step) for rank, step in skips.items())
    ledger = with_members(ledger, members)
    return pack({**head, "ledger": ledger.to_json()}, arrays), missing
