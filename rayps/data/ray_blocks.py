"""A Ray Data dataset as a data source: it is executed once, and its blocks are written once on each host.

`rayps.data.ray` executes the dataset in the process that calls it, with the order of blocks preserved, and writes the
used columns into a temporary Arrow file of its host, block by block. Workers of this host map that file. A worker on
another host gets the same blocks from Ray's object store, and writes them into a file of its host. The rows and their
order are thus the same for all workers of a run, and rows are read by number.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol, Unpack

import pyarrow as pa
from rayps_client.columns import missing
from rayps_client.errors import DataError

from rayps.data.base import Data
from rayps.data.tabular.arrow_tables import used_columns
from rayps.data.tabular.column_options import ColumnOptions, column_choice
from rayps.data.tabular.stored_table import Source, StoredTable
from rayps.data.tabular.table_rows import RowTable, RowTableData
from rayps.data.unsupported import is_ray_data

_BLOCK_SECONDS = 300.0  # within which a block must arrive from the object store


class _ExecutionOptions(Protocol):
    preserve_order: bool


class _DataContext(Protocol):
    @property
    def execution_options(self) -> _ExecutionOptions:
        """How a dataset is executed."""


class RayDataset(Protocol):
    """What `ray` needs of a `ray.data.Dataset`."""

    @property
    def context(self) -> _DataContext:
        """The options of this dataset."""

    def materialize(self) -> RayDataset:
        """Execute the dataset."""

    def to_arrow_refs(self) -> Sequence[object]:
        """Return references to the blocks as Arrow tables."""


def ray(source: RayDataset, *, features: str | Sequence[str], **options: Unpack[ColumnOptions]) -> Data:
    """Use the rows of a `ray.data.Dataset` under `rayps.train`. It is executed now, once.

    The used columns are written into a temporary file (in TMPDIR) of every host that runs a worker; they may be larger
    than memory. Call it where Ray is connected and outside of the workload's methods, and keep the process alive
    until the run has ended: `Work(rayps.data.ray(ds, features=...))`. The options are those of `rayps.data.arrow`.

    A run that resumes in another process executes the dataset again. Its batches are the same if the dataset gives the
    same rows in the same order, as files and deterministic functions do; a random_shuffle without a seed does not.

    Raises:
        ConfigError: an option is invalid.
        DataError: it is no dataset of Ray Data, a column is missing, or the call is in a worker of Ray.

    Example:
        rayps.data.ray(ray.data.read_json("rows/"), features=["height", "width"], label="kind")
    """
    from rayps.cluster.ray_cluster import is_task_or_actor, pack_objects

    choice = column_choice(features, options)
    if not is_ray_data(source) or not hasattr(source, "materialize"):
        raise DataError(f"rayps.data.ray: it is {type(source).__name__}: give a ray.data.Dataset")
    if is_task_or_actor():
        raise DataError(
            "rayps.data.ray: this process is a worker of Ray, and each worker would execute the dataset again: call it "
            "once in\nthe program that calls rayps.train, and give the workload the result; or write the dataset with "
            "ds.write_parquet(FOLDER)\nand give rayps.data.parquet(FOLDER, features=...)",
            kind="ray_data",
        )
    source.context.execution_options.preserve_order = True
    packed = pack_objects(source.materialize().to_arrow_refs())
    key = hashlib.sha256(secrets.token_bytes(32)).hexdigest()[:24]
    made = RowTableData("Ray Data", partial(_open, packed, key, used_columns(features, options)), choice, options)
    made.rows()  # writes the file of this host: a process that is not connected to Ray can read it, too
    return made


def _open(packed: bytes, key: str, stored: list[str], columns: list[str]) -> RowTable:
    def read() -> Source:
        blocks = _blocks(packed, stored)
        first = next(blocks, None)
        schema = pa.schema([]) if first is None else first.schema
        return schema, iter([("the dataset", _all(first, blocks, schema))])

    return StoredTable(key, read)


def _all(first: pa.Table | None, others: Iterator[pa.Table], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    if first is not None:
        yield from first.to_batches()
    for block in others:
        yield from block.cast(schema).to_batches()


def _blocks(packed: bytes, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Yield the used columns of each block that has rows. Ray's own tensor type becomes lists of numbers."""
    from rayps.cluster.ray_cluster import fetch_objects

    for block in fetch_objects(packed, _BLOCK_SECONDS):
        if block.num_rows == 0:
            continue
        for column in columns:
            if block.schema.get_field_index(column) < 0:
                raise DataError(f"Ray Data: {missing(block.schema, column)}", column=column)
        yield pa.table({column: _plain(block.column(column)) for column in columns})


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if not isinstance(column.type, pa.BaseExtensionType):
        return column
    return pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
