"""CSV and JSON lines files of any size as data sources. They are converted once per host: `rayps.data.stored_table`."""

from __future__ import annotations

import gzip
import hashlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO, Unpack, cast

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.json as pajson
import pyarrow.types as pt

from rayps.core.errors import ConfigError, DataError
from rayps.data.base import Data
from rayps.data.column_options import ColumnOptions, column_choice
from rayps.data.columns import missing
from rayps.data.files import as_data_error
from rayps.data.local_files import LocalFiles, PathsGiven, local_files
from rayps.data.stored_table import Source, StoredTable
from rayps.data.table_rows import RowTable, RowTableData

_BLOCK = 4 << 20  # bytes of a file that are parsed at a time
_LONGEST = 256 << 20  # the largest number of bytes of one line


@dataclass(frozen=True, slots=True)
class TextFormat:
    """How the text of the files is parsed. `types`: the Arrow type of columns by name, e.g. ("price", "float64")."""

    features: tuple[str, ...]
    whole: bool  # whether the features become whole numbers
    types: tuple[tuple[str, str], ...]
    delimiter: str = ","
    names: tuple[str, ...] | None = None  # of all columns, if the files have no header


def csv(
    path: PathsGiven,
    *,
    features: str | Sequence[str],
    types: Mapping[str, str] | None = None,
    delimiter: str = ",",
    names: Sequence[str] | None = None,
    **options: Unpack[ColumnOptions],
) -> Data:
    """Read CSV files: a file, a directory (its files *.csv and *.csv.gz), a pattern such as "part-*.csv", or a list.

    Every host converts the used columns once into a temporary Arrow file (in TMPDIR: 8 bytes for a number), with one
    block of 4 MiB in memory; rows are then read by number from the page cache. The files may be larger than memory.

    - `types`: Arrow types of columns, e.g. {"zip": "string"}; the others follow from the first block of the first file.
      Numbers among the features are read as float64, unless `dtype` is a type of whole numbers.
    - `delimiter`: one character. `names`: the names of the columns if the files have no header.
    - Empty values are null: see `on_invalid`. The other options are those of `rayps.data.arrow`.

    Raises:
        ConfigError: an option is invalid.
        DataError: there is no path. `check()` finds other errors.

    Example:
        rayps.data.csv("part-*.csv", features=["height", "width"], label="kind")
    """
    if len(delimiter) != 1:
        raise ConfigError(f"delimiter is {delimiter!r}: give one character", field="delimiter")
    choice = column_choice(features, options)
    form = TextFormat(
        choice.features,
        choice.dtype.kind != "f",
        _checked_types(types),
        delimiter,
        None if names is None else tuple(names),
    )
    files = local_files("csv", path, (".csv", ".csv.gz", ".tsv", ".tsv.gz"))
    return RowTableData(files.paths[0], partial(_open_csv, files, form), choice, options)


def json_lines(
    path: PathsGiven,
    *,
    features: str | Sequence[str],
    types: Mapping[str, str] | None = None,
    **options: Unpack[ColumnOptions],
) -> Data:
    """Read files with one JSON object per line: a file, a directory (*.jsonl, *.ndjson, .gz), a pattern, or a list.

    A feature is a number or a list of numbers of one length. Every host converts the used columns once, as `csv` does.
    `types` and the other options are those of `csv`; a key that a line does not have is null.

    Raises:
        ConfigError: an option is invalid.
        DataError: there is no path. `check()` finds other errors.

    Example:
        rayps.data.json_lines("rows.jsonl", features="pixels", label="digit")
    """
    choice = column_choice(features, options)
    form = TextFormat(choice.features, choice.dtype.kind != "f", _checked_types(types))
    files = local_files("json_lines", path, (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz"))
    return RowTableData(files.paths[0], partial(_open_json, files, form), choice, options)


def _checked_types(types: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    for column, name in (types or {}).items():
        try:
            pa.type_for_alias(name)
        except (ValueError, TypeError):
            raise ConfigError(
                f"types: {column!r} is {name!r}: give the name of an Arrow type, such as float64, int64 or string",
                field="types",
            ) from None
    return tuple((types or {}).items())


def _key(files: LocalFiles, form: TextFormat, columns: Sequence[str]) -> str:
    return hashlib.sha256((files.digest() + repr((form, columns, pa.__version__))).encode()).hexdigest()[:24]


def _schema(found: pa.Schema, form: TextFormat, columns: Sequence[str], file: str) -> pa.Schema:
    """Return the types of the used columns: those that are given, float64 for numbers among the features, or `found`.

    Raises DataError if a column is missing.
    """
    given = dict(form.types)
    fields = []
    for column in columns:
        if found.get_field_index(column) < 0:
            raise DataError(f"{file}: {missing(found, column)}", file=file, column=column, columns=found.names)
        kind = found.field(column).type
        if column in given:
            kind = pa.type_for_alias(given[column])
        elif column in form.features and not form.whole:
            kind = _float_if_number(kind)
        fields.append(pa.field(column, kind))
    return pa.schema(fields)


def _float_if_number(kind: pa.DataType) -> pa.DataType:
    if pt.is_list(kind):
        return pa.list_(_float_if_number(kind.value_type))
    return pa.float64() if pt.is_integer(kind) or pt.is_null(kind) else kind


def _does_not_fit(file: str, reason: str, column: str | None) -> DataError:
    one = column or "COLUMN"
    return DataError(
        f"{file}: {reason}\ncorrect the file, or give the column's type: types={{{one!r}: 'float64'}}",
        file=file,
        column=column,
        reason=reason,
    )


# ------------------------------------------------------------------------------------------------ CSV


def _open_csv(files: LocalFiles, form: TextFormat, columns: Sequence[str]) -> RowTable:
    def read() -> Source:
        found = files.list()
        with as_data_error(found[0]), _csv_reader(found[0], form, None) as reader:
            schema = _schema(reader.schema, form, columns, found[0])
        return schema, ((name, _csv_blocks(name, form, schema)) for name in found)

    return StoredTable(_key(files, form, columns), read)


def _csv_reader(file: str, form: TextFormat, schema: pa.Schema | None) -> pacsv.CSVStreamingReader:
    return pacsv.open_csv(
        file,
        read_options=pacsv.ReadOptions(
            use_threads=False, block_size=_BLOCK, column_names=None if form.names is None else list(form.names)
        ),
        parse_options=pacsv.ParseOptions(delimiter=form.delimiter),
        convert_options=pacsv.ConvertOptions()
        if schema is None
        else pacsv.ConvertOptions(
            column_types={field.name: field.type for field in schema}, include_columns=schema.names
        ),
    )


def _csv_blocks(file: str, form: TextFormat, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    header: Sequence[str] = ()
    try:
        with _csv_reader(file, form, None) as reader:
            header = reader.schema.names
        absent = [column for column in schema.names if column not in header]
        if absent:
            raise DataError(
                f"{file}: {missing(pa.schema([(name, pa.null()) for name in header]), absent[0])}",
                file=file,
                column=absent[0],
            )
        with _csv_reader(file, form, schema) as reader:
            yield from reader
    except (ValueError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0][:200]
        number = re.match(r"In CSV column #(\d+): ", reason)
        column = header[int(number[1])] if number and int(number[1]) < len(header) else None
        if column is None:
            raise
        raise _does_not_fit(file, f"column {column!r}: {reason[number.end() if number else 0 :]}", column) from error


# ------------------------------------------------------------------------------------------------ JSON lines


def _open_json(files: LocalFiles, form: TextFormat, columns: Sequence[str]) -> RowTable:
    def read() -> Source:
        found = files.list()
        first = next((text for name in found for text in _lines(name)), b"")
        if not first:
            return pa.schema([pa.field(column, pa.float64()) for column in columns]), iter(())
        with as_data_error(found[0]):
            table = pajson.read_json(io.BytesIO(first), read_options=_json_blocks_of(first))
        schema = _schema(table.schema, form, columns, found[0])
        return schema, ((name, _json_blocks(name, schema)) for name in found)

    return StoredTable(_key(files, form, columns), read)


def _json_blocks_of(text: bytes) -> pajson.ReadOptions:
    return pajson.ReadOptions(use_threads=False, block_size=max(len(text), 1))


def _json_blocks(file: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    parse = pajson.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    first = 0
    for text in _lines(file):
        try:
            table = pajson.read_json(io.BytesIO(text), read_options=_json_blocks_of(text), parse_options=parse)
        except (ValueError, pa.ArrowException) as error:
            reason = str(error).splitlines()[0][:200]
            column = re.search(r"Column\(/([^)/]*)", reason)
            raise _does_not_fit(
                file, f"after row {first}: {reason}", column[1] if column and column[1] in schema.names else None
            ) from error
        first += table.num_rows
        yield from table.select(schema.names).cast(schema).to_batches()


def _lines(file: str) -> Iterator[bytes]:
    """Yield the text of a file, in pieces of about one block that end where a line ends.

    Raises DataError if a line has more than 256 MiB.
    """
    with as_data_error(file), cast(BinaryIO, (gzip.open if file.endswith(".gz") else open)(file, "rb")) as source:
        rest = b""
        while piece := source.read(_BLOCK):
            whole, end, begun = (rest + piece).rpartition(b"\n")
            rest = begun
            if (whole + end).strip():
                yield whole + end
            if len(rest) > _LONGEST:
                raise DataError(
                    f"{file}: a line has more than {_LONGEST >> 20} MiB: write one JSON object per line", file=file
                )
        if rest.strip():
            yield rest
