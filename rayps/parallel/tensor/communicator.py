"""The ring between the workers of a tensor group, with counters of their exchanges."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Self

import torch
from rayps_client.errors import ConfigError
from torch import Tensor

from rayps.comm.ring import Ring
from rayps.core.job.user_code import pause_clock


class TensorCommunicator:
    """One worker's side of its tensor group. Every worker of the group must make the same calls in the same order.

    Each exchange adds 1 to `collectives`, and adds the number of bytes of its result (a sum or a concatenation) to
    `bytes`. The number of bytes sent depends on the ring's algorithm (`ring.bytes_sent`): each of N workers sends at
    least 2 (N-1)/N of the result's bytes for a sum, and (N-1)/N for a gather.
    """

    def __init__(self, ring: Ring | None) -> None:
        self.ring = ring
        self.collectives = 0
        self.bytes = 0
        self._last: tuple[weakref.ref[Tensor], Tensor, int] | None = None

    def __deepcopy__(self, memo: dict[int, Self]) -> Self:
        return self  # a copy of a layer uses the same ring

    def add(self, t: Tensor) -> Tensor:
        """Replace `t` by the sum of all workers' tensors; return `t`. It must be contiguous and not used elsewhere."""
        self.collectives += 1
        self.bytes += t.nbytes
        with pause_clock():
            return self._ring_or_error().sum(t)

    def gather(self, t: Tensor, dim: int, widths: Sequence[int]) -> Tensor:
        """Return all workers' tensors concatenated along `dim`; the tensor of rank i is `widths[i]` wide."""
        ring = self._ring_or_error()
        if t.shape[dim] != widths[ring.rank]:
            raise ConfigError(
                f"the slice of tensor rank {ring.rank} has {t.shape[dim]} elements along dimension {dim}, expected "
                f"{widths[ring.rank]}"
            )
        shape = list(t.shape)
        shape[dim] = sum(widths)
        one = t.numel() // max(1, widths[ring.rank])  # elements of a slice of width one
        self.collectives += 1
        self.bytes += one * shape[dim] * t.element_size()
        flat = t.new_zeros(one * max(widths))  # a ring gathers equal parts: narrow parts are padded
        flat[: t.numel()] = t.reshape(-1)
        parts: list[Tensor] = []
        with pause_clock():
            found = ring.all_gather(flat)
        for width, got in zip(widths, found, strict=True):
            shape[dim] = width
            parts.append(got[: one * width].view(shape))
        return torch.cat(parts, dim)

    def remembered(self, x: Tensor) -> Tensor | None:
        """Return the result that `remember` stored for `x`, or None.

        Layers with the same input use the same result, so that the gradient of their input is summed only once.
        """
        if self._last is None:
            return None
        source, made, version = self._last
        return made if source() is x and x._version == version else None

    def remember(self, x: Tensor, made: Tensor) -> Tensor:
        """Store the result `made` for other layers with the input `x`, until the backward pass or the end of `x`."""
        self._last = (weakref.ref(x, self.forget), made, x._version)
        return made

    def forget(self, source: weakref.ref[Tensor] | None = None) -> None:
        """Drop the stored result. If `source` is given, drop it only if it was computed from that tensor."""
        if self._last is not None and (source is None or self._last[0] is source):
            self._last = None

    def _ring_or_error(self) -> Ring:
        if self.ring is None:
            raise ConfigError(
                "these layers were split without a ring, so they have shapes but cannot run: pass a ring to split()"
            )
        return self.ring
