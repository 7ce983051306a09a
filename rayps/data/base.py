"""What every data set gives: batches, dealt to ranks by one rule. Not a loader: it has no workers or threads.

The rule for the remainder, for n rows, N ranks and batches of B rows: in an epoch every row is given to
exactly one rank, so a rank has n // N rows or one more. Every rank gives the same number of batches,
ceil(ceil(n / N) / B). Only a rank's last batch may be smaller, and it may be empty (size 0) where a rank
ran out of rows one batch early. Means are weighted by size, so a round is exactly the mean over the union
of its batches, and an empty batch counts nothing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rayps.errors import ConfigError


@dataclass(slots=True)
class Batch:
    """Some rows: `x` what is known, `y` what is to be learned (None without a label), `size` how many."""

    x: Any
    y: Any
    size: int

    def __len__(self) -> int:
        return self.size

    def to(self, device: str | torch.device) -> Batch:
        """The same rows on `device`; tensors inside tuples, lists and dicts are moved too."""
        return Batch(_move(self.x, device), _move(self.y, device), self.size)


def _move(value: Any, device: str | torch.device) -> Any:
    return map_tensors(value, lambda tensor: tensor.to(device, non_blocking=True))


def map_tensors(value: Any, change: Any) -> Any:
    """`value` with every tensor in it replaced by `change(tensor)`; tuples, lists and dicts stay."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, change) for item in value)
    return value


class Data(ABC):
    """Rows to learn from, in batches of `batch_size` per rank."""

    batch_size: int

    @abstractmethod
    def check(self) -> None:
        """Look at the data before training starts. Raises DataError naming file, column and row."""

    @abstractmethod
    def rows(self) -> int:
        """The number of rows in an epoch, over all ranks."""

    def steps(self, size: int) -> int:
        """The number of batches per rank and epoch with `size` ranks: the same on every rank."""
        return math.ceil(math.ceil(self.rows() / size) / self.batch_size)

    @abstractmethod
    def batches(self, *, rank: int, size: int, seed: int, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This rank's batches of an epoch from number `start` on: the same for the same arguments, always."""


def batch_size_of(value: Any) -> int:
    """`value` if it can be a batch size. Raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"batch_size is {value!r}: give a whole number of at least 1", field="batch_size")
    return value


def check_place(rank: int, size: int, start: int) -> None:
    """Raises ConfigError unless 0 <= rank < size and start >= 0."""
    if not 0 <= rank < size or start < 0:
        raise ConfigError(f"rank {rank} of {size} from batch {start}: give 0 <= rank < size and start >= 0")


def random_of(seed: int, *more: int) -> np.random.Generator:
    """Random numbers that depend on these whole numbers and nothing else."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed % 2**64, *more])))


def dealt(rows: int, *, rank: int, size: int, seed: int | None, epoch: int) -> NDArray[np.int64]:
    """The rows of one rank, dealt round robin from one permutation of all; in order when `seed` is None."""
    if seed is None:
        return np.arange(rank, rows, size, dtype=np.int64)
    return random_of(seed, epoch).permutation(rows)[rank::size].astype(np.int64, copy=False)
