"""A `datasets.Dataset` of Hugging Face as a data source. The package `datasets` itself is not imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol, Unpack, cast

import pyarrow as pa
from rayps_client.columns import missing
from rayps_client.errors import ConfigError, DataError

from rayps.data.base import Data, Nested
from rayps.data.memory import DatasetData
from rayps.data.partition_rules import Ints
from rayps.data.tabular.column_options import ColumnOptions, column_choice
from rayps.data.tabular.table_rows import RowTable, RowTableData, whole_batch
from rayps.data.unsupported import refuse_ray_data

Row = Mapping[str, Nested]


class SchemaOwner(Protocol):
    """What is needed of `datasets.Features`."""

    @property
    def arrow_schema(self) -> pa.Schema:
        """The columns as an Arrow schema."""


class HuggingFaceDataset(Protocol):
    """What `huggingface` needs of a `datasets.Dataset`."""

    @property
    def features(self) -> SchemaOwner:
        """The columns and their types."""

    @property
    def column_names(self) -> list[str]:
        """The names of the columns."""

    @property
    def format(self) -> Mapping[str, object]:
        """The format of rows; its "type" is None unless it was set."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def __getitem__(self, which: int | list[int] | slice) -> Row | pa.Table:
        """Return a row, or some rows, in the data set's format."""

    def with_format(self, type: str) -> HuggingFaceDataset:
        """Return the data set with another format."""

    def select_columns(self, column_names: list[str]) -> HuggingFaceDataset:
        """Return the data set with some of its columns."""


def huggingface(
    source: HuggingFaceDataset, *, features: str | Sequence[str] | None = None, **options: Unpack[ColumnOptions]
) -> Data:
    """Use the rows of a Hugging Face `datasets.Dataset`, of one split.

    - With `features`: columns of numbers, or of lists of one length, read from the data set's memory-mapped files.
      `Batch.x` is [rows, numbers]; token ids need dtype="int64". The options are those of `rayps.data.arrow`.
    - Without `features`: each row is a dict in the data set's own format (`with_format("torch")` if it has none, and
      `with_transform` if it has one). `Batch.x` is a dict of stacked tensors, as a model of `transformers` takes it,
      and `Batch.y` is None, or the column `label`. Of the options only `label`, `batch_size`, `shuffle`, `drop_last`
      and `client` (a rule or ids) apply.

    A data set on disk travels as the paths of its files, which must exist on all hosts; one in memory travels itself,
    once.

    Raises:
        ConfigError: an option is invalid, or needs `features`.
        DataError: it is a DatasetDict or IterableDataset. `check()` finds other errors.

    Example:
        rows = datasets.Dataset.from_dict({"pixels": [[0.0, 1.0], [1.0, 0.0]], "digit": [3, 5]})
        rayps.data.huggingface(rows, features="pixels", label="digit").rows()  # 2
    """
    _refuse_others(source)
    if features is not None:
        choice = column_choice(features, options)
        return RowTableData("huggingface", partial(_open, source), choice, options)
    unknown = sorted(set(options) - {"label", "batch_size", "shuffle", "drop_last", "client"})
    if unknown:
        raise ConfigError(f"{unknown[0]} needs features: name the columns of Batch.x", field=unknown[0])
    label = options.get("label")
    if label is not None and label not in source.column_names:
        names = pa.schema([(name, pa.null()) for name in source.column_names])
        raise DataError(f"huggingface: {missing(names, label)}", column=label)
    rows = source if source.format["type"] is not None else source.with_format("torch")
    return DatasetData(
        FormattedRows(rows, label),
        batch_size=options.get("batch_size", 32),
        shuffle=options.get("shuffle", True),
        drop_last=options.get("drop_last", False),
        client=options.get("client"),
    )


def _refuse_others(source: object) -> None:
    refuse_ray_data("huggingface", source)
    name = type(source).__name__
    if isinstance(source, dict):
        splits = ", ".join(map(repr, source)) or "none"
        raise DataError(f"huggingface: it is a {name}, and a run reads one split: give ds[SPLIT], one of {splits}")
    if hasattr(source, "__iter__") and not hasattr(source, "__len__"):
        raise DataError(
            f"huggingface: {name} has no access to rows by number: give rayps.data.iterable(ds), or load the data set "
            "without\nstreaming=True"
        )
    if not all(hasattr(source, part) for part in ("features", "with_format", "select_columns")):
        raise DataError(f"huggingface: it is {name}: give a datasets.Dataset")


def _open(source: HuggingFaceDataset, columns: list[str]) -> RowTable:
    return HuggingFaceTable(source, columns)


class HuggingFaceTable:
    """Rows by number of a Hugging Face data set, as Arrow batches."""

    def __init__(self, source: HuggingFaceDataset, columns: list[str]) -> None:
        self.schema: pa.Schema = source.features.arrow_schema
        self.count = len(source)
        there = [name for name in columns if name in source.column_names]
        self._rows = source.select_columns(there).with_format("arrow")

    def take(self, columns: Sequence[str], which: Ints) -> pa.RecordBatch:
        """Return these columns of the rows with these numbers, in this order."""
        if len(which) == 0:
            return self._batch(0, 0).select(list(columns))
        return whole_batch(cast(pa.Table, self._rows[which.tolist()])).select(list(columns))

    def blocks(self, columns: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
        """Yield these columns of all rows in order, at most `rows` rows at a time."""
        for first in range(0, self.count, rows):
            yield self._batch(first, first + rows).select(list(columns))

    def _batch(self, first: int, last: int) -> pa.RecordBatch:
        return whole_batch(cast(pa.Table, self._rows[slice(first, last)]))

    def place(self, row: int) -> str:
        """Return where a row is: its number."""
        return f"row {row}"


class FormattedRows:
    """Items of a Hugging Face data set in its own format: a dict, or (dict, label) if one column is the label."""

    def __init__(self, source: HuggingFaceDataset, label: str | None) -> None:
        self._source = source
        self._label = label

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._source)

    def __getitem__(self, row: int) -> Nested:
        """Return item number `row`."""
        found = cast(Row, self._source[row])
        if self._label is None:
            return dict(found)
        return {name: value for name, value in found.items() if name != self._label}, found[self._label]
