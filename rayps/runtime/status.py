"""The status of a run: its record, its progress as JSON-ready data, and its outcome."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rayps.cluster.members import GroupMember
from rayps.core.grid import Grid
from rayps.core.job_status import Status
from rayps.core.metrics import Rounds, Throughput
from rayps.core.phase_rounds import Calendar
from rayps.core.records import Event, OutcomeRecord, Point, ProgressRecord, ShardLine, WorkerLine
from rayps.ps.server.dense_segment import ShardFacts
from rayps.runtime.journal import Journal
from rayps.runtime.worker_group import WorkerGroup
from rayps.tensors.snapshot import Snapshot
from rayps.worker.plan import WorkerFacts

POINTS_PER_RANK = 50  # newest points of each rank from which rates are computed
AFTER_SECONDS = 3.0  # seconds from the report of a server's death until no worker waits for the server any more
BEFORE_SECONDS = 2.0  # most seconds between a death and its report


@dataclass(slots=True)
class Outcome:
    """The end of a run, with its status and results."""

    status: Status
    message: str
    metrics: dict[str, float] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    checkpoint: Path | None = None
    error: Exception | None = None
    tables: dict[str, list[bytes]] = field(default_factory=dict)  # states of segments, if no checkpoint has them

    def to_dict(self) -> OutcomeRecord:
        """Return the content of `outcome.json`."""
        return {
            "status": self.status,
            "message": self.message,
            "metrics": self.metrics,
            "finished_at": time.time(),
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "error": type(self.error).__name__ if self.error else None,
        }


class RunRecord:
    """The run's status and progress; it writes the results of polls (points, events, log lines) to the journal."""

    def __init__(self, journal: Journal, workers: int, where: Callable[[], tuple[int, ProgressRecord]]) -> None:
        """Prepare the record; `where` returns the round of the newest snapshot, and further facts of the progress."""
        self.status = Status.STARTING
        self.evaluated = 0  # the last round whose evaluation is in the journal
        self._message = ""
        self._journal, self._where, self._workers = journal, where, workers
        self._rounds = Rounds(workers, 0, "")
        self._report, self._server_events = ProgressReport(), ServerEvents()

    def begin(self, calendar: Calendar) -> None:
        """Count epochs by this calendar from now on."""
        self._report.calendar = calendar

    def say(self, status: Status, message: str) -> None:
        """Change the status and its message, and show them at once."""
        self.status, self._message = status, message
        self.show(now=True)

    def show(self, *, now: bool = False) -> None:
        """Show the progress; at most a few times a second unless `now`."""
        done, more = self._where()
        progress = self._report.progress(done, {"status": self.status, "message": self._message, **more})
        self._journal.progress(progress, now=now)

    def generation(self, number: int, strategy: str, *, mended: bool) -> None:
        """Start the generation with this number.

        `mended`: it continues the rounds of the last generation, whose points are retained; else they are dropped.
        """
        if not mended:
            self._rounds = Rounds(self._workers, number, strategy)
        self._rounds.generation = number

    def again(self, generation: int, begin: int) -> None:
        """Drop points of round `begin` and later: the next generation repeats these rounds."""
        self._rounds.again(generation, begin)

    def end_generation(self) -> None:
        """End a generation: reset the measured rates."""
        self._report.begin_again()

    def flush(self) -> None:
        """Write the points of the rounds that not all ranks have reported."""
        self.file(self._rounds.flush())

    def take_in(self, group: WorkerGroup, found: list[Point]) -> None:
        """Write the result of a poll of the group: points `found` of single ranks, events, log lines."""
        points = self._journal.choices(found)
        self._report.hear(points)
        self._server_events.hear(points)
        self.tell(group)
        self.file(self._rounds.add(points))
        self._journal.lines(group.lines())
        self._report.look(group, self._rounds.strategy)
        for name, count in self._report.newly_lost(group):
            message = f"{name} lost {count} pushes: evicted from the workers' replay buffers (replay_mb)"
            self._journal.event("lost", message, pushes=count)

    def tell(self, group: WorkerGroup, *, over: bool = False) -> None:
        """Write the events of the job's server group; `over`: the run has ended, so no event is delayed."""
        if group.space is not None:
            if over:
                group.space.look()
            for event in self._server_events.tell(group.space.news(), over):
                self._journal.event(**event)

    def file(self, merged: list[Point]) -> None:
        """Write merged points of the whole group to the journal."""
        calendar = self._report.calendar
        for point in merged:
            if calendar is not None:
                point.setdefault("epoch", calendar.epoch_of(max(point["round"] - 1, 0)))
            if point["kind"] == "evaluation":
                self.evaluated = point["round"]
            if point.get("missing"):
                lost = ", ".join(f"worker-{rank}" for rank in point["missing"])
                which = f"the evaluation after round {point['round']}"
                self._journal.event("warning", f"{which} lacks the rows of {lost}, which died before reporting them")
        self._report.file(merged)
        self._journal.add(merged)

    def reached(self, done: int) -> int:
        """Return the round that all workers have reached; `done` is that of the newest snapshot."""
        return self._report.reached(done)


class ProgressReport:
    """A run's points and members, from which `progress()` makes the content of `progress.json`."""

    def __init__(self) -> None:
        self.calendar: Calendar | None = None  # once it is known
        self._throughput = Throughput()
        self._pace = Throughput()  # rounds per second
        self._lost: dict[str, int] = {}  # pushes that each shard has lost
        self._latest: dict[int, deque[Point]] = {}
        self._facts: ProgressRecord = {"loss": None, "staleness": {}, "workers": [], "shards": []}

    def hear(self, points: list[Point]) -> None:
        """Add points of single ranks."""
        for point in points:
            if point["kind"] == "round":
                self._latest.setdefault(point["rank"], deque(maxlen=POINTS_PER_RANK)).append(point)

    def file(self, merged: list[Point]) -> None:
        """Add points of the group."""
        now = time.monotonic()
        for point in merged:
            if point["kind"] == "evaluation":
                self._facts["metrics"] = point["metrics"]
                continue
            self._throughput.add(point["samples"], now)
            self._pace.add(1, now)
            self._facts["loss"] = point["loss"]
            histogram = self._facts["staleness"]
            for lead, count in point["staleness"].items():
                histogram[lead] = histogram.get(lead, 0) + count

    def look(self, group: WorkerGroup, strategy: str) -> None:
        """Record the members' current facts (status, round, rates, servers) for the progress."""
        self._facts["strategy"] = strategy
        workers = [self._worker(rank, member) for rank, member in enumerate(group.workers)]
        self._facts["workers"] = in_replicas(workers, group.grid)
        self._facts["shards"] = [_shard(index, member) for index, member in enumerate(group.shards)]
        if group.space is not None:
            self._facts["server_group"] = group.space.facts()

    def newly_lost(self, group: WorkerGroup) -> list[tuple[str, int]]:
        """Return the shards that lost pushes since the last call, and the number of these pushes."""
        found = []
        for member in group.shards:
            lost = member.facts.lost if isinstance(member.facts, ShardFacts) else 0
            if lost > (known := self._lost.get(member.name, 0)):
                found.append((member.name, lost - known))
            self._lost[member.name] = lost
        return found

    def begin_again(self) -> None:
        """Start a new generation: reset the measured rates."""
        self._throughput, self._pace = Throughput(), Throughput()
        self._latest.clear()

    def reached(self, done: int) -> int:
        """Return the round that all workers have reached; `done` is that of the last snapshot."""
        return max(done, min((worker["round"] for worker in self._facts["workers"]), default=0))

    def progress(self, done: int, more: ProgressRecord) -> ProgressRecord:
        """Return the progress; `done` is the round of the run's last snapshot."""
        facts: ProgressRecord = {"time": time.time(), **self._facts, **more}
        calendar = self.calendar
        if calendar is None:
            return facts
        done = self.reached(done)
        pace = self._pace.rate
        known: ProgressRecord = {
            "round": done,
            "rounds": calendar.rounds,
            "epoch": calendar.epoch_of(min(done, calendar.rounds - 1)),
            "epochs": calendar.epochs,
            "samples_per_second": self._throughput.rate,
            "eta_seconds": (calendar.rounds - done) / pace if pace else None,
        }
        return {**facts, **known}

    def _worker(self, rank: int, member: GroupMember) -> WorkerLine:
        facts = member.facts if isinstance(member.facts, WorkerFacts) else None
        status = "dead" if member.dead else facts.status if facts else "starting"
        place = member.place
        line: WorkerLine = {
            "rank": rank,
            "host": place.host if place else None,
            "pid": place.pid if place else None,
            "status": status,
            "round": facts.position if facts else 0,
        }
        points = self._latest.get(rank)
        if not points:
            return line
        seconds = sum(point["seconds"] for point in points) or 1e-9
        line["compute"] = sum(point["compute"] for point in points) / seconds
        line["wait"] = sum(point["wait"] for point in points) / seconds
        line["move"] = sum(point["move"] for point in points) / seconds
        line["samples_per_second"] = sum(point["samples"] for point in points) / seconds
        return line


def in_replicas(workers: list[WorkerLine], grid: Grid) -> list[WorkerLine]:
    """Add each worker's part to its line; all workers of a replica get the replica's samples per second."""
    if grid.columns == 1 or grid.size != len(workers):
        return workers
    rates = [
        max((workers[rank].get("samples_per_second", 0.0) for rank in grid.replica(data)), default=0.0)
        for data in range(grid.data)
    ]
    found: list[WorkerLine] = []
    for rank, line in enumerate(workers):
        own: WorkerLine = {**line, "part": grid.words(rank)}
        if "wait" in line:
            own["samples_per_second"] = rates[grid.at(rank).data]
        found.append(own)
    return found


def _shard(index: int, member: GroupMember) -> ShardLine:
    facts = member.facts if isinstance(member.facts, ShardFacts) else None
    place = member.place
    line: ShardLine = {"index": index, "host": place.host if place else None, "pid": place.pid if place else None}
    if facts is None:
        return line
    # number of pushes, by the age in versions of the parameters that they were computed with
    ages = {str(age): count for age, count in sorted(facts.ages.items())}
    return {**line, "lo": facts.lo, "hi": facts.hi, "version": facts.version, "bytes": facts.bytes, "ages": ages}


class ServerEvents:
    """Adds to the event of a server's death how long workers waited because of it.

    For this it collects the server group's events, and the waiting time of each worker's rounds.
    """

    def __init__(self) -> None:
        self._waits: deque[tuple[float, float]] = deque(
            maxlen=10_000
        )  # time of a round's report, seconds that it waited
        self._due: list[tuple[float, Event]] = []  # time of the event's report, the event

    def hear(self, points: list[Point]) -> None:
        """Add rounds of single ranks."""
        now = time.monotonic()
        self._waits.extend((now, point["wait"]) for point in points if point["kind"] == "round")

    def tell(self, events: list[Event], over: bool = False) -> list[Event]:
        """Return the events that can be written now.

        The event of a server's death is returned `AFTER_SECONDS` later, when it is known how long workers waited, or
        when the run is `over`.
        """
        now = time.monotonic()
        told = [event for event in events if event["kind"] != "server_lost"]
        self._due += [(now, event) for event in events if event["kind"] == "server_lost"]
        for heard, event in [item for item in self._due if over or now - item[0] >= AFTER_SECONDS]:
            self._due.remove((heard, event))
            longest = max((wait for at, wait in self._waits if at >= heard - BEFORE_SECONDS), default=0.0)
            message = f"{event['message']}; the longest wait of a worker in a round was {longest:.2f} s"
            told.append({**event, "message": message, "longest_wait": longest})
        return told
