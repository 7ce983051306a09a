"""Over which time workers can be compared: their totals in spans in which the same workers took part. Pure.

In an elastic job, the rows that a worker has in a round depend on how many workers there are. A worker that was alone
for a while has spent more seconds for a round than the workers that joined it later, and is not slower than they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rayps.core.time.goodput import JobTime, MemberTotals, TimeSlice
from rayps.core.time.machine_waits import MachineWaits
from rayps.core.time.member_times import add_seconds

CHANGED = "resized"  # the kind of the events that report a new number of workers
INSIDE = 0.9  # the share of a slice that lies in a span in which the slice counts


@dataclass(frozen=True, slots=True)
class Together:
    """Workers that took part at the same time, and their totals over this time."""

    workers: tuple[MemberTotals, ...]
    share: float  # of the time of all workers after their start that these totals have, 0 to 1


def find_common_spans(time: JobTime) -> tuple[Together, ...]:
    """Return the spans over which a job's workers can be compared, in the order of time.

    If the number of workers has never changed, this is one span with the workers' totals, also those of processes that
    were replaced. Otherwise, a span begins or ends where a worker has joined or left. A slice of the timeline counts in
    the span in which it lies, and is left out if it lies in several. In both cases, workers that have no round
    in a span are left out, and so are spans of fewer than two workers.
    """
    if not any(event.kind == CHANGED for event in time.events):
        spans: Iterable[Sequence[MemberTotals]] = [time.workers]
    else:
        present = {each.name: _find_present(time.timeline.get(each.name, ())) for each in time.workers}
        ends = sorted({end for slices in present.values() for part in _join_spans(slices) for end in part})
        spans = (
            [_add_up_within(each, present[each.name], begin, end) for each in time.workers]
            for begin, end in itertools.pairwise(ends)
        )
    whole = sum(each.after_start for each in time.workers)
    found = []
    for span in spans:
        workers = tuple(each for each in span if each.times.rounds > 0 and each.after_start > 0)
        if len(workers) > 1:
            found.append(Together(workers, sum(each.after_start for each in span) / whole))
    return tuple(found)


def _find_present(slices: Sequence[TimeSlice]) -> list[TimeSlice]:
    """Return the slices in which a process of the worker took part, without its start."""
    found = []
    for each in slices:
        start, only = each.parts.get("start", 0.0), {part for part, seconds in each.parts.items() if seconds > 0}
        if each.begin + start < each.end and not (only <= {"start", "recovery"} and each.rounds == 0):
            parts = {part: seconds for part, seconds in each.parts.items() if part != "start"}
            found.append(replace(each, begin=each.begin + start, parts=parts))
    return found


def _join_spans(slices: Sequence[TimeSlice]) -> list[tuple[float, float]]:
    """Return the spans (begin, end) that slices without gaps between them cover."""
    found: list[tuple[float, float]] = []
    for each in slices:
        if found and each.begin <= found[-1][1]:
            found[-1] = found[-1][0], each.end
        else:
            found.append((each.begin, each.end))
    return found


def _add_up_within(worker: MemberTotals, slices: Sequence[TimeSlice], begin: float, end: float) -> MemberTotals:
    """Return the worker's totals over the slices that lie between two times."""
    parts: dict[str, float] = {}
    machine, rounds = MachineWaits(), 0
    for each in slices:
        if min(end, each.end) - max(begin, each.begin) >= INSIDE * (each.end - each.begin):
            parts, machine, rounds = add_seconds(parts, each.parts), machine.plus(each.machine), rounds + each.rounds
    return replace(worker, times=replace(worker.times, parts=parts, machine=machine, rounds=rounds))
