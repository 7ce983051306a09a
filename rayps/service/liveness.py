"""Measure how long a watched value has not changed, in seconds during which this process itself ran.

After a long gap between two observations, this process was suspended, stopped or starved, and the watched process
probably too. Such a gap counts as `MOST_STEP` seconds. The system's wall clock is not used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable

MOST_STEP = 5.0  # the most seconds that a gap between two observations counts


class QuietTime:
    """The seconds since a value last changed. The caller must observe the value every few seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._value: Hashable = None
        self._seconds = 0.0

    def observe(self, value: Hashable) -> float:
        """Observe the value; return the seconds since it changed."""
        now = self._clock()
        self._seconds += min(max(0.0, now - self._at), MOST_STEP)
        self._at = now
        if value != self._value:
            self._value, self._seconds = value, 0.0
        return self._seconds


class QuietTimes:
    """The seconds since each of several values last changed: one `QuietTime` for each key."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: dict[Hashable, QuietTime] = {}

    def observe(self, key: Hashable, value: Hashable) -> float:
        """Observe the value of `key`; return the seconds since the value changed, or 0 for a new key."""
        quiet_time = self._times.get(key)
        if quiet_time is None:
            quiet_time = self._times[key] = QuietTime(self._clock)
        return quiet_time.observe(value)

    def retain_only(self, keys: Collection[Hashable]) -> None:
        """Remove every key that is not in `keys`."""
        self._times = {key: quiet_time for key, quiet_time in self._times.items() if key in keys}
