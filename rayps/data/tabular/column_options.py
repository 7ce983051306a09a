"""Check the options that all sources with columns have in common: features, dtypes, scale, invalid values, window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import torch
from rayps_client.columns import ColumnRows, DType, features_of
from rayps_client.errors import ConfigError

from rayps.data.base import Batch
from rayps.data.clients import GivenClients
from rayps.data.partition_rules import Ints

DTYPES = ("float32", "float64", "int64", "uint8")
LABEL_DTYPES = ("float32", "float64", "int64")


class ColumnOptions(TypedDict, total=False):
    """The keyword arguments that all sources with columns take. Their meaning is that of `rayps.data.parquet`."""

    label: str | None
    batch_size: int
    shuffle: bool
    drop_last: bool
    dtype: str
    label_dtype: str | None
    scale: float | None
    on_invalid: str
    window_mb: float
    client: GivenClients


@dataclass(frozen=True, slots=True)
class ColumnChoice:
    """Which columns are features and which is the label, and how their values become tensors."""

    features: tuple[str, ...]  # names of columns
    label: str | None  # name of a column
    dtype: DType  # of `Batch.x`
    label_dtype: DType | None  # of `Batch.y`; None if it follows from the column
    scale: float | None  # a factor of the features
    drop: bool  # whether rows with invalid values are left out
    window: int  # the bytes of decoded rows that a worker may hold

    def batch(self, rows: ColumnRows, which: Ints) -> Batch:
        """Return a batch of the valid rows among `which`, in this order."""
        if not rows.good[which].all():
            which = which[rows.good[which]]
        x = torch.from_numpy(rows.x[which].astype(self.dtype, copy=False))
        if self.scale is not None:
            x *= self.scale
        return Batch(x, None if rows.y is None else torch.from_numpy(rows.y[which]), len(which))


def column_choice(features: str | Sequence[str], options: ColumnOptions) -> ColumnChoice:
    """Return the checked choice of columns. Raises ConfigError if an option is invalid."""
    dtype = dtype_of("dtype", options.get("dtype", "float32"), DTYPES)
    given = options.get("label_dtype")
    return ColumnChoice(
        tuple(features_of(features)),
        options.get("label"),
        dtype,
        dtype_of("label_dtype", given, LABEL_DTYPES) if given else None,
        checked_scale(options.get("scale"), dtype),
        drops(options.get("on_invalid", "fail")),
        window_of(options.get("window_mb", 64)),
    )


def dtype_of(field: str, name: str, known: tuple[str, ...]) -> DType:
    """Return a dtype by its name. Raises ConfigError if `known` does not have the name."""
    if name not in known:
        raise ConfigError(f"{field} is {name!r}: give one of {', '.join(known)}", field=field)
    return np.dtype(name)


def drops(on_invalid: str) -> bool:
    """Return whether rows with invalid values are left out. Raises ConfigError if `on_invalid` is unknown."""
    if on_invalid not in ("fail", "drop"):
        raise ConfigError(
            f"on_invalid is {on_invalid!r}: give 'fail', or 'drop' to leave such rows out", field="on_invalid"
        )
    return on_invalid == "drop"


def window_of(window_mb: float) -> int:
    """Return `window_mb` (megabytes of 2^20 bytes) in bytes. Raises ConfigError if that is not at least one byte."""
    window = int(window_mb * 2**20)
    if window < 1:
        raise ConfigError(f"window_mb is {window_mb}: give a number above 0", field="window_mb")
    return window


def checked_scale(scale: float | None, dtype: DType) -> float | None:
    """Return `scale`. Raises ConfigError if there is a scale and the features are whole numbers."""
    if scale is not None and dtype.kind != "f":
        raise ConfigError(f"scale={scale} needs float features: leave dtype={dtype.name!r} out", field="scale")
    return scale
