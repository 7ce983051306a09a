"""A manager's connections, and the messages that it sends: orders and spaces to servers, maps to workers.

Each message of orders to a server has only the changes since the last one over the same connection. One thread waits
for messages and reads them; any thread that holds the manager's lock may send.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import select
import socket
from collections.abc import Mapping
from typing import Any

from rayps_client.errors import LinkError, NotFound

from rayps.comm.link import Listener, Message
from rayps.ps.manager.assign_segments import UP, SegmentAssignment, SegmentId, ServerState
from rayps.ps.manager.members import ManagerConnection, ServerMember
from rayps.ps.manager.record import GroupRecord
from rayps.ps.protocol.messages import GroupMessage, Role, SegmentOrder, make_refusal
from rayps.ps.protocol.segment_map import SegmentHolders, SpaceMap

HEARTBEAT_SECONDS = 0.1  # time between two heartbeats of a server


class ManagerConnections:
    """All connections of a manager, and a wakeup for the thread that waits on them."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._open: dict[int, ManagerConnection] = {}  # descriptor -> connection
        self._wakeup, self._waker = socket.socketpair()
        self._wakeup.setblocking(False)
        self._waker.setblocking(False)
        self._poll = select.poll()
        for descriptor in (listener.fileno(), self._wakeup.fileno()):
            self._poll.register(descriptor, select.POLLIN)

    @property
    def all(self) -> list[ManagerConnection]:
        """Return all open connections."""
        return list(self._open.values())

    def wake(self) -> None:
        """End the wait of the thread that is in `wait`. Any thread may call this."""
        with contextlib.suppress(OSError):  # full: a wakeup is pending; closed: no thread waits
            self._waker.send(b"!")

    def prepare(self) -> None:
        """Prepare the next `wait`, which will also end when a connection can send queued bytes.

        Call this while holding the manager's lock.
        """
        for descriptor, connection in self._open.items():
            events = connection.link.interest if connection.link.queued else 0
            self._poll.register(descriptor, select.POLLIN | events)

    def wait(self, seconds: float) -> list[int]:
        """Wait at most `seconds`; return the descriptors with events. Call this without holding the manager's lock."""
        return [descriptor for descriptor, _ in self._poll.poll(int(seconds * 1000))]

    def read(self, ready: list[int]) -> list[tuple[ManagerConnection, list[Message] | None]]:
        """Accept connections, read messages and send queued bytes. Call this while holding the manager's lock.

        Return the connections that were read, each with its messages, or with None if the connection is lost.
        """
        found: list[tuple[ManagerConnection, list[Message] | None]] = []
        with contextlib.suppress(BlockingIOError):
            self._wakeup.recv(4096)
        active = set(ready) & self._open.keys()
        while (link := self._listener.accept_ready()) is not None:
            self._open[link.fileno()] = ManagerConnection(link)
            active.add(link.fileno())  # the first message may have come along with the handshake
        for descriptor, connection in list(self._open.items()):
            if descriptor not in active and not connection.lost:
                continue
            try:
                connection.link.absorb()
                messages = connection.link.feed()  # the last call: data that is absorbed after it would remain unread
                connection.link.flush()
                if connection.lost and not messages:
                    raise LinkError("lost")
                found.append((connection, messages))
            except LinkError:
                self.drop(connection)
                found.append((connection, None))
        return found

    def drop(self, connection: ManagerConnection) -> None:
        """Close a connection."""
        for descriptor, other in list(self._open.items()):
            if other is connection:
                del self._open[descriptor]
                with contextlib.suppress(KeyError):  # a connection is not registered before the first wait
                    self._poll.unregister(descriptor)
        connection.lost = True
        connection.link.close()

    def close(self) -> None:
        """Send the queued bytes that can be sent without waiting, and close all connections."""
        for connection in self.all:
            with contextlib.suppress(LinkError):
                connection.link.flush()
            self.drop(connection)
        self._wakeup.close()
        self._waker.close()


class Publisher:
    """Sends orders and spaces to servers, and maps to workers, for the manager at `address`."""

    def __init__(self, connections: ManagerConnections, address: str) -> None:
        self.address = address
        self.connections = connections
        self.maps: dict[int, SpaceMap] = {}
        self._changed: set[int] = set()  # spaces whose map is to be sent to its watchers

    # ---- servers

    def welcome(self, connection: ManagerConnection) -> None:
        """Send WELCOME to a server that has registered."""
        connection.send(Message(GroupMessage.WELCOME), _encode_json({"heartbeat": HEARTBEAT_SECONDS}))

    def forget(self, member: ServerMember, space: int) -> None:
        """Order a server to drop a closed space."""
        member.forget(space)
        if member.connection is not None:
            member.connection.send(Message(GroupMessage.FORGET, a=space))

    def send_orders(self, record: GroupRecord, members: Mapping[str, ServerMember]) -> None:
        """Send each connected server the orders that differ from the orders sent to it before."""
        wanted: dict[str, dict[SegmentId, SegmentOrder]] = {name: {} for name in members}
        for segment in record.segments.values():
            addresses = {name: members[name].record.address for name in segment.copies if name in members}
            for name in segment.holders:
                if name in wanted:
                    role = segment.role(name)
                    copies = {} if role == Role.COPY else addresses
                    order = SegmentOrder(segment.index, role, segment.generation, copies, segment.lost)
                    wanted[name][segment.id] = order
        for name, member in members.items():
            if member.connection is not None and member.connected:
                self._send_orders(member, member.connection, record, wanted[name])

    def _send_orders(
        self,
        member: ServerMember,
        connection: ManagerConnection,
        record: GroupRecord,
        wanted: dict[SegmentId, SegmentOrder],
    ) -> None:
        sent = member.sent
        changed = {id_: order for id_, order in wanted.items() if sent.orders.get(id_) != order}
        for id_, order in sent.orders.items():
            if id_ not in wanted and id_ in record.segments and order.role != Role.NONE:
                changed[id_] = SegmentOrder(id_[1], Role.NONE, record.segments[id_].generation, {})
        ordered = {space for space, _ in changed}
        for number, space in record.spaces.items():
            if sent.spaces.get(number) is not space and (number in sent.spaces or number in ordered):
                sent.spaces[number] = space  # before the first order about the space, and when its quota changes
                connection.send(Message(GroupMessage.SPACE, a=number), pickle.dumps(space))
        for number in sorted(ordered):
            orders = {id_: order for id_, order in changed.items() if id_[0] == number}
            primaries = [record.segments[id_] for id_, order in orders.items() if order.role == Role.PRIMARY]
            self._send_branches(member, connection, primaries, record)
            sent.tag += 1
            for id_, order in orders.items():
                before = sent.orders[id_].copies if id_ in sent.orders else {}
                sent.first |= {(id_, copy): sent.tag for copy in order.copies if copy not in before}
            sent.orders |= orders
            sent.dropping |= {id_: sent.tag for id_, order in orders.items() if order.role == Role.NONE}
            body = {"space": number, "holdings": list(orders.values())}
            connection.send(Message(GroupMessage.ORDERS, tag=sent.tag), _encode_json(body))

    def _send_branches(
        self,
        member: ServerMember,
        connection: ManagerConnection,
        segments: list[SegmentAssignment],
        record: GroupRecord,
    ) -> None:
        """Send BRANCH for those of `segments` that belong to a branch and have not started.

        The server copies each of them from the parent's segment, of which it is the primary.
        """
        by_spaces: dict[tuple[int, int], list[list[int]]] = {}
        for segment in segments:
            parent = None if segment.parent is None else record.segments.get(segment.parent)
            if parent is not None and not segment.started and not segment.lost and parent.primary == member.name:
                by_spaces.setdefault((segment.space, parent.space), []).append([segment.index, segment.generation])
        for (space, parent_space), rows in by_spaces.items():
            connection.send(Message(GroupMessage.BRANCH, a=space, b=parent_space), _encode_json({"segments": rows}))

    # ---- workers

    def update_maps(self, record: GroupRecord, members: Mapping[str, ServerMember]) -> None:
        """Compute the map of each space. A map that changed gets the next version; `publish` sends it."""
        holders: dict[int, list[SegmentHolders]] = {number: [] for number in record.spaces}
        for segment in record.segments.values():
            member = members.get(str(segment.primary))
            serves = segment.ready and member is not None and member.state in UP | {ServerState.AWAY}
            copies = tuple(name for name in segment.copies if name in segment.synced)
            primary = segment.primary if serves else None
            holders[segment.space].append(SegmentHolders(primary, copies, segment.generation))
        for number, found in holders.items():
            names = {name for each in found for name in (each.primary, *each.copies) if name is not None}
            addresses = {name: members[name].record.address for name in sorted(names) if name in members}
            before = self.maps.get(number)
            if before is None or before.holders != tuple(found) or before.addresses != addresses:
                record.versions[number] = record.versions.get(number, 0) + 1
                self.maps[number] = SpaceMap(record.versions[number], tuple(found), addresses)
                self._changed.add(number)

    def publish(self) -> None:
        """Send maps that changed to the workers that watch them."""
        changed, self._changed = self._changed, set()
        payloads = {number: _encode_json(self.maps[number].to_json()) for number in changed if number in self.maps}
        for connection in self.connections.all if payloads else []:
            for number in connection.watching & payloads.keys():
                connection.send(Message(GroupMessage.MAP, a=number), payloads[number])

    def watch(self, connection: ManagerConnection, number: int) -> None:
        """Send a worker the map of a space now, and each time it changes."""
        found = self.maps.get(number)
        if found is None:
            connection.send(*_answer_not_open(number))
            return
        connection.watching.add(number)
        connection.send(Message(GroupMessage.MAP, a=number), _encode_json(found.to_json()))

    def close_space(self, number: int) -> None:
        """Send the watchers of a closed space an error."""
        self.maps.pop(number, None)
        for connection in self.connections.all:
            if number in connection.watching:
                connection.watching.discard(number)
                connection.send(*_answer_not_open(number))


def _answer_not_open(number: int) -> tuple[Message, bytes]:
    return make_refusal(
        0,
        NotFound(
            f"there is no open space number {number}: it was dropped, or its job has opened it again under a new number"
        ),
    )


def _encode_json(value: Any) -> bytes:
    return json.dumps(value).encode()
