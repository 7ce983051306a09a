"""The rows of tables on a worker's device: pulled rows are copied there, and their gradients back, in the background.

The rows of a prefetched batch are copied by the prefetch thread, while the device computes the batch before. The
gradients of rows leave the device while backward continues, and are awaited when the next push is made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rayps.tensors.checkpoints.uploads import Download, Uploads
from rayps.tensors.device import Device


class RowTransfer:
    """Copies one table's rows of one dtype between the CPU and a device."""

    def __init__(self, device: Device, dtype: torch.dtype) -> None:
        self.uploads = Uploads(device, dtype)
        self._device = device

    def download(self, grads: Tensor) -> Download:
        """Start the copy of gradients to the CPU. They must not change before the copy is awaited."""
        return Download(self._device, grads.contiguous())


def make_row_transfer(place: torch.device, dtype: torch.dtype) -> RowTransfer | None:
    """Return the transfer of rows to the device of a model's ids; None if it is the CPU."""
    return None if place.type == "cpu" else RowTransfer(Device.of(place), dtype)
