"""Where a worker's time goes in one round, and how many bytes it moved, as a point of its metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any


class Meter:
    """Seconds and bytes of the round under way. `compute`, `data` (getting the batch) and `losses` (loss, samples) are
    filed by the worker.
    """

    def __init__(self, ring: Any, server: Any, tables: Any, axes: Sequence[Any] = ()) -> None:
        """`axes` are the rings within the worker's replica."""
        self.compute = self.data = 0.0
        self.losses: list[tuple[float, int]] = []
        self._ring, self._server, self._tables, self._axes = ring, server, tables, axes
        self._began = 0.0
        self._before = (0.0, 0.0, 0)

    def begin(self) -> None:
        """A round begins."""
        self.compute, self.data, self.losses = 0.0, 0.0, []
        self._began, self._before = time.perf_counter(), self._traffic()

    @property
    def inside(self) -> float:
        """Seconds that went into waiting for others of the same replica, ever: what a gradient does not compute."""
        return float(sum(ring.seconds_waiting for ring in self._axes))

    def _traffic(self) -> tuple[float, float, int]:
        """Seconds of waiting, of moving, and bytes, ever."""
        if self._server is not None:
            waiting, moving, moved = self._server.seconds_waiting, 0.0, self._server.bytes_moved
        else:
            waiting, moving, moved = self._ring.seconds_waiting, self._ring.seconds_moving, self._ring.bytes_sent
            if self._tables is not None:
                waiting += self._tables.seconds_waiting
        for ring in self._axes:
            waiting, moving = waiting + ring.seconds_waiting, moving + ring.seconds_moving
            moved += ring.bytes_sent
        return waiting, moving, moved

    def point(self) -> dict[str, Any]:
        """What the round took."""
        waiting, moving, moved = (now - then for now, then in zip(self._traffic(), self._before, strict=True))
        samples = sum(count for _, count in self.losses)
        seconds = time.perf_counter() - self._began
        exposed = max(0.0, seconds - self.compute)  # what a background thread does meanwhile takes no time
        wait = min(waiting, exposed)
        return {
            "loss": sum(loss * count for loss, count in self.losses) / samples if samples else None,
            "samples": samples,
            "seconds": seconds,
            "compute": self.compute,
            "data": self.data,
            "wait": wait,
            "move": min(moving, exposed - wait),
            "talk": waiting + moving,  # also what computing hid
            "bytes": moved,
            "lead": self._server.lead if self._server is not None else None,
        }
