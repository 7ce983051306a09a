"""All workers and servers of one job: start them, begin a generation, poll, collect a snapshot, end them.

Polling never blocks. The driver decides which members to replace.
"""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import TYPE_CHECKING

from rayps_client.errors import ActorDied, ClusterError, LinkError, RaypsError

from rayps.cluster.code_folder import JobCode
from rayps.cluster.local import ActorReply, Bundle, Cluster, LocalCluster, refuse_if_too_large, until
from rayps.cluster.members import LEAVE_SECONDS, GroupMember, leave, place, settle
from rayps.cluster.notices import Notice
from rayps.cluster.reservation import WorkerResources, reserve, torch_threads
from rayps.cluster.room import avoided_hosts
from rayps.cluster.user_packages import install_seconds
from rayps.core.grid import Grid
from rayps.core.job.continuation import Continuation
from rayps.core.job.records import Point
from rayps.core.job.user_code import START_SECONDS, explain_overdue
from rayps.core.metrics import Totals, add_up_totals
from rayps.core.strategy.staleness_bound import MovedBound
from rayps.core.strategy.strategy_families import learns_by_client, rebuilds
from rayps.core.strategy.topology import runs_in_step, servers_of, shard_of
from rayps.federated.client_states_backup import ClientStatesBackup
from rayps.federated.strategy_interface import state_owner
from rayps.ps.client.session import Session
from rayps.ps.protocol.members import MemberChange
from rayps.ps.protocol.segment_map import SpaceMap
from rayps.ps.protocol.space import SpaceRank
from rayps.ps.server.dense_segment import ShardPart
from rayps.runtime.driver.decide_recovery import death_of
from rayps.runtime.driver.job_servers import FixedServers, JobServers
from rayps.runtime.driver.recover import PeerStates
from rayps.runtime.results.snapshots import SnapshotSchedule, assemble, assemble_columns, assemble_written, columns_of
from rayps.runtime.size.newcomers import Newcomers
from rayps.tensors.flat import Layout
from rayps.tensors.snapshot import Snapshot
from rayps.worker.plan import Orders, PartsPlan, PeerAddresses, TimesPlan, WorkerFacts, WorkerPart, WorkerPlan

if TYPE_CHECKING:
    from rayps.ps.job_space import JobSpace


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """What a worker's process gets apart from its workload: the user's code, and whether its output is captured."""

    code: JobCode
    capture: bool = True


@dataclass(slots=True)
class WorkerLauncher:
    """Starts and ends the workers' processes. The resources of all workers are reserved together."""

    cluster: Cluster
    packed: bytes  # the packed workload
    resources: Bundle  # of one worker
    secret: bytes
    code: JobCode | None = None  # as `Cluster.share` returned it
    capture: bool = True
    warm: bool = True  # whether workers may take warm processes
    leavers: list[GroupMember] = field(default_factory=list)  # that left the group, and whose processes still live
    _reserved: WorkerResources = field(default_factory=WorkerResources)

    def reserve_one(self, timeout: float) -> WorkerResources:
        """Reserve the resources of one worker alone, on a host that is not under notice.

        Raises NoResources if they are not free within `timeout` s.
        """
        gang = self.cluster.reserve([self.resources], timeout, avoided_hosts(self.cluster))
        return WorkerResources(gang, [0], others=1)

    def reserve_each(self, count: int, timeout: float) -> list[WorkerResources]:
        """Reserve the resources of `count` workers, so that each can be released alone: of all, or of none.

        Raises NoResources if they are not free within `timeout` seconds.
        """
        refuse_if_too_large([self.resources] * count, self.cluster.total())
        found: list[WorkerResources] = []
        deadline = time.monotonic() + timeout
        try:
            for _ in range(count):
                left = max(0.1, deadline - time.monotonic())
                found.append(reserve(self.cluster, self.resources, Grid(1), left))
        except BaseException:
            for each in found:
                each.release()
            raise
        return found

    def reserve(self, grid: Grid, timeout: float, others: Sequence[Bundle]) -> str | None:
        """Reserve resources for all workers and servers, or for none.

        `others` are the resources of the servers. Return a text on where replicas are placed, or None. Raises
        NoResources if the cluster does not have the resources within `timeout` seconds.
        """
        self._reserved = reserve(self.cluster, self.resources, grid, timeout, others)
        return self._reserved.message

    @property
    def reserved(self) -> WorkerResources:
        """What is reserved."""
        return self._reserved

    def start(self, rank: int, resources: WorkerResources | None = None) -> GroupMember:
        """Start one worker's process, with `resources` of its own or in those of all workers."""
        reserved = self._reserved if resources is None else resources
        cpus, gpus = self.resources.get("cpu", 1.0), self.resources.get("gpu", 0.0)
        began = time.monotonic()
        handle = self.cluster.spawn(
            "rayps.runtime.driver.worker_actor:WorkerActor",
            rank,
            self.secret,
            self.packed,
            code=self.code,
            threads=torch_threads(cpus),
            device="cuda" if gpus else "cpu",
            capture=self.capture and not isinstance(self.cluster, LocalCluster),  # never of the caller's process
            cpus=cpus,
            gpus=gpus,
            gang=reserved.gang,
            index=reserved.index[rank if resources is None else 0],
            warm=self.warm,
        )
        return GroupMember(f"worker-{rank}", handle, resources=resources, spawned=began)

    def end(self, members: Iterable[GroupMember]) -> None:
        """End the processes of `members`, and release the resources that a member has alone."""
        for member in members:
            self.cluster.kill(member.handle)
            if member.resources is not None:
                member.resources.release()
                member.resources = None

    def release(self) -> None:
        """Release the resources."""
        self._reserved.release()
        self._reserved = WorkerResources()


class WorkerGroup:
    """The workers and servers of one job. `space`: the job's space on a server group; None if it has none."""

    def __init__(
        self,
        cluster: Cluster,
        packed: bytes,
        size: int,
        resources: Bundle,
        code: JobCode | None = None,
        *,
        capture: bool = True,
        space: JobSpace | None = None,
        apart: bool = False,
        slots: int | None = None,
    ) -> None:
        """Prepare the group without starting it. `apart`: each worker has resources of its own, to release alone.

        `slots`: workers get their rows by leases, and join and leave at any time with ranks below this number; None if
        the ranks are 0 to `size` - 1.
        `packed` is the packed workload, `size` the number of workers, and `resources` those of one worker. `code` is
        what each process imports the user's modules from.
        """
        self.cluster, self.size, self.space = cluster, size, space
        self.secret = secrets.token_bytes(32)
        self.workers: list[GroupMember] = []
        self.grid = Grid(1)
        self._client_states: ClientStatesBackup | None = None  # created when a phase needs it
        # Ray keeps the value once on each host; an actor gets it as an argument
        shared = None if code is None else cluster.share(code)
        self._code = code or JobCode("")
        self._launcher = WorkerLauncher(
            cluster, packed, resources, self.secret, shared, capture, self._code.may_be_warm
        )
        self._fixed = FixedServers(cluster, packed, self.secret, shared)
        self._orders: Orders | None = None
        self._schedule: SnapshotSchedule | None = None
        self._peers = PeerStates()
        self._attempts = 0  # how often a replica has started again while other workers kept training
        self._received = _ReceivedPoints(slots or size)
        self._collected = 0  # the round of the newest state that was collected
        self._apart, self.slots = apart, slots

    @property
    def shards(self) -> list[GroupMember]:
        """The servers that belong to the job alone."""
        return self._fixed.members

    @property
    def members(self) -> list[GroupMember]:
        """All actors of the job."""
        return [*self.workers, *self.shards]

    @property
    def dead(self) -> tuple[tuple[str, str], ...]:
        """A pair (name, reason) for each member that has died."""
        return tuple((member.name, member.dead) for member in self.members if member.dead)

    @property
    def dead_manager(self) -> tuple[tuple[str, str], ...]:
        """A pair (name, reason) for the manager of the job's own server group if it has died; otherwise ()."""
        return self.space.dead if self.space is not None and self._orders is not None and self._uses_space else ()

    @property
    def holds_tables(self) -> bool:
        """Whether servers hold the parameters in one space with sparse tables, which is too large for a snapshot."""
        return (
            self._orders is not None
            and servers_of(self._orders.strategy) is not None
            and self._uses_space
            and bool(self.space is not None and self.space.tables)
        )

    # ---- start and end

    def start(
        self,
        timeout: float,
        grid: Grid | None = None,
        check: Callable[[], None] = lambda: None,
        *,
        servers: Sequence[Bundle] = (),
    ) -> str | None:
        """Reserve the resources of workers and servers together, and start all workers.

        Return a text on where replicas are placed, or None. `timeout` is in seconds. `check` is called while the
        workers start. If it raises an exception or a worker does not start, the caller closes the group. `servers` are
        the resources of the job's own servers (`shard_bundles`).

        Raises:
            NoResources: the cluster lacks the resources.
            ActorDied: a worker died, or did not start in time.
            ClusterError: the constructor of a worker raised an error.
        """
        alone: list[WorkerResources | None] = [None] * self.size
        if self._apart:
            placed = self._launcher.reserve(Grid(0), timeout, servers) if servers else None
            alone = [*self._launcher.reserve_each(self.size, timeout)]
        else:
            placed = self._launcher.reserve(grid or Grid(self.size), timeout, servers)
        self._fixed.reserved = self._launcher.reserved
        check()
        for rank, resources in enumerate(alone):
            self.workers.append(self._launcher.start(rank, resources))
        place(self.workers, check, seconds=self._start_seconds())
        for worker in self.workers:
            if worker.dead:
                raise self._explain_death(worker)
        return placed

    def _explain_death(self, worker: GroupMember) -> ActorDied:
        """Return the error that says which worker died, why, and what it wrote last."""
        return ActorDied(
            f"{worker.name} did not start: {worker.dead}",
            actor=worker.name,
            reason=worker.dead,
            output=self.cluster.last_output(worker.handle),
        )

    def last_outputs(self) -> dict[str, str]:
        """Return the last output of each dead member, by its name; "" where it is not known."""
        return {member.name: self.cluster.last_output(member.handle) for member in self.members if member.dead}

    def _start_seconds(self) -> float:
        return START_SECONDS + (install_seconds() if self._code.requirements else 0.0)

    @property
    def client_states(self) -> ClientStatesBackup:
        """The states of the job's clients in the newest snapshot."""
        if self._client_states is None:
            self._client_states = ClientStatesBackup()
        return self._client_states

    def release_client_states(self) -> ClientStatesBackup | None:
        """Return the states of the job's clients, which the group does not close from now on; None without states."""
        found, self._client_states = self._client_states, None
        return found

    def close(self) -> None:
        """End every member, delete the job's data on a server group, and release the resources."""
        if self._code.leaves_files:
            leave(self.shards, "leave_code")
        self._dismiss([*self.workers, *self._launcher.leavers])
        self.workers, self._launcher.leavers = [], []
        if self._client_states is not None:
            self._client_states.close()
        self._fixed.close()
        if self.space is not None:
            self.space.close()
        self._launcher.release()

    def _dismiss(self, workers: Sequence[GroupMember]) -> None:
        """Let workers remove their files from their hosts, and end their processes."""
        if self._code.leaves_files:
            leave(workers, "leave_code")
        if not isinstance(self.cluster, LocalCluster):  # threads share the files of the caller's process
            leave(workers, "release_files")
        self._launcher.end(workers)

    # ---- a generation

    def layout(self) -> Layout:
        """Return the model's layout, which rank 0 finds without memory for the parameters if that is possible.

        Raises ActorDied if rank 0 has died, or does not answer.
        """
        with self._blame_first_worker():
            layout: Layout = self.workers[0].handle.call("layout").result(START_SECONDS)
        return layout

    def initial(self, seed: int) -> Snapshot:
        """Return the state before the first round, whose parameters rank 0 draws from the seed.

        The model must fit on one worker. Raises ActorDied if rank 0 has died, or does not answer.
        """
        with self._blame_first_worker():
            snapshot: Snapshot = self.workers[0].handle.call("initial", seed).result(START_SECONDS)
        return snapshot

    @contextmanager
    def _blame_first_worker(self) -> Iterator[None]:
        """Name rank 0 in the error if it dies in the block, or does not answer in time."""
        first = self.workers[0]
        try:
            yield
        except ActorDied as error:
            first.dead = str(error.data.get("reason", error))
            raise self._explain_death(first) from error
        except TimeoutError as error:
            first.dead = str(error)
            raise self._explain_death(first) from error

    @property
    def holds_backups(self) -> bool:
        """Whether workers hold backups of each other's states. If so, a failure needs no return to a snapshot."""
        return rebuilds(self._require_orders().strategy, from_servers=False)

    @property
    def rejoins(self) -> bool:
        """Whether, with workers in step, a replica that lost a worker can start again from the servers' parameters."""
        from_servers = rebuilds(self._require_orders().strategy, from_servers=True)
        return from_servers and not any(shard.dead for shard in self.shards)

    @property
    def parts(self) -> PartsPlan | None:
        """Where the workers of this generation write their parts of checkpoints; None if the driver writes."""
        return self._require_orders().snapshots.parts

    def facts_of(self, generation: int) -> list[tuple[str, WorkerFacts]]:
        """Return the name and the facts of each worker that has answered in this generation."""
        found = [(each.name, each.facts) for each in self.workers if isinstance(each.facts, WorkerFacts)]
        return [(name, facts) for name, facts in found if facts.generation == generation]

    @property
    def is_finished(self) -> bool:
        """Whether all workers have ended their plan of this generation."""
        facts = [worker.facts for worker in self.workers]
        return all(isinstance(each, WorkerFacts) and each.status == "finished" for each in facts)

    @property
    def hosts(self) -> set[str]:
        """The names of the workers' hosts."""
        return {worker.place.host for worker in self.workers if worker.place is not None}

    @property
    def _grid_of_states(self) -> Grid:
        """The grid in which the workers of a column have equal states. Workers that hold slices have none in common."""
        sharded = shard_of(self._require_orders().strategy) is not None
        return Grid.of(self.size, tensor=self.size) if sharded else self.grid

    def end_generation(self) -> Continuation | None:
        """End the generation now. Return how all workers can continue without a snapshot, or None if they cannot."""
        return self._peers.end_generation(self._grid_of_states, self.workers)

    def begin(
        self, orders: Orders, snapshot: Snapshot, continues: Continuation | None = None
    ) -> tuple[tuple[str, str], ...]:
        """Start a generation from the snapshot. Dead members are replaced, and living ones start again.

        With `continues`, workers start from states in their memory, and the snapshot provides only what these lack.
        Return a pair (name, reason) for each process that died before every member had its plan; () if all have it.
        """
        lost: tuple[tuple[str, str], ...] = ()
        try:
            self._begin(orders, snapshot, continues)
        except RaypsError as error:
            found = death_of(error)
            if found is None:
                raise
            lost = (found,)
        return self.dead or lost

    def _begin(self, orders: Orders, snapshot: Snapshot, continues: Continuation | None) -> None:
        self._orders, when = orders, orders.snapshots
        self._schedule = SnapshotSchedule(when.boundary, each=when.each_boundary, in_order=when.each_epoch)
        self.grid = orders.strategy.grid(self.slots or self.size)
        self._collected = snapshot.clock
        self.workers = [self._start_replacement(m.rank, m) if m.dead else m for m in self.workers]
        servers = servers_of(orders.strategy)
        new = self._fixed.prepare(
            0 if self._uses_space else _count_servers(orders), 0.0 if servers is None else servers.gpus
        )
        place([*(m for m in self.workers if m.place is None), *new], seconds=self._start_seconds())
        self._received.begin(orders.evaluation.done)
        if any(member.dead for member in self.members):
            return
        repeats = continues if continues is not None and continues.keeps_places else None
        if repeats is None:
            self._peers.base_generation = orders.generation
        self._received.accept_from(None if repeats is None else repeats.round)
        self._peers.assignments = []
        if self.holds_backups:
            self._peers.assign_backups(self._grid_of_states, self.workers, repeats)
        if any(member.dead for member in self.workers):
            return
        if continues is not repeats:  # workers have the state, and need only the frozen parameters of the snapshot
            snapshot = snapshot.only_frozen()
        parts = columns_of(replace(snapshot, own={}), orders.division)
        if snapshot.source is not None:
            parts = [part.without_frozen() for part in parts]
        shared = [self.cluster.share(part.without_frozen()) for part in parts]  # each worker gets its column's part
        whole = self._share_whole_parts(parts)
        if self.space is not None and self._uses_space:
            self.space.begin(orders, snapshot, parts)
        else:
            self._fixed.begin(orders, parts, shared)
        if learns_by_client(orders.strategy) or self._client_states is not None:
            self.client_states.send_states(self.workers, state_owner(orders.strategy), snapshot.round, orders.timeout)
        replies, begun = [], []
        for worker in self.workers:
            rank = worker.rank
            if continues is not None:
                start = continues.round
            elif orders.leased:
                start = -1
            else:
                start = snapshot.positions[self.grid.at(rank).data]
            plan = self._plan_worker(rank, start)
            own = (snapshot.own[rank],) if rank in snapshot.own else ()
            column = self._find_column(rank)
            given = shared[column] if self._has_frozen(worker, parts[column]) else whole(column)
            begun.append((plan, own))
            worker.incarnation = _read_incarnation(plan)
            replies.append(worker.handle.call("begin", plan, given, *own))
        settle(replies, self.workers)
        for at, worker in enumerate(self.workers):
            if not worker.dead and not replies[at].result(0):  # this process has changed a frozen parameter
                plan, own = begun[at]
                settle([worker.handle.call("begin", plan, whole(self._find_column(worker.rank)), *own)], [worker])

    # ---- workers that join and leave at any time

    def join(self, newcomers: Mapping[int, GroupMember], snapshot: Snapshot) -> None:
        """Begin the current generation on newcomers, from their ranks. They then wait for leases."""
        if not newcomers:
            return
        shared = self.cluster.share(snapshot)  # once for all: a copy of the parameters, during which no lease is given
        for rank, newcomer in newcomers.items():
            newcomer.name = f"worker-{rank}"
            self.workers = sorted([*self.workers, newcomer], key=lambda worker: worker.rank)
            self.size = len(self.workers)
            plan = self._plan_worker(rank, -1)
            newcomer.facts = newcomer.pending = None
            newcomer.await_reply(newcomer.handle.call("begin", plan, shared))
            self._has_frozen(newcomer, snapshot)
            newcomer.incarnation = _read_incarnation(plan)

    def drop(self, worker: GroupMember) -> None:
        """Let a worker remove its files from its host, end its process, and release its resources."""
        self._dismiss([worker])
        self.workers = [each for each in self.workers if each is not worker]
        self.size = len(self.workers)

    def set_members(self, members: Sequence[MemberChange]) -> None:
        """Set which ranks take part in a state that is loaded into a server from now on."""
        for servers in self._job_servers:
            servers.set_members(members)

    def opener(self) -> Session:
        """Open a session of rank -1 with the servers, which the caller closes."""
        [servers] = self._list_servers()
        return servers.opener()

    @property
    def _job_servers(self) -> list[JobServers]:
        return [self._fixed] if self.space is None else [self._fixed, self.space]

    def _start_replacement(self, rank: int, member: GroupMember) -> GroupMember:
        """Start a process in the place of a dead member, in the same resources."""
        self.cluster.kill(member.handle)
        return self._launcher.start(rank, member.resources)

    def change_workers(self, order: Sequence[int | None], joined: Sequence[GroupMember]) -> None:
        """Let other workers be the group from now on. `end_leavers` ends those that are not in it.

        `order` has for each new rank the old rank, or None for the next of the newcomers `joined`.
        """
        new = iter(joined)
        workers = [next(new) if old is None else self.workers[old] for old in order]
        kept = {id(worker) for worker in workers}
        self._launcher.leavers += [worker for worker in self.workers if id(worker) not in kept]
        for rank, worker in enumerate(workers):
            worker.name = f"worker-{rank}"
        in_places = len(order) == self.size and all(old in (None, rank) for rank, old in enumerate(order))
        self.workers, self.size = workers, len(workers)
        if not in_places:
            self._received = _ReceivedPoints(self.size)

    def end_leavers(self) -> None:
        """End the workers that have left the group. Call it when the others train again: it may take seconds."""
        leavers, self._launcher.leavers = self._launcher.leavers, []
        self._dismiss(leavers)

    def end_workers(self, ranks: Iterable[int]) -> None:
        """End workers that are lost, and release their resources. `change_workers` removes them from the group."""
        self._launcher.end(self.workers[rank] for rank in ranks)

    def newcomers(self) -> Newcomers:
        """Return what starts more workers for this group in the background."""
        launcher, seconds = self._launcher, self._start_seconds()
        notices = self.cluster.notices
        return Newcomers(
            launcher.reserve_one, launcher.start, lambda one: self._dismiss([one]), seconds, notices=notices
        )

    def last_points(self, seconds: float = 5.0) -> list[Point]:
        """Return the points of the living workers until now, before their generation is ended."""
        points: list[Point] = []
        for _ in range(4):  # an answer that is under way, and one that was requested after it
            points += self.poll()
            until(lambda: all(w.dead or w.pending is None or w.pending.done() for w in self.workers), seconds)
        return points

    def _share_whole_parts(self, parts: list[Snapshot]) -> Callable[[int], Snapshot]:
        """Return a function from a column to its part with frozen parameters, stored once in the cluster."""
        return functools.cache(lambda column: self.cluster.share(parts[column]))

    def _has_frozen(self, worker: GroupMember, part: Snapshot) -> bool:
        """Return whether a worker's process has the frozen parameters of `part`, and record that it gets them now."""
        had, worker.frozen = worker.frozen == part.frozen_hash, part.frozen_hash
        return had

    def reader(self) -> Session:
        """Return a session that reads the servers' parameters whatever their staleness. The caller closes the session.

        The model must fit on one worker.
        """
        seat = self._assign_seat(0)
        assert seat is not None, "the strategy keeps parameters on servers"
        return Session(
            seat.source, seat.space, -1, timeout=self._require_orders().timeout, name="reader", resident=False
        )

    def _assign_seat(self, rank: int) -> SpaceRank | None:
        """Return the worker's new place with the servers, or None if the worker needs no servers.

        The servers then refuse requests under the worker's earlier place.
        """
        if self.space is not None and self._uses_space:
            return self.space.seat(rank)
        return self._fixed.seat(self._find_column(rank), self.grid.at(rank).data)

    def _find_column(self, rank: int) -> int:
        return self.grid.column(rank) if self._require_orders().division is not None else 0

    def replace_workers(self, ranks: list[int], snapshot: Snapshot) -> None:
        """Start the workers `ranks` of one replica again, while the other workers keep training.

        Dead workers get new processes, and living ones keep theirs. The servers tell the workers their next step.
        """
        dead = [rank for rank in ranks if self.workers[rank].dead]
        reached = [self._read_position(rank) for rank in ranks]
        for rank in dead:
            self._launcher.end([self.workers[rank]])
            self.workers[rank] = self._launcher.start(rank)
        place([self.workers[rank] for rank in dead])
        if any(self.workers[rank].dead for rank in ranks):
            return  # the next poll reports the failure
        self._attempts += 1
        parts = columns_of(snapshot, self._require_orders().division)
        replies = []
        for rank, position in zip(ranks, reached, strict=True):
            part = self.cluster.share(parts[self._find_column(rank)])
            self._has_frozen(self.workers[rank], parts[self._find_column(rank)])
            plan = self._plan_worker(rank, -1)
            plan = replace(plan, times=replace(plan.times, recovers=True, reached=position))
            replies.append(self.workers[rank].handle.call("begin", plan, part))
        settle(replies, [self.workers[rank] for rank in ranks])

    def replace_shard(self, index: int, snapshot: Snapshot) -> None:
        """Restore a shard from a snapshot. The workers then repeat the pushes that the shard lacks."""
        found = self._fixed.replace(index, snapshot)
        if found is not None:
            self._rewire(index, found)

    def move_shards(self, notices: tuple[Notice, ...], seconds: float) -> list[str]:
        """Move the segments of shards that will end to new processes, while the workers train; return their names.

        `seconds`: for a shard's process to start, and to answer. A shard that could not be moved stays, or counts as
        dead if it has stopped serving.
        """
        moved = []
        for index in self._fixed.noticed(notices):
            found = self._fixed.move(index, notices, seconds)
            if found is not None:
                self._rewire(index, found[0])
                self.cluster.kill(found[1].handle)
                moved.append(found[1].name)
        return moved

    def _rewire(self, index: int, found: SpaceMap) -> None:
        """Send the workers of a shard's column the map in which the shard is replaced."""
        column, _ = self._fixed.column(index)
        for worker in self.workers:
            if not worker.dead and self._find_column(worker.rank) == column:
                worker.await_reply(worker.handle.call("rewire", found))

    def _read_position(self, rank: int) -> int:
        """Return the rounds that a worker, or its predecessor that died, has reported."""
        facts = self.workers[rank].facts
        return facts.position if isinstance(facts, WorkerFacts) else 0

    def _list_addresses(self, axis: str, rank: int) -> list[str]:
        return [self.workers[other].address for other in self.grid.along(axis, rank)]

    def _plan_worker(self, rank: int, start: int) -> WorkerPlan:
        orders = self._require_orders()
        within = {"stage": self.grid.stage, "tensor": self.grid.tensor}
        assignments = self._peers.assignments
        peers = PeerAddresses(
            self.secret,
            [] if servers_of(orders.strategy) is not None else self._list_addresses("data", rank),
            self._assign_seat(rank),
            {axis: self._list_addresses(axis, rank) for axis, length in within.items() if length > 1},
            self._attempts,
            orders.mailbox,
        )
        reached = orders.reached[rank] if orders.reached else 0
        return WorkerPlan(
            orders.generation,
            rank,
            self.slots or self.size,
            orders.strategy,
            peers,
            orders.seed,
            start,
            orders.end,
            orders.snapshots,
            replace(orders.evaluation, done=self._received.evaluated[rank]),
            orders.timeout,
            orders.origin,
            orders.division,
            assignments[rank] if assignments else None,
            TimesPlan(rank in orders.profile, orders.recovers, reached),
            orders.elastic,
            orders.leased,
            orders.private,
        )

    @property
    def _uses_space(self) -> bool:
        """Whether this generation uses the job's space: for its parameters, its tables, or both."""
        return self.space is not None and self.space.serves(self._require_orders().strategy)

    def _list_servers(self) -> list[JobServers]:
        return [self.space] if self.space is not None and self._uses_space else [self._fixed]

    def _require_orders(self) -> Orders:
        assert self._orders is not None, "begin() comes first"
        return self._orders

    @property
    def met(self) -> str | None:
        """Why the strategy's stop rule ended the phase, or None if not all workers report that the rule was met."""
        facts = [worker.facts for worker in self.workers]
        reasons = [
            f.met for f in facts if isinstance(f, WorkerFacts) and f.generation == self._require_orders().generation
        ]
        return reasons[0] if len(reasons) == self.size and None not in reasons else None

    @property
    def unanswered(self) -> RaypsError | None:
        """Why the servers of the job's space did not send the wanted states in time; None if they did, or still may."""
        return self.space.unanswered if self.space is not None and self._uses_space else None

    # ---- polls

    def poll(self) -> list[Point]:
        """Process the answers that have arrived, and send new polls. Return the new metric points with their ranks."""
        orders, wanted = self._require_orders(), self._choose_wanted_round()
        points: list[Point] = []
        for worker in self.workers:
            rank, facts = worker.rank, worker.poll(wanted, orders.timeout, self._collected)
            if isinstance(facts, WorkerFacts) and facts.generation == orders.generation:
                worker.dead = explain_overdue(facts.call, orders.timeout, facts.position, facts.ends)
                points += self._received.new_points(rank, facts.points)
        if self.space is not None:
            heard = {w.rank: w.facts for w in self.workers if isinstance(w.facts, WorkerFacts)}
            self.space.reached = {rank: (facts.position, facts.kept_since) for rank, facts in heard.items()}
        for servers in self._list_servers():
            servers.poll(orders, wanted)
        return points

    def move_bound(self, staleness: int | None) -> None:
        """Replace the staleness bound on all servers from now on. Leads count from the workers' positions now."""
        positions = [0] * self.grid.data
        for worker in self.workers:
            if isinstance(worker.facts, WorkerFacts):
                positions[self.grid.at(worker.rank).data] = worker.facts.position
        for servers in self._list_servers():
            servers.move_bound(MovedBound(staleness, tuple(positions)))

    def take_at(self, round: int) -> None:
        """Take the next snapshot after `round`, which no server has reached: its members retain their parts of it."""
        if self._schedule is not None:
            self._schedule.take_at(round)
        for shard in self.shards:
            shard.await_reply(shard.handle.call("poll", round))

    def snapshot_soon(self) -> None:
        """Request a snapshot as soon as possible: of the next round that no member has passed."""
        if self._schedule is not None:
            self._schedule.snapshot_soon()

    def snapshot_once(self) -> None:
        """Request one further snapshot as soon as possible, while training continues."""
        if self._schedule is not None:
            self._schedule.snapshot_once()

    def _choose_wanted_round(self) -> int:
        """Return the round whose part every member must retain, or 0 while the members' positions are not known."""
        members = self._find_members_of_snapshot()
        if self._schedule is None or members is None:
            return 0
        return self._schedule.choose_round(members, self._collected)

    def lines(self) -> list[tuple[float, str, str]]:
        """Return the log lines (time, source, text) of the last polls, and remove them from the members' facts."""
        found = []
        for member in self.workers:
            if isinstance(member.facts, WorkerFacts) and member.facts.lines:
                found += [(at, member.name, text) for at, text in member.facts.lines]
                member.facts.lines = []
        return sorted(found, key=itemgetter(0))  # lines of one moment stay in their order

    def last_lines(self) -> list[tuple[float, str, str]]:
        """Return the log lines that no poll has fetched, before the workers end. A silent worker is waited for 2 s."""
        asked = [
            (worker.name, worker.pending, worker.handle.call("last_lines"))
            for worker in self.workers
            if worker.dead is None
        ]
        until(lambda: all(reply.done() for _, _, reply in asked), LEAVE_SECONDS)
        found = self.lines()
        for name, poll, reply in asked:
            with suppress(ClusterError, TimeoutError):
                polled = [] if poll is None else getattr(poll.result(0), "lines", [])
                found += [(at, name, text) for at, text in [*polled, *reply.result(0)]]
        return sorted(found, key=itemgetter(0))

    def collect(self, snapshot: Snapshot) -> Snapshot | None:
        """Return the newest state of which every member retains its part, or None if none is newer than `snapshot`.

        If states are taken in order, return the oldest one that is newer than `snapshot`, which is the newest state
        that the driver has.
        """
        members = self._find_members_of_snapshot()
        if members is None or any(member.dead for member in self.members):
            return None
        in_step = runs_in_step(self._require_orders().strategy)
        common = set.intersection(*(set(held) for _, held in members))
        newest_first = self._schedule is None or not self._schedule.in_order
        for newest in sorted((r for r in common if r > snapshot.clock), reverse=newest_first):
            workers = [worker.handle.call("part", newest if in_step else None) for worker in self.workers]
            waits = [servers.parts(newest) for servers in self._list_servers()]
            timeout = self._require_orders().timeout
            end = time.monotonic() + timeout  # for all of them: workers that wait for rows are not polled meanwhile
            try:
                worker_parts = [part.result(max(0.0, end - time.monotonic())) for part in workers]
                held = [part for wait in waits for part in wait(max(0.0, end - time.monotonic()))]
            except (ClusterError, TimeoutError):
                return None  # a member died or does not answer: the next polls show which
            whole = all(part is not None for part in ([*worker_parts, *held] if in_step else held))
            states = self._client_states
            if whole and (states is None or states.fetch_states(self.workers, newest, timeout)):
                found = self._assemble(snapshot, worker_parts, [part for part in held if part is not None])
                lead = next(iter(worker_parts), None)
                early = [(self._require_orders().end, found.clock)] if lead is not None and lead.met else []
                found.strategy, found.ended = snapshot.strategy, snapshot.ended + early
                if self.slots is not None:  # ranks that do not take part may have old marks
                    found.positions = [max(each, newest) for each in found.positions]
                self._collected = found.clock
                return found
        return None

    def _assemble(self, base: Snapshot, worker_parts: list[WorkerPart | None], held: list[ShardPart]) -> Snapshot:
        """Return the whole state from all members' parts."""
        division = self._require_orders().division
        if self._require_orders().snapshots.parts is not None:
            return assemble_written(base, [part for part in worker_parts if part is not None])
        if division is None:
            ranks = [worker.rank for worker in self.workers]
            return assemble(base, dict(zip(ranks, worker_parts, strict=True)), held)
        columns = [self._find_column(rank) for rank in range(self.size)]
        [servers] = self._list_servers()
        of = [list(servers.of(i)) for i in range(len(division.columns))] if held else []
        return assemble_columns(division, base, columns, worker_parts, of, held)

    def saved(self, snapshot: Snapshot) -> None:
        """Tell the servers that the driver has this state, and that its pushes need not be retained any more."""
        for servers in self._list_servers():
            servers.saved(snapshot)

    def _find_members_of_snapshot(self) -> list[tuple[int, list[int]]] | None:
        """Return (progress, retained rounds) of each member whose part of a snapshot must be of the chosen round.

        Return None if not all members have reported. If workers run in step, these are all members. Otherwise they are
        the servers only: a round is then a position of the slowest worker, which only servers know. The part of a
        worker (its random state, its buffers) belongs to no round of the other workers.
        """
        facts = [worker.facts for worker in self.workers]
        slowest = min((f.position if isinstance(f, WorkerFacts) else 0 for f in facts), default=0)
        if self.slots is not None:  # the clocks of those that have begun, and do not wait for rows
            known = [f for f in facts if isinstance(f, WorkerFacts) and f.position]
            running = [f.position for f in known if f.waits_at is None and f.status == "running"]
            slowest = min(running) if running else max((f.position for f in known), default=0)
        found: list[tuple[int, list[int]]] = []
        for servers in self._list_servers():
            held = servers.held(slowest)
            if held is None:
                return None
            found += held
        if found and not runs_in_step(self._require_orders().strategy):
            return found
        if not all(facts):
            return None
        return [*((f.position, f.parts) for f in facts), *found]

    def evaluate(self, snapshot: Snapshot, timeout: float) -> Totals | None:
        """Return a dict from each metric's name to its total over the evaluation data, at the snapshot's parameters.

        Return None if a worker was lost during the evaluation. That worker then counts as dead. `timeout` is in
        seconds.
        """
        parts = columns_of(snapshot, self._require_orders().division)
        shared = [
            (self.cluster.share(part.params) if part.source is None else None, part.without_frozen().buffers)
            for part in parts
        ]
        shares = [None if self.slots is None else (at, self.size) for at in range(self.size)]
        replies = [
            w.handle.call("evaluate", *shared[self._find_column(w.rank)], share)
            for w, share in zip(self.workers, shares, strict=True)
        ]
        silence = self._require_orders().timeout
        return collect_evaluation(self.workers, replies, timeout, silence=silence, round=snapshot.round)


def _read_incarnation(plan: WorkerPlan) -> int:
    return 0 if plan.peers.seat is None else plan.peers.seat.incarnation


class _ReceivedPoints:
    """Drops points that the driver has received before, by the round of the newest point received from each rank.

    After a recovery, a worker sends again the points that the driver may not have received.
    """

    def __init__(self, size: int) -> None:
        self.evaluated = [0] * size  # one for each rank: the last round whose evaluation was received
        self._newest: dict[tuple[int, str], int] = {}  # from (rank, kind) to the round of the newest point

    def begin(self, evaluated: int) -> None:
        """Start a generation; `evaluated` is the last round whose evaluation is in the journal."""
        self.evaluated = [evaluated] * len(self.evaluated)

    def accept_from(self, round: int | None) -> None:
        """Accept points of `round` and later rounds again, because workers continue from `round`.

        `round` is None if workers continue from a snapshot: all points are then accepted.
        """
        if round is None:
            self._newest = {}
        else:
            self._newest = {at: min(newest, round - 1) for at, newest in self._newest.items()}

    def new_points(self, rank: int, points: list[Point]) -> list[Point]:
        """Return those of `points` that were not received before, with `rank` added to each."""
        found = [{**point, "rank": rank} for point in points if self._is_new(rank, point)]
        for point in found:
            if point["kind"] == "evaluation":
                self.evaluated[rank] = point["round"]
        return found

    def _is_new(self, rank: int, point: Point) -> bool:
        at = rank, point["kind"]
        if point.pop("again", False) and point["round"] <= self._newest.get(at, -1):
            return False
        self._newest[at] = max(self._newest.get(at, -1), point.get("round", -1))
        return True


def _count_servers(orders: Orders) -> int:
    """Return how many servers of its own a job needs in a generation: at least one per column, or 0."""
    columns = 1 if orders.division is None else len(orders.division.columns)
    servers = servers_of(orders.strategy)
    return 0 if servers is None else servers.shards(columns)


def collect_evaluation(
    members: Sequence[GroupMember], replies: Sequence[ActorReply], timeout: float, *, silence: float, round: int
) -> Totals | None:
    """Return a dict from each metric's name to its total over all workers' results, or None if a worker was lost.

    A lost worker then counts as dead. `timeout` is the time limit of the whole evaluation in seconds, and `silence`
    that of one call of the user's code. `round` is the last round that was trained.
    """
    asked = list(zip(members, replies, strict=True))
    for member in members:
        member.pending = None  # drop the outstanding poll, which was sent during training

    def over() -> bool:
        for member, reply in asked:
            if not reply.done():
                member.check_user_calls(silence, round)
        return all(reply.done() or member.dead for member, reply in asked)

    until(over, timeout)
    found, disconnected = [], list[tuple[GroupMember, str]]()
    for member, reply in asked:
        if member.dead and not reply.done():
            continue
        try:
            found.append(reply.result(0))
        except ActorDied as error:
            member.dead = str(error.data.get("reason", error))
        except TimeoutError:
            member.dead = f"it did not evaluate within {timeout:g} s"
        except LinkError as error:  # a connection inside the worker's replica failed
            disconnected.append((member, str(error)))
    if disconnected and not any(member.dead for member in members):  # otherwise the dead worker is the cause
        disconnected[0][0].dead = disconnected[0][1]
    return add_up_totals(found) if len(found) == len(members) else None
