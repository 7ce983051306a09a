"""A table as Parquet files, one for each segment, which any number of segments loads and anybody can query.

Columns: id; row, a list of `dim` numbers; a column for each part of the optimizer's state; uses (true counts) and
used (version of the segment). Rows are in the order of their ids. Beside them, where ids are counted that are not
stored yet, `counted-NNNNN.parquet`: id, uses, used. What else a segment knows is in the files' metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayps.core.errors import CheckpointError
from rayps.core.ledger import Ledger
from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables import segment_state
from rayps.ps.tables.pages import Field
from rayps.ps.tables.row_optimizers import rule_of
from rayps.ps.tables.row_store import Columns
from rayps.ps.tables.wire_format import bucket, split

_LIFE = ("uses", "used")
_GROUP = 1 << 17  # rows of a row group
_KEY = b"rayps.table"


def write(folder: str | Path, table: SparseTable, states: Iterable[Any]) -> list[Path]:
    """Save a table: the states of all its segments (`TableSegment.dump` or `.part`), one file each; their paths.

    Raises:
        CheckpointError: a state is torn, or not of this table.
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
        said = {"head": head, "dim": table.dim, "optimizer": table.optimizer, "init": table.init, "seed": table.seed}
        if len(arrays["life.candidates"]):
            seen = arrays["life.seen"]
            counted = pa.table({"id": arrays["life.candidates"], "uses": seen[:, 0].copy(), "used": seen[:, 1].copy()})
            pq.write_table(counted, place / f"counted-{index:05d}.parquet")
        path = place / f"rows-{index:05d}.parquet"
        whole = as_arrow(table, fields, columns).replace_schema_metadata({_KEY: json.dumps(said)})
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
    """Rows as an Arrow table; the memory is shared."""
    found = {"id": pa.array(columns.ids), "row": _lists(columns.rows, table.dim)}
    for field in fields:
        value = columns.state[field.name]
        found[field.name] = pa.array(value[:, 0]) if field.width == 1 else _lists(value, field.width)
    for name, value in zip(_LIFE, columns.life.T, strict=True):
        found[name] = pa.array(np.ascontiguousarray(value))
    return pa.table(found)


def as_columns(table: SparseTable, fields: Sequence[Field], given: pa.Table) -> Columns:
    """Read back what `as_arrow` gave. Raises CheckpointError: columns are missing, or of another width."""
    try:
        rows = _array(given["row"], table.dim, table.dtype)
        values = {field.name: _array(given[field.name], field.width, field.dtype) for field in fields}
        life = np.stack([given[name].to_numpy() for name in _LIFE], axis=1)
        return Columns(given["id"].to_numpy(), rows, values, life)
    except (KeyError, ValueError, AttributeError, pa.ArrowInvalid) as error:
        needed = ", ".join(["id", f"row [{table.dim}]", *(f"{f.name} [{f.width}]" for f in fields), *_LIFE])
        raise CheckpointError(
            f"table {table.name!r}: the files hold {given.schema.names}: {needed} were expected ({error})",
            table=table.name,
        ) from error


def _lists(values: Any, width: int) -> Any:
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).reshape(-1)), width)


def _array(column: Any, width: int, dtype: str) -> Any:
    held = column.combine_chunks()
    if isinstance(held, pa.ChunkedArray):
        held = held.chunk(0) if held.num_chunks else pa.array([], held.type)
    flat = held.flatten() if isinstance(held, pa.FixedSizeListArray) else held
    return flat.to_numpy(zero_copy_only=False).astype(dtype, copy=False).reshape(len(column), width)


def read(
    folder: str | Path,
    table: SparseTable,
    workers: int,
    only: Iterable[int] | None = None,
    marks: Sequence[int] | None = None,
) -> Iterator[tuple[int, bytes]]:
    """The table's segments from what `write` saved, however many there were: index and state for `TableSegment.load`.

    Segments `only`, or all. Clocks begin at `marks`, by rank; where the cut and the number of workers are those that
    were saved, and no marks are given, each segment is what it was, its ledger too.

    Raises:
        CheckpointError: there is no such table in the folder, or its files are torn or do not fit.
    """
    files = sorted(Path(folder).glob("rows-*.parquet"))
    if not files:
        raise CheckpointError(f"table {table.name!r}: there are no files rows-*.parquet in {folder}", table=table.name)
    heads = [_said(path, table) for path in files]
    if heads[0]["segments"] != len(files):
        raise CheckpointError(
            f"table {table.name!r}: {len(files)} files are in {folder}: {heads[0]['segments']} were saved",
            table=table.name,
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
        yield index, _state(columns, head, _counted(path))


def _cut_anew(
    table: SparseTable, fields: Sequence[Field], files: list[Path], wanted: list[int], clock: tuple[int, Ledger]
) -> Iterator[tuple[int, bytes]]:
    parts: dict[int, list[tuple[Columns, Columns]]] = {index: [] for index in wanted}
    none = {field.name: np.empty((0, field.width), field.dtype) for field in fields}
    for path in files:
        columns, (ids, seen) = as_columns(table, fields, _load(path)), _counted(path)
        counted = Columns(ids, seen, {}, seen)
        order, bounds = split(columns.ids, table.segments)
        columns = columns.take(order)  # those of one segment together, once for all of them
        held = bucket(ids, table.segments)
        for index in wanted:
            mine = columns.take(slice(bounds[index], bounds[index + 1]))
            parts[index].append((mine, counted.take(np.flatnonzero(held == index))))
    for index in wanted:
        rows = _joined([each for each, _ in parts[index]], none)
        counted = _joined([each for _, each in parts.pop(index)], {})
        life = {"evicted": 0, "known_from": clock[0], "log": []}
        head = {
            "table": table.name,
            "index": index,
            "segments": table.segments,
            "seq": 0,
            "version": clock[0],
            "ledger": clock[1].to_json(),
            "life": life,
        }
        yield index, _state(rows, head, (counted.ids, counted.life))


def _joined(several: list[Columns], none: dict[str, Any]) -> Columns:
    ids = np.concatenate([each.ids for each in several])
    whole = {name: np.concatenate([each.state[name] for each in several]) for name in none}
    rows, life = (np.concatenate(parts) for parts in zip(*((each.rows, each.life) for each in several), strict=True))
    return Columns(ids, rows, whole, life).take(np.argsort(ids))


def _state(columns: Columns, head: dict[str, Any], counted: tuple[Any, Any]) -> bytes:
    life = dict(head["life"])
    if life["log"]:  # which rows were evicted is not saved: a delta from before this is a whole
        life |= {"known_from": head["version"], "log": []}
    none = np.empty(0, np.int64)
    return segment_state.pack(
        {**head, "life": life},
        {
            **segment_state.as_arrays(columns),
            "life.candidates": counted[0],
            "life.seen": counted[1],
            "life.evicted": none,
        },
    )


def _said(path: Path, table: SparseTable) -> dict[str, Any]:
    try:
        said = json.loads(pq.read_schema(path).metadata[_KEY])
        head: dict[str, Any] = said["head"]
    except (KeyError, TypeError, ValueError, OSError, pa.ArrowException) as error:
        raise CheckpointError(f"table {table.name!r}: {path} cannot be read: {error}", table=table.name) from error
    name = table.optimizer.get("name")
    if said["dim"] != table.dim or said["optimizer"].get("name") != name:
        raise CheckpointError(
            f"table {table.name!r}: {path} holds rows of {said['dim']} elements with the state of "
            f"{said['optimizer'].get('name')}: {table.dim} and {name} were expected",
            table=table.name,
        )
    return head


def _load(path: Path) -> pa.Table:
    return pq.read_table(path, memory_map=True)


def _counted(path: Path) -> tuple[Any, Any]:
    beside = path.with_name(path.name.replace("rows-", "counted-"))
    if not beside.exists():
        return np.empty(0, np.int64), np.zeros((0, 2), np.int64)
    found = pq.read_table(beside)
    return found["id"].to_numpy(), np.stack([found["uses"].to_numpy(), found["used"].to_numpy()], axis=1)
