"""The batches of a worker with backup workers: its portion of each step, which it keeps while it is dropped.

See `rayps.core.rows.portions`. A portion is a batch of one of N ranks. Its rows are taken by number if the data has row
numbers. Of other data, the worker reads the batches of each share up to the one that it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from rayps_client.errors import ConfigError
from torch import Tensor, tensor

from rayps.core.job.user_code import user_code
from rayps.core.rows.portions import NOTHING, PortionsPlan, PortionsWalk
from rayps.core.strategy.topology import backup_in
from rayps.data.base import Batch, Data
from rayps.tensors.snapshot import Snapshot
from rayps.worker.plan import WorkerPlan
from rayps.worker.rows.batches import BatchStream, step_of
from rayps.workload.base import Workload

STATE = "portions"  # the key of the state in the values that are equal on all workers


class PortionStream(BatchStream):
    """The portions of one worker. `position` is the number of steps that it has begun."""

    def __init__(self, data: Data, plan: WorkerPlan, steps: int, *, accumulate: int) -> None:
        """Iterate over `data` in epochs of `steps` steps of at most `accumulate` batches."""
        place = plan.place.data, plan.grid.data
        super().__init__(data, place, plan.seed, plan.origin, steps, accumulate=accumulate)
        shares = self.size - backup_in(plan.strategy)
        self._plan = PortionsPlan(shares, self.size, steps, plan.origin)
        self.walk = PortionsWalk(self._plan, max(plan.start, 0))
        self._held: tuple[int, int] | None = None  # the epoch and the portion of the last batch that was read
        self._batch = Batch(None, None, 0)
        self._shares = ShareReader(data, shares, plan.seed, accumulate)

    @classmethod
    def of(cls, workload: Workload, plan: WorkerPlan) -> PortionStream:
        """Return the portions of a worker under a plan. Raises DataError or WorkloadError if the data fails."""
        with user_code("data"):
            rows = plan.strategy.rows
            data = rows.source(workload)
            steps = rows.rounds(data, plan.grid.data - backup_in(plan.strategy), workload.accumulate)
        return cls(data, plan, steps, accumulate=workload.accumulate)

    def begin_at(self, position: int, state: Sequence[int] | None) -> None:
        """Continue at a position, with the state of a snapshot there. A state of another run is ignored."""
        self.position = position
        try:
            self.walk = PortionsWalk(self._plan, position, state)
        except ValueError:  # the snapshot is of another number of workers, or of a run without backup workers
            self.walk = PortionsWalk(self._plan, position)

    def take(self, end: int) -> Batch:
        """Return the batch of this step: the one of the last step if the worker was dropped.

        It is empty if the worker has no portion. Raises DataError or WorkloadError if the batch cannot be read.
        """
        portion = self.walk.now.held[self.rank]
        epoch = self.epoch_of(self.position)[0]
        self.position += 1
        if portion == NOTHING:
            self._held, self._batch = None, Batch(None, None, 0)
        elif self._held != (epoch, portion):
            with user_code("data"):
                self._batch = self._shares.read(epoch, *self.walk.now.place(portion))
            self._held = epoch, portion
        self.weight = self._batch.size
        return self._batch

    def must_be_over(self, name: str) -> None:
        """Raise ConfigError if the strategy's round has not computed a gradient with the batch. `name`: how it must."""
        if self.walk.step != self.position:
            raise ConfigError(
                f"with backup workers a strategy's round calls {name}(batch) once, and no other exchange, because a "
                f"late worker takes part in none: call w.{name}, or leave out backup",
                field="backup",
            )

    @property
    def has_portion(self) -> bool:
        """Whether this worker has rows in the step before which `walk` is."""
        return self.walk.now.held[self.rank] != NOTHING


class ShareReader:
    """Reads single batches of the shares of an epoch."""

    def __init__(self, data: Data, shares: int, seed: int, accumulate: int) -> None:
        self._data, self._shares, self._seed, self._accumulate = data, shares, seed, accumulate
        self._epoch = -1
        self._order: NDArray[np.int64] | None = None  # the epoch's rows, if rows can be taken by number
        # from a share to the number of the next step in an open iterator over the share's batches
        self._open: dict[int, tuple[int, Iterator[Batch]]] = {}

    def read(self, epoch: int, share: int, number: int) -> Batch:
        """Return batch `number` of a share, or as many micro-batches as a step has, from that number on."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._open.clear()
            self._order = self._data.order(self._seed, epoch) if self._data.has_row_numbers else None
        if self._order is not None:
            first = number * self._accumulate
            last = min(first + self._accumulate, self._data.steps(self._shares))
            return self._step([self._taken(self._order[share :: self._shares], i) for i in range(first, last)])
        at, batches = self._open.get(share, (number + 1, iter(())))
        if at > number:
            start = number * self._accumulate
            at = number
            batches = self._data.batches(rank=share, size=self._shares, seed=self._seed, epoch=epoch, start=start)
        for _ in range(at, number + 1):
            found = list(islice(batches, self._accumulate))
        self._open[share] = number + 1, batches
        return self._step(found)

    def _taken(self, rows: NDArray[np.int64], number: int) -> Batch:
        return self._data.take(self._data.cut(rows, number))

    def _step(self, parts: list[Batch]) -> Batch:
        return parts[0] if self._accumulate == 1 else step_of(tuple(parts))


def restore_portions(stream: PortionStream, snapshot: Snapshot, shared: dict[str, Tensor]) -> None:
    """Continue after a snapshot, and remove the state of the portions from `shared`.

    The state has the snapshot's round, then what `PortionsWalk.state` returned after it.
    """
    held = shared.pop(STATE, None)
    state = None if held is None else held.tolist()
    known = state is not None and state[0] == snapshot.round == stream.position
    stream.begin_at(stream.position, state[1:] if state is not None and known else None)


def save_portions(stream: PortionStream, shared: dict[str, Tensor]) -> None:
    """Add the state of the portions to the values of a checkpoint that are equal on all workers."""
    state = stream.walk.state
    if state is None:
        shared.pop(STATE, None)
    else:
        shared[STATE] = tensor([stream.walk.step, *state])
