"""A server's session with its manager: registration, orders, reports, and its load.

While the manager is away the server serves on with the orders that it has. Another thread connects, since that waits.

A load is JSON-ready data:
{"cpu": share of one core since the last, "bytes": of all parameters and optimizer states here, copies too,
 "connections": n, "spaces": {number: {"bytes", "rows", "evicted", "operations", "rejected", "throttled",
 "queued" (bytes), "seconds" (of service), "segments": {index: [bytes, rows, operations, seq]}}}}
What counts up is never reset. The segments are those that the server is primary of.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from rayps.comm.link import Link, Message
from rayps.core.errors import LinkError
from rayps.ps.protocol.messages import Event, GroupMessage, SegmentOrder
from rayps.ps.protocol.space import Space
from rayps.ps.server.assignments import AssignedSpace, Assignments, SegmentReport
from rayps.ps.server.replication import Replication
from rayps.ps.tables.table_segment import TableSegment

WORK_SECONDS = 30.0

log = logging.getLogger(__name__)

Address = str | Callable[[], str]


class OrderTarget(Protocol):
    """What orders need of the host."""

    name: str
    address: str
    where: str  # the machine

    def learnt(self, space: Space) -> None:
        """A space is known, or its quota has changed."""

    def forgotten(self, number: int) -> None:
        """A space is closed."""

    def facts(self) -> dict[str, Any]:
        """The heartbeat."""


class ManagerSession:
    """One server's side of what it and its manager say."""

    def __init__(self, desk: OrderTarget, holdings: Assignments, copies: Replication, heartbeat: float) -> None:
        self._desk, self._holdings, self._copies = desk, holdings, copies
        self.link: Link | None = None
        self.every = heartbeat
        self.next_beat = 0.0
        self.alone_since: float | None = time.monotonic()  # None: the manager is there
        self._beats = 0
        self._told = 0  # tag of the newest orders
        self._reports: list[SegmentReport] = []
        self.lock = threading.RLock()  # of the link: the loop's, and that of `beat_for`
        self._turned = time.monotonic()  # when the loop came by last
        self._load: dict[str, Any] = {"spaces": {}}

    def say(self, report: SegmentReport) -> None:
        """Report at the end of this turn; what is said without a manager is found again in what is held."""
        self._reports.append(report)

    def met(self, link: Link) -> None:
        """The manager is there: say who this is, and what is held."""
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
        """The manager is gone."""
        with self.lock:
            self.link, self.alone_since = None, time.monotonic()

    def hear(self, message: Message) -> None:
        """Do what the manager says."""
        try:
            self._obey(message)
        except Exception as error:  # e.g. the job's optimizer cannot be made here: other spaces go on
            log.error("%s cannot do what its manager says", self._desk.name, exc_info=error)

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
        """Say what is to be said: reports, and the heartbeat when it is due."""
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
        """Send the heartbeat of a loop that is busy with one long request, such as a large state.

        Called from another thread.

        After `WORK_SECONDS` in the same request no heartbeat is sent: the manager then counts the server as dead.
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
            with contextlib.suppress(LinkError):  # found again when it is read
                self.link.queue(Message(kind, tag), json.dumps(body).encode())

    def _all(self) -> list[SegmentReport]:
        """Everything that is so, for a manager that may not know."""
        found: list[SegmentReport] = []
        for number, held in self._holdings.spaces.items():
            for holding in held.holdings.values():
                if holding.serves:
                    found.append(SegmentReport(number, Event.READY, holding.index, holding.generation))
                found += self._copies.all_of(holding)
        return found


class Load:
    """Makes one heartbeat after another."""

    def __init__(self) -> None:
        self._cpu, self._at = time.process_time(), time.monotonic()

    def now(self, holdings: Assignments, connections: int, waits: Callable[[int], tuple[int, int]]) -> dict[str, Any]:
        """A heartbeat; `waits(space)` = its requests that had to wait for the quota, its bytes that wait now."""
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
