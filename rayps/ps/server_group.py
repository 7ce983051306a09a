"""`rayps.ServerGroup`: parameters that a user's actors share, on fixed servers or on an elastic server group.

group = rayps.ServerGroup(params, shards=2, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), workers=4)
server = group.join(rank)            # in each actor, which was given `group` as an argument
server.push(grad); params = server.pull()

With the argument `replicas` or `group` the servers are elastic: a server that dies is replaced, and `group.resize(4)`
changes the number of servers while pushes and pulls continue. Otherwise the servers are fixed: each holds one segment,
and none is replaced when it dies.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from typing import Any

import torch
from rayps_client.errors import ConfigError, LinkError, PeerLost, RaypsError
from torch import Tensor

from rayps.cluster.local import ActorHandle, Cluster, surrounding
from rayps.cluster.members import ActorHost
from rayps.comm.link import connect
from rayps.core.job.user_module import pack
from rayps.core.strategy.apply_pushes import PlainServers, plain_servers
from rayps.core.strategy.topology import Servers, refuse_adaptive
from rayps.ps import group as elastic
from rayps.ps.client.client import GroupServer, compress
from rayps.ps.client.connections import take_rank
from rayps.ps.client.session import KEEP_BYTES, Session
from rayps.ps.column_space import yield_segment_states
from rayps.ps.group import ManagerClient
from rayps.ps.manager.manager import ServerCount
from rayps.ps.manager.status import COUNTS
from rayps.ps.protocol.messages import GroupMessage
from rayps.ps.protocol.rows import cut, cut_shards
from rayps.ps.protocol.segment_map import StaticMap
from rayps.ps.protocol.space import Quota, Space
from rayps.ps.server.dense_segment import part_of, state_of
from rayps.ps.server.shard_actor import ShardPlan
from rayps.tensors import optim
from rayps.tensors.flat import Gradient, Layout
from rayps.tensors.snapshot import Snapshot

log = logging.getLogger(__name__)

START_SECONDS = 180.0  # seconds for servers to start
PROBE_SECONDS = 1.0  # seconds for a fixed server to accept a connection


class ServerGroup:
    """Parameters on servers. Pass the object to the actors that share them; its creator ends it with `close()`.

    `params` is a tensor or a state dict of floating tensors. `optimizer` builds a torch optimizer over a list of
    parameters (default: SGD with lr=1, which subtracts each pushed gradient). `staleness` is 0 (each round waits for
    all `workers`), the number of rounds that a worker may be ahead of the slowest, or None (asynchronous).
    `compression` is the encoding of pushes, with the values of the strategies' option. `timeout` is in seconds.

    Without `replicas` and `group` the servers are fixed: each of `shards` servers holds one part of the parameters, and
    is not replaced when it dies.

    With `replicas`, an elastic group of `shards` servers is started, and ends with this object. With replicas=1 each
    part has a backup on a second server, and a push is acknowledged when both servers have it. With staleness=0 a push
    is acknowledged earlier, because the second server gets it only when its round is complete. Until then the worker
    can repeat it (`SharedParameters.flush` waits until both servers have all pushes). A server that dies is replaced.
    Values are lost only if a second server dies before the new backup is complete. With replicas=0 the parts of a
    server that dies are lost, and pushes and pulls raise PeerLost.

    With `group`, a name or a `rayps.ps.group.ManagerClient`, the parameters become the space `name` on a running group,
    which other jobs may use too; `quota` limits the space. `segments` is the number of parts into which an elastic
    group cuts the parameters; each part can move to another server. `topology` says how servers apply pushes, in place
    of the plain servers of these options; `begun` is the number of steps that each worker has taken before.

    Raises:
        ConfigError, WorkloadError: an argument is not valid, or two arguments exclude each other.
        Conflict: the group has a space of this name.

    Example:
        with rayps.ServerGroup(torch.zeros(4), shards=2, workers=1) as group:
            server = group.join(0)
            server.push(torch.ones(4))  # a gradient
            parameters = server.pull()
            server.close()
    """

    def __init__(
        self,
        params: Tensor | dict[str, Tensor],
        *,
        shards: int = 1,
        replicas: int | None = None,
        group: str | elastic.ManagerClient | None = None,
        name: str | None = None,
        segments: int | None = None,
        quota: Quota | None = None,
        optimizer: optim.Factory | None = None,
        staleness: int | None = 0,
        workers: int = 1,
        compression: str | None = None,
        timeout: float = 60.0,
        cluster: Cluster | None = None,
        topology: Servers | None = None,
        begun: int = 0,
        moments: optim.Moments | None = None,
    ) -> None:
        is_elastic = replicas is not None or group is not None
        _refuse_mixtures(is_elastic, replicas, group, name, segments, quota)
        own = replicas if group is None else None
        servers = plain_servers(shards, staleness, compression, own) if topology is None else topology
        refuse_adaptive(servers, "a server group without a job")
        strategy = PlainServers(servers)
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise ConfigError(
                f"workers is {workers!r}: give the number of actors that will join, at least 1", field="workers"
            )
        named = _check_named(params)
        self.layout = Layout.of(named.items())
        self.workers, self.timeout = workers, timeout
        self._as_dict = not isinstance(params, Tensor)
        self._compression = compression
        self._secret = secrets.token_bytes(32)
        factory = optimizer or _make_sgd
        optim.check_elementwise(factory, self.layout)
        warning = servers.scale_warning(workers)
        if warning is not None and optim.ignores_scale(factory, self.layout):
            log.warning(warning)
        vector = torch.cat([value.detach().reshape(-1).cpu() for value in named.values()])
        self._cluster: Cluster | None = cluster or surrounding()
        self._handles: list[ActorHandle] = []
        self._fixed: FixedSpace | None = None
        self._own: OwnSpace | None = None
        if is_elastic:
            space = Space(
                name or f"shared-{secrets.token_hex(4)}",
                0,
                workers,
                strategy,
                self.layout,
                cut(self.layout, segments),
                pack(factory),
                quota=quota or Quota(),
            )
            self._own = self._open(group, space, vector, begun, moments)
            return
        space = Space("shared", 1, workers, strategy, self.layout, tuple(cut_shards(self.layout, shards)))
        snapshot = Snapshot(self.layout, vector, moments or {}, positions=[begun] * workers)
        self._fixed = self._start(factory, space, snapshot)

    def _open(
        self,
        group: str | elastic.ManagerClient | None,
        space: Space,
        vector: Tensor,
        begun: int,
        moments: optim.Moments | None,
    ) -> OwnSpace:
        """Open `space` on the given group, or on a new group, and load `vector` into the space."""
        assert self._cluster is not None
        servers, private = space.servers, group is None
        if group is None:
            group = elastic.start(
                self._cluster,
                f"own-{secrets.token_hex(4)}",
                servers.count,
                servers.replicas or 0,
                detached=False,
                timeout=START_SECONDS,
            )
        elif isinstance(group, str):
            group = elastic.find(self._cluster, group)
        try:
            marks = [begun] * self.workers
            return OwnSpace.open(group, space, vector, self.timeout, private=private, marks=marks, moments=moments)
        except BaseException:
            if private:
                group.stop()
            raise

    def _start(self, factory: optim.Factory, space: Space, snapshot: Snapshot) -> FixedSpace:
        """Start servers with a static map, one for each segment, without manager and backups; segments do not move."""
        assert self._cluster is not None
        packed, shared = pack(factory), self._cluster.share(snapshot)
        for index in range(len(space.cuts)):
            handle = self._cluster.spawn(
                "rayps.ps.server.shard_actor:ShardActor", index, self._secret, packed, threads=1
            )
            self._handles.append(handle)
        try:
            begun = [h.call("begin", ShardPlan(space, i), shared) for i, h in enumerate(self._handles)]
            for reply in begun:
                reply.result(START_SECONDS)
            places = [place.result(START_SECONDS) for place in [h.call("place") for h in self._handles]]
            found = StaticMap.of({f"shard-{i}": place.address for i, place in enumerate(places)}, self._secret)
            return FixedSpace(found, space, places)
        except BaseException:
            self.close()
            raise

    def join(self, rank: int, *, resident: bool = True) -> SharedParameters:
        """Become worker `rank`, and return its access to the parameters.

        Servers refuse a process that had the rank before; the steps that it has pushed stay counted. With
        `resident=False`, fixed servers on this host receive messages, and do not share memory with this process.

        Raises:
            ConfigError: there is no such rank.
            PeerTimeout, PeerLost: a server does not answer.
        """
        return SharedParameters(self.server(rank, resident=resident), self.layout, self._as_dict)

    def server(self, rank: int, *, resident: bool = True) -> GroupServer:
        """Become worker `rank` as `join` does; return a `GroupServer`, which pulls and pushes one flat vector."""
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.workers:
            raise ConfigError(
                f"rank is {rank!r}, and the group has {self.workers} workers: give a number from 0 to "
                f"{self.workers - 1}",
                field="rank",
            )
        if self._own is not None:
            return self._set_encoding(self._own.server(rank))
        assert self._fixed is not None, "a ServerGroup has an OwnSpace or a FixedSpace"
        found, space = self._fixed.map, self._fixed.space
        incarnation = take_rank(found, space, rank, self.timeout)
        session = Session(found, space, rank, incarnation=incarnation, timeout=self.timeout, keep=0, resident=resident)
        try:
            return self._set_encoding(GroupServer(session))
        except BaseException:
            session.close()
            raise

    def _set_encoding(self, server: GroupServer) -> GroupServer:
        """Return `server`, after its pushes are set to the encoding of the argument `compression`."""
        if self._compression is not None:
            log.info(compress(server, self._compression)["message"])
        return server

    # ---- elastic

    def resize(self, servers: ServerCount) -> None:
        """Set the number of servers. Segments move in the background, while pushes and pulls continue.

        `wait_settled` waits until all segments have moved. With a pair (least, most), load chooses the number from this
        range, until `resize` is called with a number.

        Raises:
            ConfigError: `servers` is 0, or below replicas + 1; or the servers are fixed.
            Conflict: a resize is in progress.
        """
        self._require_elastic("resize").group.resize(servers)

    def facts(self) -> dict[str, Any]:
        """Return the state of the servers as plain data: servers, spaces, segments, moves, events.

        The keys are the same for fixed servers: a server is "alive" if it accepts a connection now, and loads are None.
        """
        if self._fixed is not None:
            return self._fixed.facts()
        return self._require_elastic("facts").facts()

    def wait_settled(self, timeout: float | None = None) -> None:
        """Wait until all servers are alive, and have the segments and backups that the manager assigns to them.

        Raises:
            PeerTimeout: this takes longer than `timeout` seconds; None means the `timeout` of this object.
            PeerLost: a fixed server has died; fixed servers are not replaced.
        """
        if self._fixed is not None:
            self._fixed.check()
            return
        self._require_elastic("wait_settled").group.wait_settled(self.timeout if timeout is None else timeout)

    def branch(self, name: str | None = None, *, quota: Quota | None = None) -> ServerGroup:
        """Return another `ServerGroup` on the same servers, which begins at step 0 with these parameters.

        The two share memory until one of them changes. `close()` of the branch ends only the branch.

        Raises ConfigError if the servers are fixed, and Conflict if a space `name` is open.
        """
        own = self._require_elastic("branch")
        found = ServerGroup.__new__(ServerGroup)
        found.__dict__.update(self.__dict__)
        found._own = own.branch(name or f"{own.space.name}-{secrets.token_hex(4)}", quota)
        return found

    @property
    def group(self) -> elastic.ManagerClient | None:
        """The elastic group that holds the parameters, or None if the servers are fixed."""
        return None if self._own is None else self._own.group

    @property
    def space(self) -> Space | None:
        """The space of the parameters on the elastic group, or None if the servers are fixed."""
        return None if self._own is None else self._own.space

    def _require_elastic(self, call: str) -> OwnSpace:
        if self._own is None:
            raise ConfigError(
                f"{call} needs servers whose segments can move, and these servers are fixed: create the group with "
                "replicas=1 (or 0, without backups), or with group=NAME on a running server group",
                field="replicas",
            )
        return self._own

    def close(self) -> None:
        """End the servers; with `group=`, drop the space and leave that group running.

        Does nothing in a process that did not create this object.
        """
        if self._cluster is not None and self._own is not None:
            self._own.close()
        elif self._cluster is not None:
            for handle in self._handles:
                self._cluster.kill(handle)
            self._handles = []

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cluster": None, "_handles": []}  # only the process that created the group ends it

    def __enter__(self) -> ServerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _refuse_mixtures(
    is_elastic: bool, replicas: object, group: object, name: object, segments: object, quota: object
) -> None:
    """Check that the arguments fit together. Raises ConfigError if two of them exclude each other."""
    if group is not None and replicas is not None:
        raise ConfigError(
            f"replicas is {replicas!r}, and a running group has its own number of replicas: leave out `replicas`, or "
            "`group`",
            field="replicas",
        )
    given = [key for key, value in [("name", name), ("segments", segments), ("quota", quota)] if value is not None]
    if not is_elastic and given:
        raise ConfigError(
            f"{given[0]} is for an elastic group: give replicas=1 or group=NAME too, or omit {given[0]}", field=given[0]
        )


def _check_named(params: Any) -> dict[str, Tensor]:
    named = {"": params} if isinstance(params, Tensor) else params
    if not isinstance(named, dict) or not all(isinstance(value, Tensor) for value in named.values()):
        raise ConfigError(
            f"params is {type(params).__name__}: give a tensor, or a dict of tensors such as model.state_dict()",
            field="params",
        )
    kinds = sorted({str(value.dtype).removeprefix("torch.") for value in named.values()})
    if len(kinds) != 1 or not next(iter(named.values())).is_floating_point():
        found = ", ".join(kinds) or "none, as params is empty"
        raise ConfigError(
            f"the dtypes of params are {found}: give tensors of one float dtype, e.g. float32", field="params"
        )
    if not any(value.numel() for value in named.values()):
        raise ConfigError("params have no elements: give at least one parameter that is not empty", field="params")
    return dict(named)


def read_present_state(server: GroupServer) -> tuple[Tensor, optim.Moments]:
    """Return the vector and the optimizer's state of whole parameters, by name, as a worker's servers have them now.

    Each segment is of one version; if workers run in step, of its last complete round.
    """
    server.settle()
    space = server.session.space
    layout, cuts = space.layout, space.cuts
    assert layout is not None, "a GroupServer has a vector"
    states = yield_segment_states(server.session, range(len(cuts)))
    parts = [part_of(state, 0, cuts[index][0]) for index, state in states]
    return torch.cat([part.params for part in parts]), optim.join([part.moments for part in parts], layout)


def _make_sgd(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


__all__ = ["ServerGroup", "SharedParameters"]


class FixedSpace:
    """A space on servers with a static map, one server for each segment. Picklable."""

    def __init__(self, found: StaticMap, space: Space, places: Sequence[ActorHost]) -> None:
        self.map, self.space, self.places = found, space, list(places)

    def facts(self) -> dict[str, Any]:
        """Return facts with the keys of `rayps.ps.manager.status.facts_of`; loads are None.

        Connects to each server, to find out whether it is alive.
        """
        space, found = self.space, self.map.map
        size = 0 if space.layout is None else space.layout.dtype.itemsize
        alive = {server: self._answers(address) for server, address in found.addresses.items()}
        segments: list[dict[str, Any]] = [
            {
                "index": index,
                "table": None,
                "primary": holders.primary,
                "copies": [],
                "generation": holders.generation,
                "bytes": (hi - lo) * size,
                "rows": 0,
                "operations_s": None,
                "state": "ready" if alive[str(holders.primary)] else "lost",
            }
            for index, (holders, (lo, hi)) in enumerate(zip(found.holders, space.cuts, strict=True))
        ]
        servers = [
            {
                "name": server,
                "address": address,
                "host": place.host,
                "pid": place.pid,
                "state": "alive" if alive[server] else "dead",
                "bytes": segment["bytes"] if alive[server] else None,
                "rows": 0 if alive[server] else None,
                "operations_s": None,
                "cpu": None,
                "account": None,
                "busy": None,
                "node": place.node,
                "seen_s": 0.0 if alive[server] else None,
                "primaries": 1,
                "copies": 0,
            }
            for (server, address), place, segment in zip(found.addresses.items(), self.places, segments, strict=True)
        ]
        return {
            "name": space.name,
            "pid": None,  # there is no manager
            "status": "ready" if all(alive.values()) else "degraded",
            "wanted": len(servers),
            "replicas": 0,
            "since": None,
            "range": None,
            "pinned": False,
            "resizing": None,
            "servers": servers,
            "spaces": [
                {
                    "name": space.name,
                    "number": space.number,
                    "workers": space.workers,
                    "version": found.version,
                    "bytes": sum((hi - lo) * size for lo, hi in space.cuts),
                    "rows": 0,
                    **dict.fromkeys(("evicted", "rejected", "throttled"), 0),
                    **dict.fromkeys(("operations_s", "seconds_s"), None),
                    "delays": {},
                    "quota": {"bytes": None, "operations": None},
                    "branch_of": None,
                    "tables": [],
                    "segments": segments,
                }
            ],
            "moves": [],
            "counts": dict.fromkeys(COUNTS, 0) | {"lost": sum(not each for each in alive.values())},
            "events": [],
        }

    def check(self) -> None:
        """Raise PeerLost if a server has died, because a fixed server is not replaced."""
        dead = [server for server, address in self.map.map.addresses.items() if not self._answers(address)]
        if dead:
            raise PeerLost(
                f"{', '.join(map(repr, dead))} died, and a fixed server is not replaced: create the group with "
                "replicas=1 to survive the death of a server",
                peer=dead[0],
            )

    def _answers(self, address: str) -> bool:
        try:
            link = connect(address, name="facts", secret=self.map.secret, generation=0, timeout=PROBE_SECONDS)
        except LinkError:
            return False
        link.close()
        return True


class OwnSpace:
    """The space of a `ServerGroup` on an elastic group, in the process that opened it.

    A pickled copy can join the space, but cannot close it.
    """

    def __init__(self, group: ManagerClient, space: Space, timeout: float, *, private: bool, replicas: int) -> None:
        """`space` must be open. `private`: the group was started for this space alone, and ends with it."""
        self.group, self.space, self.timeout = group, space, timeout
        self._private, self._replicas, self._mine = private, replicas, True

    @classmethod
    def open(
        cls,
        group: ManagerClient,
        space: Space,
        vector: Tensor,
        timeout: float,
        *,
        private: bool,
        marks: Sequence[int],
        moments: optim.Moments | None = None,
    ) -> OwnSpace:
        """Open a space, and load `vector` and the optimizer's state `moments` into it.

        `marks`: the first step of each rank. `private`: see `OwnSpace`.

        Raises:
            Conflict: a space of that name is open.
            PeerTimeout, PeerLost: the group does not answer.
        """
        opened = group.open(space)
        found = cls(group, opened, timeout, private=private, replicas=int(group.facts()["replicas"]))
        session = Session(group.contact(), opened, -1, timeout=timeout)
        try:
            assert opened.layout is not None
            states = {
                i: state_of(vector[a:b], opened.layout, a, moments=moments, marks=marks)
                for i, (a, b) in enumerate(opened.cuts)
            }
            session.exchange(GroupMessage.LOAD, states)
            if gone := found.lost():  # a server died while the values were loaded
                session.exchange(GroupMessage.LOAD, {i: states[i] for i in gone})
                group.restored(opened.number, gone)
        finally:
            session.close()
        return found

    def server(self, rank: int) -> GroupServer:
        """Become worker `rank`; servers refuse a process that had the rank before. Raises as `GroupServer`."""
        incarnation = self.group.join(self.space.number, rank)
        keep = (
            KEEP_BYTES if self._replicas else 0
        )  # without backups a lost segment does not return, so no push is repeated
        session = Session(
            self.group.contact(),
            self.space,
            rank,
            incarnation=incarnation,
            timeout=self.timeout,
            keep=keep,
            lost=self.lost,
        )
        try:
            return GroupServer(session)
        except BaseException:
            session.close()
            raise

    def facts(self) -> dict[str, Any]:
        """Return the facts of the whole group; their "spaces" include this space."""
        return self.group.facts()

    def lost(self) -> list[int]:
        """Return the segments of this space whose values were lost when servers died."""
        for space in self.facts()["spaces"]:
            if space["number"] == self.space.number:
                return [each["index"] for each in space["segments"] if each["state"] == "lost"]
        return []

    def branch(self, name: str, quota: Quota | None) -> OwnSpace:
        """Return another space that begins with these values; the two share memory until one of them changes."""
        space = self.group.branch(self.space.name, name, quota)
        return OwnSpace(self.group, space, self.timeout, private=False, replicas=self._replicas)

    def close(self) -> None:
        """Drop the space, or stop the group if `private`. Does nothing in a process that did not open the space."""
        if not self._mine:
            return
        self._mine = False
        if self._private:
            self.group.stop()
            return
        try:
            self.group.drop(self.space.name)
        except RaypsError as error:  # the group may be gone, and the space with it
            log.info("space %s could not be dropped: %s", self.space.name, str(error))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mine": False}


class SharedParameters:
    """One worker's access to the parameters of a `ServerGroup`: pull and push all of them, a range, or rows.

    All parameters are one tensor or one state dict, as the group was created with.
    """

    def __init__(self, server: GroupServer, layout: Layout, as_dict: bool) -> None:
        self._server, self._layout, self._as_dict = server, layout, as_dict
        self._as_vector = not as_dict and len(layout.entries[0].shape) == 1

    @property
    def step(self) -> int:
        """The number of this worker's next push."""
        return self._server.step

    def pull(
        self,
        lo: int | Tensor | None = None,
        hi: int | None = None,
        *,
        table: str | None = None,
        out: Tensor | None = None,
        consistent: bool | None = None,
    ) -> Any:
        """Return the parameters, a tensor or a dict, or with `lo` and `hi` the elements lo to hi of the flat vector.

        `pull(ids)`, where `ids` is a tensor of whole numbers, returns these rows of a table, [len(ids), width]. A table
        is a parameter of two or more dimensions; `table` is its name, required if there are several. Values are written
        to `out` if it is given (a contiguous CPU tensor of as many elements), else to new memory. With `consistent` all
        values are of one moment; with `staleness=0` they always are. Else each server answers for itself, within the
        staleness bound, which is faster.
        """
        if isinstance(lo, Tensor):
            return self._server.pull_rows(lo, table, out=out, consistent=consistent)
        if lo is not None or hi is not None:
            return self._server.pull(lo or 0, hi, out=out, consistent=consistent)
        return self._shape(self._server.pull(out=out, consistent=consistent))

    def push(
        self,
        value: Any,
        rows: Tensor | None = None,
        *,
        weight: float = 1.0,
        lo: int | None = None,
        table: str | None = None,
    ) -> None:
        """Push a gradient of the parameters' shape, or a flat range of it that begins at element `lo`.

        `push(ids, rows)` pushes a gradient of rows of a table: `rows` [len(ids), width] are the gradients of the rows
        `ids`; gradients of the same id are added. The optimizer then steps only rows that were pushed. `weight` is the
        gradient's number of samples, by which the mean of a synchronous round is weighted. Each call counts as one
        step of this worker.
        """
        self._post(value, rows, weight, lo, table)
        self._server.settle()

    def push_pull(
        self,
        value: Any,
        rows: Tensor | None = None,
        *,
        weight: float = 1.0,
        table: str | None = None,
        out: Tensor | None = None,
    ) -> Any:
        """Push, then pull the same parameters or rows. For all parameters this is one request to each server."""
        self._post(value, rows, weight, None, table)
        return self._shape(self._server.pull(out=out)) if rows is None else self.pull(value, table=table, out=out)

    def _post(self, value: Any, rows: Tensor | None, weight: float, lo: int | None, table: str | None) -> None:
        if rows is not None:
            self._server.push_rows(value, rows, weight, table)
        else:
            self._server.push(self._check(value) if lo is None else value, weight, lo or 0)

    def buffer(self) -> Tensor:
        """Return a flat tensor of zeros, as long as the parameters. A gradient in this tensor is pushed without a copy.

        Servers of this host read the tensor's memory. After a push, change it only when the push has returned.
        """
        return self._server.buffer(self._layout.size, self._layout.dtype)

    def read(self) -> Any:
        """Return the parameters as they are now, without waiting for other workers."""
        return self._shape(self._server.read())

    def flush(self) -> None:
        """Wait until every push is durable: all backups have it, so the death of one server does not lose it.

        With staleness=0 a push is durable only after the other workers have pushed as many rounds. Without backups a
        push is lost if its server dies, even after this call.
        """
        self._server.flush()

    def close(self) -> None:
        """Close the connections. The servers retain the number of this rank's steps."""
        self._server.close()

    def _check(self, value: Any) -> Tensor | Gradient:
        if isinstance(value, dict):
            value = self._join_vector(value)
        if not isinstance(value, Gradient) and value.numel() != self._layout.size:
            raise ConfigError(
                f"a push has {value.numel()} elements, and the parameters have {self._layout.size}: push all elements, "
                "or give `lo` to push a range"
            )
        found: Tensor | Gradient = value
        return found

    def _join_vector(self, named: dict[str, Tensor]) -> Tensor:
        shapes = {entry.name: entry.shape for entry in self._layout.entries}
        for name in sorted(shapes.keys() | named.keys()):
            found = tuple(named[name].shape) if name in named else None
            if found != shapes.get(name):
                given = "is missing" if found is None else f"has shape {found}"
                wanted = f"its shape is {shapes[name]}" if name in shapes else "there is no such parameter"
                raise ConfigError(
                    f"in a push, the gradient of parameter {name!r} {given}, and {wanted}: push a dict with one "
                    "gradient for each parameter, of the parameter's shape"
                )
        return torch.cat([named[name].detach().reshape(-1).cpu() for name in shapes])

    def _shape(self, vector: Tensor) -> Any:
        if self._as_vector:
            return vector
        named = {e.name: vector[e.lo : e.hi].view(e.shape) for e in self._layout.entries}
        return named if self._as_dict else named[""]
