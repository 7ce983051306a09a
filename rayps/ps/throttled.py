"""Whether a job is held back by its quota of operations, from what its space's counts say. Pure."""

from __future__ import annotations

from typing import Any

GROWTHS = 2  # looks in which more requests had to wait, before it is said: one burst is none
FOR_SECONDS = 10.0  # how long the last request that had to wait counts


class Throttled:
    """Looks at a space's facts again and again; times are by one clock, in seconds."""

    def __init__(self) -> None:
        self._limit: float | None = None
        self._throttled = 0
        self._growths, self._grown_at = 0, float("-inf")
        self._said = False

    def look(self, space: dict[str, Any], now: float) -> str | None:
        """Take in a space's "quota" and "throttled"; what is to be told, once for each quota."""
        limit, throttled = (space.get("quota") or {}).get("operations"), int(space.get("throttled") or 0)
        if limit != self._limit:
            self._limit, self._growths, self._said = limit, 0, False
        elif throttled > self._throttled and limit is not None:
            self._growths = self._growths + 1 if now - self._grown_at < FOR_SECONDS else 1
            self._grown_at = now
        self._throttled = throttled
        if self._said or self.now(now) is None:
            return None
        self._said = True
        return self.now(now)

    def now(self, now: float) -> str | None:
        """How it stands: None where nothing holds it back."""
        if self._limit is None or self._growths < GROWTHS or now - self._grown_at >= FOR_SECONDS:
            return None
        return f"held back by its quota of {self._limit:g} operations a second"
