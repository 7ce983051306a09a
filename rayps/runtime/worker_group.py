"""A generation of workers and servers: start, begin, poll, shut down, as one. Polling never blocks.

Which members to replace is decided by the driver.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rayps.cluster.actor_host import START_SECONDS
from rayps.cluster.local import Bundle, Cluster
from rayps.core.errors import ClusterError
from rayps.core.families import Rebuild
from rayps.core.grid import Grid
from rayps.core.topology import servers_of
from rayps.recovery.backup_assignment import Bond, Mending
from rayps.recovery.client_states_backup import ClientStatesBackup
from rayps.recovery.group_backup import halted, tied
from rayps.runtime.assemble_state import assemble, columns_of, in_columns
from rayps.runtime.job_servers import FixedServers, JobServers
from rayps.runtime.members import GroupMember, evaluated, place, settle
from rayps.runtime.reservation import WorkerResources, reserve
from rayps.runtime.snapshots import SnapshotSchedule
from rayps.runtime.time_limit import overdue
from rayps.runtime.worker_actor import WorkerFacts
from rayps.tensors.snapshot import Snapshot
from rayps.worker.plan import Orders, WorkerPlan

if TYPE_CHECKING:
    from rayps.ps.job_space import JobSpace


@dataclass(slots=True)
class WorkerGroup:
    """The workers and servers of one job. `space` is its place on an elastic server group, if it has one."""

    cluster: Cluster
    packed: bytes  # the workload
    size: int
    resources: Bundle
    working_dir: str | None = None
    capture: bool = True
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    workers: list[GroupMember] = field(default_factory=list)
    space: JobSpace | None = None
    vault: ClientStatesBackup = field(default_factory=ClientStatesBackup)  # states of clients
    _fixed: FixedServers = field(init=False)
    _berths: WorkerResources = field(default_factory=WorkerResources)
    _orders: Orders | None = None
    _meeting: SnapshotSchedule | None = None
    grid: Grid = field(default_factory=lambda: Grid(1))
    _line: int = 0  # the generation that last began from a snapshot
    _bonds: list[Bond | None] = field(default_factory=list)
    _attempts: int = 0  # how often workers have begun anew while others went on
    _said: dict[tuple[int, str], int] = field(default_factory=dict)  # the newest point of each rank, by kind
    _collected: int = 0  # the round of the newest state
    _evaluated: list[int] = field(default_factory=list)  # the last round after which each rank was heard to evaluate

    def __post_init__(self) -> None:
        self._fixed = FixedServers(self.cluster, self.packed, self.secret, self.working_dir)

    @property
    def shards(self) -> list[GroupMember]:
        """The job's own servers."""
        return self._fixed.members

    @property
    def members(self) -> list[GroupMember]:
        """All actors of the job."""
        return [*self.workers, *self.shards]

    @property
    def holds_tables(self) -> bool:
        """Whether the parameters are in one space with tables, which are too large to go back to a snapshot."""
        return (
            self._orders is not None
            and servers_of(self._orders.strategy) is not None
            and self._spaced
            and bool(self.space is not None and self.space.tables)
        )

    # ---- starting and ending

    def start(self, timeout: float, grid: Grid | None = None, check: Callable[[], None] = lambda: None) -> str | None:
        """Reserve the workers' resources together and start them, or leave nothing behind; says where replicas are.

        `check` is called while they start; what it raises ends the start.

        Raises:
            NoResources: the cluster cannot hold them.
            ClusterError: an actor did not start.
        """
        self._berths = reserve(self.cluster, self.resources, grid or Grid(self.size), timeout)
        try:
            check()
            self.workers = [self._spawn_worker(rank) for rank in range(self.size)]
            place(self.workers, check)
            for worker in self.workers:
                if worker.dead:
                    raise ClusterError(f"{worker.name} did not start: {worker.dead}")
        except BaseException:
            self.close()
            raise
        return self._berths.message

    def close(self) -> None:
        """End every member, free what the job holds on a server group, and give the resources back."""
        for member in self.workers:
            self.cluster.kill(member.handle)
        self.workers = []
        self.vault.close()
        self._fixed.close()
        if self.space is not None:
            self.space.close()
        self._berths.release()
        self._berths = WorkerResources()

    def _spawn_worker(self, rank: int) -> GroupMember:
        cpus, gpus = self.resources.get("cpu", 1.0), self.resources.get("gpu", 0.0)
        handle = self.cluster.spawn(
            "rayps.runtime.worker_actor:WorkerActor",
            rank,
            self.secret,
            self.packed,
            working_dir=self.working_dir,
            threads=max(1, int(cpus)),
            device="cuda" if gpus else "cpu",
            capture=self.capture,
            cpus=cpus,
            gpus=gpus,
            gang=self._berths.gang,
            index=self._berths.index[rank],
        )
        return GroupMember(f"worker-{rank}", handle)

    # ---- a generation

    def initial(self, seed: int) -> Snapshot:
        """The state before the first round of a model that fits on one worker, drawn by rank 0 from the seed."""
        snapshot: Snapshot = self.workers[0].handle.call("initial", seed).result(START_SECONDS)
        return snapshot

    @property
    def mends(self) -> bool:
        """Whether workers keep each other's states, so that a death need not bring everyone back to a snapshot."""
        return self._known().strategy.recovery == Rebuild()

    @property
    def rejoins(self) -> bool:
        """Whether a replica that has lost a worker can begin anew from the servers although all work in step."""
        rebuilds = self._known().strategy.recovery == Rebuild(from_servers=True)
        return rebuilds and not any(shard.dead for shard in self.shards)

    def halt(self) -> Mending | None:
        """End the generation where it stands; from which round the next one can go on without a snapshot, if any."""
        return halted(self.grid, self.workers, self._line)

    def begin(self, orders: Orders, snapshot: Snapshot, mending: Mending | None = None) -> None:
        """Start a generation: dead members are replaced, living ones begin anew, all from the snapshot.

        With `mending`, from the states that workers keep, and the snapshot is what these do not have.
        """
        self._orders, self._meeting, self.grid = (
            orders,
            SnapshotSchedule(orders.boundary),
            orders.strategy.grid(self.size),
        )
        self._collected, self._evaluated = snapshot.round, [orders.evaluated] * self.size
        for member in [m for m in self.workers if m.dead]:
            self.cluster.kill(member.handle)
        self.workers = [self._spawn_worker(i) if m.dead else m for i, m in enumerate(self.workers)]
        new = self._fixed.prepare(0 if self._spaced else _servers(orders))
        place([*(m for m in self.workers if m.place is None), *new])
        if any(member.dead for member in self.members):
            return  # the next poll says so, and the driver decides
        if mending is None:
            self._line, self._said = orders.generation, {}
        else:
            self._said = {at: min(newest, mending.round - 1) for at, newest in self._said.items()}
        self._bonds = tied(self.grid, self.workers, self._line, mending) if self.mends else []
        if any(member.dead for member in self.workers):
            return
        parts = columns_of(replace(snapshot, own={}), orders.division)
        shared = [self.cluster.share(part) for part in parts]  # nobody is sent more than its column's
        if self.space is not None and self._spaced:
            self.space.begin(orders, snapshot, shared[0])
        else:
            self._fixed.begin(orders, parts, shared)
        del parts
        self.vault.deal(self.workers, orders.strategy, snapshot.round, orders.timeout)
        replies = []
        for rank, worker in enumerate(self.workers):
            start = snapshot.positions[self.grid.at(rank).data] if mending is None else mending.round
            plan = self._worker_plan(rank, start)
            own = (snapshot.own[rank],) if rank in snapshot.own else ()
            replies.append(worker.handle.call("begin", plan, shared[self._column(rank)], *own))
        settle(replies, self.workers)

    def _column(self, rank: int) -> int:
        return self.grid.column(rank) if self._known().division is not None else 0

    def replicas_of(self, ranks: Iterable[int]) -> list[list[int]]:
        """The replicas that these workers belong to, each as its ranks."""
        return [self.grid.replica(data) for data in sorted({self.grid.at(rank).data for rank in ranks})]

    def replace_workers(self, ranks: list[int], snapshot: Snapshot) -> None:
        """Start a replica's workers anew while the others go on; they ask the servers which step is their next.

        Those that live keep their processes.
        """
        dead = [rank for rank in ranks if self.workers[rank].dead]
        for rank in dead:
            self.cluster.kill(self.workers[rank].handle)
            self.workers[rank] = self._spawn_worker(rank)
        place([self.workers[rank] for rank in dead])
        if any(self.workers[rank].dead for rank in ranks):
            return  # the next poll says so
        self._attempts += 1
        parts = columns_of(snapshot, self._known().division)
        replies = []
        for rank in ranks:
            part = self.cluster.share(parts[self._column(rank)])
            replies.append(self.workers[rank].handle.call("begin", self._worker_plan(rank, -1), part))
        settle(replies, [self.workers[rank] for rank in ranks])

    def replace_shard(self, index: int, snapshot: Snapshot) -> None:
        """Restore a shard from a snapshot and tell the workers, who say again what they pushed to it since."""
        address = self._fixed.replace(index, snapshot)
        if address is not None:
            column, number = self._fixed.column(index)
            for rank, worker in enumerate(self.workers):
                if not worker.dead and self._column(rank) == column:
                    worker.heard(worker.handle.call("rewire", number, address))

    def _addresses(self, axis: str, rank: int) -> list[str]:
        return [self.workers[other].address for other in self.grid.along(axis, rank)]

    def _worker_plan(self, rank: int, start: int) -> WorkerPlan:
        orders, shards = self._known(), self._fixed.doors(self._column(rank)) if self._fixed.members else []
        within = {"stage": self.grid.stage, "tensor": self.grid.tensor}
        return WorkerPlan(
            orders.generation,
            rank,
            self.size,
            orders.strategy,
            [] if servers_of(orders.strategy) is not None else self._addresses("data", rank),
            shards,
            self.secret,
            orders.seed,
            start,
            orders.end,
            orders.boundary,
            self._evaluated[rank],
            orders.timeout,
            self.space.seat(rank) if self.space is not None and self._spaced else None,
            orders.origin,
            orders.division,
            {axis: self._addresses(axis, rank) for axis, length in within.items() if length > 1},
            self._bonds[rank] if self._bonds else None,
            self._attempts,
            orders.mailbox,
        )

    @property
    def _spaced(self) -> bool:
        """Whether this generation needs the job's space, which holds the parameters, or tables, or both."""
        return self.space is not None and self.space.serves(self._known().strategy)

    def _servers(self) -> list[JobServers]:
        return [self.space] if self.space is not None and self._spaced else [self._fixed]

    def _known(self) -> Orders:
        assert self._orders is not None, "begin() comes first"
        return self._orders

    @property
    def met(self) -> str | None:
        """Why the strategy is done before the phase's end, as all workers say; None while it is not."""
        facts = [worker.facts for worker in self.workers]
        reasons = [f.met for f in facts if isinstance(f, WorkerFacts) and f.generation == self._known().generation]
        return reasons[0] if len(reasons) == self.size and None not in reasons else None

    # ---- asking

    def poll(self) -> list[dict[str, Any]]:
        """Take in the answers that have come, ask again, and return the new metric points (with their rank)."""
        orders, wanted = self._known(), self._wanted()
        points: list[dict[str, Any]] = []
        for rank, worker in enumerate(self.workers):
            facts = worker.ask(wanted, orders.timeout)
            if isinstance(facts, WorkerFacts) and facts.generation == orders.generation:
                worker.dead = overdue(facts.call, orders.timeout, facts.position, facts.ends)
                points += [{**point, "rank": rank} for point in facts.points if self._is_new(rank, point)]
        for point in points:
            if point["kind"] == "evaluation":
                self._evaluated[point["rank"]] = point["round"]
        if self.space is not None:
            heard = {rank: w.facts for rank, w in enumerate(self.workers) if isinstance(w.facts, WorkerFacts)}
            self.space.reached = {rank: (facts.position, facts.kept_since) for rank, facts in heard.items()}
        for servers in self._servers():
            servers.poll(orders, wanted)
        return points

    def _is_new(self, rank: int, point: dict[str, Any]) -> bool:
        """Whether a point is not one that is said again although it was heard."""
        at = rank, point["kind"]
        if point.pop("again", False) and point["round"] <= self._said.get(at, -1):
            return False
        self._said[at] = max(self._said.get(at, -1), point.get("round", -1))
        return True

    def hurry(self) -> None:
        """Let every member keep its share of the next round that all can still hear of, for a checkpoint now."""
        if self._meeting is not None:
            self._meeting.hurry()

    def _wanted(self) -> int:
        """The round whose share every member is to keep; 0 while it is not known how far all have come."""
        concerned = self._concerned()
        if self._meeting is None or concerned is None:
            return 0
        return self._meeting.look(concerned, self._collected)

    def lines(self) -> list[tuple[float, str, str]]:
        """The log lines that the last polls brought: time, who, text."""
        found = []
        for member in self.workers:
            if isinstance(member.facts, WorkerFacts) and member.facts.lines:
                found += [(at, member.name, text) for at, text in member.facts.lines]
                member.facts.lines = []
        return sorted(found)

    def collect(self, snapshot: Snapshot) -> Snapshot | None:
        """The newest state of which every member still keeps its share; None when there is none newer.

        `snapshot` is the state that the generation began from.
        """
        concerned = self._concerned()
        if concerned is None or any(member.dead for member in self.members):
            return None
        in_step = self._known().strategy.topology.in_step
        common = set.intersection(*(set(held) for _, held in concerned))
        for newest in sorted((r for r in common if r > snapshot.round), reverse=True):
            workers = [worker.handle.call("part", newest if in_step else None) for worker in self.workers]
            waits = [servers.parts(newest) for servers in self._servers()]
            timeout = self._known().timeout
            try:
                given = [part.result(timeout) for part in workers]
                held = [part for wait in waits for part in wait(timeout)]
            except (ClusterError, TimeoutError):
                return None  # somebody died or is silent: the next polls say who
            whole = all(part is not None for part in ([*given, *held] if in_step else held))
            if whole and self.vault.gather(self.workers, newest, timeout):
                found = self._assemble(snapshot, given, held)
                early = [(self._known().end, found.round)] if given[0] is not None and given[0].met else []
                found.strategy, found.ended = snapshot.strategy, snapshot.ended + early
                self._collected = found.round
                return found
        return None

    def _assemble(self, base: Snapshot, given: list[Any], held: list[Any]) -> Snapshot:
        """The whole state from everyone's parts of it."""
        division = self._known().division
        if division is None:
            return assemble(base, dict(enumerate(given)), held)
        columns = [self._column(rank) for rank in range(self.size)]
        of = [list(self._fixed.of(i)) for i in range(len(division.columns))] if held else []
        return in_columns(division, base, columns, given, of, held)

    def saved(self, snapshot: Snapshot) -> None:
        """Tell the servers that the driver has this state: what it holds need not be said again."""
        for servers in self._servers():
            servers.saved(snapshot)

    def _concerned(self) -> list[tuple[int, list[int]]] | None:
        """How far the members have come who must give their shares of one and the same round, and what each holds.

        In step that is everyone. Out of step a round is that of the slowest worker, which only servers know; what a
        worker adds (its random state, the buffers) belongs to no round of the others. None: not all have said it.
        """
        facts = [worker.facts for worker in self.workers]
        slowest = min((f.position if isinstance(f, WorkerFacts) else 0 for f in facts), default=0)
        found: list[tuple[int, list[int]]] = []
        for servers in self._servers():
            held = servers.held(slowest)
            if held is None:
                return None
            found += held
        if found and not self._known().strategy.topology.in_step:
            return found
        if not all(facts):
            return None
        return [*((f.position, f.parts) for f in facts), *found]

    def evaluate(self, snapshot: Snapshot, timeout: float) -> dict[str, float] | None:
        """Every metric at the snapshot's parameters, as means over all samples of the evaluation data.

        None when a worker was lost meanwhile: it counts as dead.
        """
        parts = columns_of(snapshot, self._known().division)
        shared = [(self.cluster.share(part.params), part.buffers) for part in parts]
        replies = [w.handle.call("evaluate", *shared[self._column(rank)]) for rank, w in enumerate(self.workers)]
        silence = self._known().timeout
        return evaluated(self.workers, replies, timeout, silence=silence, round=snapshot.round)


def _servers(orders: Orders) -> int:
    """How many fixed servers a generation needs: each column has at least one."""
    columns = 1 if orders.division is None else len(orders.division.columns)
    servers = servers_of(orders.strategy)
    return 0 if servers is None else servers.shards(columns)
