"""What every transport between the devices of a ring can do. `device.form_device_transport` makes one."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from rayps.tensors.device import Device

Fold = Literal["add", "max"]


class DeviceTransport(Protocol):
    """Collectives and transfers of tensors on the ranks' devices. All ranks must make the same calls.

    Vectors are flat, contiguous and on `device`. When a method returns, its result is complete for the operations that
    this thread calls next on the device. Each wait for another rank ends at the ring's timeout. All methods raise
    LinkError, which names the rank at fault if that is known.
    """

    name: str
    device: Device

    def fold(self, x: Tensor, kind: Fold) -> None:
        """Reduce a vector over the ranks, in place. Half precision is added in float32."""

    def buffer(self, n: int, dtype: torch.dtype) -> Tensor:
        """Return a vector of `n` zeros for which `resident` may need fewer copies."""

    def resident(self, x: Tensor, weight: float | None) -> Tensor | None:
        """Return the sum over ranks, or the mean weighted by `weight`, of a part of a vector of `buffer`.

        `x` does not change. The result is valid until this buffer's next reduction. Return None if `x` is not part of
        memory that other ranks read.
        """

    def broadcast(self, x: Tensor, root: int) -> None:
        """Copy the vector of rank `root` into `x` on all ranks."""

    def all_gather(self, x: Tensor, out: Tensor) -> None:
        """Collect all ranks' vectors of n elements in `out` [ranks, n]."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's slice (`partition.cut_slices`) of the sum over ranks. `x` does not change."""

    def send(self, x: Tensor, to: int, tag: int) -> None:
        """Send a vector to rank `to`; `x` may change when the call has returned."""

    def recv(self, x: Tensor, frm: int, tag: int) -> None:
        """Fill `x` with the next vector that rank `frm` sent with `tag`."""
