"""The manager's state, and how reports, decisions and time change it. No threads, no locks.

After every change `apply_decisions` applies decisions until there are none. Then it calls `commit`, which writes the
record, sends orders to servers and sends maps to workers. The record is written first, so that a restarted manager
knows every generation of a segment that any process has received.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from rayps.ps.manager.assign_segments import (
    UP,
    Balance,
    Decision,
    DropCopy,
    GroupFacts,
    HandOver,
    LeaveServer,
    PlaceSegment,
    Promote,
    Rebalancer,
    RetireServer,
    SegmentAssignment,
    SegmentDecision,
    SegmentId,
    ServerState,
    StartCopy,
    StartServers,
    apply,
    apply_report,
    decide,
    settled,
)
from rayps.ps.manager.launcher import Launcher, PendingServers, StartOrder
from rayps.ps.manager.members import ManagerConnection, ServerMember
from rayps.ps.manager.publisher import Publisher
from rayps.ps.manager.record import GroupRecord, RecordFile, ServerRecord
from rayps.ps.protocol.messages import Event, Role, SegmentOrder

log = logging.getLogger(__name__)

BROKEN_SECONDS = 1.0  # seconds in which a server whose connection broke may connect again
SILENT_SECONDS = 10.0  # seconds in which a silent server may return; segments without a backup wait for the server
AWAY_SECONDS = 5.0  # seconds in which servers must find a restarted manager
GATHER_SECONDS = 30.0  # longest time in seconds that moves wait for servers that are being started
RETRY_COPY_SECONDS = 1.0  # seconds until a failed copy is tried again
EVENTS = 200  # number of events in the group's facts


class GroupState:
    """A group's servers, segments and events, as its manager knows them."""

    def __init__(
        self,
        record: GroupRecord,
        file: RecordFile,
        publisher: Publisher,
        launcher: Launcher,
        balance: Balance | None,
        silence: float,
    ):
        self.record, self.launcher, self.publisher = record, launcher, publisher
        self._file, self._balance, self._silence = file, Rebalancer(balance), silence
        self.members = {name: ServerMember(name, server, ServerState.AWAY) for name, server in record.servers.items()}
        self.pending = PendingServers()
        self.begun: dict[tuple[SegmentId, str], float] = {}  # (segment, server) -> when the copy or hand-over began
        self.events: deque[dict[str, Any]] = deque(maxlen=EVENTS)
        self.departed: deque[tuple[float, ServerMember]] = deque(maxlen=16)  # dead servers, and when they were removed
        self.changed = False  # whether `apply_decisions` must be called
        self._failed_copies: dict[tuple[str, str], float] = {}  # a primary and a server -> when to try again
        self.ending: frozenset[str] = frozenset()  # ids of hosts that will end
        self._gather_until, self._gather_most = 0.0, math.inf  # when moves begin, and when they begin at the latest
        self._sizes: dict[SegmentId, int] = {}  # segment -> its bytes, as its primary last reported
        self._ticked = time.monotonic()

    @property
    def segments(self) -> dict[SegmentId, SegmentAssignment]:
        """All segments of all spaces, grouped by space."""
        return self.record.segments

    def event(self, kind: str, message: str, **facts: Any) -> None:
        """Add an event to the group's facts."""
        self.events.append({"time": time.time(), "kind": kind, "message": message, **facts})
        log.info("%s: %s", self.record.name, message)

    def count(self, what: str, by: int = 1) -> None:
        """Increase one of the counts in the group's facts."""
        self.record.counts[what] = self.record.counts.get(what, 0) + by

    def group_facts(self) -> GroupFacts:
        """Return the present facts about the group, on which `decide` decides."""
        silent = any(member.state == ServerState.SILENT for member in self.members.values())
        expected = bool(self.pending) or silent  # a silent server will return or be replaced
        return GroupFacts(
            tuple(member.facts for member in self.members.values()),
            tuple(self.segments.values()),
            self.record.wanted,
            self.record.replicas,
            len(self.pending),
            expected and time.monotonic() < self._gather_until,
            self.record.placed_by_load,
            frozenset(self._failed_copies),
            frozenset((id_, name) for name, member in self.members.items() for id_ in member.sent.dropping),
        )

    def settled(self) -> bool:
        """Return whether all segments are where they belong, and the wanted number of servers is alive."""
        return not self.pending and settled(self.group_facts())

    # ---- messages of servers

    def registered(self, connection: ManagerConnection, body: dict[str, Any]) -> bool:
        """Add a server that sent REGISTER.

        Return False if the group does not know the server, or has replaced it. Its process is then ended: a manager
        that died may have started it, and it would look for its manager as long as the group exists.
        """
        name = str(body["name"])
        record = ServerRecord(body["address"], body.get("host", ""), int(body.get("pid", 0)), node=body.get("node", ""))
        member = self.members.get(name)
        if self.pending.registered(name):
            member = self.members[name] = ServerMember(name, record, ServerState.ALIVE)
            self.members = dict(
                sorted(self.members.items(), key=lambda item: _read_number(item[0]))
            )  # the oldest first
            self.event("server_joined", f"{name} on {record.host or 'this host'} has joined the group", server=name)
        elif member is None or member.state == ServerState.DEAD:
            self.launcher.end(name, record.node)
            return False
        elif member.state != ServerState.ALIVE:
            self._is_back(member, "is connected again")
        connection.server = name
        record.leaving = member.record.leaving
        member.register(connection, record)
        self.record.servers[name] = record
        for space, rows in body.get("holds", {}).items():
            if int(space) not in self.record.spaces:
                self.publisher.forget(member, int(space))
            for index, *_ in rows:
                if (int(space), index) in self.segments:  # the server holds an older generation: it will get an order
                    member.sent.orders[int(space), index] = SegmentOrder(index, Role.COPY, -1, {})
        self.changed = True
        return True

    def heartbeat(self, member: ServerMember, load: dict[str, Any]) -> None:
        """Record the load in a server's HEARTBEAT."""
        self.alive(member)
        member.load.heartbeat(load, time.monotonic())
        for space in member.load.spaces.keys() - self.record.spaces.keys():
            self.publisher.forget(member, space)
        self._sizes |= {id_: segment.bytes for id_, segment in member.load.segments.items() if id_ in self.segments}

    def alive(self, member: ServerMember) -> None:
        """Record that a server has sent a message; a silent server is alive again."""
        member.last_message = time.monotonic()
        if member.state == ServerState.SILENT and not member.broken:
            self._is_back(member, "responds again")
            member.become(ServerState.LEAVING if member.record.leaving else ServerState.ALIVE)
            self.changed = True

    def _is_back(self, member: ServerMember, how: str) -> None:
        if member.counted:  # undo the count: a server that returned did not die
            self.count("deaths", -1)
            member.counted = False
        self.event("server_back", f"{member.name} {how}", server=member.name)

    def reported(self, member: ServerMember, tag: int, space: int, events: Iterable[list[Any]]) -> None:
        """Apply a server's REPORT about its segments. `tag`: the tag of the last ORDERS that the server received."""
        self.alive(member)
        dropped = False
        for what, index, generation, name in events:
            before = self.segments.get((space, index))
            if before is None:
                continue
            if what == Event.DROPPED:
                if member.sent.dropping.get(before.id, tag + 1) <= tag:
                    del member.sent.dropping[before.id]
                    self.changed = True
                continue
            if what == Event.SYNCED and 0 < tag < member.sent.first.get((before.id, name), 0):
                continue  # the report is about a backup that was since dropped and ordered again
            segment = apply_report(before, member.name, what, generation, name)
            if segment is before:
                continue
            self.segments[segment.id] = segment
            self.changed = True
            if what == Event.SYNCED:
                self.count("copies_made")
                self.count("copied_bytes", self.size(segment))
                self.begun.pop((segment.id, name), None)
            elif what in (Event.COPY_LOST, Event.ASKED):
                dropped = True
                if what == Event.COPY_LOST:
                    self._failed_copies[member.name, name] = time.monotonic() + RETRY_COPY_SECONDS
        if dropped:
            self.commit()  # the primary must get orders without the backup before it gets orders with it again
            self.changed = True

    def lost(self, member: ServerMember, why: str, *, broken: bool) -> None:
        """Mark a server as SILENT, so that backups take over at once. `broken`: the server's connection broke."""
        if member.state in (ServerState.SILENT, ServerState.DEAD):
            member.broken = member.broken or broken
            return
        if member.state != ServerState.AWAY:
            self.count("deaths")
            member.counted = True
            self.event("server_lost", f"{member.name} is lost: {why}", server=member.name)
        member.broken = broken
        member.become(ServerState.SILENT)
        self.gather()
        self.changed = True

    # ---- time

    def tick(self) -> None:
        """Apply the deadlines of silent, away and starting servers, and the balance of load."""
        now = time.monotonic()
        if now - self._ticked > self._silence / 2:  # this process was suspended, so it read no heartbeats
            for member in self.members.values():
                member.last_message += now - self._ticked
        self._ticked = now
        for member in self.members.values():
            since = now - member.since
            if member.state in UP and now - member.last_message > self._silence:
                why = f"no heartbeat for {self._silence:g} s (the limit is set by `rayps servers start --silence`)"
                self.lost(member, why, broken=False)
            elif member.state == ServerState.AWAY and since > AWAY_SECONDS:
                self.lost(member, "the server did not connect to the restarted manager", broken=True)
            elif member.state == ServerState.SILENT and since > (BROKEN_SECONDS if member.broken else SILENT_SECONDS):
                self._give_up(member)
        self._start_next()
        for name in self.pending.late(now):
            self.launcher.end(name)
            self.changed = True
        if self._gather_until and now > self._gather_until:
            self._gather_until, self.changed = 0.0, True
        if not any(member.state == ServerState.LEAVING for member in self.members.values()):
            self._gather_most = math.inf
        for pair in [pair for pair, until in self._failed_copies.items() if until < now]:
            del self._failed_copies[pair]
            self.changed = True
        if self._balance.due(now) and self.record.resizing is None:  # a new server has no load yet
            self._rebalance(now)

    def _give_up(self, member: ServerMember) -> None:
        self.event("server_dead", f"{member.name} did not return: the server is replaced", server=member.name)
        member.become(ServerState.DEAD)
        if member.connection is not None:
            self.publisher.connections.drop(member.connection)
            member.connection = None
        self.launcher.end(member.name, member.record.node)
        self.gather()
        self.changed = True

    def _rebalance(self, now: float) -> None:
        servers = [member.name for member in self.members.values() if member.state == ServerState.ALIVE]
        at = {each.id: each.primary for each in self.segments.values() if each.primary in servers and each.primary}
        loads = {id_: self.members[server].load.rate(*id_) for id_, server in at.items()}
        for id_, server in self._balance.choose_moves(loads, at, servers, now).items():
            self.record.placed_by_load[id_] = server
            self.event(
                "hot_segment",
                f"segment {id_[1]} of space {self.record.spaces[id_[0]].name!r} ({loads[id_]:.0f} operations/s) moves "
                f"from {at[id_]} to {server}, which has less load",
                server=server,
            )
            self.changed = True

    # ---- decisions

    def apply_decisions(self) -> None:
        """Apply decisions until there are none, then `commit`."""
        staying = {member.name for member in self.members.values() if member.facts.stays}
        placed = self.record.placed_by_load
        self.record.placed_by_load = {i: name for i, name in placed.items() if i in self.segments and name in staying}
        for _ in range(100):  # a limit, in case decisions undo each other because of a bug
            decisions = decide(self.group_facts())
            if not decisions:
                break
            for decision in decisions:
                self._apply(decision)
        else:
            log.error("%s: there are still decisions after 100 rounds of them: %s", self.record.name, decisions[:3])
        if self.record.resizing is not None and self.settled():
            before, now = self.record.resizing
            self.record.resizing = None
            self.pending.settled()
            self.event("resized", f"the group was resized from {before} to {now} servers", servers=now)
        self.commit()

    def commit(self) -> None:
        """Write the record, then send orders and maps that changed."""
        self.changed = False
        self.publisher.update_maps(self.record, self.members)
        self._file.write(self.record)
        self.publisher.send_orders(self.record, self.members)
        self.publisher.publish()

    def _apply(self, decision: Decision) -> None:
        match decision:
            case StartServers(count):
                # a replacement starts at once; an additional server starts gently, without slowing the workers down
                gently = self.record.resizing is not None and all(each.connected for each in self.members.values())
                for _ in range(count):
                    self.pending.add(f"server-{self.record.next_server}", gently=gently)
                    self.record.next_server += 1
                self._start_next()
            case LeaveServer(name):
                self.leave(name)
            case RetireServer(name):
                self._retire(name)
            case _:
                self._apply_to_segment(decision)

    def gather(self) -> None:
        """Delay moves until the servers that will be started have registered, for GATHER_SECONDS at most."""
        self._gather_until = min(time.monotonic() + GATHER_SECONDS, self._gather_most)

    def _start_next(self) -> None:
        """Start the servers that are due; servers that start gently start one after the other."""
        for name, gently in self.pending.due():
            if gently:
                self.gather()
            record, placed = self.record, {other.name: other.record.node for other in self.members.values()}
            self.launcher.start(
                StartOrder(name, record.name, record.secret, self.publisher.address, gently, placed, self.ending)
            )

    def start_failed(self, name: str, reason: str) -> None:
        """Record that a server could not be started; another server is started later."""
        if self.pending.failed(name):
            self.event("server_not_started", f"{name} did not start ({reason}): another server is started", server=name)

    def leave(self, name: str, *, seconds: float = math.inf) -> None:
        """Mark a server as leaving: its segments move to other servers, and then it ends.

        The moves wait for servers that are being started, but at most `seconds`.
        """
        member = self.members[name]
        self._gather_most = min(self._gather_most, time.monotonic() + seconds)
        self.gather()
        member.record.leaving = True
        if member.state == ServerState.ALIVE:
            member.become(ServerState.LEAVING)
        self.event("server_leaving", f"{name} leaves: its segments move to other servers, then it ends", server=name)
        self.changed = True

    def _retire(self, name: str) -> None:
        member = self.members.pop(name)
        self.record.servers.pop(name, None)
        if member.state == ServerState.LEAVING:
            self.event("server_left", f"{name} has no segments left and has ended", server=name)
        else:
            self.departed.append((time.time(), member))
        if member.connection is not None:
            self.publisher.connections.drop(member.connection)
        self.launcher.end(name, member.record.node)

    def _apply_to_segment(self, decision: SegmentDecision) -> None:
        segment = self.segments[decision.segment]
        self.segments[segment.id] = apply(segment, decision)
        space = self.record.spaces[segment.space].name
        match decision:
            case PlaceSegment(_, server, True):
                why = f"{segment.primary} died, and no server had a backup"
                if segment.primary is None:
                    why = "the space that it branches from was closed before the segment had started"
                self.count("lost")
                self.event(
                    "segment_lost",
                    f"segment {segment.index} of space {space!r} is lost: {why}. The segment starts empty on {server} "
                    "and must be loaded from a checkpoint. A group that is started with replicas=1 loses no segment "
                    "when one server dies",
                    space=space,
                    segment=segment.index,
                )
            case Promote(_, _, _, "died"):
                self.count("promotions")
            case Promote(_, server, _, "moved"):
                self.count("moves")
                self.count("moved_bytes", self.size(segment))
            case StartCopy(id_, server) | HandOver(id_, server):
                self.begun[id_, server] = time.monotonic()
            case DropCopy(id_, server):
                self.begun.pop((id_, server), None)

    # ---- segments

    def close_space(self, number: int) -> None:
        """Remove a space and its segments from the record and from all servers."""
        record = self.record
        del record.spaces[number]
        record.versions.pop(number, None)
        record.incarnations.pop(number, None)
        record.segments = {id_: segment for id_, segment in record.segments.items() if id_[0] != number}
        self.begun = {key: at for key, at in self.begun.items() if key[0][0] != number}
        self._sizes = {id_: size for id_, size in self._sizes.items() if id_[0] != number}
        self.publisher.close_space(number)
        for member in self.members.values():
            if number in member.sent.spaces:
                self.publisher.forget(member, number)
        self.changed = True

    def of_space(self, number: int) -> list[SegmentAssignment]:
        """Return the segments of a space, in order."""
        return [segment for segment in self.segments.values() if segment.space == number]

    def size(self, segment: SegmentAssignment) -> int:
        """Return the bytes of a segment, or 0 while the size of a table's segment is not known."""
        known = self._sizes.get(segment.id)
        space = self.record.spaces[segment.space]
        if known is not None or space.layout is None or segment.index >= len(space.cuts):
            return known or 0
        lo, hi = space.cuts[segment.index]
        return (hi - lo) * space.layout.dtype.itemsize


def _read_number(server: str) -> int:
    return int(server.rpartition("-")[2])
