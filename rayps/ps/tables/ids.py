"""Ids from what a user gives: whole numbers in any wrapping, or strings. Pure."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayps.core.errors import WorkloadError


def ids_of(given: Any, table: str = "") -> Tensor:
    """Ids as an int64 tensor of the same shape; strings become 63-bit ids by `hash_ids`.

    Raises:
        WorkloadError: they are neither whole numbers nor strings.
    """
    if not isinstance(given, Tensor):
        values = np.asarray(given)
        if values.dtype.kind in "USO" and values.size:
            return hash_ids(values if isinstance(given, np.ndarray) else given)  # numpy makes words of all
        given = torch.from_numpy(values.astype(np.int64)) if values.size == 0 else torch.as_tensor(values)
    if given.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8):
        ids: Tensor = given.detach().to(torch.int64)
        return ids
    kind = str(given.dtype).removeprefix("torch.")
    raise WorkloadError(
        f"the ids of table {table!r} are {kind}: give whole numbers (int64, e.g. ids.long()) or strings", table=table
    )


def hash_ids(strings: Any) -> Tensor:
    """Strings (or bytes), in a list or an array of any shape, as ids of 63 bits: the low ones of their blake2b.

    Two of ten million different strings get the same id once in 200,000 such sets.

    Raises:
        WorkloadError: one of them is not a string.

    Example:
        ids = rayps.hash_ids(["plane=N101", "plane=N102"])
    """
    values = np.asarray(strings, dtype=object)
    flat = values.reshape(-1).tolist()
    known = {text: _hash(text) for text in set(flat)}
    return torch.tensor([known[text] for text in flat], dtype=torch.int64).reshape(values.shape)


def _hash(text: Any) -> int:
    if isinstance(text, str):
        text = text.encode()
    if not isinstance(text, bytes):
        raise WorkloadError(f"an id is {text!r} among strings: give strings alone, or whole numbers alone")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") & (2**63 - 1)
