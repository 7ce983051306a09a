"""The collectives of one ring. They call the backend's algorithm, measure its time, and can run in the background.

Background collectives run in one thread per ring, one after the other, in the order in which they were started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from rayps_client.errors import ConfigError, LinkError
from torch import Tensor

from rayps.comm.ring.choose_algorithm import Autotuner
from rayps.comm.ring.device.device_transport import DeviceTransport
from rayps.comm.ring.mesh import Mesh
from rayps.comm.ring.shared_memory import SharedMemoryFold, tensor_of
from rayps.comm.ring.torch_groups import TorchGroup

HALF = (torch.float16, torch.bfloat16)
_NUMBERS = (torch.float32, torch.float64, *HALF, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

Tensors = TypeVar("Tensors", Tensor, list[Tensor])
T = TypeVar("T")


class Collectives:
    """The operations that reduce tensors over the ranks of one ring.

    Only the thread that uses the ring may call them. While that thread calls none, the thread of `background` may.
    """

    def __init__(self, mesh: Mesh, backend: Autotuner | TorchGroup, device: DeviceTransport | None = None) -> None:
        self.mesh = mesh
        self.backend = backend
        self.device = device  # reduces and transfers tensors on the ranks' devices; None: they are copied to the CPU
        self.background = BackgroundThread()
        self.seconds = 0.0  # seconds spent in collectives, including the time spent waiting

    @property
    def shared_memory(self) -> SharedMemoryFold | None:
        """The memory that all ranks share; None unless all ranks are on one host and the backend is `own`."""
        return self.backend.shared_memory

    def transport(self, t: Tensor) -> DeviceTransport | None:
        """Return what reduces and transfers this tensor on its device, or None if it is copied to the CPU for that."""
        return self.device if self.device is not None and t.device == self.device.device.place else None

    def fold(self, t: Tensors, kind: str, algorithm: str | None) -> Tensors:
        """Wait until all background collectives have ended, then reduce tensors over the ranks, in place.

        `kind` is "add" or "max". If `algorithm` is None, the backend chooses the algorithm.
        """
        self.background.settle()
        return self.fold_now(t, kind, algorithm)

    def fold_now(self, t: Tensors, kind: str, algorithm: str | None) -> Tensors:
        """Reduce as `fold` does, without waiting for background collectives."""
        if isinstance(t, Tensor):
            self._fold_one(t, kind, algorithm)
            return t
        for some in _group_by_dtype(t):
            packed = torch.cat([each.detach().reshape(-1) for each in some])
            self._fold_one(packed, kind, algorithm)
            with torch.no_grad():
                parts = torch.split_with_sizes(packed, [each.numel() for each in some])
                for each, part in zip(some, parts, strict=True):
                    each.copy_(part.view(each.shape))
        return t

    def _fold_one(self, t: Tensor, kind: str, algorithm: str | None) -> None:
        must_add(t)
        self.backend.must_know(algorithm)
        if self.mesh.size == 1:
            self.mesh.check()
            return
        self.mesh.begin()
        start = time.perf_counter()
        try:
            if algorithm is None and (device := self.transport(t)) is not None:
                with flatten_on_device(t) as flat:
                    device.fold(flat, "add" if kind == "add" else "max")
            elif isinstance(self.backend, TorchGroup):
                self.backend.fold(t.detach(), kind)
            elif t.is_contiguous() and t.device.type == "cpu":
                self.backend.fold(t.detach().view(-1), kind, algorithm)
            else:
                with flatten_on_cpu(t) as flat:
                    self.backend.fold(flat, kind, algorithm)
        except LinkError as error:
            raise self.mesh.fail(error) from error
        finally:
            self.seconds += time.perf_counter() - start

    def resident(self, t: Tensor, weight: float | None) -> Tensor | None:
        """Return the weighted mean over ranks of a tensor in memory of `Ring.buffer`, or its sum if `weight` is None.

        The result is in shared memory too. Return None if the tensor is in other memory.
        """
        self.background.settle()
        device = self.transport(t)
        if device is not None:
            if not t.is_contiguous():
                return None
            with self.collective():
                return device.resident(t.detach(), weight)
        shared_memory = self.shared_memory
        if shared_memory is None or not shared_memory.has_buffers or not t.is_contiguous():
            return None
        where = shared_memory.find(t)
        if where is None:
            return None
        self.mesh.begin()
        start = time.perf_counter()
        try:
            return tensor_of(shared_memory.reduce_resident(where, t.dtype, t.nbytes, "add", weight), t.dtype).view(
                t.shape
            )
        except LinkError as error:
            raise self.mesh.fail(error) from error
        finally:
            self.seconds += time.perf_counter() - start

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Run the block as one collective of the mesh, and measure its duration. A LinkError in it ends the ring."""
        self.mesh.begin()
        with self.timed():
            try:
                yield
            except LinkError as error:
                raise self.mesh.fail(error) from error

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time spent inside the block to `seconds`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start


@contextmanager
def flatten_on_cpu(t: Tensor) -> Iterator[Tensor]:
    """Yield the tensor as one contiguous CPU vector. If the vector is a copy, it is copied back at the end."""
    with torch.no_grad():
        whole = t.detach()
        if whole.is_contiguous() and whole.device.type == "cpu":
            yield whole.view(-1)
            return
        flat = whole.reshape(-1).to("cpu", copy=True)
        yield flat
        whole.copy_(flat.view(t.shape))


@contextmanager
def flatten_on_device(t: Tensor) -> Iterator[Tensor]:
    """Yield the tensor as one contiguous vector on its device. If that is a copy, it is copied back at the end."""
    with torch.no_grad():
        whole = t.detach()
        flat = whole.reshape(-1)
        yield flat
        if not whole.is_contiguous():
            whole.copy_(flat.view(t.shape))


def must_add(t: Tensor) -> None:
    """Raise ConfigError if a ring cannot add tensors of this dtype."""
    if t.dtype not in _NUMBERS:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _NUMBERS)
        raise ConfigError(f"a ring cannot add {t.dtype}: convert the tensor to one of {known}", dtype=str(t.dtype))


def _group_by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group the tensors by dtype and device, in order of first occurrence."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for t in tensors:
        must_add(t)
        groups.setdefault((t.dtype, t.device), []).append(t)
    return list(groups.values())


class CollectiveHandle(Generic[T]):
    """A collective that was started in the background."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    @property
    def done(self) -> bool:
        """Whether the collective has ended, with a result or an error."""
        return self._future.done()

    def wait(self) -> T:
        """Wait, at most the ring's `timeout`; return the collective's result, or raise its error."""
        return self._future.result()


class BackgroundThread:
    """The thread that runs a ring's background collectives. The first one starts the thread."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[Any] | None = None

    def start(self, work: Callable[[], T]) -> CollectiveHandle[T]:
        """Run `work` in the thread, after all work that was started before; return a handle to wait for its end."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="rayps-ring")
        future = self._thread.submit(work)
        self._last = future
        return CollectiveHandle(future)

    def settle(self) -> None:
        """Wait until no collective runs in the thread. The caller's own thread may then start one."""
        if self._last is not None:
            wait([self._last])
            self._last = None

    def close(self, abort: Callable[[], None]) -> None:
        """End the thread. If a collective is running in it, call `abort` to end that collective."""
        if self._thread is None:
            return
        if self._last is not None and not self._last.done():
            abort()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._thread, self._last = None, None
