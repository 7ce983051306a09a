"""Data sources with random access to rows: tensors, and map-style torch Datasets. Rows are copied only into batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from rayps_client.errors import DataError, RaypsError
from rayps_client.rows import batch_size_of, check_lengths, check_rows, drop_last_of, native
from torch.utils.data import IterableDataset, default_collate

from rayps.data.base import (
    Batch,
    Data,
    Nested,
    Place,
    Position,
    check_place,
    fixed_rows_of_rank,
    map_tensors,
    rows_of_rank,
)
from rayps.data.clients import Clients, GivenClients, checked_client, divide
from rayps.data.partition_rules import Ints, PartitionRule
from rayps.data.unsupported import refuse_ray_data

Item = TypeVar("Item", covariant=True)
Array = NDArray[np.generic]


class MapStyle(Protocol[Item]):
    """What `dataset` needs of a map-style `torch.utils.data.Dataset`: a length, and access to items by number."""

    def __len__(self) -> int:
        """Return the number of items."""

    def __getitem__(self, row: int) -> Item:
        """Return item number `row`."""


class InMemory(Data):
    """A data source with random access to rows, which distributes a random permutation of its rows to the ranks."""

    shuffle: bool

    def _take(self, rows: Ints) -> Batch:
        raise DataError("this data set cannot return rows by number")

    def _labels(self) -> Array | None:
        """Return the label of each row, or None if the rows have no labels."""
        return None

    def _divide(self) -> Clients:
        wanted = isinstance(self.client, PartitionRule) and self.client.by_label
        return divide(self.client, self.rows(), self._labels() if wanted or self._cheap_labels else None, self._take)

    def _take_clients(self, client: GivenClients) -> None:
        super()._take_clients(checked_client(client))

    _cheap_labels = True

    def batches(self, *, rank: int, size: int, seed: int, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of `rank` from batch number `start` on.

        With batch size B, the k-th batches of all ranks together are the rows k*B*size to (k+1)*B*size - 1 of the
        permutation, unless `keeps_rows`.
        """
        check_place(rank, size, start)
        for batch, _ in self.part(Place(rank, size, seed, epoch), start):
            yield batch

    @property
    def has_row_numbers(self) -> bool:
        """True."""
        return True

    def order(self, seed: int, epoch: int) -> Ints:
        """Return the row numbers of an epoch: a permutation, or all in order without `shuffle`."""
        return rows_of_rank(self.rows(), rank=0, size=1, seed=seed if self.shuffle else None, epoch=epoch)

    def take(self, rows: Ints) -> Batch:
        """Return a batch of the rows with these numbers. Raises DataError if one cannot be read."""
        return self._take(rows)

    def parts(self, processes: int) -> int:
        """Return `processes`: rows are taken by number."""
        return processes

    def part(
        self, place: Place, start: int = 0, position: Position | None = None
    ) -> Iterator[tuple[Batch, Position | None]]:
        """Yield the batches of one reader: see `Data.part`."""
        rank, size, epoch = place.rank, place.size, place.epoch
        shuffled = place.seed if self.shuffle else None
        mine = (
            fixed_rows_of_rank(self, rank=rank, size=size, seed=shuffled, epoch=epoch)
            if self.keeps_rows
            else rows_of_rank(self.rows(), rank=rank, size=size, seed=shuffled, epoch=epoch)
        )
        for step in range(place.process + start * place.processes, self.steps(size), place.processes):
            yield self._take(self.cut(mine, step)), None


Rows = torch.Tensor | NDArray[np.generic]


class TensorData(InMemory):
    """A data source: the rows of a tensor `x`, and labels `y` of the same length. Their dtypes do not change."""

    separate_rows = True

    def __init__(
        self,
        x: Rows,
        y: Rows | None = None,
        *,
        batch_size: int = 32,
        shuffle: bool = True,
        drop_last: bool = False,
        client: GivenClients = None,
    ) -> None:
        self.client = checked_client(client)
        self.x = _tensor("x", x)
        self.y = None if y is None else _tensor("y", y)
        check_lengths(self.x, self.y)
        self.batch_size, self.drop_last = batch_size_of(batch_size), drop_last_of(drop_last)
        self.shuffle = shuffle

    def check(self) -> None:
        """Check the tensors. Raises DataError if there are no rows, or a value is NaN or infinite."""
        check_rows(self.x, self.y, _not_finite)

    def rows(self) -> int:
        """Return the length of x."""
        return len(self.x)

    def _labels(self) -> Array | None:
        return None if self.y is None else self.y.numpy(force=True)

    def _take(self, rows: Ints) -> Batch:
        index = torch.from_numpy(np.ascontiguousarray(rows))
        return Batch(self.x[index], None if self.y is None else self.y[index], len(rows))


def _tensor(name: str, value: Rows) -> torch.Tensor:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(native(value))
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        raise DataError(
            f"tensors: {name} is {type(value).__name__}: give a tensor or an array whose first dimension is the rows",
            column=name,
        )
    return value.detach()


def _not_finite(values: torch.Tensor) -> int | None:
    if not (values.is_floating_point() or values.is_complex()) or values.numel() == 0:
        return None
    bad = ~torch.isfinite(values).reshape(len(values), -1).all(dim=1)
    return int(bad.nonzero()[0]) if bool(bad.any()) else None


class DatasetData(InMemory, Generic[Item]):
    """A data source that reads a map-style torch Dataset. Its items are pairs (x, y), or x alone."""

    def __init__(
        self,
        source: MapStyle[Item],
        *,
        batch_size: int = 32,
        shuffle: bool = True,
        drop_last: bool = False,
        collate: Callable[[list[Item]], Nested | Batch] | None = None,
        client: GivenClients = None,
    ) -> None:
        self.client = checked_client(client)
        self.source = source
        self.batch_size, self.drop_last = batch_size_of(batch_size), drop_last_of(drop_last)
        self.shuffle = shuffle
        self.collate = collate or default_collate
        self._empty: Batch | None = None

    def check(self) -> None:
        """Raise DataError if the data set has no length or no rows, or its first item cannot be read."""
        if isinstance(self.source, IterableDataset) or not isinstance(self.source, Sized):
            raise DataError(
                "dataset: it has no length, and its rows cannot be distributed to ranks: give a "
                "map-style Dataset (with __len__ and __getitem__),\n"
                "or give an IterableDataset to rayps.data.iterable(...)"
            )
        if self.rows() == 0:
            raise DataError("dataset: it has no rows: there is nothing to train on")
        self._take(np.zeros(1, dtype=np.int64))

    def rows(self) -> int:
        """Return the length of the data set."""
        return len(self.source)

    _cheap_labels = False  # to get the labels, every item is read if the data set has no `targets`

    def _labels(self) -> Array | None:
        known = getattr(self.source, "targets", None)
        if known is not None and len(known) == self.rows():
            return np.asarray(known)
        made = [self._take(np.array([row])).y for row in range(self.rows())]
        if not all(isinstance(y, torch.Tensor) and y.numel() == 1 for y in made):
            return None if made[0] is None else np.zeros((len(made), 2))
        return torch.cat([y.reshape(1) for y in made]).numpy(force=True)

    def _take(self, rows: Ints) -> Batch:
        if len(rows):
            return self._collated([self._item(row) for row in rows.tolist()])
        if self._empty is None:
            one = self._collated([self._item(0)])
            self._empty = Batch(map_tensors(one.x, _no_rows), map_tensors(one.y, _no_rows), 0)
        return self._empty

    def _item(self, row: int) -> Item:
        try:
            return self.source[row]
        except RaypsError:
            raise
        except Exception as error:
            ended = isinstance(error, (IndexError, StopIteration))  # what a dataset that is shorter raises
            raise DataError(
                f"dataset: item {row} of {self.rows()} cannot be read: {type(error).__name__}: {error}"
                + (f"\n__len__ must return the number of items, and it returns {self.rows()}" if ended else ""),
                row=row,
            ) from error

    def _collated(self, items: list[Item]) -> Batch:
        return collated("dataset", self.collate, items)


def collated(call: str, collate: Callable[[list[Item]], Nested | Batch], items: list[Item]) -> Batch:
    """Return the batch that `collate` makes of items. Two values are x and y; any other value is x.

    Raises DataError, which names `rayps.data.<call>`, if `collate` fails.
    """
    try:
        made = collate(items)
    except Exception as error:
        raise DataError(
            f"{call}: {len(items)} items cannot be collated into a batch: {type(error).__name__}: {error}\n"
            + (
                'give items in this machine\'s byte order: x.astype(x.dtype.newbyteorder("="))'
                if "byte order" in str(error)
                else "give items of one shape, or a collate function"
            )
        ) from error
    if isinstance(made, Batch):
        return made
    if isinstance(made, (tuple, list)) and len(made) == 2:
        return Batch(made[0], made[1], len(items))
    return Batch(made, None, len(items))


def _no_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:0] if tensor.dim() else tensor  # such as a number that collate returned for the whole batch


def tensors(
    x: Rows,
    y: Rows | None = None,
    *,
    batch_size: int = 32,
    shuffle: bool = True,
    drop_last: bool = False,
    client: GivenClients = None,
) -> Data:
    """Use the rows of a tensor or numpy array `x`, and labels `y` of the same length. Every worker has all rows.

    `drop_last` leaves out the last batch of each worker, or of each client, if it is smaller than `batch_size`. The
    same option of the other sources has this meaning too.

    `client` divides the rows into clients for federated strategies. It is a rule such as
    `rayps.data.shards(2, clients=20)`, or an id for each row (whole numbers or text).

    Raises:
        ConfigError: `client` is neither a rule nor ids.
        DataError: `x` or `y` is not a tensor or array, or their lengths differ. `check()` and `clients` find other
            errors.

    Example:
        rayps.data.tensors(torch.randn(20, 3), torch.randn(20, 1), batch_size=5).rows()  # 20
    """
    refuse_ray_data("tensors", x, y)
    return TensorData(x, y, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, client=client)


def dataset(
    torch_dataset: MapStyle[Item],
    *,
    batch_size: int = 32,
    shuffle: bool = True,
    drop_last: bool = False,
    collate: Callable[[list[Item]], Nested | Batch] | None = None,
    client: GivenClients = None,
) -> Data:
    """Use items of any map-style `torch.utils.data.Dataset`, collated as torch's DataLoader does.

    Random transforms inside the data set use torch's global seed, not the job's seed. `client` divides the rows as in
    `tensors`. A rule by label reads the labels from the data set's attribute `targets`, or from every item if there is
    no such attribute.

    Raises:
        ConfigError: `client` is neither a rule nor ids, or `batch_size` is not a whole number above 0.
        DataError: the data set is a Ray Data dataset. `check()` and `clients` find other errors.

    Example:
        pairs = torch.utils.data.TensorDataset(torch.randn(20, 3), torch.randn(20, 1))
        rayps.data.dataset(pairs, batch_size=5).rows()  # 20
    """
    refuse_ray_data("dataset", torch_dataset)
    return DatasetData(
        torch_dataset, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, collate=collate, client=client
    )
