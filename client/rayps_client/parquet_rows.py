"""The rows of a light client in Parquet files, read by pyarrow into memory. They stay on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayps_client.columns import ColumnLayout, ColumnRows, features_of, layout_of
from rayps_client.errors import ConfigError, DataError
from rayps_client.row_order import Ints
from rayps_client.rows import Batch, batch_size_of, drop_last_of

Made = TypeVar("Made")
_AT_ONCE = 8192  # rows that are decoded at a time


class ParquetRows:
    """The rows of one or several local Parquet files. They are read at the first use."""

    def __init__(
        self,
        paths: Sequence[str],
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
    ) -> None:
        self.paths, self.features, self.label = tuple(paths), tuple(features), label
        self.batch_size, self.shuffle, self.drop_last = batch_size_of(batch_size), shuffle, drop_last_of(drop_last)
        self.dtype, self.label_dtype = _dtype("dtype", dtype), label_dtype and _dtype("label_dtype", label_dtype)
        if scale is not None and np.dtype(dtype).kind != "f":
            raise ConfigError(f"scale={scale} needs float features: leave dtype={dtype!r} out", field="scale")
        if on_invalid not in ("fail", "drop"):
            raise ConfigError(
                f"on_invalid is {on_invalid!r}: give 'fail', or 'drop' to leave such rows out", field="on_invalid"
            )
        self.scale, self.on_invalid = scale, on_invalid
        self._held: tuple[Any, Any] | None = None  # x and y of all rows

    def with_paths(self, paths: Sequence[str]) -> ParquetRows:
        """Return the same columns and options, read from other files."""
        return ParquetRows(paths, self.features, self.label, **self.options)

    def again(self, parquet: Callable[..., Made]) -> Made:
        """Return what another function `parquet` makes of the same paths, columns and options."""
        return parquet(self.paths, features=self.features, label=self.label, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments beside paths, features and label."""
        names = ("batch_size", "shuffle", "drop_last", "dtype", "label_dtype", "scale", "on_invalid")
        return {name: getattr(self, name) for name in names}

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        """The features; None if one is a column of lists. Raises DataError if the files cannot be read."""
        return self.features if self._all()[0][0].size == len(self.features) else None

    def check(self) -> None:
        """Read the files. Raises DataError if a file or a value is invalid; the text names file, column and row."""
        self._held = None
        self._all()

    def rows(self) -> int:
        """Return the number of valid rows."""
        return len(self._all()[0])

    def take(self, rows: Ints) -> Batch:
        """Return a batch of the rows with these numbers."""
        x, y = self._all()
        found = x[rows].astype(self.dtype, copy=False)
        if self.scale is not None:
            found *= self.scale
        return Batch(found, None if y is None else y[rows], len(rows))

    def _all(self) -> tuple[Any, Any]:
        if self._held is None:
            parts = list(self._read())
            if not sum(len(part.x) for part in parts):
                raise DataError(f"{self.paths[0]}: no rows in its files: there is nothing to train on")
            x = np.concatenate([part.x[part.good] for part in parts])
            ys = [part.y[part.good] for part in parts if part.y is not None]
            self._held = x, np.concatenate(ys) if ys else None
        return self._held

    def _read(self) -> Iterator[ColumnRows]:
        layout: ColumnLayout | None = None
        for name in _files(self.paths):
            try:
                with pq.ParquetFile(name) as file:
                    found = self._layout(file, name)
                    layout = layout or found
                    if found != layout:
                        raise DataError(f"{name}: its columns have other types or widths than those of the first file")
                    first = 0
                    for chunk in file.iter_batches(_AT_ONCE, columns=layout.columns):
                        yield self._checked(layout.rows(chunk), name, first)
                        first += chunk.num_rows
            except (OSError, pa.ArrowException) as error:
                raise DataError(f"{name} cannot be read as Parquet: {error}", file=name) from error

    def _layout(self, file: Any, name: str) -> ColumnLayout:
        schema = file.schema_arrow
        label_dtype = np.dtype(self.label_dtype) if self.label_dtype else None
        found = layout_of(
            schema, self.features, self.label, dtype=np.dtype(self.dtype), label_dtype=label_dtype, file=name
        )
        widths = tuple(
            _length(file, column, name) if width is None else width
            for column, width in zip(found.features, found.widths, strict=True)
        )
        return ColumnLayout(found.features, widths, found.label, found.store, found.label_dtype)

    def _checked(self, rows: ColumnRows, name: str, first: int) -> ColumnRows:
        if rows.bad is not None and (self.on_invalid == "fail" or rows.bad.way_out):
            raise DataError(
                f"{name}: column {rows.bad.column!r} {rows.bad.reason} in row {first + rows.bad.row}\n"
                + (rows.bad.way_out or 'correct the file, or give on_invalid="drop" to leave such rows out'),
                file=name,
                column=rows.bad.column,
                row=first + rows.bad.row,
            )
        return rows


def parquet(
    path: str | Path | Sequence[str | Path],
    *,
    features: str | Sequence[str],
    label: str | None = None,
    batch_size: int = 32,
    shuffle: bool = True,
    drop_last: bool = False,
    dtype: str = "float32",
    label_dtype: str | None = None,
    scale: float | None = None,
    on_invalid: str = "fail",
    **unused: object,
) -> ParquetRows:
    """Read rows of a local Parquet file, a folder of Parquet files, or a list of both; as `rayps.data.parquet` does.

    All rows are read into memory. `window_mb` and `client` are accepted and not used.

    Raises:
        ConfigError: an option is invalid, or unknown to the light client.
        DataError: the list of paths is empty. `check()` finds errors in the files.
    """
    unknown = {name for name, value in unused.items() if value is not None} - {"window_mb", "client", "filesystem"}
    if unknown or unused.get("filesystem") is not None:
        name = sorted(unknown or {"filesystem"})[0]
        raise ConfigError(f"parquet: the light client has no option {name!r}: leave it out, or install rayps")
    paths = [str(path)] if isinstance(path, (str, Path)) else [str(each) for each in path]
    if not paths:
        raise DataError("parquet: the list of paths is empty: give a file, a directory or a list of them")
    return ParquetRows(
        paths,
        features_of(features),
        label,
        batch_size=batch_size,
        shuffle=shuffle,
        drop_last=drop_last,
        dtype=dtype,
        label_dtype=label_dtype,
        scale=scale,
        on_invalid=on_invalid,
    )


def _files(paths: Sequence[str]) -> Iterator[str]:
    for path in paths:
        found = Path(path).expanduser()
        inside = sorted(each for each in found.rglob("*.parquet")) if found.is_dir() else [found]
        if not inside:
            raise DataError(f"{path}: there is no file *.parquet in this folder", file=path)
        yield from map(str, inside)


def _length(file: Any, column: str, name: str) -> int:
    """Return the length of the first list in a column of lists."""
    for chunk in file.iter_batches(64, columns=[column]):
        for value in chunk.column(0):
            if value.is_valid:
                return len(value)
    raise DataError(f"{name}: column {column!r} has only nulls: leave the column out", file=name, column=column)


def _dtype(field: str, name: str) -> str:
    known = ("float32", "float64", "int64", "uint8")
    if name not in known:
        raise ConfigError(f"{field} is {name!r}: give one of {', '.join(known)}", field=field)
    return name
