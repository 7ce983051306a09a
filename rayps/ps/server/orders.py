"""What a server registers with its manager, hears from it, and reports.

While the manager is away the server serves on with the orders that it has. Connecting is another thread's business,
for it waits.
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
from rayps.ps.protocol.messages import Event, GroupMessage
from rayps.ps.protocol.space import Space
from rayps.ps.server.assignments import Assignments, SegmentOrder, SegmentReport
from rayps.ps.server.replication import Replication

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
