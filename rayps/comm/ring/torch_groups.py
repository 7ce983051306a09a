"""The ring's backends gloo and NCCL: each ring creates its own process group of torch.distributed.

The group is created and destroyed with its ring, has the ring's timeout, and is not the process's default group. Use
NCCL between GPUs. The ring also has its own connections, by which it finds the rank at fault if the group fails.
"""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from rayps_client.errors import ConfigError, LinkError, first_line
from torch import Tensor

from rayps.comm.link import parse_address
from rayps.comm.ring.algorithms import broadcast
from rayps.comm.ring.describe import RingChoices
from rayps.comm.ring.mesh import Mesh
from rayps.tensors.device import Device

T = TypeVar("T")
_store = dist.TCPStore  # type: ignore[attr-defined]
REDUCTIONS = {"add": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class TorchGroup:
    """A ring's backend that reduces vectors by a process group of torch.distributed."""

    shared_memory = None

    def __init__(self, mesh: Mesh, backend: str, address: str) -> None:
        if backend not in ("gloo", "nccl"):
            raise ConfigError(f"there is no backend {backend!r}: use own, gloo or nccl", backend=backend)
        self._mesh = mesh
        self._cuda = backend == "nccl"
        try:
            self._device = Device.of("cuda" if self._cuda else "cpu")
        except ConfigError as error:
            raise ConfigError("the backend nccl needs a CUDA device: use own or gloo", backend=backend) from error
        self.choices: RingChoices = {"algorithm": backend, "transport": backend, "ranks": mesh.size, "why": "given"}
        self._group: Any = None
        if mesh.size > 1 or self._cuda:
            self._group = process_group(mesh, backend, parse_address(address).host)
            mesh.at_end(self._close)

    def must_know(self, algorithm: str | None) -> None:
        """Raise ConfigError if `algorithm` is given, because a process group chooses the algorithm itself."""
        if algorithm is not None:
            raise ConfigError(
                f"algorithm={algorithm!r} was given, but the backend {self.choices['algorithm']} chooses the algorithm "
                "itself: leave `algorithm` out, or use the backend own"
            )

    def fold(self, x: Tensor, kind: str) -> None:
        """Reduce a tensor over the ranks, in place; `kind` is "add" or "max". Half precision is added in float32.

        NCCL copies a CPU tensor to the GPU and back; gloo copies a GPU tensor to the CPU and back.
        """
        target = x.float() if kind == "add" and x.dtype in (torch.float16, torch.bfloat16) else x.contiguous()
        if target.is_cuda != self._cuda:
            target = target.to(self._device.place)
        options = dist.AllreduceOptions()
        options.reduceOp = REDUCTIONS[kind]  # type: ignore[assignment]
        self._mesh.check()
        try:
            work: GroupWork = self._group.allreduce([target], options)
            if self._cuda:
                self._mesh.watch(work.is_completed)
            work.wait()
            self._device.current().wait()
        except RuntimeError as error:
            reason = first_line(error)[:200]
            raise self._mesh.blame(f"the backend {self.choices['algorithm']} failed: {reason}") from error
        if target.data_ptr() != x.data_ptr():
            x.copy_(target)

    def _close(self) -> None:
        if self._group is not None:
            if self._cuda:
                self._group.abort()
            self._group = None


class GroupWork(Protocol):
    """An operation of a process group that has begun."""

    def is_completed(self) -> bool:
        """Whether the operation has ended, with a result or an error."""

    def wait(self) -> bool:
        """Let the operations that follow on the device wait for the result. Raises RuntimeError if it has failed."""


def process_group(mesh: Mesh, backend: str, host: str) -> Any:
    """Create a process group of the mesh's ranks with torch's backend gloo or nccl, and with the mesh's timeout.

    The ranks meet at a store of rank 0, whose address is `host`. A thread of its own waits for them there, while this
    rank polls its mesh: whoever ends the mesh ends this wait too. An operation of NCCL that fails or takes too long
    raises an error; it does not end the process, as torch does by default. Raises LinkError if the group cannot start.
    """
    if backend == "nccl":
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    seconds = datetime.timedelta(seconds=mesh.timeout)
    port = torch.zeros(1, dtype=torch.int64)
    store: Any = None
    if mesh.rank == 0:
        store = _store(host, 0, mesh.size, is_master=True, timeout=seconds, wait_for_workers=False)
        port[0] = store.port
    broadcast(mesh, port, 0)

    def meet() -> object:
        there = store
        if mesh.rank != 0:
            there = _store(host, int(port), mesh.size, is_master=False, timeout=seconds)
        if backend == "gloo":
            return dist.ProcessGroupGloo(there, mesh.rank, mesh.size, seconds)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = seconds
        return dist.ProcessGroupNCCL(there, mesh.rank, mesh.size, options)

    try:
        made, ended = call_in_thread(meet), threading.Event()
        made.add_done_callback(lambda _: ended.set())
        try:
            mesh.watch(ended.is_set)
        except BaseException:
            del made  # with its last reference a group leaves: the other ranks do not wait for one that is not used
            raise
        return made.result()
    except RuntimeError as error:
        raise LinkError(
            f"the process group of backend {backend} did not start: {first_line(error)[:200]}", peer=""
        ) from error


def call_in_thread(call: Callable[[], T]) -> Future[T]:
    """Call a function that waits for other ranks, in a thread of its own."""
    found: Future[T] = Future()

    def work() -> None:
        try:
            found.set_result(call())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=work, name="connect-group", daemon=True).start()
    return found
