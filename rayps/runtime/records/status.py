"""The status of a run: its record in the journal, its progress as JSON-ready data, and its outcome."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rayps.cluster.members import GroupMember
from rayps.core.grid import Grid
from rayps.core.job.job_status import Status
from rayps.core.job.records import Event, OutcomeRecord, Point, ProgressRecord, ShardLine, WorkerLine
from rayps.core.metrics import PushRounds, Rounds, Throughput, Totals, make_evaluation_point
from rayps.core.rows.phase_rounds import Calendar
from rayps.core.strategy.strategy import StrategyView
from rayps.core.time.data_wait import DataWait
from rayps.core.urls import Location
from rayps.federated.client_states_backup import ClientStatesBackup
from rayps.ps.server.dense_segment import ShardFacts
from rayps.runtime.driver.worker_group import WorkerGroup
from rayps.runtime.records.journal import Journal
from rayps.runtime.records.state_folder import StateFolder
from rayps.runtime.records.time_record import TimeRecord
from rayps.runtime.records.trace_folder import TraceFolder
from rayps.tensors.snapshot import Snapshot
from rayps.worker.plan import WorkerFacts

POINTS_PER_RANK = 50  # the number of newest points of each rank from which rates are computed
AFTER_SECONDS = 3.0  # seconds after the report of a server's death in which workers may still wait for that server
BEFORE_SECONDS = 2.0  # the longest time, in seconds, between a server's death and its report


@dataclass(slots=True)
class Outcome:
    """The final status and the results of a run."""

    status: Status
    message: str
    metrics: dict[str, float] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    checkpoint: Location | None = None
    error: Exception | None = None
    tables: dict[str, list[bytes]] = field(default_factory=dict)  # states of segments, if no checkpoint has them
    best: Location | None = None  # the checkpoint of the best evaluation, if a callback kept one
    # the folder with the state that `snapshot` stands for, if there is no folder for checkpoints; removed with it
    scratch: StateFolder | None = None
    strategy: StrategyView | None = None  # the strategy whose state `snapshot` is
    clients: ClientStatesBackup | None = None  # the states of a federated job's clients at the end of the run

    def to_dict(self) -> OutcomeRecord:
        """Return the content of `outcome.json`."""
        return {
            "status": self.status,
            "message": self.message,
            "metrics": self.metrics,
            "finished_at": time.time(),
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "best": str(self.best) if self.best else None,
            "error": type(self.error).__name__ if self.error else None,
        }


class RunRecord:
    """The run's status and progress. It writes the results of polls (points, events, log lines) to the journal."""

    def __init__(
        self,
        journal: Journal,
        workers: int,
        round_and_facts: Callable[[], tuple[int, ProgressRecord]],
        deliver: Callable[[list[Point]], None] = lambda points: None,
    ) -> None:
        """Prepare the record.

        `round_and_facts()` returns the round of the newest snapshot, and facts to add to the progress. `deliver`
        receives points of the whole group before they are written, and may add numbers to them.
        """
        self.metrics: dict[str, float] = {}  # of the last evaluation of a phase's end
        self._deliver = deliver
        self.status = Status.STARTING
        self.evaluated = 0  # the last round whose evaluation is in the journal
        self._message = ""
        self._journal, self._round_and_facts, self._workers = journal, round_and_facts, workers
        self._traces: TraceFolder | None = None  # set if workers trace some of their rounds
        self.times = TimeRecord(journal.time_folder, anew=journal.time_anew)
        journal.on_any_event = self.times.add_event
        self._rounds = Rounds(workers, 0, "")
        self._report, self._server_events = ProgressReport(), ServerEvents()
        self._data_wait = DataWait()

    def change_workers(self, workers: int) -> None:
        """Write the points of rounds that not all ranks have reported; later rounds have so many ranks."""
        self.flush()
        self._workers = workers

    def set_calendar(self, calendar: Calendar) -> None:
        """Set the calendar, from which epochs are computed."""
        self._report.calendar = calendar

    def set_status(self, status: Status, message: str) -> None:
        """Change the status and its message, and show the progress at once."""
        self.status, self._message = status, message
        self.show_progress(now=True)

    def show_progress(self, *, now: bool = False) -> None:
        """Write the progress to the journal: at most twice a second, or at once if `now`."""
        done, more = self._round_and_facts()
        account = self.times.account()
        facts: ProgressRecord = {"status": self.status, "message": self._message, "account": account, **more}
        progress = self._report.progress(done, facts)
        self._journal.progress(progress, now=now)

    def begin_generation(
        self, number: int, strategy: str, *, continues: bool, pushes: PushRounds | None = None
    ) -> None:
        """Start the generation with this number.

        `continues`: the generation continues the rounds of the previous one, whose points are retained. If False, those
        points are dropped. `pushes` collects the points if workers join and leave at any time.
        """
        self._report.pushes = pushes
        if not continues:
            self._rounds = Rounds(self._workers, number, strategy) if pushes is None else pushes
        self._rounds.generation, self._rounds.strategy = number, strategy

    def repeat_from(self, generation: int, begin: int) -> None:
        """Drop the points of round `begin` and of later rounds, because the next generation repeats these rounds."""
        self._rounds.restart(generation, begin)

    def end_generation(self) -> None:
        """Reset the measured rates at the end of a generation."""
        self._report.reset_rates()

    def flush(self) -> None:
        """Write the points of rounds that not all ranks have reported."""
        self.add_points(self._rounds.flush())

    def add_poll(self, group: WorkerGroup, found: list[Point]) -> None:
        """Write the result of a poll of the group: the points `found` of single ranks, events and log lines."""
        points = self._journal.add_reported_events(found)
        self._report.add_worker_points(points)
        self._server_events.add_rounds(points)
        self.add_server_events(group)
        self.add_points(self._rounds.add(points))
        self.times.add(group.members)
        if group.space is not None:
            self.times.add_servers(group.space.times())
        self._journal.lines(group.lines())
        self.collect_traces(group.workers)
        self._report.update_members(group, self._rounds.strategy)
        for name, count in self._report.newly_lost(group):
            message = f"{name} lost {count} pushes that were evicted from the workers' replay buffers: raise replay_mb"
            self._journal.event("lost", message, pushes=count)

    def trace_into(self, folder: Path | None) -> None:
        """Set the folder for the workers' traces; None: there are none."""
        self._traces = None if folder is None else TraceFolder(folder, self._journal)

    def ranks_to_trace(self, workers: int) -> frozenset[int]:
        """Return the ranks that trace some rounds in the next generation."""
        return frozenset() if self._traces is None else self._traces.ranks_to_trace(workers)

    def collect_traces(self, workers: Iterable[GroupMember]) -> None:
        """Write the traces in the facts of the workers' last polls."""
        if self._traces is not None:
            self._traces.collect(workers)

    def add_server_events(self, group: WorkerGroup, *, over: bool = False) -> None:
        """Write the events of the job's server group. `over`: the run has ended, and no event may be delayed."""
        if group.space is not None:
            if over:
                group.space.look()
            for event in self._server_events.take_ready(group.space.news(), over):
                self._journal.event(**event)

    def add_points(self, merged: list[Point]) -> None:
        """Write points of the whole group, merged from those of its ranks, to the journal."""
        calendar = self._report.calendar
        for point in merged:
            if calendar is not None:
                point.setdefault("epoch", self._report.epoch_of(max(point["round"] - 1, 0)))
            if point["kind"] == "evaluation":
                self.evaluated = point["round"]
            if point.get("missing"):
                lost = ", ".join(f"worker-{rank}" for rank in point["missing"])
                which = f"the evaluation after round {point['round']}"
                self._journal.event("warning", f"{which} lacks the rows of {lost}, which died before reporting them")
            warning = self._data_wait.add(point) if point["kind"] == "round" else None
            if warning is not None:
                self._journal.event("warning", warning)
        try:
            self._deliver(merged)
        finally:
            self._report.add_group_points(merged)
            self._journal.add_points(merged)

    def add_last_evaluation(self, round: int, totals: Totals) -> None:
        """Write the evaluation at the end of a phase, after round `round`, and keep its metrics."""
        point = make_evaluation_point(round, totals)
        self.add_points([point])
        self._journal.add_costs()
        self.metrics = point["metrics"]

    def reached(self, done: int) -> int:
        """Return the round that all workers have reached; `done` is the round of the newest snapshot."""
        return self._report.reached(done)


class ProgressReport:
    """A run's points and members, from which `progress()` makes the content of `progress.json`."""

    def __init__(self) -> None:
        self.calendar: Calendar | None = None  # None until it is known
        self.pushes: PushRounds | None = None  # what counts rounds if workers join and leave at any time
        self._throughput = Throughput()  # samples per second
        self._pace = Throughput()  # rounds per second
        self._lost: dict[str, int] = {}  # from a shard's name to the number of pushes it has lost
        self._latest: dict[int, deque[Point]] = {}  # the newest points of each rank
        self._facts: ProgressRecord = {"loss": None, "staleness": {}, "workers": [], "shards": []}
        self._epoch = 0  # of the newest round of the group

    def epoch_of(self, number: int) -> int:
        """Return the epoch of a round: by the calendar, or that of the newest round if epochs have no known length."""
        assert self.calendar is not None, "the calendar is known"
        return self._epoch if self.calendar.open else self.calendar.epoch_of(number)

    def add_worker_points(self, points: list[Point]) -> None:
        """Add points of single ranks."""
        for point in points:
            if point["kind"] == "round":
                self._latest.setdefault(point["rank"], deque(maxlen=POINTS_PER_RANK)).append(point)

    def add_group_points(self, merged: list[Point]) -> None:
        """Add points of the whole group."""
        now = time.monotonic()
        for point in merged:
            if point["kind"] == "evaluation":
                self._facts["metrics"] = point["metrics"]
                continue
            self._epoch = point["epoch"]
            self._throughput.add(point["samples"], now)
            self._pace.add(1, now)
            self._facts["loss"] = point["loss"]
            histogram = self._facts["staleness"]
            for lead, count in point["staleness"].items():
                histogram[lead] = histogram.get(lead, 0) + count

    def update_members(self, group: WorkerGroup, strategy: str) -> None:
        """Take over the members' current facts (status, round, rates, servers) into the progress."""
        self._facts["strategy"] = strategy
        workers = [self._describe_worker(member.rank, member) for member in group.workers]
        self._facts["workers"] = add_replicas(workers, group.grid)
        self._facts["shards"] = [_describe_shard(index, member) for index, member in enumerate(group.shards)]
        if group.space is not None:
            self._facts["server_group"] = group.space.facts()

    def newly_lost(self, group: WorkerGroup) -> list[tuple[str, int]]:
        """Return (name, number of lost pushes) of each shard that lost pushes since the last call."""
        found = []
        for member in group.shards:
            lost = member.facts.lost if isinstance(member.facts, ShardFacts) else 0
            if lost > (known := self._lost.get(member.name, 0)):
                found.append((member.name, lost - known))
            self._lost[member.name] = lost
        return found

    def reset_rates(self) -> None:
        """Reset the measured rates, because a generation has ended."""
        self._throughput, self._pace = Throughput(), Throughput()
        self._latest.clear()

    def reached(self, done: int) -> int:
        """Return the round that all workers have reached; `done` is the round of the last snapshot."""
        if self.pushes is not None:
            return max(done, self.pushes.reached)
        return max(done, min((worker["round"] for worker in self._facts["workers"]), default=0))

    def progress(self, done: int, more: ProgressRecord) -> ProgressRecord:
        """Return the progress; `done` is the round of the run's last snapshot."""
        facts: ProgressRecord = {"time": time.time(), **self._facts, **more}
        calendar = self.calendar
        if calendar is None:
            return facts
        done = self.reached(done)
        pace = self._pace.rate
        rounds = calendar.known_rounds if self.pushes is None else self.pushes.rounds
        known: ProgressRecord = {
            "round": done,
            "rounds": rounds,
            "epoch": self.epoch_of(min(done, calendar.rounds - 1)),
            "epochs": calendar.known_epochs,
            "samples_per_second": self._throughput.rate,
            "eta_seconds": (rounds - done) / pace if pace and rounds is not None else None,
        }
        return {**facts, **known}

    def _describe_worker(self, rank: int, member: GroupMember) -> WorkerLine:
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
        line["data"] = sum(point["data"] for point in points) / seconds
        line["samples_per_second"] = sum(point["samples"] for point in points) / seconds
        return line


def add_replicas(workers: list[WorkerLine], grid: Grid) -> list[WorkerLine]:
    """Return the workers' lines, each with the worker's part of the model and its replica's samples per second.

    If each replica is one worker, return the lines unchanged.
    """
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


def _describe_shard(index: int, member: GroupMember) -> ShardLine:
    facts = member.facts if isinstance(member.facts, ShardFacts) else None
    place = member.place
    line: ShardLine = {"index": index, "host": place.host if place else None, "pid": place.pid if place else None}
    if facts is None:
        return line
    # from an age (the versions by which a push's parameters were older than the shard's) to the number of pushes
    ages = {str(age): count for age, count in sorted(facts.ages.items())}
    return {**line, "lo": facts.lo, "hi": facts.hi, "version": facts.version, "bytes": facts.bytes, "ages": ages}


class ServerEvents:
    """Adds to the event of a server's death how long workers waited because of this death.

    It delays these events, and collects the waiting time of each worker's rounds.
    """

    def __init__(self) -> None:
        # (time of a round's report, seconds that its worker waited)
        self._waits: deque[tuple[float, float]] = deque(maxlen=10_000)
        self._due: list[tuple[float, Event]] = []  # (time of the event's report, the delayed event)

    def add_rounds(self, points: list[Point]) -> None:
        """Add rounds of single ranks."""
        now = time.monotonic()
        self._waits.extend((now, point["wait"]) for point in points if point["kind"] == "round")

    def take_ready(self, events: list[Event], over: bool = False) -> list[Event]:
        """Add new events, and return the events that can be written now.

        The event of a server's death is returned `AFTER_SECONDS` after its report, when it is known how long workers
        waited, or at once if the run is `over`.
        """
        now = time.monotonic()
        ready = [event for event in events if event["kind"] != "server_lost"]
        self._due += [(now, event) for event in events if event["kind"] == "server_lost"]
        for heard, event in [item for item in self._due if over or now - item[0] >= AFTER_SECONDS]:
            self._due.remove((heard, event))
            longest = max((wait for at, wait in self._waits if at >= heard - BEFORE_SECONDS), default=0.0)
            message = f"{event['message']}; the longest wait of a worker in a round was {longest:.2f} s"
            ready.append({**event, "message": message, "longest_wait": longest})
        return ready
