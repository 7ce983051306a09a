"""The server's side of mailboxes: blocks of shared memory in which workers on its host write one request at a time.

A request from a mailbox becomes a `PeerRequest` without payload, whose pieces are in the worker's memory. The rest of
the server treats it like a request that came by message. See `rayps.ps.protocol.mailbox` for mailboxes and heads.

`WholePush` is a fast path for the most frequent request: a push of whole dense segments, and the pull of the same
segments. Its result equals that of `rayps.ps.server.requests` bit for bit. It is possible only if this server serves
each segment in the requested generation, without backups, and in memory that no other space uses. Segments and memory
are looked up once for each head of a mailbox. If the fast path is not possible, `requests` serves the request.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rayps.comm.link.memory import Fence, Memory
from rayps.comm.link.shared_memory_link import SharedLink
from rayps.comm.link.wakeup import Wakeup
from rayps.core.job.repeated_pushes import WINDOW
from rayps.ps.protocol.mailbox import ASKED, ASLEEP, AVAILABLE, PAGE, MailboxCall, ServerMailbox, SharedSlice, offered
from rayps.ps.protocol.messages import Role, SegmentPayload
from rayps.ps.server.assignments import AssignedSegment, AssignedSpace
from rayps.ps.server.connection import PeerRequest, ServerPeer
from rayps.ps.server.dense_segment import DenseSegment, Shard

_EMPTY = memoryview(b"")
_INFINITE, _INFINITE_STEP = float("inf"), 1 << 62


class MailboxHead(NamedTuple):
    """The head of a mailbox, decoded: a request's pieces, one for each segment, and the memory for their answers.

    `whole` lists segment, generation and elements of each piece; None unless each piece is a whole dense segment, and
    no segment occurs twice.
    """

    assigned_space: AssignedSpace
    pieces: list[SegmentPayload]
    outs: list[memoryview]
    whole: list[tuple[int, int, Tensor]] | None

    @classmethod
    def of(cls, mailbox: ServerMailbox, assigned_space: AssignedSpace, rows: list[list[int]]) -> MailboxHead:
        """Decode the `rows` of a head. Raises ValueError if a row refers to memory that the worker has not offered."""
        space = assigned_space.space
        dense, dtype = len(space.cuts), None if space.layout is None else space.layout.dtype
        pieces: list[SegmentPayload] = []
        outs: list[memoryview] = []
        whole: list[tuple[int, int, Tensor]] = []
        for segment, generation, place, size, out, room in rows:
            if dtype is not None and 0 <= segment < dense:
                count = space.cuts[segment][1] - space.cuts[segment][0]
                plain = size in (0, count * dtype.itemsize)  # else a piece with a head: see `rayps.ps.protocol.pieces`
                value = mailbox.tensor_at(place, size, dtype if plain else torch.uint8)
                pieces.append(SegmentPayload(segment, generation, value))
                if plain and value.numel() == count:
                    whole.append((segment, generation, value))
            else:
                pieces.append(SegmentPayload(segment, generation, mailbox.bytes_at(place, size)))
            outs.append(mailbox.bytes_at(out, room) if room else _EMPTY)
        distinct = len({segment for segment, _, _ in whole}) == len(pieces)
        return cls(assigned_space, pieces, outs, whole if distinct else None)


class Mailboxes:
    """The mailboxes of one server. Used only in the thread of the server's loop."""

    def __init__(self, wakeup: Wakeup) -> None:
        """`wakeup` ends the loop's sleep."""
        self._wakeup = wakeup
        self._page = Memory.create(PAGE) if AVAILABLE else None  # shared with all workers: has the word ASLEEP
        self._words = memoryview(bytearray(PAGE)).cast("q") if self._page is None else self._page.view[:PAGE].cast("q")
        self._open: list[tuple[ServerPeer, ServerMailbox, memoryview]] = []
        self._heads: dict[ServerPeer, MailboxHead] = {}
        self.answered: list[ServerMailbox] = []  # mailboxes whose workers must be woken
        self._fence = Fence()  # a memory fence

    def open(self, peer: ServerPeer) -> None:
        """Open the mailbox of a worker, if the worker has offered one."""
        link = peer.link
        if self._page is not None and peer.mailbox is None and isinstance(link, SharedLink) and offered(link):
            peer.mailbox = ServerMailbox(link, self._page, self._wakeup.fileno())
            self._open.append((peer, peer.mailbox, peer.mailbox.words))

    def close(self, peer: ServerPeer) -> None:
        """Close the mailbox of a worker that has disconnected."""
        if peer.mailbox is not None:
            self._open = [each for each in self._open if each[0] is not peer]
            self._heads.pop(peer, None)
            peer.push = None
            self.answered = [mailbox for mailbox in self.answered if mailbox is not peer.mailbox]
            peer.mailbox.close()
            peer.mailbox = None

    def asked(self) -> list[ServerPeer]:
        """Return the connections whose mailbox has a new request."""
        return [peer for peer, mailbox, words in self._open if words[ASKED] != mailbox.seen]

    def read_request(
        self, peer: ServerPeer, assigned_space: AssignedSpace | None
    ) -> tuple[MailboxCall, MailboxHead | None]:
        """Return the new request in a mailbox, and its head, or None for the head if `assigned_space` is None.

        Raises ValueError if the request is invalid.
        """
        mailbox = peer.mailbox
        assert mailbox is not None
        call, rows, fresh = mailbox.read_request()
        if assigned_space is None:
            return call, None
        known = self._heads.get(peer)
        if fresh or known is None or known.assigned_space is not assigned_space:
            self._heads.pop(peer, None)
            peer.push = None
            known = self._heads[peer] = MailboxHead.of(mailbox, assigned_space, rows)
        return call, known

    def wake(self) -> None:
        """Wake the workers that were answered.

        Call it after all answers are written, because a woken worker may run on this thread's core at once.
        """
        if self.answered:
            answered, self.answered = self.answered, []
            self._fence()
            for mailbox in answered:
                mailbox.wake()

    def sleeps(self) -> bool:
        """Announce that the loop will sleep; return False if it must not, because of a new request.

        Call `awake` after the sleep.
        """
        self._words[ASLEEP] = 1
        self._fence()
        return not self.asked()

    def awake(self) -> None:
        """Announce that the loop does not sleep any more."""
        self._words[ASLEEP] = 0


def request_of(peer: ServerPeer, call: MailboxCall, head: MailboxHead | None) -> PeerRequest:
    """Return a mailbox request as a `PeerRequest`, which is served like a request that came by message."""
    request = PeerRequest(peer, call.kind, call.tag, call.step, call.patience, call.weight, None)
    if head is not None:
        request.pieces, request.outs = head.pieces, head.outs
    return request


# assigned segment, requested generation, its segment and shard, pushed elements; a plain tuple, because each request
# reads all of them
_Target = tuple[AssignedSegment, int, DenseSegment, Shard, Tensor]


class WholePush:
    """One rank's push of whole dense segments and its pull of them, prepared once for one head of a mailbox.

    If `takes` returns True for a request, `apply` records the push. As soon as `may_pull` returns True, `pulled`
    returns the numbers of the answer.
    """

    __slots__ = ("_targets", "head", "offered", "rank")

    def __init__(self, head: MailboxHead, rank: int, targets: list[_Target]) -> None:
        self.head, self.rank, self._targets = head, rank, targets
        self.offered = False  # whether the worker was offered the memory of all segments

    @classmethod
    def of(cls, assigned_space: AssignedSpace, head: MailboxHead, rank: int) -> WholePush | None:
        """Prepare the requests with this head.

        Return None if `RequestHandler` must serve them, which also raises the errors of invalid requests.
        """
        if head.whole is None:
            return None
        here, targets = assigned_space.by_index, list[_Target]()
        for index, generation, value in head.whole:
            assigned = here.get(index)
            segment = None if assigned is None else assigned.segment
            shard = segment.alone if isinstance(segment, DenseSegment) else None
            if assigned is None or not isinstance(segment, DenseSegment) or shard is None:
                return None
            if rank not in shard.ledger.marks:
                return None
            targets.append((assigned, generation, segment, shard, value))
        return cls(head, rank, targets)

    def takes(self, step: int, weight: float) -> bool:
        """Return whether a request can be served: the push is valid, and all segments are served as when prepared."""
        if not 0 <= weight < _INFINITE:
            return False
        rank, here = self.rank, self.head.assigned_space.by_index
        for assigned, generation, segment, shard, _ in self._targets:
            if (
                assigned.segment is not segment
                or segment.alone is not shard
                or assigned.generation != generation
                or assigned.role is not Role.PRIMARY
                or not assigned.usable
                or assigned.copies
                or here.get(assigned.index) is not assigned
                or (step - shard.ledger.marks[rank] >= WINDOW and not shard.spans)
                or not shard.ledger.takes_part(rank)
            ):
                return False
        return True

    def apply(self, step: int, weight: float) -> None:
        """Record the push in all segments; a repeated push has no effect."""
        rank = self.rank
        for _, _, segment, shard, value in self._targets:
            segment.operations += 2  # a push and a pull
            shard.changes.recording = False
            shard.push(rank, step, value, weight, 0, True)

    @property
    def touched(self) -> list[AssignedSegment]:
        """Return the segments of the request."""
        return [assigned for assigned, _, _, _, _ in self._targets]

    @property
    def slices(self) -> list[tuple[int, SharedSlice]]:
        """Each segment's index and memory."""
        return [(assigned.index, shard.slice) for assigned, _, _, shard, _ in self._targets]

    def may_pull(self, step: int) -> bool:
        """Return whether the push of `step` is recorded, and the clocks of all segments allow the pull after it."""
        rank = self.rank
        for _, _, _, shard, _ in self._targets:
            if shard.ledger.marks[rank] <= step or not (shard.clock.staleness is None or shard.clock.may_pull(rank)):
                return False
        return True

    def pulled(self) -> tuple[int, int, int]:
        """Count the pull, and stop using the memory of the push, which the worker may overwrite afterwards.

        Return the lowest version of the segments, the rank's lead in rounds, and the step below which all pushes of the
        rank are durable.
        """
        rank, lead, version, durable = self.rank, 0, _INFINITE_STEP, _INFINITE_STEP
        for assigned, _, _, shard, _ in self._targets:
            ahead, kept = shard.pulled(rank), assigned.durable(rank)
            shard.copy_pushes(rank)
            lead = ahead if ahead > lead else lead
            version = shard.version if shard.version < version else version
            durable = kept if kept < durable else durable
        return version, lead, durable
