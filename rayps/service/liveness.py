"""How long something has shown no sign, in seconds during which this process itself ran.

Two observations that lie far apart mean that this process was suspended, stopped or starved: whatever it watches was
probably in the same state, so such a gap counts as one short step. The system's wall clock plays no part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable

MOST_STEP = 5.0  # seconds that the time between two observations counts at most


class QuietTime:
    """The seconds since a sign last changed; observe it every few seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._sign: Hashable = None
        self._seconds = 0.0

    def observe(self, sign: Hashable) -> float:
        """Take in the sign as it is now; give the seconds since it was another."""
        now = self._clock()
        self._seconds += min(max(0.0, now - self._at), MOST_STEP)
        self._at = now
        if sign != self._sign:
            self._sign, self._seconds = sign, 0.0
        return self._seconds


class QuietTimes:
    """One `QuietTime` for each key."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[Hashable, QuietTime] = {}

    def observe(self, key: Hashable, sign: Hashable) -> float:
        """Take in the sign of `key`; give the seconds since it was another, 0 for a key that is new."""
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = QuietTime(self._clock)
        return held.observe(sign)

    def keep(self, keys: Collection[Hashable]) -> None:
        """Forget all other keys."""
        self._held = {key: held for key, held in self._held.items() if key in keys}
