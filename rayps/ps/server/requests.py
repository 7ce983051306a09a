"""Serve the requests that workers send to this server, and delay the answers that must wait.

A request is applied to all of its segments or to none. The server first compares the generation that the request names
for each segment with the generation in which the server serves this segment. Then it checks the push to each segment,
and only then applies the pushes. An answer is *withheld* until the backups have acknowledged the changes that it
reports (`Replication.needs`). A pull is *parked* until the staleness bound allows it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from rayps_client.errors import ConfigError, PeerTimeout, RaypsError, StaleGeneration

from rayps.comm.link import Message
from rayps.core.failpoint import passing
from rayps.core.strategy.topology import backup_in
from rayps.ps.protocol.mailbox import MailboxCall, SharedSlice
from rayps.ps.protocol.members import MemberChange, MemberChangeKind
from rayps.ps.protocol.messages import (
    JOIN_PAYLOAD,
    GroupMessage,
    SegmentPayload,
    make_refusal,
    pack,
    pack_numbers,
    read_numbers,
    unpack,
)
from rayps.ps.protocol.space import ServedSegment
from rayps.ps.server.assignments import AssignedSegment, AssignedSpace
from rayps.ps.server.backup_rounds import Arrivals
from rayps.ps.server.connection import NOT_JOINED, PeerRequest, ServerPeer, explain_fenced
from rayps.ps.server.consistent_readers import ConsistentReaders
from rayps.ps.server.dense_segment import DenseSegment
from rayps.ps.server.mailboxes import MailboxHead, WholePush, request_of
from rayps.ps.server.replication import BackupServer, Replication, list_unacknowledged

READER = -1
OPERATIONS = frozenset({GroupMessage.PUSH, GroupMessage.PULL, GroupMessage.PUSH_PULL, GroupMessage.READ})


@dataclass(slots=True, eq=False)
class Withheld:
    """An answer that waits until the backups have acknowledged the changes that it reports."""

    request: PeerRequest
    message: Message
    payload: Any
    segments: list[AssignedSegment]
    needs: dict[BackupServer, int]
    deadline: float


class ReplySender(Protocol):
    """What `PendingReplies` calls on the server to send answers. `peer` is the connection of a worker or reader."""

    def send(self, peer: ServerPeer, message: Message, payload: Any) -> None:
        """Queue a message on a connection; close the connection if that fails."""

    def answer(self, peer: ServerPeer, tag: int, version: int, lead: int, durable: int) -> None:
        """Answer a request that came by mailbox. The worker reads the values in shared memory."""

    def offer(self, peer: ServerPeer, segment: int, slice_: SharedSlice) -> None:
        """Give a worker on this host access to a segment's memory."""


class PendingReplies:
    """Sends answers, and delays answers that must wait for backups."""

    def __init__(self, copies: Replication, sender: ReplySender, name: str) -> None:
        """`copies`: the backups for which answers wait. `sender`: sends answers. `name`: the server's name."""
        self._replication, self._sender, self._name = copies, sender, name

    def fail(self, assigned_space: AssignedSpace | None, request: PeerRequest, error: Exception) -> None:
        """Answer a request with an error. An unexpected error is logged too, and the server continues."""
        if not isinstance(error, (ValueError, RaypsError)):
            log.error("a request of kind %d failed", request.kind, exc_info=error)
            error = RaypsError(f"{self._name} failed: {type(error).__name__}: {error}")
        if assigned_space is not None and isinstance(error, ConfigError):
            assigned_space.rejected += 1
        release(request)
        self._sender.send(request.peer, Message(GroupMessage.ERROR, request.tag), make_refusal(request.tag, error)[1])

    def send_stale(self, request: PeerRequest, segments: Iterable[int]) -> None:
        """Answer STALE: this server does not serve these segments in the requested generation, and applied nothing."""
        release(request)
        self._sender.send(request.peer, Message(GroupMessage.STALE, request.tag), pack_numbers(segments))

    def reply(
        self,
        request: PeerRequest,
        kind: GroupMessage,
        touched: list[AssignedSegment],
        *,
        lead: int = 0,
        payload: Any = None,
    ) -> None:
        """Answer as soon as the backups of the touched segments have acknowledged all changes sent to them so far."""
        release(request)
        rank = request.peer.rank
        durable = min((assigned.durable(rank) for assigned in touched), default=0) if rank >= 0 else 0
        version = min((segment_of(assigned).version for assigned in touched), default=0)
        message = Message(kind, request.tag, version, lead, float(durable))
        needs = self._replication.needs(touched)
        if needs:
            deadline = time.monotonic() + request.peer.patience
            withheld = Withheld(request, message, payload, touched, needs, deadline)
            touched[0].space.withheld.append(withheld)
        else:
            self._sender.send(request.peer, message, payload)

    def send_withheld(self, assigned_space: AssignedSpace, *, anew: bool) -> None:
        """Send the withheld answers whose backups have now acknowledged.

        `anew`: determine again for which backups each answer waits, because these may have changed.
        """
        left: list[Withheld] = []
        free: list[Withheld] = []
        for answer in assigned_space.withheld:
            if anew:
                answer.needs = self._replication.needs(answer.segments)
            waits = any(peer.acked < tag for peer, tag in answer.needs.items())
            (left if waits else free).append(answer)
        if free:
            assigned_space.withheld = left
            passing("host: copied, not acknowledged")
            for answer in free:
                self._sender.send(answer.request.peer, answer.message, answer.payload)

    def stop_serving(self, assigned: AssignedSegment) -> None:
        """Refuse the parked requests that touch this segment."""
        assigned_space = assigned.space
        gone = [
            request for request in assigned_space.parked if any(p.segment == assigned.index for p in request.pieces)
        ]
        if gone:
            assigned_space.parked = [request for request in assigned_space.parked if request not in gone]
            for request in gone:
                self.send_stale(request, [assigned.index])

    def withdraw_answers(self, assigned: AssignedSegment) -> None:
        """Answer STALE in place of the withheld answers about this segment.

        They waited for backups whose state this server no longer knows.
        """
        assigned_space = assigned.space
        gone = [answer for answer in assigned_space.withheld if assigned in answer.segments]
        for answer in [answer for answer in gone if answer.message.kind == GroupMessage.JOINED]:
            gone.remove(
                answer
            )  # the answer is still true for its other segments, so only this segment's pair is removed
            answer.segments.remove(assigned)
            pairs = read_numbers(answer.payload)
            kept = [pair for pair in zip(pairs[::2], pairs[1::2], strict=True) if pair[0] != assigned.index]
            answer.payload = pack_numbers(value for pair in kept for value in pair)
        if gone:
            assigned_space.withheld = [answer for answer in assigned_space.withheld if answer not in gone]
            for answer in gone:
                self.send_stale(answer.request, [assigned.index])

    def forget(self, assigned_space: AssignedSpace, peer: ServerPeer) -> None:
        """Remove the requests and answers of a lost connection, and stop using its worker's memory."""
        assigned_space.parked = [request for request in assigned_space.parked if request.peer is not peer]
        assigned_space.withheld = [answer for answer in assigned_space.withheld if answer.request.peer is not peer]
        if peer.rank >= 0:
            for assigned in assigned_space.primaries():
                copy_pushes(assigned, peer.rank)

    def expire(self, assigned_space: AssignedSpace, now: float) -> None:
        """Refuse requests whose deadline has passed; the error names the ranks or servers for which they waited."""
        for request in [waiting for waiting in assigned_space.parked if waiting.deadline < now]:
            remove(assigned_space.parked, request)
            behind = sorted(
                {
                    rank
                    for p in request.pieces
                    if p.segment in assigned_space.by_index
                    for rank in segment_of(assigned_space.by_index[p.segment]).laggards()
                }
            )
            names = ", ".join(f"rank {rank}" for rank in behind) or "the other ranks"
            marks = [
                mark
                for p in request.pieces
                if (h := assigned_space.by_index.get(p.segment))
                for mark in h.marks().values()
            ]
            self.fail(
                assigned_space,
                request,
                PeerTimeout(
                    f"{request.peer.link.peer} waited {request.peer.patience:g} s on {self._name} for {names} to "
                    f"push step {min(marks, default=0)}: raise `timeout` if a step may take longer",
                    peer=f"worker-{behind[0]}" if behind else "server",
                    seconds=request.peer.patience,
                    ranks=behind,
                    server=self._name,
                ),
            )
        for answer in [waiting for waiting in assigned_space.withheld if waiting.deadline < now]:
            remove(assigned_space.withheld, answer)
            names = ", ".join(list_unacknowledged(answer.needs))
            self.fail(
                assigned_space,
                answer.request,
                PeerTimeout(
                    f"the changes that {answer.request.peer.link.peer} pushed or read were not acknowledged in time by "
                    f"the backups on {names}: raise `timeout` if this may take longer",
                    peer=names,
                ),
            )


def segment_of(assigned: AssignedSegment) -> ServedSegment:
    """Return the segment that this server holds as primary."""
    assert assigned.segment is not None
    return assigned.segment


def copy_pushes(assigned: AssignedSegment, rank: int) -> None:
    """Copy the pushes of `rank` that a segment still needs from the worker's memory into the server's memory.

    Call it before the answer, after which the worker may overwrite its memory.
    """
    if isinstance(assigned.segment, DenseSegment):
        assigned.segment.copy_pushes(rank)


def release(request: PeerRequest) -> None:
    """Stop using the worker's memory for a request by mailbox. Call it before the answer.

    After the answer the worker may overwrite this memory.
    """
    for assigned in request.referencing:
        copy_pushes(assigned, request.peer.rank)


def remove(waiting: list[Any], item: object) -> None:
    """Remove an item from a list if it is in the list."""
    if item in waiting:  # else `forget` has removed it, because its connection was lost
        waiting.remove(item)


class RequestHandler(PendingReplies):
    """Serves the requests for the segments that this server holds."""

    def __init__(self, copies: Replication, sender: ReplySender, name: str) -> None:
        super().__init__(copies, sender, name)
        self._readers: dict[int, ConsistentReaders] = {}  # space -> its readers, while one holds it or waits for it
        self._arrivals: dict[int, Arrivals] = {}  # space with backup workers -> the members of its rounds
        self._answers: dict[int, Callable[[AssignedSpace, PeerRequest], None]] = {
            GroupMessage.PUSH: self._push,
            GroupMessage.PULL: self._wait,
            GroupMessage.PUSH_PULL: self._push_pull,
            GroupMessage.READ: self._read,
            GroupMessage.LOAD: self._load,
            GroupMessage.PART: self._reply_part,
            GroupMessage.SAVED: self._record_saved,
            GroupMessage.FLUSH: self._wait,
            GroupMessage.CHANGES: self._reply_changes,
            GroupMessage.MARKS: self._reply_marks,
            GroupMessage.MEMBERS: self._change_members,
            GroupMessage.ARRIVE: self._arrive,
            GroupMessage.HOLD: lambda assigned_space, request: self._find_reader(assigned_space).add_request(request),
            GroupMessage.AIM: lambda assigned_space, request: self._find_reader(assigned_space).aim(request),
            GroupMessage.RELEASE: lambda assigned_space, request: self._find_reader(assigned_space).release(
                request.peer
            ),
        }

    def answer(self, assigned_space: AssignedSpace, request: PeerRequest) -> None:
        """Serve one request, or park it."""
        try:
            if request.kind in (GroupMessage.JOIN, GroupMessage.TAKE_RANK):
                (self._join if request.kind == GroupMessage.JOIN else self._take_rank)(assigned_space, request)
                return
            handler = self._answers.get(request.kind)
            if handler is None:
                raise ValueError(f"this server knows no request of kind {request.kind}")
            if request.peer.rank == NOT_JOINED:
                raise explain_fenced(request.peer)
            if request.kind not in (GroupMessage.SAVED, GroupMessage.RELEASE):
                if request.payload is not None:
                    request.pieces = unpack(request.payload)
                if self._is_stale(assigned_space, request):
                    return
            if request.kind in OPERATIONS:
                assigned_space.operations += 1
            handler(assigned_space, request)
        except Exception as error:
            self.fail(assigned_space, request, error)

    def answer_whole(
        self, assigned_space: AssignedSpace, peer: ServerPeer, call: MailboxCall, head: MailboxHead
    ) -> bool:
        """Serve a push of whole dense segments and their pull by the fast path, `WholePush`.

        Return False, without effect, if the request needs the general path, `answer`.
        """
        if (
            call.kind != GroupMessage.PUSH_PULL
            or peer.rank < 0
            or self._readers
            or self._is_fenced(assigned_space, peer)
        ):
            return False
        peer.push = WholePush.of(assigned_space, head, peer.rank)
        if peer.push is None or not peer.push.takes(call.step, call.weight):
            return False
        self._serve_whole(assigned_space, peer, peer.push, call)
        return True

    def answer_again(self, assigned_space: AssignedSpace, peer: ServerPeer, push: WholePush) -> bool:
        """Serve a mailbox request with `push`, which `answer_whole` prepared for an earlier request.

        Return False, without effect, if the request has another head, or needs the general path, `answer`.
        """
        mailbox = peer.mailbox
        assert mailbox is not None, "a connection with a prepared push has a mailbox"
        kind, number, _, step, patience, weight = mailbox.request()
        if kind != GroupMessage.PUSH_PULL or number != mailbox.number or peer.rank != push.rank or self._readers:
            return False
        if push.head.assigned_space is not assigned_space or peer.incarnation < assigned_space.incarnations.get(
            push.rank, 0
        ):
            return False
        if not push.takes(step, weight):
            return False
        self._serve_whole(assigned_space, peer, push, (mailbox.begin(), kind, step, patience, weight))
        return True

    def _serve_whole(
        self, assigned_space: AssignedSpace, peer: ServerPeer, push: WholePush, call: tuple[int, int, int, int, float]
    ) -> None:
        """Apply the push, then answer or park the pull. `call` is a tuple of the fields of a `MailboxCall`."""
        tag, _, step, patience, weight = call
        assigned_space.operations += 1
        request: PeerRequest | None = None
        try:
            push.apply(step, weight)
            passing("host: applied, not forwarded")
            if assigned_space.parked:
                self.wake(assigned_space, push.rank)
            if push.may_pull(step):
                self._pull_whole(peer, tag, push)
            else:
                request = request_of(peer, MailboxCall(tag, GroupMessage.PULL, step + 1, patience, weight), push.head)
                request.referencing, request.whole = push.touched, push
                self._wait(assigned_space, request)
            passing("host: acknowledged, not saved")
        except Exception as error:
            request = request or request_of(peer, MailboxCall(*call), push.head)
            request.referencing = push.touched
            self.fail(assigned_space, request, error)

    def _pull_whole(self, peer: ServerPeer, tag: int, push: WholePush) -> None:
        """Answer the pull of a `WholePush` with the current values."""
        if not push.offered:
            for index, slice_ in push.slices:
                self._sender.offer(peer, index, slice_)
            push.offered = True
        self._sender.answer(peer, tag, *push.pulled())

    # ---- joining and fencing

    def _join(self, assigned_space: AssignedSpace, request: PeerRequest) -> None:
        peer, rank, incarnation = request.peer, request.b, int(request.weight)
        if not READER <= rank < assigned_space.space.workers:
            raise _explain_no_rank(assigned_space, rank)
        if rank != READER:
            seen = assigned_space.incarnations.get(rank, -1)
            if incarnation < seen:
                raise StaleGeneration(
                    f"{peer.link.peer} is incarnation {incarnation} of rank {rank}, but incarnation {seen} has "
                    "joined: a newer worker has this rank",
                    peer=peer.link.peer,
                    generation=incarnation,
                    expected=seen,
                )
            assigned_space.incarnations[rank] = incarnation
            self._fence(assigned_space, rank, incarnation)
        peer.space, peer.rank, peer.incarnation = assigned_space.number, rank, incarnation
        mine, first = [assigned for assigned in assigned_space.primaries() if assigned.usable], -1
        if len(request.payload) == JOIN_PAYLOAD.size:
            peer.patience, first = JOIN_PAYLOAD.unpack(request.payload)
        if first >= 0 and rank != READER:
            for assigned in mine:
                if isinstance(assigned.segment, DenseSegment):
                    assigned.segment.skip(rank, first)
            self.wake(assigned_space)
        pairs: list[int] = []
        for assigned in mine if rank != READER else []:
            segment = segment_of(assigned)  # the worker repeats pushes that backups lack, so that no death loses them
            pairs += [assigned.index, segment.marks()[rank] if assigned_space.static else segment.durable(rank)]
        self.reply(request, GroupMessage.JOINED, mine, payload=pack_numbers(pairs))

    def _take_rank(self, assigned_space: AssignedSpace, request: PeerRequest) -> None:
        rank = request.b
        if not 0 <= rank < assigned_space.space.workers:
            raise _explain_no_rank(assigned_space, rank)
        assigned_space.incarnations[rank] = incarnation = assigned_space.incarnations.get(rank, 0) + 1
        self._fence(assigned_space, rank, incarnation)
        self.reply(request, GroupMessage.ACK, [], payload=pack_numbers([incarnation]))

    def _fence(self, assigned_space: AssignedSpace, rank: int, incarnation: int) -> None:
        """Refuse the parked requests of earlier incarnations of a rank."""
        for request in [r for r in assigned_space.parked if r.peer.rank == rank and r.peer.incarnation < incarnation]:
            remove(assigned_space.parked, request)
            self.fail(assigned_space, request, explain_fenced(request.peer))

    def fences(self, assigned_space: AssignedSpace, request: PeerRequest) -> bool:
        """Return whether a newer incarnation of the request's rank has joined."""
        return self._is_fenced(assigned_space, request.peer)

    @staticmethod
    def _is_fenced(assigned_space: AssignedSpace, peer: ServerPeer) -> bool:
        return peer.rank >= 0 and peer.incarnation < assigned_space.incarnations.get(peer.rank, 0)

    def _is_stale(self, assigned_space: AssignedSpace, request: PeerRequest) -> bool:
        """Answer STALE and return True if a segment of the request is not served here in the requested generation.

        Raises StaleGeneration if a newer incarnation of the rank has joined.
        """
        if self.fences(assigned_space, request):
            raise explain_fenced(request.peer)
        here = assigned_space.by_index
        loads = request.kind == GroupMessage.LOAD
        wrong = []
        for piece in request.pieces:
            assigned = here.get(piece.segment)
            here_now = assigned is not None and assigned.serves and assigned.generation == piece.generation
            if assigned is None or not here_now or not (assigned.usable or loads):
                wrong.append(piece.segment)
        if wrong:
            self.send_stale(request, wrong)
        return bool(wrong)

    # ---- pushes

    def _push(self, assigned_space: AssignedSpace, request: PeerRequest) -> None:
        if not self._admits(assigned_space, request):
            return
        self.reply(request, GroupMessage.ACK, self._apply(assigned_space, request))
        passing("host: acknowledged, not saved")

    def _push_pull(self, assigned_space: AssignedSpace, request: PeerRequest) -> None:
        if not self._admits(assigned_space, request):
            return
        self._apply(assigned_space, request)
        request.kind = GroupMessage.PULL
        request.a += 1
        if request.payload is not None:
            request.pieces = [SegmentPayload(piece.segment, piece.generation, b"") for piece in request.pieces]
        self._wait(assigned_space, request)
        passing("host: acknowledged, not saved")

    def _apply(self, assigned_space: AssignedSpace, request: PeerRequest) -> list[AssignedSegment]:
        rank, step, weight = request.peer.rank, request.a, request.weight
        if rank == READER:
            raise ValueError(f"{request.peer.link.peer} joined as a reader: only a worker can push")
        touched = [assigned_space.by_index[piece.segment] for piece in request.pieces]
        if request.payload is None:
            request.referencing = touched
        self._check_bytes(assigned_space, touched)
        if len(touched) > 1:  # the push to a single segment checks itself
            for assigned, piece in zip(touched, request.pieces, strict=True):
                segment_of(assigned).check(rank, step, weight, piece.data)
        changed = []
        for assigned, piece in zip(touched, request.pieces, strict=True):
            changes = segment_of(assigned).push(rank, step, weight, piece.data)
            if changes:
                changed.append((assigned, changes))
        passing("host: applied, not forwarded")
        self._replication.forward(changed)
        passing("host: forwarded, not copied")
        if assigned_space.parked:
            self.wake(assigned_space, rank)
        if assigned_space.number in self._readers:
            self._readers[assigned_space.number].check()
        return touched

    def _check_bytes(self, assigned_space: AssignedSpace, touched: list[AssignedSegment]) -> None:
        """Refuse a push that creates rows if the space has reached its quota of bytes."""
        most = assigned_space.space.quota.bytes
        if most is None or all(assigned_space.space.table_of(assigned.index) is None for assigned in touched):
            return
        tables = sum(table.segments for table in assigned_space.space.tables)
        here = [h for h in assigned_space.primaries() if assigned_space.space.table_of(h.index) is not None]
        used = sum(segment_of(assigned).nbytes for assigned in here)
        layout = assigned_space.space.layout
        dense = 0 if layout is None else layout.size * layout.dtype.itemsize
        if used > (most - dense) * len(here) / tables:
            raise _explain_over_quota(assigned_space, dense + used * tables // len(here), used, most)

    # ---- arrivals

    def _arrive(self, assigned_space: AssignedSpace, request: PeerRequest) -> None:
        rank, piece = request.peer.rank, request.pieces[0]
        if not backup_in(assigned_space.space.strategy) or piece.segment or rank == READER:
            raise ValueError(f"{request.peer.link.peer} sent ARRIVE: it is for workers, about segment 0, with backup")
        if assigned_space.number not in self._arrivals:
            first = min(segment_of(assigned_space.by_index[0]).marks().values())
            self._arrivals[assigned_space.number] = Arrivals(assigned_space.space.workers, first)
        arrivals = self._arrivals[assigned_space.number]
        wakes = arrivals.record(rank, request.a, int(request.weight), piece.data)
        self._wait(assigned_space, request)
        if wakes:
            self.wake(assigned_space)

    def _serve_arrival(self, assigned_space: AssignedSpace, request: PeerRequest) -> bool:
        piece = request.pieces[0]
        arrivals = self._arrivals[assigned_space.number]
        found = arrivals.answer(request.peer.rank, request.a, int(request.weight), piece.data)
        if found is None:
            return False
        touched = [assigned_space.by_index[piece.segment]]
        answer = SegmentPayload(piece.segment, piece.generation, found)
        self.reply(request, GroupMessage.VALUE, touched, payload=pack([answer]))
        return True

    # ---- pulls

    def _wait(self, assigned_space: AssignedSpace, request: PeerRequest) -> None:
        """Serve a request now if it need not wait, else park it."""
        if request.peer.rank == READER and request.kind == GroupMessage.PULL:
            raise ValueError(f"{request.peer.link.peer} joined as a reader and has no clock: send READ, not PULL")
        if not self._serve_waiting(assigned_space, request):
            seconds = request.b / 1000 if request.b > 0 else request.peer.patience
            if request.kind == GroupMessage.PART and request.b <= 0:
                seconds = math.inf  # the wait ends when the connection is lost
            request.parked = time.monotonic()
            request.deadline = request.parked + seconds
            assigned_space.parked.append(request)

    def _serve_waiting(
        self, assigned_space: AssignedSpace, request: PeerRequest, shared: dict[Any, Any] | None = None
    ) -> bool:
        rank, push = request.peer.rank, request.whole
        if push is not None and push.takes(request.a - 1, request.weight):
            if not push.may_pull(request.a - 1):
                return False
            self._pull_whole(request.peer, request.tag, push)
            return True
        touched = [assigned_space.by_index[piece.segment] for piece in request.pieces]
        if request.kind == GroupMessage.FLUSH:
            if rank != READER and any(h.marks().get(rank, 0) > segment_of(h).durable(rank) for h in touched):
                return False
            self.reply(request, GroupMessage.ACK, touched)
        elif request.kind == GroupMessage.PART:
            return self._serve_part(request, touched)
        elif request.kind == GroupMessage.ARRIVE:
            return self._serve_arrival(assigned_space, request)
        else:
            for assigned in touched:
                segment = segment_of(assigned)
                if not segment.may_pull(rank, request.a or None) or segment.marks().get(rank, 0) < request.a:
                    return False
            self._serve_pull(request, touched, shared)
        return True

    def _serve_pull(self, request: PeerRequest, touched: list[AssignedSegment], shared: dict[Any, Any] | None) -> None:
        """Answer with the current values.

        `shared`: packed values by segment numbers, which all pulls that one call of `wake` serves have in common.
        """
        if request.payload is None and not any(map(_borrows, touched)):
            self._pull_by_memory(request, touched)
            return
        rank, lead, pieces, changed = request.peer.rank, 0, [], []
        for assigned, piece in zip(touched, request.pieces, strict=True):
            value, ahead, changes = segment_of(assigned).pull(rank, piece.data)
            lead = max(lead, ahead)
            pieces.append(SegmentPayload(piece.segment, piece.generation, value))
            if changes:
                changed.append((assigned, changes))
        self._replication.forward(changed)
        key = None
        dense = all(isinstance(assigned.segment, DenseSegment) for assigned in touched)
        if shared is not None and dense and not any(len(piece.data) for piece in request.pieces):
            key = tuple(assigned.index for assigned in touched)
        payload = shared.get(key) if shared and key else None
        if payload is None:
            payload = pack(pieces)
            if shared is not None and key:
                shared[key] = payload
        self.reply(request, GroupMessage.VALUE, touched, lead=lead, payload=payload)

    def _pull_by_memory(self, request: PeerRequest, touched: list[AssignedSegment]) -> None:
        """Answer a pull by mailbox.

        The worker reads dense segments in this server's memory; rows of tables are written into the worker's memory.
        """
        rank, lead, changed, peer = request.peer.rank, 0, [], request.peer
        for assigned, piece, out in zip(touched, request.pieces, request.outs, strict=True):
            segment = segment_of(assigned)
            if isinstance(segment, DenseSegment):
                ahead = segment.pulled(rank)
                self._sender.offer(peer, assigned.index, segment.share())
            else:
                value, ahead, changes = segment.pull(rank, piece.data, out)
                if value is not out:
                    _put(out, value)
                if changes:
                    changed.append((assigned, changes))
            lead = max(lead, ahead)
        self._replication.forward(changed)
        self.reply(request, GroupMessage.VALUE, touched, lead=lead)

    def _read(self, assigned_space: AssignedSpace, request: PeerRequest) -> None:
        touched = [assigned_space.by_index[piece.segment] for piece in request.pieces]
        if request.payload is None and not any(map(_borrows, touched)):
            for assigned, piece, out in zip(touched, request.pieces, request.outs, strict=True):
                segment = segment_of(assigned)
                if isinstance(segment, DenseSegment):
                    self._sender.offer(request.peer, assigned.index, segment.share())
                else:
                    _put(out, segment.read(piece.data))
            self.reply(request, GroupMessage.VALUE, touched)
            return
        self._reply_values(assigned_space, request, lambda segment, data: segment.read(data))

    def _reply_changes(self, assigned_space: AssignedSpace, request: PeerRequest) -> None:
        self._reply_values(assigned_space, request, _pack_changed)

    def _reply_marks(self, assigned_space: AssignedSpace, request: PeerRequest) -> None:
        self._reply_values(assigned_space, request, lambda segment, data: pack_numbers(segment.marks().values()))

    def _change_members(self, assigned_space: AssignedSpace, request: PeerRequest) -> None:
        """Apply a change of the ranks that take part, and serve the pulls that waited for a rank that has left."""
        if request.peer.rank != READER:
            raise ValueError(f"{request.peer.link.peer} joined as a worker: only a reader (rank -1) changes members")
        touched = [assigned_space.by_index[piece.segment] for piece in request.pieces]
        given = [MemberChange.decode(piece.data) for piece in request.pieces]
        changed = []
        for assigned, change in zip(touched, given, strict=True):
            if change.kind is MemberChangeKind.ADMIT and request.weight > assigned_space.incarnations.get(
                change.rank, -1
            ):
                assigned_space.incarnations[change.rank] = int(request.weight)
                self._fence(assigned_space, change.rank, int(request.weight))
            changed.append((assigned, segment_of(assigned).change_members(change)))
        self._replication.forward(changed)
        self.wake(assigned_space)
        if assigned_space.number in self._readers:  # a consistent pull may have waited for the rank
            self._readers[assigned_space.number].check()
        self._reply_marks(assigned_space, request)

    def _reply_values(
        self, assigned_space: AssignedSpace, request: PeerRequest, read: Callable[[ServedSegment, memoryview], Any]
    ) -> None:
        touched = [assigned_space.by_index[piece.segment] for piece in request.pieces]
        pieces = [
            SegmentPayload(p.segment, p.generation, read(segment_of(h), p.data))
            for h, p in zip(touched, request.pieces, strict=True)
        ]
        self.reply(request, GroupMessage.VALUE, touched, payload=pack(pieces))

    def bound_moved(self, assigned_space: AssignedSpace) -> None:
        """Serve the requests that need not wait any more, because the staleness bound may have moved."""
        if assigned_space.parked:
            self.wake(assigned_space)
        if assigned_space.number in self._readers:
            self._readers[assigned_space.number].check()

    def wake(self, assigned_space: AssignedSpace, by: int = READER) -> None:
        """Serve the parked requests that need not wait any more; `by` is the rank whose push allows it, if one does."""
        shared: dict[Any, Any] = {}
        for request in list(assigned_space.parked):
            if request not in assigned_space.parked:
                continue  # `forget` removed it: its connection was lost while another request was served
            try:
                if self._serve_waiting(assigned_space, request, shared):
                    remove(assigned_space.parked, request)
                    if by >= 0:
                        at = request.peer.rank, by
                        seconds = time.monotonic() - request.parked
                        assigned_space.delays[at] = assigned_space.delays.get(at, 0.0) + seconds
            except Exception as error:
                remove(assigned_space.parked, request)
                self.fail(assigned_space, request, error)

    # ---- consistent readers

    def _find_reader(self, assigned_space: AssignedSpace) -> ConsistentReaders:
        found = self._readers.get(assigned_space.number)
        if found is None:
            found = self._readers[assigned_space.number] = ConsistentReaders(assigned_space, self)
        return found

    def _admits(self, assigned_space: AssignedSpace, push: PeerRequest) -> bool:
        readers = self._readers.get(assigned_space.number)
        return readers is None or readers.admits(push)

    def serve_delayed(self, assigned_space: AssignedSpace, request: PeerRequest) -> None:
        """Serve a push that was delayed while a reader held the space."""
        try:
            if not self._is_stale(assigned_space, request):
                self._answers[request.kind](assigned_space, request)
        except Exception as error:
            self.fail(assigned_space, request, error)

    def reads(self, assigned_space: AssignedSpace) -> bool:
        """Return whether a reader holds the space, or waits for it."""
        readers = self._readers.get(assigned_space.number)
        if readers is not None and not readers.busy:
            del self._readers[assigned_space.number]
            return False
        return readers is not None

    def expire(self, assigned_space: AssignedSpace, now: float) -> None:
        """Refuse requests whose deadline has passed (see `PendingReplies.expire`), and end a reader's expired hold."""
        arrivals = self._arrivals.get(assigned_space.number)
        for request in [r for r in assigned_space.parked if r.kind == GroupMessage.ARRIVE and r.deadline < now]:
            assert arrivals is not None, "its first ARRIVE has made it"
            remove(assigned_space.parked, request)
            peer, piece = request.peer, request.pieces[0].data
            error = arrivals.too_late(peer.patience, peer.link.peer, request.a, int(request.weight), piece)
            self.fail(assigned_space, request, error)
        super().expire(assigned_space, now)
        if assigned_space.number in self._readers:
            self._readers[assigned_space.number].expire(now)

    def forget(self, assigned_space: AssignedSpace, peer: ServerPeer) -> None:
        """Drop the requests and answers of a lost connection, and end its hold of the space if it is a reader."""
        super().forget(assigned_space, peer)
        if assigned_space.number in self._readers:
            self._readers[assigned_space.number].forget(peer)

    def stop_serving(self, assigned: AssignedSegment) -> None:
        """Refuse the parked requests that touch this segment, and end a reader's hold of it. The reader tries again."""
        super().stop_serving(assigned)
        if assigned.space.number in self._readers:
            for request in self._readers[assigned.space.number].stop_serving(assigned.index):
                self.send_stale(request, [assigned.index])

    # ---- states

    def _load(self, assigned_space: AssignedSpace, request: PeerRequest) -> None:
        if request.peer.rank != READER:
            raise ValueError(f"{request.peer.link.peer} joined as a worker: only a reader (rank -1) can load a state")
        made: list[tuple[AssignedSegment, ServedSegment]] = []
        for piece in request.pieces:
            segment = assigned_space.make(piece.segment)
            segment.load(piece.data)
            made.append((assigned_space.by_index[piece.segment], segment))
        most = assigned_space.space.quota.bytes
        replaced = {assigned.index for assigned, _ in made}
        used = sum(segment.nbytes for _, segment in made)
        used += sum(segment_of(h).nbytes for h in assigned_space.primaries() if h.usable and h.index not in replaced)
        if most is not None and used > most:
            raise _explain_over_quota(
                assigned_space,
                used * assigned_space.space.segments // max(1, len(assigned_space.primaries())),
                used,
                most,
            )
        for assigned, segment in made:
            old = segment_of(assigned)
            segment.seq = max(segment.seq, old.seq) + 1  # no backup of the old state has the same mark as the new one
            getattr(old, "close", lambda: None)()
            assigned.segment, assigned.usable, assigned.state_generation = segment, True, assigned.generation
            segment.copied = bool(assigned.copies)
            self._replication.resend_states(assigned)
        self.reply(request, GroupMessage.ACK, [assigned for assigned, _ in made])
        self.wake(assigned_space)

    def _reply_part(self, assigned_space: AssignedSpace, request: PeerRequest) -> None:
        touched = [assigned_space.by_index[piece.segment] for piece in request.pieces]
        rounds = request.a
        if rounds >= 0:
            for assigned in touched:
                segment = segment_of(assigned)
                closed = segment.closed
                if segment.part(rounds) is None and closed != rounds:
                    if closed > rounds:
                        raise RaypsError(
                            f"segment {assigned.index} of space {assigned_space.space.name!r} has no state after round "
                            f"{rounds}: this state was dropped, or was requested only after the round had ended"
                        )
                    segment.keep([rounds])
        self._wait(assigned_space, request)

    def _serve_part(self, request: PeerRequest, touched: list[AssignedSegment]) -> bool:
        rounds, states = request.a, []
        for segment in map(segment_of, touched):
            now = rounds < 0 or segment.closed == rounds
            state = segment.part(rounds) or (segment.dump() if now else None)
            if state is None:
                return False
            states.append(state)
        for assigned in touched:
            assigned.saving[rounds] = {r: min(s, rounds) if rounds >= 0 else s for r, s in assigned.marks().items()}
        pieces = [SegmentPayload(p.segment, p.generation, s) for p, s in zip(request.pieces, states, strict=True)]
        self.reply(request, GroupMessage.VALUE, touched, payload=pack(pieces))
        return True

    def _record_saved(self, assigned_space: AssignedSpace, request: PeerRequest) -> None:
        for assigned in assigned_space.primaries():
            assigned.record_saved_state(request.a)


def _borrows(assigned: AssignedSegment) -> bool:
    """Return whether a segment is of a branch, and still reads its base's memory.

    Its values must then be sent by message.
    """
    return isinstance(assigned.segment, DenseSegment) and assigned.segment.borrows


def _put(out: memoryview, value: Any) -> None:
    """Write the rows `value` into the memory `out`. Raises ValueError if the sizes differ."""
    found = memoryview(value).cast("B")
    if len(found) != len(out):
        raise ValueError(f"the answer has {len(found)} bytes, but the request has room for {len(out)}")
    out[:] = found


def _pack_changed(segment: ServedSegment, data: memoryview) -> bytes:
    return segment.changed_since(read_numbers(data)[0])


def _explain_no_rank(assigned_space: AssignedSpace, rank: int) -> ValueError:
    count = assigned_space.space.workers
    return ValueError(
        f"rank {rank} does not exist in space {assigned_space.space.name!r}: its {count} workers have the ranks 0 to "
        f"{count - 1}"
    )


def _explain_over_quota(assigned_space: AssignedSpace, total: int, here: int, most: int) -> ConfigError:
    """Return the error of a space over its quota: `total` bytes on all servers, by estimate, and `here` on this one."""
    return ConfigError(
        f"space {assigned_space.space.name!r} has about {total} bytes on all servers ({here} on this one), and its "
        f"quota is {most}: raise `quota.bytes` (`rayps servers quota`), or give its tables a policy that evicts rows",
        field="quota.bytes",
        used=total,
        limit=most,
    )


log = logging.getLogger(__name__)
