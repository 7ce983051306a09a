"""A job's space on an elastic server group, as its driver sees it: opened, loaded, collected, watched, closed.

A generation that begins from a snapshot has a space of its own number, so that whoever is left of the one before is
refused. Tables go along as they are: they are too large to go back, and a push that they have is not applied again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from rayps.core.errors import ActorDied, CheckpointError, ConfigError, NotFound, RaypsError
from rayps.core.strategy import StrategyView
from rayps.core.topology import servers_of
from rayps.ps import job_tables
from rayps.ps.client.session import Session
from rayps.ps.collect import Collector
from rayps.ps.fixed.shard import ShardPart
from rayps.ps.group import ManagerClient
from rayps.ps.own_space import cut
from rayps.ps.protocol.messages import GroupMessage
from rayps.ps.protocol.space import Quota, Space, SpaceRank, SparseTable
from rayps.ps.server.dense_segment import part_of, state_of
from rayps.ps.tables.table_segment import TableSegment
from rayps.ps.throttled import Throttled
from rayps.tensors import optim
from rayps.tensors.flat import Layout
from rayps.tensors.learning_rate import Ticks
from rayps.tensors.snapshot import Snapshot

log = logging.getLogger(__name__)

LOAD_BYTES = 64_000_000  # of states that are said at a time
WHOLE_BYTES = 1_000_000_000  # of tables that are given back by value, where there is no folder for them
LOOK_SECONDS = 0.5
DROP_SECONDS = 10.0  # for a manager that is made anew
NEWS = ("server_lost", "server_dead", "segment_lost", "resized", "server_leaving", "server_joined")


class ServedPhase(Protocol):
    """What a generation is told, as far as its servers need it."""

    @property
    def strategy(self) -> StrategyView:
        """What runs."""

    @property
    def ticks(self) -> Ticks:
        """The epochs of the phase, for schedules on servers."""


class JobSpace:
    """A job's space on `group`, by the job's name. `own`: the group is this job's alone, and ends with it.

    `factory` is the job's packed optimizer factory, `tables` those of its model; `scheduled`: the factory has a
    schedule, which tables follow too. Implements `rayps.runtime.job_servers.JobServers`.
    """

    def __init__(
        self,
        group: ManagerClient,
        name: str,
        workers: int,
        factory: bytes,
        *,
        tables: tuple[SparseTable, ...] = (),
        quota: Quota | None = None,
        own: bool = False,
        timeout: float = 60.0,
        scheduled: bool = False,
    ) -> None:
        self.group, self.name, self.own = group, name, own
        self.space: Space | None = None
        self._workers, self._factory, self.tables = workers, factory, tables
        self._scheduled, self._ticks = scheduled, Ticks()
        self._quota, self._timeout = quota or Quota(), timeout
        self._collector: Collector | None = None
        self._base: Snapshot | None = None  # what lost segments are loaded from
        self._saved_tables: tuple[Path, bool] | None = None
        self._first: list[int] = []  # positions when the space was opened
        self.reached: dict[int, tuple[int, int]] = {}  # by rank: its position, and since which step it keeps pushes
        self._branched = False  # the space is a branch, which holds its values already
        self._facts: dict[str, Any] = {}
        self._news: deque[dict[str, Any]] = deque()
        self._since = time.time()
        self._held_back = Throttled()
        self._over = threading.Event()
        self._lock = threading.Lock()  # of the space as it changes, against who restores it
        self._looker: threading.Thread | None = None

    # ---- a generation

    def serves(self, strategy: StrategyView) -> bool:
        """Whether a generation under this strategy needs the space."""
        return servers_of(strategy) is not None or (bool(self.tables) and _of_tables(strategy) is not None)

    def take_over(self) -> None:
        """Drop what an earlier driver of this very job has left."""
        self._drop()

    def branch(self, parent: str, strategy: StrategyView, layout: Layout) -> Snapshot:
        """Begin as a branch of another job's space, with its parameters and optimizer state as they are.

        Raises:
            NotFound, Conflict: there is no such space, or this job's is open.
            CheckpointError: it is of another model.
        """
        theirs = self.group.space(parent)
        if theirs.layout is None:
            raise ConfigError(f"space {parent!r} has tables only: it holds no parameters to begin with", field="branch")
        try:
            Snapshot(theirs.layout, torch.empty(0)).check(layout)
        except CheckpointError as error:
            raise ConfigError(f"space {parent!r} cannot be branched: {error.message}", field="branch") from error
        with self._lock:
            self.space = self.group.branch(
                parent, self.name, self._quota, workers=self._workers, strategy=strategy, factory=self._factory
            )
        self._branched = True
        with self._meet(self.space) as talk:
            states = job_tables.states(talk, range(len(self.space.cuts)))
            parts = [part_of(state, 0, self.space.cuts[i][0]) for i, state in states]
        moments = optim.join([part.moments for part in parts], layout)
        return Snapshot(layout, torch.cat([part.params for part in parts]), moments)

    def begin(self, orders: ServedPhase, snapshot: Snapshot, shared: Any) -> None:
        """See Servers."""
        strategy, old = orders.strategy, self.space
        dense_too = servers_of(strategy) is not None
        follows = strategy if dense_too else _of_tables(strategy)
        assert follows is not None, "serves() said that this strategy needs the space"
        dense = snapshot.layout if dense_too else None
        self._base, self._ticks = snapshot, orders.ticks
        if old is not None and (
            self._branched or (dense is None and old.layout is None and old.strategy == follows.server_half)
        ):
            self._branched = False
        else:
            self._open(follows, dense, snapshot)
        self._collect()
        if self._looker is None:
            self._looker = threading.Thread(target=self._follow, daemon=True, name=f"looker-{self.name}")
            self._looker.start()

    def _open(self, strategy: StrategyView, layout: Layout | None, snapshot: Snapshot) -> None:
        """A new space with the snapshot's state, and the tables as they are."""
        self._stop_collecting()
        cuts = () if layout is None else cut(layout)
        factory = self._factory if layout is not None or self._scheduled else b""
        fresh = Space(
            self.name, 0, self._workers, strategy, layout, cuts, factory, self.tables, self._quota, ticks=self._ticks
        )
        tables = self._begun_tables(fresh, self.space, snapshot.positions)
        with self._lock:
            if self.space is not None:
                self.space = None
                self._drop()
            self.space = space = self._opened(fresh)
            self._first = list(snapshot.positions)
        self._load(space, snapshot, range(space.segments), tables)

    def _opened(self, fresh: Space) -> Space:
        """Open a space, although the manager may die meanwhile."""
        try:
            return self.group.open(fresh)
        except ActorDied:
            try:
                return self.group.space(self.name)  # once there is a manager again
            except NotFound:
                return self.group.open(fresh)

    def _drop(self) -> None:
        """Free the space, although the manager may be away for a moment. Raises ActorDied: it stays away."""
        deadline = time.monotonic() + DROP_SECONDS
        while True:
            try:
                self.group.drop(self.name)
                return
            except NotFound:
                return
            except ActorDied:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def _load(self, space: Space, snapshot: Snapshot, segments: Iterable[int], tables: dict[int, Any]) -> None:
        with self._meet(space) as talk:
            batch: dict[int, Any] = {}
            for index in segments:
                known = tables.get(index)
                batch[index] = known or _begun(space, index, snapshot, snapshot.positions)[0]
                if sum(map(len, batch.values())) >= LOAD_BYTES:
                    talk.exchange(GroupMessage.LOAD, batch)
                    batch = {}
            if batch:
                talk.exchange(GroupMessage.LOAD, batch)

    def _meet(self, space: Space) -> _Opener:
        return _Opener(lambda: Session(self.group.door, space, -1, timeout=self._timeout, name=f"opener-{self.name}"))

    def seat(self, rank: int) -> SpaceRank | None:
        """See Servers."""
        assert self.space is not None, "begin() comes first"
        return SpaceRank(self.group.door(), self.space, self.group.join(self.space.number, rank))

    # ---- checkpoints

    def _collect(self) -> None:
        self._stop_collecting()
        space = self.space
        if space is not None and space.cuts:
            self._collector = Collector(lambda: self._meet(space).make(), list(range(space.segments)))

    def _stop_collecting(self) -> None:
        if self._collector is not None:
            self._collector.close()
            self._collector = None

    def poll(self, orders: ServedPhase, wanted: int) -> None:
        """See Servers."""
        if self._collector is not None and wanted:
            self._collector.want(wanted)

    def held(self, slowest: int) -> list[tuple[int, list[int]]] | None:
        """See Servers. Tables alone are no reason to wait."""
        return [] if self._collector is None else [self._collector.held(slowest)]

    def parts(self, rounds: int) -> Callable[[float], list[ShardPart | None]]:
        """See Servers."""
        space, states = self.space, None if self._collector is None else self._collector.states(rounds)
        if space is None or not space.cuts:
            return lambda timeout: []
        found: list[ShardPart | None] = [
            None if states is None else part_of(states[i], rounds, lo) for i, (lo, _) in enumerate(space.cuts)
        ]
        return lambda timeout: found

    def saved(self, snapshot: Snapshot) -> None:
        """See Servers."""
        self._base = snapshot
        # without a folder nobody has the tables: workers keep their pushes, as far as they may
        if self._collector is not None and (not self.tables or self._saved_tables is not None):
            self._collector.saved(snapshot.round)

    def write_tables(self, rounds: int) -> Callable[[Path], list[Path]] | None:
        """Return a function that writes the tables into a folder; None if there are no tables.

        The tables are those after `rounds` where they are held together with the dense part, else the current ones.
        """
        space, meet = self.space, self._meet
        if space is None or not space.tables:
            return None
        kept = self._collector.states(rounds) if self._collector is not None else None
        return lambda folder: job_tables.write(space, folder, kept, lambda: meet(space))

    def tables_kept(self, folder: Path) -> None:
        """Tell that the tables were written into this folder by `write_tables`, which is there to stay."""
        space = self.space
        if space is None or not space.tables:
            return
        self._saved_tables = folder, True
        if self._collector is None:
            with self._meet(space) as talk:
                talk.tell(GroupMessage.SAVED, -1)

    def load_tables(self, folder: Path, same: bool) -> None:
        """Begin with the tables of a checkpoint; `same`: it is of as many workers. Raises CheckpointError."""
        self._saved_tables = folder, same

    def whole_tables(self) -> dict[str, list[Any]]:
        """The states of all segments of each table, as they are now; none where they are large."""
        space = self.space
        if space is None or not space.tables or _mine(self._facts, space).get("bytes", 0) > WHOLE_BYTES:
            return {}
        with self._meet(space) as talk:
            return job_tables.whole(space, talk)

    def _begun_tables(self, space: Space, old: Space | None, positions: list[int]) -> dict[int, Any]:
        """What the tables begin with: what they are in the space before, or a checkpoint's."""
        if old is not None and old.tables:
            with self._meet(old) as talk:
                return job_tables.along(old, talk, space)
        if self._saved_tables is not None and space.tables:
            folder, same = self._saved_tables
            return job_tables.saved(space, folder, positions, same)
        return {}

    # ---- watching

    def _follow(self) -> None:
        """Follow the group until the end."""
        while True:
            self.look()
            if self._over.wait(LOOK_SECONDS):
                return

    def look(self) -> None:
        """See how the group is, and load again what it lost. Any thread; what fails is told."""
        if self._over.is_set():
            return  # the job's own group is gone by now
        try:
            facts = self.group.facts()
            with self._lock:
                self._facts = facts
                self._hear(facts)
                self._hear_quota(facts)
                self._restore(facts)
        except (RaypsError, TimeoutError) as error:  # a manager that restarts: it is asked again
            log.info("server group %r does not answer: %s", self.group.name, error)
        except Exception:
            log.exception("server group %r cannot be followed", self.group.name)

    def _hear(self, facts: dict[str, Any]) -> None:
        fresh = [event for event in facts["events"] if event["time"] > self._since]
        if fresh:
            self._since = fresh[-1]["time"]
        self._news += [event for event in fresh if event["kind"] in NEWS and event.get("space") in (None, self.name)]

    def _hear_quota(self, facts: dict[str, Any]) -> None:
        """Tell, once for each quota, that it holds the job back."""
        said = self._held_back.look(_mine(facts, self.space), time.monotonic())
        if said is not None:
            more = f"`rayps servers quota {self.group.name} {self.name} --operations N` changes it"
            self._news.append({"kind": "warning", "time": time.time(), "message": f"{said}: {more}"})

    def _restore(self, facts: dict[str, Any]) -> None:
        space, base = self.space, self._base
        lost = [segment["index"] for segment in _mine(facts, space).get("segments", []) if segment["state"] == "lost"]
        if space is None or base is None or not lost or self._over.is_set():
            return
        skips = (
            {}
            if space.servers.in_step
            else {rank: (since + position) // 2 for rank, (position, since) in self.reached.items() if since}
        )
        # what nobody can say again is given up, with a margin, for more is forgotten while this is done
        folder, same = self._saved_tables or (None, True)
        found = job_tables.saved(space, folder, base.positions, same, lost) if folder else {}
        missing = 0
        for index in lost:
            found[index], count = _begun(space, index, base, self._first, found.get(index), skips)
            missing = max(missing, count)
        self._load(space, base, lost, found)
        self.group.restored(space.number, lost)
        rows = "" if folder or not space.tables else "; rows begin anew, for there is no checkpoint of tables"
        self._news.append(
            {
                "kind": "restored",
                "time": time.time(),
                "segments": lost,
                "pushes": missing,
                "message": f"{len(lost)} segments had no copy and were loaded again from round {base.round}{rows}: "
                f"workers say again what they have pushed since; {missing} pushes were kept no more, and are lost",
            }
        )

    def news(self) -> list[dict[str, Any]]:
        """What happened to the group since this was asked last: events with a kind, a message and a time."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def facts(self) -> dict[str, Any]:
        """Where the space stands, for `progress.json`."""
        facts, space = self._facts, self.space
        mine = _mine(facts, space)
        held: dict[str | None, int] = {}
        for segment in mine.get("segments", []):
            held[segment["primary"]] = held.get(segment["primary"], 0) + 1
        keys = ("name", "host", "state", "bytes", "operations_s", "cpu")
        servers = [
            {key: server.get(key) for key in keys} | {"segments": held.get(server["name"], 0)}
            for server in facts.get("servers", [])
        ]
        numbers = ("bytes", "rows", "operations_s", "rejected", "throttled", "version", "quota", "branch_of")
        return {
            "name": self.group.name,
            "own": self.own,
            "space": self.name,
            "status": facts.get("status"),
            "replicas": facts.get("replicas"),
            "segments": space.segments if space else 0,
            "servers": servers,
            "moves": len(facts.get("moves", [])),
            **{key: mine.get(key) for key in numbers},
            "held_back": self._held_back.now(time.monotonic()),
        }

    def close(self) -> None:
        """Free the space; end the group, where it is the job's own. What fails is told, and hides nothing else."""
        self._over.set()
        self._stop_collecting()
        if self._looker is not None:
            self._looker.join(10.0)
        try:
            if self.own:
                self.group.stop()
            elif self.space is not None:
                self._drop()
        except (RaypsError, TimeoutError) as error:
            log.warning("space %r of group %r could not be freed: %s", self.name, self.group.name, error)
        self.space = None


class _Opener:
    """A talk of rank -1 for as long as it takes."""

    def __init__(self, make: Callable[[], Session]) -> None:
        self.make = make

    def __enter__(self) -> Session:
        self._talk = self.make()
        self._talk.join()
        return self._talk

    def __exit__(self, *_: object) -> None:
        self._talk.close()


def _mine(facts: dict[str, Any], space: Space | None) -> dict[str, Any]:
    number = None if space is None else space.number
    return next((found for found in facts.get("spaces", []) if found["number"] == number), {})


def _begun(
    space: Space,
    index: int,
    snapshot: Snapshot,
    marks: list[int],
    table: Any = None,
    skips: Mapping[int, int] | None = None,
) -> tuple[Any, int]:
    """What a segment begins with, without the steps below `skips` by rank; how many pushes it lacks by that.

    That of a table begins with the state `table`, or empty at the steps `marks`.
    """
    found = space.table_of(index)
    if found is not None:
        known = table or TableSegment(*found, space.strategy, space.workers, marks).dump()
        return job_tables.skipped(known, skips or {})
    lo, hi = space.cuts[index]
    ledger = snapshot.ledger(lo, hi).copy()
    missing = sum(ledger.skip(rank, step) for rank, step in (skips or {}).items())
    return state_of(snapshot.params[lo:hi], snapshot.layout, lo, moments=snapshot.moments, marks=ledger), missing


def _of_tables(strategy: StrategyView) -> StrategyView | None:
    """What servers of sparse tables follow under a strategy; None = a model with tables cannot be trained."""
    return strategy.tables
