"""Replication of segments: the primary sends states and changes (`Replication`), the backup applies them (`Backups`).

Guarantee: an answer is sent only after every backup that the manager counts as complete has acknowledged the changes
that the answer reports.

A server has one connection for each space and backup server. Each message has a tag, which increases by 1 with each
message. COPIED returns the tag of the last message that the backup has applied. A backup that is DUE counts as complete
although its state is still to be sent, so answers wait for it. A backup that is NEW does not count as complete, and no
answer waits for it before its state is sent.

After a promotion, a backup may have the complete state already. The new primary then sends only the *mark* of its
state: the number of changes, and the generation of the last change. Two segments with the same mark are equal bit for
bit, because each generation of a segment has one primary. A backup with another mark answers STALE, and the primary
sends it the whole state. Raft compares logs in this way: Ongaro and Ousterhout, "In search of an understandable
consensus algorithm", USENIX ATC 2014.
"""

from __future__ import annotations

import enum
import logging
import struct
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from rayps_client.errors import LinkError

from rayps.comm.link import Link, Message
from rayps.core.failpoint import passing
from rayps.ps.protocol.messages import Event, GroupMessage, Role, SegmentPayload, pack, read_numbers, unpack
from rayps.ps.server.assignments import AssignedSegment, AssignedSpace, Assignments, SegmentReport
from rayps.ps.server.connection import PeerRequest, ServerPeer

log = logging.getLogger(__name__)

MARK = struct.Struct("<qq")  # number of changes, generation of the last change
NEVER = 1 << 62  # a tag that no message has
SMALL = 1 << 16  # bytes; changes up to this size are sent together in one message, which needs one more copy of them
ROOM = 32 << 20  # no further state is encoded while so many bytes are queued on a connection


class Stage(enum.Enum):
    """The progress of a backup, as its primary sees it. The state of a NEW or DUE backup is still to be sent."""

    NEW = "new"
    DUE = "due"
    SENT = "sent"
    LOST = "lost"


class BackupServer:
    """A primary's connection to one backup server for one space.

    `sent`: the largest tag of any earlier connection. Tags of a later connection are larger, because messages of an
    earlier one may still arrive, and the backup must not take them for newer ones.
    """

    def __init__(self, space: int, server: str, address: str, sent: int) -> None:
        self.space, self.server, self.address = space, server, address
        self.link: Link | None = None
        self.lost = False
        self.sent = sent  # tag of the last message
        self.acked = 0  # tag of the last message that the backup server has applied
        self.copies: dict[int, ReplicaCopy] = {}  # segment -> backup
        self.todo: deque[ReplicaCopy] = deque()  # backups whose state is still to be sent
        self.watched: set[ReplicaCopy] = set()  # backups whose acknowledgement must be reported to the manager
        self.bytes = 0  # bytes of the states sent


class ReplicaCopy:
    """One segment's backup on one server, as the segment's primary sees it."""

    def __init__(self, assigned: AssignedSegment, peer: BackupServer, stage: Stage, whole: bool) -> None:
        self.assigned, self.peer, self.stage = assigned, peer, stage
        self.whole = whole  # whether to send the whole state, and not only the mark
        self.first = NEVER  # tag of the STATE message
        self.tag = 0  # tag of the last message about this backup
        self.synced = False  # whether SYNCED was reported to the manager


class Calls(Protocol):
    """What `Replication` calls on the server."""

    def dial(self, peer: BackupServer) -> None:
        """Begin to connect to a backup server; the server calls `Replication.connected` or `.lost` later."""

    def hang_up(self, peer: BackupServer) -> None:
        """Close the connection to a backup server, because it is not needed any more, or has failed."""

    def report(self, report: SegmentReport) -> None:
        """Send the manager a report."""

    def send_withheld(self, space: int, *, anew: bool) -> None:
        """Send the withheld answers of this space whose backups have now acknowledged.

        `anew`: determine again for which backups each answer waits, because these may have changed.
        """


class Replication:
    """The backups, on other servers, of the segments of which this server is primary."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._peers: dict[tuple[int, str], BackupServer] = {}
        self.bytes = 0  # bytes of all states sent so far
        self._largest_tag = 0  # of all messages on all connections so far

    # ---- which backups exist

    def set_backups(self, assigned: AssignedSegment, servers: dict[str, str], *, anew: bool) -> None:
        """Keep backups of a segment on these servers (name -> address) and on no others.

        `anew`: a new generation of the segment begins. The manager then counts these backups as complete, so every
        answer waits for them.
        """
        space = assigned.space.number
        for server in [name for name in assigned.copies if name not in servers]:
            self._drop(assigned, server)
        for server, address in servers.items():
            known: ReplicaCopy | None = assigned.copies.get(server)
            if known is not None and not known.peer.lost and known.stage != Stage.LOST:
                if anew:
                    known.whole, known.synced = known.whole and known.stage != Stage.SENT, False
                    self._mark_due(known)
                continue
            promised = anew or (known is not None and known.stage != Stage.NEW)
            peer = self._find_peer(space, server, address)
            copy = ReplicaCopy(assigned, peer, Stage.DUE if promised else Stage.NEW, whole=not anew)
            assigned.copies[server] = peer.copies[assigned.index] = copy
            peer.todo.append(copy)
            _set_recording(assigned)
            self.send_states(peer)
        _set_recording(assigned)
        self._report_handed(assigned)
        self._calls.send_withheld(space, anew=True)

    def drop_all(self, assigned: AssignedSegment) -> None:
        """Stop sending changes to all backups of this segment."""
        for server in list(assigned.copies):
            self._drop(assigned, server)

    def resend_states(self, assigned: AssignedSegment) -> None:
        """Send each backup the whole state again, because a state was loaded into the segment."""
        for copy in assigned.copies.values():
            if copy.stage in (Stage.SENT, Stage.DUE):
                copy.whole = True
                self._mark_due(copy)

    def _mark_due(self, copy: ReplicaCopy) -> None:
        copy.stage, copy.first = Stage.DUE, NEVER
        if copy not in copy.peer.todo:
            copy.peer.todo.append(copy)
        self.send_states(copy.peer)

    def _find_peer(self, space: int, server: str, address: str) -> BackupServer:
        peer = self._peers.get((space, server))
        if peer is not None and peer.address != address:
            self.lost(peer, "the server's address has changed")
            peer = None
        if peer is None or peer.lost:
            peer = self._peers[space, server] = BackupServer(space, server, address, self._largest_tag)
            self._calls.dial(peer)
        return peer

    def _drop(self, assigned: AssignedSegment, server: str) -> None:
        copy: ReplicaCopy = assigned.copies.pop(server)
        peer = copy.peer
        if peer.copies.get(assigned.index) is copy:
            del peer.copies[assigned.index]
        if copy in peer.todo:
            peer.todo.remove(copy)
        peer.watched.discard(copy)
        if not peer.copies and not peer.lost:
            peer.lost = True
            self._peers.pop((peer.space, peer.server), None)
            self._calls.hang_up(peer)

    # ---- what is sent

    def forward(self, changed: Iterable[tuple[AssignedSegment, list[bytes]]]) -> None:
        """Send each backup the changes that were just applied, unless the backup's state is still to be sent.

        Small changes of several segments are sent to one server in one message (FORWARD with b = -1, whose payload is a
        head and pieces).
        """
        small: dict[BackupServer, list[tuple[ReplicaCopy, bytes]]] = {}
        for assigned, changes in changed:
            assigned.state_generation = assigned.generation
            for copy in assigned.copies.values():
                if copy.stage != Stage.SENT:
                    continue
                if len(changes) == 1 and len(changes[0]) <= SMALL:
                    small.setdefault(copy.peer, []).append((copy, changes[0]))
                    continue
                for change in changes:
                    self._send(copy, GroupMessage.FORWARD, change)
        for peer, items in small.items():
            self._send_many(peer, items)

    def send_states(self, peer: BackupServer) -> None:
        """Send a backup server the states that are still to be sent, while its connection has room."""
        while peer.todo and peer.link is not None and peer.link.queued < ROOM and not peer.lost:
            copy = peer.todo.popleft()
            assigned = copy.assigned
            segment = assigned.segment
            if segment is None:
                continue
            if copy.whole:
                assigned.state_generation = assigned.generation
                state = segment.dump()
                peer.bytes += len(state)
                self.bytes += len(state)
            else:
                state = MARK.pack(segment.seq, assigned.state_generation)
            copy.stage = Stage.SENT
            copy.first = peer.sent + 1
            self._send(copy, GroupMessage.STATE, state)
            peer.watched.add(copy)
            passing("host: state sent, not synced")
            self._calls.send_withheld(peer.space, anew=True)

    def _send(self, copy: ReplicaCopy, kind: GroupMessage, payload: bytes) -> None:
        copy.tag = copy.peer.sent + 1
        # 0.5 is added while no state was loaded into the segment: a backup must not serve it after a promotion either
        generation = copy.assigned.generation + (0.0 if copy.assigned.usable else 0.5)
        self._send_message(copy.peer, kind, copy.assigned.index, generation, payload)

    def _send_many(self, peer: BackupServer, items: list[tuple[ReplicaCopy, bytes]]) -> None:
        if len(items) == 1:
            self._send(items[0][0], GroupMessage.FORWARD, items[0][1])
            return
        for copy, _ in items:
            copy.tag = peer.sent + 1
        pieces = [SegmentPayload(copy.assigned.index, copy.assigned.generation, change) for copy, change in items]
        self._send_message(peer, GroupMessage.FORWARD, -1, 0.0, pack(pieces))

    def _send_message(
        self, peer: BackupServer, kind: GroupMessage, index: int, generation: float, payload: bytes | bytearray
    ) -> None:
        peer.sent += 1
        self._largest_tag = max(self._largest_tag, peer.sent)
        if peer.link is None or peer.lost:
            return
        try:
            peer.link.queue(Message(kind, peer.sent, peer.space, index, generation), payload, copy=False)
        except LinkError as error:
            self.lost(peer, str(error))

    # ---- what is received

    def connected(self, peer: BackupServer, link: Link) -> None:
        """Use a new connection to a backup server, and send the states that are still to be sent."""
        link.queue_limit = 1 << 60  # no limit here: the workers' unanswered requests and ROOM bound the queue
        peer.link = link
        self.send_states(peer)

    def handle(self, peer: BackupServer, message: Message) -> None:
        """Handle a message of a backup server: COPIED, or STALE for refused segments."""
        if message.kind == GroupMessage.COPIED:
            peer.acked = max(peer.acked, message.tag)
            for copy in list(peer.watched):
                self._report_synced(copy)
            self._calls.send_withheld(peer.space, anew=False)
        elif message.kind == GroupMessage.STALE:
            for index in read_numbers(message.payload):
                self._note_refused(peer, index, message.tag)
            self._calls.send_withheld(peer.space, anew=True)

    def _report_synced(self, copy: ReplicaCopy) -> None:
        """Report SYNCED once a backup has applied its state, and HANDED if the segment's hand-over is complete."""
        if copy.stage != Stage.SENT or copy.first > copy.peer.acked:
            return
        if not copy.synced:
            copy.synced = True
            self._report(Event.SYNCED, copy)
        self._report_handed(copy.assigned)
        if copy.assigned.role != Role.LEAVING or copy.assigned.handed:
            copy.peer.watched.discard(copy)

    def _note_refused(self, peer: BackupServer, index: int, tag: int) -> None:
        copy = peer.copies.get(index)
        if copy is None or copy.stage != Stage.SENT or tag < copy.first:
            return  # the backup has refused an earlier state
        if not copy.whole and tag == copy.first:
            copy.whole = True
            self._mark_due(copy)
        else:
            self._give_up(copy)

    def lost(self, peer: BackupServer, why: str) -> None:
        """Mark the backups of a failed connection as lost. Answers wait for these backups until new orders arrive."""
        if peer.lost:
            return
        peer.lost = True
        log.info("space %d: lost the backups on %s: %s", peer.space, peer.server, why)
        if self._peers.get((peer.space, peer.server)) is peer:
            del self._peers[peer.space, peer.server]
        for copy in list(peer.copies.values()):
            self._give_up(copy)
        self._calls.hang_up(peer)
        self._calls.send_withheld(peer.space, anew=True)

    def _give_up(self, copy: ReplicaCopy) -> None:
        if copy.stage != Stage.NEW:  # answers wait for a LOST backup, and not for a NEW one
            copy.stage = Stage.LOST
        copy.peer.watched.discard(copy)
        self._report(Event.COPY_LOST, copy)

    # ---- which answers wait

    def needs(self, segments: Iterable[AssignedSegment]) -> dict[BackupServer, int]:
        """Return a dict from connection to the tag that must be acknowledged before these segments answer.

        For a DUE or LOST backup the tag is NEVER.
        """
        found: dict[BackupServer, int] = {}
        for assigned in segments:
            for copy in assigned.copies.values():
                if copy.stage == Stage.SENT:
                    if copy.tag > copy.peer.acked and copy.tag > found.get(copy.peer, 0):
                        found[copy.peer] = copy.tag
                elif copy.stage != Stage.NEW:
                    found[copy.peer] = NEVER
        return found

    def _report_handed(self, assigned: AssignedSegment) -> None:
        """Report HANDED to the manager once all backups of a leaving segment have acknowledged all messages."""
        if assigned.role != Role.LEAVING or assigned.handed:
            return
        behind = [c for c in assigned.copies.values() if c.stage != Stage.SENT or c.peer.acked < c.tag]
        for copy in behind:
            copy.peer.watched.add(copy)
        if behind:
            return
        passing("host: leaving, not handed")
        assigned.handed = True
        self._calls.report(SegmentReport(assigned.space.number, Event.HANDED, assigned.index, assigned.generation))

    def _report(self, event: Event, copy: ReplicaCopy) -> None:
        assigned = copy.assigned
        report = SegmentReport(assigned.space.number, event, assigned.index, assigned.generation, copy.peer.server)
        self._calls.report(report)

    def all_of(self, assigned: AssignedSegment) -> list[SegmentReport]:
        """Return the reports that describe a segment's backups now, for a new manager."""
        number = assigned.space.number
        found = []
        for server, copy in assigned.copies.items():
            if copy.synced or copy.stage == Stage.LOST:
                event = Event.COPY_LOST if copy.stage == Stage.LOST else Event.SYNCED
                found.append(SegmentReport(number, event, assigned.index, assigned.generation, server))
        if assigned.handed:
            found.append(SegmentReport(number, Event.HANDED, assigned.index, assigned.generation))
        return found


def _set_recording(assigned: AssignedSegment) -> None:
    """Let a segment encode changes only if it has backups. Call this before a backup's state is encoded."""
    if assigned.segment is not None:
        assigned.segment.copied = bool(assigned.copies)


def list_unacknowledged(needs: dict[BackupServer, int]) -> list[str]:
    """Return the servers that an answer waits for."""
    return sorted(peer.server for peer, tag in needs.items() if peer.acked < tag)


# ---- the backup's half


class Backups:
    """Applies the states and changes that primaries send to this server's backups, and acknowledges them."""

    def __init__(self, assignments: Assignments) -> None:
        self._assignments = assignments
        self._applied: set[ServerPeer] = set()  # connections with applied messages that are not acknowledged yet

    def apply(self, assigned_space: AssignedSpace, request: PeerRequest) -> list[int]:
        """Apply STATE or FORWARD; return the segments on which the message had no effect.

        Possible reasons are that the message is older than the segment, that an earlier message is missing, or that an
        error occurred.
        """
        if request.kind == GroupMessage.STATE:
            done = _try(assigned_space, request.b, lambda: self._load_state(assigned_space, request))
            refused = [] if done else [request.b]
        else:
            changes = [SegmentPayload(request.b, int(request.weight), request.payload)]
            if request.b < 0:
                changes = unpack(request.payload)
            refused = [
                c.segment
                for c in changes
                if not _try(assigned_space, c.segment, partial(_forward, assigned_space, request, c))
            ]
        passing("copy: applied, not acknowledged")
        request.peer.applied = request.tag
        self._applied.add(request.peer)
        return refused

    def acknowledged(self) -> list[tuple[ServerPeer, int]]:
        """Return each connection with messages applied since the last call, and the tag of the last of them."""
        applied, self._applied = self._applied, set()
        return [(peer, peer.applied) for peer in applied if not peer.gone]

    def _load_state(self, assigned_space: AssignedSpace, request: PeerRequest) -> bool:
        index, generation = request.b, int(request.weight)
        if not 0 <= index < assigned_space.space.segments:
            return False
        known = assigned_space.by_index.get(index)
        if known is not None and (generation, request.tag) <= known.last_copied:
            return False  # it was sent on an earlier connection, and has been overtaken by a later one
        by_mark = len(request.payload) == MARK.size
        if by_mark:
            has = (
                known is not None
                and known.usable
                and known.segment is not None
                and (known.segment.seq, known.state_generation)
            )
            if not has or has != MARK.unpack(request.payload):
                return False
        segment = None if by_mark else assigned_space.make(index)
        if segment is not None:
            segment.load(request.payload)
        assigned = self._assignments.become_copy(assigned_space, index, generation, request.peer)
        if assigned is None:
            return False
        if segment is not None:
            assigned.segment, assigned.state_generation = segment, generation
            assigned.usable = request.weight == generation
        assigned.last_copied = generation, request.tag
        return True


def _try(assigned_space: AssignedSpace, index: int, work: Callable[[], bool]) -> bool:
    try:
        return work()
    except Exception as error:  # this backup may be inconsistent, so it refuses changes until it receives a new state
        log.error(
            "segment %d of space %d: cannot apply its primary's message", index, assigned_space.number, exc_info=error
        )
        if index in assigned_space.by_index:
            assigned_space.by_index[index].source = None
        return False


def _forward(assigned_space: AssignedSpace, request: PeerRequest, change: SegmentPayload) -> bool:
    assigned = assigned_space.by_index.get(change.segment)
    if assigned is None or assigned.segment is None or assigned.source is not request.peer:
        return False
    if change.generation < assigned.generation:
        return False
    assigned.segment.replay(change.data)
    assigned.generation = assigned.state_generation = change.generation
    assigned.last_copied = change.generation, request.tag
    return True
