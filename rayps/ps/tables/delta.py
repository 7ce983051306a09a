"""What changed in a segment since a version, as an Arrow stream: how a system that serves the rows follows training.

A record is id, row, version, and whether the row is gone (then `row` is null). The schema's metadata says of which
table and segment, from which version to which, and whether it is `whole`: then it is all rows, and what is not in it
is gone. It is whole from version 0, and where evictions since the version asked for are no longer all remembered.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from rayps.core.errors import DataError
from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables.row_store import USED
from rayps.ps.tables.table_segment import TableSegment

_KEY = b"rayps.delta"


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta that was read: rows [n, dim] to be put in place, and ids to be forgotten."""

    segment: int
    since: int
    version: int
    whole: bool
    ids: Any
    rows: Any
    versions: Any
    gone: Any


def schema(table: SparseTable) -> pa.Schema:
    """The columns of a table's deltas."""
    number = pa.from_numpy_dtype(np.dtype(table.dtype))
    return pa.schema(
        [("id", pa.int64()), ("row", pa.list_(number, table.dim)), ("version", pa.int64()), ("gone", pa.bool_())]
    )


def delta(segment: TableSegment, since: int) -> bytes:
    """The rows of a segment that changed in versions after `since`, and those evicted, as an Arrow IPC stream."""
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
    said = {
        "table": table.name,
        "segment": segment.index,
        "segments": table.segments,
        "since": since,
        "version": version,
        "whole": whole,
    }
    kind = schema(table).with_metadata({_KEY: json.dumps(said)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, kind) as writer:
        kept = pa.FixedSizeListArray.from_arrays(pa.array(columns.rows.reshape(-1)), type=kind.field("row").type)
        writer.write_batch(
            pa.record_batch(
                [pa.array(columns.ids), kept, pa.array(columns.life[:, USED].copy()), _all(False, len(columns.ids))],
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


def _all(value: bool, count: int) -> Any:
    return pa.array(np.full(count, value))


def read_delta(data: Any) -> Delta:
    """Read what `delta` gave. Raises DataError."""
    try:
        with pa.ipc.open_stream(data) as reader:
            said = json.loads(reader.schema.metadata[_KEY])
            batches = list(reader)
        kept = [batch for batch in batches if not batch["gone"].true_count]
        lost = [batch["id"].to_numpy() for batch in batches if batch["gone"].true_count]
        whole = pa.Table.from_batches(kept, reader.schema)
        width = reader.schema.field("row").type.list_size
        rows = whole["row"].combine_chunks().flatten().to_numpy().reshape(-1, width)
    except (pa.ArrowInvalid, KeyError, TypeError, ValueError, OSError) as error:
        raise DataError(f"a table's delta cannot be read: {error}") from error
    return Delta(
        said["segment"],
        said["since"],
        said["version"],
        said["whole"],
        whole["id"].to_numpy(),
        rows,
        whole["version"].to_numpy(),
        np.concatenate(lost) if lost else np.empty(0, np.int64),
    )


class Served:
    """Rows by id as a serving system has them, kept up to date by deltas."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[int, Any]] = {}  # by segment, by id
        self.versions: dict[int, int] = {}  # by segment: what to ask the next delta from

    def apply(self, data: Any) -> None:
        """Take a delta in. Raises DataError: it is torn, or begins after what is known here."""
        self.take(read_delta(data))

    def take(self, found: Delta) -> None:
        """Take in a delta that was read. Raises DataError: it begins after what is known here."""
        known = self.versions.get(found.segment, 0)
        if not found.whole and found.since > known:
            raise DataError(
                f"a delta of segment {found.segment} from version {found.since} came: version {known} is "
                "known here; ask from there"
            )
        rows = {} if found.whole else self.rows.get(found.segment, {})
        rows.update(zip(found.ids.tolist(), found.rows, strict=True))
        for each in found.gone.tolist():
            rows.pop(each, None)
        self.rows[found.segment], self.versions[found.segment] = rows, found.version
