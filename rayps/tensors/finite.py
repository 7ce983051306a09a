"""Find numbers that are not finite (NaN, infinities) in tensors, in gradients and in a run's state. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayps.tensors.flat import Entry, FlatModel

_HALF = (torch.float16, torch.bfloat16)


def is_finite(values: Tensor) -> bool:
    """Return whether all elements are finite; True for dtypes that hold only finite numbers.

    If the sum is finite, all elements are. If the sum is not finite, the elements are tested one by one, because a sum
    of large finite elements can overflow.
    """
    if values.layout is not torch.strided:
        values = values.detach()._values()  # equal indices need not be added up for this test
    if not values.is_floating_point() or not values.numel():
        return True
    with torch.no_grad():
        total = values.sum(dtype=torch.float32 if values.dtype in _HALF else None).item()
        return math.isfinite(total) or bool(torch.isfinite(values).all())


def find_not_finite(values: Tensor) -> int:
    """Return the flat index of the first element that is not finite. There must be one."""
    return int(torch.isfinite(values.detach().reshape(-1)).logical_not().nonzero()[0])


def find_gradient_fault(flat: FlatModel) -> str | None:
    """Return the name of the first parameter whose collected gradient is not finite, or None if all are finite."""
    if not flat.sparse_grads and is_finite(flat.packed[:-1]):
        return None
    for entry, p in zip(flat.layout.entries, flat.parameters, strict=True):
        if p.grad is not None and not is_finite(p.grad):
            return entry.name
    return None


@dataclass(frozen=True, slots=True)
class Fault:
    """A value of a state that is not finite: the text `what` that describes it, and the name of its `parameter`.

    `rank` is the worker whose own state has the value, or None if the value is in the state common to all workers.
    """

    what: str
    parameter: str
    rank: int | None = None

    @property
    def where(self) -> str:
        """The text `what` with the worker, if there is one, such as `parameter '0.weight' of worker-1`."""
        return self.what if self.rank is None else f"{self.what} of worker-{self.rank}"


def fault_in(tensors: Mapping[str, Tensor], parameters: Iterable[tuple[str, Sequence[int]]]) -> Fault | None:
    """Return the first parameter, moment or strategy tensor of a checkpoint's state that is not finite, or None.

    `tensors` are named as in `rayps.tensors.snapshot.Snapshot.to_state`. `parameters` are names and shapes in the order
    of the vector. Not checked are buffers and frozen parameters, which may hold infinities, and scalars in the
    optimizer's state.
    """
    entries = _make_entries(parameters)
    for name, value in tensors.items():
        place, _, rest = name.partition("/")
        rank: int | None = None
        if place == "own":
            number, _, rest = rest.partition("/")
            rank = int(number)
            place, _, rest = rest.partition("/")
        if place not in _KINDS or (place == "optim" and value.dim() == 0) or is_finite(value):
            continue
        return Fault(*_KINDS[place](rest, value, entries), rank)
    return None


def _make_entries(parameters: Iterable[tuple[str, Sequence[int]]]) -> list[Entry]:
    found: list[Entry] = []
    for name, shape in parameters:
        lo = found[-1].hi if found else 0
        found.append(Entry(name, lo, lo + math.prod(shape), tuple(shape)))
    return found


def _name_parameter(name: str, value: Tensor, entries: list[Entry]) -> tuple[str, str]:
    return f"parameter {name!r}", name


def _name_in_vector(name: str, value: Tensor, entries: list[Entry]) -> tuple[str, str]:
    at = find_not_finite(value)
    held = next((entry.name for entry in entries if entry.lo <= at < entry.hi), "")
    return f"parameter {held!r}", held


def _name_moment(name: str, value: Tensor, entries: list[Entry]) -> tuple[str, str]:
    parameter, _, key = name.rpartition("/")
    return f"the optimizer's {key!r} of parameter {parameter!r}", parameter


def _name_other(name: str, value: Tensor, entries: list[Entry]) -> tuple[str, str]:
    parameter = ""
    if entries and value.numel() == entries[-1].hi:  # the tensor has one element for each element of the vector
        parameter = _name_in_vector(name, value, entries)[1]
    return f"the strategy's {name!r}" + (f" of parameter {parameter!r}" if parameter else ""), parameter


_KINDS = {
    "model": _name_parameter,
    "optim": _name_moment,
    "params": _name_in_vector,
    "memory": _name_other,
    "shared": _name_other,
}
