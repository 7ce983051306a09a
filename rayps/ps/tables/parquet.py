"""A table as Parquet files, one for each segment. A table with another number of segments can load them too.

A file `rows-NNNNN.parquet` has these columns: id; row, a list of `dim` numbers; one column for each field of the
optimizer's state; uses, the use count; used, the segment's version at the last use. Its rows are in the order of ids. A
file `counted-NNNNN.parquet` contains the ids that are counted and not stored, in the columns id, uses and used. The
segment's JSON data is in the metadata of the file of rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from rayps_client.errors import CheckpointError
from rayps_client.values import Buffer, JsonObject

from rayps.core.job.repeated_pushes import Ledger
from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables import segment_state
from rayps.ps.tables.disk import FieldValues
from rayps.ps.tables.pages import Field
from rayps.ps.tables.row_optimizers import rule_of
from rayps.ps.tables.row_store import Columns
from rayps.ps.tables.segment_state import LifeHead, SegmentHead
from rayps.ps.tables.wire_format import Ids, Rows, bucket, split

_LIFE = ("uses", "used")
_GROUP = 1 << 17  # rows of a row group
_KEY = b"rayps.table"


class _Metadata(TypedDict):
    """The metadata of a file of rows."""

    head: SegmentHead
    dim: int
    optimizer: JsonObject
    init: JsonObject
    seed: int


class _Counted(NamedTuple):
    """The ids [n] that are counted and not stored, and their use count and version of the last use [n, 2]."""

    ids: Ids
    seen: NDArray[np.int64]


def write(folder: str | Path, table: SparseTable, states: Iterable[Buffer]) -> list[Path]:
    """Save the states of a table's segments (`TableSegment.dump` or `.part`), each in one file of rows.

    Return the paths of the files of rows.

    Raises:
        CheckpointError: a state is truncated, or of another table.
    """
    place, written = Path(folder), []
    place.mkdir(parents=True, exist_ok=True)
    fields = rule_of(table).fields
    for each in states:
        head, arrays = segment_state.unpack(each)
        columns = segment_state.as_columns(table, fields, arrays)
        index = int(head["index"])
        for old in place.glob(f"*-{index:05d}.parquet"):
            old.unlink()
        metadata: _Metadata = {
            "head": head,
            "dim": table.dim,
            "optimizer": table.optimizer,
            "init": table.init,
            "seed": table.seed,
        }
        if len(arrays["life.candidates"]):
            seen = arrays["life.seen"]
            counted = pa.table({"id": arrays["life.candidates"], "uses": seen[:, 0].copy(), "used": seen[:, 1].copy()})
            pq.write_table(counted, place / f"counted-{index:05d}.parquet")
        path = place / f"rows-{index:05d}.parquet"
        whole = as_arrow(table, fields, columns).replace_schema_metadata({_KEY: json.dumps(metadata)})
        pq.write_table(
            whole,
            path,
            row_group_size=_GROUP,
            use_dictionary=False,
            compression="none",
            column_encoding={"id": "DELTA_BINARY_PACKED"},
            write_statistics=["id"],
        )
        written.append(path)
    return written


def as_arrow(table: SparseTable, fields: Sequence[Field], columns: Columns) -> pa.Table:
    """Return rows as an Arrow table that shares their memory."""
    found = {"id": pa.array(columns.ids), "row": _make_lists(columns.rows, table.dim)}
    for field in fields:
        value = columns.state[field.name]
        found[field.name] = pa.array(value[:, 0]) if field.width == 1 else _make_lists(value, field.width)
    for name, value in zip(_LIFE, columns.life.T, strict=True):
        found[name] = pa.array(np.ascontiguousarray(value))
    return pa.table(found)


def as_columns(table: SparseTable, fields: Sequence[Field], given: pa.Table) -> Columns:
    """Return the rows in an Arrow table that `as_arrow` made.

    Raises CheckpointError if a column is missing or has another width.
    """
    try:
        rows = _read_array(given["row"], table.dim, table.dtype)
        values = {field.name: _read_array(given[field.name], field.width, field.dtype) for field in fields}
        life = np.stack([given[name].to_numpy() for name in _LIFE], axis=1)
        return Columns(given["id"].to_numpy(), rows, values, life)
    except (KeyError, ValueError, AttributeError, pa.ArrowInvalid) as error:
        needed = ", ".join(["id", f"row [{table.dim}]", *(f"{f.name} [{f.width}]" for f in fields), *_LIFE])
        raise table.error(
            CheckpointError, f"the files have columns {given.schema.names}; expected {needed} ({error})"
        ) from error


def _make_lists(values: Rows, width: int) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).reshape(-1)), width)


def _read_array(column: pa.ChunkedArray, width: int, dtype: str) -> Rows:
    held = column.combine_chunks()
    if isinstance(held, pa.ChunkedArray):
        held = held.chunk(0) if held.num_chunks else pa.array([], held.type)
    flat = held.flatten() if isinstance(held, pa.FixedSizeListArray) else held
    found: Rows = flat.to_numpy(zero_copy_only=False).astype(dtype, copy=False).reshape(len(column), width)
    return found


def read(
    folder: str | Path,
    table: SparseTable,
    workers: int,
    only: Iterable[int] | None = None,
    marks: Sequence[int] | None = None,
) -> Iterator[tuple[int, bytes]]:
    """Yield (index, state for `TableSegment.load`) of each segment of a table, from files that `write` saved.

    The files may be of another number of segments. `only`: the wanted segments; None means all. `marks`: the first step
    of each rank. If `marks` is None, the saved clocks and ledgers are used if the numbers of segments and workers are
    the saved ones; otherwise the first step is 0.

    Raises:
        CheckpointError: the folder has no files of the table, or a file is truncated or of another table.
    """
    files = sorted(Path(folder).glob("rows-*.parquet"))
    if not files:
        raise table.error(CheckpointError, f"no files rows-*.parquet in {folder}")
    heads = [_read_head(path, table) for path in files]
    if heads[0]["segments"] != len(files):
        raise table.error(
            CheckpointError, f"{folder} has {len(files)} files rows-*.parquet; expected {heads[0]['segments']}"
        )
    wanted = list(range(table.segments)) if only is None else list(only)
    fields, same = rule_of(table).fields, len(files) == table.segments
    version = max(head["version"] for head in heads)
    if not same:
        yield from _cut_anew(table, fields, files, wanted, (version, Ledger(marks or [0] * workers)))
        return
    for index in wanted:
        head, path = heads[index], files[index]
        if marks is not None or len(head["ledger"]["marks"]) != workers:
            head["ledger"] = Ledger(marks or [0] * workers).to_json()
        columns = as_columns(table, fields, _load(path))
        yield index, _pack_state(columns, head, _read_counted(path))


def _cut_anew(
    table: SparseTable, fields: Sequence[Field], files: list[Path], wanted: list[int], clock: tuple[int, Ledger]
) -> Iterator[tuple[int, bytes]]:
    parts: dict[int, list[tuple[Columns, Columns]]] = {index: [] for index in wanted}
    empty = {field.name: np.empty((0, field.width), field.dtype) for field in fields}
    for path in files:
        columns, (ids, seen) = as_columns(table, fields, _load(path)), _read_counted(path)
        counted = Columns(ids, seen, {}, seen)
        order, bounds = split(columns.ids, table.segments)
        columns = columns.take(order)  # group the rows by segment, once for all segments
        held = bucket(ids, table.segments)
        for index in wanted:
            mine = columns.take(slice(bounds[index], bounds[index + 1]))
            parts[index].append((mine, counted.take(np.flatnonzero(held == index))))
    for index in wanted:
        rows = _join([each for each, _ in parts[index]], empty)
        counted = _join([each for _, each in parts.pop(index)], {})
        life: LifeHead = {"evicted": 0, "known_from": clock[0], "log": []}
        head: SegmentHead = {
            "table": table.name,
            "index": index,
            "segments": table.segments,
            "seq": 0,
            "version": clock[0],
            "ledger": clock[1].to_json(),
            "life": life,
        }
        yield index, _pack_state(rows, head, _Counted(counted.ids, counted.life))


def _join(several: list[Columns], none: FieldValues) -> Columns:
    ids = np.concatenate([each.ids for each in several])
    whole = {name: np.concatenate([each.state[name] for each in several]) for name in none}
    rows, life = (np.concatenate(parts) for parts in zip(*((each.rows, each.life) for each in several), strict=True))
    return Columns(ids, rows, whole, life).take(np.argsort(ids))


def _pack_state(columns: Columns, head: SegmentHead, counted: _Counted) -> bytes:
    life = head["life"]
    if life["log"]:  # the ids of evicted rows are not saved; a delta since an earlier version will be whole
        life = {"evicted": life["evicted"], "known_from": head["version"], "log": []}
    none = np.empty(0, np.int64)
    return segment_state.pack(
        {**head, "life": life},
        {
            **segment_state.as_arrays(columns),
            "life.candidates": counted.ids,
            "life.seen": counted.seen,
            "life.evicted": none,
        },
    )


def _read_head(path: Path, table: SparseTable) -> SegmentHead:
    try:
        found: _Metadata = json.loads(pq.read_schema(path).metadata[_KEY])
        head = found["head"]
    except (KeyError, TypeError, ValueError, OSError, pa.ArrowException) as error:
        raise table.error(CheckpointError, f"cannot read {path}: {error}") from error
    name = table.optimizer.get("name")
    if found["dim"] != table.dim or found["optimizer"].get("name") != name:
        raise table.error(
            CheckpointError,
            f"{path} has rows of {found['dim']} elements and the optimizer state of "
            f"{found['optimizer'].get('name')}; expected {table.dim} elements and {name}",
        )
    return head


def _load(path: Path) -> pa.Table:
    return pq.read_table(path, memory_map=True)


def _read_counted(path: Path) -> _Counted:
    beside = path.with_name(path.name.replace("rows-", "counted-"))
    if not beside.exists():
        return _Counted(np.empty(0, np.int64), np.zeros((0, 2), np.int64))
    found = pq.read_table(beside)
    return _Counted(found["id"].to_numpy(), np.stack([found["uses"].to_numpy(), found["used"].to_numpy()], axis=1))
