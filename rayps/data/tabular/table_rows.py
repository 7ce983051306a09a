"""Train on the rows of an Arrow table whose rows can be read by number: in memory, memory-mapped, or elsewhere.

A random permutation of all rows is distributed to the ranks, as `rayps.data.tensors` does. If the decoded rows fit into
`window_mb`, they are decoded once. Otherwise the rows of a batch are read and decoded for this batch, and memory holds
no more than the batch; pages of memory-mapped files belong to the operating system, which may drop them at any time.

Values that are NaN, infinite or null are invalid. They are found before training if the rows fit into `window_mb`,
and otherwise when they are read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from rayps_client.columns import Array, BadValue, ColumnLayout, ColumnRows, layout_of, missing
from rayps_client.errors import DataError
from rayps_client.rows import batch_size_of, drop_last_of

from rayps.data.base import Batch
from rayps.data.clients import Clients, GivenClients, checked_client, divide
from rayps.data.memory import InMemory
from rayps.data.partition_rules import Ints
from rayps.data.tabular.column_options import ColumnChoice, ColumnOptions

_log = logging.getLogger(__name__)
_BLOCK = 8192  # rows that are decoded at a time when all rows are read


class RowTable(Protocol):
    """A table whose rows are read by number."""

    @property
    def schema(self) -> pa.Schema:
        """The columns and their types."""

    @property
    def count(self) -> int:
        """The number of rows."""

    def take(self, columns: Sequence[str], which: Ints) -> pa.RecordBatch:
        """Return these columns of the rows with these numbers, in this order."""

    def blocks(self, columns: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
        """Yield these columns of all rows in order, at most `rows` rows at a time."""

    def place(self, row: int) -> str:
        """Return where a row is, for error messages, e.g. "rows.csv: row 7 of the file"."""


class RowTableData(InMemory):
    """A data source that reads rows of a table by number. The table is opened at the first access in each process.

    `name`: what the table is, for error messages. `open_table(columns)` returns the table with at least these columns
    as far as it has them; the function is pickled, the table is not.
    """

    separate_rows = True

    def __init__(
        self, name: str, open_table: Callable[[list[str]], RowTable], choice: ColumnChoice, options: ColumnOptions
    ) -> None:
        self.client = checked_client(options.get("client"), columns=True)
        self.batch_size = batch_size_of(options.get("batch_size", 32))
        self.drop_last = drop_last_of(options.get("drop_last", False))
        self.shuffle = options.get("shuffle", True)
        self.name = name
        self._open_table = open_table
        self._choice = choice
        self._reset()

    def _reset(self) -> None:
        self._table: RowTable | None = None
        self._layout: ColumnLayout | None = None
        self._held: ColumnRows | None = None
        self._clients = None
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_table": None, "_layout": None, "_held": None, "_clients": None, "_warned": False}

    def check(self) -> None:
        """Check the columns, and the values if all rows fit into `window_mb`.

        Raises:
            DataError: a column or a value is invalid. The text names the column and the row.
        """
        self._reset()
        self._rows_held()

    def rows(self) -> int:
        """Return the number of rows, including invalid rows."""
        return self._opened()[0].count

    def _opened(self) -> tuple[RowTable, ColumnLayout]:
        if self._table is None or self._layout is None:
            choice, table = self._choice, self._open_table(self._used())
            layout = layout_of(
                table.schema,
                choice.features,
                choice.label,
                dtype=choice.dtype,
                label_dtype=choice.label_dtype,
                file=self.name,
            )
            if isinstance(self.client, str) and table.schema.get_field_index(self.client) < 0:
                raise DataError(f"{self.name}: client: {missing(table.schema, self.client)}", column=self.client)
            if table.count == 0:
                raise DataError(f"{self.name}: no rows: there is nothing to train on")
            widths = tuple(
                self._list_length(table, name) if width is None else width
                for name, width in zip(layout.features, layout.widths, strict=True)
            )
            self._table, self._layout = table, replace(layout, widths=widths)
        return self._table, self._layout

    def _used(self) -> list[str]:
        more = [self._choice.label, self.client]
        return list(dict.fromkeys([*self._choice.features, *(name for name in more if isinstance(name, str))]))

    def _list_length(self, table: RowTable, column: str) -> int:
        """Return the length of the first list in a column of lists. All other lists must have the same length."""
        for block in table.blocks([column], 64):
            for value in block.column(0):
                if value.is_valid:
                    return len(value)
        raise DataError(
            f"{self.name}: column {column!r} has only nulls, and the length of its lists is unknown: leave the column "
            "out",
            column=column,
        )

    def _rows_held(self) -> ColumnRows | None:
        """Return all rows, decoded, if they fit into `window_mb`; None otherwise."""
        table, layout = self._opened()
        if self._held is None and table.count * layout.row_bytes <= self._choice.window:
            parts = list(self._read_all(layout))
            self._held = ColumnRows(
                np.concatenate([part.x for part in parts]),
                None if layout.label is None else np.concatenate([part.y for part in parts if part.y is not None]),
                np.concatenate([part.good for part in parts]),
                None,
            )
        return self._held

    def _read_all(self, layout: ColumnLayout) -> Iterator[ColumnRows]:
        first = 0
        for block in self._opened()[0].blocks(layout.columns, _BLOCK):
            yield self._decoded(layout, block, np.arange(first, first + block.num_rows))
            first += block.num_rows

    def _decoded(self, layout: ColumnLayout, block: pa.RecordBatch, which: Ints) -> ColumnRows:
        try:
            rows = layout.rows(block)
        except pa.ArrowInvalid as error:
            where = self._opened()[0].place(int(which[0]))
            raise DataError(f"{self.name}: a value from {where} on does not fit: {error}") from error
        if rows.bad is not None:
            self._handle_bad(rows.bad, int(which[rows.bad.row]))
        return rows

    def _handle_bad(self, bad: BadValue, row: int) -> None:
        where = self._opened()[0].place(row)
        if not self._choice.drop or bad.way_out:
            raise DataError(
                f"{self.name}: column {bad.column!r} {bad.reason} in {where}\n"
                + (bad.way_out or 'correct the value, or give on_invalid="drop" to leave such rows out'),
                column=bad.column,
                row=row,
                reason=bad.reason,
            )
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s: rows with invalid values are left out, for example %s: column %r %s",
                self.name,
                where,
                bad.column,
                bad.reason,
            )

    def _take(self, rows: Ints) -> Batch:
        held = self._rows_held()
        if held is not None:
            return self._choice.batch(held, rows)
        table, layout = self._opened()
        decoded = self._decoded(layout, table.take(layout.columns, rows), rows)
        return self._choice.batch(decoded, np.arange(len(rows)))

    def _take_clients(self, client: GivenClients) -> None:
        self.client, self._clients = checked_client(client, columns=True), None
        self._table = None  # the column of the new clients must be checked

    def _divide(self) -> Clients:
        table, layout = self._opened()
        column = self.client if isinstance(self.client, str) else None
        ids = self.client
        if column is not None:
            ids = pa.chunked_array([_plain_text(block.column(0)) for block in table.blocks([column], 65_536)])
        # without on_invalid="drop" all rows belong to clients, and only the labels are read
        wanted = layout if self._choice.drop else replace(layout, features=(), widths=())
        labels: list[Array] = []
        good: list[Array] = []
        if wanted.columns:
            for part in self._read_all(wanted):
                good.append(part.good)
                labels += [] if part.y is None else [part.y]
        known = np.concatenate(labels) if labels else None
        valid = np.concatenate(good) if good else np.ones(table.count, dtype=np.bool_)
        usable = None if valid.all() else np.flatnonzero(valid)
        return divide(ids, table.count, known, self._take, usable=usable, column=column)


def _plain_text(column: pa.Array) -> pa.Array:
    """Return a column whose texts, if it has any, are of a type that all functions of Arrow take."""
    return column.cast(pa.large_string()) if str(column.type) == "string_view" else column


class ChunkedTable:
    """Rows by number of an Arrow table, whose chunks may be memory-mapped. Only the requested rows are copied.

    `parts`: (what it is, its number of rows) of each part of the table, for error messages; by default one part.
    """

    def __init__(self, table: pa.Table, parts: Sequence[tuple[str, int]] = ()) -> None:
        self.schema: pa.Schema = table.schema
        self.count: int = table.num_rows
        self._batches: list[pa.RecordBatch] = [batch for batch in table.to_batches() if batch.num_rows]
        self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)
        self._parts = parts

    def take(self, columns: Sequence[str], which: Ints) -> pa.RecordBatch:
        """Return these columns of the rows with these numbers, in this order."""
        schema = pa.schema([self.schema.field(name) for name in columns])
        found = []
        chunks = np.searchsorted(self._ends, which, side="right")
        order = np.argsort(chunks, kind="stable")
        numbers, starts = np.unique(chunks[order], return_index=True)
        for chunk, places in zip(numbers.tolist(), np.split(order, starts[1:]), strict=False):
            batch = self._batches[chunk].select(list(columns))
            first = int(self._ends[chunk]) - batch.num_rows
            found.append(batch.take(pa.array(which[places] - first)))
        if not found:
            return _empty(schema)
        one = found[0] if len(found) == 1 else whole_batch(pa.Table.from_batches(found))
        back = np.empty(len(order), dtype=np.int64)
        back[order] = np.arange(len(order))
        return one if (order[1:] > order[:-1]).all() else one.take(pa.array(back))

    def blocks(self, columns: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
        """Yield these columns of all rows in order, at most `rows` rows at a time."""
        for batch in self._batches:
            chosen = batch.select(list(columns))
            for first in range(0, batch.num_rows, rows):
                yield chosen.slice(first, rows)

    def place(self, row: int) -> str:
        """Return where a row is: its number, in its file if the parts are files."""
        first = 0
        for name, rows in self._parts:
            if row < first + rows:
                return f"row {row - first} of {name}"
            first += rows
        return f"row {row}"


def whole_batch(table: pa.Table) -> pa.RecordBatch:
    """Return all rows of a small table as one batch."""
    if table.num_rows == 0:
        return _empty(table.schema)
    return table.combine_chunks().to_batches()[0]


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
