"""A segment's parameters, optimizer state and sums of gradients on a device. The rest of the segment stays as it is.

The segment's memory on the host, which workers read and states are taken from, has the values of the newest step. A
step copies the pushed gradients to the device through pinned memory (`Uploads`). After the step the parameters are
copied back, before any answer. A state of the segment is on the CPU, and a segment on a device restores a state of a
segment on the CPU, and the reverse.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from rayps.ps.protocol.mailbox import SharedSlice
from rayps.ps.protocol.pieces import Extent
from rayps.ps.protocol.rows import ShardRows
from rayps.ps.server.dense_segment import SegmentOptimizer
from rayps.tensors.checkpoints.uploads import Uploads
from rayps.tensors.device import Device
from rayps.tensors.learning_rate import Ticks
from rayps.tensors.optim import Factory


class DeviceOptimizer(SegmentOptimizer):
    """A `SegmentOptimizer` on a device. `params` are on the device; the memory on the host has a copy of them."""

    def __init__(self, extent: Extent, memory: SharedSlice, factory: Factory, ticks: Ticks, device: Device) -> None:
        image = memory.params
        self._device, self._image = device, image
        self._back = image  # the pinned memory to which parameters are copied back
        if device.pin(image):
            weakref.finalize(self, device.unpin, image).atexit = False
        else:
            self._back = device.pinned(image.numel(), image.dtype)
        self._uploads = Uploads(device, image.dtype)
        super().__init__(extent, memory, factory, ticks, params=self._uploads.copy(image))

    def mean(self, values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Return the weighted mean as `SegmentOptimizer.mean`, computed and left on the device."""
        kept = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
        return super().mean([self._move_gradient(value) for value, _ in kept], [weight for _, weight in kept])

    def _move_gradient(self, grad: Tensor) -> Tensor:
        return self._uploads.copy(grad)

    def _stepped(self) -> None:
        """Copy the parameters that a step has changed to the memory on the host."""
        lo, hi = self.whole if isinstance(self.area, ShardRows) else self.area
        self._device.current().copy(self._back[lo:hi], self.params[lo:hi]).wait()
        if self._back is not self._image:
            self._image[lo:hi].copy_(self._back[lo:hi])
