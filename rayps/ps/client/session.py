"""A worker's session with the servers of one space: it sends each request to the primaries of the segments.

An acknowledged push is not lost as long as one server that has it lives, and each push is applied once. When a server
dies or a segment moves, the session first repeats to the segment's new primary the pushes that only the former primary
had (`rayps.ps.client.replay_buffer`). Then it sends the unanswered requests there. The segment's ledger ignores a push
that the segment has already. An exchange sends its requests to all servers before it reads an answer. Li et al.,
OSDI 2014, section 4.1.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from rayps_client.errors import LinkError, PeerLost, PeerTimeout

from rayps.comm.link import Message
from rayps.comm.link.socket_link import EMPTY, as_bytes
from rayps.comm.link.wakeup import Wakeup
from rayps.core.failpoint import passing
from rayps.core.time.member_times import LineFacts
from rayps.ps.client.connections import (
    PUSHES,
    InFlight,
    MapSource,
    SegmentRequest,
    ServerConnection,
    ServerConnections,
    name_segments,
)
from rayps.ps.client.replay_buffer import ReplayBuffer, StepPush
from rayps.ps.client.requests import RequestSender
from rayps.ps.client.whole_exchange import SharedGradient, WholeExchangePart
from rayps.ps.protocol.mailbox import Landing, WorkerMailbox
from rayps.ps.protocol.messages import GroupMessage, error_of, pack_numbers, read_numbers
from rayps.ps.protocol.rows import PieceBytes, ShardRows
from rayps.ps.protocol.segment_map import SpaceMap, StaticMap
from rayps.ps.protocol.space import Space
from rayps.tensors.device import DeviceEvent

GRACE_SECONDS = 5.0  # seconds beyond the timeout, for servers to answer with an error that names the slowest rank
KEEP_BYTES = 256_000_000  # bytes of the replay buffer, by default
_NEVER = 1 << 62
COPY_SECONDS = 0.00002  # seconds between two checks whether a device's copy is done, while answers are awaited
COPY_CHECKS = 10  # checks of a device's copies between two checks of the connections
FEED_SECONDS = 1.0  # seconds between two checks of the connections while a feed provides nothing
ASK_SECONDS = 0.5  # seconds between two checks whether awaited segments are lost
# requests whose answer a server may delay
_PATIENT = frozenset(
    {GroupMessage.PULL, GroupMessage.PUSH_PULL, GroupMessage.READ, GroupMessage.FLUSH, GroupMessage.ARRIVE}
)


class SegmentReplies(NamedTuple):
    """The answers to a request.

    `pieces`: a dict from segment to its values, or to EMPTY if they were written to an output buffer. `lead`: the
    number of rounds that this rank is ahead of the slowest. `version`: the lowest number of optimizer steps of any
    segment. `durable`: the step of this rank below which all pushes are durable.
    """

    pieces: dict[int, PieceBytes]
    lead: int
    version: int
    durable: int


def replies_of(requests: Sequence[SegmentRequest]) -> SegmentReplies:
    """Return the answers to several requests of one exchange."""
    found: dict[int, PieceBytes] = {}
    for request in requests:
        found |= request.answers
    return SegmentReplies(
        found,
        max((request.lead for request in requests), default=0),
        min((request.version for request in requests if request.version is not None), default=0),
        min((request.durable for request in requests if request.durable is not None), default=0),
    )


class RequestFeed(Protocol):
    """Provides the requests of `Session.stream`, one after another."""

    @property
    def wakeup(self) -> Wakeup:
        """Woken when `take` may return another request."""

    @property
    def ended(self) -> bool:
        """Whether `take` will return no more requests."""

    @property
    def copy(self) -> DeviceEvent | None:
        """An event after which `take` will return a request, without a call of `wakeup.wake`; None if there is none."""

    def take(self, *, idle: bool) -> SegmentRequest | None:
        """Return the next request, or None if there is none now. If `idle`, no request is in flight."""


class Session:
    """The requests of one rank to a space's servers. For one thread; every other thread needs its own `reader()`.

    `source` is a manager's {"address", "secret"}, a function that returns it, or a `StaticMap`. `incarnation` is the
    number of this process among those that had the rank (`ManagerClient.join`); servers refuse all but the last one.
    `timeout` is in seconds. `keep` is the size of the replay buffer in bytes. `lost` returns the segments that are lost
    for good; without it the session waits for lost segments until the deadline, because they may be loaded again. Rank
    -1 loads and reads, and never pushes. With `resident=False` no memory is shared with servers of this host. With
    `pushes=False` this session does not report pushes as lost to a restored server, because another session of the
    rank does so.

    Raises:
        PeerLost, PeerTimeout: the manager does not answer.
    """

    def __init__(
        self,
        source: MapSource,
        space: Space,
        rank: int,
        *,
        incarnation: int = 0,
        timeout: float = 60.0,
        name: str | None = None,
        keep: int = KEEP_BYTES,
        lost: Callable[[], Collection[int]] | None = None,
        resident: bool = True,
        pushes: bool = True,
    ) -> None:
        self.space, self.rank, self.timeout = space, rank, timeout
        self.seconds_waiting = 0.0
        self._source, self._incarnation = source, incarnation
        name = name or (f"worker-{rank}" if rank >= 0 else "opener")
        restored = isinstance(source, StaticMap) and not source.final  # a server that died is restored from a snapshot
        self.replay_buffer = ReplayBuffer(keep, tracks=restored and pushes)
        first = self._find_first if restored and pushes else None
        self._connections = ServerConnections(
            source, space, rank, incarnation, name, timeout, resident=resident, first=first
        )
        self.shared = SharedGradient(self._connections)
        self._sender = RequestSender(self._connections)
        self._losses = LossCheck(space.name, lost)
        self._lock = threading.RLock()  # held during an exchange, because `catch_up` may run in another thread
        self._readers: weakref.WeakSet[Session] = weakref.WeakSet()
        self._requests: list[SegmentRequest] = []  # of the present exchange, in the order in which they are sent
        # segments whose new primary may lack pushes of this rank -> the connection on which the primary was asked for
        # this rank's next step (`_ask_marks`), or None if it was not asked yet
        self._unsure_segments: dict[int, ServerConnection | None] = {}

    @property
    def map(self) -> SpaceMap:
        """The newest map of the space that was received."""
        return self._connections.map

    @property
    def lines(self) -> dict[str, LineFacts]:
        """What the kernel counts for the TCP connections, by the server's name. Any thread may read it."""
        found = {name: each.link.line for name, each in list(self._connections.open.items())}
        return {name: line for name, line in found.items() if line is not None}

    def reader(self) -> Session:
        """Return another session of the same rank, with its own connections, for another thread.

        The other session must not push. `hang_up` of this session ends both.
        """
        made = Session(
            self._source,
            self.space,
            self.rank,
            incarnation=self._incarnation,
            timeout=self.timeout,
            name=self._connections.name,
            keep=0,
            lost=self._losses.lost,
            resident=self._connections.memory is not None,
            pushes=False,
        )
        self._readers.add(made)
        if self._connections.ended:  # `hang_up` was called while `made` was created
            made.hang_up()
        return made

    def join(self) -> dict[int, int]:
        """Connect to all servers; return a dict from segment to this rank's next step.

        Rank -1 has no steps, and need not join.

        Raises:
            PeerTimeout, PeerLost: a server does not answer, or a segment is lost.
            StaleGeneration: a later incarnation of the rank has joined.
        """
        self._begin()
        connections, found = self._connections, dict[int, int]()
        while self.rank >= 0:
            self._receive()
            missing = [index for index in range(self.space.segments) if index not in found]
            for server, segments in connections.map.by_server(missing).items():
                connection = None if server is None else connections.to(server)
                if connection is not None and connection.joined:
                    found |= {i: connection.marks[i] for i in segments if i in connection.marks}
                    if any(i not in connection.marks for i in segments):  # the server has not received its orders yet
                        connections.join(connection)
                        connections.refused(connection.server)
            missing = [index for index in missing if index not in found]
            if not missing:
                return found
            self._losses.check(missing)
            connections.wait(missing)
        return found

    def exchange(
        self,
        kind: GroupMessage,
        pieces: Mapping[int, PieceBytes],
        *,
        step: int = 0,
        weight: float = 0.0,
        outputs: Mapping[int, PieceBytes | Landing] | None = None,
        rows: Mapping[int, ShardRows] | None = None,
        mixed_versions: bool = False,
    ) -> SegmentReplies:
        """Send a request to the segments in `pieces`, and return all answers.

        `pieces`: a dict from segment to buffer; the buffers may change when this has returned. `step`: the step of a
        push or a pull, or the round of a PART. `outputs`: a dict from segment to a writable buffer of the size of its
        values; the values of other segments are in new memory. `rows`: a dict from segment to the rows for which the
        piece of a PULL asks; with it, the rows can be read in a server's shared memory. `mixed_versions`: values that
        are read there may be of several versions. A PUSH_PULL pulls only segments of the dense vector.

        Raises:
            PeerTimeout: servers did not answer, or the slowest rank did not push, in time; the error names them.
            PeerLost: segments are lost, or `hang_up` was called.
            StaleGeneration: a later incarnation of the rank has joined.
        """
        dense, buffers = len(self.space.cuts), None if outputs is None else dict(outputs)
        parts = [(kind, dict(pieces))]
        if kind is GroupMessage.PUSH_PULL and dense < self.space.segments:
            parts = [
                (GroupMessage.PUSH, {i: piece for i, piece in pieces.items() if i >= dense}),
                (kind, {i: piece for i, piece in pieces.items() if i < dense}),
            ]
        requests = [
            SegmentRequest(each, step, weight, those, buffers, asked_rows=rows or {}, mixed_versions=mixed_versions)
            for each, those in parts
            if those
        ]
        self._run(requests)
        return replies_of(requests)

    def read_together(
        self,
        pieces: Mapping[int, PieceBytes],
        *,
        step: int,
        outputs: Mapping[int, PieceBytes | Landing],
        rows: Mapping[int, ShardRows] | None = None,
    ) -> SegmentReplies:
        """Pull as `exchange` does, from all dense segments in one state: each push is in all of them or in none.

        Servers delay pushes during the pull. All pushes of this rank must be acknowledged before the call.

        Raises:
            PeerTimeout: a push that one server has did not reach another server, or no pull succeeded in time.
        """
        deadline = time.monotonic() + self.timeout
        while True:
            breaks, began = self._connections.breaks, time.monotonic()
            try:
                self._stop_segments(step)
                found = self.exchange(GroupMessage.PULL, pieces, step=step, outputs=outputs, rows=rows)
            except PeerTimeout as error:
                if not error.data.get("behind") or time.monotonic() > deadline:
                    raise
                continue  # a worker may have been unable to repeat a push, because this reader held the server
            finally:
                self.notify(GroupMessage.RELEASE, 0)
            if self._connections.breaks == breaks and time.monotonic() - began < self.timeout:
                return found  # no segment has moved, and no server has ended this reader's hold
            if time.monotonic() > deadline:
                raise PeerTimeout(
                    f"no consistent pull of space {self.space.name!r} succeeded within {self.timeout:g} s, because "
                    "segments moved or servers did not answer: raise timeout, or pull with consistent=False",
                    peer="server",
                    seconds=self.timeout,
                )

    def _stop_segments(self, step: int) -> None:
        """Make all dense segments stop after the same pushes.

        The first request is to segment 0 alone, whose server admits one reader at a time. A first request to two
        segments could go to two servers, and two readers could then wait for each other.
        """
        pieces = self.exchange(GroupMessage.HOLD, {0: EMPTY}, step=step + 1).pieces
        others = dict.fromkeys(range(1, len(self.space.cuts)), EMPTY)
        if others:
            pieces |= self.exchange(GroupMessage.HOLD, others).pieces
        reached = {i: read_numbers(piece) for i, piece in pieces.items()}
        target = [max(steps) for steps in zip(*reached.values(), strict=True)]
        if len({steps[self.rank] for steps in reached.values()}) > 1:
            return  # only some servers have a push of this rank: there is no common state until it is repeated
        late = {i: pack_numbers(target) for i, steps in reached.items() if steps != target}
        if late:
            self.exchange(GroupMessage.AIM, late)

    def allocate(self, size: int) -> Any:
        """Return `size` bytes, not zeroed, for a piece or an output. Servers of this host can access them."""
        memory = self._connections.memory
        return np.empty(size, np.uint8) if memory is None else memory.allocate(size)

    @property
    def shares_memory(self) -> bool:
        """Whether all connected servers share memory with this worker."""
        connections = self._connections.open.values()
        return bool(connections) and all(
            connection.mailbox is not None and connection.mailbox.ready for connection in connections
        )

    def push_pull_whole(
        self,
        step: int,
        weight: float,
        pieces: Mapping[int, PieceBytes],
        outputs: Mapping[int, PieceBytes | Landing],
        *,
        mixed_versions: bool = False,
    ) -> SegmentReplies | None:
        """Push the whole gradient and pull the whole vector through shared memory: a PUSH_PULL in fewer calls.

        `pieces` is the result of `shared.pieces`. Returns None, without effect, if a server does not share memory, or a
        request is in flight; the caller must then use `exchange`. Raises as `exchange`.
        """
        with self._lock:
            return self._push_pull_unlocked(step, weight, pieces, outputs, mixed_versions=mixed_versions)

    def _push_pull_unlocked(
        self,
        step: int,
        weight: float,
        pieces: Mapping[int, PieceBytes],
        outputs: Mapping[int, PieceBytes | Landing],
        *,
        mixed_versions: bool,
    ) -> SegmentReplies | None:
        plan = None if self._requests or self._unsure_segments else self.shared.exchange_of(pieces)
        if plan is None:
            return None
        connections, parts, sender = self._connections, plan.parts, self._sender
        began = self._begin()
        patience = int(1000 * self.timeout) or 1
        for part in parts:
            part.mailbox.put(sender.next_tag(), GroupMessage.PUSH_PULL, part.head, step, patience, weight)
            passing("session: between servers")
        connections.fence()
        for part in parts:
            part.mailbox.ring()
        passing("session: sent, not answered")
        unfinished: list[WholeExchangePart] = []
        lead, version, durable, records = 0, _NEVER, _NEVER, self.replay_buffer.records
        for part in parts:
            answer = (
                part.copy_values(outputs, mixed_versions) if part.answered or plan.wait(connections, part) else None
            )
            if answer is None:
                unfinished.append(part)
                continue
            least, ahead, mark = answer
            version, lead = least if least < version else version, ahead if ahead > lead else lead
            durable = mark if mark < durable else durable
            if connections.backoffs:
                connections.answered(part.connection.server)
            if records:
                push = StepPush(step, weight, {index: as_bytes(pieces[index]) for index in part.segments})
                self.replay_buffer.acknowledged(push, mark, copy=True)
        self.seconds_waiting += time.monotonic() - began
        if unfinished:
            segments = [index for part in unfinished for index in part.segments]
            request = SegmentRequest(
                GroupMessage.PUSH_PULL, step, weight, {index: pieces[index] for index in segments}, dict(outputs)
            )
            request.mixed_versions = mixed_versions
            request.unsent.clear()
            for part in unfinished:
                part.connection.flights[part.mailbox.tag] = InFlight(request, part.segments, True)
            self._run([request])
            version, lead = min(version, request.version or 0), max(lead, request.lead)
            durable = min(durable, request.durable or 0)
        else:
            passing("session: acknowledged")
        return SegmentReplies({}, lead, version, durable)

    def stream(self, feed: RequestFeed) -> SegmentReplies:
        """Send the requests of a feed as it provides them, while earlier ones are in flight; return all answers.

        Another thread fills the feed. Until this method has returned, only `hang_up` and `catch_up` may be called, and
        the buffers of a request must not change. The deadline of the answers begins with the last request. Raises as
        `exchange`.
        """
        sent: list[SegmentRequest] = []
        with self._lock:
            self._begin()
            try:
                self._apply_map()
                while True:
                    in_flight = self._sender.copies or any(each.open for each in self._requests)
                    request = feed.take(idle=not in_flight)
                    if request is not None:
                        self._begin()
                        self._requests.append(request)
                        sent.append(request)
                        self._send_all()
                        continue
                    self._release_answered()
                    if feed.ended and not self._requests and not self._unsure_segments and not self._sender.copies:
                        break
                    if not self._receive_by_mailbox(feed.copy):
                        self._wait_for(feed)
                        self._receive()
                        self._send_all()
                passing("session: acknowledged")
            except BaseException:
                self._give_up()
                raise
        return replies_of(sent)

    def _release_answered(self) -> None:
        """Drop the requests that are answered from the present exchange."""
        done = [each for each in self._requests if not each.open]
        self._requests = [each for each in self._requests if each.open]
        for each in done:
            if not each.repeated:
                self._sender.pool.release(each.buffers)

    def _wait_for(self, feed: RequestFeed) -> None:
        """Wait for answers and for the feed. If nothing is awaited from servers, the wait has no deadline."""
        if not self._requests and not self._unsure_segments:
            self._begin()
        awaited = {index for each in self._requests for index in each.pieces if index not in each.answers}
        self._losses.check(awaited | self._unsure_segments.keys())
        unasked = [index for index, connection in self._unsure_segments.items() if connection is None]
        unsent = [index for each in self._requests for index in each.unsent] + unasked
        copy = feed.copy
        for _ in range(COPY_CHECKS if copy is not None else 0):
            if copy is None or copy.done or self._connections.readable:
                return
            if self._sender.copies and self._sender.copies[0].copy.done:
                return
            time.sleep(COPY_SECONDS)
        self._connections.wait(unsent, feed.wakeup, FEED_SECONDS if copy is None else 0.0)
        feed.wakeup.clear()

    def notify(self, kind: GroupMessage, number: int) -> None:
        """Send a message that has no answer (SAVED, RELEASE), with a = `number`, to all connected servers."""
        for connection in list(self._connections.open.values()):
            try:
                connection.send(Message(kind, 0, number), None)
            except LinkError:
                self._connections.lose(connection)

    def flush(self) -> None:
        """Wait until every push of this rank is durable: all backups have it.

        With staleness 0 a push is durable only after the other workers have pushed as many rounds. With a static map
        this returns immediately, because the servers have no backups.

        Raises:
            PeerTimeout, PeerLost: as `exchange`.
        """
        if not isinstance(self._source, StaticMap):
            self.exchange(GroupMessage.FLUSH, dict.fromkeys(range(self.space.segments), EMPTY))

    def hang_up(self) -> None:
        """End every wait of another thread with PeerLost; that thread must then `close`. Any thread may call this."""
        self._connections.hang_up()
        for reader in list(self._readers):
            reader.hang_up()

    def close(self) -> None:
        """Close all connections. Pushes that are not durable are not repeated any more. Safe to call twice."""
        self._connections.close()

    def catch_up(self) -> None:
        """Repeat the pushes that a restored server lacks, unless an exchange has repeated them.

        Any thread may call this. It waits for the end of the present exchange, and the next exchange waits for its end.

        Raises:
            PeerTimeout, PeerLost: as `exchange`.
        """
        with self._lock:
            if not self._connections.ended:
                self._run([])

    # ---- one exchange

    def _begin(self) -> float:
        """Set the deadline of an exchange; return the time now."""
        now = time.monotonic()
        self._connections.deadline = now + self.timeout + GRACE_SECONDS
        self._losses.begin(now)
        return now

    def _run(self, requests: list[SegmentRequest]) -> None:
        """Send requests, after the pushes that must be repeated since a failed exchange, and wait for all answers."""
        with self._lock:
            began = self._begin()
            self._requests += requests
            try:
                self._apply_map()
                self._send_all()
                passing("session: sent, not answered")
                while self._unsure_segments or self._sender.copies or any(request.open for request in self._requests):
                    if self._receive_by_mailbox():
                        continue
                    self._wait()
                    self._receive()
                    self._send_all()
                passing("session: acknowledged")
            except BaseException:
                self._give_up()
                raise
            for request in self._requests:
                if not request.repeated:
                    self._sender.pool.release(request.buffers)
            self._requests = []
            self.seconds_waiting += time.monotonic() - began

    def _wait(self) -> None:
        awaited = {index for each in self._requests for index in each.pieces if index not in each.answers}
        self._losses.check(awaited | self._unsure_segments.keys())
        unasked = [index for index, connection in self._unsure_segments.items() if connection is None]
        self._connections.wait([index for each in self._requests for index in each.unsent] + unasked)

    def _give_up(self) -> None:
        """After an error, ignore the answers to come, and prepare to repeat the pushes that may not have arrived."""
        self._sender.copies.clear()
        for connection in self._connections.open.values():
            if connection.pending and self._connections.memory is not None:
                self._connections.memory.retire()
            connection.flights.clear()
        cut_off = [each for each in self._requests if each.kind in PUSHES and each.open]
        for each in cut_off:
            if not each.repeated:
                pieces = {i: memoryview(bytes(as_bytes(each.pieces[i]))) for i in each.pieces if i not in each.answers}
                self.replay_buffer.retain(each.step, each.weight, pieces)
        self._requests = self._make_repeated(range(self.space.segments)) if cut_off else []

    def _make_repeated(self, segments: Collection[int], marks: Mapping[int, int] | None = None) -> list[SegmentRequest]:
        """Return the retained pushes to these segments as requests; `marks`: segment -> the first step to repeat."""
        return [
            SegmentRequest(GroupMessage.PUSH, p.step, p.weight, p.pieces, repeated=True, by_message=True)
            for p in self.replay_buffer.of(segments, marks)  # a server receives messages in this order
        ]

    def _find_first(self, server: str) -> int:
        """Return the first step that can be repeated to a server, or -1 if one of its segments has had no push."""
        return self.replay_buffer.oldest(index for index, held in enumerate(self.map.holders) if held.primary == server)

    def _ask_marks(self) -> None:
        """Send JOIN to new primaries to learn this rank's next step there. `_note_joined` handles the answers."""
        for server, segments in self.map.by_server(list(self._unsure_segments)).items():
            connection = None if server is None else self._connections.to(server)
            if (
                server is not None
                and connection is not None
                and any(self._unsure_segments[index] is not connection for index in segments)
            ):
                self._connections.join(connection)
                connection = self._connections.open.get(server)
            self._unsure_segments.update(dict.fromkeys(segments, connection))

    def _note_joined(self, connection: ServerConnection, message: Message) -> None:
        pairs = read_numbers(message.payload)
        connection.marks = dict(zip(pairs[::2], pairs[1::2], strict=True))
        connection.joined = True
        self.replay_buffer.joined(connection.marks)
        asked = [index for index, other in self._unsure_segments.items() if other is connection]
        known = [index for index in asked if index in connection.marks]
        for index in known:
            del self._unsure_segments[index]
        self._requests[:0] = self._make_repeated(known, connection.marks)
        if len(known) < len(asked):  # the server has not received its orders yet
            self._unsure_segments.update(dict.fromkeys(set(asked).difference(known)))
            self._connections.refused(connection.server)

    def _send_all(self) -> None:
        """Send unsent requests to the present primaries. To each segment, repeated pushes are sent first."""
        if self._unsure_segments:
            self._ask_marks()
        behind = set(self._unsure_segments)  # segments whose primary may lack earlier pushes
        for request in list(self._requests):
            if request.repeated:
                behind.update(index for index in request.pieces if index not in request.answers)
            if request.unsent:
                ready = [index for index in request.unsent if request.repeated or index not in behind]
                for server, segments in self.map.by_server(ready).items():
                    connection = None if server is None else self._connections.to(server)
                    if connection is not None:
                        self._sender.send(connection, request, segments, self._find_patience(request))
                        passing("session: between servers")
        self._sender.signal()

    def _find_patience(self, request: SegmentRequest) -> int:
        """Return how many milliseconds a server may delay the answer to a request."""
        if request.kind not in _PATIENT:
            return 0
        return max(1, int(1000 * (self._connections.deadline - GRACE_SECONDS - time.monotonic())))

    # ---- answers

    def _receive_by_mailbox(self, before: DeviceEvent | None = None) -> bool:
        """Process the answers in mailboxes, and the copies of answers to a device; return whether there were any.

        The oldest copy is awaited; if an event `before` is awaited too, it is processed only if it is done.
        """
        found = False
        for connection in list(self._connections.open.values()):
            mailbox = connection.mailbox
            if mailbox is not None and connection.readable:
                found = True
                self._take_answer_of_mailbox(connection, mailbox)
        copies = self._sender.copies
        if copies and (before is None or copies[0].copy.done):
            found = True
            each = copies.popleft()
            if not each.copy.wait():
                self._read_again(each.request, {each.segment: each.copy.place})
        return found

    def _read_again(self, asked: SegmentRequest, changed: dict[int, PieceBytes | Landing]) -> None:
        """Request values by message that changed while they were read in a server's memory."""
        pieces = {index: asked.pieces[index] if index in asked.asked_rows else EMPTY for index in changed}
        self._requests.append(SegmentRequest(GroupMessage.READ, 0, 0.0, pieces, changed, by_message=True))
        self._send_all()

    def _take_answer_of_mailbox(self, connection: ServerConnection, mailbox: WorkerMailbox) -> None:
        flight = connection.flights.pop(mailbox.tag)
        version, lead, durable, _, _ = mailbox.answer()
        kind = GroupMessage.ACK if flight.request.kind == GroupMessage.PUSH else GroupMessage.VALUE
        self._record_answer(connection, flight, Message(kind, mailbox.tag, version, lead, float(durable)))
        changed = self._sender.read(mailbox, flight) if kind == GroupMessage.VALUE else {}
        if changed:
            self._read_again(flight.request, changed)

    def _receive(self) -> None:
        """Process the messages that have arrived, and a newer map."""
        open_connections = self._connections.open
        for connection in list(open_connections.values()):
            try:
                if connection.link.queued:
                    connection.link.absorb()
                    connection.link.flush()
            except LinkError:
                pass  # `next` raises it again, after it has returned the messages that have arrived
            while open_connections.get(connection.server) is connection:
                try:
                    message = connection.next()
                except LinkError:
                    self._connections.lose(connection)
                    break
                if message is None:
                    break
                self._process(connection, message)
        self._apply_map()

    def _process(self, connection: ServerConnection, message: Message) -> None:
        """Process a message. Raises the error that the server sent."""
        if message.tag == connection.joining:
            connection.joining = 0
            if message.kind == GroupMessage.ERROR:
                raise error_of(message)
            if message.kind != GroupMessage.JOINED:  # the server does not know the space yet: connect again later
                self._connections.lose(connection)
                return
            self._note_joined(connection, message)
            return
        flight = connection.flights.pop(message.tag, None)
        if flight is None:
            return  # the exchange of this request has failed
        if message.kind == GroupMessage.ERROR:
            raise error_of(message)
        if message.kind == GroupMessage.STALE:
            flight.mark_unsent()
            self._connections.refused(connection.server)
            return
        if message.kind not in (GroupMessage.ACK, GroupMessage.VALUE):
            raise LinkError(
                f"{connection.server!r} answered with a message of kind {message.kind}, where ACK or VALUE was "
                "expected",
                peer=connection.server,
            )
        self._record_answer(connection, flight, message)
        if message.kind == GroupMessage.VALUE:
            flight.request.copy_values(connection.server, message.payload)

    def _record_answer(self, connection: ServerConnection, flight: InFlight, message: Message) -> None:
        """Record that a request was answered. If it is a push that is not durable, retain it."""
        request, segments, durable = flight.request, flight.segments, int(message.weight)
        self._connections.answered(connection.server)
        if request.kind in PUSHES and not request.repeated:
            push = StepPush(request.step, request.weight, {i: as_bytes(request.pieces[i]) for i in segments})
            if self.replay_buffer.acknowledged(push, durable, copy=flight.by_mailbox):
                request.buffers.clear()  # the replay buffer uses them now
        else:
            self.replay_buffer.durable(segments, durable)
        request.answered(segments, message)

    # ---- a newer map

    def _apply_map(self) -> None:
        """Apply a newer map: mark the requests to segments with a new primary as unsent.

        The new primaries of segments that may lack pushes of this rank are asked for the rank's next step.
        """
        changed = self._connections.newer()
        if not changed:
            return
        self._losses.moved(changed)
        self._sender.pool.clear()
        passing("session: a newer map")
        for connection in list(self._connections.open.values()):
            void = [tag for tag, flight in connection.flights.items() if not changed.isdisjoint(flight.segments)]
            for tag in void:
                connection.flights.pop(tag).mark_unsent()
            if void and connection.link.queued:
                self._connections.lose(connection)  # a request may be sent in part, and its rest must not follow
        self._unsure_segments.update(dict.fromkeys(self.replay_buffer.concerned(changed)))


class LossCheck:
    """Detects that segments for which a session waits are lost for good.

    `lost` returns the segments of the space that are lost for good; if it is None, `check` does nothing.
    """

    def __init__(self, space: str, lost: Callable[[], Collection[int]] | None) -> None:
        self.lost = lost
        self._space = space
        self._moved: set[int] = set()  # segments whose primary has changed: only these can be lost
        self._due = 0.0

    def moved(self, segments: Collection[int]) -> None:
        """Record segments whose primary has changed."""
        self._moved.update(segments)

    def begin(self, now: float) -> None:
        """Start a wait: the first check is due after ASK_SECONDS."""
        self._due = now + ASK_SECONDS

    def check(self, awaited: Iterable[int]) -> None:
        """Raise PeerLost if `awaited` segments are lost. Calls `lost` at most once in ASK_SECONDS."""
        if self.lost is None or not self._moved or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + ASK_SECONDS
        gone = sorted(self._moved.intersection(awaited).intersection(self.lost()))
        if gone:
            raise PeerLost(
                f"{name_segments(gone)} of space {self._space!r} had no backup when their server died: their "
                "parameters, and "
                "all pushes to them, are lost (the knob is `replicas`)",
                peer="server",
                segments=gone,
            )
