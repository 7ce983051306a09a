"""The ring of the workers that divide layers, with counters."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from rayps.comm.ring import Ring
from rayps.core.errors import ConfigError
from rayps.core.user_code import peers_awaited


class TensorCommunicator:
    """One worker's side of its tensor group. Every worker of the group must make the same calls in the same order.

    Each exchange adds 1 to `collectives` and the bytes of its whole tensor to `bytes`: of the sum of an all-reduce, of
    the concatenation of an all-gather. The bytes sent are the ring's choice (`ring.bytes_sent`); the least is 2 (N-1)/N
    of the bytes for a sum, (N-1)/N for a gather, from each of N workers.
    """

    def __init__(self, ring: Ring | None) -> None:
        self.ring = ring
        self.collectives = 0
        self.bytes = 0
        self._last: tuple[weakref.ref[Tensor], Tensor, int] | None = None

    def __deepcopy__(self, memo: dict[int, Self]) -> Self:
        return self  # a copy of a layer uses the same ring

    def add(self, t: Tensor) -> Tensor:
        """Sum all workers' tensors, in place: `t` must be contiguous and not shared."""
        self.collectives += 1
        self.bytes += t.nbytes
        with peers_awaited():
            return self._open().sum(t)

    def gather(self, t: Tensor, dim: int, widths: Sequence[int]) -> Tensor:
        """Concatenate all workers' tensors along `dim`; the tensor of rank i is `widths[i]` wide."""
        ring = self._open()
        if t.shape[dim] != widths[ring.rank]:
            raise ConfigError(f"this worker's slice is {t.shape[dim]} wide along {dim}, expected {widths[ring.rank]}")
        shape = list(t.shape)
        shape[dim] = sum(widths)
        one = t.numel() // max(1, widths[ring.rank])  # elements of a slice of width one
        self.collectives += 1
        self.bytes += one * shape[dim] * t.element_size()
        flat = t.new_zeros(one * max(widths))  # a ring gathers equal parts: narrow parts are padded
        flat[: t.numel()] = t.reshape(-1)
        parts: list[Tensor] = []
        with peers_awaited():
            found = ring.all_gather(flat)
        for width, got in zip(widths, found, strict=True):
            shape[dim] = width
            parts.append(got[: one * width].view(shape))
        return torch.cat(parts, dim)

    def remembered(self, x: Tensor) -> Tensor | None:
        """Return the result stored for the tensor `x`, so that layers with the same input share its gradient's sum."""
        if self._last is None:
            return None
        source, made, version = self._last
        return made if source() is x and x._version == version else None

    def remember(self, x: Tensor, made: Tensor) -> Tensor:
        """Store `made` for the next layer that takes `x`, until backward and while `x` exists."""
        self._last = (weakref.ref(x, self.forget), made, x._version)
        return made

    def forget(self, source: weakref.ref[Tensor] | None = None) -> None:
        """Drop the stored result; with `source`, only if the result was computed from it."""
        if self._last is not None and (source is None or self._last[0] is source):
            self._last = None

    def _open(self) -> Ring:
        if self.ring is None:
            raise ConfigError("these layers were split without a ring, for their shapes only: give split() a ring")
        return self.ring
