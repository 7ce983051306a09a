"""Pushes in fewer bytes: what a worker's push carries where it is encoded, and whether that pays.

What was left out of a push is added to the worker's next one (`rayps.compress.ErrorFeedback`), in the gradient's own
units, a slice for each shard. A push is encoded once: what is said again after a loss is the same bytes. Pulls are
not encoded: everyone reads the same parameters, to the bit.
"""

from __future__ import annotations

import statistics
import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rayps.compress import CANDIDATES, MARGIN, ErrorFeedback, choice, codec, decoded
from rayps.server.ways import ByMemory

if TYPE_CHECKING:
    from rayps.server.client import Server

PROBE_ELEMENTS = 1 << 20
_TRIES = 3
_HEAD = struct.Struct("<2q")  # the codec's number, elements


def coded(memory: ErrorFeedback, piece: Tensor, lo: int, weight: float) -> Tensor:
    """The payload of an encoded push of `piece`, which begins at element lo of the whole vector, as uint8.

    A push of no weight counts nothing and carries zeros: what is remembered stays for the next one.
    """
    n = piece.numel()
    if weight:
        data = memory.encode(piece.to(memory.residual.device), lo)
    else:
        data = memory.codec.encode(torch.zeros(n, dtype=memory.residual.dtype))
    head = torch.from_numpy(np.frombuffer(_HEAD.pack(memory.codec.code, n), np.uint8).copy())
    return torch.cat([head, data])


def value_of(payload: memoryview | bytearray, dtype: torch.dtype) -> Tensor:
    """The elements of an encoded push. Raises ConfigError, ValueError."""
    if len(payload) < _HEAD.size:
        raise ValueError(f"an encoded push has {len(payload)} bytes and needs {_HEAD.size} at least")
    code, n = _HEAD.unpack_from(payload)
    if n < 0:
        raise ValueError(f"an encoded push has {n} elements")
    return decoded(code, torch.frombuffer(payload, dtype=torch.uint8)[_HEAD.size :], n, dtype)


def compress(server: Server, compression: str) -> dict[str, Any]:
    """Let a server's pushes travel as `compression` says; the choice as an event.

    `auto` leaves them as they are where shards read a worker's gradient in shared memory. Elsewhere it compares what a
    read of up to 2^20 elements takes with what encoding and decoding as many takes, beside the share of the bytes that
    is left: for this worker and its lines, each may choose another.
    """
    if compression != "auto":
        server.feedback = ErrorFeedback(codec(compression), server.size, server.dtype)
        return choice("server", compression, "given")
    if all(isinstance(way, ByMemory) for way in server._turns._ways):
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
