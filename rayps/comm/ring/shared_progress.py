"""Memory that all ranks of one host read and write without locks, and how far each of them has come."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from rayps.comm.ring.mesh import Mesh
from rayps.comm.ring.shared_memory import SharedMemoryFold, tensor_of
from rayps.core.errors import ConfigError, PeerTimeout

_LOOK_SECONDS = 0.005  # between two looks at how far the others are
_APART = 8  # words of a rank: a line of the cache, so that nobody's word slows another's


def common(mesh: Mesh, board: SharedMemoryFold | None, n: int, dtype: torch.dtype) -> Tensor:
    """A vector of `n` zeros, the same memory on every rank. All ranks must call it alike.

    Raises:
        ConfigError: the ranks share no memory.
    """
    if mesh.size == 1:
        return torch.zeros(n, dtype=dtype)
    if board is None:
        raise ConfigError(
            f"the {mesh.size} ranks share no memory, as those of several hosts, and this strategy needs all of them on "
            "one: use fewer workers (as many as one host has cores), or all_reduce, parameter_server or downpour",
            field="strategy",
        )
    return tensor_of(board.common(max(1, n) * dtype.itemsize), dtype)[:n]


class Progress:
    """How many rounds each rank has made, as all of them see it at once."""

    def __init__(self, mesh: Mesh, board: SharedMemoryFold | None) -> None:
        self._mesh = mesh
        words = common(mesh, board, mesh.size * _APART, torch.int64)
        self._words = words.numpy()[::_APART]

    def reach(self, rounds: int) -> None:
        """Say that this rank has made so many rounds."""
        self._words[self._mesh.rank] = rounds

    def meet(self, rounds: int) -> None:
        """Return once every rank has made so many rounds; what each wrote before is there.

        Raises:
            PeerTimeout: the slowest ranks made no round past the deadline.
            PeerLost: the ring was ended meanwhile.
        """
        began = since = time.monotonic()
        seen = self._words.copy()
        while int(seen.min()) < rounds:
            self._mesh.check()
            time.sleep(_LOOK_SECONDS)
            now = self._words.copy()
            if not np.array_equal(now, seen):
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self._mesh.timeout:
                slowest = int(seen.argmin())
                raise PeerTimeout(
                    f"rank {slowest} has made {int(seen[slowest])} of {rounds} rounds, and none in "
                    f"{self._mesh.timeout:g} s (the knob is `timeout`)",
                    peer=f"worker:{slowest}",
                    seconds=self._mesh.timeout,
                )
        self._mesh.check()
        self._mesh.seconds_waiting += time.monotonic() - began
