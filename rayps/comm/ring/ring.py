"""The ring: sums, means and transfers of tensors, in place, between the ranks of one generation.

Any actors can form a ring by a name that they share (`Ring.join`). Workers that get all addresses from a driver form
one by `Ring.form`. Only the thread that formed a ring may use it; other threads may call only `abort`. After a
collective has failed, the ring cannot be used any more. Form a new one then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypedDict, Unpack

import torch
from rayps_client.errors import ConfigError
from torch import Tensor

from rayps.comm.link import Listener, Prefer, parse_address
from rayps.comm.ring import algorithms as ring_algorithms
from rayps.comm.ring.algorithms import view_bytes
from rayps.comm.ring.choose_algorithm import Autotuner
from rayps.comm.ring.collectives import (
    HALF,
    CollectiveHandle,
    Collectives,
    Tensors,
    flatten_on_cpu,
    flatten_on_device,
    must_add,
)
from rayps.comm.ring.describe import RingChoices, describe
from rayps.comm.ring.device.choose_gpu_transport import GpuTransport
from rayps.comm.ring.device.device_transport import DeviceTransport
from rayps.comm.ring.device.form_device_transport import form_device_transport
from rayps.comm.ring.form_mesh import Formation, link_up
from rayps.comm.ring.mesh import Mesh
from rayps.comm.ring.p2p import PointToPoint
from rayps.comm.ring.rendezvous import find_ranks
from rayps.comm.ring.shared_memory import tensor_of
from rayps.comm.ring.shared_progress import Progress, make_common
from rayps.comm.ring.torch_groups import TorchGroup
from rayps.core.job.records import RingTable
from rayps.core.time.member_times import LineFacts
from rayps.tensors.device import Device
from rayps.tensors.flat import Gradient

Backend = Literal["own", "gloo", "nccl"]


class RingOptions(TypedDict, total=False):
    """The options that `Ring.join` passes to `Ring.form`."""

    prefer: Prefer
    backend: Backend
    algorithm: str
    table: RingTable | None
    streams: int
    device: str | Device
    device_transport: GpuTransport | None


class Ring:
    """One rank's end of a group of N equal ranks that sum, average, broadcast and send tensors.

    Example:
        def add():
            here = rayps.world()
            ring = rayps.Ring.join("adding", here.rank, here.size)
            try:
                return ring.sum(torch.ones(3)).tolist()
            finally:
                ring.close()

        rayps.run(add, workers=2)  # [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]
    """

    def __init__(
        self, mesh: Mesh, generation: int, folder: Autotuner | TorchGroup, device: DeviceTransport | None = None
    ) -> None:
        self.rank = mesh.rank
        self.size = mesh.size
        self.generation = generation
        self.collectives = Collectives(mesh, folder, device)  # the operations that the methods of this class use
        self._parcels: PointToPoint | None = None

    @classmethod
    def form(
        cls,
        rank: int,
        addresses: list[str],
        listener: Listener,
        *,
        secret: bytes,
        generation: int,
        timeout: float,
        label: str = "ring",
        prefer: Prefer = "auto",
        backend: Backend = "own",
        algorithm: str = "auto",
        table: RingTable | None = None,
        streams: int = 0,
        device: str | Device = "cpu",
        device_transport: GpuTransport | None = None,
        formation: Formation | None = None,
    ) -> Ring:
        """Form a ring: connect to every rank of `addresses` (the addresses of the ranks' listeners, in order).

        `timeout` limits, in seconds, the forming of the ring and every later wait. `prefer` forces a transport: shm,
        unix or tcp. `algorithm` is auto, ring, tree, one_shot, two_shot, star or hierarchical. `table` is the `choices`
        of an earlier ring: with the same choices, sums have the same bits. `streams` is the number of TCP connections
        between two ranks; with 0, the ranks measure the best number. `device` is where the ranks' large tensors are;
        all ranks must give one of the same kind. `device_transport` is nccl, ipc or staging; by default the ranks
        choose by their facts (`choose_gpu_transport`). With a transport given, "cpu" is the twin of a GPU. Another
        thread can end the forming by `formation`.

        Raises:
            PeerTimeout: a rank did not join in time. The error names the missing ranks.
            PeerLost: there is no listener at the address of a rank, or a rank was lost.
            StaleGeneration: a rank or the listener has another generation, or `formation` was ended.
            ConfigError: an argument is not valid.
        """
        streams = (streams or (table or {}).get("streams", 0)) if backend == "own" else 1
        formation = formation or Formation()
        mesh = link_up(
            rank,
            addresses,
            listener,
            secret=secret,
            generation=generation,
            timeout=timeout,
            label=label,
            prefer=prefer,
            streams=streams,
            formation=formation,
        )
        try:
            with mesh.hold:  # the thread that ends `formation` closes nothing that this thread uses
                formation.add(mesh)
                folder = (
                    Autotuner(mesh, algorithm, table, streams)
                    if backend == "own"
                    else TorchGroup(mesh, backend, addresses[0])
                )
                there = device if isinstance(device, Device) else Device.of(device)
                transport: DeviceTransport | None = None
                if isinstance(folder, Autotuner) and mesh.size > 1 and (there.kind != "cpu" or device_transport):
                    host = parse_address(addresses[0]).host
                    transport, folder.choices["device"] = form_device_transport(
                        mesh, folder, there, device_transport, host
                    )
        except BaseException:
            mesh.close()
            raise
        return cls(mesh, generation, folder, transport)

    @classmethod
    def join(
        cls,
        name: str,
        rank: int,
        size: int,
        *,
        timeout: float = 60.0,
        join_timeout: float | None = None,
        host: str | None = None,
        **options: Unpack[RingOptions],
    ) -> Ring:
        """Form a ring with the other actors that call `join` with the same `name` and `size`.

        `host` is the address of this host. `timeout` limits, in seconds, the search for the other ranks and every later
        wait; `join_timeout`, if given, limits the search instead. `options` are those of `form`. Raises PeerTimeout,
        which names the missing ranks, if a rank does not join in time, and ConfigError if an argument is not valid.
        """
        seconds = timeout if join_timeout is None else join_timeout
        listener, secret, generation, addresses = find_ranks(name, rank, size, seconds, host)
        with listener:
            return cls.form(
                rank, addresses, listener, secret=secret, generation=generation, timeout=timeout, label=name, **options
            )

    # Facts

    @property
    def seconds_waiting(self) -> float:
        """Seconds spent waiting for other ranks."""
        return self.collectives.mesh.seconds_waiting

    @property
    def seconds_moving(self) -> float:
        """Seconds that collectives spent copying and adding, without the time spent waiting."""
        return max(0.0, self.collectives.seconds - self.collectives.mesh.seconds_waiting)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to other ranks, or that other ranks have read from its shared memory."""
        shared_memory = self.collectives.shared_memory
        return self.collectives.mesh.bytes_sent + (shared_memory.bytes_shared if shared_memory is not None else 0)

    @property
    def waits(self) -> list[float]:
        """By rank: the seconds for which this rank has waited for that rank, also in the background."""
        return list(self.collectives.mesh.waits)

    @property
    def lines(self) -> dict[int, LineFacts]:
        """What the kernel counts for the TCP connections, by the peer's rank. Any thread may read it."""
        return self.collectives.mesh.lines

    @property
    def choices(self) -> RingChoices:
        """The chosen algorithm by size, the transport and the reason. `form` accepts it as `table`."""
        return self.collectives.backend.choices

    @property
    def choice(self) -> str:
        """The chosen algorithm, the transport and the reason, as one line of text."""
        return describe(self.collectives.backend.choices)

    # Collectives

    def sum(self, t: Tensors, *, algorithm: str | None = None) -> Tensors:
        """Sum the ranks' tensors, in place; all ranks get the same bits. Half precision is added in float32."""
        return self.collectives.fold(t, "add", algorithm)

    def max(self, t: Tensors, *, algorithm: str | None = None) -> Tensors:
        """Compute the elementwise maximum over ranks, in place. It is NaN where any rank has NaN."""
        return self.collectives.fold(t, "max", algorithm)

    def sum_async(self, t: Tensors, *, algorithm: str | None = None) -> CollectiveHandle[Tensors]:
        """Sum as `sum` does, in the background, and return a handle.

        `t` must not be read or changed until the handle's `wait()` has returned.
        """
        self.collectives.mesh.check()
        return self.collectives.background.start(lambda: self.collectives.fold_now(t, "add", algorithm))

    def settle(self) -> None:
        """Wait until all background collectives have ended. Raises the LinkError that ended the ring, if one failed."""
        self.collectives.background.settle()
        self.collectives.mesh.check()

    def mean(self, x: Tensor | Gradient, *, in_place: bool = True) -> Tensor:
        """Return the mean of `x` over ranks; if `x` is a gradient (`vector` and `samples`), the mean over all samples.

        The mean is written to `x`. With `in_place=False`, the mean of a tensor in memory of `buffer` is not written
        back: the result is read-only and valid until this buffer's next collective. A rank with no samples does not
        count. Half precision is added and divided in float32, and rounded once. Raises ConfigError if `x` has an
        integer dtype.
        """
        vector: Tensor = x if isinstance(x, Tensor) else x.vector
        if not vector.dtype.is_floating_point:
            raise ConfigError(
                f"a mean of {vector.dtype} numbers is not an integer: convert it to a floating-point dtype first"
            )
        weight = 1.0 if isinstance(x, Tensor) else float(x.samples)
        shared = self.collectives.resident(vector, weight)
        if shared is not None:
            return vector.copy_(shared) if in_place else shared
        if isinstance(x, Tensor):
            if x.dtype in HALF:
                return x.copy_(self.sum(x.float()).div_(self.size))
            return self.sum(x).div_(self.size)
        return self._average_over_samples(x)

    def total(self, t: Tensor) -> Tensor:
        """Return the sum over ranks. If `t` is in memory of `buffer`, the sum is not written back to `t`.

        The result is then read-only, and valid until this buffer's next collective. For any other tensor, `total` does
        the same as `sum`.
        """
        must_add(t)
        shared = self.collectives.resident(t, None)
        return self.sum(t) if shared is None else shared

    def buffer(self, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a vector of `n` zeros: in shared memory if all ranks are on one host, else in ordinary memory.

        In a ring with a device, the vector is on the device.
        Other ranks read shared memory directly. `sum` and `mean` of the vector, or of a contiguous part of it, then
        need one copy less. All ranks must call `buffer` with the same arguments.
        """
        shared_memory = self.collectives.shared_memory
        size = n * torch.empty(0, dtype=dtype).element_size()
        device = self.collectives.device
        if device is not None and n:
            with self.collectives.collective():
                return device.buffer(n, dtype)
        if shared_memory is None or n == 0:
            return torch.zeros(n, dtype=dtype)
        with self.collectives.collective():
            return tensor_of(shared_memory.buffer(size), dtype)

    def memory(self, place: torch.device) -> Callable[[int, torch.dtype], Tensor] | None:
        """Return `buffer` if its vectors are on the device `place`, else None."""
        device = self.collectives.device
        return self.buffer if place == (torch.device("cpu") if device is None else device.device.place) else None

    def common(self, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a vector of `n` zeros in memory that all ranks of one host read and write without locks.

        All ranks must call `common` with the same arguments. Raises ConfigError if the ranks are on several hosts.
        """
        with self.collectives.collective():
            return make_common(self.collectives.mesh, self.collectives.shared_memory, n, dtype)

    def progress(self) -> Progress:
        """Return counters in shared memory: how many rounds each rank has completed.

        The call waits until every rank has called this method. Raises ConfigError if the ranks are on several hosts.
        """
        with self.collectives.collective():
            return Progress(self.collectives.mesh, self.collectives.shared_memory)

    def broadcast(self, t: Tensor, root: int = 0) -> Tensor:
        """Copy the tensor of rank `root` into `t` on all ranks; return `t`."""
        self._must_be_rank(root)
        shared_memory, device = self.collectives.shared_memory, self.collectives.transport(t)
        if device is not None:
            with self.collectives.collective(), flatten_on_device(t) as flat:
                device.broadcast(flat, root)
            return t
        with self.collectives.collective(), flatten_on_cpu(t) as flat:
            if shared_memory is not None:
                shared_memory.spread(flat, root)
            elif self.size > 1:
                ring_algorithms.broadcast(self.collectives.mesh, flat, root)
        return t

    def all_gather(self, t: Tensor) -> Tensor:
        """Return all ranks' tensors, stacked in the order of ranks: a new tensor [size, *shape]."""
        device = self.collectives.transport(t)
        if device is not None:
            out = torch.empty(self.size, t.numel(), dtype=t.dtype, device=t.device)
            with self.collectives.collective():
                device.all_gather(t.detach().reshape(-1), out)
            return out.view(self.size, *t.shape)
        out = torch.empty(self.size, t.numel(), dtype=t.dtype)
        with self.collectives.collective():
            ring_algorithms.all_gather(self.collectives.mesh, t.detach().reshape(-1).cpu(), out)
        return out.view(self.size, *t.shape).to(t.device)

    def reduce_scatter(self, t: Tensor) -> Tensor:
        """Return this rank's slice of the sum over ranks of the flattened `t`. `t` does not change.

        `partition.cut_slices` gives each rank's slice.
        """
        must_add(t)
        device = self.collectives.transport(t)
        if device is not None:
            with self.collectives.collective():
                return device.reduce_scatter(t.detach().reshape(-1))
        flat = t.detach().reshape(-1).cpu()
        with self.collectives.collective():
            wide = flat.float() if t.dtype in HALF else flat
            mine = ring_algorithms.reduce_scatter(self.collectives.mesh, wide, ring_algorithms.add)
        return mine.to(t.device, t.dtype)

    def barrier(self) -> None:
        """Wait until every rank has called `barrier`."""
        shared_memory = self.collectives.shared_memory
        with self.collectives.collective():
            self.collectives.mesh.barrier() if shared_memory is None else shared_memory.barrier()

    # Point to point

    def send(self, t: Tensor, to: int, tag: int = 0) -> None:
        """Send a tensor to rank `to`; return when all bytes have been sent."""
        self._must_be_another(to)
        device = self.collectives.transport(t)
        with self.collectives.timed():
            if device is not None:
                device.send(t.detach().reshape(-1), to, tag)
                return
            self.collectives.mesh.send(to, tag, view_bytes(t.detach().reshape(-1).cpu()))

    def recv(self, t: Tensor, frm: int, tag: int = 0) -> Tensor:
        """Fill `t` with the next tensor that rank `frm` sent with `tag`; return `t`."""
        self._must_be_another(frm)
        device = self.collectives.transport(t)
        if device is not None:
            with self.collectives.timed(), flatten_on_device(t) as flat:
                device.recv(flat, frm, tag)
            return t
        with self.collectives.timed(), flatten_on_cpu(t) as flat:
            self.collectives.mesh.recv(frm, tag, view_bytes(flat))
        return t

    @property
    def parcels(self) -> PointToPoint:
        """Point-to-point messages with tensors of any shape, which the methods `give` and `take` send and receive."""
        if self._parcels is None:
            self._parcels = PointToPoint(self.collectives.mesh)
        return self._parcels

    # Ending

    def abort(self) -> None:
        """End the ring. Every rank that waits in the ring raises PeerLost. Any thread may call this method."""
        self.collectives.mesh.abort()

    def close(self) -> None:
        """Close the ring on this rank. Safe to call twice."""
        self.collectives.background.close(self.collectives.mesh.abort)
        self.collectives.mesh.close()

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Parts

    def _average_over_samples(self, x: Gradient) -> Tensor:
        vector: Tensor = x.vector
        packed: Tensor | None = getattr(x, "packed", None)
        if packed is None or vector.dtype in HALF:  # half precision has too few digits for a count of samples
            wide = torch.promote_types(vector.dtype, torch.float32)
            packed = torch.empty(vector.numel() + 1, dtype=wide, device=vector.device)
            packed[:-1].copy_(vector.reshape(-1))
        if x.samples:
            packed[:-1].mul_(x.samples)
        else:
            packed.zero_()  # a mean over no samples is 0, although a vector may hold NaN
        packed[-1] = x.samples
        self.sum(packed)
        count = packed[-1].item()
        if count:
            packed[:-1].div_(count)
        if packed.data_ptr() != vector.data_ptr():
            vector.copy_(packed[:-1].view(vector.shape))
        return vector

    def _must_be_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ConfigError(f"no rank {rank} in a ring of {self.size} (0 to {self.size - 1})", rank=rank)

    def _must_be_another(self, rank: int) -> None:
        self._must_be_rank(rank)
        if rank == self.rank:
            raise ConfigError(f"rank {rank} cannot send to itself", rank=rank)
