"""Serve the requests of workers on the segments of a server, and hold back the answers that must wait.

A request is applied to all of its segments or to none: the server first compares the generations of all segments, then
checks the push to each, and only then applies them. An answer is *withheld* until the backups have acknowledged the
changes that it reports (`Replication.needs`). A pull is *parked* until the staleness bound allows it.
"""

from __future__ import annotations

import logging
import math
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from rayps.comm.link import Message
from rayps.core.errors import ConfigError, PeerTimeout, RaypsError, StaleGeneration
from rayps.core.failpoint import passing
from rayps.ps.protocol.mailbox import MailboxCall, SharedSlice
from rayps.ps.protocol.messages import GroupMessage, SegmentPayload, numbers, pack, read_numbers, refusal, unpack
from rayps.ps.protocol.space import ServedSegment
from rayps.ps.server.assignments import AssignedSegment, AssignedSpace
from rayps.ps.server.connection import NOT_JOINED, PeerRequest, ServerPeer, fenced
from rayps.ps.server.consistent_readers import ConsistentReaders
from rayps.ps.server.dense_segment import DenseSegment
from rayps.ps.server.mailboxes import MailboxHead, WholePush, request_of
from rayps.ps.server.replication import Peer, Replication, stuck_on
from rayps.ps.tables.delta import delta
from rayps.ps.tables.table_segment import TableSegment

READER = -1
OPERATIONS = frozenset({GroupMessage.PUSH, GroupMessage.PULL, GroupMessage.PUSH_PULL, GroupMessage.READ})
_JOIN = struct.Struct("<dq")


@dataclass(slots=True, eq=False)
class Withheld:
    """An answer that waits until the backups have acknowledged the changes that it reports."""

    request: PeerRequest
    message: Message
    payload: Any
    holdings: list[AssignedSegment]
    needs: dict[Peer, int]
    deadline: float


class ReplySender(Protocol):
    """What `PendingReplies` calls on the server to send answers. A guest is a connection to the server."""

    def say(self, guest: ServerPeer, message: Message, payload: Any) -> None:
        """Queue a message on a connection; close the connection if that fails."""

    def answer(self, guest: ServerPeer, tag: int, version: int, lead: int, durable: int) -> None:
        """Answer a request that came by mailbox and whose values the worker reads in shared memory."""

    def offer(self, guest: ServerPeer, segment: int, slice_: SharedSlice) -> None:
        """Give a worker on this host access to a segment's memory."""


class PendingReplies:
    """Sends answers, and holds back answers that must wait for backups."""

    def __init__(self, copies: Replication, mouth: ReplySender, name: str) -> None:
        """`copies`: the backups for which answers wait. `mouth`: sends answers. `name`: the server's name."""
        self._copies, self._mouth, self._name = copies, mouth, name

    def fail(self, held: AssignedSpace | None, request: PeerRequest, error: Exception) -> None:
        """Answer a request with an error. An unexpected error of the server is logged, and the server continues."""
        if not isinstance(error, (ValueError, RaypsError)):
            log.error("a request of kind %d failed", request.kind, exc_info=error)
            error = RaypsError(f"{self._name} failed: {type(error).__name__}: {error}")
        if held is not None and isinstance(error, ConfigError):
            held.rejected += 1
        release(request)
        self._mouth.say(request.guest, Message(GroupMessage.ERROR, request.tag), refusal(request.tag, error)[1])

    def say_stale(self, request: PeerRequest, segments: Iterable[int]) -> None:
        """Answer STALE: these segments are not served here in the requested generation; nothing was applied."""
        release(request)
        self._mouth.say(request.guest, Message(GroupMessage.STALE, request.tag), numbers(segments))

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
        rank = request.guest.rank
        durable = min((holding.durable(rank) for holding in touched), default=0) if rank >= 0 else 0
        version = min((segment_of(holding).version for holding in touched), default=0)
        message = Message(kind, request.tag, version, lead, float(durable))
        needs = self._copies.needs(touched)
        if needs:
            deadline = time.monotonic() + request.guest.patience
            withheld = Withheld(request, message, payload, touched, needs, deadline)
            touched[0].space.withheld.append(withheld)
        else:
            self._mouth.say(request.guest, message, payload)

    def settled(self, held: AssignedSpace, *, anew: bool) -> None:
        """Send the withheld answers whose backups have now acknowledged.

        `anew`: determine again for which backups each answer waits, because these may have changed.
        """
        left: list[Withheld] = []
        free: list[Withheld] = []
        for answer in held.withheld:
            if anew:
                answer.needs = self._copies.needs(answer.holdings)
            waits = any(peer.acked < tag for peer, tag in answer.needs.items())
            (left if waits else free).append(answer)
        if free:
            held.withheld = left
            passing("host: copied, not acknowledged")
            for answer in free:
                self._mouth.say(answer.request.guest, answer.message, answer.payload)

    def stop_serving(self, holding: AssignedSegment) -> None:
        """Refuse the parked requests that touch this segment."""
        held = holding.space
        gone = [request for request in held.parked if any(p.segment == holding.index for p in request.pieces)]
        if gone:
            held.parked = [request for request in held.parked if request not in gone]
            for request in gone:
                self.say_stale(request, [holding.index])

    def withdraw(self, holding: AssignedSegment) -> None:
        """Answer STALE in place of the withheld answers about this segment.

        They waited for backups whose state this server no longer knows.
        """
        held = holding.space
        gone = [answer for answer in held.withheld if holding in answer.holdings]
        for answer in [answer for answer in gone if answer.message.kind == GroupMessage.JOINED]:
            gone.remove(answer)  # it is still true of its other segments: only this segment's pair is removed
            answer.holdings.remove(holding)
            pairs = read_numbers(answer.payload)
            kept = [pair for pair in zip(pairs[::2], pairs[1::2], strict=True) if pair[0] != holding.index]
            answer.payload = numbers(value for pair in kept for value in pair)
        if gone:
            held.withheld = [answer for answer in held.withheld if answer not in gone]
            for answer in gone:
                self.say_stale(answer.request, [holding.index])

    def forget(self, held: AssignedSpace, guest: ServerPeer) -> None:
        """Drop the requests and answers of a lost connection, and stop using its worker's memory."""
        held.parked = [request for request in held.parked if request.guest is not guest]
        held.withheld = [answer for answer in held.withheld if answer.request.guest is not guest]
        if guest.rank >= 0:
            for holding in held.primaries():
                copy_pushes(holding, guest.rank)

    def expire(self, held: AssignedSpace, now: float) -> None:
        """Refuse requests whose deadline has passed; the error names the ranks or servers for which they waited."""
        for request in [waiting for waiting in held.parked if waiting.deadline < now]:
            remove(held.parked, request)
            behind = sorted(
                {
                    rank
                    for p in request.pieces
                    if p.segment in held.holdings
                    for rank in segment_of(held.holdings[p.segment]).laggards()
                }
            )
            names = ", ".join(f"rank {rank}" for rank in behind) or "the other ranks"
            marks = [mark for p in request.pieces if (h := held.holdings.get(p.segment)) for mark in h.marks().values()]
            self.fail(
                held,
                request,
                PeerTimeout(
                    f"{request.guest.link.peer} waited {request.guest.patience:g} s on {self._name} for {names} to "
                    f"push step {min(marks, default=0)}: raise `timeout` if a step may take longer",
                    peer=f"worker-{behind[0]}" if behind else "server",
                    seconds=request.guest.patience,
                    ranks=behind,
                    server=self._name,
                ),
            )
        for answer in [waiting for waiting in held.withheld if waiting.deadline < now]:
            remove(held.withheld, answer)
            names = ", ".join(stuck_on(answer.needs))
            self.fail(
                held,
                answer.request,
                PeerTimeout(
                    f"the backups on {names} have not acknowledged in time the changes that "
                    f"{answer.request.guest.link.peer} pushed or read: raise `timeout` if this may take longer",
                    peer=names,
                ),
            )


def segment_of(holding: AssignedSegment) -> ServedSegment:
    """Return the segment that a primary holds."""
    assert holding.segment is not None
    return holding.segment


def copy_pushes(holding: AssignedSegment, rank: int) -> None:
    """Copy a rank's pushes that a segment still needs into the server's memory, before the rank overwrites them."""
    if isinstance(holding.segment, DenseSegment):
        holding.segment.copy_pushes(rank)


def release(request: PeerRequest) -> None:
    """Stop using a mailbox request's memory. Call it before the answer, after which the worker may overwrite it."""
    for holding in request.referencing:
        copy_pushes(holding, request.guest.rank)


def remove(waiting: list[Any], item: object) -> None:
    """Remove an item from a list if it is in the list."""
    if item in waiting:  # else `forget` has removed it, because its connection was lost meanwhile
        waiting.remove(item)


class RequestHandler(PendingReplies):
    """Serves the requests for the segments that this server holds."""

    def __init__(self, copies: Replication, mouth: ReplySender, name: str) -> None:
        super().__init__(copies, mouth, name)
        self._readers: dict[int, ConsistentReaders] = {}  # by space, while a reader holds the space or waits for it
        self._answers: dict[int, Callable[[AssignedSpace, PeerRequest], None]] = {
            GroupMessage.PUSH: self._push,
            GroupMessage.PULL: self._wait,
            GroupMessage.PUSH_PULL: self._push_pull,
            GroupMessage.READ: self._read,
            GroupMessage.LOAD: self._load,
            GroupMessage.PART: self._part,
            GroupMessage.SAVED: self._saved,
            GroupMessage.FLUSH: self._wait,
            GroupMessage.CHANGES: self._changes,
            GroupMessage.MARKS: self._marks,
            GroupMessage.HOLD: lambda held, request: self._reader(held).hold(request),
            GroupMessage.AIM: lambda held, request: self._reader(held).aim(request),
            GroupMessage.RELEASE: lambda held, request: self._reader(held).release(request.guest),
        }

    def answer(self, held: AssignedSpace, request: PeerRequest) -> None:
        """Serve one request, or park it."""
        try:
            if request.kind in (GroupMessage.JOIN, GroupMessage.SEAT):
                (self._join if request.kind == GroupMessage.JOIN else self._seat)(held, request)
                return
            handler = self._answers.get(request.kind)
            if handler is None:
                raise ValueError(f"this server knows no request of kind {request.kind}")
            if request.guest.rank == NOT_JOINED:
                raise fenced(request.guest)
            if request.kind not in (GroupMessage.SAVED, GroupMessage.RELEASE):
                if request.payload is not None:
                    request.pieces = unpack(request.payload)
                if self._is_stale(held, request):
                    return
            if request.kind in OPERATIONS:
                held.operations += 1
            handler(held, request)
        except Exception as error:
            self.fail(held, request, error)

    def answer_whole(self, held: AssignedSpace, guest: ServerPeer, call: MailboxCall, head: MailboxHead) -> bool:
        """Serve a push of whole dense segments and their pull by the fast path, `WholePush`.

        Return False, without effect, if the request needs the general path, `answer`.
        """
        if call.kind != GroupMessage.PUSH_PULL or guest.rank < 0 or self._readers or self._is_fenced(held, guest):
            return False
        guest.push = WholePush.of(held, head, guest.rank)
        if guest.push is None or not guest.push.takes(call.step, call.weight):
            return False
        self._serve_whole(held, guest, guest.push, call)
        return True

    def answer_again(self, held: AssignedSpace, guest: ServerPeer, push: WholePush) -> bool:
        """Serve a mailbox request with `push`, which `answer_whole` has prepared for an earlier one with the same head.

        Return False, without effect, if the request must be read from the mailbox and served in another way.
        """
        box = guest.box
        assert box is not None, "a connection with a prepared push has a mailbox"
        kind, number, _, step, patience, weight = box.request()
        if kind != GroupMessage.PUSH_PULL or number != box.number or guest.rank != push.rank or self._readers:
            return False
        if push.head.held is not held or guest.incarnation < held.incarnations.get(push.rank, 0):
            return False
        if not push.takes(step, weight):
            return False
        self._serve_whole(held, guest, push, (box.begin(), kind, step, patience, weight))
        return True

    def _serve_whole(
        self, held: AssignedSpace, guest: ServerPeer, push: WholePush, call: tuple[int, int, int, int, float]
    ) -> None:
        """Apply the push, then answer or park the pull. `call` has the fields of a `MailboxCall`."""
        tag, _, step, patience, weight = call
        held.operations += 1
        request: PeerRequest | None = None
        try:
            push.apply(step, weight)
            passing("host: applied, not forwarded")
            if held.parked:
                self.wake(held)
            if push.may_pull(step):
                self._pull_whole(guest, tag, push)
            else:
                request = request_of(guest, MailboxCall(tag, GroupMessage.PULL, step + 1, patience, weight), push.head)
                request.referencing, request.whole = push.touched, push
                self._wait(held, request)
            passing("host: acknowledged, not saved")
        except Exception as error:
            request = request or request_of(guest, MailboxCall(*call), push.head)
            request.referencing = push.touched
            self.fail(held, request, error)

    def _pull_whole(self, guest: ServerPeer, tag: int, push: WholePush) -> None:
        """Answer the pull of a `WholePush` with the current values."""
        if not push.offered:
            for index, slice_ in push.slices:
                self._mouth.offer(guest, index, slice_)
            push.offered = True
        self._mouth.answer(guest, tag, *push.pulled())

    # ---- joining and fencing

    def _join(self, held: AssignedSpace, request: PeerRequest) -> None:
        guest, rank, incarnation = request.guest, request.b, int(request.weight)
        if not READER <= rank < held.space.workers:
            raise _no_rank(held, rank)
        if rank != READER:
            seen = held.incarnations.get(rank, -1)
            if incarnation < seen:
                raise StaleGeneration(
                    f"{guest.link.peer} is incarnation {incarnation} of rank {rank}, but incarnation {seen} has "
                    "joined: a newer worker has this rank",
                    peer=guest.link.peer,
                    generation=incarnation,
                    expected=seen,
                )
            held.incarnations[rank] = incarnation
            self._fence(held, rank, incarnation)
        guest.space, guest.rank, guest.incarnation = held.number, rank, incarnation
        mine, first = [holding for holding in held.primaries() if holding.usable], -1
        if len(request.payload) == _JOIN.size:
            guest.patience, first = _JOIN.unpack(request.payload)
        if first >= 0 and rank != READER:
            for holding in mine:
                if isinstance(holding.segment, DenseSegment):
                    holding.segment.skip(rank, first)
            self.wake(held)
        pairs: list[int] = []
        for holding in mine if rank != READER else []:
            segment = segment_of(holding)  # the worker repeats pushes that backups lack, so that no death loses them
            pairs += [holding.index, segment.marks()[rank] if held.static else segment.durable(rank)]
        self.reply(request, GroupMessage.JOINED, mine, payload=numbers(pairs))

    def _seat(self, held: AssignedSpace, request: PeerRequest) -> None:
        rank = request.b
        if not 0 <= rank < held.space.workers:
            raise _no_rank(held, rank)
        held.incarnations[rank] = incarnation = held.incarnations.get(rank, 0) + 1
        self._fence(held, rank, incarnation)
        self.reply(request, GroupMessage.ACK, [], payload=numbers([incarnation]))

    def _fence(self, held: AssignedSpace, rank: int, incarnation: int) -> None:
        """Refuse the parked requests of earlier incarnations of a rank."""
        for request in [r for r in held.parked if r.guest.rank == rank and r.guest.incarnation < incarnation]:
            remove(held.parked, request)
            self.fail(held, request, fenced(request.guest))

    def fences(self, held: AssignedSpace, request: PeerRequest) -> bool:
        """Return whether a newer incarnation of the request's rank has joined."""
        return self._is_fenced(held, request.guest)

    @staticmethod
    def _is_fenced(held: AssignedSpace, guest: ServerPeer) -> bool:
        return guest.rank >= 0 and guest.incarnation < held.incarnations.get(guest.rank, 0)

    def _is_stale(self, held: AssignedSpace, request: PeerRequest) -> bool:
        """Answer STALE and return True if a segment of the request is not served here in the requested generation.

        Raises StaleGeneration: a newer incarnation of the rank has joined.
        """
        if self.fences(held, request):
            raise fenced(request.guest)
        here = held.holdings
        loads = request.kind == GroupMessage.LOAD
        wrong = []
        for piece in request.pieces:
            holding = here.get(piece.segment)
            here_now = holding is not None and holding.serves and holding.generation == piece.generation
            if holding is None or not here_now or not (holding.usable or loads):
                wrong.append(piece.segment)
        if wrong:
            self.say_stale(request, wrong)
        return bool(wrong)

    # ---- pushes

    def _push(self, held: AssignedSpace, request: PeerRequest) -> None:
        if not self._admits(held, request):
            return
        self.reply(request, GroupMessage.ACK, self._apply(held, request))
        passing("host: acknowledged, not saved")

    def _push_pull(self, held: AssignedSpace, request: PeerRequest) -> None:
        if not self._admits(held, request):
            return
        self._apply(held, request)
        request.kind = GroupMessage.PULL
        request.a += 1
        if request.payload is not None:
            request.pieces = [SegmentPayload(piece.segment, piece.generation, b"") for piece in request.pieces]
        self._wait(held, request)
        passing("host: acknowledged, not saved")

    def _apply(self, held: AssignedSpace, request: PeerRequest) -> list[AssignedSegment]:
        rank, step, weight = request.guest.rank, request.a, request.weight
        if rank == READER:
            raise ValueError(f"{request.guest.link.peer} joined as a reader: only a worker can push")
        touched = [held.holdings[piece.segment] for piece in request.pieces]
        if request.payload is None:
            request.referencing = touched
        self._check_bytes(held, touched)
        if len(touched) > 1:  # the push to a single segment checks itself
            for holding, piece in zip(touched, request.pieces, strict=True):
                segment_of(holding).check(rank, step, weight, piece.data)
        changed = []
        for holding, piece in zip(touched, request.pieces, strict=True):
            changes = segment_of(holding).push(rank, step, weight, piece.data)
            if changes:
                changed.append((holding, changes))
        passing("host: applied, not forwarded")
        self._copies.forward(changed)
        passing("host: forwarded, not copied")
        if held.parked:
            self.wake(held)
        if held.number in self._readers:
            self._readers[held.number].look()
        return touched

    def _check_bytes(self, held: AssignedSpace, touched: list[AssignedSegment]) -> None:
        """Refuse a push that creates rows if the space has reached its quota of bytes."""
        most = held.space.quota.bytes
        if most is None or all(held.space.table_of(holding.index) is None for holding in touched):
            return
        tables = sum(table.segments for table in held.space.tables)
        here = [h for h in held.primaries() if held.space.table_of(h.index) is not None]
        used = sum(segment_of(holding).nbytes for holding in here)
        layout = held.space.layout
        dense = 0 if layout is None else layout.size * layout.dtype.itemsize
        if used > (most - dense) * len(here) / tables:
            raise _over(held, dense + used * tables // len(here), used, most)

    # ---- pulls

    def _wait(self, held: AssignedSpace, request: PeerRequest) -> None:
        """Serve a request at once if it need not wait, else park it."""
        if request.guest.rank == READER and request.kind == GroupMessage.PULL:
            raise ValueError(f"{request.guest.link.peer} joined as a reader and has no clock: send READ, not PULL")
        if not self._serve_waiting(held, request):
            seconds = request.b / 1000 if request.b > 0 else request.guest.patience
            if request.kind == GroupMessage.PART and request.b <= 0:
                seconds = math.inf  # the wait ends when the connection is lost
            request.deadline = time.monotonic() + seconds
            held.parked.append(request)

    def _serve_waiting(self, held: AssignedSpace, request: PeerRequest, shared: dict[Any, Any] | None = None) -> bool:
        rank, push = request.guest.rank, request.whole
        if push is not None and push.takes(request.a - 1, request.weight):
            if not push.may_pull(request.a - 1):
                return False
            self._pull_whole(request.guest, request.tag, push)
            return True
        touched = [held.holdings[piece.segment] for piece in request.pieces]
        if request.kind == GroupMessage.FLUSH:
            if rank != READER and any(h.marks().get(rank, 0) > segment_of(h).durable(rank) for h in touched):
                return False
            self.reply(request, GroupMessage.ACK, touched)
        elif request.kind == GroupMessage.PART:
            return self._serve_part(request, touched)
        else:
            for holding in touched:
                segment = segment_of(holding)
                if not segment.may_pull(rank) or segment.marks().get(rank, 0) < request.a:
                    return False
            self._serve_pull(request, touched, shared)
        return True

    def _serve_pull(self, request: PeerRequest, touched: list[AssignedSegment], shared: dict[Any, Any] | None) -> None:
        """Answer with the current values.

        `shared`: by segment numbers, packed values that the pulls served in the same call of `wake` reuse.
        """
        if request.payload is None and not any(map(_borrows, touched)):
            self._pull_by_memory(request, touched)
            return
        rank, lead, pieces, changed = request.guest.rank, 0, [], []
        for holding, piece in zip(touched, request.pieces, strict=True):
            value, ahead, changes = segment_of(holding).pull(rank, piece.data)
            lead = max(lead, ahead)
            pieces.append(SegmentPayload(piece.segment, piece.generation, value))
            if changes:
                changed.append((holding, changes))
        self._copies.forward(changed)
        key = None
        dense = all(isinstance(holding.segment, DenseSegment) for holding in touched)
        if shared is not None and dense and not any(len(piece.data) for piece in request.pieces):
            key = tuple(holding.index for holding in touched)
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
        rank, lead, changed, guest = request.guest.rank, 0, [], request.guest
        for holding, piece, out in zip(touched, request.pieces, request.outs, strict=True):
            segment = segment_of(holding)
            if isinstance(segment, DenseSegment):
                ahead = segment.pulled(rank)
                self._mouth.offer(guest, holding.index, segment.share())
            else:
                value, ahead, changes = segment.pull(rank, piece.data, out)
                if value is not out:
                    _put(out, value)
                if changes:
                    changed.append((holding, changes))
            lead = max(lead, ahead)
        self._copies.forward(changed)
        self.reply(request, GroupMessage.VALUE, touched, lead=lead)

    def _read(self, held: AssignedSpace, request: PeerRequest) -> None:
        touched = [held.holdings[piece.segment] for piece in request.pieces]
        if request.payload is None and not any(map(_borrows, touched)):
            for holding, piece, out in zip(touched, request.pieces, request.outs, strict=True):
                segment = segment_of(holding)
                if isinstance(segment, DenseSegment):
                    self._mouth.offer(request.guest, holding.index, segment.share())
                else:
                    _put(out, segment.read(piece.data))
            self.reply(request, GroupMessage.VALUE, touched)
            return
        self._say(held, request, lambda segment, data: segment.read(data))

    def _changes(self, held: AssignedSpace, request: PeerRequest) -> None:
        self._say(held, request, _changed)

    def _marks(self, held: AssignedSpace, request: PeerRequest) -> None:
        self._say(held, request, lambda segment, data: numbers(segment.marks().values()))

    def _say(self, held: AssignedSpace, request: PeerRequest, look: Callable[[ServedSegment, memoryview], Any]) -> None:
        touched = [held.holdings[piece.segment] for piece in request.pieces]
        pieces = [
            SegmentPayload(p.segment, p.generation, look(segment_of(h), p.data))
            for h, p in zip(touched, request.pieces, strict=True)
        ]
        self.reply(request, GroupMessage.VALUE, touched, payload=pack(pieces))

    def wake(self, held: AssignedSpace) -> None:
        """Serve the parked requests that need not wait any more."""
        shared: dict[Any, Any] = {}
        for request in list(held.parked):
            if request not in held.parked:
                continue  # `forget` removed it: its connection was lost while another request was served
            try:
                if self._serve_waiting(held, request, shared):
                    remove(held.parked, request)
            except Exception as error:
                remove(held.parked, request)
                self.fail(held, request, error)

    # ---- consistent readers

    def _reader(self, held: AssignedSpace) -> ConsistentReaders:
        found = self._readers.get(held.number)
        if found is None:
            found = self._readers[held.number] = ConsistentReaders(held, self)
        return found

    def _admits(self, held: AssignedSpace, push: PeerRequest) -> bool:
        readers = self._readers.get(held.number)
        return readers is None or readers.admits(push)

    def redo(self, held: AssignedSpace, request: PeerRequest) -> None:
        """Serve a push that was delayed while a reader held the space."""
        try:
            if not self._is_stale(held, request):
                self._answers[request.kind](held, request)
        except Exception as error:
            self.fail(held, request, error)

    def reads(self, held: AssignedSpace) -> bool:
        """Return whether a reader holds the space, or waits for it."""
        readers = self._readers.get(held.number)
        if readers is not None and not readers.busy:
            del self._readers[held.number]
            return False
        return readers is not None

    def expire(self, held: AssignedSpace, now: float) -> None:
        """Refuse requests whose deadline has passed (see `PendingReplies.expire`), and end a reader's expired hold."""
        super().expire(held, now)
        if held.number in self._readers:
            self._readers[held.number].expire(now)

    def forget(self, held: AssignedSpace, guest: ServerPeer) -> None:
        """Drop the requests and answers of a lost connection, and end its hold of the space if it is a reader."""
        super().forget(held, guest)
        if held.number in self._readers:
            self._readers[held.number].forget(guest)

    def stop_serving(self, holding: AssignedSegment) -> None:
        """Refuse the parked requests that touch this segment, and end a reader's hold of it; the reader tries again."""
        super().stop_serving(holding)
        if holding.space.number in self._readers:
            for request in self._readers[holding.space.number].stop_serving(holding.index):
                self.say_stale(request, [holding.index])

    # ---- states

    def _load(self, held: AssignedSpace, request: PeerRequest) -> None:
        if request.guest.rank != READER:
            raise ValueError(f"{request.guest.link.peer} joined as a worker: only a reader (rank -1) can load a state")
        made: list[tuple[AssignedSegment, ServedSegment]] = []
        for piece in request.pieces:
            segment = held.make(piece.segment)
            segment.load(piece.data)
            made.append((held.holdings[piece.segment], segment))
        most = held.space.quota.bytes
        replaced = {holding.index for holding, _ in made}
        used = sum(segment.nbytes for _, segment in made)
        used += sum(segment_of(h).nbytes for h in held.primaries() if h.usable and h.index not in replaced)
        if most is not None and used > most:
            raise _over(held, used * held.space.segments // max(1, len(held.primaries())), used, most)
        for holding, segment in made:
            old = segment_of(holding)
            segment.seq = max(segment.seq, old.seq) + 1  # no backup of the old state has the same mark as the new one
            getattr(old, "close", lambda: None)()
            holding.segment, holding.usable, holding.line = segment, True, holding.generation
            segment.copied = bool(holding.copies)
            self._copies.restate(holding)
        self.reply(request, GroupMessage.ACK, [holding for holding, _ in made])
        self.wake(held)

    def _part(self, held: AssignedSpace, request: PeerRequest) -> None:
        touched = [held.holdings[piece.segment] for piece in request.pieces]
        rounds = request.a
        if rounds >= 0:
            for holding in touched:
                segment = segment_of(holding)
                closed = min(segment.marks().values(), default=0)
                if segment.part(rounds) is None and closed != rounds:
                    if closed > rounds:
                        raise RaypsError(
                            f"segment {holding.index} of space {held.space.name!r} has no state after round {rounds}: "
                            "this state was dropped, or was requested only after the round had ended"
                        )
                    segment.keep([rounds])
        self._wait(held, request)

    def _serve_part(self, request: PeerRequest, touched: list[AssignedSegment]) -> bool:
        rounds, states = request.a, []
        for segment in map(segment_of, touched):
            now = rounds < 0 or min(segment.marks().values(), default=0) == rounds
            state = segment.part(rounds) or (segment.dump() if now else None)
            if state is None:
                return False
            states.append(state)
        for holding in touched:
            holding.saving[rounds] = {r: min(s, rounds) if rounds >= 0 else s for r, s in holding.marks().items()}
        pieces = [SegmentPayload(p.segment, p.generation, s) for p, s in zip(request.pieces, states, strict=True)]
        self.reply(request, GroupMessage.VALUE, touched, payload=pack(pieces))
        return True

    def _saved(self, held: AssignedSpace, request: PeerRequest) -> None:
        for holding in held.primaries():
            holding.state_is_kept(request.a)


def _borrows(holding: AssignedSegment) -> bool:
    """Return whether a dense segment reads the memory of the space that it branches from.

    Its values must then be sent by message.
    """
    return isinstance(holding.segment, DenseSegment) and holding.segment.borrows


def _put(out: memoryview, value: Any) -> None:
    """Write rows into the memory `out`. Raises ValueError: their sizes differ."""
    found = memoryview(value).cast("B")
    if len(found) != len(out):
        raise ValueError(f"the answer has {len(found)} bytes, but the request has room for {len(out)}")
    out[:] = found


def _changed(segment: ServedSegment, data: memoryview) -> bytes:
    if not isinstance(segment, TableSegment):
        raise ConfigError("CHANGES is for tables only: send READ or PART for the dense vector", field="table")
    since = read_numbers(data)[0]
    # a later version than the segment's: an earlier state was loaded meanwhile, so all rows are sent
    return delta(segment, since if since <= segment.version else 0)


def _no_rank(held: AssignedSpace, rank: int) -> ValueError:
    count = held.space.workers
    return ValueError(
        f"rank {rank} does not exist in space {held.space.name!r}: its {count} workers have the ranks 0 to {count - 1}"
    )


def _over(held: AssignedSpace, total: int, here: int, most: int) -> ConfigError:
    """Return the error of a space over its quota: `total` bytes on all servers, by estimate, and `here` on this one."""
    return ConfigError(
        f"space {held.space.name!r} has about {total} bytes on all servers ({here} on this one), and its quota is "
        f"{most}: raise `quota.bytes` (`rayps servers quota`), or give its tables a policy that evicts rows",
        field="quota.bytes",
        used=total,
        limit=most,
    )


log = logging.getLogger(__name__)
