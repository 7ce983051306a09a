"""The base class of data sets, which provide batches for each rank.

For n rows, N ranks and batches of B rows: in an epoch each row goes to exactly one rank, and a rank has n // N rows or
one more. Every rank has the same number of batches, ceil(ceil(n / N) / B). Only a rank's last batch may be smaller, and
it is empty (size 0) if the rank has no rows left for it. Means are weighted by the size of the batch. Therefore a round
computes exactly the mean over all rows of its batches, and an empty batch has weight 0. With `drop_last` a rank's last
batch is left out if it is smaller: a rank has ceil(n / N) // B batches, and the last one may be empty on some ranks.
"""

from __future__ import annotations

import copy
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from rayps_client.errors import ConfigError
from rayps_client.exchange.random_numbers import random_of as random_of
from rayps_client.trainers.local_work import counted, no_whole_batch

if TYPE_CHECKING:
    from rayps.data.clients import Clients, GivenClients

MOST_PINNED_BYTES = 64 << 20  # a larger tensor is copied to a GPU without pinned memory, of which there is not much

Nested: TypeAlias = (
    torch.Tensor | bool | int | float | str | Sequence["Nested"] | Mapping[str, "Nested"] | None
)  # tensors and plain values in tuples, lists and dicts: what a model takes and returns


@dataclass(slots=True)
class Batch:
    """Rows of data: their features `x`, their labels `y` (None if they have no labels), and their number `size`.

    A step of several micro-batches (`accumulate`) is a batch whose rows are in `parts`, and whose `x` and `y` are None.
    """

    x: Any
    y: Any
    size: int
    parts: tuple[Batch, ...] = ()

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Any]:
        """Yield `x` and `y`, so that a batch unpacks: `x, y = batch`."""
        yield from (self.x, self.y)

    def to(self, device: str | torch.device) -> Batch:
        """Return the same rows on `device`, including the tensors inside tuples, lists and dicts.

        Tensors of at most `MOST_PINNED_BYTES` go to a GPU through pinned memory. Without it, CUDA would let the host
        wait until the GPU has done all its work so far.
        """
        pins = torch.device(device).type == "cuda"

        def move(tensor: torch.Tensor) -> torch.Tensor:
            plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.is_contiguous()
            if pins and plain and tensor.nbytes <= MOST_PINNED_BYTES:
                tensor = tensor.pin_memory()  # torch keeps and reuses this memory, after the copy has ended
            return tensor.to(device, non_blocking=True)

        parts = tuple(part.to(device) for part in self.parts)
        return Batch(map_tensors(self.x, move), map_tensors(self.y, move), self.size, parts)


def map_tensors(value: Nested, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Nested:
    """Replace every tensor in nested tuples, lists and dicts by `change(tensor)`."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, change) for item in value]
        make: Callable[..., Nested] = type(value)
        # the constructor of a named tuple takes its fields one by one
        return make(*items) if hasattr(value, "_fields") else make(items)
    return value


@dataclass(frozen=True, slots=True)
class Place:
    """The part of an epoch that one reader reads: of `rank`, or of loader process `process` of `processes` of it."""

    rank: int
    size: int
    seed: int
    epoch: int
    process: int = 0
    processes: int = 1


@dataclass(frozen=True, slots=True)
class Ahead:
    """How batches are read ahead: by `workers` loader processes, or by a thread if 0; `prefetch` batches by each."""

    workers: int
    prefetch: int


Position = Mapping[str, Any]  # JSON data: from where the rest of a part can be read, without reading what is before it


class Data(ABC):
    """Training data in batches of `batch_size` rows for each rank.

    `client`: how the rows are divided into clients, for federated strategies. It is a rule, an id for each row, or the
    name of a column; None if the rows are not divided.

    `keeps_rows`: whether a rank has the same rows in every epoch, in a new order. If the rows are divided into clients,
    all rows are then sorted by client and cut into one contiguous part of equal length for each rank.

    `separate_rows`: whether `take` makes of each row what it would make of it alone, and x and y are tensors whose
    first dimension is the rows. It holds for the class that says so, and not for classes derived from it.
    """

    separate_rows: ClassVar[bool] = False

    batch_size: int
    drop_last: bool = False  # whether a rank's last batch is left out if it is smaller than `batch_size`
    client: GivenClients = None
    keeps_rows: bool = False
    ahead: Ahead | None = None  # None: the worker itself reads each batch when it needs it
    ends: str = "first"  # if workers have unequal numbers of batches: the epoch ends with the "first" or the "last"
    _clients: Clients | None = None

    @abstractmethod
    def check(self) -> None:
        """Check the data before training. Raises DataError if the data is invalid, with file, column and row."""

    @abstractmethod
    def rows(self) -> int:
        """Return the number of rows in an epoch, over all ranks."""

    @property
    def has_length(self) -> bool:
        """Whether the number of rows is known."""
        return True

    def steps(self, size: int) -> int:
        """Return the number of batches that each of `size` ranks has in an epoch.

        Raises:
            DataError: no rank has a whole batch, and `drop_last` leaves out smaller ones.
        """
        most = math.ceil(self.rows() / size)
        if self.drop_last and most < self.batch_size:
            raise no_whole_batch(f"each of {size} workers has at most {counted(most)}", self.batch_size)
        return self.batches_of(most)

    def batches_of(self, rows: int) -> int:
        """Return into how many batches a rank's rows are cut."""
        return rows // self.batch_size if self.drop_last else math.ceil(rows / self.batch_size)

    def cut(self, rows: NDArray[np.int64], number: int) -> NDArray[np.int64]:
        """Return the rows of batch `number` among a rank's rows of an epoch.

        There are none if the batch would be smaller than `batch_size` and `drop_last` is True.
        """
        found = rows[number * self.batch_size : (number + 1) * self.batch_size]
        return found[:0] if self.drop_last and len(found) < self.batch_size else found

    @abstractmethod
    def batches(self, *, rank: int, size: int, seed: int, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of `rank` in an epoch, from batch number `start` on. They depend on the arguments only."""

    @property
    def independent(self) -> bool:
        """Whether each loader process reads rows of its own, so that the batches depend on their number."""
        return False

    def parts(self, processes: int) -> int:
        """Return among how many of `processes` loader processes the batches of a rank can be divided: 1 to `processes`.

        It is 1 if the batches can only be read in sequence.
        """
        return 1

    def part(
        self, place: Place, start: int = 0, position: Position | None = None
    ) -> Iterator[tuple[Batch, Position | None]]:
        """Yield the batches of one reader, from its batch number `start` on, each with the position after it.

        Of a rank's batches, process p of P reads the numbers p, p + P, p + 2P... `position` is one that was yielded
        before, of a batch at or before `start`; None if there is none.
        """
        first = place.process + start * place.processes
        found = self.batches(rank=place.rank, size=place.size, seed=place.seed, epoch=place.epoch, start=first)
        for batch in itertools.islice(found, 0, None, place.processes):
            yield batch, None

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        """The names of the columns of `Batch.x`, in order; None if they have no names. Raises DataError."""
        return None

    @property
    def has_row_numbers(self) -> bool:
        """Whether rows can be taken by number: whether `order` and `take` are there."""
        return False

    def order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the row numbers of an epoch in the order in which ranks take them."""
        raise NotImplementedError(f"{type(self).__name__} has no row numbers")

    def take(self, rows: NDArray[np.int64]) -> Batch:
        """Return a batch of the rows with these numbers, which may be none. Raises DataError if one cannot be read."""
        raise NotImplementedError(f"{type(self).__name__} has no row numbers")

    def loaded_by(self, workers: int, *, prefetch: int = 2) -> Self:
        """Return a copy of the data whose batches are read ahead by `workers` processes of each worker.

        Each process has up to `prefetch` batches ready. The batches are the same as without. With 0 workers a thread of
        the worker reads ahead. Evaluations read their data without processes. See `docs/loading.md`.

        Raises:
            ConfigError: `workers` is negative, or `prefetch` is below 1.

        Example:
            rayps.data.tensors(torch.randn(20, 3), batch_size=5).loaded_by(2)
        """
        for name, value, least in (("workers", workers, 0), ("prefetch", prefetch, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(
                    f"loaded_by: {name} is {value!r}: give a whole number of at least {least}", field=name
                )
        other = copy.copy(self)
        other.ahead = Ahead(workers, prefetch)
        return other

    def share(self, rank: int, size: int) -> int:
        """Return the number of rows that `rank` of `size` ranks gets in an epoch."""
        return len(range(rank, self.rows(), size))

    @property
    def divided(self) -> bool:
        """Whether the data is divided into clients."""
        return self.client is not None

    @property
    def clients(self) -> Clients:
        """The division of the rows into clients, computed at the first access.

        Raises:
            ConfigError: the data is not divided, or `client` does not suit the data.
            DataError: a column, id or label is not valid.
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

    def with_clients(self, client: GivenClients) -> Self:
        """Return a copy of the data that is divided by `client`: another rule, another column, or other ids."""
        other = copy.copy(self)
        other._take_clients(client)
        return other

    def _take_clients(self, client: GivenClients) -> None:
        self.client, self._clients = client, None

    def _divide(self) -> Clients:
        raise ConfigError(
            f"{type(self).__name__} cannot be divided into clients: use rayps.data.parquet, tensors or dataset",
            field="client",
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clients": None}


def check_place(rank: int, size: int, start: int) -> None:
    """Raise ConfigError unless 0 <= rank < size and start >= 0."""
    if not 0 <= rank < size or start < 0:
        raise ConfigError(f"rank {rank} of {size} from batch {start}: give 0 <= rank < size and start >= 0")


def rows_of_rank(rows: int, *, rank: int, size: int, seed: int | None, epoch: int) -> NDArray[np.int64]:
    """Return one rank's row numbers in an epoch: every `size`-th of a random permutation of all rows.

    If `seed` is None, the rows are not permuted.
    """
    if seed is None:
        return np.arange(rank, rows, size, dtype=np.int64)
    return random_of(seed, epoch).permutation(rows)[rank::size].astype(np.int64, copy=False)


def fixed_rows_of_rank(data: Data, *, rank: int, size: int, seed: int | None, epoch: int) -> NDArray[np.int64]:
    """Return one rank's row numbers in an epoch: the same rows in every epoch, in a new order.

    The rows are those that `rows_of_rank` returns for epoch 0. If the data is divided into clients, all rows are sorted
    by client and cut into `size` contiguous parts of equal length, one for each rank. If `seed` is None, the order of
    the rows does not change.
    """
    if data.divided:
        clients = data.clients
        mine = np.array_split(np.concatenate([clients.rows(k) for k in range(clients.count)]), size)[rank]
    else:
        mine = rows_of_rank(data.rows(), rank=rank, size=size, seed=seed, epoch=0)
    return mine if seed is None else random_of(seed, epoch, rank).permutation(mine)
