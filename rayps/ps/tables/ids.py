"""Convert the ids that a user gives, which are whole numbers or strings in any container, to int64. Pure."""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike
from rayps_client.errors import WorkloadError
from torch import Tensor

GivenIds: TypeAlias = Tensor | ArrayLike  # whole numbers, or strings, of any shape


def ids_of(given: GivenIds, table: str = "") -> Tensor:
    """Return ids as an int64 tensor of the same shape. Strings are converted to 63-bit ids by `hash_ids`.

    Raises:
        WorkloadError: the values are neither whole numbers nor strings.
    """
    if not isinstance(given, Tensor):
        values = np.asarray(given)
        if values.dtype.kind in "USO" and values.size:
            return hash_ids(values if isinstance(given, np.ndarray) else given)  # numpy turns a mixed list into strings
        given = torch.from_numpy(values.astype(np.int64)) if values.size == 0 else torch.as_tensor(values)
    if given.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8):
        ids: Tensor = given.detach().to(torch.int64)
        return ids
    kind = str(given.dtype).removeprefix("torch.")
    raise WorkloadError(
        f"the ids of table {table!r} have dtype {kind}: give whole numbers (int64, e.g. ids.long()) or strings",
        table=table,
    )


def hash_ids(strings: ArrayLike) -> Tensor:
    """Convert strings or bytes, in a list or an array of any shape, to 63-bit ids: the low bits of a blake2b hash.

    The result is an int64 tensor of the same shape. Collisions are rare: among 200,000 sets of ten million different
    strings each, about one set has two strings with the same id.

    Raises:
        WorkloadError: a value is neither a string nor bytes.

    Example:
        ids = rayps.hash_ids(["plane=N101", "plane=N102"])
    """
    values = np.asarray(strings, dtype=object)
    flat = values.reshape(-1).tolist()
    known = {text: _hash(text) for text in set(flat)}
    return torch.tensor([known[text] for text in flat], dtype=torch.int64).reshape(values.shape)


def _hash(text: str | bytes | int | float | None) -> int:
    if isinstance(text, str):
        text = text.encode()
    if not isinstance(text, bytes):
        raise WorkloadError(f"an id is {text!r} among strings: give only strings, or only whole numbers")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") & (2**63 - 1)
