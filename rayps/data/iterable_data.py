"""Iterable data sets: rows without numbers and without a known count, such as a torch IterableDataset.

An epoch is one pass over the items. Its end is known when the items end. The workers then agree on it: see
`rayps.worker.rows.batches`.

    shard="every"   each reader iterates over all items and keeps its own: rank r of N keeps item i if i mod N = r
    shard="own"     the data set yields only its reader's part, of which it asks `rayps.data.shard()`

Under "every", loader process p of P collates batch number b of its rank if b mod P = p: the batches do not depend on P.
Under "own", each process is a reader of its own, as in torch's DataLoader.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator, Iterable, Iterator, MutableMapping
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from rayps_client.errors import ConfigError, DataError, RaypsError
from rayps_client.rows import batch_size_of, drop_last_of
from rayps_client.values import Json
from torch.utils.data import default_collate

from rayps.core.job.user_code import place_of
from rayps.core.rows.phase_rounds import OPEN
from rayps.data.base import Batch, Data, Nested, Place, Position, check_place
from rayps.data.clients import Clients
from rayps.data.data_shard import DataShard, Reading
from rayps.data.memory import collated
from rayps.data.pass_random import PassRandom
from rayps.data.position import from_json, to_json
from rayps.data.unsupported import refuse_ray_data

Item = TypeVar("Item", covariant=True)
STATE_EVERY = 10  # batches of a reader between two states of the data set


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
        self.shard, self.ends, self.drop_last = shard, ends, drop_last_of(drop_last)
        self.collate = collate or default_collate
        self._first: Json = None  # the data set's state before its first pass, if the set cannot be a key of `_FIRST`

    def check(self) -> None:
        """Raise DataError if the data set cannot be iterated over several times, or its first item cannot be read.

        The first batch is read from a copy of the data set, so that what it counts in itself does not change.
        """
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
        probe = copy.copy(self)
        with contextlib.suppress(Exception):  # the class may forbid copies
            probe.source = copy.copy(self.source)
        before, found = self._state(), probe.batches(rank=0, size=1, seed=0, epoch=0)
        if next(found, None) is None:
            raise DataError("iterable: the data set yields no item: there is nothing to train on")
        found.close()
        self._load(before)  # the copy shares what the data set refers to

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

    def batches(self, *, rank: int, size: int, seed: int, epoch: int, start: int = 0) -> Generator[Batch, None, None]:
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
        before = self._state()
        items = _Items(self, place, position)
        try:
            while not items.ended:
                at, group = items.next_batch(start)
                complete = len(group) == self.batch_size
                if group and (complete or not self.drop_last):
                    made = self._collated(group)
                    yield made, self._position(items, at + 1) if complete else None
        finally:
            self._load(before)  # the next pass starts there, also if this one is abandoned

    def batch_of(self, number: int, place: Place) -> int | None:
        """Return to which of the reader's batches item `number` of its pass belongs, or None if to none."""
        if self.shard == "own":
            return number // self.batch_size
        mine, rest = divmod(number, place.size)
        batch, process = divmod(mine // self.batch_size, place.processes)
        return batch if rest == place.rank and process == place.process else None

    def completes(self, number: int, place: Place) -> bool:
        """Return whether item `number` of the pass is the last one of a batch."""
        mine = number if self.shard == "own" else number // place.size
        return mine % self.batch_size == self.batch_size - 1

    def _collated(self, items: list[Item]) -> Batch:
        return collated("iterable", self.collate, items)

    @property
    def saves_state(self) -> bool:
        """Whether the data set has `state_dict` and `load_state_dict`."""
        return all(callable(getattr(self.source, name, None)) for name in ("state_dict", "load_state_dict"))

    def begin(self, epoch: int, position: Position | None) -> None:
        """Bring the data set to the start of a pass, or to a position in it.

        A data set with a state may continue where an earlier pass has stopped. Therefore each pass starts from the
        state that the data set had before its first pass.
        """
        first = self._first_state() if position is None else None
        set_epoch = getattr(self.source, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        if position is not None:
            self._load(position["state"])
        elif self._load(first) and callable(set_epoch):
            set_epoch(epoch)

    def _first_state(self) -> Json:
        """Return the state before the first pass over the data set, or None if it has none.

        Several objects of this class may read one data set, of which one may be in the middle of a pass.
        """
        try:
            if self.source not in _FIRST:
                _FIRST[self.source] = self._state()
            return _FIRST[self.source]
        except TypeError:  # the data set cannot be a key
            self._first = self._state() if self._first is None else self._first
            return self._first

    def _state(self) -> Json:
        """Return the data set's state, or None if it has none that can be saved."""
        if not self.saves_state:
            return None
        with contextlib.suppress(Exception):  # it may have no state before it was read
            return to_json(self.source.state_dict())  # type: ignore[attr-defined]
        return None

    def _load(self, state: Json) -> bool:
        """Load a state unless it is that of the data set already, or None. Return whether it was loaded."""
        if state is None or self._state() == state:
            return False
        self.source.load_state_dict(from_json(state))  # type: ignore[attr-defined]
        return True

    def _position(self, items: _Items[Item], batches: int) -> Position | None:
        """Return the position after so many batches of a pass, or None if the rest depends on more than the state."""
        if batches % STATE_EVERY or not self.saves_state or items.random.drawn:
            return None
        state: Any = self.source.state_dict()  # type: ignore[attr-defined]
        return {"items": items.number, "batches": batches, "state": to_json(state)}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, in which the data set starts as it did here."""
        return {**super().__getstate__(), "_first": self._first_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what `__getstate__` returned."""
        self.__dict__.update(state)
        if self._first is not None:
            with contextlib.suppress(TypeError):
                _FIRST[self.source] = self._first


class _Items(Generic[Item]):
    """The items of one pass of one reader, in batches."""

    def __init__(self, data: IterableData[Item], place: Place, position: Position | None) -> None:
        own = data.shard == "own"
        reader = place.rank * place.processes + place.process
        self._here = DataShard(reader, place.size * place.processes) if own else DataShard(0, 1)
        self.random = PassRandom(place.seed, place.epoch, self._here.rank)
        self.number = 0 if position is None else int(position["items"])
        self.ended = False
        self._data, self._place, self._position = data, place, position
        self._reading = Reading(self._here, place.seed + place.epoch, data.source)
        self._iterator: Iterator[Item] | None = None

    def next_batch(self, start: int) -> tuple[int, list[Item]]:
        """Read to the end of the reader's next batch from number `start` on, or of the pass.

        Return the batch's number and its items, which are fewer at the end of the pass.
        """
        data, group, at = self._data, list[Item](), start
        try:
            with self.random.drawing(), self._reading.turn():
                if self._iterator is None:
                    data.begin(self._place.epoch, self._position)
                    self._iterator = iter(data.source)
                for item in self._iterator:
                    number, self.number = self.number, self.number + 1
                    batch = data.batch_of(number, self._place)
                    if batch is None or batch < start:
                        continue
                    group.append(item)
                    at = batch
                    if data.completes(number, self._place):
                        break
                else:
                    self.ended = True
        except RaypsError:
            raise
        except Exception as error:
            raise DataError(
                f"iterable: item {self.number} of the pass of worker-{self._place.rank} cannot be read: "
                f"{type(error).__name__}: {error}{place_of(error)}",
                row=self.number,
            ) from error
        if self.number and self._here.size > 1 and not self._reading.asked:
            raise DataError(_NOT_ASKED)
        return at, group


# from a data set to its state before its first pass
_FIRST: MutableMapping[object, Json] = WeakKeyDictionary()

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
