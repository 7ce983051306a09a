"""The batches of one replica, in order, over epochs. The position is counted in steps since the start of the run.

A step takes `accumulate` consecutive batches of the data, its micro-batches. The last step of an epoch may have fewer.

If the data has no length, an epoch ends when its batches end. One step is read in advance, so that a worker knows with
each step whether it has another. In step, the workers exchange this as flags of the step (`state`), and end the epoch
in the same round (`is_over`, `end_epoch`). A replica that is `alone` ends its epochs by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rayps_client.errors import CheckpointError, DataError
from rayps_client.values import Json, JsonObject

from rayps.core.job.records import Event
from rayps.core.job.user_code import user_code
from rayps.core.rows.rank_seed import derive_block_seed
from rayps.core.rows.step_rows import RowBlock, StepRows
from rayps.data.base import Batch, Data, Position, map_tensors
from rayps.worker.exchange.step_flags import DATA_ENDED, DATA_LEFT, DATA_SEEN, StepFlags
from rayps.worker.rows.block_readers import BlockReader, Reads, SequenceReader, step_of
from rayps.worker.rows.lease_book import LeaseBook

_ORIGINS = 8  # the number of newest epochs whose first positions are known


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
        self,
        data: Data,
        blocks: StepRows,
        reader: BlockReader,
        place: tuple[int, int],
        seed: int,
        steps: int,
        *,
        accumulate: int = 1,
        open_pass: OpenPass | None = None,
    ) -> None:
        """Read what `blocks` says for replica `place` = (rank, size) of `data`, by `reader`.

        Epochs have `steps` steps of at most `accumulate` batches. If `steps` is `OPEN`, they end when the data ends,
        and `open_pass` is the pass over the data.
        """
        self.accumulate = accumulate
        self.data, self.blocks, self.seed, self.steps_per_epoch = data, blocks, seed, steps
        self.rank, self.size = place
        self.position = 0
        self.weight: float = 0  # weight of the last batch: its rows, until a loss says another weight
        self.ahead: Callable[[Batch | None], None] | None = None  # called with each batch one round before its own
        self.pass_ = open_pass
        self.leases: LeaseBook | None = None  # if rows are leased
        self._reader = reader
        self._coming: Batch | None = None  # the next batch, if it was read in advance
        self._kept: tuple[RowBlock, Batch] | None = None  # the last block and its rows, if they may be taken again

    def epoch_of(self, position: int) -> tuple[int, int]:
        """Return the epoch of a position, and the number of the batch within this epoch."""
        if self.pass_ is None:
            return self.blocks.epoch_of(position)
        began, before = self.pass_.origin_of(position)
        return before, position - began

    def take(self, end: int) -> Batch:
        """Return the next batch. If `ahead` is set, also read the batch after it, and call `ahead` with that batch.

        No batch at position `end` or later, and none that is not known yet, is read in advance. A batch is empty if the
        replica has no rows in the step, or after the last one of an epoch of data without a length.

        Raises DataError or WorkloadError if a batch cannot be read.
        """
        if self.pass_ is not None:
            return self._take_open(self.pass_, end)
        batch, self._coming = self._coming, None
        if batch is None:
            batch = self._read(self.position)
        if self.blocks.seeds:
            torch.manual_seed(derive_block_seed(self.seed, *self.epoch_of(self.position), read=False))
        self.position += 1
        if self.ahead is not None and self.position < end and self.blocks.is_known(self.position):
            random = torch.get_rng_state() if self.blocks.seeds else None
            self._coming = self._read(self.position)
            if random is not None:
                torch.set_rng_state(random)
        self.weight = batch.size
        return batch

    def change_shares(self, data: Data, reader: BlockReader, accumulate: int) -> None:
        """Take the next batches from `data` by `reader`, in steps of at most `accumulate`.

        Its epochs have as many steps as before. Only for data with a length.
        """
        assert self.pass_ is None, "the data has a length"
        self.close()
        self.data, self.accumulate, self._reader, self._coming = data, accumulate, reader, None

    def close(self) -> None:
        """End the loader processes and threads."""
        self._reader.close()

    def events(self) -> list[Event]:
        """Return the events of the loader since the last call."""
        return self._reader.events()

    def _read(self, position: int) -> Batch:
        block = self.blocks.block(position)
        if block is None:
            return Batch(None, None, 0)
        if self._kept is not None and block.has_rows_of(self._kept[0]):
            return self._kept[1]
        if self.blocks.seeds:
            torch.manual_seed(derive_block_seed(self.seed, block.epoch, block.number, read=True))
        with user_code("data"):
            batch = self._reader.read(block)
        if self.blocks.repeats:
            self._kept = block, batch
        elif self.ahead is not None:
            self.ahead(None if batch.parts else batch)  # rows of several micro-batches are not pulled in advance
        return batch

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
            raise self._explain_no_batch("" if first else " on any worker")
        return over

    def end_epoch(self) -> int:
        """End the epoch with the batches that were taken. Return the number of the next epoch."""
        assert self.pass_ is not None
        self._coming = None
        return self.pass_.end(self.position)

    def cursor(self) -> Cursor | None:
        """Return from where this replica continues, or None if that follows from the position."""
        return None if self.pass_ is None else self.pass_.cursor(self.position)

    def restore(self, cursor: Cursor | None) -> None:
        """Continue from a cursor. `None`: only the position is known, and all batches before it are read again.

        Raises:
            CheckpointError: with another number of loader processes, the batches would be others.
        """
        if self.pass_ is None or cursor is None:
            return
        processes = self.pass_.source.processes
        if cursor.processes != processes:
            if self.data.independent:
                raise CheckpointError(
                    f"the checkpoint was written with {cursor.processes} loader processes for each worker, and this "
                    f'run has {processes}: with shard="own" the batches depend on this number\n'
                    f"give loaded_by({cursor.processes}), or start without resume"
                )
            cursor = Cursor(cursor.origins)
        self.pass_.restore(cursor)

    def _explain_no_batch(self, where: str) -> DataError:
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
                now.reads = now.source.open(self._make_block(epoch, index), known)
            self._coming = self._read_next(now)
            if self._coming is None and now.alone:  # the position is behind this epoch's end, or the epoch is empty
                self._end_alone(now, epoch, index)
        batch, self._coming = self._coming, None
        if batch is None:
            batch = now.empty()
        else:
            now.seen, now.last = True, batch
        self.position += 1
        if now.left and self.position < end:
            self._coming = self._read_next(now)
        if now.alone and not now.left:
            self.end_epoch()
        self.weight = batch.size
        return batch

    def _make_block(self, epoch: int, index: int) -> RowBlock:
        return RowBlock(self.position, epoch, index, self.rank, self.size)

    def _end_alone(self, now: OpenPass, epoch: int, index: int) -> None:
        """End an epoch that has no batch number `index`, and find the epoch in which the position is."""
        with user_code("data"):
            count = sum(1 for _ in now.source.open(self._make_block(epoch, 0)))
        if not count:
            raise self._explain_no_batch("")
        now.end(self.position - index + count)

    def _read_next(self, now: OpenPass) -> Batch | None:
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

    def __init__(self, source: SequenceReader, origins: tuple[tuple[int, int], ...], *, alone: bool) -> None:
        """Begin to read `source`. `origins` are the first position and the number of each of the newest epochs.

        `alone`: whether the replica ends its epochs by itself.
        """
        self.source, self.alone = source, alone
        self.left = True  # whether there is a batch after the last one taken
        self.seen = False  # whether the epoch has had a batch on this worker
        self.last: Batch | None = None
        self.reads: Reads | None = None  # None before the first batch of a pass is read
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
            return step_of((Batch(map_tensors(one.x, _drop_rows), map_tensors(one.y, _drop_rows), 0),))
        return Batch(map_tensors(self.last.x, _drop_rows), map_tensors(self.last.y, _drop_rows), 0)

    def cursor(self, position: int) -> Cursor:
        """Return the cursor at a position, which may be one batch behind what was read."""
        index = position - self.origin_of(position)[0]
        held = [each for each in self.known if each[0] <= index]
        count, known = held[-1] if held else (0, None)
        return Cursor(self._origins, count, known, self.source.processes)

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


def _drop_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:0].clone() if tensor.dim() else tensor
