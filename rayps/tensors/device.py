"""A device that holds tensors: streams, events, pinned memory, asynchronous copies, and memory of other processes.

`Device.of("cuda")` is a GPU. `Device.of("cpu")` is its twin on the CPU, with the same methods: everything that is
written for a GPU also runs without one. All other modules use a GPU only through this one.

A stream is a sequence of work. Work of one stream runs in its order; work of two streams runs in any order, unless one
stream is told to wait for an event of the other (`after`). The host may read or change what a stream reads or writes
only after it has waited for the event of this work.

The twin has two modes. It runs all work at once, or, with `delayed=True`, as late as possible: work runs only when an
event after it is waited for. Code that omits a wait then reads or sends old data every time, and not by chance.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch
import torch.distributed as dist
from rayps_client.errors import ConfigError, LinkError
from torch import Tensor

Work = Callable[[], object]
_REGISTER_READ_ONLY = 8  # cudaHostRegisterReadOnly


class DeviceEvent(Protocol):
    """A point in the work of a stream."""

    @property
    def done(self) -> bool:
        """Whether all work before this point has been done. The call does not wait."""

    def wait(self) -> None:
        """Let the host wait until all work before this point has been done."""


class DeviceStream(Protocol):
    """A sequence of work of a device, which runs while the host continues."""

    def run(self, work: Work) -> DeviceEvent:
        """Add the operations that `work` calls; return the event after them.

        Their tensors must not be changed or freed by others before the event is done.
        """

    def copy(self, target: Tensor, source: Tensor) -> DeviceEvent:
        """Add a copy of `source` into `target`, of equal shape; return the event after it.

        Between a GPU and the CPU the CPU's tensor must be in memory of `Device.pinned`; otherwise the host waits.
        """

    def empty(self, n: int, dtype: torch.dtype) -> Tensor:
        """Return a vector of `n` elements on the device, not zeroed, which this stream may write at once.

        Another stream may use it after an event of this one, by `copy` only.
        """

    def record(self) -> DeviceEvent:
        """Return an event after all work that was added before."""

    def after(self, event: DeviceEvent) -> None:
        """Let all work that is added later begin after `event`. The host does not wait."""

    def wait(self) -> None:
        """Let the host wait until all work of this stream has been done."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory in bytes: of all processes together."""

    free: int
    total: int


class Device(ABC):
    """One device of this process. `kind` is "cpu" or "cuda", `place` is the device of its tensors.

    `identity` is equal in two processes exactly if they use the same device of the same host.
    """

    kind: str
    place: torch.device
    identity: str

    @staticmethod
    def of(place: str | torch.device) -> Device:
        """Return the device of this name, such as "cpu", "cuda" or "cuda:1", or of a tensor's `device`.

        Raises ConfigError if there is no such device on this machine.
        """
        found = torch.device(place)
        if found.type == "cpu":
            return CpuDevice()
        if found.type != "cuda":
            raise ConfigError(f"there is no device {place!s}: use cpu or cuda", device=str(place))
        return CudaDevice(found)

    @abstractmethod
    def stream(self) -> DeviceStream:
        """Return a new stream. Its work runs beside that of all other streams."""

    @abstractmethod
    def current(self) -> DeviceStream:
        """Return the stream of this thread, to which torch adds the operations that the thread calls."""

    @abstractmethod
    def pinned(self, n: int, dtype: torch.dtype) -> Tensor:
        """Return a vector of `n` elements in CPU memory that the device reads and writes without the processor."""

    @abstractmethod
    def pin(self, memory: Tensor, *, read_only: bool = False) -> bool:
        """Pin CPU memory that exists, such as memory that processes share; return whether the system allows it.

        Copies from and to `memory` are then as those of `pinned`. Call `unpin` before the memory is freed. With
        `read_only` this process may only read the memory.
        """

    @abstractmethod
    def unpin(self, memory: Tensor) -> None:
        """Unpin memory that `pin` has pinned. No copy may be in progress."""

    @abstractmethod
    def group_library(self) -> str:
        """Return the name and the version of torch's library for groups of such devices; empty if there is none."""

    @abstractmethod
    def expandable_segments(self) -> bool:
        """Whether torch allocates memory of the device in segments that grow, which other processes cannot open."""

    @abstractmethod
    def memory(self) -> DeviceMemory:
        """Return how much memory the device has, and how much of it is free."""

    @abstractmethod
    def zeros_to_share(self, n: int, dtype: torch.dtype) -> Tensor:
        """Return a vector of `n` zeros on the device, whose memory `offer` can give to other processes.

        Raises LinkError if the system refuses the memory.
        """

    @abstractmethod
    def offer(self, vector: Tensor) -> bytes:
        """Return a text by which one other process of this host opens the memory of a vector of `zeros_to_share`.

        Each process needs a text of its own. The vector must exist until all processes have freed theirs. Raises
        LinkError if this memory cannot be shared.
        """

    @abstractmethod
    def open(self, offer: bytes, n: int, dtype: torch.dtype) -> Tensor:
        """Return the vector of another process as a tensor over the same memory. Raises LinkError if this fails."""


class CudaDevice(Device):
    """A GPU, by torch's CUDA interface."""

    kind = "cuda"

    def __init__(self, place: torch.device) -> None:
        """Use the GPU `place`; without a number in it, torch's current one. Raises ConfigError if there is none."""
        if not torch.cuda.is_available():
            raise ConfigError("there is no CUDA device on this machine: use the device cpu", device=str(place))
        index = torch.cuda.current_device() if place.index is None else place.index
        if index >= torch.cuda.device_count():
            raise ConfigError(
                f"there is no CUDA device {index}: this process sees {torch.cuda.device_count()}", device=str(place)
            )
        self.place = torch.device("cuda", index)
        self.identity = f"cuda-{torch.cuda.get_device_properties(index).uuid}"

    def stream(self) -> DeviceStream:
        """Return a new stream."""
        return _CudaStream(torch.cuda.Stream(self.place))  # type: ignore[no-untyped-call]

    def current(self) -> DeviceStream:
        """Return this thread's stream."""
        return _CudaStream(torch.cuda.current_stream(self.place))

    def pinned(self, n: int, dtype: torch.dtype) -> Tensor:
        """Return a vector of `n` elements in page-locked memory."""
        return torch.empty(n, dtype=dtype, pin_memory=True)

    def pin(self, memory: Tensor, *, read_only: bool = False) -> bool:
        """Register the memory with CUDA."""
        size, flags = memory.numel() * memory.element_size(), _REGISTER_READ_ONLY if read_only else 0
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if not size or int(runtime.cudaHostRegister(memory.data_ptr(), size, flags)) == 0:
            return True
        self._forget_error()
        return False

    def _forget_error(self) -> None:
        """Take the error of a refused call, which CUDA reports once more with the next operation."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.place)

    def unpin(self, memory: Tensor) -> None:
        """End the registration of the memory."""
        if memory.numel() and int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())):  # type: ignore[no-untyped-call]
            self._forget_error()

    def group_library(self) -> str:
        """Return the version of NCCL."""
        if not dist.is_nccl_available():
            return ""
        return "nccl " + ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]

    def expandable_segments(self) -> bool:
        """Whether the environment of the process says so."""
        settings = [os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")]
        return any("expandable_segments:true" in each.replace(" ", "").lower() for each in settings)

    def memory(self) -> DeviceMemory:
        """Return the free and the whole memory of the GPU."""
        return DeviceMemory(*torch.cuda.mem_get_info(self.place))

    def zeros_to_share(self, n: int, dtype: torch.dtype) -> Tensor:
        """Return a vector of `n` zeros on the GPU."""
        return torch.zeros(n, dtype=dtype, device=self.place)

    def offer(self, vector: Tensor) -> bytes:
        """Return the vector's CUDA IPC handle, as JSON. torch keeps the memory until the receiver has freed it."""
        try:
            _, *rest = vector.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise LinkError(f"CUDA cannot share this memory: {str(error).splitlines()[0]}", peer="") from error
        return json.dumps([each.hex() if isinstance(each, bytes) else each for each in rest]).encode()

    def open(self, offer: bytes, n: int, dtype: torch.dtype) -> Tensor:
        """Return the vector of another process, by its CUDA IPC handle."""
        handle, size, offset, counter, place, event, waits = json.loads(offer)
        try:
            told = bytes.fromhex(handle), size, offset, bytes.fromhex(counter), place, bytes.fromhex(event), waits
            storage = torch.UntypedStorage._new_shared_cuda(self.place.index, *told)
        except RuntimeError as error:
            raise LinkError(f"CUDA cannot open a peer's memory: {str(error).splitlines()[0]}", peer="") from error
        return torch.empty(0, dtype=dtype, device=self.place).set_(storage)[:n]


class _CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, work: Work) -> DeviceEvent:
        with torch.cuda.stream(self._stream):
            work()
        return self.record()

    def copy(self, target: Tensor, source: Tensor) -> DeviceEvent:
        with torch.cuda.stream(self._stream), torch.no_grad():
            target.copy_(source, non_blocking=True)
        for each in (target, source):
            if each.is_cuda:
                each.record_stream(self._stream)  # if it is freed, its memory is used again only after the copy
        return self.record()

    def empty(self, n: int, dtype: torch.dtype) -> Tensor:
        with torch.cuda.stream(self._stream):
            return torch.empty(n, dtype=dtype, device=self._stream.device)

    def record(self) -> DeviceEvent:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _CudaEvent(event)

    def after(self, event: DeviceEvent) -> None:
        if isinstance(event, _CudaEvent):
            self._stream.wait_event(event.event)
        else:
            event.wait()

    def wait(self) -> None:
        self._stream.synchronize()


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    @property
    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()


class CpuDevice(Device):
    """The twin of a GPU on the CPU. With `delayed`, work of its streams runs as late as possible."""

    kind = "cpu"

    def __init__(self, delayed: bool = False) -> None:
        self.place = torch.device("cpu")
        self.identity = "cpu"
        self._delayed = delayed
        self._lock = threading.RLock()
        self._shared: dict[int, tuple[int, int]] = {}  # from a vector's address to its descriptor and its bytes

    def stream(self) -> DeviceStream:
        """Return a new stream."""
        return _TwinStream(self._lock, self._delayed)

    def current(self) -> DeviceStream:
        """Return the stream of the host's own operations, which run at once."""
        return _TwinStream(self._lock, delayed=False)

    def pinned(self, n: int, dtype: torch.dtype) -> Tensor:
        """Return a vector of `n` elements in ordinary memory."""
        return torch.empty(n, dtype=dtype)

    def pin(self, memory: Tensor, *, read_only: bool = False) -> bool:
        """Return True: all memory of the host is like that of `pinned`."""
        return True

    def unpin(self, memory: Tensor) -> None:
        """Do nothing."""

    def group_library(self) -> str:
        """Return gloo."""
        return "gloo" if dist.is_gloo_available() else ""

    def expandable_segments(self) -> bool:
        """Return False."""
        return False

    def memory(self) -> DeviceMemory:
        """Return the free and the whole memory of the host."""
        page = os.sysconf("SC_PAGE_SIZE")
        return DeviceMemory(page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES"))

    def zeros_to_share(self, n: int, dtype: torch.dtype) -> Tensor:
        """Return a vector of `n` zeros in memory without a name, which is freed with its last user."""
        size = n * dtype.itemsize
        try:
            fd = os.memfd_create("rayps-device", os.MFD_CLOEXEC)
            os.ftruncate(fd, max(1, size))
            storage = _map_storage(f"/proc/self/fd/{fd}", size)
        except (OSError, RuntimeError) as error:
            raise LinkError(f"cannot allocate {size} bytes of shared memory: {error}", size=size) from error
        found = torch.empty(0, dtype=dtype).set_(storage)[:n]
        self._shared[found.data_ptr()] = fd, size
        weakref.finalize(found, _forget, self._shared, found.data_ptr(), fd)
        return found

    def offer(self, vector: Tensor) -> bytes:
        """Return the path of the memory's descriptor in this process, as JSON."""
        if vector.data_ptr() not in self._shared:
            raise LinkError("only memory of zeros_to_share can be shared with other processes", peer="")
        fd, size = self._shared[vector.data_ptr()]
        return json.dumps([f"/proc/{os.getpid()}/fd/{fd}", size]).encode()

    def open(self, offer: bytes, n: int, dtype: torch.dtype) -> Tensor:
        """Return the vector of another process, by the path of its descriptor."""
        path, size = json.loads(offer)
        try:
            storage = _map_storage(path, size)
        except (OSError, RuntimeError) as error:
            raise LinkError(f"cannot open a peer's memory: {error}", peer="") from error
        return torch.empty(0, dtype=dtype).set_(storage)[:n]


def _map_storage(path: str, size: int) -> torch.UntypedStorage:
    found = torch.UntypedStorage.from_file(path, shared=True, nbytes=size)
    assert isinstance(found, torch.UntypedStorage)
    return found


def _forget(shared: dict[int, tuple[int, int]], address: int, fd: int) -> None:
    shared.pop(address, None)
    os.close(fd)


class _TwinStream:
    def __init__(self, lock: threading.RLock, delayed: bool) -> None:
        self._lock, self._delayed = lock, delayed
        self._waiting: deque[Work | DeviceEvent] = deque()  # work to run, and events of other streams to wait for
        self._added, self.count = 0, 0  # the number of entries that were added, and that are done

    def run(self, work: Work) -> DeviceEvent:
        self._add(work)
        return self.record()

    def copy(self, target: Tensor, source: Tensor) -> DeviceEvent:
        def work() -> None:
            with torch.no_grad():
                target.copy_(source)

        return self.run(work)

    def empty(self, n: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(n, dtype=dtype)

    def record(self) -> DeviceEvent:
        return _TwinEvent(self, self._added)

    def after(self, event: DeviceEvent) -> None:
        self._add(event)

    def wait(self) -> None:
        self.advance(self._added)

    def _add(self, entry: Work | DeviceEvent) -> None:
        with self._lock:
            self._added += 1
            self._waiting.append(entry)
            if not self._delayed:
                self.advance(self._added)

    def advance(self, count: int) -> None:
        """Do the next entries, until `count` entries of this stream are done.

        What these entries wait for in other streams runs first, before this stream's own earlier work, so that only a
        wait can put the work of two streams in order.
        """
        with self._lock:
            for entry in list(islice(self._waiting, max(0, count - self.count))):
                if not callable(entry):
                    entry.wait()
            while self.count < count:
                entry = self._waiting.popleft()
                self.count += 1
                if callable(entry):
                    entry()


class _TwinEvent:
    def __init__(self, stream: _TwinStream, count: int) -> None:
        self._stream, self._count = stream, count

    @property
    def done(self) -> bool:
        """Whether the work has run. Each call runs one more work of the stream, so that polling comes to an end."""
        self._stream.advance(min(self._count, self._stream.count + 1))
        return self._stream.count >= self._count

    def wait(self) -> None:
        self._stream.advance(self._count)
