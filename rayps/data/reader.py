"""Rows of Parquet files, streamed: memory is bounded by `window_mb`, however large the files are.

The method of reading depends on the footers alone, so that every rank uses the same method:
- if all rows fit into the window, they are read once, and distributed round robin by one permutation of all rows;
- otherwise row groups are shuffled; every rank reads one contiguous span of this sequence and shuffles the rows again,
  window by window. A rank decodes only the row groups that its span and starting point need.

Values that are NaN, infinite or null: data that fits into the window is checked before training starts. In larger data,
nulls that the footers' statistics count are found before training, and other invalid values when they are read.

Clients: rows that do not fit into the window are sorted by client at the first access to `clients`, into memory-mapped
files that all processes of a host share (`rayps.data.client_files`).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from rayps.core.errors import ConfigError, DataError
from rayps.data.base import Batch, Data, batch_size_of, check_place, dealt, kept, random_of
from rayps.data.client_files import RowsByClient
from rayps.data.clients import Clients, GivenClients, divide, given, owners_by_id
from rayps.data.columns import Array, BadValue, ColumnLayout, ColumnRows, DType, layout_of, missing
from rayps.data.files import Files, FileSystem, Index, PathGiven, RowGroup, told
from rayps.data.partition_rules import PartitionRule

_log = logging.getLogger(__name__)
_CHUNK = 2 << 20  # approximate bytes decoded at once
_LABELS = ("float32", "float64", "int64")


class ParquetData(Data):
    """A data source that reads the rows of Parquet files. Pickling includes only the paths and the options."""

    def __init__(
        self,
        files: Files,
        features: Sequence[str],
        label: str | None,
        *,
        batch_size: int,
        shuffle: bool,
        dtype: str,
        label_dtype: str | None,
        scale: float | None,
        on_invalid: str,
        window_mb: float,
        client: GivenClients = None,
    ) -> None:
        self.client = given(client, columns=True)
        self.batch_size = batch_size_of(batch_size)
        self._files = files
        self._features = tuple(features)
        self._label = label
        self._shuffle = shuffle
        self._dtype = _dtype_of("dtype", dtype, ("float32", "float64", "int64", "uint8"))
        self._label_dtype = _dtype_of("label_dtype", label_dtype, _LABELS) if label_dtype else None
        self._scale = scale
        self._drop = _policy(on_invalid) == "drop"
        self._window = int(window_mb * 2**20)
        self._forget()
        if self._window < 1:
            raise ConfigError(f"window_mb is {window_mb}: give a number above 0", field="window_mb")
        if scale is not None and self._dtype.kind != "f":
            raise ConfigError(f"scale={scale} needs float features: leave dtype={dtype!r} out", field="scale")

    def _forget(self) -> None:
        self._index: Index | None = None
        self._layout: ColumnLayout | None = None
        self._held: ColumnRows | None = None
        self._clients = None
        self._warned: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_index": None, "_layout": None, "_held": None, "_clients": None, "_warned": set()}

    # ------------------------------------------------------------------------------------ before training

    def check(self) -> None:
        """Check every file's schema, and the values if they fit into the window or the footers count nulls.

        Raises:
            DataError: a schema or a value is invalid; names file, column and row.
        """
        self._forget()
        index, layout = self._known()
        all_of_them = index.rows * layout.row_bytes <= self._window
        for group in index.groups:
            if all_of_them or self._has_nulls(index, group, layout.columns):
                for _ in self._read(group, 0, group.rows):
                    continue

    def _has_nulls(self, index: Index, group: RowGroup, columns: list[str]) -> bool:
        """Return whether a row group has nulls at which training would fail.

        A row of the group is read first, as `Files.nulls` requires.
        """
        next(self._chunks(index, group, columns, 1), None)
        return self._files.nulls(index, group, columns) and not self._drop

    def rows(self) -> int:
        """Return the number of rows in all files, invalid rows included."""
        return self._known()[0].rows

    def share(self, rank: int, size: int) -> int:
        """Return the number of rows that `rank` of `size` ranks gets in an epoch.

        They are every `size`-th row, or a contiguous span if all rows do not fit into the window.
        """
        if self._by_number():
            return super().share(rank, size)
        return self.rows() * (rank + 1) // size - self.rows() * rank // size

    def _by_number(self) -> bool:
        """Return whether rows are accessed by number: all fit into the window, or they are sorted by client."""
        index, layout = self._known()
        return index.rows * layout.row_bytes <= self._window or (self.keeps_rows and self.divided)

    def _known(self) -> tuple[Index, ColumnLayout]:
        if self._index is None or self._layout is None:
            index = self._files.index(self._used)
            layout = self._layout_of(index.schema, index.files[0])
            widths = tuple(
                self._list_length(index, name) if width is None else width
                for name, width in zip(layout.features, layout.widths, strict=True)
            )
            self._index, self._layout = index, replace(layout, widths=widths)
        return self._index, self._layout

    def _used(self, schema: pa.Schema, name: str) -> list[str]:
        columns = self._layout_of(schema, name).columns
        if not isinstance(self.client, str):
            return columns
        if schema.get_field_index(self.client) < 0:
            raise DataError(
                f"{name}: client: {missing(schema, self.client)}", file=name, column=self.client, columns=schema.names
            )
        return [*columns, self.client]

    def _layout_of(self, schema: pa.Schema, name: str) -> ColumnLayout:
        return layout_of(
            schema, self._features, self._label, dtype=self._dtype, label_dtype=self._label_dtype, file=name
        )

    def _list_length(self, index: Index, column: str) -> int:
        """Return the length of the first list in a column of lists; all other lists must have this length."""
        for group in index.groups:
            for chunk in self._chunks(index, group, [column], 64):
                for value in chunk.column(0):
                    if value.is_valid:
                        return len(value)
        raise DataError(
            f"{index.files[0]}: column {column!r} holds only nulls in all files, so the length of its lists is "
            "unknown: leave the column out",
            file=index.files[0],
            column=column,
        )

    # ------------------------------------------------------------------------------------ reading

    def _chunks(self, index: Index, group: RowGroup, columns: list[str], rows: int) -> Iterator[pa.RecordBatch]:
        name = index.files[group.file]
        with self._files.open(name, index.sizes[group.file]) as file, told(name, group.number):
            done = 0
            for chunk in file.iter_batches(rows, row_groups=[group.number], columns=columns, use_threads=False):
                done += chunk.num_rows
                yield chunk
            if done != group.rows:
                raise DataError(
                    f"{name}: row group {group.number} has {done} rows where the footer counts "
                    f"{group.rows}: write the file again",
                    file=name,
                    row_group=group.number,
                )

    def _read(self, group: RowGroup, low: int, high: int) -> Iterator[ColumnRows]:
        """Read rows [low, high) of a row group, a chunk at a time."""
        index, layout = self._known()
        at_once = max(1, min(8192, _CHUNK // layout.row_bytes))
        first = 0
        for chunk in self._chunks(index, group, layout.columns, at_once):
            last = first + chunk.num_rows
            if last > low:
                start, end = max(low - first, 0), min(high - first, chunk.num_rows)
                yield self._rows(chunk.slice(start, end - start), index.files[group.file], group.first + first + start)
            first = last
            if first >= high and high < group.rows:
                return

    def _rows(self, chunk: pa.RecordBatch, file: str, first: int) -> ColumnRows:
        layout = self._known()[1]
        try:
            rows = layout.rows(chunk)
        except pa.ArrowInvalid as error:
            raise DataError(f"{file}: a value from row {first} on does not fit: {error}", file=file) from error
        if rows.bad is not None:
            self._bad(rows.bad, file, first + rows.bad.row)
        return rows

    def _bad(self, bad: BadValue, file: str, row: int) -> None:
        if not self._drop:
            raise DataError(
                f"{file}: column {bad.column!r} {bad.reason} in row {row}\n"
                'correct the file, or give on_invalid="drop" to leave such rows out',
                file=file,
                column=bad.column,
                row=row,
                reason=bad.reason,
            )
        if file not in self._warned:
            self._warned.add(file)
            _log.warning(
                "%s: rows with invalid values are left out, for example row %d: column %r %s",
                file,
                row,
                bad.column,
                bad.reason,
            )

    # ------------------------------------------------------------------------------------ batches

    def batches(self, *, rank: int, size: int, seed: int, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of `rank` from batch `start` on; with on_invalid="drop" without their invalid rows.

        Raises:
            DataError: a value is invalid; names file, column and row.
        """
        check_place(rank, size, start)
        index, _ = self._known()
        if self._by_number():
            yield from self._numbered(index, rank=rank, size=size, seed=seed, epoch=epoch, start=start)
            return
        low, high = index.rows * rank // size, index.rows * (rank + 1) // size
        given = start
        for rows, order in self._windows(index, low, high, rank=rank, seed=seed, epoch=epoch, start=start):
            for place in range(0, len(order), self.batch_size):
                yield self._batch(rows, order[place : place + self.batch_size])
                given += 1
        for _ in range(given, self.steps(size)):
            yield self._batch(self._room(0), np.empty(0, dtype=np.int64))

    def _numbered(self, index: Index, *, rank: int, size: int, seed: int, epoch: int, start: int) -> Iterator[Batch]:
        shuffled = seed if self._shuffle else None
        if self.keeps_rows:
            mine = kept(self, rank=rank, size=size, seed=shuffled, epoch=epoch)
        else:
            mine = dealt(index.rows, rank=rank, size=size, seed=shuffled, epoch=epoch)
        held = None if self.keeps_rows and self.divided else self._hold(index)
        for step in range(start, self.steps(size)):
            which = mine[step * self.batch_size : (step + 1) * self.batch_size]
            yield self.clients.batch(which) if held is None else self._batch(held, which)

    # ------------------------------------------------------------------------------------ clients

    def _divide(self) -> Clients:
        index, layout = self._known()

        def divided(labels: Array | None, usable: NDArray[np.int64] | None) -> Clients:
            column = self.client if isinstance(self.client, str) else None
            client = self.client if column is None else self._column(index, column)
            known = None if layout.label is None else labels
            return divide(client, index.rows, known, self._by_row, usable=usable, column=column)

        if index.rows * layout.row_bytes <= self._window:
            held = self._hold(index)
            return divided(held.y, None if held.good.all() else np.flatnonzero(held.good))
        stored = RowsByClient(self._key(index, layout), layout, index.rows, lambda: self._all(index), divided)

        def take(which: NDArray[np.int64]) -> Batch:
            return self._batch(stored.rows, stored.place[which])

        return Clients(stored.names, stored.order, stored.sizes, take, labels=stored.labels, rule=stored.rule)

    def _take_clients(self, client: GivenClients) -> None:
        super()._take_clients(given(client, columns=True))
        self._index = None  # so that the column is searched for again

    def _by_row(self, which: NDArray[np.int64]) -> Batch:
        return self._batch(self._hold(self._known()[0]), which)

    def _all(self, index: Index) -> Iterator[ColumnRows]:
        for group in index.groups:
            yield from self._read(group, 0, group.rows)

    def _column(self, index: Index, name: str) -> pa.ChunkedArray:
        chunks = [chunk.column(0) for group in index.groups for chunk in self._chunks(index, group, [name], 65_536)]
        return pa.chunked_array(chunks)

    def _key(self, index: Index, layout: ColumnLayout) -> str:
        """Return a key of the rows and their division: equal keys mean that processes can share the sorted files."""
        found = hashlib.sha256(
            repr(
                (index.files, index.sizes, self._files.changed(index.files), layout, self._drop, np.__version__)
            ).encode()
        )
        if isinstance(self.client, (str, PartitionRule)):
            found.update(repr(self.client).encode())
        else:
            names, owners = owners_by_id(self.client, index.rows)
            found.update(repr(names).encode() + owners.tobytes())
        return found.hexdigest()[:24]

    def _batch(self, rows: ColumnRows, which: NDArray[np.int64]) -> Batch:
        if not rows.good[which].all():
            which = which[rows.good[which]]
        x = torch.from_numpy(rows.x[which].astype(self._dtype, copy=False))
        if self._scale is not None:
            x *= self._scale
        return Batch(x, None if rows.y is None else torch.from_numpy(rows.y[which]), len(which))

    def _hold(self, index: Index) -> ColumnRows:
        """Return all rows, in memory; they are read at the first call."""
        if self._held is None:
            held = self._room(index.rows)
            done = 0
            for rows in self._all(index):
                done = _copy(rows, 0, held, done, len(rows.good))
            self._held = held
        return self._held

    def _room(self, rows: int) -> ColumnRows:
        layout = self._known()[1]
        return ColumnRows(
            np.empty((rows, layout.width), dtype=layout.store),
            None if layout.label is None else np.empty(rows, dtype=layout.label_dtype),
            np.empty(rows, dtype=np.bool_),
            None,
        )

    def _windows(
        self, index: Index, low: int, high: int, *, rank: int, seed: int, epoch: int, start: int
    ) -> Iterator[tuple[ColumnRows, NDArray[np.int64]]]:
        """Yield rows [low, high) of the shuffled row groups, a window at a time, each with the order of its rows.

        A window is a whole number of batches, so the windows before batch `start` are never decoded.
        """
        layout = self._known()[1]
        length = max(1, self._window // layout.row_bytes // self.batch_size) * self.batch_size
        number, skip = divmod(start * self.batch_size, length)
        low += number * length
        window = self._room(min(length, max(high - low, 0)))
        stream = self._span(index, low, high, seed=seed, epoch=0 if self.keeps_rows else epoch)
        for count in _filled(stream, window):
            order = np.arange(count)
            if self._shuffle:
                order = random_of(seed, epoch, rank, number).permutation(count)
            yield window, order[skip:]
            number, skip = number + 1, 0

    def _span(self, index: Index, low: int, high: int, *, seed: int, epoch: int) -> Iterator[ColumnRows]:
        order = np.arange(len(index.groups))
        if self._shuffle:
            order = random_of(seed, epoch).permutation(len(index.groups))
        first = 0
        for place in order:
            group = index.groups[place]
            begin, end = max(low - first, 0), min(high - first, group.rows)
            if begin < end:
                yield from self._read(group, begin, end)
            first += group.rows
            if first >= high:
                return


def _filled(stream: Iterator[ColumnRows], window: ColumnRows) -> Iterator[int]:
    """Fill the window from the stream repeatedly; yield the number of rows in it each time."""
    room = len(window.good)
    done = 0
    for rows in stream:
        taken = 0
        while taken < len(rows.good):
            count = min(room - done, len(rows.good) - taken)
            done = _copy(rows, taken, window, done, count)
            taken += count
            if done == room:
                yield done
                done = 0
    if done:
        yield done


def _copy(rows: ColumnRows, begin: int, into: ColumnRows, place: int, count: int) -> int:
    into.x[place : place + count] = rows.x[begin : begin + count]
    into.good[place : place + count] = rows.good[begin : begin + count]
    if into.y is not None and rows.y is not None:
        into.y[place : place + count] = rows.y[begin : begin + count]
    return place + count


def _dtype_of(field: str, name: str, known: tuple[str, ...]) -> DType:
    if name not in known:
        raise ConfigError(f"{field} is {name!r}: give one of {', '.join(known)}", field=field)
    return np.dtype(name)


def _policy(on_invalid: str) -> str:
    if on_invalid not in ("fail", "drop"):
        raise ConfigError(
            f"on_invalid is {on_invalid!r}: give 'fail', or 'drop' to leave such rows out", field="on_invalid"
        )
    return on_invalid


def parquet(
    path: PathGiven | Sequence[PathGiven],
    *,
    features: str | Sequence[str],
    label: str | None = None,
    batch_size: int = 32,
    filesystem: FileSystem = None,
    shuffle: bool = True,
    dtype: str = "float32",
    label_dtype: str | None = None,
    scale: float | None = None,
    on_invalid: str = "fail",
    window_mb: float = 64,
    client: GivenClients = None,
) -> Data:
    """Read rows of a Parquet file, a directory of them, or a list of both; memory is bounded by `window_mb`.

    - `features`: one column of lists of numbers, or several columns of numbers: x is [rows, numbers], as `dtype` and
      times `scale` (give 1 / 255 for pixels; by default values are not scaled).
    - `label`: a column of numbers: whole ones become int64, others float32, unless `label_dtype` is given.
    - `filesystem`: any file system of pyarrow or fsspec; by default it follows from the path ("s3://...", or this
      machine's).
    - `on_invalid`: "fail" at a null, NaN or infinite value, or "drop" the row from its batch: the number of batches
      does not change, and the smaller batch has less weight.
    - `window_mb`: megabytes of rows that a worker has in memory at a time; it shuffles rows within this window.
    - `client`: the client of each row, for federated strategies: a column of whole numbers or text (client="writer"), a
      rule such as rayps.data.shards(2, clients=20), or an id for each row. Rows that on_invalid="drop" drops belong to
      no client.

    Raises:
        DataError: the list of paths is empty; check() finds errors in the files.
        ConfigError: an option is invalid.
    """
    names = [features] if isinstance(features, str) else list(features)
    if not names:
        raise ConfigError("features is empty: name a column of lists, or of numbers each", field="features")
    return ParquetData(
        Files(path, filesystem),
        names,
        label,
        batch_size=batch_size,
        shuffle=shuffle,
        dtype=dtype,
        label_dtype=label_dtype,
        scale=scale,
        on_invalid=on_invalid,
        window_mb=window_mb,
        client=client,
    )
