"""Numpy arrays in files, memory-mapped, as a data source. Each batch reads its own rows only."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rayps_client.columns import NOT_EXACT, DType, first_changed, way_out_for
from rayps_client.errors import ConfigError, DataError
from rayps_client.rows import batch_size_of, drop_last_of, native

from rayps.data.base import Batch
from rayps.data.clients import GivenClients, checked_client
from rayps.data.memory import InMemory
from rayps.data.partition_rules import Ints
from rayps.data.tabular.column_options import DTYPES, checked_scale, dtype_of
from rayps.data.unsupported import refuse_ray_data

Array = NDArray[np.generic]
ArrayGiven = str | PathLike[str] | Array
_CHECKED = 64 << 20  # bytes up to which all values of an array are checked before training


@dataclass(frozen=True, slots=True)
class MappedFile:
    """An array in a file: a .npy file if `dtype` is "", else raw values of `dtype` and `shape` from byte `offset`."""

    path: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    offset: int = 0

    def open(self, name: str) -> Array:
        """Map the file. Raises DataError if it cannot be mapped."""
        try:
            if self.dtype:
                return np.memmap(self.path, dtype=self.dtype, mode="r", offset=self.offset, shape=self.shape)
            found = np.load(self.path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            reason = str(error).splitlines()[0][:200]
            raise DataError(
                f"memmap: {name}: {self.path} cannot be mapped: {reason}\ngive a .npy file that numpy.save wrote, or a "
                "numpy.memmap",
                file=self.path,
            ) from error
        if not isinstance(found, np.ndarray):
            found.close()
            raise DataError(
                f"memmap: {name}: {self.path} holds several arrays (.npz), which cannot be mapped: write each by "
                "numpy.save",
                file=self.path,
            )
        return found


class MappedArrays(InMemory):
    """A data source: the rows of an array `x`, and labels `y` of the same length. A pickled object has their paths."""

    separate_rows = True

    def __init__(
        self,
        x: ArrayGiven,
        y: ArrayGiven | None,
        *,
        batch_size: int,
        shuffle: bool,
        drop_last: bool,
        dtype: str | None,
        scale: float | None,
        client: GivenClients,
    ) -> None:
        self.client = checked_client(client)
        self.batch_size, self.drop_last = batch_size_of(batch_size), drop_last_of(drop_last)
        self.shuffle = shuffle
        self._dtype = None if dtype is None else dtype_of("dtype", dtype, DTYPES)
        if scale is not None and self._dtype is None:
            raise ConfigError(f'scale={scale} needs dtype: give dtype="float32"', field="scale")
        self._scale = None if self._dtype is None else checked_scale(scale, self._dtype)
        self._given = (_source("x", x), None if y is None else _source("y", y))
        self._opened: tuple[Array, Array | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_clients": None}

    def check(self) -> None:
        """Check the shapes, and all values of arrays of at most 64 MiB. Others are checked when they are read.

        Raises:
            DataError: a file cannot be mapped, there are no rows, lengths differ, or a value is NaN or infinite.
        """
        self._opened = None
        for name, array in zip(("x", "y"), self._arrays(), strict=True):
            if array is not None and array.nbytes <= _CHECKED:
                found = self._finite(name, array, np.arange(len(array)))
                if name == "x" and self._dtype is not None:
                    self._converted(found, self._dtype, np.arange(len(array)))

    def rows(self) -> int:
        """Return the length of x."""
        return len(self._arrays()[0])

    def _arrays(self) -> tuple[Array, Array | None]:
        if self._opened is None:
            given_x, given_y = self._given
            x = _checked("x", given_x)
            y = None if given_y is None else _checked("y", given_y)
            if len(x) == 0:
                raise DataError("memmap: x has no rows: there is nothing to train on", column="x")
            if y is not None and len(y) != len(x):
                raise DataError(f"memmap: x has {len(x)} rows, y has {len(y)}: give the same number", column="y")
            self._opened = (x, y)
        return self._opened

    def _labels(self) -> Array | None:
        labels = self._arrays()[1]
        return None if labels is None else np.asarray(labels)

    def _take(self, rows: Ints) -> Batch:
        x, y = self._arrays()
        taken = self._finite("x", x[rows], rows)
        found = torch.from_numpy(taken if self._dtype is None else self._converted(taken, self._dtype, rows))
        if self._scale is not None:
            found *= self._scale
        return Batch(found, None if y is None else torch.from_numpy(self._finite("y", y[rows], rows)), len(rows))

    def _converted(self, x: Array, dtype: DType, rows: Ints) -> Array:
        """Return x as `dtype`. Raises DataError if `dtype` cannot hold a whole number, or is whole and x is not."""
        if dtype.kind in "iu" and not np.can_cast(x.dtype, dtype):
            with np.errstate(invalid="ignore"):
                changed = (x.astype(dtype) != x).reshape(-1)
            at = int(np.argmax(changed)) if changed.any() else None
            reason, way_out = f"which {dtype} does not hold", "give another dtype"
        else:
            at = first_changed(x.reshape(-1), dtype) if x.dtype.kind in "iu" and dtype.kind == "f" else None
            reason, way_out = NOT_EXACT.format(dtype), "" if at is None else way_out_for(x.reshape(-1)[at])
        if at is not None:
            row = int(rows[at // (x.size // len(x))])
            raise DataError(f"memmap: x has {x.reshape(-1)[at]} in row {row}, {reason}\n{way_out}", column="x", row=row)
        return x.astype(dtype, copy=False)

    def _finite(self, name: str, values: Array, rows: Ints) -> Array:
        if values.dtype.kind in "fc" and values.size:
            fine = np.isfinite(values).reshape(len(values), -1).all(axis=1)
            if not fine.all():
                row = int(rows[np.argmin(fine)])
                raise DataError(
                    f"memmap: {name} has NaN or infinity in row {row}: replace it, or leave the row out",
                    column=name,
                    row=row,
                )
        return np.ascontiguousarray(native(values))


def _checked(name: str, source: MappedFile | Array) -> Array:
    array = source.open(name) if isinstance(source, MappedFile) else source
    if array.ndim == 0 or array.dtype.kind not in "fiubc":
        raise DataError(
            f"memmap: {name} is {array.dtype} of shape {array.shape}: give numbers, whose first dimension is the rows",
            column=name,
        )
    return array


def _source(name: str, given: ArrayGiven) -> MappedFile | Array:
    refuse_ray_data("memmap", given)
    if isinstance(given, (str, PathLike)):
        return MappedFile(str(Path(given).expanduser().absolute()))
    if isinstance(given, np.memmap):
        return _place_of(given)
    if isinstance(given, np.ndarray):
        return given
    raise DataError(
        f"memmap: {name} is {type(given).__name__}: give the path of a .npy file, a numpy.memmap or an array",
        column=name,
    )


def _place_of(array: np.memmap[Any, np.dtype[Any]]) -> MappedFile | Array:
    """Return the file of a mapped array, or of a contiguous part of one; otherwise return its values."""
    whole: np.memmap[Any, np.dtype[Any]] = array
    while isinstance(whole.base, np.memmap):
        whole = whole.base
    if array.filename is None or not array.flags.c_contiguous or array.mode == "c":
        return np.asarray(array)
    inside = array.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    if not 0 <= inside < max(whole.nbytes, 1):  # a result of arithmetic, which lies in memory
        return np.asarray(array)
    array.flush()
    return MappedFile(str(array.filename), array.dtype.str, array.shape, whole.offset + inside)


def memmap(
    x: ArrayGiven,
    y: ArrayGiven | None = None,
    *,
    batch_size: int = 32,
    shuffle: bool = True,
    drop_last: bool = False,
    dtype: str | None = None,
    scale: float | None = None,
    client: GivenClients = None,
) -> MappedArrays:
    """Use the rows of numpy arrays in files larger than memory: `x`, and labels `y` of the same length.

    An array is given as the path of a .npy file (relative paths must exist on all hosts), as a `numpy.memmap`, which
    travels as its path, or as a plain array, which travels itself. Arrays are mapped for reading only, and a batch
    copies its own rows. A random order of rows needs a disk with fast random access, such as an SSD.

    - `dtype`: the dtype of `Batch.x`; None keeps the array's. `scale`: a factor of x; it needs dtype="float32".
    - `drop_last`, and `client`: a rule or an id for each row, as in `rayps.data.tensors`.

    Raises:
        ConfigError: an option is invalid.
        DataError: `x` or `y` is of another kind. `check()` finds other errors.

    Example:
        numpy.save("x.npy", numpy.zeros((20, 3), dtype=numpy.float32))
        rayps.data.memmap("x.npy", batch_size=5).rows()  # 20
    """
    return MappedArrays(
        x, y, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, dtype=dtype, scale=scale, client=client
    )
