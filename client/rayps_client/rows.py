"""The rows of a light client: arrays or tensors in memory. They stay on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

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

    def __iter__(self) -> Iterator[Any]:
        """Yield `x` and `y`, so that a batch unpacks: `x, y = batch`."""
        yield from (self.x, self.y)


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

    def __init__(self, x: Indexed, y: Indexed | None, batch_size: int, shuffle: bool, drop_last: bool = False) -> None:
        check_lengths(x, y)
        self.x, self.y, self.batch_size, self.shuffle = x, y, batch_size_of(batch_size), shuffle
        self.drop_last = drop_last_of(drop_last)

    def check(self) -> None:
        """Check the arrays. Raises DataError if there are no rows, or a value is NaN or infinite."""
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
    drop_last: bool = False,
    client: object = None,
) -> ArrayRows:
    """Use the rows of an array or tensor `x`, and labels `y` of the same length.

    `drop_last` leaves out an epoch's last batch if it is smaller than `batch_size`.
    `client` divides the rows of a simulation; all rows of a real client are its own, and `client` is not used.

    Raises:
        DataError: `x` or `y` is not an array or tensor, or their lengths differ. `check()` finds other errors.
        ConfigError: `batch_size` is not a whole number above 0.
    """
    return ArrayRows(_array("x", x), None if y is None else _array("y", y), batch_size, shuffle, drop_last)


def drop_last_of(value: bool) -> bool:
    """Return `value`. Raises ConfigError if it is not True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"drop_last is {value!r}: give True or False", field="drop_last")
    return value


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
    if isinstance(value, np.ndarray):
        return native(value)
    return value.detach() if hasattr(value, "detach") else value


def check_lengths(x: Sized, y: Sized | None) -> None:
    """Raise DataError if there are labels `y`, and not one for each row of `x`."""
    if y is not None and len(y) != len(x):
        raise DataError(f"tensors: x has {len(x)} rows, y has {len(y)}: give the same number", column="y")


def native(values: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return an array in this machine's byte order, which torch and Arrow need; a copy if it has another one."""
    return values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))


def check_rows(x: Column, y: Column | None, first_bad: Callable[[Column], int | None]) -> None:
    """Check the rows `x` and the labels `y`. `first_bad` returns the first row with NaN or infinity, or None.

    Raises:
        DataError: there are no rows, the lengths differ, or a value is NaN or infinite.
    """
    if len(x) == 0:
        raise DataError("tensors: x has no rows: there is nothing to train on", column="x")
    check_lengths(x, y)
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
