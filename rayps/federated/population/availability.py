"""Simulate when clients are available: always, at random, by time of day, or by a trace of intervals.

Virtual time is counted in integer microseconds, so that sums of times are exact, and differences between processors in
the last bit of a float have no effect.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from rayps_client.errors import ConfigError

from rayps.federated.population.cohort import Ints, uniforms
from rayps.federated.population.option_text import CheckedForm
from rayps.federated.population.options import intervals

FOREVER = 1 << 61  # microseconds: a moment that is never reached
Pairs = list[list[tuple[float, float]]]


class Availability(Protocol):
    """The interface of an availability model: which clients are available, until when, and when to check again.

    Moments (`now` and results) are virtual microseconds.
    """

    def are_available(self, clients: Ints, now: int, round: int, attempt: int) -> NDArray[np.bool_]:
        """Return for each of `clients` whether it is available now. `attempt` counts the checks in this round."""

    def until(self, clients: Ints, now: int) -> Ints:
        """Return for each of `clients`, all of which are available now, the moment from which it is not available."""

    def next(self, clients: Ints, now: int) -> int | None:
        """Return the next moment after `now` at which to check `clients` again, or None if no client ever returns."""


def availability(seed: int, spec: CheckedForm) -> Availability:
    """Return the availability model that the options `spec` describe. Raises ConfigError if a trace cannot be read."""
    name = spec["name"]
    if name == "bernoulli":
        return Bernoulli(seed, spec["p"], micros(spec["every"]))
    if name == "diurnal" and spec["share"] < 1:
        return Diurnal(seed, micros(spec["share"] * spec["day"]), micros(spec["day"]), spec["spread"])
    if name == "trace":
        pairs = spec["intervals"] if spec["file"] is None else intervals(read_intervals(spec["file"]), spec["period"])
        return TraceIntervals(pairs, spec["period"])
    return Always()


def micros(seconds: float) -> int:
    """Convert seconds to integer microseconds."""
    return round(seconds * 1e6)


class Always:
    """All clients are available, all the time."""

    def are_available(self, clients: Ints, now: int, round: int, attempt: int) -> NDArray[np.bool_]:
        """Return True for each client."""
        return np.ones(len(clients), dtype=np.bool_)

    def until(self, clients: Ints, now: int) -> Ints:
        """Return `FOREVER` for each client, because no client leaves."""
        return np.full(len(clients), FOREVER, dtype=np.int64)

    def next(self, clients: Ints, now: int) -> int | None:
        """Return `now` + 1, because clients are available at every moment."""
        return now + 1


class Bernoulli(Always):
    """In each round each client is available with probability p. A client that is available does not leave.

    If no client is available, the clients are drawn again after `every` microseconds.
    """

    def __init__(self, seed: int, p: float, every: int) -> None:
        self._seed, self._p, self._every = seed, p, max(1, every)

    def are_available(self, clients: Ints, now: int, round: int, attempt: int) -> NDArray[np.bool_]:
        """Return for each client whether it is available: a random draw for this round and attempt."""
        return np.asarray(uniforms(self._seed, "available", clients, round, attempt) < self._p)

    def next(self, clients: Ints, now: int) -> int | None:
        """Return the moment of the next draw, `every` microseconds later."""
        return now + self._every


class Diurnal:
    """Each client is available for one interval of every day, which starts at a different time for each client.

    A day has `day` microseconds, and the interval has `length` microseconds. The intervals start in the first part of
    the day, whose share of the day is `spread` (0 to 1).
    """

    def __init__(self, seed: int, length: int, day: int, spread: float) -> None:
        self._seed, self._length, self._day, self._spread = seed, length, max(1, day), spread

    def are_available(self, clients: Ints, now: int, round: int, attempt: int) -> NDArray[np.bool_]:
        """Return for each client whether `now` is in its interval of the day."""
        return np.asarray(self._hour(clients, now) < self._length)

    def until(self, clients: Ints, now: int) -> Ints:
        """Return for each client the end of its interval of the day."""
        return now + self._length - self._hour(clients, now)

    def next(self, clients: Ints, now: int) -> int | None:
        """Return the earliest moment at which an interval of one of the clients starts."""
        return now + int((self._day - self._hour(clients, now)).min())

    def _hour(self, clients: Ints, now: int) -> Ints:
        """Return for each client the microseconds since its interval of the day started."""
        begins = uniforms(self._seed, "diurnal", clients) * (self._spread * self._day)
        return np.asarray((now - begins.astype(np.int64)) % self._day)


class TraceIntervals:
    """Client k is available in the intervals of trace k modulo the number of traces.

    The intervals repeat after `period` seconds, or do not repeat if `period` is None. All traces are concatenated on
    one time axis, so that one call searches the intervals of all clients.
    """

    def __init__(self, traces: Pairs, period: float | None) -> None:
        self._traces = len(traces)
        last = max(off for each in traces for _, off in each)
        self._period = None if period is None else micros(period)
        self._stride = micros(last if period is None else period) + 1
        merged = [(t * self._stride, on, off) for t, each in enumerate(traces) for on, off in _merged(each)]
        self._on = np.array([base + on for base, on, _ in merged], dtype=np.int64)
        self._off = np.array([base + off for base, _, off in merged], dtype=np.int64)
        bases = np.arange(self._traces, dtype=np.int64) * self._stride
        at = np.searchsorted(self._on, bases)
        found = np.minimum(at, len(self._on) - 1)
        self._first = np.where(
            (at < len(self._on)) & (self._on[found] < bases + self._stride), self._on[found] - bases, -1
        )
        # for each trace: the microseconds for which an interval that lasts until the period's end continues after it
        self._over = np.where(self._first == 0, self._off[found] - bases, 0)

    def are_available(self, clients: Ints, now: int, round: int, attempt: int) -> NDArray[np.bool_]:
        """Return for each client whether `now` is in one of its intervals."""
        moment, at = self._find(clients, now)
        return np.asarray((at >= 0) & (moment < self._off[at]) & (moment >= self._on[at]))

    def until(self, clients: Ints, now: int) -> Ints:
        """Return for each client the end of its current interval."""
        moment, at = self._find(clients, now)
        left = self._off[at] - moment
        if self._period is None:
            return np.asarray(now + left)
        trace = clients % self._traces
        over = self._off[at] == trace * self._stride + self._period
        whole = over & (self._over[trace] == self._period)
        return np.asarray(np.where(whole, FOREVER, now + left + np.where(over, self._over[trace], 0)))

    def next(self, clients: Ints, now: int) -> int | None:
        """Return the earliest moment at which an interval of one of the clients starts, or None if none starts."""
        moment, at = self._find(clients, now)
        trace = clients % self._traces
        after = np.minimum(at + 1, len(self._on) - 1)
        comes = (at + 1 < len(self._on)) & (self._on[after] < (trace + 1) * self._stride)
        waits = np.where(comes, self._on[after] - moment, FOREVER)
        if self._period is not None:
            again = self._period - now % self._period + self._first[trace]
            waits = np.where((waits == FOREVER) & (self._first[trace] >= 0), again, waits)
        soonest = int(waits.min())
        return None if soonest >= FOREVER else now + soonest

    def _find(self, clients: Ints, now: int) -> tuple[Ints, Ints]:
        """Return for each client the position of `now` on the time axis, and the index of the last interval so far.

        The index is -1 if no interval on the axis starts at or before that position.
        """
        local = min(now, self._stride - 1) if self._period is None else now % self._period
        moment = (clients % self._traces) * self._stride + local
        return moment, np.searchsorted(self._on, moment, side="right") - 1


def _merged(pairs: list[tuple[float, float]]) -> list[tuple[int, int]]:
    """Convert (on, off) intervals from seconds to microseconds, and merge adjacent ones."""
    found: list[tuple[int, int]] = []
    for on, off in ((micros(on), micros(off)) for on, off in pairs):
        if found and found[-1][1] == on:
            found[-1] = found[-1][0], off
        elif on < off:
            found.append((on, off))
    return found


def read_intervals(file: str) -> Pairs:
    """Read a CSV file with the columns client,on,off (seconds). Return the intervals of each client.

    The clients are in the order of their first lines.
    """
    traces: dict[str, list[tuple[float, float]]] = {}
    for client, on, off in _columns(file, "available", ("client", "on", "off")):
        traces.setdefault(client, []).append((float(on), float(off)))
    return list(traces.values())


def read_seconds(file: str) -> list[float]:
    """Read a CSV file with the columns client,seconds. Return the virtual seconds per sample of each line."""
    return [float(seconds) for _, seconds in _columns(file, "speed", ("client", "seconds"))]


def _columns(file: str, field: str, names: tuple[str, ...]) -> list[list[str]]:
    """Read the columns `names` of a CSV file with a header.

    Raises ConfigError if the file cannot be read or is empty, or if a column except the first has a value that is not a
    number of 0 or more.
    """
    try:
        with Path(file).open(newline="", encoding="utf-8") as lines:
            rows = list(csv.DictReader(lines))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{field}: the trace {file} cannot be read: {error}", field=field) from error
    found = []
    for number, row in enumerate(rows, start=2):
        each = [row.get(name) or "" for name in names]
        try:
            if not all(0 <= float(value) < 1e9 for value in each[1:]):
                raise ValueError
        except ValueError:
            raise ConfigError(
                f"{field}: line {number} of {file} is {','.join(map(str, row.values()))!r}: give the columns "
                f"{','.join(names)}, with seconds of 0 or more",
                field=field,
            ) from None
        found.append(each)
    if not found:
        raise ConfigError(f"{field}: the trace {file} has no line below its header {','.join(names)}", field=field)
    return found
