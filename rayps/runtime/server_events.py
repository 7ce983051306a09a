"""What happens to a job's server group, as events of the job: which server died, and how long that held up workers."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from rayps.core.metrics import Point

AFTER_SECONDS = 3.0  # what a server's death holds up is over by then
BEFORE_SECONDS = 2.0  # and is heard of this much later, at most


class ServerEvents:
    """Follows the group's events and the workers' rounds."""

    def __init__(self) -> None:
        self._waits: deque[tuple[float, float]] = deque(maxlen=10_000)  # when a round was heard of, what it waited
        self._due: list[tuple[float, dict[str, Any]]] = []  # when it was heard of, and the event

    def hear(self, points: list[Point]) -> None:
        """Take in rounds of single ranks."""
        now = time.monotonic()
        self._waits.extend((now, point["wait"]) for point in points if point["kind"] == "round")

    def tell(self, events: list[dict[str, Any]], over: bool = False) -> list[dict[str, Any]]:
        """The events that can be told now; of a death once it is known what it held up, or when the run is `over`."""
        now = time.monotonic()
        told = [event for event in events if event["kind"] != "server_lost"]
        self._due += [(now, event) for event in events if event["kind"] == "server_lost"]
        for heard, event in [item for item in self._due if over or now - item[0] >= AFTER_SECONDS]:
            self._due.remove((heard, event))
            longest = max((wait for at, wait in self._waits if at >= heard - BEFORE_SECONDS), default=0.0)
            message = f"{event['message']}; the longest that a worker waited in a round meanwhile was {longest:.2f} s"
            told.append({**event, "message": message, "longest_wait": longest})
        return told
