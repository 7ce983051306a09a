"""A worker's session with the servers of a group about one space: requests reach the present holder of each segment.

An exchange sends one request to each server before it reads any answer. When a server dies, or a segment moves, what is
not answered is sent again to the segment's new holder, and so are the pushes that only the former holder had
(`rayps.ps.client.replay_buffer`); the segments' ledgers drop what they have. Li et al., OSDI 2014, section 4.1.
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
    BY_MAILBOX,
    PATIENT,
    PUSHES,
    BufferPool,
    InFlight,
    SegmentRequest,
    ServerConnection,
    ServerConnections,
    gather,
    named,
)
from rayps.ps.client.map_subscription import Door
from rayps.ps.client.replay_buffer import CopyMemory, ReplayBuffer
from rayps.ps.client.turn import Turn, TurnPart
from rayps.ps.protocol.mailbox import ROWS, GradientBuffer, array_of, head_of
from rayps.ps.protocol.messages import GroupMessage, SegmentPayload, error_of, numbers, read_numbers, unpack
from rayps.ps.protocol.segment_map import SpaceMap, StaticMap
from rayps.ps.protocol.space import Space
from rayps.tensors.packing import flat_bytes

GRACE_SECONDS = 5.0  # a server answers what waits too long itself, naming the slowest rank: it gets time to
KEEP_BYTES = 256_000_000  # of pushes that are not durable yet
_NEVER = 1 << 62
ASK_SECONDS = 0.5  # how long an answer may be awaited until it is asked whether its segment is lost


class SegmentReplies(NamedTuple):
    """Collect the answers to a request.

    By segment its bytes (EMPTY where they were written into a given place), the number of rounds that this rank is
    ahead of the slowest, the least version, and the step of this rank below which all pushes are durable.
    """

    pieces: dict[int, Any]
    lead: int
    version: int
    durable: int


class Session:
    """One rank's links to the servers and the manager. For one thread; another uses a `reader()` of its own.

    `door` is a manager's {"address", "secret"}, or a function that finds them again, or a `StaticMap`. `incarnation`
    numbers the holders of the rank (`Group.join`); a later one fences this one. `timeout` is in seconds. `keep` is
    how many bytes of pushes are kept until they are durable. `lost` says which segments are lost for good: without it
    they are waited for, as somebody may load them again. Rank -1 loads and reads, and never pushes. `resident=False`
    shares no memory with servers of this host.

    Raises:
        PeerLost, PeerTimeout: no manager answers.
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
        self.kept = ReplayBuffer(keep)
        self._door, self._incarnation, self._lost = door, incarnation, lost
        name = name or (f"worker-{rank}" if rank >= 0 else "opener")
        self._replaces = isinstance(door, StaticMap) and not door.final  # dead servers: by what a snapshot held
        first = self._first if self._replaces else None
        self._lines = ServerConnections(door, space, rank, incarnation, name, timeout, resident=resident, first=first)
        self._turns = threading.RLock()  # one thread at a time: see `catch_up`
        self._next: dict[int, int] = {}  # by segment: the step after the last one that was acknowledged
        self._pool, self._copies = BufferPool(), CopyMemory()
        self._readers: weakref.WeakSet[Session] = weakref.WeakSet()
        self._asks: list[SegmentRequest] = []  # what is under way, in the order to be said
        self._turn: Turn | None = None
        self._whole: tuple[GradientBuffer, dict[int, Any]] | None = None
        self._put: list[ServerConnection] = []  # whose mailbox has a request that its server was not woken for
        self._item = 0 if space.layout is None else space.layout.dtype.itemsize
        self._tag = 0
        self._moved: set[int] = set()  # segments that have had another primary since this began
        self._unsure: dict[
            int, ServerConnection | None
        ] = {}  # segments whose new primary may lack what is kept: who was asked
        self._ask_lost = 0.0  # when to ask whether what is awaited of these is lost

    @property
    def map(self) -> SpaceMap:
        """Who holds what, as far as it is known here."""
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
            lost=self._lost,
            resident=self._lines.memory is not None,
        )
        self._readers.add(made)
        if self._lines.ended:  # while it was made
            made.hang_up()
        return made

    def join(self) -> dict[int, int]:
        """Say who this is to all servers; this rank's next step by segment. Rank -1 has none, and need not join.

        Raises:
            PeerTimeout, PeerLost: a server does not answer, or a segment is lost.
            StaleGeneration: somebody else holds the rank by now.
        """
        self._begin()
        lines, found = self._lines, dict[int, int]()
        while self.rank >= 0:
            self._listen()
            missing = [index for index in range(self.space.segments) if index not in found]
            for server, segments in lines.map.by_server(missing).items():
                line = None if server is None else lines.line(server)
                if line is not None and line.joined:
                    found |= {i: line.marks[i] for i in segments if i in line.marks}
                    if any(i not in line.marks for i in segments):  # it does not have its orders yet
                        lines.join(line)
                        lines.refused(line.server)
            missing = [index for index in missing if index not in found]
            if not missing:
                return found
            self._check_lost(missing)
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
    ) -> SegmentReplies:
        """Ask something of the segments in `pieces` (buffers), and hear all answers.

        `step` is also the round of a PART. What is answered lands in `landing`, writable buffers of the right size,
        else in fresh memory. A PUSH_PULL pulls the dense vector's segments alone. Buffers may change again once this
        has returned.

        Raises:
            PeerTimeout: servers, or the slowest rank, were silent past the deadline; it names them.
            PeerLost: segments are lost. StaleGeneration: somebody else holds the rank by now.
        """
        dense, lands = len(self.space.cuts), None if landing is None else dict(landing)
        parts = [(kind, dict(pieces))]
        if kind is GroupMessage.PUSH_PULL and dense < self.space.segments:
            parts = [
                (GroupMessage.PUSH, {i: piece for i, piece in pieces.items() if i >= dense}),
                (kind, {i: piece for i, piece in pieces.items() if i < dense}),
            ]
        asks = [SegmentRequest(each, step, weight, those, lands) for each, those in parts if those]
        self._run(asks)
        found: dict[int, Any] = {}
        for ask in asks:
            found |= ask.answers
        return SegmentReplies(
            found,
            max((ask.lead for ask in asks), default=0),
            min((ask.version for ask in asks if ask.version is not None), default=0),
            min((ask.durable for ask in asks if ask.durable is not None), default=0),
        )

    def read_together(self, pieces: Mapping[int, Any], *, step: int, landing: Mapping[int, Any]) -> SegmentReplies:
        """Pull as `exchange` does, from all dense segments at one moment.

        All have the same pushes and apply no other meanwhile, also while segments move. All pushes must be
        acknowledged.

        Raises:
            PeerTimeout: a push that one server has did not reach another, or the space was held for too long.
        """
        deadline = time.monotonic() + self.timeout
        while True:
            breaks, began = self._lines.breaks, time.monotonic()
            try:
                self._hold()
                found = self.exchange(GroupMessage.PULL, pieces, step=step, landing=landing)
            except PeerTimeout as error:
                if not error.data.get("behind") or time.monotonic() > deadline:
                    raise
                continue  # whoever must repeat a push may wait for a server that was held here
            finally:
                self.tell(GroupMessage.RELEASE, 0)
            if self._lines.breaks == breaks and time.monotonic() - began < self.timeout:
                return found  # else a segment was not the one that was held, or has gone on meanwhile
            if time.monotonic() > deadline:
                raise PeerTimeout(
                    f"the segments of {self.space.name!r} could not be held and read within {self.timeout:g} s: raise "
                    "timeout, or pull with consistent=False",
                    peer="server",
                    seconds=self.timeout,
                )

    def _hold(self) -> None:
        """Hold all dense segments at the same pushes.

        Segment 0's server is asked first: it admits one reader at a time.
        """
        dense = range(len(self.space.cuts))
        first = [i for i in dense if self.map.holdings[i].primary == self.map.holdings[0].primary]
        pieces = self.exchange(GroupMessage.HOLD, dict.fromkeys(first, EMPTY), step=1).pieces
        others = dict.fromkeys((i for i in dense if i not in pieces), EMPTY)
        if others:
            pieces |= self.exchange(GroupMessage.HOLD, others).pieces
        reached = {i: read_numbers(piece) for i, piece in pieces.items()}
        target = [max(steps) for steps in zip(*reached.values(), strict=True)]
        if len({steps[self.rank] for steps in reached.values()}) > 1:
            return  # a push of this rank was cut off between servers: no moment has it in all, until it is repeated
        late = {i: numbers(target) for i, steps in reached.items() if steps != target}
        if late:
            self.exchange(GroupMessage.AIM, late)

    def room(self, size: int) -> Any:
        """Memory of `size` bytes for a piece, or to land in, where servers of this host find it; not cleared."""
        memory = self._lines.memory
        return np.empty(size, np.uint8) if memory is None else memory.room(size)

    def gradients(self) -> GradientBuffer | None:
        """Where servers of this host read the gradient of the dense vector; None where there is none of them."""
        if self._turn is not None and self._turn.good(self._lines):
            return self._turn.gradients
        memory, layout = self._lines.memory, self.space.layout
        if memory is None or layout is None:
            return None
        near = any(line.mailbox is not None and line.mailbox.ready for line in self._lines.open.values())
        return memory.gradient(layout.size, layout.dtype) if near else None

    @property
    def shares_memory(self) -> bool:
        """Whether all servers that are connected share memory with this worker."""
        lines = self._lines.open.values()
        return bool(lines) and all(line.mailbox is not None and line.mailbox.ready for line in lines)

    def whole(self, gradients: GradientBuffer) -> dict[int, Any]:
        """The pieces of a push of all that lies in `gradients()`."""
        if self._whole is None or self._whole[0] is not gradients:
            laid, item = flat_bytes(gradients.whole), self._item
            self._whole = gradients, {i: laid[a * item : b * item] for i, (a, b) in enumerate(self.space.cuts)}
        return self._whole[1]

    def turn(
        self, step: int, weight: float, pieces: Mapping[int, Any], landing: Mapping[int, Any], *, torn: bool = False
    ) -> SegmentReplies | None:
        """As `exchange` of a PUSH_PULL of the whole vector, which lies in `gradients()`, in fewer calls.

        None where it must be an `exchange`: a server does not share memory, or something is under way. Raises as that.
        """
        with self._turns:
            return self._turn_alone(step, weight, pieces, landing, torn=torn)

    def _turn_alone(
        self, step: int, weight: float, pieces: Mapping[int, Any], landing: Mapping[int, Any], *, torn: bool
    ) -> SegmentReplies | None:
        lines, plan = self._lines, self._turn
        if plan is None or not plan.good(lines):
            plan = self._turn = Turn.of(lines, self.space) if lines.open else None
        laid = plan is not None and self._whole is not None and self._whole[1] is pieces
        if plan is None or not laid or self._asks or self._unsure or not plan.free():
            return None
        began = time.monotonic()
        lines.deadline, self._ask_lost = began + self.timeout + GRACE_SECONDS, began + ASK_SECONDS
        patience, parts = int(1000 * self.timeout) or 1, plan.parts
        for part in parts:
            self._tag = tag = self._tag + 1
            part.box.put(tag, GroupMessage.PUSH_PULL, part.head, step, patience, weight)
            passing("talk: between servers")
        lines.fence()
        for part in parts:
            part.box.ring()
        passing("talk: pushed, not heard")
        odd: list[TurnPart] = []
        lead, version, durable, keeps = 0, _NEVER, _NEVER, self._replaces or self.kept.limit
        for part in parts:
            answer = part.take(landing, torn) if part.answered or plan.wait(lines, part) else None
            if answer is None:
                odd.append(part)
                continue
            least, ahead, mark = answer
            version, lead = least if least < version else version, ahead if ahead > lead else lead
            durable = mark if mark < durable else durable
            if lines.troubles:
                lines.answered(part.line.server)
            if keeps:
                self._acknowledged(part.segments, mark, step, weight, pieces)
        self.seconds_waiting += time.monotonic() - began
        if odd:
            ask = SegmentRequest(
                GroupMessage.PUSH_PULL, step, weight, {i: pieces[i] for p in odd for i in p.segments}, dict(landing)
            )
            ask.torn = torn
            ask.unsaid.clear()
            for part in odd:
                part.line.flights[part.box.tag] = InFlight(ask, part.segments, True)
            self._run([ask])
            version, lead, durable = min(version, ask.version or 0), max(lead, ask.lead), min(durable, ask.durable or 0)
        else:
            passing("talk: acknowledged")
        return SegmentReplies({}, lead, version, durable)

    def _acknowledged(
        self, segments: Collection[int], mark: int, step: int, weight: float, pieces: Mapping[int, Any]
    ) -> None:
        """A push by mailbox has had its effect: keep copies of what is not durable, as its memory is used again."""
        first = self._pushed(segments, step)
        self.kept.durable(segments, mark)
        if mark <= step and self.kept.limit:
            copies = {index: memoryview(bytes(as_bytes(pieces[index]))) for index in segments}
            self.kept.keep(step, weight, copies, first)

    def tell(self, kind: GroupMessage, number: int) -> None:
        """Say what has no answer (SAVED) to all servers that are joined; that one is lost is found out later."""
        for line in list(self._lines.open.values()):
            try:
                line.say(Message(kind, 0, number), None)
            except LinkError:
                self._lines.lose(line)

    def flush(self) -> None:
        """Return once every push of this rank is durable. In step that is once the others have pushed as much.

        Raises:
            PeerTimeout, PeerLost: as `exchange`.
        """
        if not isinstance(self._door, StaticMap):  # there acknowledged is all there is
            self.exchange(GroupMessage.FLUSH, dict.fromkeys(range(self.space.segments), EMPTY))

    def hang_up(self) -> None:
        """End what another thread waits for in here, as lost; that thread is to `close`. Any thread may call it."""
        self._lines.hang_up()
        for reader in list(self._readers):
            reader.hang_up()

    def close(self) -> None:
        """Leave. What is not durable stays with the servers as it is. Safe to call twice."""
        self._lines.close()

    # ---- one exchange

    def _begin(self) -> None:
        now = time.monotonic()
        self._lines.deadline = now + self.timeout + GRACE_SECONDS
        self._ask_lost = now + ASK_SECONDS

    def catch_up(self) -> None:
        """Push again what a server lacks that has just replaced another, if no exchange has done so.

        Any thread: it waits for the exchange under way, and the next one waits for it.

        Raises:
            PeerTimeout, PeerLost: as `exchange`.
        """
        with self._turns:
            if not self._lines.ended:
                self._run([])

    def _run(self, asks: list[SegmentRequest]) -> None:
        with self._turns:
            self._run_alone(asks)

    def _run_alone(self, asks: list[SegmentRequest]) -> None:
        began = time.monotonic()
        self._begin()
        self._asks += asks
        try:
            self._look()
            self._say_all()
            passing("talk: pushed, not heard")
            while self._unsure or any(ask.open for ask in self._asks):
                if self._heard_by_mailbox():
                    continue
                awaited = {index for ask in self._asks for index in ask.pieces if index not in ask.answers}
                self._check_lost(awaited | self._unsure.keys())
                unasked = [index for index, line in self._unsure.items() if line is None]
                self._lines.wait([index for ask in self._asks for index in ask.unsaid] + unasked)
                self._listen()
                self._say_all()
            passing("talk: acknowledged")
        except BaseException:
            self._give_up()
            raise
        for ask in self._asks:
            if not ask.kept:
                self._pool.give(ask.buffers)
        self._asks = []
        self.seconds_waiting += time.monotonic() - began

    def _give_up(self) -> None:
        """After an error: answers to come are passed over; pushes that may not have arrived go before the next ask."""
        for line in self._lines.open.values():
            if line.waits and self._lines.memory is not None:
                self._lines.memory.retire()
            line.flights.clear()
        cut_off = [ask for ask in self._asks if ask.kind in PUSHES and ask.open]
        for ask in cut_off:
            if not ask.kept:
                pieces = {i: memoryview(bytes(as_bytes(ask.pieces[i]))) for i in ask.pieces if i not in ask.answers}
                self.kept.keep(ask.step, ask.weight, pieces)
        self._asks = self._again(range(self.space.segments)) if cut_off else []

    def _again(self, segments: Collection[int], marks: Mapping[int, int] | None = None) -> list[SegmentRequest]:
        """What is kept of these segments, to be said again; with `marks`, what lies above them."""
        return [
            SegmentRequest(GroupMessage.PUSH, p.step, p.weight, p.pieces, kept=True, by_message=True)  # in their order
            for p in self.kept.of(segments, marks)
        ]

    def _pushed(self, segments: Collection[int], step: int) -> int:
        """A push up to `step` was acknowledged; the first step that it stands for."""
        first = min((self._next.get(index, step) for index in segments), default=step)
        self._next.update(dict.fromkeys(segments, step + 1))
        return min(first, step)

    def _first(self, server: str) -> int:
        """The first step that can be pushed again to a server; -1: nothing was pushed to it."""
        found = []
        for index, held in enumerate(self.map.holdings):
            if held.primary == server:
                kept = self.kept.first(index)
                found.append(self._next.get(index, -1) if kept is None else kept)
        return min(found, default=-1)

    def _ask_marks(self) -> None:
        """Ask new primaries how far this rank's pushes got there; JOINED says it (`_joined`)."""
        for server, segments in self.map.by_server(list(self._unsure)).items():
            line = None if server is None else self._lines.line(server)
            if server is not None and line is not None and any(self._unsure[index] is not line for index in segments):
                self._lines.join(line)
                line = self._lines.open.get(server)
            self._unsure.update(dict.fromkeys(segments, line))

    def _joined(self, line: ServerConnection, message: Message) -> None:
        pairs = read_numbers(message.payload)
        line.marks = dict(zip(pairs[::2], pairs[1::2], strict=True))
        line.joined = True
        for index, mark in line.marks.items():
            self._next.setdefault(index, mark)
        asked = [index for index, other in self._unsure.items() if other is line]
        known = [index for index in asked if index in line.marks]
        for index in known:
            del self._unsure[index]
        self._asks[:0] = self._again(known, line.marks)
        if len(known) < len(asked):  # it does not have its orders yet
            self._unsure.update(dict.fromkeys(set(asked).difference(known)))
            self._lines.refused(line.server)

    def _say_all(self) -> None:
        if self._unsure:
            self._ask_marks()
        behind = set(self._unsure)  # segments whose server lacks earlier pushes: they come first
        for ask in list(self._asks):
            if ask.kept:
                behind.update(index for index in ask.pieces if index not in ask.answers)
            if ask.unsaid:
                ready = [index for index in ask.unsaid if ask.kept or index not in behind]
                for server, segments in self.map.by_server(ready).items():
                    line = None if server is None else self._lines.line(server)
                    if line is not None:
                        self._say(line, ask, segments)
                        passing("talk: between servers")
        if self._put:
            self._lines.fence()
            for line in self._put:
                if line.mailbox is not None:
                    line.mailbox.ring()
            self._put = []

    def _say(self, line: ServerConnection, ask: SegmentRequest, segments: list[int]) -> None:
        holdings, patience = self.map.holdings, 0
        if ask.kind in PATIENT:
            patience = max(1, int(1000 * (self._lines.deadline - GRACE_SECONDS - time.monotonic())))
        if ask.kind in BY_MAILBOX and line.mailbox is not None and self._say_by_mailbox(line, ask, segments, patience):
            return
        pieces = [SegmentPayload(index, holdings[index].generation, ask.pieces[index]) for index in segments]
        payload, places = gather(pieces, self._pool)
        ask.buffers.append(payload)
        if ask.kind in PUSHES:  # what is said again, or kept, must be the same bytes: here nobody changes them
            ask.pieces.update(zip(segments, places, strict=True))
        self._tag += 1
        line.flights[self._tag] = InFlight(ask, segments)
        for index in segments:
            del ask.unsaid[index]
        try:
            line.say(Message(ask.kind, self._tag, ask.step, patience, ask.weight), payload)
        except LinkError:
            self._lines.lose(line)

    def _say_by_mailbox(self, line: ServerConnection, ask: SegmentRequest, segments: list[int], patience: int) -> bool:
        """Put a request into a mailbox; False where it must go by message."""
        box, memory, dense = line.mailbox, self._lines.memory, len(self.space.cuts)
        if memory is None or box is None or ask.by_message or not line.joined or len(segments) > ROWS:
            return False
        if ask.kept or any(flight.ask.kept for flight in line.flights.values()):
            return False  # a mailbox would overtake the pushes that are repeated by message
        if not box.ready or not box.answered or box.tag in line.flights or line.link.queued:
            return False
        rows, outs, holdings = [], {}, self.map.holdings
        for index in segments:
            out, place, size = None, 0, 0
            if index >= dense and ask.kind != GroupMessage.PUSH:
                landing = None if ask.landing is None else ask.landing.get(index)
                if landing is None:  # how much comes is not known
                    return False
                out = array_of(landing)
                if (place := memory.place(out)) < 0:
                    out = outs[index] = memory.room(len(out))
                    place = memory.place(out)
                size = len(out)
                if place < 0 and size:
                    return False
            piece = array_of(ask.pieces[index])
            if index < dense and len(piece) not in (0, self._bytes_of(index)):  # a range, rows, or encoded
                return False
            at = memory.place(piece) if len(piece) else 0
            if at < 0:
                copy = memory.room(len(piece))
                copy[:] = piece
                ask.pieces[index] = copy
                if (at := memory.place(copy)) < 0:
                    return False
            rows.append((index, holdings[index].generation, at, len(piece), place, size))
        try:
            if not box.offer():
                return False
        except LinkError:
            self._lines.lose(line)
            return True
        self._tag += 1
        line.flights[self._tag] = InFlight(ask, segments, True, outs)
        for index in segments:
            del ask.unsaid[index]
        box.put(self._tag, ask.kind, head_of(rows), ask.step, patience, ask.weight)
        self._put.append(line)
        return True

    def _bytes_of(self, index: int) -> int:
        a, b = self.space.cuts[index]
        return (b - a) * self._item

    # ---- what is heard

    def _heard_by_mailbox(self) -> bool:
        """Take the answers that are in mailboxes; whether there were any."""
        found = False
        for line in list(self._lines.open.values()):
            if line.heard and line.mailbox is not None:
                found = True
                self._hear(line, line.flights[line.mailbox.tag])
        return found

    def _hear(self, line: ServerConnection, flight: InFlight) -> None:
        """Take the answer that is in a mailbox."""
        box = line.mailbox
        if box is not None:
            version, lead, durable, _, _ = box.answer()
            del line.flights[box.tag]
            says = GroupMessage.ACK if flight.ask.kind == GroupMessage.PUSH else GroupMessage.VALUE
            message = Message(says, box.tag, version, lead, float(durable))
            self._answered(line, flight, message)
            if says == GroupMessage.VALUE:
                self._read_out(line, flight)

    def _read_out(self, line: ServerConnection, flight: InFlight) -> None:
        """Take the values of an answer out of the memory in which they are."""
        ask, dense, box = flight.ask, len(self.space.cuts), line.mailbox
        assert box is not None
        again: dict[int, Any] = {}
        for index in flight.segments:
            place = None if ask.landing is None else ask.landing.get(index)
            if index >= dense:
                if index in flight.outs:
                    array_of(place)[:] = flight.outs[index]
            else:
                if place is None:
                    place = np.empty(self._bytes_of(index), np.uint8)
                    ask.answers[index] = memoryview(place)  # type: ignore[arg-type]
                if not box.read(index, place, torn=ask.torn):
                    again[index] = place
            ask.answers.setdefault(index, EMPTY)
        if again:  # it changes all the time: the server makes a copy
            read = SegmentRequest(GroupMessage.READ, 0, 0.0, dict.fromkeys(again, EMPTY), again, by_message=True)
            self._asks.append(read)
            self._say_all()

    def _listen(self) -> None:
        """Take what has arrived, and a newer map."""
        open_lines = self._lines.open
        for line in list(open_lines.values()):
            try:
                if line.link.queued:
                    line.link.absorb()
                    line.link.flush()
            except LinkError:
                pass  # found again when what it sent has been read
            while open_lines.get(line.server) is line:
                try:
                    message = line.next()
                except LinkError:
                    self._lines.lose(line)
                    break
                if message is None:
                    break
                self._take(line, message)
        self._look()

    def _take(self, line: ServerConnection, message: Message) -> None:
        if message.tag == line.joining:
            line.joining = 0
            if message.kind == GroupMessage.ERROR:
                raise error_of(message)
            if message.kind != GroupMessage.JOINED:  # it cannot say yet: it is asked again
                self._lines.lose(line)
                return
            self._joined(line, message)
            return
        flight = line.flights.pop(message.tag, None)
        if flight is None:
            return  # an answer to what was given up
        ask, segments = flight.ask, flight.segments
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
            self._land(line, ask, message.payload)
        else:
            ask.answers.update(dict.fromkeys(segments, EMPTY))

    def _answered(self, line: ServerConnection, flight: InFlight, message: Message) -> None:
        """A request has had its effect: keep what is not durable."""
        ask, segments = flight.ask, flight.segments
        self._lines.answered(line.server)
        mark = int(message.weight)
        self.kept.durable(segments, mark)
        first = self._pushed(segments, ask.step) if ask.kind in PUSHES and not ask.kept else ask.step
        if ask.kind in PUSHES and mark <= ask.step and not ask.kept and self.kept.limit:
            pieces = {index: ask.pieces[index] for index in segments}
            if flight.by_mailbox:  # its memory is used again
                pieces = {index: self._copies.copy(piece) for index, piece in pieces.items()}
            self.kept.keep(ask.step, ask.weight, pieces, first)
            ask.buffers.clear()
        ask.open -= len(segments)
        ask.durable = mark if ask.durable is None else min(mark, ask.durable)
        if message.kind == GroupMessage.VALUE:
            ask.lead = max(ask.lead, message.b)
            ask.version = message.a if ask.version is None else min(message.a, ask.version)
        if message.kind == GroupMessage.ACK and flight.by_mailbox:
            ask.answers.update(dict.fromkeys(segments, EMPTY))

    def _land(self, line: ServerConnection, ask: SegmentRequest, payload: Any) -> None:
        landing = ask.landing
        for index, _, data in unpack(payload):
            place = None if landing is None else landing.get(index)
            if place is None:
                ask.answers[index] = data if landing is None else memoryview(bytes(data))
                continue
            view = as_bytes(place)
            if len(view) != len(data):
                raise LinkError(
                    f"{line.server!r} sent {len(data)} bytes of segment {index} where {len(view)} were expected",
                    peer=line.server,
                    given=len(data),
                    expected=len(view),
                )
            view[:] = data
            ask.answers[index] = EMPTY

    # ---- a newer map

    def _look(self) -> None:
        """Take over a newer map: what it makes void is said again, and what new primaries lack."""
        changed = self._lines.newer()
        if not changed:
            return
        self._moved |= changed
        self._pool.clear()
        passing("talk: a newer map")
        for line in list(self._lines.open.values()):
            void = [tag for tag, flight in line.flights.items() if not changed.isdisjoint(flight.segments)]
            for tag in void:
                line.flights.pop(tag).reopen()
            if void and line.link.queued:
                self._lines.lose(line)  # half a request has left
        self._unsure.update(dict.fromkeys(self.kept.among(changed)))

    def _check_lost(self, awaited: Iterable[int]) -> None:
        """Say so where what is awaited is lost for good. Raises PeerLost."""
        if self._lost is None or not self._moved or time.monotonic() < self._ask_lost:
            return
        self._ask_lost = time.monotonic() + ASK_SECONDS
        gone = sorted(self._moved.intersection(awaited).intersection(self._lost()))
        if gone:
            raise PeerLost(
                f"{named(gone)} of {self.space.name!r} had no copy when their server died: their parameters, and all "
                "that was pushed to them, are lost (the knob is `replicas`)",
                peer="server",
                segments=gone,
            )
