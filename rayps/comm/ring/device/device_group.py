"""Ranks with a GPU each exchange tensors by NCCL, in a process group of the ring's generation.

The host waits for each operation and polls the ring's connections meanwhile. If a rank dies, aborts or does not take
part in time, the group is aborted, so that no kernel waits for that rank, and the error names it. The group is created
with the ring, and ends with it; the next generation creates another. Between devices of the CPU's twin it is gloo.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

import torch
import torch.distributed as dist
from rayps_client.errors import LinkError, first_line
from torch import Tensor

from rayps.comm.ring.device.device_transport import Fold
from rayps.comm.ring.mesh import Mesh
from rayps.comm.ring.torch_groups import REDUCTIONS, GroupWork, call_in_thread, process_group
from rayps.core.partition import cut_slices
from rayps.tensors.device import Device

PROBE_SECONDS = 60.0  # longest time for a new group to connect its ranks and to sum a small vector
_HEADER = -2 << 40  # tag of the message that precedes a vector between two ranks, with the vector's own tag
_PROBE = 1000  # elements of the vector with which the group is tried
_HALF = (torch.float16, torch.bfloat16)


class GroupTransport:
    """A `DeviceTransport` over a process group of torch: NCCL on GPUs, gloo on the twin."""

    name = "nccl"

    def __init__(self, mesh: Mesh, device: Device, host: str) -> None:
        """Create the group; the ranks meet at the address `host` of rank 0. Raises LinkError if this fails."""
        self.device = device
        self._mesh = mesh
        self._waits = device.kind == "cpu"  # gloo says that an operation has ended only to who waits for it
        self._connected: set[int | None] = set()  # the peers whose first operation has ended; None: that of all ranks
        self._group = process_group(mesh, "nccl" if device.kind == "cuda" else "gloo", host)
        mesh.at_end(self._group.abort)

    def probe(self) -> str:
        """Sum a small vector over the ranks; return the problem as text, or an empty text.

        If a rank cannot take part, the others give up before the ring's timeout, and the ring stays usable.
        """
        x = torch.full((_PROBE,), self._mesh.rank + 1.0, device=self.device.place)
        self.device.current().wait()
        seconds = min(PROBE_SECONDS, self._mesh.timeout / 2)
        end = time.monotonic() + seconds
        first = _begin(lambda: self._group.allreduce([x]), self._waits)
        self._mesh.watch(lambda: first.done() or time.monotonic() > end)
        if not first.done():
            return f"the ranks were not connected within {seconds:g} s"
        try:
            work = first.result()
            self._mesh.watch(lambda: self._waits or work.is_completed() or time.monotonic() > end)
            if not self._waits:
                if not work.is_completed():
                    return f"the sum of a small vector took more than {seconds:g} s"
                work.wait()
                self._connected.add(None)
        except RuntimeError as error:
            return first_line(error)
        return "" if x.tolist() == [sum(range(1, self._mesh.size + 1))] * _PROBE else "the sum of a vector is wrong"

    def fold(self, x: Tensor, kind: Fold) -> None:
        """Reduce a vector over the ranks in place, as the group adds."""
        if not x.numel():
            return
        wide = x.float() if kind == "add" and x.dtype in _HALF else x.int() if x.dtype == torch.int16 else x
        if kind == "max" and x.is_floating_point():
            # a group's maximum of NaN and a number is the number
            nan = x.isnan().to(torch.uint8)
            self._sum_over_all(nan, kind)
            self._sum_over_all(wide, kind)
            wide.masked_fill_(nan.bool(), float("nan"))
        else:
            self._sum_over_all(wide, kind)
        if wide is not x:
            x.copy_(wide)

    def _sum_over_all(self, x: Tensor, kind: Fold) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = REDUCTIONS[kind]  # type: ignore[assignment]
        self._await(lambda: self._group.allreduce([x], options))

    def buffer(self, n: int, dtype: torch.dtype) -> Tensor:
        """Return a vector of `n` zeros on the device."""
        return torch.zeros(n, dtype=dtype, device=self.device.place)

    def resident(self, x: Tensor, weight: float | None) -> Tensor | None:
        """Return None: the group reads its own memory only."""
        return None

    def broadcast(self, x: Tensor, root: int) -> None:
        """Copy the vector of rank `root` to all ranks."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        if x.numel():
            self._await(lambda: self._group.broadcast([x], options))

    def all_gather(self, x: Tensor, out: Tensor) -> None:
        """Collect all ranks' vectors in `out`."""
        if x.numel():
            self._await(lambda: self._group.allgather([list(out)], [x]))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's slice of the sum. The group's slices are equal, so the vector is padded to N of them."""
        cuts = cut_slices(x.numel(), self._mesh.size)
        longest = max(cut.stop - cut.start for cut in cuts)
        dtype = torch.float32 if x.dtype in _HALF else x.dtype
        padded = torch.zeros(self._mesh.size, longest, dtype=dtype, device=self.device.place)
        for row, cut in zip(padded, cuts, strict=True):
            row[: cut.stop - cut.start].copy_(x[cut])
        mine = torch.empty(longest, dtype=dtype, device=self.device.place)
        if longest:
            self._await(lambda: self._group.reduce_scatter([mine], [list(padded)]))
        own = cuts[self._mesh.rank]
        return mine[: own.stop - own.start].to(x.dtype)

    def send(self, x: Tensor, to: int, tag: int) -> None:
        """Send a vector to rank `to`. The call may wait until that rank receives it."""
        self._mesh.send(to, _HEADER, tag.to_bytes(8, "little", signed=True))
        if x.numel():
            self._await(lambda: self._group.send([x], to, 0), to)

    def recv(self, x: Tensor, frm: int, tag: int) -> None:
        """Receive a vector. Raises LinkError if the next one of the sender has another tag: NCCL has no tags."""
        header = bytearray(8)
        self._mesh.recv(frm, _HEADER, header)
        found = int.from_bytes(header, "little", signed=True)
        if found != tag:
            raise self._mesh.fail(
                LinkError(
                    f"rank {frm} has sent a tensor with tag {found} before that with tag {tag}: between GPUs with "
                    "NCCL, receive tensors in the order of sending",
                    peer=f"rank {frm}",
                )
            )
        if x.numel():
            self._await(lambda: self._group.recv([x], frm, 0), frm)

    def _await(self, start: Callable[[], GroupWork], peer: int | None = None) -> None:
        """Start an operation and wait for it. Raises LinkError, which names the rank at fault, if it fails.

        `peer` is the only other rank of the operation, if there is one. The first operation between ranks connects
        them, and does not return before all take part: it is started in a thread, while this rank polls its mesh.
        """
        try:
            if peer in self._connected:
                work = start()
            else:
                self.device.current().wait()
                first = _begin(start, self._waits)
                self._mesh.watch(first.done)
                work = first.result()
                if not self._waits:
                    self._connected.add(peer)
            if not self._waits:
                self._mesh.watch(work.is_completed)
                work.wait()
                self.device.current().wait()
        except RuntimeError as error:
            raise self._mesh.fail(self._mesh.blame(f"the process group failed: {first_line(error)[:200]}")) from error


def _begin(start: Callable[[], GroupWork], waits: bool) -> Future[GroupWork]:
    """Start an operation in a thread of its own; with `waits`, that thread also waits for it."""

    def begin() -> GroupWork:
        begun = start()
        if waits:
            begun.wait()
        return begun

    return call_in_thread(begin)
