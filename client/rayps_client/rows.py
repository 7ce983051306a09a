"""The rows of a light client: arrays or tensors in memory. They stay on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from rayps_client.errors import ConfigError, DataError
from rayps_client.row_order import Ints

Column = TypeVar("Column", bound=Sized)


@dataclass(slots=True)
class Batch:
    """Rows of data: their features `x`, their labels `y` (None if they have no labels), and their number `size`."""

    x: Any
    y: Any
    size: int

    def __len__(self) -> int:
        return self.size


@runtime_checkable
class Rows(Protocol):
    """What a light client needs of the result of `data()`."""

    batch_size: int

    def check(self) -> None:
        """Check the rows before training. Raises DataError if they are invalid."""

    def rows(self) -> int:
        """Return the number of rows."""

    def take(self, rows: Ints) -> Batch:
        """Return a batch of the rows with these numbers."""


class Indexed(Protocol):
    """An array of numpy or a tensor of torch, whose first dimension is the rows."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def __getitem__(self, rows: Any) -> Any:
        """Return some of the rows."""


class ArrayRows:
    """The rows of an array or tensor `x`, and labels `y` of the same length. Their dtypes do not change."""

    def __init__(self, x: Indexed, y: Indexed | None, batch_size: int, shuffle: bool) -> None:
        self.x, self.y, self.batch_size, self.shuffle = x, y, batch_size_of(batch_size), shuffle

    def check(self) -> None:
        """Check the arrays. Raises DataError if there are no rows, lengths differ, or a value is NaN or infinite."""
        check_rows(self.x, self.y, _not_finite)

    def rows(self) -> int:
        """Return the length of x."""
        return len(self.x)

    def take(self, rows: Ints) -> Batch:
        """Return a batch of the rows with these numbers, as copies."""
        return Batch(self.x[rows], None if self.y is None else self.y[rows], len(rows))


def tensors(
    x: Indexed | Sequence[Any],
    y: Indexed | Sequence[Any] | None = None,
    *,
    batch_size: int = 32,
    shuffle: bool = True,
    client: object = None,
) -> ArrayRows:
    """Use the rows of an array or tensor `x`, and labels `y` of the same length.

    `client` divides the rows of a simulation; all rows of a real client are its own, and `client` is not used.

    Raises:
        DataError: `x` or `y` is not an array or tensor. `check()` finds other errors.
        ConfigError: `batch_size` is not a whole number above 0.
    """
    return ArrayRows(_array("x", x), None if y is None else _array("y", y), batch_size, shuffle)


def batch_size_of(value: int) -> int:
    """Return `value`. Raises ConfigError if it is not a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"batch_size is {value!r}: give a whole number of at least 1", field="batch_size")
    return value


def _array(name: str, value: Any) -> Any:
    if not hasattr(value, "shape") or not len(value.shape):
        raise DataError(
            f"tensors: {name} is {type(value).__name__}: give a tensor or an array whose first dimension is the rows",
            column=name,
        )
    return value.detach() if hasattr(value, "detach") else value


def check_rows(x: Column, y: Column | None, first_bad: Callable[[Column], int | None]) -> None:
    """Check the rows `x` and the labels `y`. `first_bad` returns the first row with NaN or infinity, or None.

    Raises:
        DataError: there are no rows, the lengths differ, or a value is NaN or infinite.
    """
    if len(x) == 0:
        raise DataError("tensors: x has no rows: there is nothing to train on", column="x")
    if y is not None and len(y) != len(x):
        raise DataError(f"tensors: x has {len(x)} rows, y has {len(y)}: give the same number", column="y")
    for name, values in (("x", x), ("y", y)):
        row = None if values is None else first_bad(values)
        if row is not None:
            raise DataError(
                f"tensors: {name} has NaN or infinity in row {row}: replace it, or leave the row out",
                column=name,
                row=row,
            )


def _not_finite(values: Any) -> int | None:
    """Return the first row of an array or tensor that has NaN or infinity, or None."""
    if hasattr(values, "isfinite"):  # a tensor
        finite = np.asarray(values.isfinite())
    elif values.dtype.kind in "fc":
        finite = np.isfinite(values)
    else:
        return None
    bad = ~finite.reshape(len(values), -1).all(axis=1)
    return int(np.flatnonzero(bad)[0]) if bad.any() else None
