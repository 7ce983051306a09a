"""Convert Arrow columns to numpy rows, and check columns and values. Opens no file."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray

from rayps_client.errors import ConfigError, DataError
from rayps_client.values import Json

Array = NDArray[np.generic]
DType = np.dtype[np.generic]
NOT_EXACT = "a whole number that {} does not hold exactly"
WRITTEN_WHOLE = {b"rayps": b"whole numbers"}  # of a float64 field whose values are written as whole numbers in a text


@dataclass(frozen=True, slots=True)
class BadValue:
    """The first value of a chunk that is not valid: its row in the chunk, its column, and why it is not valid.

    `way_out`: what the user can do; None if such rows can be left out by on_invalid="drop".
    """

    row: int
    column: str
    reason: str
    way_out: str | None = None


@dataclass(frozen=True, slots=True)
class ColumnRows:
    """n rows: features `x` [n, width], labels `y` [n] or None, and whether each row is valid (`good` [n]).

    `bad` is the first invalid value, or None. A value whose row cannot be left out comes before the others.
    """

    x: Array
    y: Array | None
    good: NDArray[np.bool_]
    bad: BadValue | None


@dataclass(frozen=True, slots=True)
class ColumnLayout:
    """The columns of rows, and their widths and dtypes."""

    features: tuple[str, ...]  # names of columns
    widths: tuple[int | None, ...]  # for each feature, the number of values per row; None if it is not known yet
    label: str | None  # name of a column
    store: DType  # dtype of features in memory
    label_dtype: DType

    @property
    def columns(self) -> list[str]:
        """The names of the columns to read."""
        return list(dict.fromkeys([*self.features, *([] if self.label is None else [self.label])]))

    @property
    def width(self) -> int:
        """The number of feature values per row."""
        return sum(width or 0 for width in self.widths)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in memory, including one byte for its validity."""
        return self.width * self.store.itemsize + (0 if self.label is None else self.label_dtype.itemsize) + 1

    def rows(self, chunk: pa.RecordBatch) -> ColumnRows:
        """Return the rows of a chunk as numpy arrays, in which invalid values are zeros."""
        count = chunk.num_rows
        x = np.zeros((count, self.width), dtype=self.store)
        good = np.ones(count, dtype=np.bool_)
        found: list[BadValue] = []
        place = 0
        for name, width in zip(self.features, self.widths, strict=True):
            column, into = chunk.column(name), x[:, place : place + (width or 0)]
            found += _fill(into, good, column, name)
            found += _changed(into, column, name, written_whole=chunk.schema.field(name).metadata == WRITTEN_WHOLE)
            place += width or 0
        y = None
        if self.label is not None:
            y = np.zeros((count, 1), dtype=self.label_dtype)
            found += _fill(y, good, chunk.column(self.label), self.label)
            y = y[:, 0]
        return ColumnRows(x, y, good, min(found, key=lambda bad: (bad.way_out is None, bad.row), default=None))


def features_of(features: str | Sequence[str]) -> list[str]:
    """Return the names of the feature columns. Raises ConfigError if there are none, or one occurs twice."""
    names = [features] if isinstance(features, str) else list(features)
    if not names:
        raise ConfigError("features is empty: name a column of lists, or of numbers each", field="features")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"features has {twice[0]!r} twice: name each column once", field="features")
    return names


def layout_of(
    schema: pa.Schema, features: Sequence[str], label: str | None, *, dtype: DType, label_dtype: DType | None, file: str
) -> ColumnLayout:
    """Check a file's columns and return their layout.

    Raises:
        DataError: a column is missing, or its type cannot be used.
    """
    for name in [*features, *([] if label is None else [label])]:
        if schema.get_field_index(name) < 0:
            raise DataError(f"{file}: {missing(schema, name)}", file=file, column=name, columns=schema.names)
    types = [_numbers(schema.field(name).type) for name in features]
    for name, kind in zip(features, types, strict=True):
        _check_type(kind, schema.field(name).type, name, file)
        if dtype.kind in "iu" and not (pt.is_integer(kind) or pt.is_boolean(kind)):
            raise DataError(
                f"{file}: column {name!r} is {kind}, not whole numbers: leave dtype={dtype} out", file=file, column=name
            )
    widths = tuple(_width(schema.field(name).type) for name in features)
    small = dtype == np.float32 and all(pt.is_uint8(kind) or pt.is_boolean(kind) for kind in types)
    store = np.dtype(np.uint8) if small else dtype
    return ColumnLayout(tuple(features), widths, label, store, label_dtype or _label_dtype(schema, label, file))


def missing(schema: pa.Schema, name: str) -> str:
    """Return a text that says that a column is missing, with the existing columns and the most similar name.

    If several columns have the name, the text says this.
    """
    names = [str(column) for column in schema.names]
    if names.count(name) > 1:
        return f"column {name!r} occurs twice: rename it"
    near = difflib.get_close_matches(name, names, n=1)
    shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"there is no column {name!r}: the columns are {shown or 'none at all'}{hint}"


def _label_dtype(schema: pa.Schema, label: str | None, file: str) -> DType:
    if label is None:
        return np.dtype(np.int64)
    kind = schema.field(label).type
    if _is_list(kind):
        raise DataError(
            f"{file}: label column {label!r} is {kind}: give a column with one number per row", file=file, column=label
        )
    plain = _numbers(kind)
    _check_type(plain, kind, label, file)
    return np.dtype(np.int64) if pt.is_integer(plain) or pt.is_boolean(plain) else np.dtype(np.float32)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind))


def _width(kind: pa.DataType) -> int | None:
    if pt.is_fixed_size_list(kind):
        return int(kind.list_size)
    return None if _is_list(kind) else 1


def _numbers(kind: pa.DataType) -> pa.DataType:
    """Return the type of the single values in a column."""
    if _is_list(kind):
        kind = kind.value_type
    return kind.value_type if pt.is_dictionary(kind) else kind


def _check_type(kind: pa.DataType, whole: pa.DataType, name: str, file: str) -> None:
    if pt.is_integer(kind) or pt.is_floating(kind) or pt.is_boolean(kind) or pt.is_decimal(kind):
        return
    text = pt.is_string(kind) or pt.is_large_string(kind) or pt.is_binary(kind) or pt.is_large_binary(kind)
    hint = (
        "text needs a number for each value first, e.g. pandas.factorize or one column per value"
        if text
        else "convert it to a number first"
        if pt.is_temporal(kind) or pt.is_null(kind)
        else "give columns of numbers, or of lists of numbers"
    )
    raise DataError(f"{file}: column {name!r} is {whole}: {hint}", file=file, column=name)


# ---------------------------------------------------------------------------------------------- values


def _fill(out: Array, good: NDArray[np.bool_], column: pa.Array, name: str) -> list[BadValue]:
    """Write a column into `out`, and set `good` to False for its invalid rows.

    Return a list of the first invalid value, or an empty list.
    """
    if _is_list(column.type):
        whole, values = _lists(column, out.shape[1])
    else:
        whole, values = np.ones(len(column), dtype=np.bool_), column
    plain, known = _plain(values, out.dtype)
    width = out.shape[1]
    if whole.all():
        out[:] = plain.reshape(len(column), width)
    else:
        out[whole] = plain.reshape(-1, width)
    fine = whole.copy()
    if known is not None:
        fine[whole] &= known.reshape(-1, width).all(axis=1)
    if out.dtype.kind == "f":
        fine &= np.isfinite(out).all(axis=1)
    if fine.all():
        return []
    out[~fine] = 0
    good &= fine
    row = int(np.argmin(fine))
    return [BadValue(row, name, _reason(column[row].as_py(), width))]


def _changed(out: Array, column: pa.Array, name: str, *, written_whole: bool) -> list[BadValue]:
    """Return a list of the first whole number that is another one in `out`, or an empty list.

    `written_whole`: whether the values are floats that a text has as whole numbers.
    """
    kind = _numbers(column.type)
    wide = pt.is_integer(kind) and kind.bit_width > 16
    if out.dtype.kind != "f" or not (wide or written_whole):
        return []
    whole, values = _lists(column, out.shape[1]) if _is_list(column.type) else (None, column)
    plain, _ = _plain(values, np.dtype(np.float64) if written_whole else np.dtype(kind.to_pandas_dtype()))
    at = first_changed(plain, out.dtype)
    if at is None:
        return []
    row, index = divmod(at, out.shape[1])
    if whole is not None:
        row = int(np.flatnonzero(whole)[row])
    inside = f" at index {index}" if out.shape[1] > 1 else ""
    reason = f"is {plain[at]:{'.17g' if written_whole else 'd'}}{inside}, {NOT_EXACT.format(out.dtype)},"
    return [BadValue(row, name, reason, way_out_for(plain[at]))]


def way_out_for(value: np.generic) -> str:
    """Return what the user can do about a whole number that a type of floats does not hold exactly."""
    if abs(float(value)) >= 2**53:
        return 'give dtype="int64", or leave the column out if it is an id'
    return 'give dtype="float64", and batch.x.float() where it may be rounded; leave the column out if it is an id'


def first_changed(values: Array, dtype: DType) -> int | None:
    """Return the place of the first whole number in `values` [n] that `dtype`, a type of floats, does not hold exactly.

    `values` are integers, or floats of 64 bits, of which those with a fraction may be rounded.
    """
    exact = 2**53 if dtype == np.float64 else 2**24  # up to which `dtype` holds all whole numbers
    limit = min(exact, 2**53 - 1) if values.dtype.kind == "f" else exact
    if not values.size or (-limit <= values.min(initial=0) and values.max(initial=0) <= limit):
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        made = np.asarray(values.astype(dtype), dtype=np.float64)
        if values.dtype.kind == "f":  # a whole number of 2^53 or more was rounded when it became a float
            changed = ((made != values) & (values == np.rint(values))) | (np.abs(values) >= 2**53)
            changed &= np.isfinite(values)
        else:  # a float above the largest integer has no integer
            end = 2.0 ** (8 * values.dtype.itemsize - (values.dtype.kind == "i"))
            changed = (made >= end) | (made.astype(values.dtype) != values)
    return int(np.argmax(changed)) if changed.any() else None


def _lists(column: pa.Array, width: int) -> tuple[NDArray[np.bool_], pa.Array]:
    """Return whether each row is a list of `width` values, and the values of those rows that are."""
    if column.null_count == 0 and pt.is_fixed_size_list(column.type):
        return np.ones(len(column), dtype=np.bool_), column.flatten()
    import pyarrow.compute as pc  # not at the top: it takes 0.1 s of each process's start

    lengths = pc.fill_null(pc.list_value_length(column), -1).to_numpy(zero_copy_only=False)
    whole = lengths == width
    return whole, (column if whole.all() else column.filter(pa.array(whole))).flatten()


def _plain(values: pa.Array, dtype: DType) -> tuple[Array, NDArray[np.bool_] | None]:
    """Return the values as a numpy array, and a mask that is True for each value that is not null.

    The mask is None if no value is null.
    """
    if pt.is_dictionary(values.type):
        values = values.dictionary_decode()
    known = values.is_valid().to_numpy(zero_copy_only=False) if values.null_count else None
    if pt.is_boolean(values.type):
        values = values.cast(pa.uint8())
    elif pt.is_decimal(values.type):
        values = values.cast(pa.float64())
    if dtype.kind in "iu":
        values = values.cast(pa.from_numpy_dtype(dtype))  # the cast refuses values that do not fit
    if known is not None:
        values = values.fill_null(0)
    with np.errstate(over="ignore"):
        return values.to_numpy(zero_copy_only=False).astype(dtype, copy=False), known


def _reason(value: Json, width: int) -> str:
    if value is None:
        return "is null"
    if isinstance(value, list):
        if len(value) != width:
            return f"has {len(value)} values where others have {width}"
        at = next(place for place, one in enumerate(value) if one is None or not _fits(one))
        return f"{_reason(value[at], 1)} at index {at}"
    return "is NaN" if value != value else f"is {value}, which is not finite as float32"


def _fits(value: float) -> bool:
    return bool(abs(float(value)) <= float(np.finfo(np.float32).max))
