"""What every data set gives: batches, dealt to ranks by one rule. Not a loader: it has no workers or threads.

The rule for the remainder, for n rows, N ranks and batches of B rows: in an epoch every row is given to
exactly one rank, so a rank has n // N rows or one more. Every rank gives the same number of batches,
ceil(ceil(n / N) / B). Only a rank's last batch may be smaller, and it may be empty (size 0) where a rank
ran out of rows one batch early. Means are weighted by size, so a round is exactly the mean over the union
of its batches, and an empty batch counts nothing.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from rayps.core.errors import ConfigError

if TYPE_CHECKING:
    from rayps.data.clients import Clients


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
    """Rows to learn from, in batches of `batch_size` per rank.

    `client` says how they are divided into clients (a rule, an id for each row, a column; None: they are not):
    federated strategies learn from `clients`, all others do not look at it. `keeps_rows`: a rank has the same rows
    in every epoch, in another order each time; with clients, a run of whole clients as far as even parts allow.
    """

    batch_size: int
    client: Any = None
    keeps_rows: bool = False
    _clients: Clients | None = None

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

    def share(self, rank: int, size: int) -> int:
        """How many rows of an epoch this rank has."""
        return len(range(rank, self.rows(), size))

    @property
    def divided(self) -> bool:
        """Whether the data has clients."""
        return self.client is not None

    @property
    def clients(self) -> Clients:
        """Who has which rows; made at the first look.

        Raises:
            ConfigError: the data is not divided, or cannot be divided so.
            DataError: a column, id or label that cannot be used.
        """
        if self._clients is None:
            if self.client is None:
                raise ConfigError(
                    "the data is not divided into clients: give client= to rayps.data.parquet, tensors or dataset: "
                    'a column such as "writer", or a rule such as rayps.data.iid(20)',
                    field="client",
                )
            self._clients = self._divide()
        return self._clients

    def with_clients(self, client: Any) -> Self:
        """The same rows, divided otherwise: by a rule, a column, or an id for each row."""
        other = copy.copy(self)
        other._take_clients(client)
        return other

    def _take_clients(self, client: Any) -> None:
        self.client, self._clients = client, None

    def _divide(self) -> Clients:
        raise ConfigError(
            f"{type(self).__name__} cannot be divided into clients: use rayps.data.parquet, tensors or dataset",
            field="client",
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clients": None}


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


def kept(data: Data, *, rank: int, size: int, seed: int | None, epoch: int) -> NDArray[np.int64]:
    """As `dealt`, but the same rows in every epoch: those of epoch 0, or of a run of clients; shuffled anew."""
    if data.divided:
        clients = data.clients
        mine = np.array_split(np.concatenate([clients.rows(k) for k in range(clients.count)]), size)[rank]
    else:
        mine = dealt(data.rows(), rank=rank, size=size, seed=seed, epoch=0)
    return mine if seed is None else random_of(seed, epoch, rank).permutation(mine)
