"""The connections that a server opens: to its manager, and to the servers of its backups.

While no manager is connected, the server keeps serving under its last orders. Connecting blocks, so it is done in
threads of its own; all else runs in the server's loop.

The *load* in a heartbeat is JSON-ready data:
{"cpu": share of one core since the last heartbeat, "memory": share of the host's memory in use, "host_bytes": of this
 memory, "bytes": of all parameters and optimizer states, with backups, "connections": n, "spaces": {number: {"bytes",
 "rows", "evicted", "operations", "rejected", "throttled", "queued" (bytes), "seconds" (of service), "segments":
 {index: [bytes, rows, operations, number of changes]}}}}
Counters are never reset. The numbers of a space cover only the segments of which the server is primary.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import select
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from rayps_client.errors import LinkError, RaypsError

from rayps.cluster.warm import free_memory
from rayps.comm.link import Link, Message, connect
from rayps.core.memory import read_total_bytes
from rayps.core.time.time_account import LoopAccount
from rayps.ps.protocol.messages import Event, GroupMessage, SegmentOrder
from rayps.ps.protocol.space import Space
from rayps.ps.server.assignments import AssignedSpace, Assignments, SegmentReport
from rayps.ps.server.replication import BackupServer, Replication

log = logging.getLogger(__name__)

DIAL_SECONDS = 2.0  # longest time to connect
AGAIN_SECONDS = 0.2  # seconds between two attempts to connect to the manager
MEMORY_SECONDS = 1.0  # seconds between two looks at the host's memory
WORK_SECONDS = 30.0  # longest time that the loop may spend on one request while `send_heartbeat` sends for it

Later = Callable[[Callable[[], None]], None]
Address = str | Callable[[], str]


class OrderTarget(Protocol):
    """What `ManagerSession` reads and calls on the server."""

    name: str
    address: str
    where: str  # the machine
    node: str  # the machine's id in the cluster

    def space_changed(self, space: Space) -> None:
        """Handle a new space, or its new quota."""

    def space_closed(self, number: int) -> None:
        """Answer the waiting requests of a closed space with an error."""

    def facts(self) -> dict[str, Any]:
        """Return the server's load, for a heartbeat."""


class ManagerSession:
    """The server's half of the session with its manager: registration, orders, reports, heartbeats."""

    def __init__(self, server: OrderTarget, assignments: Assignments, copies: Replication, heartbeat: float) -> None:
        self._server, self._assignments, self._replication = server, assignments, copies
        self.link: Link | None = None
        self.every = heartbeat
        self.next_beat = 0.0
        self.alone_since: float | None = time.monotonic()  # None while the manager is connected
        self._beats = 0
        self._orders_tag = 0  # tag of the newest orders
        self._reports: list[SegmentReport] = []
        self.lock = threading.RLock()  # guards the connection, which the loop and `send_heartbeat` use
        self._last_turn = time.monotonic()  # time of the loop's last call of `send_due`
        self._load: dict[str, Any] = {"spaces": {}}

    def add_report(self, report: SegmentReport) -> None:
        """Send a report at the next `send_due`. A manager that connects later gets all reports that are still true."""
        self._reports.append(report)

    def register(self, link: Link) -> None:
        """Register with a connected manager: send the server's name, address and segments."""
        self.link, self.alone_since, self._orders_tag = link, None, 0
        server = self._server
        holds = {
            str(number): [[h.index, h.role.value, h.generation] for h in assigned_space.by_index.values()]
            for number, assigned_space in self._assignments.spaces.items()
        }
        body = {
            "name": server.name,
            "address": server.address,
            "host": server.where,
            "node": server.node,
            "pid": os.getpid(),
            "holds": holds,
        }
        self._send(GroupMessage.REGISTER, body)
        self._reports = self._list_all()
        self.next_beat = time.monotonic()

    def disconnected(self) -> None:
        """Record that the connection to the manager is lost."""
        with self.lock:
            self.link, self.alone_since = None, time.monotonic()

    def apply_message(self, message: Message) -> None:
        """Apply a message of the manager."""
        try:
            self._apply(message)
        except Exception as error:  # e.g. the job's optimizer cannot be built here; other spaces are not affected
            log.error("%s cannot apply its manager's message", self._server.name, exc_info=error)

    def _apply(self, message: Message) -> None:
        if message.kind == GroupMessage.WELCOME:
            self.every = float(json.loads(bytes(message.payload)).get("heartbeat", self.every))
        elif message.kind == GroupMessage.SPACE:
            space: Space = pickle.loads(message.payload)
            self._assignments.add_space(space)
            self._server.space_changed(space)
        elif message.kind == GroupMessage.ORDERS:
            self._send_reports()  # with the tag of the orders that they are about
            body = json.loads(bytes(message.payload))
            assigned_space = self._assignments.spaces.get(int(body["space"]))
            if assigned_space is not None:
                self._assignments.apply_orders(assigned_space, [SegmentOrder.of(row) for row in body["holdings"]])
                self._server.space_changed(assigned_space.space)
            self._orders_tag = max(self._orders_tag, message.tag)
        elif message.kind == GroupMessage.BRANCH:
            assigned_space, parent = self._assignments.spaces.get(message.a), self._assignments.spaces.get(message.b)
            for index, generation in json.loads(bytes(message.payload))["segments"]:
                if (
                    assigned_space is None
                    or parent is None
                    or not self._assignments.branch(assigned_space, parent, index, generation)
                ):
                    self.add_report(SegmentReport(message.a, Event.ASKED, index, generation))
        elif message.kind == GroupMessage.FORGET:
            self._assignments.drop_space(message.a)
            self._server.space_closed(message.a)

    def send_due(self, now: float) -> None:
        """Send the reports, and the heartbeat when it is due."""
        self._last_turn = now
        if self.link is None:
            return
        self._send_reports()
        if now >= self.next_beat:
            self._load = self._server.facts()
            self._beat(now)

    def _send_reports(self) -> None:
        reports, self._reports = self._reports, []
        spaces: dict[int, list[list[Any]]] = {}
        for report in reports:
            row = [report.event.value, report.segment, report.generation, report.name]
            spaces.setdefault(report.space, []).append(row)
        for number, rows in spaces.items():
            self._send(GroupMessage.REPORT, {"space": number, "events": rows}, self._orders_tag)

    def send_heartbeat(self, now: float) -> None:
        """Send a heartbeat if that of the server's loop is overdue by more than one interval (`every` seconds).

        One long request, such as a large state, can delay the loop. Call this from another thread. If the loop has not
        called `send_due` for `WORK_SECONDS`, no heartbeat is sent, and the manager then counts the server as dead.
        """
        with self.lock:
            late = now > self.next_beat + self.every
            if self.link is not None and late and now - self._last_turn < WORK_SECONDS:
                self._beat(now)

    def _beat(self, now: float) -> None:
        with self.lock:
            self.next_beat = now + self.every
            self._beats += 1
            self._send(GroupMessage.HEARTBEAT, self._load, self._beats)

    def _send(self, kind: GroupMessage, body: dict[str, Any], tag: int = 0) -> None:
        with self.lock:
            if self.link is None:
                return
            with contextlib.suppress(LinkError):  # the next read raises the error again
                self.link.queue(Message(kind, tag), json.dumps(body).encode())

    def _list_all(self) -> list[SegmentReport]:
        """Return all reports that are true now, for a new manager."""
        found: list[SegmentReport] = []
        for number, assigned_space in self._assignments.spaces.items():
            for assigned in assigned_space.by_index.values():
                if assigned.serves:
                    found.append(SegmentReport(number, Event.READY, assigned.index, assigned.generation))
                found += self._replication.all_of(assigned)
        return found


class Load:
    """Computes the loads of successive heartbeats, and has the account of the loop's time."""

    def __init__(self) -> None:
        self.account = LoopAccount()
        self._cpu, self._at = time.process_time(), time.monotonic()
        self._memory, self._host_bytes, self._read = 0.0, read_total_bytes() or 0, -MEMORY_SECONDS

    def now(
        self, assignments: Assignments, connections: int, waits: Callable[[int], tuple[int, int]]
    ) -> dict[str, Any]:
        """Return the heartbeat's load.

        `waits(space)` returns the number of the space's throttled requests so far, and its queued bytes.
        """
        cpu, at = time.process_time(), time.monotonic()
        share = (cpu - self._cpu) / max(1e-6, at - self._at)
        self._cpu, self._at = cpu, at
        spaces = {
            str(number): _of_space(assigned_space, *waits(number))
            for number, assigned_space in list(assignments.spaces.items())
        }
        total = sum(
            assigned.segment.nbytes
            for assigned_space in list(assignments.spaces.values())
            for assigned in list(assigned_space.by_index.values())
            if assigned.segment is not None
        )
        if at - self._read >= MEMORY_SECONDS:
            self._memory, self._read = round(1.0 - free_memory(), 3), at
        return {
            "cpu": round(share, 3),
            "memory": self._memory,
            "host_bytes": self._host_bytes,
            "bytes": total,
            "connections": connections,
            "spaces": spaces,
            "account": {part: round(seconds, 3) for (part, _), seconds in self.account.seconds().items()},
        }


def _of_space(assigned_space: AssignedSpace, throttled: int, queued: int) -> dict[str, Any]:
    segments: dict[str, list[int]] = {}
    evicted = 0
    for assigned in assigned_space.primaries():
        segment = assigned.segment
        if segment is not None:
            segments[str(assigned.index)] = [segment.nbytes, segment.rows, segment.operations, segment.seq]
            evicted += segment.evicted
    return {
        "bytes": sum(row[0] for row in segments.values()),
        "rows": sum(row[1] for row in segments.values()),
        "evicted": evicted,
        "operations": assigned_space.operations,
        "rejected": assigned_space.rejected,
        "throttled": throttled,
        "queued": queued,
        "seconds": round(assigned_space.seconds, 6),
        "delays": [[*ranks, round(seconds, 3)] for ranks, seconds in list(assigned_space.delays.items())],
        "segments": segments,
    }


# ---- links


class Outbound:
    """The outgoing connections of one server. Used in the thread of the server's loop, except for connecting."""

    def __init__(
        self,
        name: str,
        secret: bytes,
        manager: Address | None,
        poll: select.poll,
        later: Later,
        copies: Replication,
        manager_session: ManagerSession,
    ) -> None:
        """`later(work)` runs `work` in the loop, whose poll object is `poll`. `manager` is None if there is none."""
        self._name, self._secret, self._manager = name, secret, manager
        self._poll, self._later, self._replication, self._manager_session = poll, later, copies, manager_session
        self._peers: dict[int, BackupServer] = {}
        self._closing = threading.Event()
        if manager is not None:
            self._look_for_manager()
            threading.Thread(target=self._beat, name=f"{name}-heart", daemon=True).start()

    def _beat(self) -> None:
        while not self._closing.wait(self._manager_session.every):
            self._manager_session.send_heartbeat(time.monotonic())

    def handle_events(self, descriptor: int) -> bool:
        """Receive and send on the connection with this descriptor; return False if it is not an outgoing connection."""
        peer = self._peers.get(descriptor)
        if peer is not None:
            self._attend_peer(peer)
            return True
        manager = self._manager_session.link
        if manager is not None and descriptor == manager.fileno():
            self._attend_manager(manager)
            return True
        return False

    def close(self) -> None:
        """Close all outgoing connections."""
        self._closing.set()
        for peer in list(self._peers.values()):
            self._replication.lost(peer, "this server is closing")
        with self._manager_session.lock:
            if self._manager_session.link is not None:
                self._manager_session.link.close()
                self._manager_session.disconnected()

    def _call(self, address: str) -> Link:
        return connect(address, name=self._name, secret=self._secret, generation=0, timeout=DIAL_SECONDS)

    # ---- other servers

    def dial(self, peer: BackupServer) -> None:
        """Connect to another server in a new thread; report the result to `Replication`."""

        def call() -> None:
            try:
                link = self._call(peer.address)
            except RaypsError as error:
                reason = str(error)
                self._later(lambda: self._replication.lost(peer, reason))
            else:
                self._later(lambda: self._note_reached(peer, link))

        threading.Thread(target=call, name=f"{self._name}-dial", daemon=True).start()

    def _note_reached(self, peer: BackupServer, link: Link) -> None:
        if peer.lost:
            link.close()
            return
        self._peers[link.fileno()] = peer
        self._poll.register(link.fileno(), select.POLLIN)
        self._replication.connected(peer, link)
        self.flush_peer(peer)

    def hang_up(self, peer: BackupServer) -> None:
        """Close a connection to another server that is not needed any more, or has failed."""
        if peer.link is not None and not peer.link.closed:
            descriptor = peer.link.fileno()
            if self._peers.pop(descriptor, None) is not None:
                self._poll.unregister(descriptor)
            peer.link.close()

    def _attend_peer(self, peer: BackupServer) -> None:
        assert peer.link is not None
        try:
            for message in peer.link.feed():
                self._replication.handle(peer, message)
        except LinkError as error:
            self._replication.lost(peer, str(error))
            return
        self.flush_peer(peer)

    def flush_peer(self, peer: BackupServer) -> None:
        """Send queued messages, then states that wait for room on the connection."""
        if peer.link is None:
            return
        try:
            if not peer.lost:
                peer.link.flush()
                self._replication.send_states(peer)
            if not peer.lost:
                self._watch(peer.link)
        except LinkError as error:
            self._replication.lost(peer, str(error))

    def flush_peers(self) -> None:
        """Send the queued messages of all connections to other servers."""
        for peer in list(self._peers.values()):
            if peer.link is not None and peer.link.queued:
                self.flush_peer(peer)

    def _watch(self, link: Link) -> None:
        full = bool(link.queued) and bool(link.interest & select.POLLOUT)
        self._poll.modify(link.fileno(), select.POLLIN | (select.POLLOUT if full else 0))

    # ---- the manager

    def _look_for_manager(self) -> None:
        def search() -> None:
            while not self._closing.is_set() and (manager := self._manager) is not None:
                try:
                    link = self._call(manager if isinstance(manager, str) else manager())
                except Exception as error:  # the function that returns the address may raise anything
                    log.info("%s cannot connect to its manager yet: %s", self._name, error)
                    self._closing.wait(AGAIN_SECONDS)
                else:
                    self._later(partial(self._register, link))
                    return

        threading.Thread(target=search, name=f"{self._name}-manager", daemon=True).start()

    def _register(self, link: Link) -> None:
        self._poll.register(link.fileno(), select.POLLIN)
        self._manager_session.register(link)
        self.flush_manager()

    def _attend_manager(self, link: Link) -> None:
        try:
            with self._manager_session.lock:
                messages = link.feed()
            for message in messages:
                self._manager_session.apply_message(message)
        except LinkError as error:
            log.info("%s: lost the connection to the manager: %s", self._name, error)
            self._poll.unregister(link.fileno())
            self._manager_session.disconnected()
            link.close()
            self._look_for_manager()
            return
        self.flush_manager()

    def flush_manager(self) -> None:
        """Send queued messages to the manager."""
        link = self._manager_session.link
        if link is not None:
            with self._manager_session.lock, contextlib.suppress(LinkError):  # the next read raises the error again
                link.flush()
                self._watch(link)
