"""The servers of a generation as the driver uses them: the job's own shards, or a space on a server group."""

from __future__ import annotations

import functools
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from rayps_client.errors import ClusterError
from rayps_client.values import Keywords

from rayps.cluster.code_folder import JobCode
from rayps.cluster.local import ActorReply, Cluster
from rayps.cluster.members import GroupMember, place, settle
from rayps.cluster.notices import Notice
from rayps.cluster.reservation import WorkerResources
from rayps.core.job.user_module import pack
from rayps.core.strategy.staleness_bound import MovedBound
from rayps.core.strategy.strategy import StrategyView
from rayps.core.strategy.topology import group_of, runs_in_step, servers_of
from rayps.ps.client.session import Session
from rayps.ps.group import ManagerClient, find, start
from rayps.ps.job_space import JobSpace
from rayps.ps.protocol.members import MemberChange
from rayps.ps.protocol.rows import cut_shards
from rayps.ps.protocol.segment_map import SpaceMap, StaticMap
from rayps.ps.protocol.space import Quota, Space, SpaceRank, SparseTable
from rayps.ps.server.dense_segment import ShardFacts, ShardPart
from rayps.ps.server.shard_actor import ShardPlan
from rayps.strategies.job import JobSpec
from rayps.tensors.division import divide_servers
from rayps.tensors.learning_rate import Recipe
from rayps.tensors.optim import Factory
from rayps.tensors.snapshot import Snapshot
from rayps.worker.plan import Orders


class JobServers(Protocol):
    """The servers that hold all parameters of a generation, or a part of them."""

    def serves(self, strategy: StrategyView) -> bool:
        """Return whether a generation under this strategy needs these servers."""

    def poll(self, orders: Orders, wanted: int) -> None:
        """Poll all servers without waiting for answers. Each server will retain its part of round `wanted`."""

    def held(self, slowest: int) -> list[tuple[int, list[int]]] | None:
        """Return, for each server, its progress and the list of the rounds whose parts it retains.

        Return None until all servers have reported. `slowest` is the position of the slowest worker.
        """

    def parts(self, rounds: int) -> Callable[[float], list[ShardPart | None]]:
        """Request all servers' parts after `rounds` rounds, and return a function that waits for the parts.

        The function's argument is the largest number of seconds to wait. It raises ClusterError if a server has died,
        and TimeoutError if a server does not answer.
        """

    def of(self, column: int) -> range:
        """Return the indices of a column's parts in the list that `parts` provides."""

    def saved(self, snapshot: Snapshot) -> None:
        """Tell the servers that the driver has this state, and that its pushes need not be retained any more."""

    def set_members(self, members: Sequence[MemberChange]) -> None:
        """Set which ranks take part in a state that is loaded into a server from now on; () if ranks do not change."""

    def opener(self) -> Session:
        """Open a session of rank -1, which the caller closes. The model must fit on one worker."""

    def move_bound(self, bound: MovedBound) -> None:
        """Replace the staleness bound of the generation from now on. `bound` counts leads of data ranks."""

    def close(self) -> None:
        """End the servers if they belong to the job."""


class FixedServers:
    """The job's own servers (shards): one actor for each segment of the parameter vector, with a static map.

    The driver publishes one map for each column of the model, and publishes it again after it has replaced a shard.
    """

    def __init__(self, cluster: Cluster, packed: bytes, secret: bytes, code: JobCode | None) -> None:
        self.members: list[GroupMember] = []
        self.reserved = WorkerResources()  # the resources of shards on GPUs are in it, beside those of workers
        self._gpus = 0.0  # the part of a GPU of each shard; 0 means on the CPU
        self._cluster, self._packed, self._secret, self._code = cluster, packed, secret, code
        self._orders: Orders | None = None
        self._spaces: list[Space] = []  # one for each column
        self._maps: list[StaticMap] = []  # one for each column
        # from a worker's (column, data rank) to the number of its starts
        self._incarnations: Counter[tuple[int, int]] = Counter()
        self._members: tuple[MemberChange, ...] = ()
        self._tried: set[tuple[int, str]] = set()  # (shard, key of a notice) of moves

    def prepare(self, wanted: int, gpus: float = 0.0) -> list[GroupMember]:
        """Start shards until `wanted` shards are alive, each with the part `gpus` of a GPU, and end all others.

        Return the new shards, which have not reported their addresses yet.
        """
        kept = self.members[:wanted] if gpus == self._gpus else []
        self._gpus = gpus
        for member in [*self.members[len(kept) :], *(m for m in kept if m.dead)]:
            self._cluster.kill(member.handle)
        self.members = [self._spawn(i) if i >= len(kept) or kept[i].dead else kept[i] for i in range(wanted)]
        return [member for member in self.members if member.place is None]

    def begin(self, orders: Orders, parts: Sequence[Snapshot], shared: Sequence[Snapshot]) -> None:
        """Start a generation from a state. Call `prepare` first.

        `parts` are the state's parts, one for each column. `shared` are the same parts as `Cluster.share` returned
        them.
        """
        self._orders = orders
        counts = divide_servers(len(self.members), [part.layout.size for part in parts]) if self.members else []
        self._spaces, self._maps = [], []
        for part, count in zip(parts, counts, strict=bool(counts)):
            before = sum(len(space.cuts) for space in self._spaces)
            members = self.members[before : before + count]
            self._spaces.append(
                Space(
                    f"generation-{orders.generation}",
                    orders.generation,
                    len(part.positions),
                    orders.strategy,
                    part.layout,
                    tuple(cut_shards(part.layout, count)),
                    ticks=orders.ticks,
                )
            )
            addresses = {member.name: member.address for member in members}
            self._maps.append(StaticMap.of(addresses, self._secret, final=runs_in_step(orders.strategy)))
        settle(
            [m.handle.call("begin", self._plan(i), shared[self.column(i)[0]]) for i, m in enumerate(self.members)],
            self.members,
        )

    def column(self, index: int) -> tuple[int, int]:
        """Return the column of a shard, and the shard's number in the column."""
        for column, space in enumerate(self._spaces):
            if index < len(space.cuts):
                return column, index
            index -= len(space.cuts)
        raise IndexError(f"the index is too large: the job has {len(self.members)} shards")

    def of(self, column: int) -> range:
        """Return the indices of a column's shards."""
        before = sum(len(space.cuts) for space in self._spaces[:column])
        return range(before, before + (len(self._spaces[column].cuts) if self._spaces else 0))

    def serves(self, strategy: StrategyView) -> bool:
        """Return whether the strategy's dense parameters are on servers."""
        return servers_of(strategy) is not None

    def seat(self, column: int, rank: int) -> SpaceRank | None:
        """Return a worker's new place with the shards of its column, or None if there are no shards.

        `rank` is the worker's data rank.
        """
        if not self._spaces:
            return None
        self._incarnations[column, rank] += 1
        return SpaceRank(self._maps[column], self._spaces[column], self._incarnations[column, rank])

    def replace(self, index: int, snapshot: Snapshot) -> SpaceMap | None:
        """Restore a shard from a snapshot. Return its column's new map, or None if the new shard has died too."""
        self._cluster.kill(self.members[index].handle)
        self.members[index] = shard = self._spawn(index)
        place([shard])
        if shard.dead:
            return None
        assert self._orders is not None, "begin() comes first"
        column, number = self.column(index)
        division, source = self._orders.division, self._maps[column]
        part = snapshot if division is None else division.cut(snapshot, column)
        found = source.moved(number, shard.address)
        plan = self._plan(index, found.holders[number].generation)
        settle([shard.handle.call("begin", plan, self._cluster.share(part))], [shard])
        source.publish(found)
        return found

    def noticed(self, notices: tuple[Notice, ...]) -> list[int]:
        """Return the living shards whose process or host will end, and that `move` has not tried to move from there."""
        found = []
        for index, member in enumerate(self.members):
            notice = None if member.dead or member.place is None else member.place.notice(notices)
            if notice is not None and (index, notice.key) not in self._tried:
                found.append(index)
        return found

    def move(self, index: int, notices: tuple[Notice, ...], seconds: float) -> tuple[SpaceMap, GroupMember] | None:
        """Move a shard that will end: its segment, with its whole state, goes to a new process, and no push is lost.

        The new process starts while the old one serves. Then the old one refuses requests, so that workers wait for the
        map. Return the map, and the old shard, which the caller ends when the workers have the map. Return None if the
        new process could not start, or will end too, and the shard stays as it is; or if the old one did not answer,
        and counts as dead. `seconds`: for each of them to answer.
        """
        old, shard = self.members[index], self._spawn(index)
        self._tried.update((index, one.key) for one in notices)
        place([shard], seconds=seconds)
        if shard.dead or shard.place is None or shard.place.notice(notices) is not None:
            self._cluster.kill(shard.handle)
            return None
        column, number = self.column(index)
        source = self._maps[column]
        found = source.moved(number, shard.address)
        try:
            state = old.handle.call("hand_over").result(seconds)
        except (ClusterError, TimeoutError) as error:
            old.dead = f"it did not hand its segment over: {error}"
            self._cluster.kill(shard.handle)
            return None
        self.members[index] = shard
        plan = self._plan(index, found.holders[number].generation)
        settle([shard.handle.call("resume", plan, state)], [shard])
        source.publish(found)
        return found, old

    def poll(self, orders: Orders, wanted: int) -> None:
        """Poll all shards without waiting for answers. Each shard will retain its part of round `wanted`."""
        for member in self.members:
            member.poll(wanted, orders.timeout)

    def held(self, slowest: int) -> list[tuple[int, list[int]]] | None:
        """Return each shard's progress and the rounds whose parts it retains, or None until all have reported."""
        facts = [member.facts for member in self.members]
        return [(f.reached, f.snapshots) for f in facts] if all(isinstance(f, ShardFacts) for f in facts) else None

    def parts(self, rounds: int) -> Callable[[float], list[ShardPart | None]]:
        """Request all shards' parts after `rounds` rounds; return a function that waits for them: see `JobServers`."""
        return _wait_for([member.handle.call("part", rounds) for member in self.members])

    def set_members(self, members: Sequence[MemberChange]) -> None:
        """Set which ranks take part in a state that is loaded from now on: see `JobServers`."""
        self._members = tuple(members)

    def opener(self) -> Session:
        """Open a session of rank -1: see `JobServers`."""
        assert self._orders is not None, "begin() comes first"
        timeout = self._orders.timeout
        return Session(self._maps[0], self._spaces[0], -1, timeout=timeout, name="opener", resident=False)

    def saved(self, snapshot: Snapshot) -> None:
        """Tell the shards that the driver has saved this state."""
        for member in [member for member in self.members if not member.dead]:
            member.handle.call("saved", snapshot.clock)  # if this call is lost, workers retain their pushes longer

    def move_bound(self, bound: MovedBound) -> None:
        """Replace the staleness bound on all shards, and on those that will replace a shard."""
        self._spaces = [replace(space, bound=bound) for space in self._spaces]
        for index, member in enumerate(self.members):
            if not member.dead:  # a shard that dies now is replaced by one that begins with the new bound
                member.handle.call("move_bound", self._spaces[self.column(index)[0]])

    def close(self) -> None:
        """End all shards."""
        for member in self.members:
            self._cluster.kill(member.handle)
        self.members = []

    def _spawn(self, index: int) -> GroupMember:
        where: Keywords = {}
        if self._gpus:
            gang = self.reserved.gang
            where = {"gpus": self._gpus, "gang": gang, "index": self.reserved.others + index, "device": "cuda"}
        began = time.monotonic()
        handle = self._cluster.spawn(
            "rayps.ps.server.shard_actor:ShardActor",
            index,
            self._secret,
            self._packed,
            code=self._code,
            threads=1,
            **where,
        )
        return GroupMember(f"shard-{index}", handle, spawned=began)

    def _plan(self, index: int, generation: int = 1) -> ShardPlan:
        orders = self._orders
        assert orders is not None, "begin() comes first"
        column, number = self.column(index)
        whole = None if orders.division is None else orders.division.layout
        return ShardPlan(self._spaces[column], number, generation, orders.snapshots.boundary, self._members, whole)


def _wait_for(replies: Sequence[ActorReply]) -> Callable[[float], list[ShardPart | None]]:
    def wait(timeout: float) -> list[ShardPart | None]:
        end = time.monotonic() + timeout
        return [reply.result(max(0.0, end - time.monotonic())) for reply in replies]

    return wait


def space_of(
    cluster: Cluster,
    spec: JobSpec,
    strategies: list[StrategyView],
    name: str,
    factory: Callable[[], Factory],
    tables: tuple[SparseTable, ...],
    *,
    ranks: int | None = None,
) -> JobSpace | None:
    """Return the job's space on the group that the job names, or on a new group for the job, or None if it needs none.

    `ranks`: how many ranks of workers there may be, if workers join and leave.

    Raises:
        ConfigError: there is no group of the given name.
        PeerTimeout: servers of the job's own group did not start.
    """
    quota = None if spec.quota is None else _parse_quota(spec.quota)
    renew: Callable[[], ManagerClient] | None = None
    if spec.server_group is not None:
        group = find(cluster, spec.server_group)
    else:
        topologies = [each.topology for each in strategies]
        needed = [group_of(topology) for topology in topologies if topology.group_size or tables]
        if not needed:
            return None
        count, replicas = (max(column) for column in zip(*needed, strict=True))
        private = f"of-{name}-{uuid.uuid4().hex[:6]}"
        renew = functools.partial(start, cluster, private, max(count, replicas + 1), replicas, detached=False)
        group = renew()
    recipe = factory()
    return JobSpace(
        group,
        name,
        ranks or spec.workers,
        pack(recipe),
        tables=tables,
        quota=quota,
        own=renew is not None,
        renew=renew,
        timeout=spec.timeout,
        scheduled=isinstance(recipe, Recipe),
    )


def _parse_quota(given: dict[str, float]) -> Quota:
    return Quota(bytes=int(given["bytes"]) if "bytes" in given else None, operations=given.get("operations"))
