"""Arrow tables, Arrow files, Arrow datasets, and data frames of pandas and polars as data sources."""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeGuard, Unpack, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from rayps_client.columns import missing
from rayps_client.errors import DataError
from rayps_client.rows import native

from rayps.data.base import Data
from rayps.data.local_files import LocalFiles, PathsGiven, local_files
from rayps.data.tabular.column_options import ColumnOptions, column_choice
from rayps.data.tabular.stored_table import Source, StoredTable
from rayps.data.tabular.table_rows import ChunkedTable, RowTable, RowTableData
from rayps.data.unsupported import refuse_ray_data

if TYPE_CHECKING:
    import pyarrow.dataset as pads  # not at run time: it loads pandas, which takes 0.3 s of each process's start

_SUFFIXES = (".arrow", ".feather", ".ipc")


class PandasFrame(Protocol):
    """What `pandas` needs of a `pandas.DataFrame`."""

    columns: Sequence[str]

    def __getitem__(self, column: str) -> NDArray[np.generic]:
        """Return a column."""


class PolarsFrame(Protocol):
    """What `polars` needs of a `polars.DataFrame`."""

    columns: list[str]

    def select(self, columns: list[str]) -> PolarsFrame:
        """Return a frame of these columns."""

    def to_arrow(self) -> pa.Table:
        """Return the frame as an Arrow table."""


def arrow(
    source: pa.Table | pa.RecordBatch | pads.Dataset | PathsGiven,
    *,
    features: str | Sequence[str],
    **options: Unpack[ColumnOptions],
) -> Data:
    """Use the rows of an Arrow table, of Arrow (Feather, IPC) files, or of a `pyarrow.dataset`.

    - A table is in the memory of every worker, and travels to the workers once.
    - Uncompressed Arrow files are memory-mapped: a batch reads its own rows only. Paths are files, directories (their
      files *.arrow, *.feather and *.ipc) or patterns, and must exist on all hosts.
    - Compressed Arrow files and datasets are written once per host into a temporary uncompressed Arrow file of the
      used columns (in TMPDIR), which is then memory-mapped.

    `features` and the other options are those of `rayps.data.parquet`, except `filesystem`; `window_mb` is the size up
    to which the decoded rows are held in memory.

    Raises:
        ConfigError: an option is invalid.
        DataError: the source is of another kind, or the dataset has a filter. `check()` finds other errors.

    Example:
        table = pyarrow.table({"a": [0.5, 1.5], "b": [2, 3], "y": [0, 1]})
        rayps.data.arrow(table, features=["a", "b"], label="y").rows()  # 2
    """
    refuse_ray_data("arrow", source)
    choice = column_choice(features, options)
    if isinstance(source, (pa.Table, pa.RecordBatch)):
        table = pa.Table.from_batches([source]) if isinstance(source, pa.RecordBatch) else source
        return _in_memory("arrow", _chosen(table, used_columns(features, options)), features, options)
    if _is_dataset(source):
        packed, key = _packed_dataset(source)
        return RowTableData("arrow dataset", partial(_open_dataset, packed, key), choice, options)
    files = local_files("arrow", cast(PathsGiven, source), _SUFFIXES)
    return RowTableData(files.paths[0], partial(_open_files, files), choice, options)


def pandas(frame: PandasFrame, *, features: str | Sequence[str], **options: Unpack[ColumnOptions]) -> Data:
    """Use the rows of a pandas data frame, in its order; its index is not used.

    Only the used columns are kept, without a copy where their memory is contiguous and has no missing values. They
    travel to the workers once. The options are those of `rayps.data.arrow`.

    Raises:
        ConfigError: an option is invalid.
        DataError: a column is missing, or holds values of several types. `check()` finds other errors.

    Example:
        frame = pd.DataFrame({"a": [0.5, 1.5], "y": [0, 1]})
        rayps.data.pandas(frame, features="a", label="y").rows()  # 2
    """
    refuse_ray_data("pandas", frame)
    if not hasattr(frame, "columns") or not hasattr(frame, "iloc"):
        raise DataError(f"pandas: it is {type(frame).__name__}: give a pandas.DataFrame")
    names = [str(column) for column in frame.columns]
    arrays = {}
    for column in used_columns(features, options):
        if names.count(column) != 1 or column not in frame.columns:
            why = "occurs twice" if names.count(column) > 1 else "is not text" if column in names else "is missing"
            shown = missing(pa.schema([(name, pa.null()) for name in dict.fromkeys(names)]), column)
            raise DataError(
                f"pandas: {shown}" if why == "is missing" else f"pandas: column {column!r} {why}: rename it",
                column=column,
            )
        try:
            values = frame[column]
            if not getattr(values.dtype, "isnative", True):  # a type of pandas' own has no byte order
                values = native(np.asarray(values))
            arrays[column] = pa.array(values, from_pandas=True)
        except (pa.ArrowException, TypeError, ValueError) as error:
            reason = str(error).splitlines()[0][:200]
            raise DataError(
                f"pandas: column {column!r} cannot be read: {reason}\nconvert it to one type: "
                f"frame[{column!r}] = pandas.to_numeric(frame[{column!r}])",
                column=column,
            ) from error
    return _in_memory("pandas", pa.table(arrays), features, options)


def polars(frame: PolarsFrame, *, features: str | Sequence[str], **options: Unpack[ColumnOptions]) -> Data:
    """Use the rows of a polars data frame. Its memory is used without a copy; only the used columns travel, once.

    The options are those of `rayps.data.arrow`.

    Raises:
        ConfigError: an option is invalid.
        DataError: it is a LazyFrame or no frame, or a column is missing. `check()` finds other errors.

    Example:
        frame = pl.DataFrame({"a": [0.5, 1.5], "y": [0, 1]})
        rayps.data.polars(frame, features="a", label="y").rows()  # 2
    """
    refuse_ray_data("polars", frame)
    if hasattr(frame, "collect"):
        raise DataError("polars: a LazyFrame has no rows yet: give frame.collect()")
    if not hasattr(frame, "to_arrow") or not hasattr(frame, "columns"):
        raise DataError(f"polars: it is {type(frame).__name__}: give a polars.DataFrame")
    names = frame.columns
    columns = used_columns(features, options)
    for column in columns:
        if column not in names:
            raise DataError(f"polars: {missing(pa.schema([(n, pa.null()) for n in names]), column)}", column=column)
    return _in_memory("polars", frame.select(columns).to_arrow(), features, options)


def used_columns(features: str | Sequence[str], options: ColumnOptions) -> list[str]:
    """Return the columns to read: features, label and, if it is a column, the client of each row."""
    names = [features] if isinstance(features, str) else list(features)
    more = [options.get("label"), options.get("client")]
    return list(dict.fromkeys([*names, *(name for name in more if isinstance(name, str))]))


def _chosen(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    twice = [name for name in columns if table.schema.names.count(name) > 1]
    if twice:
        raise DataError(f"arrow: column {twice[0]!r} occurs twice: rename it", column=twice[0])
    absent = [name for name in columns if name not in table.schema.names]
    if absent:
        raise DataError(f"arrow: {missing(table.schema, absent[0])}", column=absent[0], columns=table.schema.names)
    return table.select(list(columns))


def _in_memory(call: str, table: pa.Table, features: str | Sequence[str], options: ColumnOptions) -> Data:
    return RowTableData(call, partial(_opened, table), column_choice(features, options), options)


def _opened(table: pa.Table, columns: list[str]) -> RowTable:
    return ChunkedTable(table)


# ------------------------------------------------------------------------------------------------ Arrow files


def _open_files(files: LocalFiles, columns: Sequence[str]) -> RowTable:
    """Map the files. If one is compressed, all are written into one uncompressed file first."""
    found = [(name, mapped_table(name)) for name in files.list()]
    for name, (table, _) in found:
        _check_schema(name, table.schema, found[0][0], found[0][1][0].schema, columns)
    parts = [(name, table.num_rows) for name, (table, _) in found]
    if all(mapped for _, (_, mapped) in found):
        return ChunkedTable(pa.concat_tables([table.select(list(columns)) for _, (table, _) in found]), parts)

    def read() -> Source:
        schema = found[0][1][0].select(list(columns)).schema
        return schema, ((name, _columns_of_file(name, schema)) for name in files.list())

    return StoredTable(files.digest(*columns), read)


def _columns_of_file(name: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(name) as file:
        for batch in _batches(file):
            yield pa.RecordBatch.from_arrays([batch.column(column) for column in schema.names], schema=schema)


def _check_schema(name: str, schema: pa.Schema, first: str, expected: pa.Schema, columns: Sequence[str]) -> None:
    for column in columns:
        if schema.get_field_index(column) < 0:
            raise DataError(f"{name}: {missing(schema, column)}", file=name, column=column)
        ours, theirs = expected.field(column).type, schema.field(column).type
        if ours != theirs:
            raise DataError(
                f"{name}: column {column!r} is {theirs}, but it is {ours} in {first}\nwrite the files with one schema",
                file=name,
                column=column,
            )


def mapped_table(name: str) -> tuple[pa.Table, bool]:
    """Return the table of an Arrow file, and whether its values lie in the file, not in this process's memory.

    Of a compressed file only the first batch is read, since the others would be decompressed into memory.

    Raises:
        DataError: the file is damaged, is no Arrow file, or has extension types, which can carry code.
    """
    try:
        with pa.memory_map(name) as file:
            whole = file.read_buffer()
            _refuse_extensions(name, whole)
            first = next(_batches(pa.BufferReader(whole)), None)
            if first is not None and not _lies_in(first, whole):
                return pa.Table.from_batches([first]), False
            reader = _reader(pa.BufferReader(whole))
            return reader.read_all(), True
    except (OSError, ValueError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise DataError(
            f"{name}: cannot be read as an Arrow file: {reason}\nwrite the file again", file=name
        ) from error


def _reader(file: pa.NativeFile) -> pa.ipc.RecordBatchFileReader | pa.ipc.RecordBatchStreamReader:
    begin = file.read(6)
    file.seek(0)
    return pa.ipc.open_file(file) if begin == b"ARROW1" else pa.ipc.open_stream(file)


def _batches(file: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    reader = _reader(file)
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        return (reader.get_batch(number) for number in range(reader.num_record_batches))
    return iter(reader)


def _lies_in(batch: pa.RecordBatch, whole: pa.Buffer) -> bool:
    buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer is not None and buffer.size]
    return all(whole.address <= buffer.address < whole.address + whole.size for buffer in buffers)


def _refuse_extensions(name: str, whole: pa.Buffer) -> None:
    """Raise DataError if the schema at the beginning of an Arrow file, or that in its footer, has extension types."""
    view = memoryview(whole)
    is_file = bytes(view[:6]) == b"ARROW1"
    begin = 8 if is_file else 0
    length = int.from_bytes(view[begin + 4 : begin + 8], "little")
    schemas = [bytes(view[begin : begin + 8 + min(length, 1 << 26)])]
    if is_file:
        footer = int.from_bytes(view[-10:-6], "little")
        schemas.append(bytes(view[max(len(view) - 10 - footer, 0) : -10]))
    if any(b"ARROW:extension" in schema for schema in schemas):
        raise DataError(
            f"{name}: it has columns of Arrow extension types, which can carry code and are not read\n"
            "write them as plain columns or lists of numbers",
            file=name,
        )


# ------------------------------------------------------------------------------------------------ Arrow datasets


def _is_dataset(source: object) -> TypeGuard[pads.Dataset]:
    """Return whether `source` is a dataset. Whoever made one has loaded its module."""
    module = sys.modules.get("pyarrow.dataset")
    return module is not None and isinstance(source, module.Dataset)


def _packed_dataset(dataset: pads.Dataset) -> tuple[bytes, str]:
    """Return a pickled dataset, and a key of its files and columns."""
    try:
        dataset.get_fragments()  # refuses a filter or a projection, which the pickle of a union would lose
        packed = pickle.dumps(dataset)
    except (TypeError, ValueError, pickle.PicklingError) as error:
        raise DataError(
            f"arrow: the dataset cannot be sent to workers: {str(error).splitlines()[0]}\n"
            "give dataset.to_table(), or write it as Parquet and give rayps.data.parquet(FOLDER, ...)"
        ) from error
    files = getattr(dataset, "files", [])
    facts = [(name, *_changed(name)) for name in files] or packed
    return packed, hashlib.sha256(repr((facts, dataset.schema.to_string())).encode()).hexdigest()[:24]


def _changed(name: str) -> tuple[int, int]:
    path = Path(name)
    return (path.stat().st_size, path.stat().st_mtime_ns) if path.is_file() else (0, 0)


def _open_dataset(packed: bytes, key: str, columns: Sequence[str]) -> RowTable:
    dataset = cast("pads.Dataset", pickle.loads(packed))
    for column in columns:
        if dataset.schema.get_field_index(column) < 0:
            raise DataError(f"arrow dataset: {missing(dataset.schema, column)}", column=column)

    def read() -> Source:
        schema = pa.schema([dataset.schema.field(column) for column in columns])
        return schema, ((getattr(part, "path", None) or "dataset", rows_of(part)) for part in dataset.get_fragments())

    def rows_of(part: pads.Fragment) -> Iterator[pa.RecordBatch]:
        return iter(part.to_batches(columns=list(columns), schema=dataset.schema, fragment_readahead=1))

    return StoredTable(hashlib.sha256(repr((key, columns)).encode()).hexdigest()[:24], read)
