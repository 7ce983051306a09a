"""The buffers that a client sends with its update, as one vector: BatchNorm statistics and counts.

Floats come first, then whole numbers, each in the model's order, all in float64. Buffers that no model can have are
rejected: values that are not finite (`exact`), and negative variances and counts of torch's normalisation layers, known
by their names `running_var` and `num_batches_tracked`. So every convex combination of replies is a valid state.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

NEGATIVE = "its buffers hold a negative variance or count"
_NOT_BELOW_ZERO = ("running_var", "num_batches_tracked")


class BufferStatistics:
    """The position of each buffer in the vector of `size` elements; the first `floats` of them are floating point."""

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        real = {name: value for name, value in buffers.items() if value.is_floating_point()}
        self._like = real | {name: value for name, value in buffers.items() if name not in real}
        self.floats = sum(value.numel() for value in real.values())
        self.size = sum(value.numel() for value in self._like.values())
        bounded = [
            torch.full((value.numel(),), name.rpartition(".")[2] in _NOT_BELOW_ZERO)
            for name, value in self._like.items()
        ]
        self._bounded = torch.cat(bounded) if bounded else torch.empty(0, dtype=torch.bool)

    def packed(self, buffers: Mapping[str, Tensor]) -> Tensor:
        """Return the buffers as one vector [size] on the CPU, float64, in the order of the positions."""
        parts = [buffers[name].detach().cpu().reshape(-1).double() for name in self._like]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)

    def refusal(self, vector: Tensor) -> str | None:
        """Return why no model can have these buffers; None if one can."""
        return NEGATIVE if bool((vector[self._bounded] < 0).any()) else None

    def spread(self, vector: Tensor, buffers: Mapping[str, Tensor]) -> None:
        """Write a vector [size] into the buffers; values of integer buffers are rounded, and clamped to their dtype."""
        at = 0
        for name in self._like:
            value = buffers[name]
            part = vector[at : at + value.numel()].view(value.shape)
            if not value.is_floating_point() and value.dtype != torch.bool:
                part = part.round().clamp(torch.iinfo(value.dtype).min, torch.iinfo(value.dtype).max)
            value.detach().copy_(part)
            at += value.numel()
