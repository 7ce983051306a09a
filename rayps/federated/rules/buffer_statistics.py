"""The buffers that a client sends with its update, as one vector: BatchNorm statistics and counts.

Floating point buffers come first, then integer buffers, each in the model's order, all as float64. Replies with buffers
that no model can have are rejected. Such buffers have values that are not finite (`rayps.federated.rules.exact_sum`),
or negative variances or counts of torch's normalisation layers, which are recognized by the names `running_var` and
`num_batches_tracked`. Every weighted mean of the remaining replies is a valid state.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from rayps_client.errors import WorkloadError
from torch import Tensor

NEGATIVE = "its buffers contain a negative variance or count"
_NOT_BELOW_ZERO = ("running_var", "num_batches_tracked")


class BufferStatistics:
    """Packs buffers into a vector of `size` elements, and back. The first `floats` elements are the float buffers."""

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        """Take the order and the kinds of `buffers`. Raises WorkloadError if one has complex numbers."""
        strange = next((name for name, value in buffers.items() if value.is_complex()), None)
        if strange is not None:
            raise WorkloadError(
                f"the buffer {strange!r} has complex numbers, which clients do not average:\nkeep a buffer of real "
                "numbers of shape [..., 2], and use torch.view_as_complex(buffer) in forward",
                buffer=strange,
            )
        real = {name: value for name, value in buffers.items() if value.is_floating_point()}
        self._like = real | {name: value for name, value in buffers.items() if name not in real}
        self.floats = sum(value.numel() for value in real.values())
        self.size = sum(value.numel() for value in self._like.values())
        bounded = [
            torch.full((value.numel(),), name.rpartition(".")[2] in _NOT_BELOW_ZERO)
            for name, value in self._like.items()
        ]
        self._bounded = torch.cat(bounded) if bounded else torch.empty(0, dtype=torch.bool)

    def pack(self, buffers: Mapping[str, Tensor]) -> Tensor:
        """Return the buffers as one vector [size], float64, on the CPU."""
        parts = [buffers[name].detach().cpu().reshape(-1).double() for name in self._like]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)

    def refusal(self, vector: Tensor) -> str | None:
        """Return the reason why no model can have the buffers in `vector`, or None if a model can have them."""
        return NEGATIVE if bool((vector[self._bounded] < 0).any()) else None

    def unpack(self, vector: Tensor, buffers: Mapping[str, Tensor]) -> None:
        """Write a vector [size] into the buffers. For integer buffers, round and clamp the values to the dtype."""
        at = 0
        for name in self._like:
            value = buffers[name]
            part = vector[at : at + value.numel()].view(value.shape)
            if not value.is_floating_point() and value.dtype != torch.bool:
                part = part.round().clamp(torch.iinfo(value.dtype).min, torch.iinfo(value.dtype).max)
            value.detach().copy_(part)
            at += value.numel()
