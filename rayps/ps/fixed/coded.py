"""Pushes in fewer bytes: what a worker's push carries where it is encoded.

What was left out of a push is added to the worker's next one (`rayps.comm.compress.ErrorFeedback`), in the gradient's
own units, a slice for each shard. A push is encoded once: what is said again after a loss is the same bytes. Pulls are
not encoded: everyone reads the same parameters, to the bit.
"""

from __future__ import annotations

import struct

import numpy as np
import torch
from torch import Tensor

from rayps.comm.compress import ErrorFeedback, decoded

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
