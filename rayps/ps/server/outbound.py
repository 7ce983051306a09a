"""The connections that a server opens: to its manager, and to the servers of its backups.

While no manager is connected, the server keeps serving under its last orders. Connecting blocks, so it is done in
threads of its own; all else runs in the server's loop.

The *load* in a heartbeat is JSON-ready data:
{"cpu": share of one core since the last heartbeat, "bytes": of all parameters and optimizer states, with backups,
 "connections": n, "spaces": {number: {"bytes", "rows", "evicted", "operations", "rejected", "throttled",
 "queued" (bytes), "seconds" (of service), "segments": {index: [bytes, rows, operations, number of changes]}}}}
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
from typing import Any, Protocol

from rayps.comm.link import Link, Message, connect
from rayps.core.errors import LinkError, RaypsError
from rayps.ps.protocol.messages import Event, GroupMessage, SegmentOrder
from rayps.ps.protocol.space import Space
from rayps.ps.server.assignments import AssignedSpace, Assignments, SegmentReport
from rayps.ps.server.replication import Peer, Replication
from rayps.ps.tables.table_segment import TableSegment

log = logging.getLogger(__name__)

DIAL_SECONDS = 2.0  # longest time to connect
AGAIN_SECONDS = 0.2  # between two attempts to connect to the manager
WORK_SECONDS = 30.0  # longest time without a turn of the loop in which `beat_for` still sends heartbeats

Later = Callable[[Callable[[], None]], None]
Address = str | Callable[[], str]


class OrderTarget(Protocol):
    """What `ManagerSession` reads and calls on the server."""

    name: str
    address: str
    where: str  # the machine

    def learnt(self, space: Space) -> None:
        """Handle a new space, or its new quota."""

    def forgotten(self, number: int) -> None:
        """Answer the waiting requests of a closed space with an error."""

    def facts(self) -> dict[str, Any]:
        """Return the server's load, for a heartbeat."""


class ManagerSession:
    """The server's half of the session with its manager: registration, orders, reports, heartbeats."""

    def __init__(self, desk: OrderTarget, holdings: Assignments, copies: Replication, heartbeat: float) -> None:
        self._desk, self._holdings, self._copies = desk, holdings, copies
        self.link: Link | None = None
        self.every = heartbeat
        self.next_beat = 0.0
        self.alone_since: float | None = time.monotonic()  # None: the manager is connected
        self._beats = 0
        self._told = 0  # tag of the newest orders
        self._reports: list[SegmentReport] = []
        self.lock = threading.RLock()  # guards the connection, which the loop and `beat_for` use
        self._turned = time.monotonic()  # time of the loop's last call of `turn`
        self._load: dict[str, Any] = {"spaces": {}}

    def say(self, report: SegmentReport) -> None:
        """Send a report at the next `turn`. A manager that connects later receives all reports that are still true."""
        self._reports.append(report)

    def met(self, link: Link) -> None:
        """Register with a connected manager: send the server's name, address and segments."""
        self.link, self.alone_since, self._told = link, None, 0
        desk = self._desk
        holds = {
            str(number): [[h.index, h.role.value, h.generation] for h in held.holdings.values()]
            for number, held in self._holdings.spaces.items()
        }
        body = {"name": desk.name, "address": desk.address, "host": desk.where, "pid": os.getpid(), "holds": holds}
        self._send(GroupMessage.REGISTER, body)
        self._reports = self._all()
        self.next_beat = time.monotonic()

    def left(self) -> None:
        """Record that the connection to the manager is lost."""
        with self.lock:
            self.link, self.alone_since = None, time.monotonic()

    def hear(self, message: Message) -> None:
        """Apply a message of the manager."""
        try:
            self._obey(message)
        except Exception as error:  # e.g. the job's optimizer cannot be built here; other spaces are not affected
            log.error("%s cannot apply its manager's message", self._desk.name, exc_info=error)

    def _obey(self, message: Message) -> None:
        if message.kind == GroupMessage.WELCOME:
            self.every = float(json.loads(bytes(message.payload)).get("heartbeat", self.every))
        elif message.kind == GroupMessage.SPACE:
            space: Space = pickle.loads(message.payload)
            self._holdings.learn(space)
            self._desk.learnt(space)
        elif message.kind == GroupMessage.ORDERS:
            body = json.loads(bytes(message.payload))
            held = self._holdings.spaces.get(int(body["space"]))
            if held is not None:
                self._holdings.obey(held, [SegmentOrder.of(row) for row in body["holdings"]])
                self._desk.learnt(held.space)
            self._told = max(self._told, message.tag)
        elif message.kind == GroupMessage.BRANCH:
            held, parent = self._holdings.spaces.get(message.a), self._holdings.spaces.get(message.b)
            for index, generation in json.loads(bytes(message.payload))["segments"]:
                done = held is not None and parent is not None
                if not (done and self._holdings.branch(held, parent, index, generation)):  # type: ignore[arg-type]
                    self.say(SegmentReport(message.a, Event.ASKED, index, generation))
        elif message.kind == GroupMessage.FORGET:
            self._holdings.forget(message.a)
            self._desk.forgotten(message.a)

    def turn(self, now: float) -> None:
        """Send the reports, and the heartbeat when it is due."""
        self._turned = now
        if self.link is None:
            return
        if self._reports:
            reports, self._reports = self._reports, []
            spaces: dict[int, list[list[Any]]] = {}
            for report in reports:
                row = [report.event.value, report.segment, report.generation, report.name]
                spaces.setdefault(report.space, []).append(row)
            for number, rows in spaces.items():
                self._send(GroupMessage.REPORT, {"space": number, "events": rows}, self._told)
        if now >= self.next_beat:
            self._load = self._desk.facts()
            self._beat(now)

    def beat_for(self, now: float) -> None:
        """Send a heartbeat while the loop is busy with one long request, such as a large state.

        Call it from another thread. After `WORK_SECONDS` in the same request it sends no heartbeat, so that the manager
        counts the server as dead.
        """
        with self.lock:
            late = now > self.next_beat + self.every
            if self.link is not None and late and now - self._turned < WORK_SECONDS:
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

    def _all(self) -> list[SegmentReport]:
        """Return all reports that are true now, for a new manager."""
        found: list[SegmentReport] = []
        for number, held in self._holdings.spaces.items():
            for holding in held.holdings.values():
                if holding.serves:
                    found.append(SegmentReport(number, Event.READY, holding.index, holding.generation))
                found += self._copies.all_of(holding)
        return found


class Load:
    """Computes the loads of successive heartbeats."""

    def __init__(self) -> None:
        self._cpu, self._at = time.process_time(), time.monotonic()

    def now(self, holdings: Assignments, connections: int, waits: Callable[[int], tuple[int, int]]) -> dict[str, Any]:
        """Return the heartbeat's load.

        `waits(space)` returns the number of the space's throttled requests so far, and its queued bytes.
        """
        cpu, at = time.process_time(), time.monotonic()
        share = (cpu - self._cpu) / max(1e-6, at - self._at)
        self._cpu, self._at = cpu, at
        spaces = {str(number): _of_space(held, *waits(number)) for number, held in list(holdings.spaces.items())}
        total = sum(
            holding.segment.nbytes
            for held in list(holdings.spaces.values())
            for holding in list(held.holdings.values())
            if holding.segment is not None
        )
        return {"cpu": round(share, 3), "bytes": total, "connections": connections, "spaces": spaces}


def _of_space(held: AssignedSpace, throttled: int, queued: int) -> dict[str, Any]:
    segments: dict[str, list[int]] = {}
    for holding in held.primaries():
        segment = holding.segment
        if segment is not None:
            segments[str(holding.index)] = [segment.nbytes, segment.rows, segment.operations, segment.seq]
    tables = [holding.segment for holding in held.primaries() if isinstance(holding.segment, TableSegment)]
    return {
        "bytes": sum(row[0] for row in segments.values()),
        "rows": sum(row[1] for row in segments.values()),
        "evicted": sum(table.life.evicted for table in tables),
        "operations": held.operations,
        "rejected": held.rejected,
        "throttled": throttled,
        "queued": queued,
        "seconds": round(held.seconds, 6),
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
        command: ManagerSession,
    ) -> None:
        """`later(work)` runs `work` in the loop, whose poll object is `poll`. `manager=None`: there is no manager."""
        self._name, self._secret, self._manager = name, secret, manager
        self._poll, self._later, self._copies, self._command = poll, later, copies, command
        self._peers: dict[int, Peer] = {}
        self._closing = threading.Event()
        if manager is not None:
            self._look_for_manager()
            threading.Thread(target=self._beat, name=f"{name}-heart", daemon=True).start()

    def _beat(self) -> None:
        while not self._closing.wait(self._command.every):
            self._command.beat_for(time.monotonic())

    def attend(self, descriptor: int) -> bool:
        """Receive and send on a connection that is ready. Return False if `descriptor` is of no outgoing connection."""
        peer = self._peers.get(descriptor)
        if peer is not None:
            self._attend_peer(peer)
            return True
        manager = self._command.link
        if manager is not None and descriptor == manager.fileno():
            self._attend_manager(manager)
            return True
        return False

    def close(self) -> None:
        """Close all outgoing connections."""
        self._closing.set()
        for peer in list(self._peers.values()):
            self._copies.lost(peer, "this server is closing")
        with self._command.lock:
            if self._command.link is not None:
                self._command.link.close()
                self._command.left()

    def _call(self, address: str) -> Link:
        return connect(address, name=self._name, secret=self._secret, generation=0, timeout=DIAL_SECONDS)

    # ---- other servers

    def dial(self, peer: Peer) -> None:
        """Connect to another server in a new thread; report the result to `Replication`."""

        def call() -> None:
            try:
                link = self._call(peer.address)
            except RaypsError as error:
                reason = str(error)
                self._later(lambda: self._copies.lost(peer, reason))
            else:
                self._later(lambda: self._reached(peer, link))

        threading.Thread(target=call, name=f"{self._name}-dial", daemon=True).start()

    def _reached(self, peer: Peer, link: Link) -> None:
        if peer.lost:
            link.close()
            return
        self._peers[link.fileno()] = peer
        self._poll.register(link.fileno(), select.POLLIN)
        self._copies.connected(peer, link)
        self.flush_peer(peer)

    def hang_up(self, peer: Peer) -> None:
        """Close a connection to another server that is not needed any more, or has failed."""
        if peer.link is not None and not peer.link.closed:
            descriptor = peer.link.fileno()
            if self._peers.pop(descriptor, None) is not None:
                self._poll.unregister(descriptor)
            peer.link.close()

    def _attend_peer(self, peer: Peer) -> None:
        assert peer.link is not None
        try:
            for message in peer.link.feed():
                self._copies.heard(peer, message)
        except LinkError as error:
            self._copies.lost(peer, str(error))
            return
        self.flush_peer(peer)

    def flush_peer(self, peer: Peer) -> None:
        """Send queued messages, then states that wait for room on the connection."""
        if peer.link is None:
            return
        try:
            if not peer.lost:
                peer.link.flush()
                self._copies.pump(peer)
            if not peer.lost:
                self._watch(peer.link)
        except LinkError as error:
            self._copies.lost(peer, str(error))

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
                    self._later(lambda link=link: self._met(link))  # type: ignore[misc]
                    return

        threading.Thread(target=search, name=f"{self._name}-manager", daemon=True).start()

    def _met(self, link: Link) -> None:
        self._poll.register(link.fileno(), select.POLLIN)
        self._command.met(link)
        self.flush_manager()

    def _attend_manager(self, link: Link) -> None:
        try:
            with self._command.lock:
                messages = link.feed()
            for message in messages:
                self._command.hear(message)
        except LinkError as error:
            log.info("%s: lost the connection to the manager: %s", self._name, error)
            self._poll.unregister(link.fileno())
            self._command.left()
            link.close()
            self._look_for_manager()
            return
        self.flush_manager()

    def flush_manager(self) -> None:
        """Send queued messages to the manager."""
        link = self._command.link
        if link is not None:
            with self._command.lock, contextlib.suppress(LinkError):  # the next read raises the error again
                link.flush()
                self._watch(link)
