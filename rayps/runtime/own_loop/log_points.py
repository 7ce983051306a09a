"""Means over ranks of the numbers that a loop logs: one point for each step. Pure; the caller gives the time."""

from __future__ import annotations

from collections.abc import Collection

from rayps.core.job.records import Point

QUIET_SECONDS = 2.0  # seconds that a step waits for a rank that has logged nothing so far
LATE_SECONDS = 10.0  # seconds that a step waits for a rank that has logged an earlier step
OPEN = 64  # newest steps that wait at all
KEPT = 256  # newest merged steps to which a late number can still be added


class LogPoints:
    """Collects what ranks log, and merges the points of a step when no other rank will log it.

    A step is complete when each rank has logged it or a later step, has ended, has saved a state after it, or has not
    logged it for `LATE_SECONDS` (`QUIET_SECONDS` if it has never logged anything), or when `OPEN` later steps wait. A
    later number of a complete step gives its point again, with all numbers; the history keeps the last one. A number
    that is more than `KEPT` steps late is dropped.
    """

    def __init__(self, size: int, strategy: str) -> None:
        self.size, self.generation, self.strategy = size, 0, strategy
        self.warned = False  # whether a number that is not finite was reported
        self._parts: dict[int, dict[int, Point]] = {}  # by step and rank
        self._open: dict[int, float] = {}  # the steps to be merged, and when their first part arrived
        self._reached: dict[int, int] = {}  # the newest step that each rank has logged
        self._dropped = -1  # the newest step to which no number can be added

    def restart(self, generation: int) -> None:
        """Begin a generation, whose ranks repeat steps."""
        self.generation = generation
        self._parts, self._open, self._reached, self._dropped = {}, {}, {}, -1

    def add(self, points: list[Point], now: float) -> None:
        """Add points of single ranks."""
        for point in points:
            rank, number = point["rank"], point["round"]
            self._reached[rank] = number
            if number <= self._dropped:
                continue
            held = self._parts.setdefault(number, {})
            before = held.get(rank)
            if before is not None:
                numbers = before["numbers"] | point["numbers"]
                point = point | {"numbers": numbers, "seconds": before["seconds"] + point["seconds"]}
            held[rank] = point
            self._open.setdefault(number, now)

    def merged(self, now: float, ended: Collection[int] = (), *, saved: int = -1) -> list[Point]:
        """Return the points of the steps that are now complete, in order.

        `ended`: ranks that log nothing more. `saved`: the newest step that a rank had logged when all saved a state.
        """
        waiting = sorted(self._open)
        done = waiting[:-OPEN] + [
            number
            for number in waiting[-OPEN:]
            if number <= saved or not any(self._awaits(number, rank, now, ended) for rank in range(self.size))
        ]
        for number in done:
            del self._open[number]
        merged = [self._average(number) for number in done]
        for number in [n for n in sorted(self._parts) if n not in self._open][:-KEPT]:
            del self._parts[number]
            self._dropped = max(self._dropped, number)
        return merged

    def _awaits(self, number: int, rank: int, now: float, ended: Collection[int]) -> bool:
        """Return whether an open step waits for a rank's number."""
        if rank in self._parts[number] or rank in ended or self._reached.get(rank, number) > number:
            return False
        return now - self._open[number] < (LATE_SECONDS if rank in self._reached else QUIET_SECONDS)

    def _average(self, number: int) -> Point:
        points = [point for _, point in sorted(self._parts[number].items())]
        names = list(dict.fromkeys(name for point in points for name in point["numbers"]))
        means: dict[str, float | None] = {"loss": None}
        for name in names:
            held = [(point["numbers"][name], _read_weight(point)) for point in points if name in point["numbers"]]
            total = sum(samples for _, samples in held)
            means[name] = sum(value * samples for value, samples in held if samples) / total if total else None
        return {
            "kind": "round",
            "round": number,
            "epoch": 0,
            "samples": sum(point["samples"] or 0 for point in points),
            "seconds": sum(point["seconds"] for point in points) / len(points),
            **means,
            "staleness": {},
            "generation": self.generation,
            "strategy": self.strategy,
        }


def _read_weight(point: Point) -> float:
    return 1.0 if point["samples"] is None else float(point["samples"])


def numbers_of(point: Point) -> dict[str, float]:
    """Return the logged means of a merged point."""
    fixed = ("kind", "round", "epoch", "time", "samples", "seconds", "staleness", "generation", "strategy")
    return {name: value for name, value in point.items() if name not in fixed and value is not None}
