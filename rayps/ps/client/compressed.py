"""A server whose pushes travel in fewer bytes, where that pays."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from rayps.comm.compress import CANDIDATES, MARGIN, ErrorFeedback, choice, codec

PROBE_ELEMENTS = 1 << 20
_TRIES = 3


class PushesWhole(Protocol):
    """What `compress` needs of a worker's server."""

    size: int  # elements
    dtype: torch.dtype
    feedback: ErrorFeedback | None  # where pushes are encoded

    @property
    def shares_memory(self) -> bool:
        """Whether all servers read the worker's gradient in shared memory."""

    def read(self, lo: int = 0, hi: int | None = None) -> Tensor:
        """The elements lo to hi as they are now."""


def compress(server: PushesWhole, compression: str) -> dict[str, Any]:
    """Let a server's pushes travel as `compression` says; the choice as an event.

    `auto` leaves them as they are where shards read a worker's gradient in shared memory. Elsewhere it compares what a
    read of up to 2^20 elements takes with what encoding and decoding as many takes, beside the share of the bytes that
    is left: for this worker and its lines, each may choose another.
    """
    if compression != "auto":
        server.feedback = ErrorFeedback(codec(compression), server.size, server.dtype)
        return choice("server", compression, "given")
    if server.shares_memory:
        return choice("server", "off", "all shards are on this host and read them where they lie")
    n = min(server.size, PROBE_ELEMENTS)
    x = torch.randn(n).to(server.dtype)
    line = _seconds(lambda: server.read(0, n))
    seconds = {"off": line} | {name: _coded_seconds(name, x, line) for name in CANDIDATES}
    best = min(CANDIDATES, key=lambda name: seconds[name])
    pays = seconds[best] < MARGIN * seconds["off"]
    if pays:
        server.feedback = ErrorFeedback(codec(best), server.size, server.dtype)
    return choice("server", best if pays else "off", f"{n} elements", seconds)


def _coded_seconds(name: str, x: Tensor, line: float) -> float:
    """What a push would take: coding on both sides, and the line for the bytes that are left."""
    kind, n = codec(name), x.numel()
    memory = ErrorFeedback(kind, n, x.dtype)
    coding = _seconds(lambda: kind.decode(memory.encode(x), n, x.dtype))
    return coding + line * kind.size(n) / (n * x.element_size())


def _seconds(work: Callable[[], Any]) -> float:
    found = []
    for _ in range(_TRIES + 1):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])  # the first one touches new pages
