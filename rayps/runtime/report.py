"""Where a run stands, as JSON-ready data: what the terminal shows and `progress.json` holds."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from rayps.core.calendar import Calendar
from rayps.core.grid import Grid
from rayps.core.metrics import Point, Throughput
from rayps.ps.fixed.shard import ShardFacts
from rayps.runtime.members import GroupMember
from rayps.runtime.worker_actor import WorkerFacts
from rayps.runtime.worker_group import WorkerGroup

KEPT_POINTS = 50  # of each rank, for its rates


class ProgressReport:
    """Follows a run's points and members; `progress()` says where it stands."""

    def __init__(self) -> None:
        self.calendar: Calendar | None = None  # once it is known
        self._throughput = Throughput()
        self._pace = Throughput()  # rounds a second
        self._lost: dict[str, int] = {}  # by shard
        self._latest: dict[int, deque[Point]] = {}
        self._facts: dict[str, Any] = {"loss": None, "staleness": {}, "workers": [], "shards": []}

    def hear(self, points: list[Point]) -> None:
        """Take in points of single ranks."""
        for point in points:
            if point["kind"] == "round":
                self._latest.setdefault(point["rank"], deque(maxlen=KEPT_POINTS)).append(point)

    def file(self, merged: list[Point]) -> None:
        """Take in points of the group."""
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
        """Take in the members as they are now."""
        self._facts["strategy"] = strategy
        workers = [self._worker(rank, member) for rank, member in enumerate(group.workers)]
        self._facts["workers"] = _in_replicas(workers, group.grid)
        self._facts["shards"] = [_shard(index, member) for index, member in enumerate(group.shards)]
        if group.space is not None:
            self._facts["server_group"] = group.space.facts()

    def newly_lost(self, group: WorkerGroup) -> list[tuple[str, int]]:
        """The shards that had to give up pushes since they were last asked, and how many."""
        found = []
        for member in group.shards:
            lost = member.facts.lost if isinstance(member.facts, ShardFacts) else 0
            if lost > (known := self._lost.get(member.name, 0)):
                found.append((member.name, lost - known))
            self._lost[member.name] = lost
        return found

    def begin_again(self) -> None:
        """A new generation: rates start anew."""
        self._throughput, self._pace = Throughput(), Throughput()
        self._latest.clear()

    def reached(self, done: int) -> int:
        """The round that all workers have come to; `done` is that of the last snapshot."""
        return max(done, min((worker["round"] for worker in self._facts["workers"]), default=0))

    def progress(self, done: int, **more: Any) -> dict[str, Any]:
        """Where the run stands; `done` is the round of its last snapshot."""
        facts = {"time": time.time(), **self._facts, **more}
        calendar = self.calendar
        if calendar is None:
            return facts
        done = self.reached(done)
        pace = self._pace.rate
        return facts | {
            "round": done,
            "rounds": calendar.rounds,
            "epoch": calendar.epoch_of(min(done, calendar.rounds - 1)),
            "epochs": calendar.epochs,
            "samples_per_second": self._throughput.rate,
            "eta_seconds": (calendar.rounds - done) / pace if pace else None,
        }

    def _worker(self, rank: int, member: GroupMember) -> dict[str, Any]:
        facts = member.facts if isinstance(member.facts, WorkerFacts) else None
        status = "dead" if member.dead else facts.status if facts else "starting"
        line = {"rank": rank, **_place(member), "status": status, "round": facts.position if facts else 0}
        points = self._latest.get(rank)
        if not points:
            return line
        seconds = sum(point["seconds"] for point in points) or 1e-9
        shares = {key: sum(point[key] for point in points) / seconds for key in ("compute", "wait", "move")}
        return line | shares | {"samples_per_second": sum(point["samples"] for point in points) / seconds}


def _in_replicas(workers: list[dict[str, Any]], grid: Grid) -> list[dict[str, Any]]:
    """With what each worker's part is: samples are counted by one worker of a replica, and are everyone's of it."""
    if grid.columns == 1 or grid.size != len(workers):
        return workers
    rates = [
        max((workers[rank].get("samples_per_second", 0.0) for rank in grid.replica(data)), default=0.0)
        for data in range(grid.data)
    ]
    found = []
    for rank, line in enumerate(workers):
        known = {"samples_per_second": rates[grid.at(rank).data]} if "wait" in line else {}
        found.append(line | known | {"part": grid.words(rank)})
    return found


def _shard(index: int, member: GroupMember) -> dict[str, Any]:
    facts = member.facts if isinstance(member.facts, ShardFacts) else None
    line = {"index": index, **_place(member)}
    if facts is None:
        return line
    # pushes by how many versions old the parameters were on which they were computed
    ages = {str(age): count for age, count in sorted(facts.ages.items())}
    return line | {"lo": facts.lo, "hi": facts.hi, "version": facts.version, "bytes": facts.bytes, "ages": ages}


def _place(member: GroupMember) -> dict[str, Any]:
    place = member.place
    return {"host": place.host if place else None, "pid": place.pid if place else None}
