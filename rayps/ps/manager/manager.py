"""The manager of a server group: one thread that listens, and the calls that users make.

Servers register, send heartbeats and reports, and are given orders; workers watch the maps of their spaces. A manager
that is made with the folder of one that died continues from its record: servers and workers find it at the same port.
Pushes and pulls do not pass through it, and continue while it is away. `ManagerActor` is its process.
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

from rayps.cluster.local import Cluster, host_address, rendezvous, surrounding
from rayps.comm.link import Listener, Message, parse_address
from rayps.core.errors import ClusterError, ConfigError, Conflict, LinkError, NotFound
from rayps.ps.manager import spaces
from rayps.ps.manager.assignment import ServerState
from rayps.ps.manager.connections import ManagerConnection, ManagerConnections
from rayps.ps.manager.decide import Balance
from rayps.ps.manager.group_state import GroupState
from rayps.ps.manager.launcher import Launcher
from rayps.ps.manager.publisher import Publisher
from rayps.ps.manager.record import GroupRecord, RecordFile
from rayps.ps.manager.status import facts_of
from rayps.ps.protocol.messages import GroupMessage
from rayps.ps.protocol.segment_map import SpaceMap, register_group, unregister_group
from rayps.ps.protocol.space import Quota, Space

log = logging.getLogger(__name__)

NAP_SECONDS = 0.05  # how long the thread may sleep before it looks at its deadlines again
BALANCE = Balance()
SILENCE = 10.0  # seconds: a busy machine; a process that dies is seen at once, for its connection breaks
COPIED_SECONDS = 10.0  # for the copies of a new space to be there
READY_SECONDS = 60.0  # for a space's servers to be ready


class Manager:
    """The manager of the group `name`: keeps `servers` servers and `replicas` copies of each segment.

    `folder` holds its record; None = the group ends with this manager, as it does unless `detached`. Servers are
    actors of `cluster` (default: the one around) with `cpus` each; one that is silent for `silence` seconds is taken
    for dead; `balance` moves segments by load (None = never). Where `folder` holds a record, that says how many servers
    and replicas there are. Raises ConfigError.
    """

    def __init__(
        self,
        name: str,
        servers: int = 2,
        replicas: int = 1,
        folder: str | Path | None = None,
        *,
        cluster: Cluster | None = None,
        detached: bool = True,
        cpus: float = 0.0,
        silence: float = SILENCE,
        balance: Balance | None = BALANCE,
    ) -> None:
        check_size(name, servers, replicas)
        book = RecordFile(folder)
        record = book.read()
        if record is None:
            record = GroupRecord(name, secrets.token_bytes(32), servers, replicas, born=time.time())
        elif record.name != name:
            raise ConfigError(f"{folder} is the record of group {record.name!r}, not of {name!r}", field="folder")
        self._listener = _listen(f"manager of {name}", record)
        record.port = parse_address(self._listener.address).port
        self._book, self._ends_servers = book, not detached
        self._wires = ManagerConnections(self._listener)
        options: dict[str, Any] = {"cpus": cpus, "detached": detached}
        self._crew = Launcher(name, surrounding() if cluster is None else cluster, options, self._start_failed)
        tongue = Publisher(self._wires, self._listener.address)
        self._keeper = GroupState(record, book, tongue, self._crew, balance, silence)
        self._lock = threading.Condition(threading.RLock())
        self._closing = threading.Event()
        if record.servers:
            self._keeper.event("manager_back", "the manager goes on from its record")
        self._keeper.think()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"manager-{name}")
        self._thread.start()

    # ---- calls

    def door(self) -> dict[str, Any]:
        """Where servers and workers connect, and the secret."""
        return {"address": self._listener.address, "secret": self._keeper.record.secret}

    def open(self, space: Space) -> Space:
        """Place a space; the same with its number, once its servers are ready.

        Its copies are there too by then, where there are servers for them. Raises ConfigError, Conflict (the name is
        open), ClusterError (no server takes it in time).
        """
        with self._lock:
            opened = spaces.opened(self._keeper, space)
            self._keeper.think()
            self._await_ready(opened)
            self._await_copies(opened)
            return opened

    def branch(
        self,
        parent: str,
        name: str,
        quota: Quota | dict[str, Any] | None = None,
        workers: int | None = None,
        strategy: Any = None,
        factory: bytes | None = None,
    ) -> Space:
        """A space that begins with another's parameters and goes its own way; None = as its parent.

        Raises NotFound, Conflict, ClusterError, ConfigError.
        """
        with self._lock:
            found = spaces.find(self._keeper, parent)
            self._await_ready(found)
            made = spaces.branched(self._keeper, found, name, quota, workers, strategy, factory)
            self._keeper.think()
            self._await_ready(made)
            self._await_copies(made)
            return made

    def space(self, name: str) -> Space:
        """An open space. Raises NotFound."""
        with self._lock:
            return spaces.find(self._keeper, name)

    def drop(self, name: str) -> None:
        """Close a space: its memory is free again on all servers. Raises NotFound."""
        with self._lock:
            spaces.drop(self._keeper, name)
            self._keeper.think()
            self._lock.notify_all()

    def set_quota(self, name: str, quota: Quota | dict[str, Any]) -> None:
        """What a space may take from now on. Raises NotFound, ConfigError."""
        with self._lock:
            spaces.limit(self._keeper, name, quota)
            self._keeper.think()

    def restored(self, number: int, segments: list[int]) -> None:
        """Segments that were lost have been loaded again."""
        with self._lock:
            spaces.restored(self._keeper, number, segments)
            self._keeper.think()

    def map(self, number: int) -> dict[str, Any]:
        """`SpaceMap.to_json` of a space. Raises NotFound."""
        with self._lock:
            found: SpaceMap | None = self._keeper.tongue.maps.get(number)
            if found is None:
                raise NotFound(f"group {self._keeper.record.name!r} has no open space number {number}", status=404)
            return found.to_json()

    def join(self, number: int, rank: int) -> int:
        """A new holder of a rank: its incarnation, which fences all before. Raises NotFound."""
        with self._lock:
            count = spaces.joined(self._keeper, number, rank)
            self._book.write(self._keeper.record)
            return count

    def resize(self, servers: int) -> None:
        """How many servers there are to be; returns at once, segments move in the background.

        Raises ConfigError (none, or fewer than replicas + 1), Conflict (a resize is under way).
        """
        with self._lock:
            record = self._keeper.record
            check_size(record.name, servers, record.replicas)
            if servers == record.wanted:
                return
            if record.resizing is not None and servers != record.resizing[0]:
                raise Conflict(self._resizing_now(servers), status=409, resizing=list(record.resizing))
            self._resize(servers)

    def drain(self, server: str) -> None:
        """Empty this server and end it: a resize by one less that says who goes. Raises as `resize`, and NotFound."""
        with self._lock:
            keeper = self._keeper
            member = keeper.members.get(server)
            if member is None or member.state in (ServerState.DEAD, ServerState.SILENT):
                known = ", ".join(name for name, m in keeper.members.items() if m.state != ServerState.DEAD) or "none"
                raise NotFound(f"there is no server {server!r} that could be drained; there are {known}", status=404)
            if member.leaving:
                return
            check_size(keeper.record.name, keeper.record.wanted - 1, keeper.record.replicas)
            if keeper.record.resizing is not None:
                raise Conflict(self._resizing_now(keeper.record.wanted - 1), status=409)
            keeper.leave(server)
            self._resize(keeper.record.wanted - 1)

    def _resize(self, servers: int) -> None:
        record = self._keeper.record
        self._keeper.event("resizing", f"resizing from {record.wanted} to {servers} servers", servers=servers)
        record.resizing = (record.wanted, servers)
        record.wanted = servers
        self._keeper.gather()
        self._keeper.think()

    def facts(self) -> dict[str, Any]:
        """Everything about the group, as plain data."""
        with self._lock:
            return facts_of(self._keeper)

    def settled(self) -> bool:
        """Whether all segments are where they belong, with their copies, and all servers are there."""
        with self._lock:
            return self._keeper.settled()

    def stop(self) -> None:
        """End the group: its servers, its spaces, its record."""
        with self._lock:
            self._keeper.record.wanted = 0
            names = [*self._keeper.members, *self._keeper.pending.names]
        self._end()
        for name in names:
            self._crew.end(name)
        self._crew.close()
        self._book.erase()

    def close(self) -> None:
        """As if this process had died, but for servers that are not detached: they end too."""
        if self._ends_servers and not self._closing.is_set():
            self.stop()
        else:
            self._end()
            self._crew.close()

    def _end(self) -> None:
        self._closing.set()
        self._wires.ring()
        self._thread.join(10.0)

    # ---- waiting

    def _await_ready(self, space: Space) -> None:
        keeper, number = self._keeper, space.number

        def ready() -> bool:
            seats = [seat for seat in keeper.seats.values() if seat.space == number]
            gone = number not in keeper.record.spaces
            return gone or self._closing.is_set() or all(seat.ready and seat.heir is None for seat in seats)

        in_time = self._lock.wait_for(ready, READY_SECONDS)
        if number not in keeper.record.spaces or self._closing.is_set():
            raise Conflict(f"space {space.name!r} was dropped, or its group stopped, before it was ready", status=409)
        if not in_time:
            alive = sum(member.there for member in keeper.members.values())
            waiting = [seat.index for seat in keeper.seats.values() if seat.space == number and not seat.ready]
            if not any(seat.born for seat in keeper.seats.values() if seat.space == number):
                spaces.drop(keeper, space.name)
                keeper.think()
            raise ClusterError(
                f"segments {waiting[:5]} of space {space.name!r} have no server that is ready after {READY_SECONDS:g} "
                f"s: {alive} of {keeper.record.wanted} servers of group {keeper.record.name!r} are there"
            )

    def _await_copies(self, space: Space) -> None:
        """The first push is to be as durable as any; a group that cannot make the copies now opens all the same."""
        keeper, number = self._keeper, space.number

        def copied() -> bool:
            others = sum(member.state == ServerState.ALIVE for member in keeper.members.values()) - 1
            wanted = min(keeper.record.replicas, others)
            seats = [seat for seat in keeper.seats.values() if seat.space == number]
            return self._closing.is_set() or all(len(seat.synced) >= wanted for seat in seats)

        self._lock.wait_for(copied, COPIED_SECONDS)

    def _resizing_now(self, servers: int) -> str:
        keeper = self._keeper
        was, now = keeper.record.resizing or (keeper.record.wanted, keeper.record.wanted)
        facts = facts_of(keeper)
        there = sum(server["state"] == "alive" for server in facts["servers"])
        seats = len(keeper.seats)
        return (
            f"group {keeper.record.name!r} is being resized from {was} to {now} servers: {there} are there, "
            f"{seats - len(facts['moves'])} of {seats} segments are at rest. Wait for it (`rayps servers show "
            f"{keeper.record.name}`), or go back with resize({was}); then resize({servers})"
        )

    # ---- the thread

    def _start_failed(self, server: str, reason: str) -> None:
        with self._lock:
            self._keeper.start_failed(server, reason)

    def _run(self) -> None:
        while not self._closing.is_set():
            with self._lock:
                self._wires.arm()
            ready = self._wires.wait(NAP_SECONDS)
            with self._lock:
                for caller, messages in self._wires.take(ready):
                    self._hear(caller, messages)
                self._keeper.tick()
                if self._keeper.changed:
                    self._keeper.think()
                    self._lock.notify_all()
        with self._lock:
            self._lock.notify_all()
            self._wires.close()
            self._listener.close()

    def _hear(self, caller: ManagerConnection, messages: list[Message] | None) -> None:
        member = self._keeper.members.get(caller.server) if caller.server is not None else None
        if messages is None:
            if member is not None and member.caller is caller:
                self._keeper.lost(member, "its connection broke", broken=True)
            return
        for message in messages:
            try:
                self._take(caller, message)
            except Exception as error:  # of one caller; the group must live on
                log.exception("%s said something that cannot be understood", caller.link.peer)
                self._keeper.event("nonsense", f"{caller.link.peer}: {type(error).__name__}: {error}")
                self._wires.drop(caller)
                self._hear(caller, None)
                return

    def _take(self, caller: ManagerConnection, message: Message) -> None:
        keeper = self._keeper
        if message.kind == GroupMessage.WATCH:
            keeper.tongue.watch(caller, message.a)
            return
        told = json.loads(bytes(message.payload))
        if message.kind == GroupMessage.REGISTER:
            if keeper.registered(caller, told):
                keeper.tongue.welcome(caller)
            else:
                self._wires.drop(caller)
            return
        member = keeper.members.get(caller.server) if caller.server is not None else None
        if member is None or member.caller is not caller:
            return  # it has registered again, over another connection
        if message.kind == GroupMessage.HEARTBEAT:
            keeper.beat(member, told)
        elif message.kind == GroupMessage.REPORT:
            keeper.reported(member, message.tag, int(told["space"]), told["events"])


def check_size(name: str, servers: int, replicas: int) -> None:
    """Raises ConfigError: a group of that size cannot be."""
    for what, value, least in (("servers", servers, 1), ("replicas", replicas, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            hint = " (`stop` ends a group)" if what == "servers" and value == 0 else ""
            raise ConfigError(f"{what} is {value!r}: give a whole number, at least {least}{hint}", field=what)
    if servers < replicas + 1:
        raise ConfigError(
            f"group {name!r} keeps replicas={replicas} copies of each segment on other servers, which takes at least "
            f"{replicas + 1} servers: {servers} are too few",
            field="servers",
        )


def _listen(name: str, record: GroupRecord) -> Listener:
    if record.port:
        with contextlib.suppress(LinkError):  # somebody took it meanwhile: servers look the new one up
            return Listener(name, record.secret, host=host_address(), port=record.port)
    return Listener(name, record.secret, host=host_address())


class ManagerActor(Manager):
    """`Manager` as an actor, to be found by its group's name."""

    def __init__(
        self,
        name: str,
        servers: int = 2,
        replicas: int = 1,
        folder: str | Path | None = None,
        *,
        cluster: Cluster | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """`options` are further arguments of Manager: detached, cpus, silence, balance."""
        super().__init__(name, servers, replicas, folder, cluster=cluster, **(options or {}))
        self._name = name
        register_group(rendezvous(), name, self.door()["address"])

    def ping(self) -> int:
        """The process id: a sign of life."""
        return os.getpid()

    def stop(self) -> None:
        """See Manager."""
        unregister_group(rendezvous(), self._name)
        super().stop()
