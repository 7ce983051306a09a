"""Tensors of devices travel through pinned memory of the CPU and the ring's own connections.

A reduction is a pipeline over chunks: while the CPUs reduce chunk k, chunk k+1 is copied from the device and the result
of chunk k-1 is copied to it. There are two chunks of pinned memory. Between ranks of one host the chunks are in shared
memory, where the ranks add them and from where each device reads the result, without another copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from rayps.comm.ring import algorithms
from rayps.comm.ring.algorithms import view_bytes
from rayps.comm.ring.choose_algorithm import Autotuner
from rayps.comm.ring.device.device_transport import Fold
from rayps.comm.ring.mesh import Mesh
from rayps.comm.ring.shared_memory import SharedMemoryFold, tensor_of
from rayps.tensors.device import Device, DeviceEvent, DeviceStream

CHUNK_BYTES = 4 << 20
_HALF = (torch.float16, torch.bfloat16)


class StagingTransport:
    """A `DeviceTransport` that works between any devices. `folder` reduces vectors of the CPU."""

    name = "staging"

    def __init__(self, mesh: Mesh, folder: Autotuner, device: Device) -> None:
        self.device = device
        self._mesh, self._folder = mesh, folder
        self._chunks: Chunks | None = None
        self._down: DeviceStream | None = None  # from the device
        self._up: DeviceStream | None = None  # to the device

    def fold(self, x: Tensor, kind: Fold) -> None:
        """Reduce a vector over the ranks in place, chunk by chunk."""
        if self._chunks is None or self._down is None or self._up is None:
            self._chunks = Chunks(self._mesh, self._folder, self.device)
            self._down, self._up = self.device.stream(), self.device.stream()
        chunks, down, up = self._chunks, self._down, self._up
        step = CHUNK_BYTES // x.element_size()
        parts = [x[at : at + step] for at in range(0, x.numel(), step)]
        down.after(self.device.current().record())
        written: list[DeviceEvent] = []
        read = [down.copy(chunks.buffer(0, parts[0]), parts[0])] if parts else []
        for i, part in enumerate(parts):
            if i + 1 < len(parts):
                if i:
                    written[i - 1].wait()  # the device still reads the result in the memory that is filled next
                read.append(down.copy(chunks.buffer(i + 1, parts[i + 1]), parts[i + 1]))
            read[i].wait()
            written.append(up.copy(part, chunks.reduce(i, part, kind)))
        if written:
            self.device.current().after(written[-1])
            written[-1].wait()  # the next reduction uses the same memory

    def buffer(self, n: int, dtype: torch.dtype) -> Tensor:
        """Return a vector of `n` zeros on the device; it is copied as any other."""
        return torch.zeros(n, dtype=dtype, device=self.device.place)

    def resident(self, x: Tensor, weight: float | None) -> Tensor | None:
        """Return None: no rank reads another's device."""
        return None

    def broadcast(self, x: Tensor, root: int) -> None:
        """Copy the vector of rank `root` to all ranks."""
        with self._stage(x, down=self._mesh.rank == root, up=self._mesh.rank != root) as host:
            if self._folder.shared_memory is not None:
                self._folder.shared_memory.spread(host, root)
            else:
                algorithms.broadcast(self._mesh, host, root)

    def all_gather(self, x: Tensor, out: Tensor) -> None:
        """Collect all ranks' vectors in `out`."""
        with self._stage(x, up=False) as host, self._stage(out.view(-1), down=False) as all_hosts:
            algorithms.all_gather(self._mesh, host, all_hosts.view(out.shape))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's slice of the sum."""
        with self._stage(x, up=False) as host:
            wide = host.float() if x.dtype in _HALF else host
            mine = algorithms.reduce_scatter(self._mesh, wide, algorithms.add).to(x.dtype)
        return mine.to(self.device.place)

    def send(self, x: Tensor, to: int, tag: int) -> None:
        """Send a vector over the connection to rank `to`."""
        with self._stage(x, up=False) as host:
            self._mesh.send(to, tag, view_bytes(host))

    def recv(self, x: Tensor, frm: int, tag: int) -> None:
        """Receive a vector over the connection to rank `frm`."""
        with self._stage(x, down=False) as host:
            self._mesh.recv(frm, tag, view_bytes(host))

    @contextmanager
    def _stage(self, x: Tensor, *, down: bool = True, up: bool = True) -> Iterator[Tensor]:
        """Yield pinned memory of the size of `x`: with its values if `down`, and copied to `x` at the end if `up`."""
        host, stream = self.device.pinned(x.numel(), x.dtype), self.device.current()
        if down:
            stream.copy(host, x).wait()
        yield host
        if up:
            stream.copy(x, host).wait()


class Chunks:
    """Two chunks of pinned memory, used in turn, whose contents are reduced over the ranks."""

    def __init__(self, mesh: Mesh, folder: Autotuner, device: Device) -> None:
        self._folder = folder
        self._shared: SharedMemoryFold | None = folder.shared_memory
        if self._shared is None:
            self._memory = [device.pinned(CHUNK_BYTES, torch.uint8) for _ in range(2)]
            return
        mesh.begin()
        self._memory = [tensor_of(self._shared.buffer(CHUNK_BYTES), torch.uint8) for _ in range(2)]
        for vector in [*self._memory, *(tensor_of(each.out, torch.uint8) for each in self._shared.residents[-2:])]:
            if device.pin(vector):
                mesh.at_end(partial(_unpin, device, vector))

    def buffer(self, i: int, like: Tensor) -> Tensor:
        """Return the memory of chunk `i`, with the size and the dtype of `like`."""
        return self._memory[i % 2][: like.nbytes].view(like.dtype)

    def reduce(self, i: int, like: Tensor, kind: Fold) -> Tensor:
        """Reduce chunk `i` over the ranks; return the result, which is valid until the chunk is reduced again."""
        chunk = self.buffer(i, like)
        if self._shared is None:
            self._folder.fold(chunk, kind)
            return chunk
        where = self._shared.find(chunk)
        assert where is not None, "the chunks are in shared memory"
        return tensor_of(self._shared.reduce_resident(where, like.dtype, like.nbytes, kind), like.dtype)


def _unpin(device: Device, memory: Tensor) -> None:
    device.current().wait()
    device.unpin(memory)
