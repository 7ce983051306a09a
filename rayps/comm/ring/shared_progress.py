"""Memory that all ranks of one host read and write without locks, and in it each rank's count of completed rounds."""

from __future__ import annotations

import time

import numpy as np
import torch
from rayps_client.errors import ConfigError, PeerTimeout
from torch import Tensor

from rayps.comm.ring.mesh import Mesh
from rayps.comm.ring.shared_memory import SharedMemoryFold, tensor_of

_READ_SECONDS = 0.005  # seconds between two reads of the other ranks' counters
_STRIDE = 8  # int64 words from one rank's counter to the next: each has its own cache line, which makes writes fast


def make_common(mesh: Mesh, shared_memory: SharedMemoryFold | None, n: int, dtype: torch.dtype) -> Tensor:
    """Return a vector of `n` zeros in memory that all ranks share. All ranks must make the same call.

    Raises:
        ConfigError: the ranks are on several hosts.
    """
    if mesh.size == 1:
        return torch.zeros(n, dtype=dtype)
    if shared_memory is None:
        raise ConfigError(
            f"the {mesh.size} ranks share no memory because they are on several hosts, and this strategy needs all of "
            "them on one host: use fewer workers (at most as many as one host has cores), or all_reduce, "
            "parameter_server or downpour",
            field="strategy",
        )
    return tensor_of(shared_memory.common(max(1, n) * dtype.itemsize), dtype)[:n]


class Progress:
    """Counters in shared memory: how many rounds each rank has completed."""

    def __init__(self, mesh: Mesh, shared_memory: SharedMemoryFold | None) -> None:
        self._mesh = mesh
        words = make_common(mesh, shared_memory, mesh.size * _STRIDE, torch.int64)
        self._words = words.numpy()[::_STRIDE]

    def reach(self, rounds: int) -> None:
        """Set this rank's number of completed rounds to `rounds`."""
        self._words[self._mesh.rank] = rounds

    def meet(self, rounds: int) -> None:
        """Wait until every rank has completed `rounds` rounds; the ranks' writes in these rounds are then visible.

        Raises:
            PeerTimeout: no rank completed a round within the timeout.
            PeerLost: the ring ended during the wait.
        """
        began = since = time.monotonic()
        seen = self._words.copy()
        while int(seen.min()) < rounds:
            self._mesh.check()
            time.sleep(_READ_SECONDS)
            now = self._words.copy()
            if not np.array_equal(now, seen):
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self._mesh.timeout:
                slowest = int(seen.argmin())
                raise PeerTimeout(
                    f"no rank completed a round for {self._mesh.timeout:g} s; rank {slowest} has completed "
                    f"{int(seen[slowest])} of {rounds} rounds, the fewest (the knob is `timeout`)",
                    peer=f"worker:{slowest}",
                    seconds=self._mesh.timeout,
                )
        self._mesh.check()
        self._mesh.seconds_waiting += time.monotonic() - began
