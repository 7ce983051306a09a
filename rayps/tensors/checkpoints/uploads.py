"""Copy tensors of ordinary memory to a device through two blocks of pinned memory, and tensors of a device back.

The processor fills one block while the device reads the other. An upload may run in another thread than the one that
uses the values, while the device computes.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from rayps.tensors.device import Device, DeviceEvent

BLOCK_BYTES = 4 << 20  # bytes of one block of pinned memory


class DeviceUpload(NamedTuple):
    """Values on their way to the device: complete once `done` is done, in memory of the stream that copies them."""

    values: Tensor
    done: DeviceEvent


class Uploads:
    """Copies tensors of one dtype to a device. Any thread may call the methods."""

    def __init__(self, device: Device, dtype: torch.dtype) -> None:
        self._device, self._lock = device, threading.Lock()
        count = BLOCK_BYTES // dtype.itemsize
        self._blocks = [device.pinned(count, dtype) for _ in range(2)]
        self._free: list[DeviceEvent | None] = [None, None]  # done once the device has read the block
        self._stream = device.stream()

    def start(self, source: Tensor) -> DeviceUpload:
        """Start a copy of `source`, a tensor on the CPU. When this returns, `source` may change."""
        given, size = source.reshape(-1), self._blocks[0].numel()
        with self._lock:
            found = self._stream.empty(given.numel(), given.dtype)
            for number, lo in enumerate(range(0, len(given), size)):
                part, which = given[lo : lo + size], number % 2
                free = self._free[which]
                if free is not None:
                    free.wait()
                block = self._blocks[which][: len(part)]
                block.copy_(part)
                self._free[which] = self._stream.copy(found[lo : lo + len(part)], block)
            return DeviceUpload(found.view(source.shape), self._stream.record())

    def take(self, upload: DeviceUpload) -> Tensor:
        """Return an upload's values, in memory of this thread's stream, which waits for them."""
        current = self._device.current()
        found = torch.empty_like(upload.values)
        current.after(upload.done)
        current.copy(found, upload.values)
        return found

    def copy(self, source: Tensor) -> Tensor:
        """Return a copy of `source` on the device, as `start` and `take`. A tensor on a GPU is returned itself."""
        return self.take(self.start(source)) if source.is_cpu else source


class Download:
    """A copy of a device's tensor on its way to pinned memory. The tensor must not change before `wait` returns."""

    def __init__(self, device: Device, source: Tensor) -> None:
        stream = device.stream()
        self._host = device.pinned(source.numel(), source.dtype).view(source.shape)
        stream.after(device.current().record())
        self._done = stream.copy(self._host, source)

    def wait(self) -> Tensor:
        """Wait until the copy is done; return the tensor on the CPU."""
        self._done.wait()
        return self._host
