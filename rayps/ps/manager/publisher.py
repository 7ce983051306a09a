"""What a manager tells servers (orders, spaces) and workers (maps): only what changed since it was told last."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

from rayps.comm.link import Message
from rayps.core.errors import NotFound
from rayps.ps.manager.assignment import Order, SeatId, SegmentAssignment, ServerMember, ServerState
from rayps.ps.manager.connections import ManagerConnection, ManagerConnections
from rayps.ps.manager.record import GroupRecord
from rayps.ps.protocol.messages import GroupMessage, Role
from rayps.ps.protocol.segment_map import SegmentHolders, SpaceMap

HEARTBEAT_SECONDS = 0.1
_UP = frozenset({ServerState.ALIVE, ServerState.LEAVING, ServerState.AWAY})


class Publisher:
    """Speaks for the manager at `address`."""

    def __init__(self, wires: ManagerConnections, address: str) -> None:
        self.address = address
        self._wires = wires
        self.maps: dict[int, SpaceMap] = {}
        self._news: set[int] = set()  # spaces whose map nobody was told

    # ---- servers

    def welcome(self, caller: ManagerConnection) -> None:
        """A server that registered."""
        caller.say(Message(GroupMessage.WELCOME), _json({"heartbeat": HEARTBEAT_SECONDS}))

    def forget(self, member: ServerMember, space: int) -> None:
        """A space is closed."""
        if member.caller is not None:
            member.caller.say(Message(GroupMessage.FORGET, a=space))

    def hang_up(self, caller: ManagerConnection) -> None:
        """Part with someone."""
        self._wires.drop(caller)

    def order(
        self, record: GroupRecord, seats: Mapping[SeatId, SegmentAssignment], members: Mapping[str, ServerMember]
    ) -> None:
        """Tell each server what it is to be, as far as it was not told so."""
        wanted: dict[str, dict[SeatId, Order]] = {name: {} for name in members}
        for seat in seats.values():
            copies = tuple((name, members[name].address) for name in seat.copies if name in members)
            for name in seat.holders:
                if name in wanted:
                    role = seat.role(name)
                    wanted[name][seat.id] = (role, seat.generation, () if role == Role.COPY else copies, seat.lost)
        for name, member in members.items():
            if member.there:
                orders = wanted[name]
                news = {id_: order for id_, order in orders.items() if member.told.get(id_) != order}
                for id_, told in member.told.items():
                    if id_ not in orders and id_ in seats and told[0] != Role.NONE:
                        news[id_] = (Role.NONE, seats[id_].generation, (), False)
                self._order(member, record, seats, news)

    def _order(
        self,
        member: ServerMember,
        record: GroupRecord,
        seats: Mapping[SeatId, SegmentAssignment],
        news: dict[SeatId, Order],
    ) -> None:
        assert member.caller is not None
        for number, space in record.spaces.items():
            if number in member.spaces and member.spaces[number] is not space:  # e.g. another quota
                self._space(member, number, record)
        for number in sorted({space for space, _ in news}):
            if number not in member.spaces:
                self._space(member, number, record)
            rows = {id_: order for id_, order in news.items() if id_[0] == number}
            self._branch(member, [seats[id_] for id_, (role, *_) in rows.items() if role == Role.PRIMARY], seats)
            member.tag += 1
            for id_, order in rows.items():
                before = dict(member.told[id_][2]) if id_ in member.told else {}
                for copy, _ in order[2]:
                    if copy not in before:
                        member.added[id_, copy] = member.tag
                member.told[id_] = order
            body = {"space": number, "holdings": [[id_[1], o[0], o[1], dict(o[2]), o[3]] for id_, o in rows.items()]}
            member.caller.say(Message(GroupMessage.ORDERS, tag=member.tag), _json(body))

    def _space(self, member: ServerMember, number: int, record: GroupRecord) -> None:
        assert member.caller is not None
        member.spaces[number] = record.spaces[number]
        member.caller.say(Message(GroupMessage.SPACE, a=number), pickle.dumps(record.spaces[number]))

    def _branch(
        self, member: ServerMember, seats: list[SegmentAssignment], known: Mapping[SeatId, SegmentAssignment]
    ) -> None:
        """Those that are not born yet begin as what their parent is here."""
        assert member.caller is not None
        by: dict[tuple[int, int], list[list[int]]] = {}
        for seat in seats:
            parent = known.get(seat.parent) if seat.parent is not None else None
            if parent is not None and not seat.born and not seat.lost and parent.primary == member.name:
                by.setdefault((seat.space, parent.space), []).append([seat.index, seat.generation])
        for (space, parent_space), segments in by.items():
            member.caller.say(Message(GroupMessage.BRANCH, a=space, b=parent_space), _json({"segments": segments}))

    # ---- workers

    def draw_maps(
        self, record: GroupRecord, seats: Iterable[SegmentAssignment], members: Mapping[str, ServerMember]
    ) -> None:
        """The maps as they are now; a map that changed has a new version, and is to be published."""
        holdings: dict[int, list[SegmentHolders]] = {number: [] for number in record.spaces}
        for seat in seats:
            member = members.get(str(seat.primary))
            serves = seat.ready and member is not None and member.state in _UP
            copies = tuple(name for name in seat.copies if name in seat.synced)
            holdings[seat.space].append(SegmentHolders(seat.primary if serves else None, copies, seat.generation))
        for number, found in holdings.items():
            names = {name for each in found for name in (each.primary, *each.copies) if name is not None}
            addresses = {name: members[name].address for name in sorted(names) if name in members}
            before = self.maps.get(number)
            if before is None or before.holdings != tuple(found) or before.addresses != addresses:
                record.versions[number] = record.versions.get(number, 0) + 1
                self.maps[number] = SpaceMap(record.versions[number], tuple(found), addresses)
                self._news.add(number)

    def publish(self) -> None:
        """Tell who watches a space its new map."""
        news, self._news = self._news, set()
        payloads = {number: _json(self.maps[number].to_json()) for number in news if number in self.maps}
        for caller in self._wires.callers if payloads else []:
            for number in caller.watching & payloads.keys():
                caller.say(Message(GroupMessage.MAP, a=number), payloads[number])

    def watch(self, caller: ManagerConnection, number: int) -> None:
        """Someone wants to know where a space's segments are, now and from now on."""
        found = self.maps.get(number)
        if found is None:
            caller.say(*_no_space(number))
            return
        caller.watching.add(number)
        caller.say(Message(GroupMessage.MAP, a=number), _json(found.to_json()))

    def close_space(self, number: int) -> None:
        """Its watchers hear that it is no more."""
        self.maps.pop(number, None)
        for caller in self._wires.callers:
            if number in caller.watching:
                caller.watching.discard(number)
                caller.say(*_no_space(number))


def _no_space(number: int) -> tuple[Message, bytes]:
    text = f"there is no open space number {number}: it was dropped, or its job began again under a new number"
    return Message(GroupMessage.ERROR, a=number), _json({"kind": NotFound.__name__, "message": text, "data": {}})


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
