"""The batches of one worker that gets them by leases, because workers do not run in step and their number may change.

Block k of an epoch has the rows k*G to (k+1)*G - 1 of the epoch's permutation, where G is `batch_size` times
`accumulate`. A worker's position counts its steps. Each step takes the block that its lease (`rayps.core.rows.leases`)
gives to this step.

Random numbers are drawn by block: the generator of torch is seeded with (seed, epoch, block) before the rows of a block
are read, and again before its gradient is computed. They do not depend on which worker has the block. Random numbers of
loader processes are their own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from rayps_client.errors import PeerTimeout

from rayps.core.job.user_code import user_code
from rayps.core.rows.leases import RowLease
from rayps.core.rows.rank_seed import block_seed
from rayps.data.base import Batch, Data, Place
from rayps.data.dealt_rows import must_have_row_numbers
from rayps.worker.rows.batches import BatchStream, step_of

_KEPT = 4  # the newest leases of which the epoch of a step is known
_CHECK_SECONDS = 0.1  # seconds between two checks whether the run has ended, while a worker waits for a lease


class LeasedBatches(BatchStream):
    """The batches of one replica, by leases. Another thread calls `extend`, `end`, `heard` and `waits_at`."""

    def __init__(
        self, data: Data, place: tuple[int, int], seed: int, steps: int, *, accumulate: int = 1, timeout: float = 60.0
    ) -> None:
        """Prepare the worker `place` = (rank, size) for epochs of `steps` blocks.

        `timeout`: seconds without a word of the driver after which a wait for a lease fails.

        Raises:
            ConfigError: the rows of `data` cannot be taken by number.
        """
        super().__init__(data, place, seed, (0, 0), steps, accumulate=accumulate)
        must_have_row_numbers(data)
        self._timeout = timeout
        self._changed = threading.Condition()
        self._leases: deque[RowLease] = deque()
        self._over: int | None = None  # the step before which the plan ends; None if it has not ended
        self._heard = time.monotonic()
        self._waiting = False
        self._begin: int | None = None  # the step from which to continue
        self._rows: tuple[int, NDArray[np.int64]] | None = None  # an epoch, and its row numbers in order
        self._reads: tuple[tuple[int, int], Iterator[Batch]] | None = None  # (epoch, block) of the loader's next batch

    # ---- called by other threads

    def extend(self, leases: Sequence[RowLease], begin: int | None = None) -> None:
        """Add leases. `begin`: the step from which the worker continues if it waits, after the servers admitted it."""
        with self._changed:
            self._begin = begin if begin is not None else self._begin
            self._leases = deque(sorted([*self._leases, *leases], key=lambda lease: lease.first))
            while len(self._leases) > _KEPT and self._leases[0].end <= self.position - 1:
                self._leases.popleft()
            self._changed.notify_all()

    def end(self) -> None:
        """Let the plan end after the present step, although there may be leases."""
        with self._changed:
            self._over = self.position
            self._changed.notify_all()

    def heard(self) -> None:
        """Record that the driver has polled this worker."""
        self._heard = time.monotonic()

    @property
    def waits_at(self) -> int | None:
        """The step at which the worker waits for a lease, after all its pushes were applied; None if it does not."""
        with self._changed:
            return self.position if self._waiting and not self._has(self.position) else None

    # ---- called by the run

    @property
    def in_hand(self) -> bool:
        """Whether the worker has the block of its next step, or must not take another one."""
        with self._changed:
            return self._over is not None or self._has(self.position)

    def await_lease(self, stopped: Callable[[], bool]) -> bool:
        """Wait for a block.

        Return False if the plan has ended. All pushes of this worker must be applied before the call.

        Raises:
            PeerTimeout: the driver has not polled this worker for `timeout` seconds.
        """
        with self._changed:
            while self._over is None and not stopped():
                if self._begin is not None:
                    self.position, self._begin = self._begin, None
                if self._has(self.position):
                    self._waiting = False
                    return True
                self._waiting = True
                if time.monotonic() - self._heard > self._timeout:
                    raise PeerTimeout(
                        f"worker-{self.rank} waits for a lease of rows, and the driver has not polled it for "
                        f"{self._timeout:g} s",
                        peer="driver",
                        seconds=self._timeout,
                    )
                self._changed.wait(_CHECK_SECONDS)
            return False

    def epoch_of(self, position: int) -> tuple[int, int]:
        """Return the epoch and the block of a step: of the newest leased step before it if it is not leased yet."""
        with self._changed:
            for lease in reversed(self._leases):
                if lease.first <= position:
                    return lease.block_of(min(position, lease.end - 1))
            return self._leases[0].block_of(self._leases[0].first) if self._leases else (0, 0)

    def take(self, end: int) -> Batch:
        """Return the batch of the next step: see `BatchStream.take`. Only leased batches are read in advance."""
        batch, self._coming = self._coming, None
        if batch is None:
            batch = self._made(self.position)
        torch.manual_seed(block_seed(self.seed, *self.epoch_of(self.position), read=False))
        self.position += 1
        if self.ahead is not None and self.in_hand and self._over is None:
            state = torch.get_rng_state()
            self._coming = self._made(self.position)
            torch.set_rng_state(state)
        self.weight = batch.size
        return batch

    def _has(self, position: int) -> bool:
        return any(lease.first <= position < lease.end for lease in self._leases)

    def _made(self, position: int) -> Batch:
        epoch, block = self.epoch_of(position)
        torch.manual_seed(block_seed(self.seed, epoch, block, read=True))
        with user_code("data"):
            batch = self._taken(epoch, block) if self.loader is None else self._loaded(epoch, block)
        if self.ahead is not None:
            self.ahead(None if batch.parts else batch)  # rows of several micro-batches are not pulled in advance
        return batch

    def _taken(self, epoch: int, block: int) -> Batch:
        """Take the rows of a block by their numbers."""
        if self._rows is None or self._rows[0] != epoch:
            self._rows = epoch, self.data.order(self.seed, epoch)
        each = self.accumulate
        found = (self.data.cut(self._rows[1], block * each + at) for at in range(each))
        parts = [part for part in found if len(part)]
        return self.data.take(parts[0]) if each == 1 else step_of(tuple(self.data.take(part) for part in parts))

    def _loaded(self, epoch: int, block: int) -> Batch:
        """Return the batch of a block from the loader, which reads on if the block follows the last one."""
        assert self.loader is not None, "the data is read ahead"
        if self._reads is None or self._reads[0] != (epoch, block):
            place = Place(0, 1, self.seed, epoch)
            self._reads = (epoch, block), (each for each, _ in self.loader.read(place, block * self.accumulate))
        reads = self._reads[1]
        parts = tuple(islice(reads, self.accumulate))
        self._reads = (epoch, block + 1), reads
        return parts[0] if self.accumulate == 1 else step_of(parts)
