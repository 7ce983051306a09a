"""Stop a run between two rounds, in the same round on all workers.

Workers in step are at most one round apart. The driver first calls `hold` on all workers, which returns how many rounds
each has begun and lets none begin another. It then calls `stop_after` with the largest of these numbers: the workers
that are behind finish the same rounds, and all runs end there. Or it calls `deal` with this number: all workers
continue, and take other shares of the rows from the same round on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rayps_client.errors import PeerTimeout

from rayps.core.rows.row_shares import RowShares

HELD_SECONDS = 60.0  # the longest wait, in seconds, for the driver's word after `hold`
_CHECK_SECONDS = 0.05  # seconds between two looks at whether the run was ended from outside


class RoundGate:
    """Decides whether the next round of a run may begin. Any thread may call its methods."""

    def __init__(self, begun: int, last: int | None = None) -> None:
        """Start a run of which `begun` rounds were begun before; it ends after `last` rounds, if that is known."""
        self._changed = threading.Condition()
        self._begun = begun
        self._held = False  # whether no round may begin until the driver says more
        self._last = last  # the run ends after so many rounds; None if no end was set
        self._limit: int | None = None  # the run is held after so many rounds; None if it is not
        self.retained = 0  # the round after which the run retains its part of a checkpoint, whoever asks for it
        self._dealt: tuple[int, RowShares] | None = None  # after so many rounds, rows are dealt in this way

    def hold(self) -> int:
        """Let no further round begin, and return the number of rounds that were begun."""
        with self._changed:
            self._held = True
            return self._begun

    def stop_after(self, rounds: int) -> None:
        """Let rounds begin until `rounds` were begun, and end the run after them."""
        with self._changed:
            self._held, self._last = False, rounds
            self._changed.notify_all()

    def train_until(self, rounds: int, retained: int) -> None:
        """Let rounds begin until `rounds` were begun, and hold the run then until the driver says more.

        `retained` is the round after which the run retains its part of a checkpoint.
        """
        with self._changed:
            self._held, self._limit, self.retained = False, rounds, retained
            self._changed.notify_all()

    def holds(self, done: int) -> bool:
        """Return whether the run is held after `done` rounds because of `train_until`."""
        with self._changed:
            return self._limit is not None and done >= self._limit

    def resume(self) -> None:
        """Undo `hold`, `stop_after` and `train_until`. A run that has ended stays ended."""
        with self._changed:
            self._held, self._last, self._limit = False, None, None
            self._changed.notify_all()

    def deal(self, after: int, rows: RowShares) -> None:
        """Undo `hold`. `dealt` returns `rows` before the round after `after` rounds, which was not begun."""
        with self._changed:
            self._dealt = after, rows
            self._held = False
            self._changed.notify_all()

    def dealt(self, done: int) -> RowShares | None:
        """Return once, after `done` rounds, how rows are dealt from now on; None if that does not change."""
        with self._changed:
            if self._dealt is None or done < self._dealt[0]:
                return None
            rows, self._dealt = self._dealt[1], None
            return rows

    def begin(self, done: int, stopped: Callable[[], bool]) -> bool:
        """Return whether the round after `done` rounds begins now; wait while the run is held.

        Return False if the run ends here. Raises PeerTimeout if the driver does not end a `hold` in time.
        """
        deadline: float | None = None
        with self._changed:
            while True:
                if stopped() or (self._last is not None and done >= self._last):
                    return False
                if not self._held and (self._limit is None or done < self._limit):
                    self._begun = done + 1
                    return True
                deadline = deadline or time.monotonic() + HELD_SECONDS
                if time.monotonic() > deadline:
                    raise PeerTimeout(
                        f"the driver held this worker after round {done} and has not continued within "
                        f"{HELD_SECONDS:g} s",
                        peer="driver",
                        seconds=HELD_SECONDS,
                    )
                self._changed.wait(_CHECK_SECONDS)
