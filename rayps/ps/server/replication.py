"""Replication of segments: the primary's half sends states and changes, the backup's half applies them.

Guarantee: no answer leaves before every backup that was promised its content has acknowledged it.

There is one link for each space and server. Each message carries a tag that counts up, and COPIED names the last one
that was applied. A copy that is *due* was promised everything answered so far, but its state is not sent yet: answers
wait for it. A copy that is *new* was promised nothing until its state is sent: no answer waits for it.

After a promotion, a copy may already have everything: it is then sent only the mark of the state (number of changes,
generation of the last). Two segments with the same mark are equal to the bit, because a generation has one primary. A
copy with another mark refuses it, and is sent the whole state. Raft compares its logs so:
Ongaro and Ousterhout, "In search of an understandable consensus algorithm", USENIX ATC 2014.
"""

from __future__ import annotations

import enum
import logging
import struct
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from rayps.comm.link import Link, Message
from rayps.core.errors import LinkError
from rayps.core.failpoint import passing
from rayps.ps.protocol.messages import Event, GroupMessage, Role, SegmentPayload, pack, read_numbers, unpack
from rayps.ps.server.assignments import AssignedSegment, AssignedSpace, Assignments, SegmentReport
from rayps.ps.server.connection import PeerRequest, ServerPeer

log = logging.getLogger(__name__)

MARK = struct.Struct("<qq")  # changes, generation of the last
NEVER = 1 << 62  # a tag that is not reached
SMALL = 1 << 16  # bytes of a change that is copied once more, to go with others
ROOM = 32 << 20  # bytes that wait on a link before a further state is made


class Stage(enum.Enum):
    """The progress of a copy."""

    NEW = "new"
    DUE = "due"
    SENT = "sent"
    LOST = "lost"


class Peer:
    """The link to one server for one space."""

    def __init__(self, space: int, server: str, address: str) -> None:
        self.space, self.server, self.address = space, server, address
        self.link: Link | None = None
        self.lost = False
        self.sent = 0  # tag of the last message
        self.acked = 0
        self.copies: dict[int, ReplicaCopy] = {}
        self.todo: deque[ReplicaCopy] = deque()  # whose state is to be sent
        self.watched: set[ReplicaCopy] = set()  # to be reported once they have everything
        self.bytes = 0  # of states


class ReplicaCopy:
    """One segment's copy on one server."""

    def __init__(self, holding: AssignedSegment, peer: Peer, stage: Stage, whole: bool) -> None:
        self.holding, self.peer, self.stage = holding, peer, stage
        self.whole = whole  # its state must be sent, and not only the mark
        self.first = NEVER  # tag of its state
        self.tag = 0  # of its last message
        self.synced = False


class Calls(Protocol):
    """The interface of the server that the links call."""

    def dial(self, peer: Peer) -> None:
        """Connect to a peer; `connected` or `lost` is called later."""

    def hang_up(self, peer: Peer) -> None:
        """Close the link to a peer, because it is not needed any more, or has failed."""

    def report(self, report: SegmentReport) -> None:
        """Send the manager a report."""

    def settled(self, space: int, *, anew: bool) -> None:
        """Send the answers of this space whose backups have acknowledged.

        `anew`: the awaited backups may have changed.
        """


class Replication:
    """The backups of one server's primaries."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._peers: dict[tuple[int, str], Peer] = {}
        self.bytes = 0  # of states sent, ever

    # ---- which copies there are

    def want(self, holding: AssignedSegment, servers: dict[str, str], *, anew: bool) -> None:
        """Keep backups on these servers (name -> address) and no others.

        `anew`: from now on the manager takes these backups as complete, so every answer waits for them.
        """
        space = holding.space.number
        for server in [name for name in holding.copies if name not in servers]:
            self._drop(holding, server)
        for server, address in servers.items():
            known: ReplicaCopy | None = holding.copies.get(server)
            if known is not None and not known.peer.lost and known.stage != Stage.LOST:
                if anew:
                    known.whole, known.synced = known.whole and known.stage != Stage.SENT, False
                    self._due(known)
                continue
            promised = anew or (known is not None and known.stage != Stage.NEW)
            peer = self._peer(space, server, address)
            copy = ReplicaCopy(holding, peer, Stage.DUE if promised else Stage.NEW, whole=not anew)
            holding.copies[server] = peer.copies[holding.index] = copy
            peer.todo.append(copy)
            _tell(holding)
            self.pump(peer)
        _tell(holding)
        self._hand(holding)
        self._calls.settled(space, anew=True)

    def drop_all(self, holding: AssignedSegment) -> None:
        """Forget all backups of this segment."""
        for server in list(holding.copies):
            self._drop(holding, server)

    def restate(self, holding: AssignedSegment) -> None:
        """Send each copy the whole state again, because a state was loaded."""
        for copy in holding.copies.values():
            if copy.stage in (Stage.SENT, Stage.DUE):
                copy.whole = True
                self._due(copy)

    def _due(self, copy: ReplicaCopy) -> None:
        copy.stage, copy.first = Stage.DUE, NEVER
        if copy not in copy.peer.todo:
            copy.peer.todo.append(copy)
        self.pump(copy.peer)

    def _peer(self, space: int, server: str, address: str) -> Peer:
        peer = self._peers.get((space, server))
        if peer is not None and peer.address != address:
            self.lost(peer, "it is somewhere else now")
            peer = None
        if peer is None or peer.lost:
            peer = self._peers[space, server] = Peer(space, server, address)
            self._calls.dial(peer)
        return peer

    def _drop(self, holding: AssignedSegment, server: str) -> None:
        copy: ReplicaCopy = holding.copies.pop(server)
        peer = copy.peer
        if peer.copies.get(holding.index) is copy:
            del peer.copies[holding.index]
        if copy in peer.todo:
            peer.todo.remove(copy)
        peer.watched.discard(copy)
        if not peer.copies and not peer.lost:
            peer.lost = True
            self._peers.pop((peer.space, peer.server), None)
            self._calls.hang_up(peer)

    # ---- what is sent

    def forward(self, changed: Iterable[tuple[AssignedSegment, list[bytes]]]) -> None:
        """Send what was just applied to all copies that have, or will have got, their state before it.

        Small changes for one server go in one message (FORWARD with b = -1: head and pieces), each of them once.
        """
        small: dict[Peer, list[tuple[ReplicaCopy, bytes]]] = {}
        for holding, changes in changed:
            holding.line = holding.generation
            for copy in holding.copies.values():
                if copy.stage != Stage.SENT:
                    continue
                if len(changes) == 1 and len(changes[0]) <= SMALL:
                    small.setdefault(copy.peer, []).append((copy, changes[0]))
                    continue
                for change in changes:
                    self._send(copy, GroupMessage.FORWARD, change)
        for peer, items in small.items():
            self._send_many(peer, items)

    def pump(self, peer: Peer) -> None:
        """Send the states that are due, as the link takes them."""
        while peer.todo and peer.link is not None and peer.link.queued < ROOM and not peer.lost:
            copy = peer.todo.popleft()
            holding = copy.holding
            segment = holding.segment
            if segment is None:
                continue
            if copy.whole:
                holding.line = holding.generation
                state = segment.dump()
                peer.bytes += len(state)
                self.bytes += len(state)
            else:
                state = MARK.pack(segment.seq, holding.line)
            copy.stage = Stage.SENT
            copy.first = peer.sent + 1
            self._send(copy, GroupMessage.STATE, state)
            peer.watched.add(copy)
            passing("host: state sent, not synced")
            self._calls.settled(peer.space, anew=True)

    def _send(self, copy: ReplicaCopy, kind: GroupMessage, payload: bytes) -> None:
        copy.tag = copy.peer.sent + 1
        # half a generation more marks a state before the first load: its copy must not serve it either
        generation = copy.holding.generation + (0.0 if copy.holding.usable else 0.5)
        self._say(copy.peer, kind, copy.holding.index, generation, payload)

    def _send_many(self, peer: Peer, items: list[tuple[ReplicaCopy, bytes]]) -> None:
        if len(items) == 1:
            self._send(items[0][0], GroupMessage.FORWARD, items[0][1])
            return
        for copy, _ in items:
            copy.tag = peer.sent + 1
        pieces = [SegmentPayload(copy.holding.index, copy.holding.generation, change) for copy, change in items]
        self._say(peer, GroupMessage.FORWARD, -1, 0.0, pack(pieces))

    def _say(self, peer: Peer, kind: GroupMessage, index: int, generation: float, payload: bytes | bytearray) -> None:
        peer.sent += 1
        if peer.link is None or peer.lost:
            return
        try:
            peer.link.queue(Message(kind, peer.sent, peer.space, index, generation), payload, copy=False)
        except LinkError as error:
            self.lost(peer, str(error))

    # ---- what is received

    def connected(self, peer: Peer, link: Link) -> None:
        """Use the link to a peer, and send the states that are due."""
        link.queue_limit = 1 << 60  # bounded by what workers have under way, and by ROOM
        peer.link = link
        self.pump(peer)

    def heard(self, peer: Peer, message: Message) -> None:
        """Handle COPIED or a refusal."""
        if message.kind == GroupMessage.COPIED:
            peer.acked = max(peer.acked, message.tag)
            for copy in list(peer.watched):
                self._look(copy)
            self._calls.settled(peer.space, anew=False)
        elif message.kind == GroupMessage.STALE:
            for index in read_numbers(message.payload):
                self._refused(peer, index, message.tag)
            self._calls.settled(peer.space, anew=True)

    def _look(self, copy: ReplicaCopy) -> None:
        """Report what has changed about a copy."""
        if copy.stage != Stage.SENT or copy.first > copy.peer.acked:
            return
        if not copy.synced:
            copy.synced = True
            self._report(Event.SYNCED, copy)
        self._hand(copy.holding)
        if copy.holding.role != Role.LEAVING or copy.holding.handed:
            copy.peer.watched.discard(copy)

    def _refused(self, peer: Peer, index: int, tag: int) -> None:
        copy = peer.copies.get(index)
        if copy is None or copy.stage != Stage.SENT or tag < copy.first:
            return  # it refers to an earlier state
        if not copy.whole and tag == copy.first:
            copy.whole = True
            self._due(copy)
        else:
            self._give_up(copy)

    def lost(self, peer: Peer, why: str) -> None:
        """Mark the copies of a failed link as lost: answers wait for them until new orders arrive."""
        if peer.lost:
            return
        peer.lost = True
        log.info("space %d: lost the copies on %s: %s", peer.space, peer.server, why)
        if self._peers.get((peer.space, peer.server)) is peer:
            del self._peers[peer.space, peer.server]
        for copy in list(peer.copies.values()):
            self._give_up(copy)
        self._calls.hang_up(peer)
        self._calls.settled(peer.space, anew=True)

    def _give_up(self, copy: ReplicaCopy) -> None:
        if copy.stage != Stage.NEW:  # answers do not wait for a new one
            copy.stage = Stage.LOST
        copy.peer.watched.discard(copy)
        self._report(Event.COPY_LOST, copy)

    # ---- which answers wait

    def needs(self, holdings: Iterable[AssignedSegment]) -> dict[Peer, int]:
        """Return the tag that each peer must acknowledge before an answer about these segments is sent."""
        found: dict[Peer, int] = {}
        for holding in holdings:
            for copy in holding.copies.values():
                if copy.stage == Stage.SENT:
                    if copy.tag > copy.peer.acked and copy.tag > found.get(copy.peer, 0):
                        found[copy.peer] = copy.tag
                elif copy.stage != Stage.NEW:
                    found[copy.peer] = NEVER
        return found

    def _hand(self, holding: AssignedSegment) -> None:
        """Report HANDED once the copies of a leaving segment have everything."""
        if holding.role != Role.LEAVING or holding.handed:
            return
        behind = [c for c in holding.copies.values() if c.stage != Stage.SENT or c.peer.acked < c.tag]
        for copy in behind:
            copy.peer.watched.add(copy)
        if behind:
            return
        passing("host: leaving, not handed")
        holding.handed = True
        self._calls.report(SegmentReport(holding.space.number, Event.HANDED, holding.index, holding.generation))

    def _report(self, event: Event, copy: ReplicaCopy) -> None:
        holding = copy.holding
        report = SegmentReport(holding.space.number, event, holding.index, holding.generation, copy.peer.server)
        self._calls.report(report)

    def all_of(self, holding: AssignedSegment) -> list[SegmentReport]:
        """Return reports of the state of a segment's copies, for a new manager."""
        number = holding.space.number
        found = []
        for server, copy in holding.copies.items():
            if copy.synced or copy.stage == Stage.LOST:
                event = Event.COPY_LOST if copy.stage == Stage.LOST else Event.SYNCED
                found.append(SegmentReport(number, event, holding.index, holding.generation, server))
        if holding.handed:
            found.append(SegmentReport(number, Event.HANDED, holding.index, holding.generation))
        return found


def _tell(holding: AssignedSegment) -> None:
    """Let a segment record its changes only if it has copies; call it before their state is made."""
    if holding.segment is not None:
        holding.segment.copied = bool(holding.copies)


def stuck_on(needs: dict[Peer, int]) -> list[str]:
    """Return the servers that an answer waits for."""
    return sorted(peer.server for peer, tag in needs.items() if peer.acked < tag)


# ---- the backup's half


class Backups:
    """The segments for which this server is a backup: applies what their primaries send, and acknowledges it."""

    def __init__(self, holdings: Assignments) -> None:
        self._holdings = holdings
        self._applied: set[ServerPeer] = set()  # whose messages are not acknowledged yet

    def apply(self, held: AssignedSpace, request: PeerRequest) -> list[int]:
        """Apply STATE or FORWARD; return the segments on which it had no effect.

        The reasons: the message is older than the segment, an earlier message is missing, or it cannot be applied.
        """
        if request.kind == GroupMessage.STATE:
            done = _tried(held, request.b, lambda: self._state(held, request))
            refused = [] if done else [request.b]
        else:
            changes = [SegmentPayload(request.b, int(request.weight), request.payload)]
            if request.b < 0:
                changes = unpack(request.payload)
            refused = [c.segment for c in changes if not _tried(held, c.segment, partial(_forward, held, request, c))]
        passing("copy: applied, not acknowledged")
        request.guest.applied = request.tag
        self._applied.add(request.guest)
        return refused

    def acknowledged(self) -> list[tuple[ServerPeer, int]]:
        """Return the links with applied messages since the last call, and the tag of the last applied one."""
        applied, self._applied = self._applied, set()
        return [(peer, peer.applied) for peer in applied if not peer.gone]

    def _state(self, held: AssignedSpace, request: PeerRequest) -> bool:
        index, generation = request.b, int(request.weight)
        if not 0 <= index < held.space.segments:
            return False
        known = held.holdings.get(index)
        by_mark = len(request.payload) == MARK.size
        if by_mark:
            has = known is not None and known.usable and known.segment is not None and (known.segment.seq, known.line)
            if not has or has != MARK.unpack(request.payload):
                return False
        segment = None if by_mark else held.make(index)
        if segment is not None:
            segment.load(request.payload)
        holding = self._holdings.is_to_be_copy(held, index, generation, request.guest)
        if holding is None:
            return False
        if segment is not None:
            holding.segment, holding.line = segment, generation
            holding.usable = request.weight == generation
        return True


def _tried(held: AssignedSpace, index: int, work: Callable[[], bool]) -> bool:
    try:
        return work()
    except Exception as error:  # the copy may be inconsistent now; the next state replaces it
        log.error("segment %d of space %d cannot be copied", index, held.number, exc_info=error)
        if index in held.holdings:
            held.holdings[index].source = None
        return False


def _forward(held: AssignedSpace, request: PeerRequest, change: SegmentPayload) -> bool:
    holding = held.holdings.get(change.segment)
    if holding is None or holding.segment is None or holding.source is not request.guest:
        return False
    if change.generation < holding.generation:
        return False
    holding.segment.replay(change.data)
    holding.generation = holding.line = change.generation
    return True
