"""Rows that are read each alone, for sums to which each row adds a bounded amount.

A batch may mix rows: a `collate` that pads to the longest row or averages pairs of rows, or a user's own `Data.take`.
What a batch holds of one row then depends on the others. Therefore each row is read alone, as a batch of this one row,
and rows whose batches have equal shapes are stacked.

A *stack* is a `Batch` of `size` rows whose tensors have one more dimension than those of a batch of one row: [size,
*shape], whatever `shape` is. All that is no tensor is equal for its rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
from rayps_client.errors import DataError
from torch import Tensor

from rayps.data.base import Batch, Data, Nested, map_tensors
from rayps.data.partition_rules import Ints

_PLAIN = (bool, int, float, complex, str, bytes, type(None))  # values that are equal if their texts are


def stacks_of(data: Data, rows: Ints, most: int) -> tuple[Batch, ...]:
    """Return the rows with these numbers, which may be none, in stacks of at most `most` rows.

    Rows that the data leaves out, such as invalid ones, are in no stack. The rows of data with `separate_rows` are read
    together.

    Raises:
        DataError: a row cannot be read, or a batch of one row has another size than 1 or 0.
    """
    if separates_rows(data):
        taken = (data.take(rows[at : at + most]) for at in range(0, len(rows), most))
        return tuple(Batch(map_tensors(one.x, _apart), map_tensors(one.y, _apart), one.size) for one in taken)
    alike: dict[Hashable, list[Batch]] = {}
    for at in range(len(rows)):
        one = data.take(rows[at : at + 1])
        if one.size not in (0, 1):
            raise DataError(
                f"take([{rows[at]}]) of {type(data).__name__} returned a batch of size {one.size}, and a batch of one "
                "row has the size 1: a row that becomes several examples is still one row, so return them as "
                "rayps.data.Batch(x, y, 1)",
                row=int(rows[at]),
            )
        if one.size:  # copied, because the data may use the memory again for the next row
            held = Batch(map_tensors(one.x, Tensor.clone), map_tensors(one.y, Tensor.clone), 1)
            alike.setdefault((_form(one.x), _form(one.y)), []).append(held)
    return tuple(_stacked(same[at : at + most]) for same in alike.values() for at in range(0, len(same), most))


def separates_rows(data: Data) -> bool:
    """Return whether the class of `data` itself says `separate_rows`. A class derived from it may mix rows."""
    return bool(vars(type(data)).get("separate_rows", False))


def tensors_of(batch: Batch) -> list[Tensor]:
    """Return all tensors of a batch, in the order in which `with_tensors` takes others for them."""
    found: list[Tensor] = []
    for value in (batch.x, batch.y):
        map_tensors(value, found.append)
    return found


def with_tensors(batch: Batch, others: Iterator[Tensor], size: int) -> Batch:
    """Return a batch of `size` rows like `batch`, whose tensors are `others`."""
    return Batch(map_tensors(batch.x, lambda _: next(others)), map_tensors(batch.y, lambda _: next(others)), size)


def row_of(stack: Batch, row: int) -> Batch:
    """Return the batch of one row of a stack, as it was read."""
    return with_tensors(stack, (tensor[row] for tensor in tensors_of(stack)), 1)


def rows_of(stack: Batch, rows: slice | Tensor) -> Batch:
    """Return a stack of some rows of a stack, by a slice or a mask."""
    size = rows.stop - rows.start if isinstance(rows, slice) else int(rows.sum())
    return with_tensors(stack, (tensor[rows] for tensor in tensors_of(stack)), size)


def _apart(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(1)


def _stacked(alike: list[Batch]) -> Batch:
    columns = zip(*(tensors_of(one) for one in alike), strict=True)
    return with_tensors(alike[0], (torch.stack(column) for column in columns), len(alike))


def _form(value: Nested) -> Hashable:
    """Return what two values have in common that can be stacked: all but the numbers in tensors."""
    if isinstance(value, Tensor) and value.layout is torch.strided:
        return value.dtype, value.shape, value.device
    if isinstance(value, dict):
        return dict, tuple((key, _form(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_form, value))
    if isinstance(value, _PLAIN):
        return type(value), repr(value)
    return id(value)  # an object of which nothing is known is equal to itself only
