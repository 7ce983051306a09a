"""CSV and JSON lines files of any size as data sources. They are converted once per host: `tabular.stored_table`."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Unpack

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.json as pajson
import pyarrow.types as pt
from rayps_client.columns import WRITTEN_WHOLE, missing
from rayps_client.errors import ConfigError, DataError

from rayps.data.base import Data
from rayps.data.files import as_data_error
from rayps.data.local_files import LocalFiles, PathsGiven, local_files
from rayps.data.tabular.column_options import ColumnOptions, column_choice
from rayps.data.tabular.stored_table import Source, StoredTable
from rayps.data.tabular.table_rows import RowTable, RowTableData
from rayps.data.texts.decoded_text import DecodedText, checked_encoding, decoded

_BLOCK = 4 << 20  # bytes of a text that are parsed at a time
_LONGEST = 256 << 20  # the largest number of bytes of one line


@dataclass(frozen=True, slots=True)
class TextFormat:
    """How the text of the files is parsed. `types`: the Arrow type of columns by name, e.g. ("price", "float64")."""

    features: tuple[str, ...]
    whole: bool  # whether the features become whole numbers
    types: tuple[tuple[str, str], ...]
    encoding: str
    delimiter: str = ","
    names: tuple[str, ...] | None = None  # of all columns, if the files have no header


def csv(
    path: PathsGiven,
    *,
    features: str | Sequence[str],
    types: Mapping[str, str] | None = None,
    encoding: str = "utf-8",
    delimiter: str = ",",
    names: Sequence[str] | None = None,
    **options: Unpack[ColumnOptions],
) -> Data:
    """Read CSV files: a file, a directory (its files *.csv and *.csv.gz), a pattern such as "part-*.csv", or a list.

    Every host converts the used columns once into a temporary Arrow file (in TMPDIR: 8 bytes for a number), with one
    block of 4 MiB in memory; rows are then read by number from the page cache. The files may be larger than memory.

    - `types`: Arrow types of columns, e.g. {"zip": "string"}; the others follow from the first block of the first file
      that has rows. Numbers among the features are read as float64, unless `dtype` is a type of whole numbers.
    - `encoding`: a text encoding of Python, such as "latin-1", "cp1252" or "utf-16".
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
        checked_encoding(encoding),
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
    encoding: str = "utf-8",
    **options: Unpack[ColumnOptions],
) -> Data:
    """Read files with one JSON object per line: a file, a directory (*.jsonl, *.ndjson, .gz), a pattern, or a list.

    A feature is a number or a list of numbers of one length. Every host converts the used columns once, as `csv` does.
    `types`, `encoding` and the other options are those of `csv`; a key that a line does not have is null.

    Raises:
        ConfigError: an option is invalid.
        DataError: there is no path. `check()` finds other errors.

    Example:
        rayps.data.json_lines("rows.jsonl", features="pixels", label="digit")
    """
    choice = column_choice(features, options)
    form = TextFormat(choice.features, choice.dtype.kind != "f", _checked_types(types), checked_encoding(encoding))
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
        read = kind = found.field(column).type
        if column in given:
            kind = pa.type_for_alias(given[column])
        elif column in form.features and not form.whole:
            kind = _float_if_number(kind)
        whole = column not in given and kind != read
        fields.append(pa.field(column, kind, metadata=WRITTEN_WHOLE if whole else None))
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
        schema = _csv_schema(found, form, columns)
        return schema, ((name, _csv_blocks(name, form, schema)) for name in found)

    return StoredTable(_key(files, form, columns), read)


@contextmanager
def _csv_reader(file: str, form: TextFormat, schema: pa.Schema | None) -> Iterator[pacsv.CSVStreamingReader | None]:
    """Open a file of rows. The value is None if the file has no text, not even the names of columns."""
    with DecodedText(decoded(file, form.encoding, _BLOCK)) as text:
        if text.empty:
            yield None
            return
        names = None if form.names is None else list(form.names)
        chosen = {} if schema is None else {field.name: field.type for field in schema}
        with pacsv.open_csv(
            text,
            read_options=pacsv.ReadOptions(use_threads=False, block_size=_BLOCK, column_names=names),
            parse_options=pacsv.ParseOptions(delimiter=form.delimiter),
            convert_options=pacsv.ConvertOptions(column_types=chosen, include_columns=list(chosen)),
        ) as reader:
            yield reader


def _csv_schema(files: Sequence[str], form: TextFormat, columns: Sequence[str]) -> pa.Schema:
    """Return the types of the used columns in the first file that has rows; float64 if none has."""
    for file in files:
        with as_data_error(file), _csv_reader(file, form, None) as reader:
            if reader is None:
                continue
            schema = _schema(reader.schema, form, columns, file)
            if any(block.num_rows for block in reader):
                return schema
    return pa.schema([pa.field(column, pa.float64()) for column in columns])


def _csv_blocks(file: str, form: TextFormat, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    header: Sequence[str] = ()
    try:
        with _csv_reader(file, form, None) as reader:
            if reader is None:
                return
            header = reader.schema.names
            _schema(reader.schema, form, schema.names, file)
        with _csv_reader(file, form, schema) as reader:
            yield from reader or ()
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
        first = next((text for name in found for text in _lines(name, form.encoding)), b"")
        if not first:
            return pa.schema([pa.field(column, pa.float64()) for column in columns]), iter(())
        schema = _schema(_json_table(found[0], 0, first, None).schema, form, columns, found[0])
        return schema, ((name, _json_blocks(name, form.encoding, schema)) for name in found)

    return StoredTable(_key(files, form, columns), read)


def _json_blocks(file: str, encoding: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    parse = pajson.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    first = 0
    for text in _lines(file, encoding):
        table = _json_table(file, first, text, parse)
        first += table.num_rows
        yield from table.select(schema.names).cast(schema).to_batches()


def _json_table(file: str, first: int, text: bytes, parse: pajson.ParseOptions | None) -> pa.Table:
    """Return the rows of a piece of a file, which begins at row `first`. Raises DataError if they are not valid."""
    try:
        options = pajson.ReadOptions(use_threads=False, block_size=max(len(text), 1))
        return pajson.read_json(io.BytesIO(text), read_options=options, parse_options=parse)
    except (ValueError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0][:200]
        named = re.search(r"Column\(/([^)/]*)", reason)
        column = None if named is None else named[1]
        where = f"{file}: after row {first}"
        if column and "specified twice" in reason:
            raise DataError(
                f"{where}: column {column!r} occurs twice in a row: rename it", file=file, column=column
            ) from error
        if parse is None:
            raise DataError(
                f"{where}: cannot be read: {reason}\nwrite one JSON object per line", file=file, reason=reason
            ) from error
        raise _does_not_fit(
            file,
            f"after row {first}: {reason}",
            column if parse.explicit_schema.get_field_index(column or "") >= 0 else None,
        ) from error


def _lines(file: str, encoding: str) -> Iterator[bytes]:
    """Yield the text of a file as UTF-8, in pieces of about one block that end where a line ends.

    Raises DataError if the text is not of this encoding, or a line has more than 256 MiB.
    """
    with as_data_error(file):
        rest = b""
        for piece in decoded(file, encoding, _BLOCK):
            whole, end, begun = (rest + piece).rpartition(b"\n")
            rest = begun
            if (whole + end).strip():
                yield whole + end
            if len(rest) > _LONGEST:
                raise DataError(
                    f"{file}: a line has more than {_LONGEST >> 20} MiB: write one JSON object per line", file=file
                )
