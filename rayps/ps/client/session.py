"""A worker's session with the servers of a group about one space: requests reach the primary of each segment.

A push that an exchange has acknowledged is not lost while one server that has it lives; each push is applied once. When
a server dies or a segment moves, the session sends the unanswered requests to the segment's new primary, after the
pushes that only the former primary had (`rayps.ps.client.replay_buffer`); the segment's ledger drops a push that it has
already. An exchange sends one request to each server before it reads an answer. Li et al., OSDI 2014, section 4.1.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from rayps.comm.link import Message
from rayps.comm.link.socket_link import EMPTY, as_bytes
from rayps.core.errors import LinkError, PeerLost, PeerTimeout
from rayps.core.failpoint import passing
from rayps.ps.client.connections import (
    PUSHES,
    Door,
    InFlight,
    SegmentRequest,
    ServerConnection,
    ServerConnections,
    named,
)
from rayps.ps.client.replay_buffer import ReplayBuffer, StepPush
from rayps.ps.client.requests import RequestSender
from rayps.ps.client.turn import SharedGradient, TurnPart
from rayps.ps.protocol.mailbox import WorkerMailbox
from rayps.ps.protocol.messages import GroupMessage, error_of, numbers, read_numbers
from rayps.ps.protocol.rows import ShardRows
from rayps.ps.protocol.segment_map import SpaceMap, StaticMap
from rayps.ps.protocol.space import Space

GRACE_SECONDS = 5.0  # beyond the timeout, in which a server itself reports what was late, naming the slowest rank
KEEP_BYTES = 256_000_000  # of pushes that are not durable yet
_NEVER = 1 << 62
ASK_SECONDS = 0.5  # between two checks whether awaited segments are lost
_PATIENT = frozenset({GroupMessage.PULL, GroupMessage.PUSH_PULL, GroupMessage.READ, GroupMessage.FLUSH})


class SegmentReplies(NamedTuple):
    """The answers to a request.

    `pieces` are the values by segment (EMPTY where they were written into a landing place), `lead` the number of rounds
    that this rank is ahead of the slowest, `version` the least version of the segments, `durable` the step of this rank
    below which all pushes are durable.
    """

    pieces: dict[int, Any]
    lead: int
    version: int
    durable: int


class Session:
    """One rank's connections to the servers and the manager. For one thread; another uses a `reader()` of its own.

    `door` is a manager's {"address", "secret"}, a function that returns it, or a `StaticMap`. `incarnation` numbers the
    holders of the rank (`ManagerClient.join`); servers refuse all but the last one. `timeout` is in seconds. `keep` is
    the limit in bytes of the replay buffer. `lost` returns the segments that are lost for good; without it the session
    waits for them until the deadline, as they may be loaded again. Rank -1 loads and reads, and never pushes. With
    `resident=False` no memory is shared with servers of this host.

    Raises:
        PeerLost, PeerTimeout: the manager does not answer.
    """

    def __init__(
        self,
        door: Door,
        space: Space,
        rank: int,
        *,
        incarnation: int = 0,
        timeout: float = 60.0,
        name: str | None = None,
        keep: int = KEEP_BYTES,
        lost: Callable[[], Collection[int]] | None = None,
        resident: bool = True,
    ) -> None:
        self.space, self.rank, self.timeout = space, rank, timeout
        self.seconds_waiting = 0.0
        self._door, self._incarnation = door, incarnation
        name = name or (f"worker-{rank}" if rank >= 0 else "opener")
        restored = isinstance(door, StaticMap) and not door.final  # a server that died is restored from a snapshot
        self.kept = ReplayBuffer(keep, tracks=restored)
        first = self._first if restored else None
        self._lines = ServerConnections(door, space, rank, incarnation, name, timeout, resident=resident, first=first)
        self.shared = SharedGradient(self._lines)
        self._sender = RequestSender(self._lines)
        self._losses = LossCheck(space.name, lost)
        self._lock = threading.RLock()  # one exchange at a time: see `catch_up`
        self._readers: weakref.WeakSet[Session] = weakref.WeakSet()
        self._requests: list[SegmentRequest] = []  # of the exchange under way, in the order to be sent
        # segments whose new primary may lack retained pushes, and the connection on which it was asked (`_ask_marks`)
        self._unsure: dict[int, ServerConnection | None] = {}

    @property
    def map(self) -> SpaceMap:
        """The newest map of the segments that has arrived."""
        return self._lines.map

    def reader(self) -> Session:
        """Return another session of the same rank, with connections of its own, for another thread.

        It must not push. `hang_up` of this session also ends it.
        """
        made = Session(
            self._door,
            self.space,
            self.rank,
            incarnation=self._incarnation,
            timeout=self.timeout,
            name=self._lines.name,
            keep=0,
            lost=self._losses.lost,
            resident=self._lines.memory is not None,
        )
        self._readers.add(made)
        if self._lines.ended:  # while it was made
            made.hang_up()
        return made

    def join(self) -> dict[int, int]:
        """Connect to all servers; return this rank's next step by segment. Rank -1 has none, and need not join.

        Raises:
            PeerTimeout, PeerLost: a server does not answer, or a segment is lost.
            StaleGeneration: the rank has a later holder.
        """
        self._begin()
        lines, found = self._lines, dict[int, int]()
        while self.rank >= 0:
            self._receive()
            missing = [index for index in range(self.space.segments) if index not in found]
            for server, segments in lines.map.by_server(missing).items():
                line = None if server is None else lines.to(server)
                if line is not None and line.joined:
                    found |= {i: line.marks[i] for i in segments if i in line.marks}
                    if any(i not in line.marks for i in segments):  # it has not received its orders yet
                        lines.join(line)
                        lines.refused(line.server)
            missing = [index for index in missing if index not in found]
            if not missing:
                return found
            self._losses.check(missing)
            lines.wait(missing)
        return found

    def exchange(
        self,
        kind: GroupMessage,
        pieces: Mapping[int, Any],
        *,
        step: int = 0,
        weight: float = 0.0,
        landing: Mapping[int, Any] | None = None,
        rows: Mapping[int, ShardRows] | None = None,
        torn: bool = False,
    ) -> SegmentReplies:
        """Send a request to the segments in `pieces` (buffers), and return all answers.

        `step` is also the round of a PART. Values are written into `landing` (writable buffers of the right size) where
        given, else into new memory. `rows` are what the pieces of a PULL ask for, by segment: they are read where a
        server shares its memory; with `torn` it may step while it is read. A PUSH_PULL pulls the segments of the dense
        vector alone. Buffers may change once this has returned.

        Raises:
            PeerTimeout: servers, or the slowest rank, did not answer by the deadline; it names them.
            PeerLost: segments are lost. StaleGeneration: the rank has a later holder.
        """
        dense, lands = len(self.space.cuts), None if landing is None else dict(landing)
        parts = [(kind, dict(pieces))]
        if kind is GroupMessage.PUSH_PULL and dense < self.space.segments:
            parts = [
                (GroupMessage.PUSH, {i: piece for i, piece in pieces.items() if i >= dense}),
                (kind, {i: piece for i, piece in pieces.items() if i < dense}),
            ]
        requests = [
            SegmentRequest(each, step, weight, those, lands, asked_rows=rows or {}, torn=torn)
            for each, those in parts
            if those
        ]
        self._run(requests)
        found: dict[int, Any] = {}
        for request in requests:
            found |= request.answers
        return SegmentReplies(
            found,
            max((request.lead for request in requests), default=0),
            min((request.version for request in requests if request.version is not None), default=0),
            min((request.durable for request in requests if request.durable is not None), default=0),
        )

    def read_together(
        self,
        pieces: Mapping[int, Any],
        *,
        step: int,
        landing: Mapping[int, Any],
        rows: Mapping[int, ShardRows] | None = None,
    ) -> SegmentReplies:
        """Pull as `exchange` does, from all dense segments in one state: each push is in all of them or in none.

        Servers apply no push meanwhile. All pushes of this rank must be acknowledged.

        Raises:
            PeerTimeout: a push that one server has did not reach another, or servers were held for too long.
        """
        deadline = time.monotonic() + self.timeout
        while True:
            breaks, began = self._lines.breaks, time.monotonic()
            try:
                self._hold()
                found = self.exchange(GroupMessage.PULL, pieces, step=step, landing=landing, rows=rows)
            except PeerTimeout as error:
                if not error.data.get("behind") or time.monotonic() > deadline:
                    raise
                continue  # a worker that must repeat a push may have waited for a server that was held here
            finally:
                self.tell(GroupMessage.RELEASE, 0)
            if self._lines.breaks == breaks and time.monotonic() - began < self.timeout:
                return found  # otherwise a segment has moved, or its server ended the hold
            if time.monotonic() > deadline:
                raise PeerTimeout(
                    f"the segments of {self.space.name!r} could not be held and read within {self.timeout:g} s: raise "
                    "timeout, or pull with consistent=False",
                    peer="server",
                    seconds=self.timeout,
                )

    def _hold(self) -> None:
        """Stop all dense segments at the same pushes.

        Segment 0 is held first, alone: it admits one reader at a time. With a second segment that request could be
        divided between two servers, and two readers could then wait for each other.
        """
        pieces = self.exchange(GroupMessage.HOLD, {0: EMPTY}, step=1).pieces
        others = dict.fromkeys(range(1, len(self.space.cuts)), EMPTY)
        if others:
            pieces |= self.exchange(GroupMessage.HOLD, others).pieces
        reached = {i: read_numbers(piece) for i, piece in pieces.items()}
        target = [max(steps) for steps in zip(*reached.values(), strict=True)]
        if len({steps[self.rank] for steps in reached.values()}) > 1:
            return  # a push of this rank has reached some servers only: no common state until it is repeated
        late = {i: numbers(target) for i, steps in reached.items() if steps != target}
        if late:
            self.exchange(GroupMessage.AIM, late)

    def room(self, size: int) -> Any:
        """Return `size` bytes for a piece or a landing place that servers of this host can access; not zeroed."""
        memory = self._lines.memory
        return np.empty(size, np.uint8) if memory is None else memory.room(size)

    @property
    def shares_memory(self) -> bool:
        """Whether all connected servers share memory with this worker."""
        lines = self._lines.open.values()
        return bool(lines) and all(line.mailbox is not None and line.mailbox.ready for line in lines)

    def turn(
        self, step: int, weight: float, pieces: Mapping[int, Any], landing: Mapping[int, Any], *, torn: bool = False
    ) -> SegmentReplies | None:
        """Do an `exchange` of a PUSH_PULL in fewer calls; `pieces` are those of the whole gradient in `shared`.

        Return None where it must be an `exchange`: a server does not share memory, or a request is in flight. Raises as
        `exchange`.
        """
        with self._lock:
            return self._turn_alone(step, weight, pieces, landing, torn=torn)

    def _turn_alone(
        self, step: int, weight: float, pieces: Mapping[int, Any], landing: Mapping[int, Any], *, torn: bool
    ) -> SegmentReplies | None:
        plan = None if self._requests or self._unsure else self.shared.turn(pieces)
        if plan is None:
            return None
        lines, parts, sender = self._lines, plan.parts, self._sender
        began = self._begin()
        patience = int(1000 * self.timeout) or 1
        for part in parts:
            part.box.put(sender.next_tag(), GroupMessage.PUSH_PULL, part.head, step, patience, weight)
            passing("session: between servers")
        lines.fence()
        for part in parts:
            part.box.ring()
        passing("session: sent, not answered")
        odd: list[TurnPart] = []
        lead, version, durable, records = 0, _NEVER, _NEVER, self.kept.records
        for part in parts:
            answer = part.take(landing, torn) if part.answered or plan.wait(lines, part) else None
            if answer is None:
                odd.append(part)
                continue
            least, ahead, mark = answer
            version, lead = least if least < version else version, ahead if ahead > lead else lead
            durable = mark if mark < durable else durable
            if lines.backoffs:
                lines.answered(part.line.server)
            if records:
                push = StepPush(step, weight, {index: as_bytes(pieces[index]) for index in part.segments})
                self.kept.acknowledged(push, mark, copy=True)
        self.seconds_waiting += time.monotonic() - began
        if odd:
            segments = [index for part in odd for index in part.segments]
            request = SegmentRequest(
                GroupMessage.PUSH_PULL, step, weight, {index: pieces[index] for index in segments}, dict(landing)
            )
            request.torn = torn
            request.unsent.clear()
            for part in odd:
                part.line.flights[part.box.tag] = InFlight(request, part.segments, True)
            self._run([request])
            version, lead = min(version, request.version or 0), max(lead, request.lead)
            durable = min(durable, request.durable or 0)
        else:
            passing("session: acknowledged")
        return SegmentReplies({}, lead, version, durable)

    def tell(self, kind: GroupMessage, number: int) -> None:
        """Send a message that has no answer (SAVED, RELEASE) to all connected servers."""
        for line in list(self._lines.open.values()):
            try:
                line.send(Message(kind, 0, number), None)
            except LinkError:
                self._lines.lose(line)

    def flush(self) -> None:
        """Return once every push of this rank is durable; in step, once the other workers have pushed as many rounds.

        On servers with a static map, which have no backups, acknowledged pushes are all that can be waited for.

        Raises:
            PeerTimeout, PeerLost: as `exchange`.
        """
        if not isinstance(self._door, StaticMap):
            self.exchange(GroupMessage.FLUSH, dict.fromkeys(range(self.space.segments), EMPTY))

    def hang_up(self) -> None:
        """End every wait of another thread with PeerLost; that thread is to `close`. Any thread may call it."""
        self._lines.hang_up()
        for reader in list(self._readers):
            reader.hang_up()

    def close(self) -> None:
        """Close all connections. Pushes that are not durable stay with the servers as they are. Safe to call twice."""
        self._lines.close()

    def catch_up(self) -> None:
        """Repeat the pushes that a restored server lacks, unless an exchange has done so.

        Any thread: it waits for the exchange under way, and the next exchange waits for it.

        Raises:
            PeerTimeout, PeerLost: as `exchange`.
        """
        with self._lock:
            if not self._lines.ended:
                self._run([])

    # ---- one exchange

    def _begin(self) -> float:
        """Start the deadline; return the time."""
        now = time.monotonic()
        self._lines.deadline = now + self.timeout + GRACE_SECONDS
        self._losses.begin(now)
        return now

    def _run(self, requests: list[SegmentRequest]) -> None:
        """Send requests, after those that an earlier exchange left, and wait for all answers."""
        with self._lock:
            began = self._begin()
            self._requests += requests
            try:
                self._apply_map()
                self._send_all()
                passing("session: sent, not answered")
                while self._unsure or any(request.open for request in self._requests):
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
                    self._sender.pool.give(request.buffers)
            self._requests = []
            self.seconds_waiting += time.monotonic() - began

    def _wait(self) -> None:
        awaited = {index for each in self._requests for index in each.pieces if index not in each.answers}
        self._losses.check(awaited | self._unsure.keys())
        unasked = [index for index, line in self._unsure.items() if line is None]
        self._lines.wait([index for each in self._requests for index in each.unsent] + unasked)

    def _give_up(self) -> None:
        """After an error, ignore the answers to come; pushes that may not have arrived precede the next request."""
        for line in self._lines.open.values():
            if line.pending and self._lines.memory is not None:
                self._lines.memory.retire()
            line.flights.clear()
        cut_off = [each for each in self._requests if each.kind in PUSHES and each.open]
        for each in cut_off:
            if not each.repeated:
                pieces = {i: memoryview(bytes(as_bytes(each.pieces[i]))) for i in each.pieces if i not in each.answers}
                self.kept.keep(each.step, each.weight, pieces)
        self._requests = self._repeated(range(self.space.segments)) if cut_off else []

    def _repeated(self, segments: Collection[int], marks: Mapping[int, int] | None = None) -> list[SegmentRequest]:
        """Return the retained pushes of these segments as requests; with `marks`, from these steps on."""
        return [
            SegmentRequest(GroupMessage.PUSH, p.step, p.weight, p.pieces, repeated=True, by_message=True)
            for p in self.kept.of(segments, marks)  # messages stay in this order
        ]

    def _first(self, server: str) -> int:
        """Return the first step that can be repeated to a server; -1: nothing was pushed to it."""
        return self.kept.oldest(index for index, held in enumerate(self.map.holdings) if held.primary == server)

    def _ask_marks(self) -> None:
        """Ask new primaries for this rank's next step there, by a JOIN; JOINED answers it (`_joined`)."""
        for server, segments in self.map.by_server(list(self._unsure)).items():
            line = None if server is None else self._lines.to(server)
            if server is not None and line is not None and any(self._unsure[index] is not line for index in segments):
                self._lines.join(line)
                line = self._lines.open.get(server)
            self._unsure.update(dict.fromkeys(segments, line))

    def _joined(self, line: ServerConnection, message: Message) -> None:
        pairs = read_numbers(message.payload)
        line.marks = dict(zip(pairs[::2], pairs[1::2], strict=True))
        line.joined = True
        self.kept.joined(line.marks)
        asked = [index for index, other in self._unsure.items() if other is line]
        known = [index for index in asked if index in line.marks]
        for index in known:
            del self._unsure[index]
        self._requests[:0] = self._repeated(known, line.marks)
        if len(known) < len(asked):  # it has not received its orders yet
            self._unsure.update(dict.fromkeys(set(asked).difference(known)))
            self._lines.refused(line.server)

    def _send_all(self) -> None:
        """Send what is unsent to the present primaries; repeated pushes precede the later ones of their segments."""
        if self._unsure:
            self._ask_marks()
        behind = set(self._unsure)  # segments whose primary lacks earlier pushes
        for request in list(self._requests):
            if request.repeated:
                behind.update(index for index in request.pieces if index not in request.answers)
            if request.unsent:
                ready = [index for index in request.unsent if request.repeated or index not in behind]
                for server, segments in self.map.by_server(ready).items():
                    line = None if server is None else self._lines.to(server)
                    if line is not None:
                        self._sender.send(line, request, segments, self._patience(request))
                        passing("session: between servers")
        self._sender.signal()

    def _patience(self, request: SegmentRequest) -> int:
        """Return how long the answer to a request may wait on the server, in milliseconds."""
        if request.kind not in _PATIENT:
            return 0
        return max(1, int(1000 * (self._lines.deadline - GRACE_SECONDS - time.monotonic())))

    # ---- answers

    def _receive_by_mailbox(self) -> bool:
        """Process the answers in mailboxes; return whether there were any."""
        found = False
        for line in list(self._lines.open.values()):
            box = line.mailbox
            if box is not None and line.readable:
                found = True
                self._answered_by_mailbox(line, box)
        return found

    def _answered_by_mailbox(self, line: ServerConnection, box: WorkerMailbox) -> None:
        flight = line.flights.pop(box.tag)
        version, lead, durable, _, _ = box.answer()
        kind = GroupMessage.ACK if flight.request.kind == GroupMessage.PUSH else GroupMessage.VALUE
        self._answered(line, flight, Message(kind, box.tag, version, lead, float(durable)))
        torn = self._sender.read(box, flight) if kind == GroupMessage.VALUE else {}
        if torn:  # the server sends a copy
            asked = flight.request
            pieces = {index: asked.pieces[index] if index in asked.asked_rows else EMPTY for index in torn}
            self._requests.append(SegmentRequest(GroupMessage.READ, 0, 0.0, pieces, torn, by_message=True))
            self._send_all()

    def _receive(self) -> None:
        """Process the messages that have arrived, and a newer map."""
        open_lines = self._lines.open
        for line in list(open_lines.values()):
            try:
                if line.link.queued:
                    line.link.absorb()
                    line.link.flush()
            except LinkError:
                pass  # raised again by `next`, after the messages that had arrived
            while open_lines.get(line.server) is line:
                try:
                    message = line.next()
                except LinkError:
                    self._lines.lose(line)
                    break
                if message is None:
                    break
                self._take(line, message)
        self._apply_map()

    def _take(self, line: ServerConnection, message: Message) -> None:
        """Process a message. Raises the error that the server sent."""
        if message.tag == line.joining:
            line.joining = 0
            if message.kind == GroupMessage.ERROR:
                raise error_of(message)
            if message.kind != GroupMessage.JOINED:  # the server does not know the space yet: join again later
                self._lines.lose(line)
                return
            self._joined(line, message)
            return
        flight = line.flights.pop(message.tag, None)
        if flight is None:
            return  # its request was given up
        if message.kind == GroupMessage.ERROR:
            raise error_of(message)
        if message.kind == GroupMessage.STALE:
            flight.reopen()
            self._lines.refused(line.server)
            return
        if message.kind not in (GroupMessage.ACK, GroupMessage.VALUE):
            raise LinkError(f"{line.server!r} answered with a message of kind {message.kind}", peer=line.server)
        self._answered(line, flight, message)
        if message.kind == GroupMessage.VALUE:
            flight.request.land(line.server, message.payload)

    def _answered(self, line: ServerConnection, flight: InFlight, message: Message) -> None:
        """Record that a request has taken effect; retain a push that is not durable."""
        request, segments, durable = flight.request, flight.segments, int(message.weight)
        self._lines.answered(line.server)
        if request.kind in PUSHES and not request.repeated:
            push = StepPush(request.step, request.weight, {i: as_bytes(request.pieces[i]) for i in segments})
            if self.kept.acknowledged(push, durable, copy=flight.by_mailbox):
                request.buffers.clear()  # the replay buffer has them
        else:
            self.kept.durable(segments, durable)
        request.answered(segments, message)

    # ---- a newer map

    def _apply_map(self) -> None:
        """Apply a newer map: reopen the requests to segments that moved, and check what their new primaries lack."""
        changed = self._lines.newer()
        if not changed:
            return
        self._losses.moved(changed)
        self._sender.pool.clear()
        passing("session: a newer map")
        for line in list(self._lines.open.values()):
            void = [tag for tag, flight in line.flights.items() if not changed.isdisjoint(flight.segments)]
            for tag in void:
                line.flights.pop(tag).reopen()
            if void and line.link.queued:
                self._lines.lose(line)  # half of a request has been sent
        self._unsure.update(dict.fromkeys(self.kept.among(changed)))


class LossCheck:
    """Detects that awaited segments are lost for good; `lost` returns such segments (None: never checked)."""

    def __init__(self, space: str, lost: Callable[[], Collection[int]] | None) -> None:
        self.lost = lost
        self._space = space
        self._moved: set[int] = set()  # segments whose primary has changed: no other can be lost
        self._due = 0.0

    def moved(self, segments: Collection[int]) -> None:
        """Record segments whose primary has changed."""
        self._moved.update(segments)

    def begin(self, now: float) -> None:
        """Start a wait: the first check is due after ASK_SECONDS."""
        self._due = now + ASK_SECONDS

    def check(self, awaited: Iterable[int]) -> None:
        """Raise PeerLost if awaited segments are lost; asks at most every ASK_SECONDS."""
        if self.lost is None or not self._moved or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + ASK_SECONDS
        gone = sorted(self._moved.intersection(awaited).intersection(self.lost()))
        if gone:
            raise PeerLost(
                f"{named(gone)} of {self._space!r} had no backup when their server died: their parameters, and all "
                "pushes to them, are lost (the knob is `replicas`)",
                peer="server",
                segments=gone,
            )
