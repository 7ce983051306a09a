"""Tensors and plain data as one run of bytes: how a segment's state travels to a copy and into a checkpoint.

int64 length of the head, the head as JSON, then each tensor's bytes at a multiple of 16. Nothing is pickled.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayps.core.errors import CheckpointError
from rayps.tensors.optim import Moments

_ALIGN = 16


def flat_bytes(tensor: Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The bytes of a contiguous CPU tensor, without a copy, for any dtype."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def pack_state(head: dict[str, Any], tensors: list[Tensor]) -> bytes:
    """`head` (JSON-ready) and contiguous CPU tensors of any dtype. The tensors are copied once."""
    kinds = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    body = json.dumps({**head, "tensors": kinds}).encode()
    body += b" " * (-(8 + len(body)) % _ALIGN)
    parts: list[Any] = [np.int64(len(body)).tobytes(), body]
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        parts += [flat_bytes(tensor.contiguous()).data if size else b"", b"\0" * (-size % _ALIGN)]
    return b"".join(parts)


def unpack_state(state: Any) -> tuple[dict[str, Any], list[Tensor]]:
    """Read back what `pack_state` gave; the tensors are views of `state` where it can be written to.

    Raises:
        CheckpointError: it is torn, or something else.
    """
    view = memoryview(state).cast("B")
    if view.readonly:  # torch wants memory that it may write to
        view = memoryview(bytearray(view))
    try:
        at = 8 + int(np.frombuffer(view[:8], np.int64)[0])
        head = json.loads(bytes(view[8:at]))
        tensors = []
        for name, shape in head["tensors"]:
            dtype = getattr(torch, name)
            count = int(np.prod(shape, dtype=np.int64))
            size = count * dtype.itemsize
            if at + size > len(view):
                raise ValueError("it ends too early")
            flat = torch.frombuffer(view, dtype=dtype, count=count, offset=at) if count else torch.empty(0, dtype=dtype)
            tensors.append(flat.reshape(shape))
            at += size + -size % _ALIGN
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{len(view)} bytes are no state of a segment: {error}") from error
    return head, tensors


def tensor_of(data: Any, dtype: torch.dtype) -> Tensor:
    """The elements in a buffer; without a copy where it can be written to. Raises ValueError."""
    view = memoryview(data)
    if view.nbytes % dtype.itemsize:
        raise ValueError(f"{view.nbytes} bytes are no whole number of {dtype} elements")
    if not view.nbytes:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=dtype)


def plain_moments(moments: Moments, tensors: list[Tensor]) -> dict[str, dict[str, Any]]:
    """An optimizer's state as JSON-ready data; its tensors are put behind those in `tensors`, and named by number."""
    found: dict[str, dict[str, Any]] = {}
    for name, state in moments.items():
        found[name] = {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                found[name][key] = {"tensor": len(tensors)}
                tensors.append(value)
            else:
                found[name][key] = value
    return found


def full_moments(plain: dict[str, dict[str, Any]], tensors: list[Tensor]) -> Moments:
    """Read back what `plain_moments` gave; the tensors are clones."""
    return {
        name: {key: tensors[value["tensor"]].clone() if isinstance(value, dict) else value for key, value in s.items()}
        for name, s in plain.items()
    }
