"""What a fault cost a job, from the times of its points. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rayps.chaos.history import JobHistory
from rayps.chaos.plan import PlannedFault
from rayps.core.records import Event

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


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault of the plan, and what was done. Times are seconds since the epoch."""

    planned: PlannedFault
    at: float
    until: float
    words: str  # what was done
    skipped: str | None = None  # why nothing was done; None if the fault was injected


@dataclass(frozen=True, slots=True)
class FaultCost:
    """What a fault cost. `recovery` is None if the job did not go on after the fault.

    `recovery` is the time from the fault to the first round beyond those that were complete at the fault, less the
    usual time of a round. It therefore contains the time in which rounds are repeated.
    """

    fault: InjectedFault
    recovery: float | None  # seconds
    repeated: int  # rounds that were written again before the next fault
    followed: tuple[str, ...]  # kinds of the events that followed, before the next fault


@dataclass(frozen=True, slots=True)
class KindCost:
    """The recoveries from one kind of fault, in seconds."""

    kind: str
    count: int
    median: float
    p95: float
    worst: float


def usual_round(history: JobHistory) -> float:
    """Return the median seconds between two successive points of rounds; 0 if there are too few."""
    times = [point["time"] for point in history.points if point["kind"] == "round"]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return statistics.median(gaps) if gaps else 0.0


def costs(history: JobHistory, faults: Sequence[InjectedFault]) -> list[FaultCost]:
    """Return the cost of each injected fault."""
    done = [fault for fault in faults if fault.skipped is None]
    usual = usual_round(history)
    found = []
    for number, fault in enumerate(done):
        until = done[number + 1].at if number + 1 < len(done) else math.inf
        found.append(_cost(history, fault, until, usual))
    return found


def _cost(history: JobHistory, fault: InjectedFault, until: float, usual: float) -> FaultCost:
    rounds = [(point["time"], point["round"]) for point in history.points if point["kind"] == "round"]
    reached = max((number for at, number in rounds if at <= fault.at), default=-1)
    later = [at for at, number in rounds if at > fault.at and number > reached]
    if not later and history.status == "SUCCEEDED":  # there was no further round, but e.g. an evaluation
        later = [history.ended]
    recovery = max(0.0, later[0] - fault.at - usual) if later else None
    window = [(at, number) for at, number in rounds if fault.at < at <= until]
    seen = {number for at, number in rounds if at <= fault.at}
    repeated = 0
    for _, number in window:
        repeated += number in seen
        seen.add(number)
    return FaultCost(fault, recovery, repeated, _followed(history.events, fault.at, until))


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
