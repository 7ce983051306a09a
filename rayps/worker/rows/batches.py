"""The batches of one replica, in order, over epochs. The position is counted in steps since the start of the run.

A step takes `accumulate` consecutive batches of the data, its micro-batches. The last step of an epoch may have fewer.

If the data has no length, an epoch ends when its batches end. One step is read in advance, so that a worker knows with
each step whether it has another. In step, the workers exchange this as flags of the step (`state`), and end the epoch
in the same round (`is_over`, `end_epoch`). A replica that is `alone` ends its epochs by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

import torch
from rayps_client.errors import CheckpointError, DataError
from rayps_client.values import Json, JsonObject

from rayps.core.job.records import Event
from rayps.core.job.user_code import user_code
from rayps.core.rows.phase_rounds import OPEN
from rayps.data.base import Batch, Data, Place, Position, map_tensors
from rayps.data.loader import Loader
from rayps.worker.exchange.step_flags import DATA_ENDED, DATA_LEFT, DATA_SEEN, StepFlags

_ORIGINS = 8  # the number of newest epochs whose first positions are known

Read: TypeAlias = Iterator[tuple[Batch, Position | None]]


@dataclass(frozen=True, slots=True)
class Cursor:
    """From where a replica continues in data without a length.

    `origins` are the first position and the number of each of the newest epochs. `position` is what `Data.part` yielded
    after `batches` batches of the epoch, or None. `processes` is the number of loader processes.
    """

    origins: tuple[tuple[int, int], ...]
    batches: int = 0
    position: Position | None = None
    processes: int = 0

    def to_json(self) -> JsonObject:
        """Return the cursor as JSON data."""
        found: Json = None if self.position is None else dict(self.position)
        origins = [list(each) for each in self.origins]
        return {"origins": origins, "batches": self.batches, "position": found, "processes": self.processes}


class BatchStream:
    """The batches of one replica. `position` is the number of steps taken since the start of the run."""

    def __init__(
        self, data: Data, place: tuple[int, int], seed: int, origin: tuple[int, int], steps: int, *, accumulate: int = 1
    ) -> None:
        """Iterate over `data` for replica `place` = (rank, size).

        Epochs have `steps` steps of at most `accumulate` batches, and are counted from `origin` = (round, epoch). If
        `steps` is `OPEN`, they end when the data ends.
        """
        self.accumulate = accumulate
        self.data, self.seed, self.origin, self.steps_per_epoch = data, seed, origin, steps
        self.rank, self.size = place
        self.position = 0
        self.weight: float = 0  # weight of the last batch: its rows, until a loss says another weight
        self.ahead: Callable[[Batch | None], None] | None = None  # called with each batch one round before its own
        self.loader = Loader(data) if data.ahead is not None else None
        self._batches: Read = iter(())
        self._epoch = -1
        self._coming: Batch | None = None  # the next batch, if it was read in advance
        self.pass_ = OpenPass((origin,)) if steps >= OPEN else None

    def epoch_of(self, position: int) -> tuple[int, int]:
        """Return the epoch of a position, and the number of the batch within this epoch."""
        began, before = self.origin if self.pass_ is None else self.pass_.origin_of(position)
        epoch, index = divmod(position - began, self.steps_per_epoch)
        return before + epoch, index

    def take(self, end: int) -> Batch:
        """Return the next batch. If `ahead` is set, also read the batch after it, and call `ahead` with that batch.

        No batch at position `end` or later is read in advance. If the data has no length, the batch is empty after the
        last one of the epoch. Raises DataError or WorkloadError if a batch cannot be read.
        """
        if self.pass_ is not None:
            return self._take_open(self.pass_, end)
        batch, self._coming = self._coming, None
        if batch is None:
            batch = self._made(self.position)
        self.position += 1
        if self.ahead is not None and self.position < end:
            self._coming = self._made(self.position)
        self.weight = batch.size
        return batch

    def change_data(self, data: Data, accumulate: int) -> None:
        """Take the next batches from `data`, in steps of at most `accumulate`. Its epochs have as many steps as before.

        Only for data with a length.
        """
        assert self.pass_ is None, "the data has a length"
        self.close()
        self.data, self.accumulate = data, accumulate
        self.loader = Loader(data) if data.ahead is not None else None
        self._batches, self._epoch, self._coming = iter(()), -1, None

    def close(self) -> None:
        """End the loader processes and threads."""
        if self.loader is not None:
            self.loader.close()

    def events(self) -> list[Event]:
        """Return the events of the loader since the last call."""
        return [] if self.loader is None else self.loader.take_events()

    def _made(self, position: int) -> Batch:
        epoch, index = self.epoch_of(position)
        with user_code("data"):
            if epoch != self._epoch:
                self._epoch = epoch
                self._batches = self._read(epoch, index, None)
            batch, _ = next(self._batches)
        if self.ahead is not None:
            self.ahead(None if batch.parts else batch)  # rows of several micro-batches are not pulled in advance
        return batch

    def _read(self, epoch: int, step: int, position: Position | None) -> Read:
        """Return the batches of an epoch from step number `step` on, each with the position after it, or None."""
        found = self._read_micro(epoch, step * self.accumulate, position)
        return found if self.accumulate == 1 else _grouped(found, self.accumulate)

    def _read_micro(self, epoch: int, start: int, position: Position | None) -> Read:
        place = Place(self.rank, self.size, self.seed, epoch)
        if self.loader is not None:
            return self.loader.read(place, start, position)
        if self.pass_ is not None:
            return self.data.part(place, start, position)
        found = self.data.batches(rank=place.rank, size=place.size, seed=place.seed, epoch=epoch, start=start)
        return ((batch, None) for batch in found)

    # ---- data without a length

    @property
    def agrees(self) -> bool:
        """Whether the workers agree on the end of each epoch."""
        return self.pass_ is not None and not self.pass_.alone

    def state(self, flags: StepFlags) -> None:
        """State in the flags of this step whether there is a batch for the next step."""
        if self.pass_ is not None:
            flags.state(DATA_ENDED, not self.pass_.left)
            flags.state(DATA_LEFT, self.pass_.left)
            flags.state(DATA_SEEN, self.pass_.seen)

    def is_over(self, flags: StepFlags) -> bool:
        """Return whether the epoch ends with this round, by the flags that were exchanged.

        Raises:
            DataError: the epoch has no batch on any worker or, if epochs end with the first worker, on this worker.
        """
        assert self.pass_ is not None
        first = self.data.ends == "first"
        over = flags.stated(DATA_ENDED) if first else not flags.stated(DATA_LEFT)
        if over and not (self.pass_.seen if first else flags.stated(DATA_SEEN)):
            raise self._no_batch("" if first else " on any worker")
        return over

    def end_epoch(self) -> int:
        """End the epoch with the batches that were taken. Return the number of the next epoch."""
        assert self.pass_ is not None
        self._coming = None
        return self.pass_.end(self.position)

    def cursor(self) -> Cursor | None:
        """Return from where this replica continues, or None if that follows from the position."""
        return None if self.pass_ is None else replace(self.pass_.cursor(self.position), processes=self._processes)

    def restore(self, cursor: Cursor | None) -> None:
        """Continue from a cursor. `None`: only the position is known, and all batches before it are read again.

        Raises:
            CheckpointError: with another number of loader processes, the batches would be others.
        """
        if self.pass_ is None or cursor is None:
            return
        if cursor.processes != self._processes:
            if self.data.independent:
                raise CheckpointError(
                    f"the checkpoint was written with {cursor.processes} loader processes for each worker, and this "
                    f'run has {self._processes}: with shard="own" the batches depend on this number\n'
                    f"give loaded_by({cursor.processes}), or start without resume"
                )
            cursor = Cursor(cursor.origins)
        self.pass_.restore(cursor)

    @property
    def _processes(self) -> int:
        return 0 if self.loader is None else self.loader.processes

    def _no_batch(self, where: str) -> DataError:
        epoch = self.epoch_of(max(self.position - 1, 0))[0]
        other = 'or ends="last"' if self.data.ends == "first" else "or look why the data set yields nothing"
        way = f"use fewer workers, {other}"
        if epoch:
            way = "each epoch is a new pass, and __iter__ must start again: does it return an iterator that has ended?"
        who = where or f" for worker-{self.rank}"
        return DataError(f"the data has no batch{who} in epoch {epoch + 1}:\n{way}", epoch=epoch)

    def _take_open(self, now: OpenPass, end: int) -> Batch:
        while now.reads is None:
            epoch, index = self.epoch_of(self.position)
            known = now.begin(index)
            with user_code("data"):
                now.reads = self._read(epoch, index, known)
            self._coming = self._next(now)
            if self._coming is None and now.alone:  # the position is behind this epoch's end, or the epoch is empty
                self._end_alone(now, epoch, index)
        batch, self._coming = self._coming, None
        if batch is None:
            batch = now.empty()
        else:
            now.seen, now.last = True, batch
        self.position += 1
        if now.left and self.position < end:
            self._coming = self._next(now)
        if now.alone and not now.left:
            self.end_epoch()
        self.weight = batch.size
        return batch

    def _end_alone(self, now: OpenPass, epoch: int, index: int) -> None:
        """End an epoch that has no batch number `index`, and find the epoch in which the position is."""
        with user_code("data"):
            count = sum(1 for _ in self._read(epoch, 0, None))
        if not count:
            raise self._no_batch("")
        now.end(self.position - index + count)

    def _next(self, now: OpenPass) -> Batch | None:
        """Return the next batch of the epoch, or None if the epoch has ended."""
        assert now.reads is not None
        with user_code("data"):
            batch, position = next(now.reads, (None, None))
        now.left = batch is not None
        if batch is None:
            return None
        now.count += 1
        if position is not None:
            now.known.append((now.count, position))
        if self.ahead is not None:
            self.ahead(None if batch.parts else batch)
        return batch


class OpenPass:
    """The current pass over data without a length, of one replica."""

    def __init__(self, origins: tuple[tuple[int, int], ...]) -> None:
        self.alone = False  # whether the replica ends its epochs by itself
        self.left = True  # whether there is a batch after the last one taken
        self.seen = False  # whether the epoch has had a batch on this worker
        self.last: Batch | None = None
        self.reads: Read | None = None  # None before the first batch of a pass is read
        self.count = 0  # number of batches of the epoch that were read
        # positions in the data after so many batches of the epoch, the newest last
        self.known: deque[tuple[int, Position]] = deque(maxlen=3)
        self._origins = origins

    def origin_of(self, position: int) -> tuple[int, int]:
        """Return the first position and the number of the epoch of a position."""
        return next((each for each in reversed(self._origins) if each[0] <= position), self._origins[0])

    @property
    def ended(self) -> bool:
        """Whether a pass has ended in this run."""
        return self._origins[-1][1] > 0

    def begin(self, index: int) -> Position | None:
        """Begin to read from batch `index` of the epoch. Return the newest known position at or before this batch."""
        found = max((each for each in self.known if each[0] <= index), key=lambda each: each[0], default=None)
        self.left, self.seen, self.count = True, index > 0, index
        return None if found is None else found[1]

    def end(self, position: int) -> int:
        """End the epoch before `position`. Return the number of the next epoch."""
        epoch = self._origins[-1][1] + 1
        self._origins = (*self._origins, (position, epoch))[-_ORIGINS:]
        self.reads, self.left = None, True
        self.known.clear()
        return epoch

    def empty(self) -> Batch:
        """Return a batch without rows, of the form of the last batch."""
        if self.last is None:
            return Batch(None, None, 0)
        if self.last.parts:
            one = self.last.parts[0]
            return step_of((Batch(map_tensors(one.x, _no_rows), map_tensors(one.y, _no_rows), 0),))
        return Batch(map_tensors(self.last.x, _no_rows), map_tensors(self.last.y, _no_rows), 0)

    def cursor(self, position: int) -> Cursor:
        """Return the cursor at a position, which may be one batch behind what was read."""
        index = position - self.origin_of(position)[0]
        held = [each for each in self.known if each[0] <= index]
        return Cursor(self._origins, *held[-1]) if held else Cursor(self._origins)

    def restore(self, cursor: Cursor) -> None:
        """Continue from a cursor."""
        self._origins = cursor.origins
        self.known.clear()
        if cursor.position is not None:
            self.known.append((cursor.batches, cursor.position))


def cursor_of(given: JsonObject) -> Cursor:
    """Return the cursor that `Cursor.to_json` wrote."""
    origins: list[list[int]] = given["origins"]  # type: ignore[assignment]
    first = tuple((at, epoch) for at, epoch in origins)
    return Cursor(first, given["batches"], given["position"], given["processes"])  # type: ignore[arg-type]


def _no_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:0].clone() if tensor.dim() else tensor


def step_of(parts: tuple[Batch, ...]) -> Batch:
    """Return the batch of one step with these micro-batches."""
    return Batch(None, None, sum(part.size for part in parts), parts)


def _grouped(reads: Read, size: int) -> Read:
    """Yield groups of `size` batches as one step, each with the position after its last batch."""
    while group := list(islice(reads, size)):
        yield step_of(tuple(batch for batch, _ in group)), group[-1][1]
