"""The manager of a server group: one thread that serves connections, and the calls that users make.

Servers register, send heartbeats and reports, and receive orders; workers watch the maps of their spaces. Pushes and
pulls do not pass through the manager, and continue while it is away. A new manager that is given the folder of one that
died continues from the record in this folder, and listens on the same port, so that servers and workers find it.
`ManagerActor` runs a manager as an actor.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import threading
import time
from pathlib import Path
from typing import Any

from rayps_client.errors import ClusterError, ConfigError, Conflict, LinkError, NotFound

from rayps.cluster.local import Cluster, host_address, rendezvous, surrounding
from rayps.comm.link import Listener, Message, parse_address
from rayps.core.strategy.staleness_bound import MovedBound
from rayps.ps.manager import spaces
from rayps.ps.manager.assign_segments import Balance, ServerState
from rayps.ps.manager.decide_scale import ScaleRule
from rayps.ps.manager.group_state import GroupState
from rayps.ps.manager.host_starter import HostStarter
from rayps.ps.manager.launcher import ActorStarter, Launcher, ServerStarter
from rayps.ps.manager.members import ManagerConnection
from rayps.ps.manager.publisher import ManagerConnections, Publisher
from rayps.ps.manager.record import GroupRecord, RecordFile
from rayps.ps.manager.scaling import GroupScaling, begin_resize
from rayps.ps.manager.status import facts_of, list_moves, loads_of
from rayps.ps.protocol.messages import GroupMessage
from rayps.ps.protocol.segment_map import register_group, unregister_group
from rayps.ps.protocol.space import Quota, Space

log = logging.getLogger(__name__)

POLL_SECONDS = 0.05  # longest time between two checks of the deadlines
BALANCE = Balance()
ServerCount = int | tuple[int, int]  # the number of a group's servers, or the least and the most
SILENCE = 10.0  # seconds, long enough for a busy machine; a process that dies is detected when its connection closes
COPIED_SECONDS = 10.0  # seconds in which the backups of a new space should be in sync
READY_SECONDS = 60.0  # seconds in which the servers of a new space must be ready


class Manager:
    """The manager of the group `name`: keeps `servers` servers and `replicas` backups of each segment.

    If `servers` is a pair, the least and the most, the group begins with the least, and load changes the number by the
    rule `scale`.

    `folder` has the group's record, from which a later manager can continue; with None no record is written. A record
    in `folder` takes precedence over `servers` and `replicas`. Unless `detached`, the group ends with this manager.
    Servers are actors of `cluster` (default: the cluster in which this code runs) with `cpus` CPUs each. A server that
    sends nothing for `silence` seconds counts as dead. `balance` is the rule that moves segments away from overloaded
    servers; with None, load moves no segment. `forked`: whether the servers of a host are forked from one process that
    has imported torch (see `rayps.ps.server.server_template`); None means yes on Ray, where it saves seconds.

    Raises ConfigError if the group cannot have this size, or `folder` has no readable record of this group.
    """

    def __init__(
        self,
        name: str,
        servers: ServerCount = 2,
        replicas: int = 1,
        folder: str | Path | None = None,
        *,
        cluster: Cluster | None = None,
        detached: bool = True,
        cpus: float = 0.0,
        silence: float = SILENCE,
        balance: Balance | None = BALANCE,
        forked: bool | None = None,
        scale: ScaleRule | None = None,
    ) -> None:
        least, found = check_size(name, servers, replicas)
        file = RecordFile(folder)
        record = file.read()
        if record is None:
            record = GroupRecord(name, secrets.token_bytes(32), least, replicas, born=time.time(), range=found)
        elif record.name != name:
            raise ConfigError(
                f"{folder} has the record of group {record.name!r}, not of {name!r}: give another folder",
                field="folder",
            )
        self._listener = _listen(f"manager of {name}", record)
        record.port = parse_address(self._listener.address).port
        self._file, self._ends_servers = file, not detached
        self._connections = ManagerConnections(self._listener)
        home = surrounding() if cluster is None else cluster
        starter = _make_starter(name, home, cpus, detached, forked)
        self._launcher = Launcher(name, starter, self._start_failed)
        publisher = Publisher(self._connections, self._listener.address)
        self._state = GroupState(record, file, publisher, self._launcher, balance, silence)
        self._scaling = GroupScaling(self._state, scale, home.notices)
        self._lock = threading.Condition(threading.RLock())
        self._closing = threading.Event()
        if record.servers:
            self._state.event("manager_back", "the manager has restarted from its record")
        self._state.apply_decisions()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"manager-{name}")
        self._thread.start()

    # ---- calls

    def contact(self) -> dict[str, Any]:
        """Return the address to which servers and workers connect, and the group's secret."""
        return {"address": self._listener.address, "secret": self._state.record.secret}

    def open(self, space: Space) -> Space:
        """Place a space, and return it with its number once its servers are ready and its backups in sync.

        If there are too few servers for backups, the space opens without backups.

        Raises:
            ConfigError: the space is not valid.
            Conflict: a space of this name is open, or the space was dropped before it was ready.
            ClusterError: segments have no ready server in time.
        """
        with self._lock:
            return self._await_placed(spaces.open_space(self._state, space))

    def branch(
        self,
        parent: str,
        name: str,
        quota: Quota | dict[str, Any] | None = None,
        workers: int | None = None,
        strategy: Any = None,
        factory: bytes | None = None,
    ) -> Space:
        """Open a space that begins with the parameters of the space `parent`.

        For `workers`, `strategy` and `factory`, None means the value of the parent.

        Raises:
            NotFound: there is no space `parent`.
            Conflict, ClusterError, ConfigError: as `open`.
        """
        given = {"workers": workers, "strategy": strategy, "factory": factory}
        changes = {field: value for field, value in given.items() if value is not None}
        with self._lock:
            found = spaces.find(self._state, parent)
            self._await_ready(found)
            return self._await_placed(spaces.branch_space(self._state, found, name, quota, changes))

    def space(self, name: str) -> Space:
        """Return an open space. Raises NotFound if there is no open space of this name."""
        with self._lock:
            return spaces.find(self._state, name)

    def drop(self, name: str) -> None:
        """Close a space, and free its memory on all servers. Raises NotFound if there is no open space of this name."""
        with self._lock:
            spaces.drop(self._state, name)
            self._state.apply_decisions()
            self._lock.notify_all()

    def set_quota(self, name: str, quota: Quota | dict[str, Any]) -> None:
        """Replace a space's quota.

        Raises NotFound if there is no open space of this name, and ConfigError if the quota is not valid.
        """
        with self._lock:
            spaces.set_quota(self._state, name, quota)
            self._state.apply_decisions()

    def move_bound(self, number: int, bound: MovedBound) -> None:
        """Replace a space's staleness bound. Raises NotFound if there is no open space with this number."""
        with self._lock:
            spaces.move_bound(self._state, number, bound)
            self._state.apply_decisions()

    def restored(self, number: int, segments: list[int]) -> None:
        """Record that lost segments have been loaded again."""
        with self._lock:
            spaces.mark_restored(self._state, number, segments)
            self._state.apply_decisions()

    def map(self, number: int) -> dict[str, Any]:
        """Return a space's map, as `SpaceMap.to_json`. Raises NotFound if there is no open space with this number."""
        with self._lock:
            return self._state.publisher.maps[spaces.of_number(self._state, number).number].to_json()

    def join(self, number: int, rank: int) -> int:
        """Return a new incarnation of a rank, for a new process; servers refuse all earlier incarnations.

        Raises NotFound if there is no open space with this number, and ConfigError if the space has no such rank.
        """
        with self._lock:
            count = spaces.join_rank(self._state, number, rank)
            self._file.write(self._state.record)
            return count

    def resize(self, servers: ServerCount) -> None:
        """Set the number of servers, or the range (least, most) from which load chooses it.

        Returns at once; segments move in the background. In a group with a range, a number stays until the next call
        with a range.

        Raises ConfigError: `servers` is 0, or below replicas + 1. Raises Conflict: a resize is in progress.
        """
        with self._lock:
            record = self._state.record
            number, found = check_size(record.name, servers, record.replicas)
            if found is not None:
                if (record.range, record.pinned) != (found, False):
                    text = f"the group has {found[0]} to {found[1]} servers from now on, as the load requires"
                    self._state.event("range", text, servers=list(found))
                record.range, record.pinned = found, False
                self._file.write(record)
                return
            resizes = number != record.wanted
            if resizes and record.resizing is not None and number != record.resizing[0]:
                raise Conflict(self._describe_resizing(number), status=409, resizing=list(record.resizing))
            record.pinned = record.range is not None
            self._scaling.resized()
            if resizes:
                begin_resize(self._state, number)
            else:
                self._file.write(record)

    def drain(self, server: str) -> None:
        """Reduce the group by this server: move its segments to other servers, then end it.

        Raises NotFound if there is no such server, or it is dead or silent. Raises the errors of `resize` too.
        """
        with self._lock:
            state, record = self._state, self._state.record
            member = state.members.get(server)
            if member is None or member.state in (ServerState.DEAD, ServerState.SILENT):
                known = ", ".join(name for name, m in state.members.items() if m.state != ServerState.DEAD) or "none"
                raise NotFound(
                    f"server {server!r} cannot be drained, because it is unknown or does not respond; the servers are "
                    f"{known}",
                    status=404,
                )
            if member.record.leaving:
                return
            check_size(record.name, record.wanted - 1, record.replicas)
            if record.resizing is not None:
                raise Conflict(self._describe_resizing(record.wanted - 1), status=409)
            state.leave(server)
            self._scaling.resized()
            begin_resize(state, record.wanted - 1)

    def facts(self) -> dict[str, Any]:
        """Return the group's facts, as plain data."""
        with self._lock:
            return facts_of(self._state)

    def loads(self) -> dict[str, dict[str, Any]]:
        """Return the spaces in each server's last heartbeat (see `rayps.ps.server.outbound`), as plain data."""
        with self._lock:
            return loads_of(self._state)

    def settled(self) -> bool:
        """Return whether all segments and backups are where they belong, and all servers are alive."""
        with self._lock:
            return self._state.settled()

    def stop(self) -> None:
        """End the group: its servers, its spaces and its record."""
        with self._lock:
            self._state.record.wanted = 0
            names = [*self._state.members, *self._state.pending.names]
        self._end()
        for name in names:
            member = self._state.members.get(name)
            self._launcher.end(name, "" if member is None else member.record.node)
        self._launcher.close(ended=True)
        self._file.erase()

    def close(self) -> None:
        """End this manager as if its process had died: its servers continue. Unless `detached`, end the group too."""
        if self._ends_servers and not self._closing.is_set():
            self.stop()
        else:
            self._end()
            self._launcher.close()

    def _end(self) -> None:
        self._closing.set()
        self._connections.wake()
        self._thread.join(10.0)

    # ---- waiting

    def _await_placed(self, space: Space) -> Space:
        self._state.apply_decisions()
        self._await_ready(space)
        self._await_copies(space)
        return space

    def _await_ready(self, space: Space) -> None:
        state, number = self._state, space.number

        def ready() -> bool:
            gone = number not in state.record.spaces or self._closing.is_set()
            return gone or all(each.ready and each.successor is None for each in state.of_space(number))

        in_time = self._lock.wait_for(ready, READY_SECONDS)
        if number not in state.record.spaces or self._closing.is_set():
            raise Conflict(f"space {space.name!r} was dropped, or its group stopped, before it was ready", status=409)
        if not in_time:
            connected = sum(member.connected for member in state.members.values())
            waiting = [each.index for each in state.of_space(number) if not each.ready]
            if not any(each.started for each in state.of_space(number)):
                spaces.drop(state, space.name)
                state.apply_decisions()
            raise ClusterError(
                f"segments {waiting[:5]} of space {space.name!r} have no ready server after {READY_SECONDS:g} s: "
                f"{connected} of {state.record.wanted} servers of group {state.record.name!r} are connected"
            )

    def _await_copies(self, space: Space) -> None:
        """Wait, for COPIED_SECONDS at most, until the backups are in sync, so that the first push will be durable."""
        state, number = self._state, space.number

        def copied() -> bool:
            others = sum(member.state == ServerState.ALIVE for member in state.members.values()) - 1
            wanted = min(state.record.replicas, others)
            return self._closing.is_set() or all(len(each.synced) >= wanted for each in state.of_space(number))

        self._lock.wait_for(copied, COPIED_SECONDS)

    def _describe_resizing(self, servers: int) -> str:
        state, record = self._state, self._state.record
        before, now = record.resizing or (record.wanted, record.wanted)
        alive = sum(member.facts.stays for member in state.members.values())
        total = len(state.segments)
        return (
            f"group {record.name!r} is being resized from {before} to {now} servers: {alive} servers are alive, and "
            f"{len(list_moves(state))} copies of {total} segments are in progress. Wait until the resize has ended "
            "(`rayps "
            f"servers show {record.name}`), or undo it with resize({before}); then call resize({servers})"
        )

    # ---- the thread

    def _start_failed(self, server: str, reason: str) -> None:
        with self._lock:
            self._state.start_failed(server, reason)

    def _run(self) -> None:
        while not self._closing.is_set():
            with self._lock:
                self._connections.prepare()
            ready = self._connections.wait(POLL_SECONDS)
            with self._lock:
                for connection, messages in self._connections.read(ready):
                    self._receive(connection, messages)
                self._state.tick()
                self._scaling.tick(time.monotonic())
                if self._state.changed:
                    self._state.apply_decisions()
                    self._lock.notify_all()
        with self._lock:
            self._lock.notify_all()
            self._connections.close()
            self._listener.close()

    def _receive(self, connection: ManagerConnection, messages: list[Message] | None) -> None:
        """Handle the messages of a connection; `messages` is None if the connection is lost."""
        for message in messages or []:
            try:
                self._handle(connection, message)
            except Exception as error:  # an error of one peer must not end the group
                log.exception("%s sent a message that cannot be read", connection.link.peer)
                self._state.event(
                    "nonsense",
                    f"the connection of {connection.link.peer} was closed, because its message cannot be read: "
                    f"{type(error).__name__}: {error}",
                )
                self._connections.drop(connection)
                messages = None
                break
        member = self._state.members.get(connection.server or "")
        if messages is None and member is not None and member.connection is connection:
            self._state.lost(member, "its connection broke", broken=True)

    def _handle(self, connection: ManagerConnection, message: Message) -> None:
        state = self._state
        if message.kind == GroupMessage.WATCH:
            state.publisher.watch(connection, message.a)
            return
        body = json.loads(bytes(message.payload))
        if message.kind == GroupMessage.REGISTER:
            if state.registered(connection, body):
                state.publisher.welcome(connection)
            else:
                self._connections.drop(connection)
            return
        member = state.members.get(connection.server or "")
        if member is None or member.connection is not connection:
            return  # the server has registered again, over another connection
        if message.kind == GroupMessage.HEARTBEAT:
            state.heartbeat(member, body)
        elif message.kind == GroupMessage.REPORT:
            state.reported(member, message.tag, int(body["space"]), body["events"])


def check_size(name: str, servers: ServerCount, replicas: int) -> tuple[int, tuple[int, int] | None]:
    """Check the size of a group. Return the number of servers, and the range (least, most) if `servers` is a pair.

    The number is the least one then. Raises ConfigError: a group of that size is not possible.
    """
    pair = tuple(servers) if isinstance(servers, (tuple, list)) else None
    if pair is not None and len(pair) != 2:
        raise ConfigError(
            f"servers is {servers!r}: give a number, or the least and the most, such as (2, 8)", field="servers"
        )
    numbers: tuple[Any, ...] = (servers,) if pair is None else pair
    for what, value, least in (*(("servers", number, 1) for number in numbers), ("replicas", replicas, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            hint = " (`stop` ends a group)" if what == "servers" and value == 0 else ""
            raise ConfigError(f"{what} is {value!r}: give a whole number, at least {least}{hint}", field=what)
    number = int(numbers[0])
    if number < replicas + 1:
        raise ConfigError(
            f"group {name!r} keeps replicas={replicas} backups of each segment on other servers, so it needs at least "
            f"{replicas + 1} servers: servers={number} is too few",
            field="servers",
        )
    if pair is None:
        return number, None
    rule = ScaleRule(*pair)
    return number, (rule.least, rule.most)


def _listen(name: str, record: GroupRecord) -> Listener:
    if record.port:
        with contextlib.suppress(
            LinkError
        ):  # if the port is in use, listen on another one; servers look up the address
            return Listener(name, record.secret, host=host_address(), port=record.port)
    return Listener(name, record.secret, host=host_address())


def _make_starter(name: str, cluster: Cluster, cpus: float, detached: bool, forked: bool | None) -> ServerStarter:
    """Return what starts the servers: an actor on each host if `forked`, by default on Ray; else an actor for each."""
    if forked or (forked is None and cluster.node):
        return HostStarter(name, cluster, cpus=cpus, detached=detached)
    return ActorStarter(name, cluster, {"cpus": cpus, "detached": detached})


class ManagerActor(Manager):
    """The actor of a `Manager`, which registers the manager's address under the group's name for other processes."""

    def __init__(
        self,
        name: str,
        servers: ServerCount = 2,
        replicas: int = 1,
        folder: str | Path | None = None,
        *,
        cluster: Cluster | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Start the manager. `options` are further arguments of Manager: detached, cpus, silence, balance, scale."""
        super().__init__(name, servers, replicas, folder, cluster=cluster, **(options or {}))
        self._name = name
        register_group(rendezvous(), name, self.contact()["address"])

    def ping(self) -> int:
        """Return the process id."""
        return os.getpid()

    def stop(self) -> None:
        """End the group (see `Manager.stop`), and remove its registered address."""
        unregister_group(rendezvous(), self._name)
        super().stop()
