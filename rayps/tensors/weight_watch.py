"""Detect parameters that a user's code has changed in place, e.g. by `p.clamp_` or `Embedding(max_norm=...)`.

torch counts the in-place writes to a parameter, but not those through `p.data`. Therefore the elements are compared
with a copy: all of them if there are at most `WHOLE`, else a sample, and a window that moves on by its size at each
record, so that each element is compared at least once in 64 records. As soon as torch has counted writes that are not
in the window and the sample, all elements are copied. On the CPU a comparison is one `memcmp`, about ten times as fast
as `torch.equal`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from rayps_client.errors import WorkloadError
from torch import Tensor

if TYPE_CHECKING:
    from rayps.tensors.flat import Entry, FlatModel

WHOLE = 1 << 16  # a vector of at most so many elements is compared as a whole
_WINDOW = 1 << 14  # the least number of elements in a window of a larger vector
_WINDOWS = 64  # the most windows of a vector
_SAMPLES = 256  # elements of the sample
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element
_version = attrgetter("_version")  # torch's number of writes to a tensor


class WeightWatch:
    """Watches the parameters of a flat model for changes between `record` and `changed`."""

    def __init__(self, vector: Tensor, parameters: Sequence[Tensor], entries: Sequence[Entry]) -> None:
        """Prepare. `parameters` are views of `vector`, at the places that `entries` name."""
        self._vector, self._parameters, self._entries = vector, parameters, entries
        self._whole = len(vector) <= WHOLE
        self._turn = 0  # the number of windows so far
        self._versions: list[int] = []  # of the parameters at the last `record`, unless all elements are compared
        self._copies: list[_Copy] = []  # of all elements, or of a window and the sample

    def record(self) -> None:
        """Record the parameters as they are. A copy that is not compared later costs no wait for a device."""
        if not self._whole or len(self._copies) != 1:
            self._move()
        for copy in self._copies:
            copy.take()
        self._versions = self._count_writes()

    def changed(self) -> str | None:
        """Return the name of a parameter that was changed since `record`, or None if no change was found."""
        for copy in self._copies:
            if not copy.is_equal():
                at = copy.first_changed()
                return next(entry.name for entry in self._entries if entry.lo <= at < entry.hi)
        self._whole = self._versions != self._count_writes() or self._whole
        return None

    def touched(self) -> bool:
        """Return whether a parameter was changed since `record`; in a large vector also if it was only written."""
        return self._versions != self._count_writes() or not all(map(_Copy.is_equal, self._copies))

    @contextmanager
    def refusing(self, error: Callable[[str], WorkloadError]) -> Iterator[None]:
        """Raise `error(name)` after the block if the parameter `name` was changed inside of it."""
        self.record()
        yield
        name = self.changed()
        if name is not None:
            raise error(name)

    def _count_writes(self) -> list[int]:
        return [] if self._whole else list(map(_version, self._parameters))

    def _move(self) -> None:
        """Choose the elements that are compared next."""
        size = len(self._vector)
        cuts = [slice(0, size, 1)]
        if not self._whole:
            window, step = max(_WINDOW, -(-size // _WINDOWS)), size // _SAMPLES
            at = min(self._turn % -(-size // window) * window, size - window)
            first, self._turn = self._turn % step, self._turn + 1
            cuts = [slice(at, at + window, 1), slice(first, first + (_SAMPLES - 1) * step + 1, step)]
        if len(cuts) != len(self._copies):
            bits = bits_of(self._vector)
            self._copies = [_Copy(bits, len(range(cut.stop)[cut])) for cut in cuts]
        for copy, cut in zip(self._copies, cuts, strict=True):
            copy.move(cut)


class _Copy:
    """A copy of `count` elements of a vector of integers, in memory that each `take` uses again."""

    def __init__(self, bits: Tensor, count: int) -> None:
        self._bits, self._cut = bits, slice(0, count, 1)
        self._array: np.ndarray | None = None  # on the CPU: the vector, and `_now` is its part, `_into` is `_before`
        if bits.device.type == "cpu" and count:
            self._array, self._memory = bits.numpy(), bytearray(count * bits.element_size())
            self._before = torch.frombuffer(self._memory, dtype=bits.dtype)
            self._into = self._before.numpy()
        else:
            self._before = bits.new_empty(count)

    def move(self, cut: slice) -> None:
        """Choose the range of the elements."""
        self._cut = cut
        if self._array is not None:
            self._now = self._array[cut]

    def take(self) -> None:
        """Copy the elements."""
        if self._array is None:
            self._before.copy_(self._bits[self._cut])
        else:
            self._into[:] = self._now

    def is_equal(self) -> bool:
        """Return whether the vector has the elements of the copy."""
        if self._array is None:
            return torch.equal(self._bits[self._cut], self._before)
        now = self._now if self._cut.step == 1 else np.ascontiguousarray(self._now)
        return self._memory == now.data

    def first_changed(self) -> int:
        """Return the index in the vector of the first element that differs from the copy; there must be one."""
        return self._cut.start + self._cut.step * int((self._bits[self._cut] != self._before).nonzero()[0])


def bits_of(vector: Tensor) -> Tensor:
    """Return a vector's elements as integers, for which NaN equals NaN, without a copy."""
    return vector.detach().view(_INTEGERS[vector.element_size()])


class Maxima(Protocol):
    """A ring, which computes maxima over the workers."""

    @property
    def size(self) -> int:
        """The number of workers."""

    def max(self, x: Tensor) -> Tensor:
        """Return the largest value over the workers of each element, in the memory of `x`."""


def find_differing(flat: FlatModel, ring: Maxima) -> str | None:
    """Return the name of a parameter that differs between workers, which make this call together, or None."""

    def differ(sums: list[int]) -> list[bool]:
        found = ring.max(torch.tensor([each for n in sums for each in (n, -n)], dtype=torch.int64)).view(-1, 2)
        return [high != -low for high, low in found.tolist()]

    bits, entries = bits_of(flat.vector), flat.layout.entries
    if ring.size == 1 or not any(differ([_sum(bits)])):
        return None
    apart = differ([_sum(bits[entry.lo : entry.hi]) for entry in entries])
    return next((entry.name for entry, differs in zip(entries, apart, strict=True) if differs), entries[0].name)


def check_alike(flat: FlatModel, ring: Maxima) -> None:
    """Compare the parameters of all workers, which make this call together.

    Raises:
        WorkloadError: the workers' parameters differ, because their code has changed them in place, but not alike.
    """
    name = find_differing(flat, ring)
    if name is None:
        return
    raise WorkloadError(
        f"the parameter {name!r} was changed in place, but not alike on all workers, so that their models differ:\n"
        "make the same change on all workers in each step, also on one whose batch is empty; compute with the changed "
        "values in forward, e.g. by torch.nn.utils.parametrize or weight.clamp(min=0); or use local_sgd, whose workers "
        "have parameters of their own",
        parameter=name,
    )


def _sum(bits: Tensor) -> int:
    """Return the sum of integers modulo 2^62, whose negative is an int64 too."""
    return int(bits.sum(dtype=torch.int64)) % (1 << 62)


def explain_evaluation_changed(name: str) -> WorkloadError:
    """Return the error for a parameter that the user's `evaluate` has changed in place on one of several workers."""
    return WorkloadError(
        f"evaluate(model, batch) has changed the parameter {name!r} in place, but each worker evaluates other rows, so "
        "that the workers' models would differ:\nreturn metrics from evaluate, and change parameters in loss, in the "
        "same way on all workers under all_reduce; or restore the parameters before evaluate returns",
        parameter=name,
    )


def explain_change_lost(who: str, name: str, strategy: str) -> WorkloadError:
    """Return the error for a parameter that `who` has changed in place under a strategy with servers."""
    return WorkloadError(
        f"{who} has changed the parameter {name!r} in place, but under {strategy} servers hold the parameters, and the "
        "change would be lost:\ncompute with the changed values in forward, e.g. by torch.nn.utils.parametrize or "
        "weight.clamp(min=0), or use all_reduce, whose workers hold the parameters",
        parameter=name,
    )
