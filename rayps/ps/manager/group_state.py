"""The manager's state, and how it changes: servers are heard, decisions are made and carried out. No threads, no locks.

Everything ends in `think`: decide until there is nothing to decide, then `commit`: write the record, tell the servers
what changed for them, tell the workers where their segments are. In this order, so that nobody hears of a generation
that a manager which begins again would not know.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from rayps.ps.manager.assignment import SeatId, SegmentAssignment, ServerMember, ServerState, hear
from rayps.ps.manager.connections import ManagerConnection
from rayps.ps.manager.decide import (
    Balance,
    Decision,
    DropCopy,
    GroupFacts,
    HandOver,
    LeaveServer,
    OfSeat,
    PlaceSegment,
    Promote,
    Rebalancer,
    RetireServer,
    StartCopy,
    StartServers,
    apply,
    decide,
    settled,
)
from rayps.ps.manager.launcher import Launcher, PendingServers
from rayps.ps.manager.publisher import Publisher
from rayps.ps.manager.record import GroupRecord, RecordFile, SentOrder
from rayps.ps.protocol.messages import Event

log = logging.getLogger(__name__)

BROKEN_SECONDS = 1.0  # a server whose connection broke may connect again within this
SILENT_SECONDS = 10.0  # one that says nothing may speak again within this; until then only it has what has no copy
AWAY_SECONDS = 5.0  # after a manager began again, for the servers to find it
GATHER_SECONDS = 30.0  # how long moves wait for servers that were ordered together
APART_SECONDS = 1.0  # until a copy that could not be made is tried again
EVENTS = 200


class GroupState:
    """Servers, seats, and what follows from what is heard."""

    def __init__(
        self,
        record: GroupRecord,
        book: RecordFile,
        tongue: Publisher,
        crew: Launcher,
        balance: Balance | None,
        silence: float,
    ):
        self.record, self.crew, self.tongue = record, crew, tongue
        self._book, self._balance, self._silence = book, Rebalancer(balance), silence
        self.members: dict[str, ServerMember] = {}
        self.seats: dict[SeatId, SegmentAssignment] = {
            seat.id: seat for seats in record.seats.values() for seat in seats
        }
        self.pending = PendingServers()
        self.begun: dict[tuple[SeatId, str], float] = {}  # when a copy, or a handing over, began
        self.events: deque[dict[str, Any]] = deque(maxlen=EVENTS)
        self.departed: deque[tuple[float, ServerMember]] = deque(maxlen=16)
        self.changed = False  # something is to be written, and told
        self._apart: dict[tuple[str, str], float] = {}
        self._gather_until = 0.0
        self._sizes: dict[SeatId, int] = {}  # as its primary, whoever it was, said last
        self._ticked = time.monotonic()
        for name, told in record.servers.items():
            member = ServerMember(name, ServerState.AWAY, told.address, told.host, told.pid, leaving=told.leaving)
            member.become(ServerState.AWAY)
            self.members[name] = member

    def event(self, kind: str, message: str, **facts: Any) -> None:
        """Something that whoever runs the group would want to know."""
        self.events.append({"time": time.time(), "kind": kind, "message": message, **facts})
        log.info("%s: %s", self.record.name, message)

    def count(self, what: str, by: int = 1) -> None:
        """One of the counts in the facts."""
        self.record.counts[what] = self.record.counts.get(what, 0) + by

    def view(self) -> GroupFacts:
        """What decisions are made of."""
        silent = any(
            member.state == ServerState.SILENT for member in self.members.values()
        )  # it comes back, or is replaced
        expected = bool(self.pending) or silent
        return GroupFacts(
            tuple(member.server for member in self.members.values()),
            tuple(self.seats.values()),
            self.record.wanted,
            self.record.replicas,
            len(self.pending),
            expected and time.monotonic() < self._gather_until,
            self.record.placed_by_load,
            frozenset(self._apart),
        )

    def settled(self) -> bool:
        """See `rayps.ps.manager.decide.settled`."""
        return not self.pending and settled(self.view())

    # ---- what is heard

    def registered(self, caller: ManagerConnection, told: dict[str, Any]) -> bool:
        """A server is here, for the first time or again; False = it is not one of ours (any more)."""
        name = str(told["name"])
        member = self.members.get(name)
        if self.pending.registered(name):
            member = self.members[name] = ServerMember(name, ServerState.ALIVE)
            self.members = dict(sorted(self.members.items(), key=lambda item: _age(item[0])))  # the oldest first
            self.event("server_joined", f"{name} is there, on {told.get('host') or 'this host'}", server=name)
        elif member is None or member.state == ServerState.DEAD:
            return False
        elif member.state != ServerState.ALIVE:
            self._is_back(member, "is connected again")
        caller.server = name
        member.joined(caller, told)
        member.become(ServerState.LEAVING if member.leaving else ServerState.ALIVE)
        self.record.servers[name] = SentOrder(member.address, member.host, member.pid, member.leaving)
        self._holds(member, {int(space): rows for space, rows in told.get("holds", {}).items()})
        self.changed = True
        return True

    def _holds(self, member: ServerMember, holds: dict[int, Any]) -> None:
        for space, rows in holds.items():
            if space not in self.record.spaces:
                self.tongue.forget(member, space)
            for index, *_ in rows:
                if (space, index) in self.seats:
                    member.told[space, index] = ("unknown", -1, (), False)  # whatever it is to be, it is told

    def beat(self, member: ServerMember, load: dict[str, Any]) -> None:
        """A heartbeat."""
        self.heard(member)
        for space in member.beat(load):
            if space not in self.record.spaces:
                self.tongue.forget(member, space)
                member.forget(space)
        self._sizes.update({seat: size for seat, size in member.sizes() if seat in self.seats})

    def heard(self, member: ServerMember) -> None:
        """A sign of life."""
        member.heard = time.monotonic()
        if member.state == ServerState.SILENT and not member.broken:
            self._is_back(member, "speaks again")
            member.become(ServerState.LEAVING if member.leaving else ServerState.ALIVE)
            self.changed = True

    def _is_back(self, member: ServerMember, how: str) -> None:
        if member.counted:  # one that came back was not lost
            self.count("deaths", -1)
            member.counted = False
        self.event("server_back", f"{member.name} {how}", server=member.name)

    def reported(self, member: ServerMember, tag: int, space: int, events: Iterable[list[Any]]) -> None:
        """What a server says about its segments."""
        self.heard(member)
        dropped = False
        for what, index, generation, name in events:
            before = self.seats.get((space, index))
            if before is None:
                continue
            if what == Event.SYNCED and 0 < tag < member.added.get((before.id, name), 0):
                continue  # it speaks of a copy that was dropped and ordered again since
            seat = hear(before, member.name, what, generation, name)
            if seat is before:
                continue
            self._replace(seat)
            self.changed = True
            if what == Event.SYNCED:
                self.count("copies_made")
                self.count("copied_bytes", self.size(seat))
                self.begun.pop((seat.id, name), None)
            elif what in (Event.COPY_LOST, Event.ASKED):
                dropped = True
                pair = (member.name, name) if what == Event.COPY_LOST else None
                if pair is not None:
                    self._apart[pair] = time.monotonic() + APART_SECONDS
        if dropped:
            self.commit()  # the primary hears that the copy is gone before it hears of it again
            self.changed = True

    def lost(self, member: ServerMember, why: str, *, broken: bool) -> None:
        """A server is gone, as far as can be seen: what others have is taken over at once."""
        if member.state in (ServerState.SILENT, ServerState.DEAD):
            member.broken = member.broken or broken
            return
        if member.state != ServerState.AWAY:
            self.count("deaths")
            member.counted = True
            gone = "is gone" if broken else "is taken for dead"
            self.event("server_lost", f"{member.name} {gone}: {why}", server=member.name)
        member.broken = broken
        member.become(ServerState.SILENT)
        self.gather()
        self.changed = True

    def tick(self) -> None:
        """What time alone changes."""
        now = time.monotonic()
        if now - self._ticked > self._silence / 2:  # it was this process that did not run: nobody was listened to
            for member in self.members.values():
                member.heard += now - self._ticked
        self._ticked = now
        for member in self.members.values():
            since = now - member.since
            if member.state in (ServerState.ALIVE, ServerState.LEAVING) and now - member.heard > self._silence:
                self.lost(member, f"silent for {self._silence:g} s (`rayps servers start --silence`)", broken=False)
            elif member.state == ServerState.AWAY and since > AWAY_SECONDS:
                self.lost(member, "it did not come back", broken=True)
            elif member.state == ServerState.SILENT and since > (BROKEN_SECONDS if member.broken else SILENT_SECONDS):
                self._bury(member)
        self._order_next()
        for name in self.pending.late(now):
            self.crew.end(name)
            self.changed = True
        if self._gather_until and now > self._gather_until:
            self._gather_until, self.changed = 0.0, True
        for pair in [pair for pair, until in self._apart.items() if until < now]:
            del self._apart[pair]
            self.changed = True
        if self._balance.due(now):
            self._rebalance(now)

    def start_failed(self, name: str, reason: str) -> None:
        """A server could not be started: another one is tried a little later."""
        if self.pending.failed(name):
            self.event("server_not_started", f"{name} could not be started: {reason}", server=name)

    def _bury(self, member: ServerMember) -> None:
        self.event("server_dead", f"{member.name} does not come back: it is replaced", server=member.name)
        member.become(ServerState.DEAD)
        if member.caller is not None:
            self.tongue.hang_up(member.caller)
            member.caller = None
        self.crew.end(member.name)
        self.gather()
        self.changed = True

    def _rebalance(self, now: float) -> None:
        if self.record.resizing is not None:
            return  # a server that has just come has no load because nothing has moved to it yet
        servers = [member.name for member in self.members.values() if member.state == ServerState.ALIVE]
        at = {seat.id: seat.primary for seat in self.seats.values() if seat.primary in servers}
        loads = {seat: self.members[server].rate(*seat) for seat, server in at.items() if server is not None}
        named = {seat: server for seat, server in at.items() if server is not None}
        for seat, server in self._balance.shed(loads, named, servers, now).items():
            self.record.placed_by_load[seat] = server
            self.event(
                "hot_segment",
                f"segment {seat[1]} of {self.record.spaces[seat[0]].name!r} ({loads[seat]:.0f} touches/s) goes from "
                f"{named[seat]} to {server}, which has less to do",
                server=server,
            )
            self.changed = True

    # ---- what follows

    def think(self) -> None:
        """Decide until nothing is left to decide, then write and tell it."""
        names = {
            member.name for member in self.members.values() if member.state in (ServerState.ALIVE, ServerState.AWAY)
        }
        held = self.record.placed_by_load
        self.record.placed_by_load = {seat: name for seat, name in held.items() if seat in self.seats and name in names}
        for _ in range(100):  # a bound, should decisions ever undo each other
            decisions = decide(self.view())
            if not decisions:
                break
            for decision in decisions:
                self._do(decision)
        else:
            log.error("%s: decisions do not come to an end: %s", self.record.name, decisions[:3])
        if self.record.resizing is not None and self.settled():
            was, now = self.record.resizing
            self.record.resizing = None
            self.pending.settled()
            self.event("resized", f"resized from {was} to {now} servers", servers=now)
        self.commit()

    def commit(self) -> None:
        """Write the record, and tell everyone what changed for him."""
        self.changed = False
        self.tongue.draw_maps(self.record, self.seats.values(), self.members)
        self.record.seats = {number: [] for number in self.record.spaces}
        for seat in self.seats.values():
            self.record.seats[seat.space].append(seat)
        self._book.write(self.record)
        self.tongue.order(self.record, self.seats, self.members)
        self.tongue.publish()

    def _do(self, decision: Decision) -> None:
        match decision:
            case StartServers(count):
                self._start(count)
            case LeaveServer(name):
                self.leave(name)
            case RetireServer(name):
                self._retire(name)
            case _:
                self._do_to_seat(decision)

    def gather(self) -> None:
        """Servers will be started: moves wait for them, but not for long."""
        self._gather_until = time.monotonic() + GATHER_SECONDS

    def _start(self, count: int) -> None:
        # one that replaces another is wanted at once; one that comes on top does not disturb whoever trains there
        gently = self.record.resizing is not None and all(member.there for member in self.members.values())
        for _ in range(count):
            name = f"server-{self.record.next_server}"
            self.record.next_server += 1
            self.pending.add(name, gently=gently)
        self._order_next()

    def _order_next(self) -> None:
        """Begin the servers that are to start; those that start gently one after the other."""
        for name, gently in self.pending.due():
            more = {}
            if gently:
                more["gently"] = True
                self.gather()
            self.crew.start(name, self.record.name, self.record.secret, self.tongue.address, **more)

    def leave(self, name: str) -> None:
        """A server is to be emptied, then ended."""
        member = self.members[name]
        member.leaving = True
        self.record.servers[name].leaving = True
        if member.state == ServerState.ALIVE:
            member.become(ServerState.LEAVING)
        self.event("server_leaving", f"{name} is emptied, then ended", server=name)
        self.changed = True

    def _retire(self, name: str) -> None:
        member = self.members.pop(name)
        self.record.servers.pop(name, None)
        if member.state == ServerState.LEAVING:
            self.event("server_left", f"{name} is empty and has ended", server=name)
        else:
            self.departed.append((time.time(), member))
        if member.caller is not None:
            self.tongue.hang_up(member.caller)
        self.crew.end(name)

    def _do_to_seat(self, decision: OfSeat) -> None:
        seat = self.seats[decision.seat]
        self._replace(apply(seat, decision))
        space = self.record.spaces[seat.space].name
        match decision:
            case PlaceSegment(_, server, True):
                self.count("lost")
                self.event(
                    "segment_lost",
                    f"segment {seat.index} of space {space!r} is lost: {seat.primary} died and nobody had a copy; it "
                    f"begins empty on {server} and must be loaded from a checkpoint. A group that is started with "
                    "replicas=1 loses nothing when one server dies",
                    space=space,
                    segment=seat.index,
                )
            case Promote(_, _, _, "died"):
                self.count("promotions")
            case Promote(_, server, _, "moved"):
                self.count("moves")
                self.count("moved_bytes", self.size(seat))
            case StartCopy(id_, server) | HandOver(id_, server):
                self.begun[id_, server] = time.monotonic()
            case DropCopy(id_, server):
                self.begun.pop((id_, server), None)

    def _replace(self, seat: SegmentAssignment) -> None:
        self.seats[seat.id] = seat

    def forget_sizes(self, space: int) -> None:
        """A space is closed."""
        self._sizes = {seat: size for seat, size in self._sizes.items() if seat[0] != space}

    def size(self, seat: SegmentAssignment) -> int:
        """Bytes of a segment, as far as they were said."""
        known = self._sizes.get(seat.id)
        space = self.record.spaces[seat.space]
        if known is not None or space.layout is None or seat.index >= len(space.cuts):
            return known or 0
        lo, hi = space.cuts[seat.index]
        return (hi - lo) * space.layout.dtype.itemsize


def _age(server: str) -> int:
    return int(server.rpartition("-")[2])
