"""The leases of one worker, because workers do not run in step and their number may change.

RowBlock k of an epoch has the rows k*G to (k+1)*G - 1 of the epoch's order, where G is `batch_size` times `accumulate`.
Each step of the worker takes the block that its lease (`rayps.core.rows.leases`) gives to this step. The worker waits
for a lease that it does not have yet; other threads add leases.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from rayps_client.errors import PeerTimeout

from rayps.core.rows.leases import RowLease
from rayps.core.rows.step_rows import ByLease, RowBlock

_KEPT = 4  # the newest leases of which the epoch of a step is known
_CHECK_SECONDS = 0.1  # seconds between two checks whether the run has ended, while a worker waits for a lease


class LeaseBook:
    """The blocks of one worker, by the leases that it has now: see `rayps.core.rows.step_rows.StepRows`.

    Another thread calls `extend`, `end`, `heard` and `waits_at`.
    """

    seeds: ClassVar[bool] = ByLease.seeds
    repeats: ClassVar[bool] = ByLease.repeats

    def __init__(self, rank: int, timeout: float) -> None:
        """Begin without a lease.

        `timeout`: seconds without a word of the driver after which a wait for a lease fails.
        """
        self._rank, self._timeout = rank, timeout
        self._changed = threading.Condition()
        self._rows = ByLease()
        self._step = 0  # the step for which the worker has asked last
        self._over = False  # whether the plan ends before the next step
        self._heard = time.monotonic()
        self._waiting = False
        self._begin: int | None = None  # the step from which to continue

    # ---- called by other threads

    def extend(self, leases: Sequence[RowLease], begin: int | None = None) -> None:
        """Add leases. `begin`: the step from which the worker continues if it waits, after the servers admitted it."""
        with self._changed:
            self._begin = begin if begin is not None else self._begin
            found = sorted([*self._rows.leases, *leases], key=lambda lease: lease.first)
            while len(found) > _KEPT and found[0].end < self._step:
                found.pop(0)
            self._rows = ByLease(tuple(found))
            self._changed.notify_all()

    def end(self) -> None:
        """Let the plan end after the present step, although there may be leases."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def heard(self) -> None:
        """Record that the driver has polled this worker."""
        self._heard = time.monotonic()

    @property
    def waits_at(self) -> int | None:
        """The step at which the worker waits for a lease, after all its pushes were applied; None if it does not."""
        with self._changed:
            return self._step if self._waiting and not self._rows.is_known(self._step) else None

    # ---- called by the run

    def in_hand(self, step: int) -> bool:
        """Return whether the worker has the block of a step, or must not take another one."""
        with self._changed:
            return self._over or self._rows.is_known(step)

    def wait(self, step: int, stopped: Callable[[], bool]) -> int | None:
        """Wait for the block of `step`. All pushes of this worker must be applied before the call.

        Return the step with which to continue; None if the plan has ended.

        Raises:
            PeerTimeout: the driver has not polled this worker for `timeout` seconds.
        """
        with self._changed:
            self._step = step
            while not self._over and not stopped():
                if self._begin is not None:
                    self._step, self._begin = self._begin, None
                if self._rows.is_known(self._step):
                    self._waiting = False
                    return self._step
                self._waiting = True
                if time.monotonic() - self._heard > self._timeout:
                    raise PeerTimeout(
                        f"worker-{self._rank} waits for a lease of rows, and the driver has not polled it for "
                        f"{self._timeout:g} s",
                        peer="driver",
                        seconds=self._timeout,
                    )
                self._changed.wait(_CHECK_SECONDS)
            return None

    # ---- which block a step takes

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return the epoch and the block of a step: see `ByLease`."""
        with self._changed:
            return self._rows.epoch_of(step)

    def block(self, step: int) -> RowBlock:
        """Return the block of a step."""
        with self._changed:
            return self._rows.block(step)

    def is_known(self, step: int) -> bool:
        """Return whether the worker has the block of a step, and may take it."""
        with self._changed:
            return not self._over and self._rows.is_known(step)
