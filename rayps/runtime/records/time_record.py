"""The record of a job's time, which the driver writes from its members' reports: see `rayps.core.time.goodput`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from rayps_client.errors import ClusterError
from rayps_client.values import JsonObject

from rayps.cluster.local import until
from rayps.cluster.members import GroupMember
from rayps.core.full_disk import reports_full_disk
from rayps.core.job.records import AccountRecord, Event, Point
from rayps.core.time.goodput import FILE, JobTime, ProcessTimes, TimeEvent, job_time, read_job_time, read_lines
from rayps.core.time.member_times import MemberTimes, add_seconds
from rayps.core.time.time_account import USEFUL, name_waits
from rayps.core.time.time_verdict import reach_verdict
from rayps.runtime.records.line_file import LineFile

LAST_SECONDS = 2.0  # the longest wait for the members' last reports
SHOW_SECONDS = 0.5  # seconds between two computations of what the progress shows
LEAST_SECONDS, MOST_SECONDS = 1.0, 30.0  # between two reports of a process in the file
SHARE = 0.01  # seconds between two reports of a process in the file / its age
# the kinds of events that the timeline shows
SHOWN = {
    *("placed", "phase", "restarted", "mending", "mended", "replaced", "rejoined", "resized", "notice", "checkpoint"),
    *("server_lost", "ended_early", "finished", "stopped", "failed", "warning"),
}


class _MemberProcess:
    """What the driver knows of one process of a member."""

    def __init__(self, name: str, member: GroupMember, began: float, *, replaces: bool) -> None:
        """`name` is the member's name in the record, and `began` the time of day of the start.

        `replaces`: the process is there because another one has died.
        """
        self.name, self.began, self.spawned, self.replaces = name, began, member.spawned, replaces
        self.host, self.dead = "", False
        self.times: MemberTimes | None = None
        self.wall, self.seen = 0.0, member.spawned
        self.written = -1e9
        self._before = "recovery" if replaces else "start"
        self._unreported = math.inf  # seconds between the start of the process and that of its account

    def add(self, times: MemberTimes, now: float) -> None:
        """Take over a report that arrives at `now`, as time.monotonic."""
        self.wall = now - self.spawned
        # a report arrives some time after it was made: the shortest of these delays is the best estimate
        self._unreported = max(0.0, min(self._unreported, self.wall - times.wall))
        self.times = replace(times, parts=add_seconds(times.parts, {self._before: self._unreported}))

    def end(self, now: float) -> None:
        """Count the time since the last report as idle: the process has nothing to do any more."""
        if self.times is not None:
            self.wall = now - self.spawned
            self.times = replace(
                self.times, parts=add_seconds(self.times.parts, {"idle": max(0.0, self.wall - self.times.wall)})
            )

    def end_unreported(self) -> None:
        """Count the time of a process that has died before its first report, as far as it was seen alive."""
        if self.times is None:
            self.wall = self.seen - self.spawned
            self.times = MemberTimes({self._before: self.wall})

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part, as far as they were reported."""
        return {} if self.times is None else self.times.parts

    def line(self) -> JsonObject:
        """Return the newest report as a line of the file."""
        assert self.times is not None, "the process has reported"
        return ProcessTimes(self.name, self.began, self.wall, self.times, self.host, self.replaces).to_json()


class _GroupServer:
    """What the driver knows of one server of a group since it first saw the server."""

    def __init__(self, name: str, epoch: float, now: float, first: MemberTimes) -> None:
        """`epoch` is the time of day at which the clock is 0, and `first` the totals at the clock's time `now`."""
        self.name, self.host = name, ""
        self.times, self.wall, self.written = MemberTimes(), 0.0, -1e9
        self._began, self._day = now, epoch + now
        self._last = first

    def add(self, times: MemberTimes, now: float) -> None:
        """Add what the totals have grown by since the last call. A total that is smaller has begun again at 0."""
        before, self._last, self.wall = self._last, times, now - self._began
        delays = {who: _find_growth(by, before.delays.get(who, {})) for who, by in times.delays.items()}
        waits: dict[str, float] = {}
        for by in delays.values():
            waits = add_seconds(waits, by)
        spent = {(part, ""): value for part, value in _find_growth(times.parts, before.parts).items()}
        grown = MemberTimes.of(name_waits(spent, waits))
        self.times = self.times.plus(replace(grown, delays=delays))

    def end(self, now: float) -> None:
        """Count the time since the last totals as idle: they arrive with heartbeats, and the workers have ended."""
        self.wall = now - self._began
        self.times = replace(
            self.times, parts=add_seconds(self.times.parts, {"idle": max(0.0, self.wall - self.times.wall)})
        )

    def line(self) -> JsonObject:
        """Return the totals since the driver first saw the server, as a line of the file."""
        return ProcessTimes(self.name, self._day, self.wall, self.times, self.host).to_json()


def _find_growth(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    found = {key: value - before.get(key, 0.0) for key, value in now.items()}
    return {key: now[key] if value < 0 else value for key, value in found.items()}


class TimeRecord:
    """Collects the reports of a job's members, and writes them to `time.jsonl` in the job's folder if it has one."""

    def __init__(self, folder: Path | None, *, anew: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        """Continue the file in `folder`, or write it anew. While there is no such folder, the lines are in memory."""
        self._clock, self._epoch = clock, time.time() - clock()
        self._processes: dict[str, _MemberProcess] = {}  # the newest process of each member, by name in the record
        self._by_start: dict[float, _MemberProcess] = {}  # the same and the earlier ones, by `spawned`
        self._earlier: dict[str, dict[str, float]] = {}  # seconds by part of each member's earlier processes
        self._alive: set[float] = set()  # `spawned` of the group's present members
        self._reached: dict[str, int] = {}  # from a worker's name to the rounds that it has reported
        self._events: dict[tuple[str, bool], JsonObject] = {}  # the newest, by kind and whether members have died
        self._reached_before = 0  # rounds that the workers of earlier drivers have reported
        self.recovering = False  # whether the next generation follows a failure
        self._servers: dict[str, _GroupServer] = {}  # of a server group, by name
        self._path = None if folder is None else folder / FILE
        self._lines: list[JsonObject] = []  # that are not in the file yet
        self._file: LineFile | None = None
        self._continues = False  # whether an earlier driver has written reports
        self._shown: AccountRecord | None = None  # what `account` has returned, until a new one is due
        self._shown_until = 0.0
        if self._path is not None and self._path.exists() and anew:
            self._path.unlink()
        elif self._path is not None and self._path.exists():
            self._continues = True
            self._earlier = {each.name: each.parts for each in read_job_time(self._path).members}

    def add(self, members: Iterable[GroupMember]) -> None:
        """Take over the reports in the facts of the members' last polls."""
        now, members = self._clock(), list(members)
        self._alive = {member.spawned for member in members}
        for member in members:
            position = getattr(member.facts, "position", 0)
            self._reached[member.name] = max(position, self._reached.get(member.name, 0))
            process = self._process_of(member, now)
            times: MemberTimes | None = getattr(member.facts, "times", None)
            if times is not None:
                member.facts.times = None
                self._add(process, times, now)

    def add_servers(self, found: Mapping[str, tuple[str, MemberTimes]]) -> None:
        """Take over the accounts of a group's servers: from a name to the host and the totals since its start.

        What the servers did before the job is left out.
        """
        now = self._clock()
        for name, (host, times) in found.items():
            server = self._servers.get(name)
            if server is None:
                server = self._servers[name] = _GroupServer(name, self._epoch, now, times)
            server.host = host
            server.add(times, now)
            if now - server.written >= min(MOST_SECONDS, max(LEAST_SECONDS, SHARE * server.wall)):
                server.written = now
                self._write(server.line())

    def continues(self, points: Iterable[Point]) -> None:
        """Take over the rounds of earlier drivers: `points` are those that they have written."""
        rounds = [point["round"] + 1 for point in points if point["kind"] == "round"]
        self._reached_before = max(rounds, default=0)
        self.recovering = bool(rounds)

    def begin_generation(self, workers: int) -> tuple[bool, tuple[int, ...]]:
        """Return whether the new generation follows a failure, and by rank the rounds that were trained before."""
        found, self.recovering = self.recovering, False
        names = [f"worker-{rank}" for rank in range(workers)]
        return found, tuple(max(self._reached_before, self._reached.get(name, 0)) for name in names)

    def add_event(self, event: Event) -> None:
        """Write an event, if it is of a kind that the timeline shows."""
        if event["kind"] in SHOWN:
            kind, lost = str(event["kind"]), bool(event.get("lost"))
            found = TimeEvent(float(event["time"]), kind, str(event["message"]), lost)
            self._events[kind, lost] = found.to_json()
            self._write(found.to_json())

    def end(self, members: Iterable[GroupMember]) -> None:
        """At the end of the run, ask the living members for their last reports, and write the totals of all."""
        living = [member for member in members if not member.dead]
        self._alive = {member.spawned for member in members}
        asked = [(member, member.handle.call("times")) for member in living]
        until(lambda: all(reply.done() for _, reply in asked), LAST_SECONDS)
        for member, reply in asked:
            try:
                times = reply.result(0)
            except (ClusterError, TimeoutError):
                continue  # the last report of a poll stands
            if times is not None:
                self._add(self._process_of(member, self._clock()), times, self._clock())
        now, self._shown = self._clock(), None
        for server in self._servers.values():
            server.end(now)
            self._write(server.line())
        for process in self._processes.values():
            if process.spawned in self._alive:
                process.end(now)
            if process.times is not None:
                self._write(process.line())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def job_time(self) -> JobTime:
        """Return the job's time so far, also that under earlier drivers."""
        newest = [process.line() for process in self._processes.values() if process.times is not None]
        newest += [server.line() for server in self._servers.values()]
        written = [] if self._path is None or not self._path.exists() else read_lines(self._path)
        return job_time([*written, *self._lines, *newest])

    def account(self) -> AccountRecord:
        """Return the job's time so far, for its progress. It is computed at most twice a second."""
        now = self._clock()
        if self._shown is None or now >= self._shown_until:
            self._shown, self._shown_until = self._make_account(), now + SHOW_SECONDS
        return self._shown

    def _make_account(self) -> AccountRecord:
        members = dict(self._earlier)
        for name, process in self._processes.items():
            if process.times is not None:
                members[name] = add_seconds(members.get(name, {}), process.times.parts)
        seconds: dict[str, float] = {}
        for name, parts in members.items():
            if name.startswith("worker-"):
                seconds = add_seconds(seconds, parts)
        whole = sum(seconds.values())
        members |= {name: server.times.parts for name, server in self._servers.items()}
        lines = [process.line() for process in self._processes.values() if process.times is not None]
        lines += [server.line() for server in self._servers.values()]
        found = reach_verdict(job_time([*lines, *self._events.values()]))
        return {
            "goodput": seconds.get(USEFUL, 0.0) / whole if whole > 0 else None,
            "seconds": _round(seconds),
            "members": {name: _round(members[name]) for name in sorted(members)},
            "verdict": found.summary,
            "guilty": list(found.guilty),
        }

    def _process_of(self, member: GroupMember, now: float) -> _MemberProcess:
        """Return the record of a member's process, which is found by its start: the member's rank may change."""
        process = self._by_start.get(member.spawned)
        if process is None:
            process = self._begin_process(member)
        if member.dead is None:
            process.seen = now
        process.dead = member.dead is not None
        if member.place is not None:
            process.host = member.place.host
        return process

    def _begin_process(self, member: GroupMember) -> _MemberProcess:
        """Begin the record of a process. End that of the process before it, if that has died or left."""
        name, holder = member.name, 1
        before = self._processes.get(name)
        while before is not None and before.spawned in self._alive:  # it has another rank now
            holder += 1
            name = f"{member.name}.{holder}"
            before = self._processes.get(name)
        if before is not None:
            before.end_unreported()
            self._write(before.line())
            self._earlier[name] = add_seconds(self._earlier.get(name, {}), before.parts)
        replaces = self._continues if before is None else before.dead
        process = _MemberProcess(name, member, self._epoch + member.spawned, replaces=replaces)
        self._processes[name] = self._by_start[member.spawned] = process
        return process

    def _add(self, process: _MemberProcess, times: MemberTimes, now: float) -> None:
        process.add(times, now)
        if now - process.written >= min(MOST_SECONDS, max(LEAST_SECONDS, SHARE * process.wall)):
            process.written = now
            self._write(process.line())

    def _write(self, line: JsonObject) -> None:
        """Write a line to the file, if its folder exists, else keep it. If the disk is full, the file keeps it."""
        self._lines.append(line)
        if self._file is None and self._path is not None and self._path.parent.is_dir():
            try:
                self._file = LineFile(self._path)
            except OSError as error:  # no entry of a folder can be added
                if not reports_full_disk(error):
                    raise
        if self._file is not None:
            self._file.append([json.dumps(each) for each in self._lines])
            self._lines = []


def _round(seconds: dict[str, float]) -> dict[str, float]:
    return {part: round(value, 3) for part, value in seconds.items()}
