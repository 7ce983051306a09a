"""The default process group of torch.distributed, for one generation of a job whose workers are processes.

A process has one default group. It is formed with the generation, over gloo, and destroyed with it. A failure of the
group becomes an error that names the peer, which the workers' ring finds.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from rayps_client.errors import ConfigError, LinkError, first_line
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rayps.comm.link import parse_address
from rayps.comm.ring import Ring

_store = dist.TCPStore  # type: ignore[attr-defined]
_HELD = threading.Lock()  # held by the generation whose group this process has
_POLL_SECONDS = 0.02
_owner: list[int] = []  # the generation that holds `_HELD`


class ProcessGroup:
    """The process group of one worker in one generation, and its mesh of all workers."""

    def __init__(self, ring: Ring, address: str, *, timeout: float) -> None:
        """Form the group of all ranks of `ring`. The host of `address`, that of rank 0's listener, has its store.

        `timeout` limits, in seconds, the forming and each wait of a collective.

        Raises:
            ConfigError: this process has a group already: that of another worker on a thread, or one of the user.
            LinkError: the group did not form in time, or a peer was lost.
        """
        self._ring = ring
        _take(ring.generation, timeout)
        self._ours = True
        try:
            self.mesh: DeviceMesh = self._form(address, datetime.timedelta(seconds=timeout))
        except BaseException:
            self.destroy()
            raise
        ring.collectives.mesh.at_end(self._end)
        self.is_idle = False  # whether no thread is inside a collective, so that any thread may destroy the group

    def _form(self, address: str, seconds: datetime.timedelta) -> DeviceMesh:
        ring, port, store = self._ring, torch.zeros(1, dtype=torch.int64), None
        host = parse_address(address).host
        with self.failures():
            if ring.rank == 0:
                store = _store(host, 0, ring.size, is_master=True, timeout=seconds, wait_for_workers=False)
                port[0] = store.port
            ring.broadcast(port)
            if store is None:
                store = _store(host, int(port), ring.size, is_master=False, timeout=seconds)
            dist.init_process_group("gloo", store=store, rank=ring.rank, world_size=ring.size, timeout=seconds)
            return init_device_mesh("cpu", (ring.size,))

    @contextlib.contextmanager
    def failures(self) -> Iterator[None]:
        """Turn a failure of the group inside the block into a LinkError that names the peer."""
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            words = f"torch.distributed failed: {first_line(error)[:200]}"
            if not _is_of_the_group(error):
                raise
            raise self._ring.collectives.mesh.blame(words) from error

    def destroy(self) -> None:
        """Destroy the group. No thread may be inside a collective. Safe to call twice."""
        if self._ours:
            self._ours = False
            if dist.is_initialized():
                dist.destroy_process_group()
            _owner.clear()
            _HELD.release()

    def _end(self) -> None:
        """Destroy the group with its ring, unless the worker's thread, which does so itself, may be using it."""
        if self.is_idle:
            self.destroy()


def _take(generation: int, timeout: float) -> None:
    """Wait until the group of an earlier generation of this process is destroyed, and take its place."""
    end = time.monotonic() + timeout
    while not _HELD.acquire(timeout=_POLL_SECONDS):
        if _owner and _owner[0] == generation:
            raise ConfigError(
                "shard='parameters' needs a process for each worker, because a process has one process group of "
                "torch.distributed, and another worker runs in this process:\nuse workers of Ray, one worker, or "
                "shard='gradients'",
                field="shard",
            )
        if time.monotonic() > end:
            raise LinkError(
                f"the process group of an earlier generation of this worker has not ended within {timeout:g} s", peer=""
            )
    if dist.is_initialized():
        _HELD.release()
        raise ConfigError(
            "this process has a process group of torch.distributed already, and shard='parameters' needs one of its "
            "own: call no init_process_group in the workload's code, or use shard='gradients'",
            field="shard",
        )
    _owner[:] = [generation]


def _is_of_the_group(error: BaseException) -> bool:
    """Return whether an error is one of torch.distributed, and not of the user's code."""
    text = str(error)
    return isinstance(error, (dist.DistError, LinkError)) or "gloo" in text or "c10d" in text or "TCPStore" in text
