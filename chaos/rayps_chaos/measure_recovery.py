"""What a fault cost a job, from the times of its points. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rayps.core.job.records import Event
from rayps_chaos.history import JobHistory
from rayps_chaos.plan import PlannedFault

_STRETCH = 20  # rounds over which the usual time of a round is measured
# the kinds of events that follow from a fault
_FOLLOWS = (
    "restarted",
    "replaced",
    "rejoined",
    "mending",
    "mended",
    "driver_restarted",
    "resumed",
    "began_again",
    "unknown",
    "server_lost",
    "resized",
    "warning",
    "lost",
    "failed",
)
# the kinds of events that end the time of a failure: a member, or the whole job, trains again; or the job has failed
_ANSWERS = ("restarted", "replaced", "rejoined", "mended", "resumed", "began_again", "resized", "failed")


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault of the plan, and what was done. Times are seconds since the epoch."""

    planned: PlannedFault
    at: float
    until: float
    words: str  # what was done
    skipped: str | None = None  # why nothing was done; None if the fault was injected
    pid: int = 0  # the process that was hit


@dataclass(frozen=True, slots=True)
class FaultCost:
    """What a fault cost, from its beginning to that of the next fault or the end of the job. Times are in seconds.

    `recovery` is the longest time in which no new round was complete, counted from the fault, less the usual time
    between two reports of new rounds. A repeated round is not new. It is None if the job did not succeed and there was
    no new round after it had trained again. `trained_again` is then the time from the fault to the next round, which
    was a repeated one; None if there was none.
    """

    fault: InjectedFault
    recovery: float | None
    lost: float  # the time less the usual time of the new rounds
    repeated: int  # rounds that were written again
    followed: tuple[str, ...]  # kinds of the events that followed
    trained_again: float | None = None


@dataclass(frozen=True, slots=True)
class KindCost:
    """The recoveries from one kind of fault, in seconds."""

    kind: str
    count: int
    median: float
    p95: float
    worst: float


def new_rounds(history: JobHistory) -> list[tuple[float, int]]:
    """Return (time, round) of each point of a round that is beyond all earlier ones, in order."""
    found, reached = list[tuple[float, int]](), -1
    for point in history.points:
        if point["kind"] == "round" and point["round"] > reached:
            reached = point["round"]
            found.append((point["time"], reached))
    return found


def usual_round(history: JobHistory) -> float:
    """Return the usual seconds of a round; 0 if there are too few points.

    It is the median over stretches of rounds, because the driver reports several rounds at once.
    """
    times = [at for at, _ in new_rounds(history)]
    stretch = min(_STRETCH, len(times) // 4)
    spans = [(after - before) / stretch for before, after in zip(times, times[stretch:], strict=False) if stretch]
    return statistics.median(spans) if spans else 0.0


def usual_gap(history: JobHistory) -> float:
    """Return the median seconds between two reports of new rounds; 0 if there are too few."""
    times = sorted({round(at, 3) for at, _ in new_rounds(history)})
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return statistics.median(gaps) if gaps else 0.0


def costs(history: JobHistory, faults: Sequence[InjectedFault]) -> list[FaultCost]:
    """Return the cost of each injected fault."""
    done = [fault for fault in faults if fault.skipped is None]
    found, usual, gap = new_rounds(history), usual_round(history), usual_gap(history)
    rows = []
    for number, fault in enumerate(done):
        until = done[number + 1].at if number + 1 < len(done) else max(history.ended, fault.at)
        answered = _answered(history.events, fault.at, until if number + 1 < len(done) else math.inf)
        whole = history.status == "SUCCEEDED" or any(at > until for at, _ in found)
        new = any(answered < at <= until for at, _ in found)
        recovery = _recovery(found, fault.at, until, gap) if whole or new else None
        rows.append(
            FaultCost(
                fault,
                recovery,
                max(0.0, until - fault.at - usual * sum(fault.at < at <= until for at, _ in found)),
                _repeated(history, fault.at, until),
                _followed(history.events, fault.at, until),
                _trained_again(history, fault.at, answered) if recovery is None else None,
            )
        )
    return rows


def _answered(events: Sequence[Event], at: float, until: float) -> float:
    """Return when the job trained again or failed after a fault at `at`; `at` itself if nothing says so before `until`.

    Rounds between the fault and this time were complete before the fault had an effect.
    """
    times = [event["time"] for event in events if at <= event["time"] < until and event["kind"] in _ANSWERS]
    return float(min(times, default=at))


def _recovery(found: Sequence[tuple[float, int]], at: float, until: float, gap: float) -> float:
    inside = [time for time, _ in found if at < time <= until]
    later = [time for time, _ in found if time > until]
    interrupted = [until] if inside and later else []  # the pause that the next fault interrupts is its own
    marks = [at, *(inside or later[:1] or [until]), *interrupted]
    return max(0.0, max(b - a for a, b in itertools.pairwise(marks)) - gap)


def _trained_again(history: JobHistory, at: float, answered: float) -> float | None:
    times = [point["time"] for point in history.points if point["kind"] == "round" and point["time"] > answered]
    return min(times) - at if times else None


def _repeated(history: JobHistory, at: float, until: float) -> int:
    reached, count = -1, 0
    for point in history.points:
        if point["kind"] == "round":
            count += point["round"] <= reached and at < point["time"] <= until
            reached = max(reached, point["round"])
    return count


def _followed(events: Sequence[Event], at: float, until: float) -> tuple[str, ...]:
    kinds = [event["kind"] for event in events if at <= event["time"] < until and event["kind"] in _FOLLOWS]
    return tuple(dict.fromkeys(kinds))


def by_kind(found: Sequence[FaultCost]) -> list[KindCost]:
    """Return the costs of each kind of fault on each role, in the order of their names."""
    groups: dict[str, list[float]] = {}
    for cost in found:
        if cost.recovery is not None:
            groups.setdefault(str(cost.fault.planned.fault), []).append(cost.recovery)
    return [
        KindCost(kind, len(seconds), statistics.median(seconds), quantile(seconds, 0.95), max(seconds))
        for kind, seconds in sorted(groups.items())
    ]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is at least as large as this share of the values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
