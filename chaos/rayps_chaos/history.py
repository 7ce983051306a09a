"""What a job left, and the checks of it: nothing twice, nothing missing, no hang. Pure, except `read_history`.

The checks read the records that every job leaves (events, points, outcome, the service's answer). They hold whatever
faults were injected; a strategy's promise about the result is checked by `rayps_chaos.compare_results`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rayps.core.job.records import Event, OutcomeRecord, Point, read_json

ENDS = ("SUCCEEDED", "FAILED", "STOPPED")
_END_KINDS = ("finished", "failed", "stopped")
# the kinds of events after which rounds may be repeated
_REPEATS = (
    *("restarted", "mending", "mended", "replaced", "rejoined", "resumed", "began_again", "driver_restarted"),
    "resized",
)


@dataclass(frozen=True, slots=True)
class JobHistory:
    """The records of one job. Times are seconds since the epoch."""

    job: str
    status: str | None  # of the service's row; None if the service has no row
    events: Sequence[Event]  # of the driver and of the service
    points: Sequence[Point]  # of the whole group, in the order in which they were written
    outcome: OutcomeRecord | None
    rounds: int | None  # number of rounds of the whole job; None if it is not known
    begun: float  # when the job was submitted
    ended: float  # when it ended, or when the wait for its end was over
    reason: str = ""  # why the job has its status; "" if nothing says it

    @property
    def numbers(self) -> list[tuple[int, int]]:
        """The (generation, round) of each point of a round, in the order in which they were written."""
        return [(point["generation"], point["round"]) for point in self.points if point["kind"] == "round"]


@dataclass(frozen=True, slots=True)
class HistoryCheck:
    """The result of one check. `words` says what was found."""

    name: str
    good: bool
    words: str


@dataclass(frozen=True, slots=True)
class HistoryBounds:
    """What a run must keep: `deadline` and `longest_gap` in seconds, and the ids that the service acknowledged."""

    deadline: float
    longest_gap: float
    acknowledged: frozenset[str] = field(default_factory=frozenset)


def check_history(history: JobHistory, bounds: HistoryBounds) -> list[HistoryCheck]:
    """Return the result of each check."""
    return [
        check_success(history),
        check_rounds(history),
        check_repetitions(history),
        check_end(history),
        check_acknowledged([history.job] if history.status is not None else [], bounds.acknowledged),
        check_time(history, bounds),
        check_lost_pushes(history),
    ]


def check_success(history: JobHistory) -> HistoryCheck:
    """Check that the job succeeded, or that its user stopped it."""
    good = history.status in ("SUCCEEDED", "STOPPED")
    words = history.status or "the service has no such job, or does not answer"
    reason = "; ".join(history.reason.splitlines())
    return HistoryCheck("the job succeeded", good, f"{words}: {reason}" if reason else words)


def check_rounds(history: JobHistory) -> HistoryCheck:
    """Check that no round is missing between the first and the last one; of a whole job, up to its number of rounds.

    A round that one rank has not reported, because it died, may be written after later ones.
    """
    seen = {number for _, number in history.numbers}
    ended_early = any(event["kind"] == "ended_early" for event in history.events)
    whole = history.status == "SUCCEEDED" and history.rounds is not None and not ended_early
    end = max([*seen, (history.rounds or 0) - 1 if whole else -1], default=-1) + 1
    missing = sorted(set(range(min(seen, default=0), end)) - seen)
    beyond = sorted(number for number in seen if whole and number >= (history.rounds or 0))
    if beyond:
        return HistoryCheck("every round", False, f"the job has {history.rounds} rounds, and points of {beyond[:5]}")
    if missing:
        return HistoryCheck("every round", False, f"{len(missing)} of {end} rounds have no point: {missing[:5]}")
    return HistoryCheck("every round", True, f"{len(seen)} rounds, none is missing")


def check_repetitions(history: JobHistory) -> HistoryCheck:
    """Check that rounds are written again only after an event that says why the job went back."""
    seen, back, repeated, before = set[int](), 0, 0, False
    for _, number in history.numbers:
        again = number in seen
        repeated += again
        back += again and not before
        seen.add(number)
        before = again
    reasons = sum(event["kind"] in _REPEATS for event in history.events)
    words = f"{repeated} rounds were repeated, the job went back {back} times"
    good = back <= reasons
    return HistoryCheck("repeated with a reason", good, words if good else f"{words}, and {reasons} events say why")


def check_end(history: JobHistory) -> HistoryCheck:
    """Check that the job ended once, and that the service and the driver agree about how."""
    ends = [event["kind"] for event in history.events if event["kind"] in _END_KINDS]
    outcome = None if history.outcome is None else str(history.outcome.get("status"))
    good = history.status in ENDS and len(ends) <= 1 and outcome in (None, history.status)
    words = f"{history.status or 'no row'}, outcome {outcome or 'not written'}, {len(ends)} events of an end"
    return HistoryCheck("ended once", good and (outcome is not None or history.status != "SUCCEEDED"), words)


def check_acknowledged(stored: Iterable[str], acknowledged: Iterable[str]) -> HistoryCheck:
    """Check that the service has each job that it acknowledged."""
    promised = set(acknowledged)
    lost = sorted(promised - set(stored))
    words = f"{len(promised)} jobs acknowledged, {len(lost)} lost" + (f": {', '.join(lost[:3])}" if lost else "")
    return HistoryCheck("no acknowledged job lost", not lost, words)


def check_time(history: JobHistory, bounds: HistoryBounds) -> HistoryCheck:
    """Check that the job ended within the deadline, and that no two points are too far apart."""
    times = [history.begun, *sorted(point["time"] for point in history.points), history.ended]
    gap = max(after - before for before, after in itertools.pairwise(times))
    seconds = history.ended - history.begun
    good = seconds <= bounds.deadline and gap <= bounds.longest_gap and history.status in ENDS
    words = (
        f"{seconds:.1f} s of at most {bounds.deadline:g} s, longest gap {gap:.1f} s of at most {bounds.longest_gap:g} s"
    )
    return HistoryCheck("no hang", good, words)


def check_lost_pushes(history: JobHistory) -> HistoryCheck:
    """Check that no push was lost. A strategy may lose pushes if the workers' replay buffers were too small."""
    lost = sum(int(event.get("pushes", 0)) for event in history.events if event["kind"] == "lost")
    return HistoryCheck("no push lost", not lost, f"{lost} pushes lost")


def read_history(
    folder: Path, row: Mapping[str, object] | None, service_events: Sequence[Event], *, begun: float, ended: float
) -> JobHistory:
    """Read the records in a job's folder. `row` is the service's answer about the job; None if it has none.

    `service_events`: the job's events as the service answers them; if there are none, those of the folder are read.
    """
    progress = read_json(folder / "progress.json") or {}
    outcome: OutcomeRecord | None = read_json(folder / "outcome.json")
    return JobHistory(
        folder.name,
        None if row is None else str(row["status"]),
        service_events or read_lines(folder / "events.jsonl"),
        read_lines(folder / "metrics.jsonl"),
        outcome,
        progress.get("rounds"),
        begun,
        ended,
        str((row or {}).get("reason") or (outcome or {}).get("message") or ""),
    )


def read_lines(path: Path) -> list[Event]:
    """Return the JSON objects of a file with one on each line, without lines that a killed writer left incomplete."""
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found
