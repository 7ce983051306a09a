"""Aggregate a run's metrics into buckets of 2^k rounds, aligned at multiples of 2^k. A complete bucket never changes.

Buckets are built incrementally: a request for a long run reads only the new lines. A run has at most `_MOST` buckets,
which bounds the memory, and k is the smallest number for which they are enough.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rayps.core.job.records import GROWING_FIELDS, ROUND_FIELDS
from rayps.core.job.returned_rounds import RETURNED, Returns, SeenRounds, is_void, select_counted
from rayps_api.folder import objects

_MOST = 8192
_EVALUATIONS = 5000


class Number(NamedTuple):
    """A metric over rounds: the sum and the number of its finite values, the extremes, and the newest round's value."""

    total: float
    finite: int
    least: float
    most: float
    at: int
    last: float | None  # None if the newest round's value is not finite

    @classmethod
    def of(cls, value: object, at: int) -> Number:
        """Return the number of one round; a value that is not finite counts as none."""
        if not isinstance(value, int | float) or not math.isfinite(value):
            return cls(0.0, 0, math.inf, -math.inf, at, None)
        return cls(value, 1, value, value, at, value)

    def plus(self, other: Number) -> Number:
        """Return the number of both."""
        newest = other if other.at >= self.at else self
        least, most = min(self.least, other.least), max(self.most, other.most)
        return Number(self.total + other.total, self.finite + other.finite, least, most, newest.at, newest.last)

    def summary(self) -> dict[str, float | None]:
        """Return the last, the least and the largest value as JSON data; None if there is none that is finite."""
        known = self.finite > 0
        return {"last": self.last, "least": self.least if known else None, "most": self.most if known else None}


_NO_LOSS = Number(0.0, 0, math.inf, -math.inf, -1, None)


@dataclass(slots=True)
class Bucket:
    """A bucket: the number of its rounds, which are consecutive, and the sums of their metrics."""

    count: int = 0
    loss: Number = _NO_LOSS
    samples: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    staleness: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, Number] = field(default_factory=dict)  # others, by name

    def add(self, point: dict[str, Any]) -> None:
        """Add one round."""
        self.count += 1
        at = point["round"]
        self.loss = self.loss.plus(Number.of(point.get("loss"), at))
        self.samples += point.get("samples") or 0
        for part in ("seconds", "compute", "wait", "move", "bytes"):
            self.parts[part] = self.parts.get(part, 0.0) + (point.get(part) or 0)
        for age, times in (point.get("staleness") or {}).items():
            self.staleness[age] = self.staleness.get(age, 0) + times
        for name, value in point.items():
            if name not in ROUND_FIELDS and isinstance(value, int | float) and math.isfinite(value):
                self._add_number(name, Number.of(value, at))

    def merge(self, other: Bucket) -> None:
        """Add the sums of the bucket that follows this one."""
        self.count += other.count
        self.loss = self.loss.plus(other.loss)
        self.samples += other.samples
        for part, amount in other.parts.items():
            self.parts[part] = self.parts.get(part, 0.0) + amount
        for age, times in other.staleness.items():
            self.staleness[age] = self.staleness.get(age, 0) + times
        for name, number in other.numbers.items():
            self._add_number(name, number)

    def _add_number(self, name: str, number: Number) -> None:
        self.numbers[name] = self.numbers[name].plus(number) if name in self.numbers else number

    def to_dict(self, begin: int, size: int, newest: int) -> dict[str, Any]:
        """Return the bucket as JSON data. It covers `size` rounds from `begin` on, but none after round `newest`.

        `loss` is null if no round had a finite loss. `numbers` are the means of what the user or the strategy added;
        of epsilon and the releases of a private job they are the values after the bucket's last round.
        """
        loss = None
        if self.loss.finite:
            loss = {"min": self.loss.least, "mean": self.loss.total / self.loss.finite, "max": self.loss.most}
        seconds = self.parts.get("seconds", 0.0)
        return {
            "round": begin,
            "round_end": min(begin + size - 1, newest),
            "count": self.count,
            "loss": loss,
            "not_finite": self.count - self.loss.finite,
            "samples_per_second": self.samples / seconds if seconds > 0 and self.samples else None,
            **self.parts,
            "staleness": self.staleness,
            "numbers": {
                name: each.most if name in GROWING_FIELDS else each.total / each.finite
                for name, each in self.numbers.items()
            },
        }


class Rollup:
    """The buckets and evaluations of one job's metrics file, as far as the file was read."""

    def __init__(self) -> None:
        self.size = 1
        self.buckets: dict[int, Bucket] = {}
        self.evaluations: list[dict[str, Any]] = []
        self.newest = 0
        self._cursor = 0
        self._returns, self._seen = Returns(), SeenRounds(-1)  # below 0: until the first round
        self._torn = False  # whether a bucket has rounds that count beside some that do not

    def read(self, path: Path) -> None:
        """Read the metric points that were written since the last call, and add them."""
        while True:
            points, after = objects(path, self._cursor, 10_000)
            if after == self._cursor:
                return
            self._cursor = after
            for point in points:
                self.add(point)
            if self._torn:
                self._rebuild(path, after)

    def add(self, point: dict[str, Any]) -> None:
        """Add one metric point. A round that is repeated takes the place of the one before."""
        back = self._returns.of(point)
        if back is not None:
            self._return(back)
        if point.get("kind") == "evaluation":
            self.evaluations = [each for each in self.evaluations if each["round"] != point["round"]]
            if len(self.evaluations) >= _EVALUATIONS:
                self.evaluations = _thinned(self.evaluations)
            self.evaluations.append(point)
        elif isinstance(point.get("round"), int) and point.get("kind") != RETURNED:
            self.newest = max(self.newest, point["round"])
            if self._seen.below < 0:
                self._seen = SeenRounds(point["round"])
            if not self._seen.add(point["round"]):
                if self.size > 1:  # the parts of a bucket are not kept: the first point of a step stays
                    return
                del self.buckets[point["round"]]
            self.buckets.setdefault(point["round"] // self.size, Bucket()).add(point)
            if len(self.buckets) > _MOST:
                self.size, self.buckets = self._coarser(self.size * 2)

    def _return(self, back: int) -> None:
        """Drop what does not count after a return to the state of round `back`."""
        self.evaluations = [each for each in self.evaluations if not is_void(each, back)]
        self._torn |= any(index * self.size < back <= index * self.size + self.size - 1 for index in self.buckets)
        self.buckets = {index: each for index, each in self.buckets.items() if index * self.size < back}
        self._seen = SeenRounds(-1) if not self.buckets else self._seen
        self._seen.forget(back)
        self.newest = min(self.newest, max(back - 1, 0))

    def _rebuild(self, path: Path, end: int) -> None:
        """Read the file again up to byte `end`, and add only what counts."""
        self.buckets, self.evaluations, self.newest = {}, [], 0
        self._returns, self._seen, self._torn = Returns(), SeenRounds(-1), False
        found, at = list[dict[str, Any]](), 0
        while at < end:
            points, after = objects(path, at, 10_000)
            if after == at:
                break
            found, at = found + points, after
        self._cursor = at
        for point in select_counted(found):
            self.add(point)

    def series(self, most: int) -> list[dict[str, Any]]:
        """Return the buckets as JSON data, merged into larger ones if there are more than `most`."""
        size = self.size
        while len({index * self.size // size for index in self.buckets}) > most:
            size *= 2
        buckets = self.buckets if size == self.size else self._coarser(size)[1]
        return [buckets[index].to_dict(index * size, size, self.newest) for index in sorted(buckets)]

    def summaries(self) -> dict[str, dict[str, float | None]]:
        """Return the last, least and largest value of each metric of the rounds, of all rounds and not of buckets."""
        whole = Bucket()
        for index in sorted(self.buckets):
            whole.merge(self.buckets[index])
        losses = {} if whole.loss.at < 0 else {"loss": whole.loss}
        return {name: number.summary() for name, number in (losses | whole.numbers).items()}

    def _coarser(self, size: int) -> tuple[int, dict[int, Bucket]]:
        found: dict[int, Bucket] = {}
        for index in sorted(self.buckets):
            found.setdefault(index * self.size // size, Bucket()).merge(self.buckets[index])
        return size, found


class Rollups:
    """A cache of the rollups of the jobs that were requested last."""

    def __init__(self, most: int = 32) -> None:
        self._most = most
        self._rollups: OrderedDict[Path, Rollup] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, path: Path, most: int) -> dict[str, Any]:
        """Return the series of a metrics file, in at most `most` buckets, and its evaluations."""
        with self._lock:
            rollup = self._rollups.setdefault(path, Rollup())
            self._rollups.move_to_end(path)
            while len(self._rollups) > self._most:
                self._rollups.popitem(last=False)
            rollup.read(path)
            found = {"series": rollup.series(most), "evaluations": list(rollup.evaluations)}
            return found | {"summaries": rollup.summaries()}


def _thinned(evaluations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return every second evaluation, and those with the least and the largest value of a metric."""
    kept = set(range(1, len(evaluations), 2))
    for name in {name for each in evaluations for name in each["metrics"]}:
        found = [(value, at) for at, each in enumerate(evaluations) if (value := each["metrics"].get(name)) is not None]
        kept.update({min(found)[1], max(found)[1]} if found else ())
    return [each for at, each in enumerate(evaluations) if at in kept]
