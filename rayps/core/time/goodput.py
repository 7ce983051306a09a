"""A job's time, from the lines that its driver has written: totals by member, a timeline, and the goodput. Pure.

The driver writes lines of JSON to `time.jsonl` in the job's folder. A line is either a report of one process, or an
event. A report has totals since the start of its process, so that the last line of a process stands for all before it,
and a driver that continues a job after another only adds lines. A member (`worker-0`, `shard-1`) may have several
processes, one after the other. A worker that gets another rank keeps its name here; if its former rank is then given to
another worker, that one is called `worker-0.2`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rayps_client.values import JsonObject

from rayps.core.time.machine_waits import MachineWaits
from rayps.core.time.member_times import SERVERS, MemberTimes, add_seconds, read_member_times
from rayps.core.time.time_account import PARTS, USEFUL

FILE = "time.jsonl"
WORKER, SERVER = "worker", "server"
MOST_SLICES = 120  # the largest number of slices of a timeline


@dataclass(frozen=True, slots=True)
class ProcessTimes:
    """One report of one process. Times of day are in seconds since 1970, by the driver's clock."""

    name: str  # of the member
    began: float  # when the process was started; with the name it identifies the process
    wall: float  # seconds since then, by the driver's clock
    times: MemberTimes  # what the process has reported, and since then idle
    host: str = ""
    replaces: bool = False  # whether it was started because the member's process before it has died

    @property
    def kind(self) -> str:
        """`WORKER` or `SERVER`."""
        return WORKER if self.name.startswith("worker-") else SERVER

    @property
    def ended(self) -> float:
        """The time of the report."""
        return self.began + self.wall

    def to_json(self) -> JsonObject:
        """Return the report as a line of the file."""
        known: JsonObject = {"name": self.name, "began": round(self.began, 4), "wall": round(self.wall, 4)}
        return {**known, "host": self.host, "replaces": self.replaces, **self.times.to_json()}


@dataclass(frozen=True, slots=True)
class TimeEvent:
    """An event of the job that its timeline shows."""

    time: float
    kind: str
    message: str
    lost: bool = False  # whether the event names members that have died

    def to_json(self) -> JsonObject:
        """Return the event as a line of the file."""
        known: JsonObject = {"event": self.kind, "time": round(self.time, 4), "message": self.message}
        return {**known, "lost": True} if self.lost else known


@dataclass(frozen=True, slots=True)
class TimeSlice:
    """What a member did between two reports, or between two of its processes."""

    begin: float  # time of day in seconds since 1970
    end: float
    parts: dict[str, float]  # seconds
    rounds: int = 0  # that ended in it
    machine: MachineWaits = field(default_factory=MachineWaits)  # of the thread that trains

    def to_json(self) -> JsonObject:
        """Return the slice as JSON data."""
        parts = {part: round(value, 4) for part, value in self.parts.items()}
        return {"begin": round(self.begin, 4), "end": round(self.end, 4), "parts": parts}


@dataclass(frozen=True, slots=True)
class MemberTotals:
    """A worker's or a server's time, over all its processes."""

    name: str
    kind: str
    host: str
    began: float
    wall: float  # seconds of its processes and between those that replace each other, by the driver's clock
    times: MemberTimes  # of all processes, and `recovery` between them
    processes: int = 1

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part."""
        return self.times.parts

    @property
    def counted(self) -> float:
        """Seconds in all parts."""
        return self.times.wall

    @property
    def after_start(self) -> float:
        """Seconds in all parts except `start`."""
        return self.counted - self.parts.get("start", 0.0)

    def share(self, part: str) -> float:
        """Return the share of a part in the member's time after the start, 0 to 1."""
        return self.parts.get(part, 0.0) / self.after_start if self.after_start > 0 else 0.0

    def to_json(self) -> JsonObject:
        """Return the totals as JSON data."""
        known: JsonObject = {"name": self.name, "kind": self.kind, "host": self.host, "began": self.began}
        return {**known, "wall": round(self.wall, 4), "processes": self.processes, **self.times.to_json()}


@dataclass(frozen=True, slots=True)
class JobTime:
    """The time of a job's workers and servers."""

    members: tuple[MemberTotals, ...] = ()
    timeline: dict[str, tuple[TimeSlice, ...]] = field(default_factory=dict)  # by member
    events: tuple[TimeEvent, ...] = ()

    @property
    def workers(self) -> tuple[MemberTotals, ...]:
        """The totals of the workers."""
        return tuple(each for each in self.members if each.kind == WORKER)

    @property
    def servers(self) -> tuple[MemberTotals, ...]:
        """The totals of the servers."""
        return tuple(each for each in self.members if each.kind == SERVER)

    @property
    def goodput(self) -> float | None:
        """Useful seconds / seconds of all workers, 0 to 1. None if no worker has reported."""
        whole = sum(each.counted for each in self.workers)
        return sum(each.parts.get(USEFUL, 0.0) for each in self.workers) / whole if whole > 0 else None

    @property
    def shares(self) -> dict[str, float]:
        """The share of each part in the time of all workers, in the order of `PARTS`, without parts of no time."""
        whole = sum(each.counted for each in self.workers)
        sums = {part: sum(each.parts.get(part, 0.0) for each in self.workers) for part in PARTS}
        return {part: value / whole for part, value in sums.items() if value > 0} if whole > 0 else {}

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first process until the last report."""
        if not self.members:
            return 0.0
        return max(each.began + each.wall for each in self.members) - min(each.began for each in self.members)

    def to_json(self) -> JsonObject:
        """Return the time as JSON data."""
        return {
            "goodput": self.goodput,
            "seconds": round(self.seconds, 4),
            "shares": {part: round(value, 6) for part, value in self.shares.items()},
            "members": [each.to_json() for each in self.members],
            "timeline": {name: [each.to_json() for each in slices] for name, slices in self.timeline.items()},
            "events": [event.to_json() for event in self.events],
        }


def job_time(lines: Iterable[JsonObject]) -> JobTime:
    """Return the time of a job from the lines of its file, in the order in which they were written.

    Lines that are neither a report nor an event are left out.
    """
    reports: dict[str, list[ProcessTimes]] = {}
    events: list[TimeEvent] = []
    for line in lines:
        if "event" in line:
            kind, message = str(line["event"]), str(line.get("message", ""))
            events.append(TimeEvent(_read_number(line.get("time")), kind, message, bool(line.get("lost"))))
        elif isinstance(line.get("name"), str) and isinstance(line.get("parts"), dict):
            found = ProcessTimes(
                str(line["name"]),
                _read_number(line.get("began")),
                _read_number(line.get("wall")),
                read_member_times(line),
                str(line.get("host") or ""),
                bool(line.get("replaces")),
            )
            reports.setdefault(found.name, []).append(found)
    names = sorted(reports, key=_make_sort_key)
    totals = [_add_up(reports[name]) for name in names]
    members = _name_waits(totals)
    slices = {
        after.name: tuple(_move_waits(each, before, after) for each in _cut_slices(reports[after.name]))
        for before, after in zip(totals, members, strict=True)
    }
    return JobTime(members, slices, tuple(events))


def read_job_time(path: Path) -> JobTime:
    """Return the time of a job from its file. Raises OSError if the file cannot be read."""
    return job_time(read_lines(path))


def read_lines(path: Path) -> list[JsonObject]:
    """Return the complete lines of a job's file. Raises OSError if the file cannot be read."""
    found: list[JsonObject] = []
    with path.open("rb") as file:
        for raw in file:
            try:
                line = json.loads(raw)
            except ValueError:
                continue  # a killed driver has left half of this line
            if isinstance(line, dict):
                found.append(line)
    return found


def _add_up(reports: Sequence[ProcessTimes]) -> MemberTotals:
    """Return the totals of one member from its reports."""
    last = _find_last_reports(reports)
    first = last[0]
    times, before, wall = MemberTimes(), first.began, 0.0
    for process in last:
        gap = max(0.0, process.began - before) if process.replaces else 0.0
        between = MemberTimes({"recovery": gap}) if gap else MemberTimes()
        times, before, wall = times.plus(between).plus(process.times), process.ended, wall + gap + process.wall
    return MemberTotals(first.name, first.kind, last[-1].host, first.began, wall, times, len(last))


def _find_last_reports(reports: Sequence[ProcessTimes]) -> list[ProcessTimes]:
    """Return the last report of each process, in the order in which the processes were started."""
    newest = {report.began: report for report in reports}
    return [newest[began] for began in sorted(newest)]


def _cut_slices(reports: Sequence[ProcessTimes]) -> tuple[TimeSlice, ...]:
    """Return the member's timeline, in at most `MOST_SLICES` slices."""
    found: list[TimeSlice] = []
    by_process: dict[float, list[ProcessTimes]] = {}
    for report in reports:
        by_process.setdefault(report.began, []).append(report)
    for began in sorted(by_process):
        if found and began > found[-1].end and by_process[began][0].replaces:
            found.append(TimeSlice(found[-1].end, began, {"recovery": began - found[-1].end}))
        before, at = MemberTimes(), began
        for report in by_process[began]:
            times = report.times
            parts = {part: value - before.parts.get(part, 0.0) for part, value in times.parts.items()}
            parts = {part: max(0.0, value) for part, value in parts.items() if value}
            rounds, machine = max(0, times.rounds - before.rounds), times.machine.since(before.machine)
            found.append(TimeSlice(at, report.ended, parts, rounds, machine))
            before, at = times, report.ended
    return _thin_out([each for each in found if each.end > each.begin])


def _thin_out(slices: list[TimeSlice]) -> tuple[TimeSlice, ...]:
    step = -(-len(slices) // MOST_SLICES)
    groups = [slices[at : at + step] for at in range(0, len(slices), step)] if step > 1 else [[one] for one in slices]
    found = []
    for group in groups:
        parts, machine = group[0].parts, group[0].machine
        for each in group[1:]:
            parts, machine = add_seconds(parts, each.parts), machine.plus(each.machine)
        found.append(TimeSlice(group[0].begin, group[-1].end, parts, sum(each.rounds for each in group), machine))
    return tuple(found)


def _make_sort_key(name: str) -> tuple[bool, str, int, str]:
    kind, _, place = name.rpartition("-")
    number, _, holder = place.partition(".")
    return (not name.startswith("worker-"), kind, int(number) if number.isdigit() else 0, holder)


def _read_number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _name_waits(members: Sequence[MemberTotals]) -> tuple[MemberTotals, ...]:
    """Return members in which workers' waits for servers name the workers for whose pushes the servers waited.

    The servers work at the same time: the largest delay of all servers counts. What remains of the waits for servers is
    the exchange itself, and counts as communication.
    """
    delays: dict[str, dict[str, float]] = {}
    for server in members:
        for who, by in server.times.delays.items():
            found = delays.setdefault(who, {})
            for peer, seconds in by.items():
                found[peer] = max(seconds, found.get(peer, 0.0))
    return tuple(_take_out_servers(each, delays.get(each.name, {})) for each in members)


def _move_waits(slice_: TimeSlice, before: MemberTotals, after: MemberTotals) -> TimeSlice:
    """Return a slice in which as much of the waits is communication as in the member's totals: see `_name_waits`."""
    waited, waiting = slice_.parts.get("waiting", 0.0), before.parts.get("waiting", 0.0)
    moved = waited * (1 - after.parts.get("waiting", 0.0) / waiting) if waiting > 0 else 0.0
    if not moved:
        return slice_
    return replace(slice_, parts=add_seconds(slice_.parts, {"waiting": -moved, "communication": moved}))


def _take_out_servers(member: MemberTotals, delays: dict[str, float]) -> MemberTotals:
    times = member.times
    whole = times.waits.get(SERVERS, 0.0)
    if whole <= 0:
        return member
    delayed = sum(delays.values())
    scale = min(1.0, whole / delayed) if delayed > 0 else 0.0
    rest = whole - scale * delayed
    waits = {peer: value for peer, value in times.waits.items() if peer != SERVERS}
    waits = add_seconds(waits, {peer: scale * value for peer, value in delays.items()})
    parts = add_seconds(times.parts, {"waiting": -rest, "communication": rest})
    return replace(member, times=replace(times, parts=parts, waits=waits))
