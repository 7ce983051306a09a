"""Give all workers rank 0's buffers after a step, such as BatchNorm's statistics, as torch's DDP does."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rayps.comm.ring import Ring


class EqualBuffers:
    """Sends a model's buffers from rank 0 to the other workers. Nothing is sent if the model has none."""

    def __init__(self, model: nn.Module, ring: Ring) -> None:
        self._ring = ring
        self._places = [(module, name) for module in model.modules() for name, _ in module.named_buffers(recurse=False)]

    @torch.no_grad()
    def send(self) -> None:
        """Make the buffers equal. All workers call it together. Raises LinkError if a connection fails."""
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for module, name in self._places:
            buffer = getattr(module, name)
            if isinstance(buffer, Tensor):
                alike.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        for buffers in alike.values():
            whole = torch.cat([buffer.reshape(-1) for buffer in buffers])
            self._ring.broadcast(whole)
            if self._ring.rank:
                parts = torch.split_with_sizes(whole, [buffer.numel() for buffer in buffers])
                for buffer, part in zip(buffers, parts, strict=True):
                    buffer.copy_(part.view(buffer.shape))
