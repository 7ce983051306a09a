"""A delta: the rows of a table's segment that changed since a version, as an Arrow stream.

It is for a system that serves the rows during training. A record has id, row, version, and `gone`: whether the row was
evicted (then `row` is null). The schema's metadata contains the table, the segment, the first and last version, and
whether the delta is `whole`: a whole delta contains all stored rows, so a row that it lacks was evicted. A delta is
whole if it begins at version 0, or if the segment no longer remembers all evictions since the requested version.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rayps.core.errors import DataError
from rayps.core.values import Buffer
from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables.row_store import USED
from rayps.ps.tables.table_segment import TableSegment
from rayps.ps.tables.wire_format import Ids, Rows

_KEY = b"rayps.delta"


class DeltaHead(TypedDict):
    """The metadata of a delta. The delta covers the versions after `since` up to `version`."""

    table: str
    segment: int
    segments: int
    since: int
    version: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Delta:
    """A decoded delta: the rows [n, dim] that changed, by id, and the ids of evicted rows."""

    segment: int
    since: int
    version: int
    whole: bool
    ids: Ids
    rows: Rows
    versions: NDArray[np.int64]
    gone: Ids


def schema(table: SparseTable) -> pa.Schema:
    """Return the Arrow schema of a table's deltas."""
    number = pa.from_numpy_dtype(np.dtype(table.dtype))
    return pa.schema(
        [("id", pa.int64()), ("row", pa.list_(number, table.dim)), ("version", pa.int64()), ("gone", pa.bool_())]
    )


def delta(segment: TableSegment, since: int) -> bytes:
    """Encode the rows that changed or were evicted in versions after `since`, as an Arrow IPC stream."""
    with segment.store.lock:
        gone = segment.life.gone(since) if since > 0 else None
        ids, life = segment.store.life()
        whole = gone is None
        columns = segment.store.export(ids if whole else ids[life[:, USED] > since])
        lost = np.empty(0, np.int64)
        if gone is not None and len(gone):
            lost = np.setdiff1d(gone, ids)
        version = segment.version
    table = segment.table
    head: DeltaHead = {
        "table": table.name,
        "segment": segment.index,
        "segments": table.segments,
        "since": since,
        "version": version,
        "whole": whole,
    }
    kind = schema(table).with_metadata({_KEY: json.dumps(head)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, kind) as writer:
        rows = pa.FixedSizeListArray.from_arrays(pa.array(columns.rows.reshape(-1)), type=kind.field("row").type)
        writer.write_batch(
            pa.record_batch(
                [pa.array(columns.ids), rows, pa.array(columns.life[:, USED].copy()), _all(False, len(columns.ids))],
                schema=kind,
            )
        )
        if len(lost):
            writer.write_batch(
                pa.record_batch(
                    [
                        pa.array(lost),
                        pa.nulls(len(lost), kind.field("row").type),
                        pa.array(np.full(len(lost), version)),
                        _all(True, len(lost)),
                    ],
                    schema=kind,
                )
            )
    return bytes(sink.getvalue())


def _all(value: bool, count: int) -> pa.Array:
    return pa.array(np.full(count, value))


def read_delta(data: Buffer) -> Delta:
    """Decode a delta. Raises DataError: it is truncated or not a delta."""
    try:
        with pa.ipc.open_stream(data) as reader:
            head: DeltaHead = json.loads(reader.schema.metadata[_KEY])
            batches = list(reader)
        kept = [batch for batch in batches if not batch["gone"].true_count]
        lost = [batch["id"].to_numpy() for batch in batches if batch["gone"].true_count]
        whole = pa.Table.from_batches(kept, reader.schema)
        width = reader.schema.field("row").type.list_size
        rows = whole["row"].combine_chunks().flatten().to_numpy().reshape(-1, width)
    except (pa.ArrowInvalid, KeyError, TypeError, ValueError, OSError) as error:
        raise DataError(f"cannot decode the delta of a table: {error}") from error
    return Delta(
        head["segment"],
        head["since"],
        head["version"],
        head["whole"],
        whole["id"].to_numpy(),
        rows,
        whole["version"].to_numpy(),
        np.concatenate(lost) if lost else np.empty(0, np.int64),
    )


class Served:
    """A serving system's copy of the rows by id, updated by deltas."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[int, Rows]] = {}  # by segment, by id: [dim]
        self.versions: dict[int, int] = {}  # by segment: the `since` of the next delta

    def apply(self, data: Buffer) -> None:
        """Apply an encoded delta. Raises DataError: the delta is truncated, or its `since` is newer than this copy."""
        self.take(read_delta(data))

    def take(self, found: Delta) -> None:
        """Apply a decoded delta. Raises DataError: the delta's `since` is newer than this copy."""
        known = self.versions.get(found.segment, 0)
        if not found.whole and found.since > known:
            raise DataError(
                f"the delta of segment {found.segment} begins at version {found.since}, but this copy is of version "
                f"{known}: request one since version {known}"
            )
        rows = {} if found.whole else self.rows.get(found.segment, {})
        rows.update(zip(found.ids.tolist(), found.rows, strict=True))
        for each in found.gone.tolist():
            rows.pop(each, None)
        self.rows[found.segment], self.versions[found.segment] = rows, found.version
