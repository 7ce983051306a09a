"""A delta: the rows of a table's segment that changed since a version, as an Arrow stream.

A system that serves the rows during training reads deltas. A record has the fields id, row, version and `gone`. `gone`
is true if the row was evicted; then `row` is null. The schema's metadata contains the table, the segment, the first and
last version, and whether the delta is `whole`. A whole delta contains all stored rows; a row that is not in it was
evicted. A delta is whole if it begins at version 0, or if the segment's log lacks evictions since the requested
version.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from rayps_client.errors import DataError
from rayps_client.values import Buffer

from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables.row_store import USED
from rayps.ps.tables.wire_format import Bytes, Ids, Rows

if TYPE_CHECKING:
    from rayps.ps.tables.table_segment import TableSegment

_KEY = b"rayps.delta"


class DeltaHead(TypedDict):
    """The metadata of a delta. The delta covers the versions after `since` up to and including `version`."""

    table: str
    segment: int
    segments: int
    since: int
    version: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Delta:
    """A decoded delta: `ids` [n], `rows` [n, dim] and `versions` [n] of changed rows, and the ids of evicted rows."""

    segment: int
    since: int
    version: int
    whole: bool
    ids: Ids
    rows: Rows
    versions: NDArray[np.int64]
    gone: Ids


def make_schema(table: SparseTable) -> pa.Schema:
    """Return the Arrow schema of a table's deltas."""
    number = pa.from_numpy_dtype(np.dtype(table.dtype))
    return pa.schema(
        [("id", pa.int64()), ("row", pa.list_(number, table.dim)), ("version", pa.int64()), ("gone", pa.bool_())]
    )


def encode_delta(segment: TableSegment, since: int) -> bytes:
    """Encode the rows that changed or were evicted in versions after `since`, as an Arrow IPC stream."""
    with segment.store.lock:
        evicted = segment.life.evicted_since(since) if since > 0 else None
        ids, life = segment.store.life()
        whole = evicted is None
        columns = segment.store.export(ids if whole else ids[life[:, USED] > since])
        gone = np.empty(0, np.int64)  # ids that were evicted and not stored again
        if evicted is not None and len(evicted):
            gone = np.setdiff1d(evicted, ids)
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
    kind = make_schema(table).with_metadata({_KEY: json.dumps(head)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, kind) as writer:
        rows = pa.FixedSizeListArray.from_arrays(pa.array(columns.rows.reshape(-1)), type=kind.field("row").type)
        writer.write_batch(
            pa.record_batch(
                [
                    pa.array(columns.ids),
                    rows,
                    pa.array(columns.life[:, USED].copy()),
                    _fill_array(False, len(columns.ids)),
                ],
                schema=kind,
            )
        )
        if len(gone):
            writer.write_batch(
                pa.record_batch(
                    [
                        pa.array(gone),
                        pa.nulls(len(gone), kind.field("row").type),
                        pa.array(np.full(len(gone), version)),
                        _fill_array(True, len(gone)),
                    ],
                    schema=kind,
                )
            )
    return bytes(sink.getvalue())


def _fill_array(value: bool, count: int) -> pa.Array:
    return pa.array(np.full(count, value))


def read_delta(data: Buffer | Bytes) -> Delta:
    """Decode a delta. Raises DataError if `data` is truncated or not a delta."""
    try:
        with pa.ipc.open_stream(data) as reader:
            head: DeltaHead = json.loads(reader.schema.metadata[_KEY])
            batches = list(reader)
        kept = [batch for batch in batches if not batch["gone"].true_count]
        gone = [batch["id"].to_numpy() for batch in batches if batch["gone"].true_count]
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
        np.concatenate(gone) if gone else np.empty(0, np.int64),
    )


class Served:
    """A serving system's copy of the rows by id, updated by deltas."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[int, Rows]] = {}  # for each segment: from id to row [dim]
        self.versions: dict[int, int] = {}  # for each segment: the version of its rows, the `since` of the next delta

    def apply(self, data: Buffer) -> None:
        """Apply an encoded delta.

        Raises DataError if the delta is truncated, or begins at a newer version than this copy has.
        """
        self.apply_decoded(read_delta(data))

    def apply_decoded(self, found: Delta) -> None:
        """Apply a decoded delta. Raises DataError if the delta begins at a newer version than this copy has."""
        known = self.versions.get(found.segment, 0)
        if not found.whole and found.since > known:
            raise DataError(
                f"the delta of segment {found.segment} begins at version {found.since}, but this copy is of version "
                f"{known}: request a delta since version {known}"
            )
        rows = {} if found.whole else self.rows.get(found.segment, {})
        rows.update(zip(found.ids.tolist(), found.rows, strict=True))
        for each in found.gone.tolist():
            rows.pop(each, None)
        self.rows[found.segment], self.versions[found.segment] = rows, found.version
