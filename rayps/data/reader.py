"""Stream the rows of Parquet files. `window_mb` bounds the memory, however large the files are.

How the rows are read depends on the footers alone, and is therefore the same on every rank:

- If all rows fit into the window, they are read once. A permutation of all rows distributes them round robin.
- Otherwise the row groups are shuffled. Every rank reads one contiguous span of their sequence, one window at a time,
  and shuffles the rows of each window. A rank decodes only the row groups that its span and starting point need.

Values that are NaN, infinite or null are invalid. If all rows fit into the window, they are checked before training
starts. Otherwise, nulls that the footers' statistics count are found before training, and other invalid values when
they are read.

At the first access to `clients`, rows that do not fit into the window are sorted by client into memory-mapped files,
which all processes of a host share (`rayps.data.client_files`).
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from rayps_client.columns import Array, BadValue, ColumnLayout, ColumnRows, features_of, layout_of, missing
from rayps_client.errors import DataError
from rayps_client.rows import batch_size_of, drop_last_of

from rayps.data.base import Batch, Data, check_place, fixed_rows_of_rank, random_of, rows_of_rank
from rayps.data.client_files import RowsByClient
from rayps.data.clients import Clients, GivenClients, checked_client, divide, owners_by_id
from rayps.data.files import Files, FileSystem, Index, PathGiven, RowGroup, as_data_error
from rayps.data.partition_rules import PartitionRule
from rayps.data.tabular.column_options import DTYPES, LABEL_DTYPES, checked_scale, drops, dtype_of, window_of

_log = logging.getLogger(__name__)
_CHUNK = 2 << 20  # approximate number of bytes that are decoded at a time


class ParquetData(Data):
    """A data source that reads the rows of Parquet files. A pickled object has only the paths and the options."""

    separate_rows = True

    def __init__(
        self,
        files: Files,
        features: Sequence[str],
        label: str | None,
        *,
        batch_size: int,
        shuffle: bool,
        drop_last: bool,
        dtype: str,
        label_dtype: str | None,
        scale: float | None,
        on_invalid: str,
        window_mb: float,
        client: GivenClients = None,
    ) -> None:
        self.client = checked_client(client, columns=True)
        self.batch_size, self.drop_last = batch_size_of(batch_size), drop_last_of(drop_last)
        self._files = files
        self._features = tuple(features)
        self._label = label
        self._shuffle = shuffle
        self._dtype = dtype_of("dtype", dtype, DTYPES)
        self._label_dtype = dtype_of("label_dtype", label_dtype, LABEL_DTYPES) if label_dtype else None
        self._scale = checked_scale(scale, self._dtype)
        self._drop = drops(on_invalid)
        self._window = window_of(window_mb)
        self._reset()

    def _reset(self) -> None:
        self._index: Index | None = None
        self._layout: ColumnLayout | None = None
        self._all_rows: ColumnRows | None = None
        self._clients = None
        self._warned: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_index": None, "_layout": None, "_all_rows": None, "_clients": None, "_warned": set()}

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        """The features; None if one is a column of lists. Raises DataError if the files have other columns."""
        _, layout = self._index_and_layout()
        return layout.features if set(layout.widths) == {1} else None

    def with_paths(self, paths: Sequence[str]) -> Data:
        """Return the same columns and options, read from other files; their rows are not divided into clients."""
        other = copy.copy(self)
        other._files = Files(list(paths))
        return other.with_clients(None)

    # ------------------------------------------------------------------------------------ before training

    def check(self) -> None:
        """Check the schemas of all files. Check the values if all rows fit into the window, or the footers count nulls.

        Raises:
            DataError: a schema or a value is invalid. The text names the file, the column and the row.
        """
        self._reset()
        index, layout = self._index_and_layout()
        all_of_them = index.rows * layout.row_bytes <= self._window
        for group in index.groups:
            if all_of_them or self._has_nulls(index, group, layout.columns):
                for _ in self._read(group, 0, group.rows):
                    continue

    def _has_nulls(self, index: Index, group: RowGroup, columns: list[str]) -> bool:
        """Return whether a row group has nulls with which training would fail.

        A row of the group is read first, because `Files.nulls` requires this.
        """
        next(self._chunks(index, group, columns, 1), None)
        return self._files.nulls(index, group, columns) and not self._drop

    def rows(self) -> int:
        """Return the number of rows in all files, including invalid rows."""
        return self._index_and_layout()[0].rows

    def share(self, rank: int, size: int) -> int:
        """Return the number of rows that `rank` of `size` ranks gets in an epoch.

        They are every `size`-th row of a permutation, or a contiguous span if not all rows fit into the window.
        """
        if self._by_number():
            return super().share(rank, size)
        return self.rows() * (rank + 1) // size - self.rows() * rank // size

    def _by_number(self) -> bool:
        """Return whether rows are accessed by number: all rows fit into the window, or are sorted by client."""
        index, layout = self._index_and_layout()
        return index.rows * layout.row_bytes <= self._window or (self.keeps_rows and self.divided)

    def _index_and_layout(self) -> tuple[Index, ColumnLayout]:
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
        """Return the length of the first list in a column of lists. All other lists must have the same length."""
        for group in index.groups:
            for chunk in self._chunks(index, group, [column], 64):
                for value in chunk.column(0):
                    if value.is_valid:
                        return len(value)
        raise DataError(
            f"{index.files[0]}: column {column!r} has only nulls in all files, and the length of its lists is "
            "unknown: leave the column out",
            file=index.files[0],
            column=column,
        )

    # ------------------------------------------------------------------------------------ reading

    def _chunks(self, index: Index, group: RowGroup, columns: list[str], rows: int) -> Iterator[pa.RecordBatch]:
        name = index.files[group.file]
        with self._files.open(name, index.sizes[group.file]) as file, as_data_error(name, group.number):
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
        """Yield the rows low to high - 1 of a row group, one chunk at a time."""
        index, layout = self._index_and_layout()
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
        layout = self._index_and_layout()[1]
        try:
            rows = layout.rows(chunk)
        except pa.ArrowInvalid as error:
            raise DataError(f"{file}: a value from row {first} on does not fit: {error}", file=file) from error
        if rows.bad is not None:
            self._handle_bad(rows.bad, file, first + rows.bad.row)
        return rows

    def _handle_bad(self, bad: BadValue, file: str, row: int) -> None:
        if not self._drop or bad.way_out:
            raise DataError(
                f"{file}: column {bad.column!r} {bad.reason} in row {row}\n"
                + (bad.way_out or 'correct the file, or give on_invalid="drop" to leave such rows out'),
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

    @property
    def has_row_numbers(self) -> bool:
        """Whether all rows fit into the window."""
        index, layout = self._index_and_layout()
        return index.rows * layout.row_bytes <= self._window

    def order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the row numbers of an epoch: a permutation, or all in order without `shuffle`."""
        return rows_of_rank(self.rows(), rank=0, size=1, seed=seed if self._shuffle else None, epoch=epoch)

    def take(self, rows: NDArray[np.int64]) -> Batch:
        """Return a batch of the rows with these numbers. Raises DataError if a value is invalid."""
        return self._batch(self._load_all(self._index_and_layout()[0]), rows)

    def batches(self, *, rank: int, size: int, seed: int, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of `rank` from batch number `start` on. With on_invalid="drop", invalid rows are left out.

        Raises:
            DataError: a value is invalid. The text names the file, the column and the row.
        """
        check_place(rank, size, start)
        index, _ = self._index_and_layout()
        if self._by_number():
            yield from self._batches_by_number(index, rank=rank, size=size, seed=seed, epoch=epoch, start=start)
            return
        low, high = index.rows * rank // size, index.rows * (rank + 1) // size
        made = start
        for rows, order in self._windows(index, low, high, rank=rank, seed=seed, epoch=epoch, start=start):
            for number in range(self.batches_of(len(order))):
                yield self._batch(rows, self.cut(order, number))
                made += 1
        for _ in range(made, self.steps(size)):
            yield self._batch(self._empty_rows(0), np.empty(0, dtype=np.int64))

    def _batches_by_number(
        self, index: Index, *, rank: int, size: int, seed: int, epoch: int, start: int
    ) -> Iterator[Batch]:
        shuffled = seed if self._shuffle else None
        if self.keeps_rows:
            mine = fixed_rows_of_rank(self, rank=rank, size=size, seed=shuffled, epoch=epoch)
        else:
            mine = rows_of_rank(index.rows, rank=rank, size=size, seed=shuffled, epoch=epoch)
        held = None if self.keeps_rows and self.divided else self._load_all(index)
        for step in range(start, self.steps(size)):
            which = self.cut(mine, step)
            yield self.clients.batch(which) if held is None else self._batch(held, which)

    # ------------------------------------------------------------------------------------ clients

    def _divide(self) -> Clients:
        index, layout = self._index_and_layout()

        def divide_rows(labels: Array | None, usable: NDArray[np.int64] | None) -> Clients:
            column = self.client if isinstance(self.client, str) else None
            client = self.client if column is None else self._column(index, column)
            known = None if layout.label is None else labels
            return divide(client, index.rows, known, self._by_row, usable=usable, column=column)

        if index.rows * layout.row_bytes <= self._window:
            held = self._load_all(index)
            return divide_rows(held.y, None if held.good.all() else np.flatnonzero(held.good))
        stored = RowsByClient(self._key(index, layout), layout, index.rows, lambda: self._read_all(index), divide_rows)

        def take(which: NDArray[np.int64]) -> Batch:
            return self._batch(stored.rows, stored.place[which])

        return Clients(stored.names, stored.order, stored.sizes, take, labels=stored.labels, rule=stored.rule)

    def _take_clients(self, client: GivenClients) -> None:
        super()._take_clients(checked_client(client, columns=True))
        self._index = None  # the column of the new clients must be checked

    def _by_row(self, which: NDArray[np.int64]) -> Batch:
        return self._batch(self._load_all(self._index_and_layout()[0]), which)

    def _read_all(self, index: Index) -> Iterator[ColumnRows]:
        for group in index.groups:
            yield from self._read(group, 0, group.rows)

    def _column(self, index: Index, name: str) -> pa.ChunkedArray:
        chunks = [chunk.column(0) for group in index.groups for chunk in self._chunks(index, group, [name], 65_536)]
        return pa.chunked_array(chunks)

    def _key(self, index: Index, layout: ColumnLayout) -> str:
        """Return a key of the rows and their division. Processes with equal keys can share the sorted files."""
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

    def _load_all(self, index: Index) -> ColumnRows:
        """Return all rows in memory. They are read at the first call."""
        if self._all_rows is None:
            held = self._empty_rows(index.rows)
            done = 0
            for rows in self._read_all(index):
                done = _copy(rows, 0, held, done, len(rows.good))
            self._all_rows = held
        return self._all_rows

    def _empty_rows(self, rows: int) -> ColumnRows:
        layout = self._index_and_layout()[1]
        return ColumnRows(
            np.empty((rows, layout.width), dtype=layout.store),
            None if layout.label is None else np.empty(rows, dtype=layout.label_dtype),
            np.empty(rows, dtype=np.bool_),
            None,
        )

    def _windows(
        self, index: Index, low: int, high: int, *, rank: int, seed: int, epoch: int, start: int
    ) -> Iterator[tuple[ColumnRows, NDArray[np.int64]]]:
        """Yield the rows low to high - 1 of the shuffled row groups, one window at a time, with the order of its rows.

        A window is a whole number of batches, and the windows before batch `start` are not decoded.
        """
        layout = self._index_and_layout()[1]
        length = max(1, self._window // layout.row_bytes // self.batch_size) * self.batch_size
        number, skip = divmod(start * self.batch_size, length)
        low += number * length
        window = self._empty_rows(min(length, max(high - low, 0)))
        stream = self._rows_of_span(index, low, high, seed=seed, epoch=0 if self.keeps_rows else epoch)
        for count in _fill_repeatedly(stream, window):
            order = np.arange(count)
            if self._shuffle:
                order = random_of(seed, epoch, rank, number).permutation(count)
            yield window, order[skip:]
            number, skip = number + 1, 0

    def _rows_of_span(self, index: Index, low: int, high: int, *, seed: int, epoch: int) -> Iterator[ColumnRows]:
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


def _fill_repeatedly(stream: Iterator[ColumnRows], window: ColumnRows) -> Iterator[int]:
    """Fill the window from the stream repeatedly, and yield the number of its rows each time."""
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


def parquet(
    path: PathGiven | Sequence[PathGiven],
    *,
    features: str | Sequence[str],
    label: str | None = None,
    batch_size: int = 32,
    filesystem: FileSystem = None,
    shuffle: bool = True,
    drop_last: bool = False,
    dtype: str = "float32",
    label_dtype: str | None = None,
    scale: float | None = None,
    on_invalid: str = "fail",
    window_mb: float = 64,
    client: GivenClients = None,
) -> Data:
    """Read rows of a Parquet file, a directory of Parquet files, or a list of both. `window_mb` bounds the memory.

    - `features`: one column of lists of numbers, or several columns of numbers. `Batch.x` is [rows, numbers] of type
      `dtype`, multiplied by `scale` (1 / 255 for pixels; None means no scaling). A whole number that `dtype` does not
      hold exactly is an error.
    - `label`: a column of numbers. Whole numbers become int64 and others float32, unless `label_dtype` is given.
    - `filesystem`: any file system of pyarrow or fsspec; None means that it follows from the path ("s3://...", or a
      local path).
    - `on_invalid`: what to do about a null, NaN or infinite value. "fail" raises an error. "drop" leaves the row out of
      its batch; the number of batches does not change, and the smaller batch has less weight.
    - `drop_last`: as in `rayps.data.tensors`. Rows that on_invalid="drop" leaves out count for it.
    - `window_mb`: megabytes (2^20 bytes) of rows that a worker has in memory at a time. Rows are shuffled within this
      window.
    - `client`: the client of each row, for federated strategies: a column of whole numbers or text (client="writer"), a
      rule such as rayps.data.shards(2, clients=20), or an id for each row. Rows that on_invalid="drop" leaves out
      belong to no client.

    Raises:
        DataError: the list of paths is empty. `check()` finds errors in the files.
        ConfigError: an option is invalid.
    """
    return ParquetData(
        Files(path, filesystem),
        features_of(features),
        label,
        batch_size=batch_size,
        shuffle=shuffle,
        drop_last=drop_last,
        dtype=dtype,
        label_dtype=label_dtype,
        scale=scale,
        on_invalid=on_invalid,
        window_mb=window_mb,
        client=client,
    )
