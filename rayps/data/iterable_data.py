"""Iterable data sets: rows without numbers and without a known count, such as a torch IterableDataset.

An epoch is one pass over the items. Its end is known when the items end. The workers then agree on it: see
`rayps.worker.batches`.

    shard="every"   each reader iterates over all items and keeps its own: rank r of N keeps item i if i mod N = r
    shard="own"     the data set yields only its reader's part, of which it asks `rayps.data.shard()`

Under "every", loader process p of P collates batch number b of its rank if b mod P = p: the batches do not depend on P.
Under "own", each process is a reader of its own, as in torch's DataLoader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from torch.utils.data import default_collate

from rayps.core.errors import ConfigError, DataError, RaypsError
from rayps.core.phase_rounds import OPEN
from rayps.core.user_code import place_of
from rayps.data.base import Batch, Data, Nested, Place, Position, batch_size_of, check_place
from rayps.data.clients import Clients
from rayps.data.data_shard import DataShard, Reading
from rayps.data.memory import collated
from rayps.data.position import from_json, to_json
from rayps.data.unsupported import refuse_ray_data

Item = TypeVar("Item", covariant=True)
STATE_EVERY = 10  # batches of a reader between two states of the data set
_END = object()


class IterableData(Data, Generic[Item]):
    """A data source that iterates over a data set. It has no length, and an epoch is one pass."""

    def __init__(
        self,
        source: Iterable[Item],
        *,
        batch_size: int,
        shard: str,
        ends: str,
        collate: Callable[[list[Item]], Nested | Batch] | None,
        drop_last: bool,
    ) -> None:
        for name, value, known in (("shard", shard, ("every", "own")), ("ends", ends, ("first", "last"))):
            if value not in known:
                raise ConfigError(f"iterable: {name} is {value!r}: give {known[0]!r} or {known[1]!r}", field=name)
        self.source, self.batch_size = source, batch_size_of(batch_size)
        self.shard, self.ends, self.drop_last = shard, ends, bool(drop_last)
        self.collate = collate or default_collate

    def check(self) -> None:
        """Raise DataError if the data set cannot be iterated over several times, or its first item cannot be read."""
        if not isinstance(self.source, Iterable):
            raise DataError(
                f"iterable: {type(self.source).__name__} has no __iter__: give a torch IterableDataset; "
                "rayps.data.dataset takes map-style data sets"
            )
        if isinstance(self.source, Iterator):
            raise DataError(
                f"iterable: a {type(self.source).__name__} can be read only once, and each epoch is a new pass: give "
                "an IterableDataset whose __iter__ starts again"
            )
        if next(self.batches(rank=0, size=1, seed=0, epoch=0), None) is None:
            raise DataError("iterable: the data set yields no item: there is nothing to train on")

    @property
    def has_length(self) -> bool:
        """False: an epoch is one pass, whose end is known when it happens."""
        return False

    def rows(self) -> int:
        """Raise ConfigError: the number of rows is not known."""
        raise ConfigError("the number of rows of rayps.data.iterable is not known: use rayps.data.dataset or parquet")

    @property
    def clients(self) -> Clients:
        """Raise ConfigError: rows without numbers cannot be divided into clients."""
        raise ConfigError(
            "federated strategies divide numbered rows into clients, and the rows of rayps.data.iterable have no "
            "numbers: use rayps.data.parquet, tensors or dataset with client=",
            field="client",
        )

    def share(self, rank: int, size: int) -> int:
        """Raise ConfigError: the number of rows is not known."""
        return self.rows()

    def steps(self, size: int) -> int:
        """Return `OPEN`. Raises ConfigError if a worker must have the same rows in every epoch."""
        if self.keeps_rows:
            raise ConfigError(
                "this strategy gives each worker the same rows in every epoch, and the rows of rayps.data.iterable "
                "have no numbers:\nuse rayps.data.dataset or parquet, or another strategy (parallel_sgd without "
                "shuffle=false, local_sgd)",
                field="strategy",
            )
        return OPEN

    def batches(self, *, rank: int, size: int, seed: int, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of `rank` in a new pass, from batch number `start` on. The items before it are read too."""
        check_place(rank, size, start)
        for batch, _ in self.part(Place(rank, size, seed, epoch), start):
            yield batch

    @property
    def independent(self) -> bool:
        """Whether the data set divides its items among loader processes."""
        return self.shard == "own"

    def parts(self, processes: int) -> int:
        """Return `processes`: each makes every `processes`-th batch, or reads a shard of its own."""
        return processes

    def part(
        self, place: Place, start: int = 0, position: Position | None = None
    ) -> Iterator[tuple[Batch, Position | None]]:
        """Yield the batches of one reader: see `Data.part`."""
        done, group = 0 if position is None else int(position["batches"]), list[Item]()
        for number, item in self._items(place, position):
            at = self._batch_of(number, place)
            if at is not None and at >= start:
                group.append(item)
            if at is None or not self._completes(number, place):
                continue
            done = at + 1
            if at >= start:
                made, group = self._collated(group), []
                yield made, self._position(number + 1, done)
        if group and not self.drop_last:
            yield self._collated(group), None

    def _batch_of(self, number: int, place: Place) -> int | None:
        """Return to which of the reader's batches item `number` of its pass belongs, or None if to none."""
        if self.shard == "own":
            return number // self.batch_size
        mine, rest = divmod(number, place.size)
        batch, process = divmod(mine // self.batch_size, place.processes)
        return batch if rest == place.rank and process == place.process else None

    def _completes(self, number: int, place: Place) -> bool:
        mine = number if self.shard == "own" else number // place.size
        return mine % self.batch_size == self.batch_size - 1

    def _items(self, place: Place, position: Position | None) -> Iterator[tuple[int, Item]]:
        """Yield the items of a pass with their numbers, from the position on."""
        own = self.shard == "own"
        here = (
            DataShard(place.rank * place.processes + place.process, place.size * place.processes)
            if own
            else DataShard(0, 1)
        )
        reading, number = Reading(here, place.seed + place.epoch, self.source), 0
        try:
            with reading.turn():
                if callable(set_epoch := getattr(self.source, "set_epoch", None)):
                    set_epoch(place.epoch)
                if position is not None:
                    number = int(position["items"])
                    self._load(position)
                iterator = iter(self.source)
            while True:
                with reading.turn():
                    item = next(iterator, _END)
                if item is _END:
                    return
                if own and here.size > 1 and not reading.asked:
                    raise DataError(_NOT_ASKED)
                yield number, item  # type: ignore[misc]
                number += 1
        except RaypsError:
            raise
        except Exception as error:
            raise DataError(
                f"iterable: item {number} of the pass of worker-{place.rank} cannot be read: "
                f"{type(error).__name__}: {error}{place_of(error)}",
                row=number,
            ) from error

    def _collated(self, items: list[Item]) -> Batch:
        return collated("iterable", self.collate, items)

    @property
    def saves_state(self) -> bool:
        """Whether the data set has `state_dict` and `load_state_dict`."""
        return all(callable(getattr(self.source, name, None)) for name in ("state_dict", "load_state_dict"))

    def _position(self, items: int, batches: int) -> Position | None:
        if batches % STATE_EVERY or not self.saves_state:
            return None
        state: Any = self.source.state_dict()  # type: ignore[attr-defined]
        return {"items": items, "batches": batches, "state": to_json(state)}

    def _load(self, position: Position) -> None:
        self.source.load_state_dict(from_json(position["state"]))  # type: ignore[attr-defined]


_NOT_ASKED = (
    'iterable: shard="own", and the data set did not ask for its shard: all workers would train on the same rows\n'
    "yield only the part that rayps.data.shard() or torch.utils.data.get_worker_info() names in __iter__, or give "
    'shard="every"'
)


def iterable(
    torch_iterable_dataset: Iterable[Item],
    *,
    batch_size: int = 32,
    shard: str = "every",
    ends: str = "first",
    collate: Callable[[list[Item]], Nested | Batch] | None = None,
    drop_last: bool = False,
) -> Data:
    """Use items of a `torch.utils.data.IterableDataset`, or of any object with `__iter__` that starts a new pass.

    An epoch is one pass, whose length need not be known. No row is repeated on several workers: with `shard="every"`
    each worker iterates over all items and keeps every N-th. With `shard="own"` the data set yields only the part that
    `rayps.data.shard()` or torch's `get_worker_info()` names, and a data set that asks neither is refused.

    If workers have unequal numbers of batches, the epoch ends with the first worker that has none (`ends="first"`; the
    rest of the others' items is not used), or the ended workers take part with empty batches until the last one ends
    (`ends="last"`). `drop_last` leaves out a worker's last batch if it is smaller than `batch_size`.

    `set_epoch(epoch)` of the data set is called before each pass if it exists. A resumed run reads the items before its
    position again, unless the data set has `state_dict()` and `load_state_dict()`.

    Raises:
        ConfigError: an option is not valid.
        DataError: the data set is a Ray Data dataset. `check()` finds other errors.

    Example:
        class Numbers(torch.utils.data.IterableDataset):
            def __iter__(self):
                return (torch.tensor([float(i)]) for i in range(20))

        len(list(rayps.data.iterable(Numbers(), batch_size=5).batches(rank=0, size=2, seed=0, epoch=0)))  # 2
    """
    refuse_ray_data("iterable", torch_iterable_dataset)
    return IterableData(
        torch_iterable_dataset, batch_size=batch_size, shard=shard, ends=ends, collate=collate, drop_last=drop_last
    )
