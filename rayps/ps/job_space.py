"""A job's spaces on an elastic server group. The job's driver opens, loads and drops them, and fetches their states.

A job has one space, with the job's name. If each data-parallel replica of its model is several workers, it has one
space for each column of the model: `JOB`, `JOB/1`, `JOB/2`... A generation of the worker group that begins from a
snapshot opens spaces with new numbers, so that servers refuse workers of the generation before. Sparse tables are too
large to be reset to a snapshot. The new space begins with their present rows, and a push that these rows contain is not
applied again.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from rayps_client.errors import ActorDied, CheckpointError, ClusterError, ConfigError, NotFound, RaypsError

from rayps.core.grid import Grid
from rayps.core.job.user_module import pack, unpack
from rayps.core.strategy.staleness_bound import MovedBound
from rayps.core.strategy.strategy import StrategyView
from rayps.core.strategy.topology import servers_of
from rayps.core.time.member_times import MemberTimes
from rayps.ps.client.session import Session
from rayps.ps.column_space import (
    ColumnSpace,
    carry_tables,
    read_saved_tables,
    read_tables,
    write_tables,
    yield_segment_states,
)
from rayps.ps.group import ManagerClient
from rayps.ps.protocol.members import MemberChange
from rayps.ps.protocol.messages import GroupMessage
from rayps.ps.protocol.rows import cut
from rayps.ps.protocol.space import Quota, Space, SpaceRank, SparseTable
from rayps.ps.server.dense_segment import ShardPart, part_of
from rayps.tensors import optim
from rayps.tensors.flat import Layout
from rayps.tensors.learning_rate import Ticks
from rayps.tensors.snapshot import Snapshot
from rayps.tensors.subset_optimizer import of_some

log = logging.getLogger(__name__)

Facts = dict[str, Any]

WHOLE_BYTES = 1_000_000_000  # largest tables, in bytes, that are returned by value if there is no folder for them
DROP_SECONDS = 10.0  # seconds to wait for a manager that restarts


class ModelColumns(Protocol):
    """The division of a model over the workers of a replica; see `rayps.tensors.division.Division`."""

    @property
    def layout(self) -> Layout:
        """The layout of the whole model."""

    def cut(self, snapshot: Snapshot, column: int) -> Snapshot:
        """Return a column's part of the whole state."""


class ServedPhase(Protocol):
    """What servers must know about a generation of a job's worker group."""

    @property
    def strategy(self) -> StrategyView:
        """The strategy of the generation."""

    @property
    def ticks(self) -> Ticks:
        """The epoch of each round, for learning-rate schedules on servers."""

    @property
    def division(self) -> ModelColumns | None:
        """The division of the model into columns, or None if each replica is one worker."""


@dataclasses.dataclass(frozen=True, slots=True)
class SpaceTerms:
    """The properties of a job that determine its spaces.

    `factory`: the packed optimizer factory. `tables`: the model's sparse tables. `timeout`: seconds for servers to
    answer. `scheduled`: the factory has a learning-rate schedule, which tables follow too.
    """

    workers: int
    factory: bytes
    tables: tuple[SparseTable, ...]
    quota: Quota
    timeout: float
    scheduled: bool

    def space(self, name: str, strategy: StrategyView, layout: Layout | None, ticks: Ticks) -> Space:
        """Return the space of a job whose replicas are one worker each; with `layout` None, a space of tables only."""
        factory = self.factory if layout is not None or self.scheduled else b""
        cuts = () if layout is None else cut(layout)
        return Space(name, 0, self.workers, strategy, layout, cuts, factory, self.tables, self.quota, ticks=ticks)

    def columns(
        self, name: str, strategy: StrategyView, whole: Layout, layouts: Sequence[Layout], ticks: Ticks
    ) -> list[Space]:
        """Return the spaces of a job whose replicas are several workers: one for each column.

        The spaces share the quota.
        """
        recipe, workers = unpack(self.factory), strategy.grid(self.workers).data
        cuts = [cut(layout) for layout in layouts]
        segments = sum(map(len, cuts))
        return [
            Space(
                name_column(name, column),
                0,
                workers,
                strategy,
                layout,
                cuts[column],
                pack(of_some(recipe, whole, [entry.name for entry in layout.entries])),
                quota=cut_quota(self.quota, layout.size / whole.size, len(cuts[column]) / segments),
                ticks=ticks,
            )
            for column, layout in enumerate(layouts)
        ]


class JobSpace:
    """The spaces of the job `name` on `group`. Implements `rayps.runtime.driver.job_servers.JobServers`.

    `own`: the group was started for this job alone, and ends with the job; `renew` starts it again, with the same name,
    after the death of its manager. `factory`, `tables`, `timeout` and `scheduled`: see `SpaceTerms`.
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
        renew: Callable[[], object] | None = None,
        timeout: float = 60.0,
        scheduled: bool = False,
    ) -> None:
        self.group, self.name, self.own, self.tables = group, name, own, tables
        self._renew = renew
        # worker -> its position, and the step below which its replay buffer has evicted pushes
        self.reached: dict[int, tuple[int, int]] = {}
        self._terms = SpaceTerms(workers, factory, tables, quota or Quota(), timeout, scheduled)
        self._columns: list[ColumnSpace] = []
        self._grid = Grid(workers)
        self._division: ModelColumns | None = None
        self._base: Snapshot | None = None  # the snapshot from which lost segments are loaded
        self._saved_tables: tuple[Path, bool] | None = None
        self._bound: MovedBound | None = None  # a staleness bound that the manager does not have yet
        self._branched = False  # the open space is a branch, which has its values already
        self._members: tuple[MemberChange, ...] = ()
        self._watch = GroupWatch(group, name, lambda: self.spaces, self._restore)

    @property
    def spaces(self) -> list[Space]:
        """The open spaces, by column."""
        return [column.space for column in self._columns]

    @property
    def _with_tables(self) -> ColumnSpace | None:
        """The open space that has the tables, or None if there are no tables."""
        return self._columns[0] if self._columns and self._columns[0].space.tables else None

    # ---- a generation

    def serves(self, strategy: StrategyView) -> bool:
        """Return whether a generation under this strategy needs a space."""
        return servers_of(strategy) is not None or (bool(self.tables) and _of_tables(strategy) is not None)

    def take_over(self) -> None:
        """Drop the spaces that an earlier driver of the same job has left."""
        left = [space["name"] for space in self.group.facts()["spaces"]]
        for name in [self.name, *(name for name in left if is_column_of(name, self.name))]:
            self._drop(name)

    def branch(self, parent: str, strategy: StrategyView, layout: Layout) -> Snapshot:
        """Open the job's space as a branch of the space `parent`; return the branch's parameters and optimizer state.

        Raises:
            NotFound: there is no space `parent`.
            Conflict: a space with this job's name is open.
            ConfigError: `parent` has tables only, or is of another model.
        """
        theirs = self.group.space(parent)
        if theirs.layout is None:
            raise ConfigError(
                f"space {parent!r} has sparse tables only, and a branch begins with a dense vector: give another space",
                field="branch",
            )
        try:
            Snapshot(theirs.layout, torch.empty(0)).check(layout)
        except CheckpointError as error:
            raise ConfigError(f"space {parent!r} cannot be branched: {error.message}", field="branch") from error
        terms = self._terms
        with self._watch.lock:
            made = self.group.branch(
                parent, self.name, terms.quota, workers=terms.workers, strategy=strategy, factory=terms.factory
            )
            self._columns = [ColumnSpace(self.group, made, [0] * terms.workers, terms.timeout)]
        self._branched = True
        with self._columns[0].session() as session:
            states = yield_segment_states(session, range(len(made.cuts)))
            parts = [part_of(state, 0, made.cuts[i][0]) for i, state in states]
        moments = optim.join([part.moments for part in parts], layout)
        return Snapshot(layout, torch.cat([part.params for part in parts]), moments)

    def begin(self, orders: ServedPhase, snapshot: Snapshot, parts: Sequence[Snapshot]) -> None:
        """Begin a generation: open its spaces and load the state `snapshot`. `parts` is this state by column."""
        if self.group.gone:
            self._start_group_again()
        strategy = orders.strategy
        dense_too = servers_of(strategy) is not None
        follows = strategy if dense_too else _of_tables(strategy)
        assert follows is not None, "serves() said that this strategy needs the space"
        self._base, self._division = snapshot, orders.division
        self._grid = strategy.grid(self._terms.workers)
        if orders.division is not None:
            layouts = [part.layout for part in parts]
            spaces = self._terms.columns(self.name, follows, orders.division.layout, layouts, orders.ticks)
            self._open(spaces, parts)
        elif not self._stays(follows, dense_too):
            layout = snapshot.layout if dense_too else None
            self._open([self._terms.space(self.name, follows, layout, orders.ticks)], parts)
        self._branched = False
        for column in self._columns:
            column.collect()
        self._watch.start()

    @property
    def dead(self) -> tuple[tuple[str, str], ...]:
        """A pair (name, reason) for the manager of the job's own group if it has died; () if it lives."""
        reason = "it has ended, and the job's server group with it"
        return ((f"manager of {self.group.name}", reason),) if self.group.gone else ()

    def _start_group_again(self) -> None:
        """Start the job's own group anew, because its manager has died. The spaces are opened again.

        Raises ClusterError if only the servers of the group had the rows of sparse tables.
        """
        if self._renew is None or (self._with_tables is not None and self._saved_tables is None):
            raise ClusterError(
                f"the manager of server group {self.group.name!r} has died, and only its servers had the rows of the "
                "sparse tables:\ngive checkpoint=FOLDER, from which they are loaded again, or server_group=NAME, a "
                "group whose manager is started again",
                group=self.group.name,
            )
        for column in self._columns:
            column.stop_collecting()
        with self._watch.lock:
            self._columns = []
            self._renew()

    def _stays(self, strategy: StrategyView, dense_too: bool) -> bool:
        """Return whether the open space can serve a new generation unchanged.

        It can if it has just been branched, or if it has tables only, the generation needs tables only, and the
        strategy is the same.
        """
        if not self._columns:
            return False
        old = self._columns[0].space
        return self._branched or (not dense_too and old.layout is None and old.strategy == strategy.server_half)

    def _open(self, fresh: list[Space], parts: Sequence[Snapshot]) -> None:
        """Drop the open spaces, open `fresh`, and load `parts`, one for each column, and the present rows of tables."""
        for column in self._columns:
            column.stop_collecting()
        positions = list(parts[0].positions)
        tables = self._make_first_tables(fresh[0], positions)
        with self._watch.lock:
            self._bound = None
            while self._columns:
                self._drop(self._columns.pop().space.name)
            for space in fresh:
                self._columns.append(ColumnSpace(self.group, self._opened(space), positions, self._terms.timeout))
        for column, part in zip(self._columns, parts, strict=True):
            column.load(part, tables, members=self._members)

    def _opened(self, fresh: Space) -> Space:
        """Open a space. If the manager dies before it answers, wait for its restart."""
        try:
            return self.group.open(fresh)
        except ActorDied:
            try:
                return self.group.space(fresh.name)  # waits until the manager has restarted
            except NotFound:
                return self.group.open(fresh)

    def _drop(self, name: str) -> None:
        """Drop a space, if it is open. Raises ActorDied if the manager died, and has not restarted in time."""
        deadline = time.monotonic() + DROP_SECONDS
        while True:
            try:
                self.group.drop(name)
                return
            except NotFound:
                return
            except ActorDied:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def seat(self, rank: int) -> SpaceRank | None:
        """Return what worker `rank` needs to join the space of its column, as a new incarnation of its data rank."""
        assert self._columns, "begin() comes first"
        return self._columns[self._grid.column(rank)].rank(self._grid.at(rank).data)

    def set_members(self, members: Sequence[MemberChange]) -> None:
        """Set which ranks take part in a state that is loaded from now on: see `JobServers`."""
        self._members = tuple(members)

    def opener(self) -> Session:
        """Open a session of rank -1 with the first column's space, which the caller closes."""
        return self._columns[0].opener()

    # ---- checkpoints

    def poll(self, orders: ServedPhase, wanted: int) -> None:
        """Fetch the states after round `wanted`, if it is not 0."""
        for column in self._columns if wanted else []:
            column.want(wanted)

    def held(self, slowest: int) -> list[tuple[int, list[int]]] | None:
        """Return, for each space with a dense vector, its progress and the fetched rounds (`Collector.held`)."""
        return [each for column in self._columns for each in column.held(slowest)]

    @property
    def unanswered(self) -> RaypsError | None:
        """Why servers did not send the wanted states in time; None if they did, or still may."""
        return next(filter(None, (column.unanswered for column in self._columns)), None)

    def parts(self, rounds: int) -> Callable[[float], list[ShardPart | None]]:
        """Return a function that returns the states after round `rounds`, with None for each that was not fetched."""
        found = [part for column in self._columns for part in column.parts(rounds)]
        return lambda timeout: found

    def of(self, column: int) -> range:
        """Return the indices in `parts` of the parts of a column."""
        before = sum(len(space.cuts) for space in self.spaces[:column])
        return range(before, before + len(self.spaces[column].cuts))

    def saved(self, snapshot: Snapshot) -> None:
        """Notify the servers that the driver has saved this state, so that workers need not retain its pushes."""
        self._base = snapshot
        # without a folder only the servers have the tables: workers then continue to retain pushes, up to their limit
        if not self.tables or self._saved_tables is not None:
            for column in self._columns:
                column.saved(snapshot.clock)

    def move_bound(self, bound: MovedBound) -> None:
        """Replace the staleness bound of all spaces soon; while the manager does not answer, this is tried again."""
        with self._watch.lock:
            self._bound = bound
        self._watch.check_soon()

    def write_tables(self, rounds: int) -> Callable[[Path], list[Path]] | None:
        """Return a function that writes the tables to a folder and returns the files, or None if there are no tables.

        The function writes the states after round `rounds` if these were fetched, else the present states.
        """
        column = self._with_tables
        if column is None:
            return None
        space, kept, session = column.space, column.states(rounds), column.session
        return lambda folder: write_tables(space, folder, kept, session)

    def tables_kept(self, folder: Path) -> None:
        """Record that this checkpoint folder has the tables. Their lost segments will be loaded from this folder."""
        column = self._with_tables
        if column is None:
            return
        self._saved_tables = folder, True
        if not column.space.cuts:
            with column.session() as session:
                session.notify(GroupMessage.SAVED, -1)

    def load_tables(self, folder: Path, same: bool) -> None:
        """Let the next generation begin with the tables in the folder of a checkpoint.

        `same`: the checkpoint has the job's number of workers.
        """
        self._saved_tables = folder, same

    def whole_tables(self) -> dict[str, list[Any]]:
        """Return the present states of all segments of each table; {} if they exceed WHOLE_BYTES or there are none."""
        column = self._with_tables
        if column is None or self._watch.job().get("bytes", 0) > WHOLE_BYTES:
            return {}
        with column.session() as session:
            return read_tables(column.space, session)

    def _make_first_tables(self, space: Space, positions: list[int]) -> dict[int, Any]:
        """Return a dict from segment to the state with which it begins, for segments of tables.

        The states are those of the open space, or of a checkpoint, or {} if there is neither; the tables are then
        empty.
        """
        old = self._with_tables
        if old is not None:
            with old.session() as session:
                return carry_tables(old.space, session, space)
        if self._saved_tables is not None and space.tables:
            folder, same = self._saved_tables
            return read_saved_tables(space, folder, positions, same)
        return {}

    # ---- watching

    def look(self) -> None:
        """Check the group's state, and load lost segments again.

        Any thread may call this. A failure is logged, and not raised.
        """
        self._watch.check()

    def _restore(self, facts: Facts) -> None:
        if self._bound is not None:
            for column in self._columns:
                self.group.move_bound(column.space.number, self._bound)
            self._bound = None
        for number, (column, mine) in enumerate(zip(self._columns, spaces_of(facts, self.spaces), strict=True)):
            lost = [segment["index"] for segment in mine.get("segments", []) if segment["state"] == "lost"]
            if lost and self._base is not None:
                self._restore_column(number, column, self._base, lost)

    def _restore_column(self, number: int, column: ColumnSpace, base: Snapshot, lost: list[int]) -> None:
        space, grid = column.space, self._grid
        part = base if self._division is None else self._division.cut(base, number)
        # the step below which missing pushes count as lost: half-way between the step below which the worker has
        # evicted pushes, and its position, because it may evict more of them before it repeats the rest
        skips = (
            {}
            if space.servers.in_step
            else {
                grid.at(rank).data: (since + position) // 2
                for rank, (position, since) in self.reached.items()
                if since and grid.column(rank) == number
            }
        )
        folder, same = self._saved_tables or (None, True)
        tables = read_saved_tables(space, folder, part.positions, same, lost) if folder else {}
        missing = column.restore(part, tables, lost, skips, members=self._members)
        rows = "" if folder or not space.tables else ". Tables start empty, because no checkpoint has their rows"
        self._watch.add_event(
            {
                "kind": "restored",
                "time": time.time(),
                "segments": lost,
                "pushes": missing,
                "message": f"{len(lost)} segments were lost without a backup, and were loaded again from the snapshot "
                f"of round {base.round}{rows}. Workers repeat their later pushes; {missing} pushes are lost, because "
                "they were evicted from the workers' replay buffers (the knob is `replay_mb`)",
            }
        )

    def news(self) -> list[dict[str, Any]]:
        """Return the group's events about this job since the last call, each with a kind, a message and a time."""
        return self._watch.events()

    def facts(self) -> dict[str, Any]:
        """Return facts about the group and all of the job's spaces together, for `progress.json`."""
        facts, mine = self._watch.facts, self._watch.job()
        held: dict[str | None, int] = {}
        for segment in mine.get("segments", []):
            held[segment["primary"]] = held.get(segment["primary"], 0) + 1
        keys = ("name", "host", "pid", "state", "bytes", "operations_s", "cpu")
        servers = [
            {key: server.get(key) for key in keys} | {"segments": held.get(server["name"], 0)}
            for server in facts.get("servers", [])
        ]
        numbers = ("bytes", "rows", "operations_s", "rejected", "throttled", "version", "quota", "branch_of")
        return {
            "name": self.group.name,
            "own": self.own,
            "space": self.name,
            "manager_pid": facts.get("pid"),
            "status": facts.get("status"),
            "replicas": facts.get("replicas"),
            "segments": sum(space.segments for space in self.spaces),
            "servers": servers,
            "moves": len(facts.get("moves", [])),
            **{key: mine.get(key) for key in numbers},
            "held_back": self._watch.throttled,
        }

    def times(self) -> dict[str, tuple[str, MemberTimes]]:
        """Return for each living server its host, and where the time of its loop went since it was started.

        Its delays are those of the job's present spaces only. With several workers in a replica they are left out,
        because their ranks are those of replicas.
        """
        facts = self._watch.facts
        spaces = spaces_of(facts, self.spaces) if len(self.spaces) == 1 else []
        found: dict[str, tuple[str, MemberTimes]] = {}
        for server in facts.get("servers", []):
            delays: dict[str, dict[str, float]] = {}
            for space in spaces:
                for rank, slowest, seconds in space.get("delays", {}).get(server["name"], []):
                    delays.setdefault(f"worker-{rank}", {})[f"worker-{slowest}"] = seconds
            if server.get("state") != "dead" and server.get("account"):
                spent = {(part, ""): seconds for part, seconds in server["account"].items()}
                found[server["name"]] = (
                    str(server.get("host") or ""),
                    dataclasses.replace(MemberTimes.of(spent), delays=delays),
                )
        return found

    def close(self) -> None:
        """Drop the spaces; end the group if it is the job's own. A failure is logged, and not raised."""
        self._watch.close()
        for column in self._columns:
            column.stop_collecting()
        self._watch.join()
        try:
            if self.own:
                self.group.stop()
            else:
                for space in self.spaces:
                    self._drop(space.name)
        except (RaypsError, TimeoutError) as error:
            log.warning("space %r of group %r could not be dropped: %s", self.name, self.group.name, error)
        self._columns = []


def name_column(job: str, column: int) -> str:
    """Return the name of the space of a job's column."""
    return job if column == 0 else f"{job}/{column}"


def is_column_of(space: str, job: str) -> bool:
    """Return whether the space of this name belongs to a column of the job other than the first."""
    name, _, column = space.rpartition("/")
    return name == job and column.isdigit()


def cut_quota(quota: Quota, elements: float, requests: float) -> Quota:
    """Return a space's share of its job's quota, given its fractions of the job's elements and requests."""
    return Quota(
        None if quota.bytes is None else max(1, int(quota.bytes * elements)),
        None if quota.operations is None else quota.operations * requests,
    )


def _of_tables(strategy: StrategyView) -> StrategyView | None:
    """Return the strategy of servers with sparse tables, or None if it cannot train a model with such tables."""
    return strategy.tables


LOOK_SECONDS = 0.5  # seconds between two checks of a group
# kinds of the group's events that become events of the job
EVENTS = ("server_lost", "server_dead", "segment_lost", "resized", "server_leaving", "server_joined")
GROWTHS = 2  # number of checks that find more throttled requests before a warning; one burst causes no warning
FOR_SECONDS = 10.0  # seconds after the last throttled request in which the job counts as throttled


class GroupWatch:
    """A thread that checks the group's facts at intervals, from `start` to `close`.

    Each check calls `react` with the new facts while it holds `lock`. Code that changes the job's spaces must hold
    `lock` too. `spaces()` returns the job's open spaces.
    """

    def __init__(
        self, group: ManagerClient, job: str, spaces: Callable[[], Sequence[Space]], react: Callable[[Facts], None]
    ) -> None:
        self.lock = threading.Lock()
        self.facts: Facts = {}
        self._group, self._job, self._spaces, self._react = group, job, spaces, react
        self._events: deque[Facts] = deque()
        self._since = time.time()
        self._throttled = Throttled()
        self._over, self._soon = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; a second call does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name=f"looker-{self._job}")
            self._thread.start()

    def close(self) -> None:
        """End the checks. `join` waits for the thread."""
        self._over.set()
        self._soon.set()

    def check_soon(self) -> None:
        """Let the thread check the group now."""
        self._soon.set()

    def join(self) -> None:
        """Wait for the thread to end, after `close`."""
        if self._thread is not None:
            self._thread.join(10.0)

    def _run(self) -> None:
        while not self._over.is_set():
            self._soon.clear()
            self.check()
            self._soon.wait(LOOK_SECONDS)

    def check(self) -> None:
        """Read the group's facts, and call `react` with them. Any thread may call this; a failure is logged."""
        if self._over.is_set():
            return  # the job's own group has ended
        try:
            facts = self._group.facts()
            with self.lock:
                self.facts = facts
                self._take_events(facts)
                self._check_quota()
                if not self._over.is_set():
                    self._react(facts)
        except (RaypsError, TimeoutError) as error:  # the manager may restart: the next check asks again
            log.info("server group %r does not answer: %s", self._group.name, error)
        except Exception:
            log.exception("the check of server group %r failed", self._group.name)

    def _take_events(self, facts: Facts) -> None:
        fresh = [event for event in facts["events"] if event["time"] > self._since]
        if fresh:
            self._since = fresh[-1]["time"]
        names = {None, self._job, *(space.name for space in self._spaces())}
        self._events += [event for event in fresh if event["kind"] in EVENTS and event.get("space") in names]

    def _check_quota(self) -> None:
        """Add a warning, once for each value of the quota, if the quota throttles the job."""
        found = self._throttled.observe(self.job(), time.monotonic())
        if found is not None:
            names = [space.name for space in self._spaces()]
            commands = [f"`rayps servers quota {self._group.name} {name} --operations N`" for name in names]
            verb = "changes" if len(commands) == 1 else "change"
            message = f"the job is {found}: {' and '.join(commands)} {verb} the quota"
            self.add_event({"kind": "warning", "time": time.time(), "message": message})

    def add_event(self, event: Facts) -> None:
        """Add an event for `events` to return."""
        self._events.append(event)

    def events(self) -> list[Facts]:
        """Return the events that were added since the last call; each has a kind, a message and a time."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def job(self) -> Facts:
        """Return the facts of all the job's spaces together."""
        return add_up_facts(spaces_of(self.facts, self._spaces()))

    @property
    def throttled(self) -> str | None:
        """A text on how the quota throttles the job now, or None if it does not."""
        return self._throttled.now(time.monotonic())


def spaces_of(facts: Facts, spaces: Sequence[Space]) -> list[Facts]:
    """Return the group's facts about each of these spaces; {} for a space that the group does not know."""
    known = {found["number"]: found for found in facts.get("spaces", [])}
    return [known.get(space.number, {}) for space in spaces]


def add_up_facts(spaces: Sequence[Facts]) -> Facts:
    """Return the facts of several spaces combined into those of one. If one space has no quota, the result has none."""
    if len(spaces) < 2:
        return spaces[0] if spaces else {}
    counts = ("bytes", "rows", "operations_s", "rejected", "throttled")
    found: Facts = {key: sum(space.get(key) or 0 for space in spaces) for key in counts}
    quotas = [space.get("quota") or {} for space in spaces]
    found["quota"] = {
        key: None if any(quota.get(key) is None for quota in quotas) else sum(quota[key] for quota in quotas)
        for key in ("bytes", "operations")
    }
    found["version"] = max(space.get("version", 0) for space in spaces)
    found["branch_of"] = spaces[0].get("branch_of")
    found["segments"] = [segment for space in spaces for segment in space.get("segments", [])]
    return found


class Throttled:
    """The decision whether a job is throttled by its quota of operations; all times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._limit: float | None = None
        self._throttled = 0
        self._growths, self._grown_at = 0, float("-inf")
        self._said = False

    def observe(self, space: dict[str, Any], now: float) -> str | None:
        """Record the facts "quota" and "throttled" of a job; return a warning's text, or None.

        A warning is returned once for each value of the quota.
        """
        limit, throttled = (space.get("quota") or {}).get("operations"), int(space.get("throttled") or 0)
        if limit != self._limit:
            self._limit, self._growths, self._said = limit, 0, False
        elif throttled > self._throttled and limit is not None:
            self._growths = self._growths + 1 if now - self._grown_at < FOR_SECONDS else 1
            self._grown_at = now
        self._throttled = throttled
        if self._said or self.now(now) is None:
            return None
        self._said = True
        return self.now(now)

    def now(self, now: float) -> str | None:
        """Return a text on how the quota throttles the job at the time `now`, or None if it does not."""
        if self._limit is None or self._growths < GROWTHS or now - self._grown_at >= FOR_SECONDS:
            return None
        return f"throttled by its quota of {self._limit:g} operations a second"
