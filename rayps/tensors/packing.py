"""Encode tensors and JSON data as bytes: the state of a segment for a backup or a checkpoint. Nothing is pickled.

Format: int64 length of the head, the head as JSON, then each tensor's bytes at a multiple of 16.
"""

from __future__ import annotations

import json
from typing import Any, TypeAlias

import numpy as np
import torch
from rayps_client.errors import CheckpointError
from rayps_client.values import Buffer
from torch import Tensor

from rayps.tensors.optim import Moments

_ALIGN = 16
Head: TypeAlias = dict[str, Any]  # JSON data before the tensors; only the module that wrote it interprets it


def view_bytes(tensor: Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the bytes of a contiguous CPU tensor, without a copy, for any dtype."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def pack_state(head: Head, tensors: list[Tensor]) -> bytes:
    """Encode `head` (JSON data) and contiguous CPU tensors of any dtype as bytes."""
    kinds = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    body = json.dumps({**head, "tensors": kinds}).encode()
    body += b" " * (-(8 + len(body)) % _ALIGN)
    parts: list[Buffer] = [np.int64(len(body)).tobytes(), body]
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        parts += [view_bytes(tensor.contiguous()).data if size else b"", b"\0" * (-size % _ALIGN)]
    return b"".join(parts)


def unpack_state(state: Buffer) -> tuple[Head, list[Tensor]]:
    """Decode the result of `pack_state`. The tensors are views of `state` if `state` is writable, else copies.

    Raises:
        CheckpointError: `state` is truncated, or not a result of `pack_state`.
    """
    view = memoryview(state).cast("B")
    if view.readonly:  # torch needs writable memory
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
                raise ValueError("they are truncated")
            flat = torch.frombuffer(view, dtype=dtype, count=count, offset=at) if count else torch.empty(0, dtype=dtype)
            tensors.append(flat.reshape(shape))
            at += size + -size % _ALIGN
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"cannot decode {len(view)} bytes as the state of a segment: {error}") from error
    return head, tensors


def tensor_of(data: Buffer, dtype: torch.dtype) -> Tensor:
    """Return a buffer's bytes as a tensor [n] of `dtype`: a view if the buffer is writable, else a copy.

    Raises:
        ValueError: the buffer is not a whole number of elements.
    """
    view = memoryview(data)
    if view.nbytes % dtype.itemsize:
        raise ValueError(f"{view.nbytes} bytes are not a whole number of {dtype} elements")
    if not view.nbytes:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=dtype)


def pack_moments(moments: Moments, tensors: list[Tensor]) -> Moments:
    """Return an optimizer's state as JSON data. Each tensor is appended to `tensors`, and its index takes its place."""
    found: Moments = {}
    for name, state in moments.items():
        found[name] = {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                found[name][key] = {"tensor": len(tensors)}
                tensors.append(value)
            else:
                found[name][key] = value
    return found


def unpack_moments(plain: Moments, tensors: list[Tensor]) -> Moments:
    """Rebuild an optimizer's state from the result of `pack_moments` and its tensors, which are cloned."""
    return {
        name: {key: tensors[value["tensor"]].clone() if isinstance(value, dict) else value for key, value in s.items()}
        for name, s in plain.items()
    }
