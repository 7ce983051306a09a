"""What a server answers to the workers of its spaces.

All of a request has effect, or none of it: its segments' generations are looked at first, then each push is checked,
then all are applied. No answer leaves before copies have what it says (`Copies.needs`).
"""

from __future__ import annotations

import logging
import math
import struct
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from rayps.elastic.copies import Copies, stuck_on
from rayps.elastic.dense import DenseSegment
from rayps.elastic.guests import NOBODY, Guest, Request, Withheld, fenced
from rayps.elastic.holdings import Held, Holding
from rayps.elastic.messages import Kind, Piece, numbers, pack, read_numbers, unpack
from rayps.elastic.segment import Segment
from rayps.errors import ConfigError, PeerTimeout, RaypsError, StaleGeneration
from rayps.failpoint import passing
from rayps.link import Message
from rayps.server.messages import refusal

log = logging.getLogger(__name__)

READER = -1
OPERATIONS = frozenset({Kind.PUSH, Kind.PULL, Kind.PUSH_PULL, Kind.READ})
_SECONDS = struct.Struct("<d")


class Mouth(Protocol):
    """How answers leave."""

    def say(self, guest: Guest, message: Message, payload: Any) -> None:
        """Queue a message; a guest that is lost is dropped."""


class Serving:
    """Answers requests about what is held."""

    def __init__(self, copies: Copies, mouth: Mouth, name: str) -> None:
        self._copies, self._mouth = copies, mouth
        self._name = name
        self._answers: dict[int, Callable[[Held, Request], None]] = {
            Kind.PUSH: self._push, Kind.PULL: self._wait, Kind.PUSH_PULL: self._push_pull, Kind.READ: self._read,
            Kind.LOAD: self._load, Kind.PART: self._part, Kind.SAVED: self._saved, Kind.FLUSH: self._wait,
        }  # fmt: skip

    def answer(self, held: Held, request: Request) -> None:
        """Serve one request, or park it."""
        try:
            if request.kind == Kind.JOIN:
                self._join(held, request)
                return
            handler = self._answers.get(request.kind)
            if handler is None:
                raise ValueError(f"there is no request of kind {request.kind}")
            if request.guest.rank == NOBODY:
                raise fenced(request.guest)
            if request.kind != Kind.SAVED:
                request.pieces = unpack(request.payload)
                if self._is_stale(held, request):
                    return
            if request.kind in OPERATIONS:
                held.operations += 1
            handler(held, request)
        except Exception as error:
            self.fail(held, request, error)

    def fail(self, held: Held | None, request: Request, error: Exception) -> None:
        """Tell who asked what went wrong; a fault of ours too, and the server goes on."""
        if not isinstance(error, (ValueError, RaypsError)):
            log.error("a request of kind %d failed", request.kind, exc_info=error)
            error = RaypsError(f"a server failed: {type(error).__name__}: {error}")
        if held is not None and isinstance(error, ConfigError):
            held.rejected += 1
        self._mouth.say(request.guest, Message(Kind.ERROR, request.tag), refusal(request.tag, error)[1])

    # ---- who asks

    def _join(self, held: Held, request: Request) -> None:
        guest, rank, incarnation = request.guest, request.b, int(request.weight)
        if not READER <= rank < held.space.workers:
            raise ValueError(f"rank {rank} is not one of {held.space.workers} workers (0 to {held.space.workers - 1})")
        if rank != READER:
            seen = held.incarnations.get(rank, -1)
            if incarnation < seen:
                raise StaleGeneration(
                    f"{guest.link.peer} is incarnation {incarnation} of rank {rank}, and {seen} has joined",
                    peer=guest.link.peer, generation=incarnation, expected=seen,
                )  # fmt: skip
            held.incarnations[rank] = incarnation
            self._fence(held, rank, incarnation)
        guest.space, guest.rank, guest.incarnation = held.number, rank, incarnation
        if len(request.payload) == _SECONDS.size:
            (guest.patience,) = _SECONDS.unpack(request.payload)
        mine = [holding for holding in held.primaries() if holding.usable]
        pairs = [] if rank == READER else [v for h in mine for v in (h.index, _segment(h).durable(rank))]
        self._reply(request, Kind.JOINED, mine, payload=numbers(pairs))

    def _fence(self, held: Held, rank: int, incarnation: int) -> None:
        """What an older worker of this rank waits for, it hears no more."""
        for request in [r for r in held.parked if r.guest.rank == rank and r.guest.incarnation < incarnation]:
            _remove(held.parked, request)
            self.fail(held, request, fenced(request.guest))

    def fences(self, held: Held, request: Request) -> bool:
        """Whether a request comes from a rank that a newer worker has taken."""
        guest = request.guest
        return guest.rank >= 0 and guest.incarnation < held.incarnations.get(guest.rank, 0)

    def _is_stale(self, held: Held, request: Request) -> bool:
        """Refuse a request that names a segment which is not served here in that generation."""
        if self.fences(held, request):
            raise fenced(request.guest)
        here = held.holdings
        loads = request.kind == Kind.LOAD
        wrong = []
        for piece in request.pieces:
            holding = here.get(piece.segment)
            here_now = holding is not None and holding.serves and holding.generation == piece.generation
            if holding is None or not here_now or not (holding.usable or loads):
                wrong.append(piece.segment)
        if wrong:
            self._say_stale(request, wrong)
        return bool(wrong)

    def _say_stale(self, request: Request, segments: Iterable[int]) -> None:
        self._mouth.say(request.guest, Message(Kind.STALE, request.tag), numbers(segments))

    # ---- pushes

    def _push(self, held: Held, request: Request) -> None:
        self._reply(request, Kind.ACK, self._apply(held, request))

    def _push_pull(self, held: Held, request: Request) -> None:
        self._apply(held, request)
        request.kind = Kind.PULL
        request.a += 1
        request.pieces = [Piece(piece.segment, piece.generation, b"") for piece in request.pieces]
        self._wait(held, request)

    def _apply(self, held: Held, request: Request) -> list[Holding]:
        rank, step, weight = request.guest.rank, request.a, request.weight
        if rank == READER:
            raise ValueError(f"{request.guest.link.peer} joined as a reader, and cannot push")
        touched = [held.holdings[piece.segment] for piece in request.pieces]
        self._check_bytes(held, touched)
        if len(touched) > 1:  # one alone checks itself
            for holding, piece in zip(touched, request.pieces, strict=True):
                _segment(holding).check(rank, step, weight, piece.data)
        changed = []
        for holding, piece in zip(touched, request.pieces, strict=True):
            changes = _segment(holding).push(rank, step, weight, piece.data)
            if changes:
                changed.append((holding, changes))
        passing("host: applied, not forwarded")
        self._copies.forward(changed)
        passing("host: forwarded, not copied")
        if held.parked:
            self.wake(held)
        return touched

    def _check_bytes(self, held: Held, touched: list[Holding]) -> None:
        """Refuse what makes rows where the space has all the bytes that it may have."""
        most = held.space.quota.bytes
        if most is None or all(held.space.table_of(holding.index) is None for holding in touched):
            return
        tables = sum(table.segments for table in held.space.tables)
        here = [h for h in held.primaries() if held.space.table_of(h.index) is not None]
        used = sum(_segment(holding).nbytes for holding in here)
        layout = held.space.layout
        dense = 0 if layout is None else layout.size * layout.dtype.itemsize
        if used > (most - dense) * len(here) / tables:
            raise _over(held, used, most)

    # ---- pulls

    def _wait(self, held: Held, request: Request) -> None:
        """Serve what waits for the clock now, or park it."""
        if not self._serve_waiting(held, request):
            seconds = request.b / 1000 if request.b > 0 else request.guest.patience
            if request.kind == Kind.PART and request.b <= 0:
                seconds = math.inf  # its link says when nobody waits any more
            request.deadline = time.monotonic() + seconds
            held.parked.append(request)

    def _serve_waiting(self, held: Held, request: Request, shared: dict[Any, Any] | None = None) -> bool:
        rank = request.guest.rank
        touched = [held.holdings[piece.segment] for piece in request.pieces]
        if request.kind == Kind.FLUSH:
            if any(h.marks().get(rank, 0) > _segment(h).durable(rank) for h in touched):
                return False
            self._reply(request, Kind.ACK, touched)
        elif request.kind == Kind.PART:
            return self._serve_part(request, touched)
        else:
            for holding in touched:
                segment = _segment(holding)
                if not segment.may_pull(rank) or segment.marks().get(rank, 0) < request.a:
                    return False
            self._serve_pull(request, touched, shared)
        return True

    def _serve_pull(self, request: Request, touched: list[Holding], shared: dict[Any, Any] | None) -> None:
        """Answer with the values of now. `shared`: those of pulls that are served in the same moment, by segments."""
        rank, lead, pieces, changed = request.guest.rank, 0, [], []
        for holding, piece in zip(touched, request.pieces, strict=True):
            value, ahead, changes = _segment(holding).pull(rank, piece.data)
            lead = max(lead, ahead)
            pieces.append(Piece(piece.segment, piece.generation, value))
            if changes:
                changed.append((holding, changes))
        self._copies.forward(changed)
        key = None
        if shared is not None and all(isinstance(holding.segment, DenseSegment) for holding in touched):
            key = tuple(holding.index for holding in touched)
        payload = shared.get(key) if shared and key else None
        if payload is None:
            payload = pack(pieces)
            if shared is not None and key:
                shared[key] = payload
        self._reply(request, Kind.VALUE, touched, lead=lead, payload=payload)

    def _read(self, held: Held, request: Request) -> None:
        touched = [held.holdings[piece.segment] for piece in request.pieces]
        pieces = [Piece(p.segment, p.generation, _segment(h).read(p.data))
                  for h, p in zip(touched, request.pieces, strict=True)]  # fmt: skip
        self._reply(request, Kind.VALUE, touched, payload=pack(pieces))

    def wake(self, held: Held) -> None:
        """Serve the parked requests that need not wait any more."""
        shared: dict[Any, Any] = {}
        for request in list(held.parked):
            if request not in held.parked:
                continue  # its guest was lost while another was served
            try:
                if self._serve_waiting(held, request, shared):
                    _remove(held.parked, request)
            except Exception as error:
                _remove(held.parked, request)
                self.fail(held, request, error)

    # ---- states

    def _load(self, held: Held, request: Request) -> None:
        if request.guest.rank != READER:
            raise ValueError(f"{request.guest.link.peer} joined as a worker, and cannot load a state")
        made: list[tuple[Holding, Segment]] = []
        for piece in request.pieces:
            segment = held.make(piece.segment)
            segment.load(piece.data)
            made.append((held.holdings[piece.segment], segment))
        most = held.space.quota.bytes
        replaced = {holding.index for holding, _ in made}
        used = sum(segment.nbytes for _, segment in made)
        used += sum(_segment(h).nbytes for h in held.primaries() if h.usable and h.index not in replaced)
        if most is not None and used > most:
            raise _over(held, used, most)
        for holding, segment in made:
            old = _segment(holding)
            segment.seq = max(segment.seq, old.seq) + 1  # no copy of what was before looks like this one
            getattr(old, "close", lambda: None)()
            holding.segment, holding.usable, holding.line = segment, True, holding.generation
            segment.copied = bool(holding.copies)
            self._copies.restate(holding)
        self._reply(request, Kind.ACK, [holding for holding, _ in made])
        self.wake(held)

    def _part(self, held: Held, request: Request) -> None:
        touched = [held.holdings[piece.segment] for piece in request.pieces]
        rounds = request.a
        if rounds >= 0:
            for holding in touched:
                segment = _segment(holding)
                closed = min(segment.marks().values(), default=0)
                if segment.part(rounds) is None and closed != rounds:
                    if closed > rounds:
                        raise RaypsError(f"the state after round {rounds} is not kept any more, or was not asked for "
                                         f"in time (segment {holding.index} of {held.space.name!r})")
                    segment.keep([rounds])
        self._wait(held, request)

    def _serve_part(self, request: Request, touched: list[Holding]) -> bool:
        rounds, states = request.a, []
        for segment in map(_segment, touched):
            now = rounds < 0 or min(segment.marks().values(), default=0) == rounds
            state = segment.part(rounds) or (segment.dump() if now else None)
            if state is None:
                return False
            states.append(state)
        for holding in touched:
            holding.saving[rounds] = {r: min(s, rounds) if rounds >= 0 else s for r, s in holding.marks().items()}
        pieces = [Piece(p.segment, p.generation, s) for p, s in zip(request.pieces, states, strict=True)]
        self._reply(request, Kind.VALUE, touched, payload=pack(pieces))
        return True

    def _saved(self, held: Held, request: Request) -> None:
        for holding in held.primaries():
            holding.state_is_kept(request.a)

    # ---- answers

    def _reply(
        self, request: Request, kind: Kind, touched: list[Holding], *, lead: int = 0, payload: Any = None
    ) -> None:
        rank = request.guest.rank
        durable = min((holding.durable(rank) for holding in touched), default=0) if rank >= 0 else 0
        version = min((_segment(holding).version for holding in touched), default=0)
        message = Message(kind, request.tag, version, lead, float(durable))
        needs = self._copies.needs(touched)
        if needs:
            deadline = time.monotonic() + request.guest.patience
            withheld = Withheld(request, message, payload, touched, needs, deadline)
            touched[0].space.withheld.append(withheld)
        else:
            self._mouth.say(request.guest, message, payload)

    def settled(self, held: Held, *, anew: bool) -> None:
        """Let go the answers whose copies have everything; `anew`: what they wait for may have changed."""
        left = []
        free = []
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

    def stop_serving(self, holding: Holding) -> None:
        """Refuse the parked requests that touch this segment."""
        held = holding.space
        gone = [request for request in held.parked if any(p.segment == holding.index for p in request.pieces)]
        if gone:
            held.parked = [request for request in held.parked if request not in gone]
            for request in gone:
                self._say_stale(request, [holding.index])

    def withdraw(self, holding: Holding) -> None:
        """Refuse the answers too that wait for this segment's copies: whether those have it is not known here."""
        held = holding.space
        gone = [answer for answer in held.withheld if holding in answer.holdings]
        for answer in [answer for answer in gone if answer.message.kind == Kind.JOINED]:
            gone.remove(answer)  # it says what the others know
            answer.holdings.remove(holding)
            pairs = read_numbers(answer.payload)
            kept = [pair for pair in zip(pairs[::2], pairs[1::2], strict=True) if pair[0] != holding.index]
            answer.payload = numbers(value for pair in kept for value in pair)
        if gone:
            held.withheld = [answer for answer in held.withheld if answer not in gone]
            for answer in gone:
                self._say_stale(answer.request, [holding.index])

    def forget(self, held: Held, guest: Guest) -> None:
        """A guest is gone, or fenced: it hears nothing any more."""
        held.parked = [request for request in held.parked if request.guest is not guest]
        held.withheld = [answer for answer in held.withheld if answer.request.guest is not guest]

    def expire(self, held: Held, now: float) -> None:
        """Refuse what has waited too long, naming whom it waited for."""
        for request in [waiting for waiting in held.parked if waiting.deadline < now]:
            _remove(held.parked, request)
            behind = sorted({rank for p in request.pieces if p.segment in held.holdings
                             for rank in _segment(held.holdings[p.segment]).laggards()})  # fmt: skip
            names = ", ".join(f"rank {rank}" for rank in behind) or "nobody"
            self.fail(held, request, PeerTimeout(
                f"{request.guest.link.peer} waited too long on {self._name} for {names} (the knob is `timeout`)",
                peer=names, ranks=behind, server=self._name,
            ))  # fmt: skip
        for answer in [waiting for waiting in held.withheld if waiting.deadline < now]:
            _remove(held.withheld, answer)
            names = ", ".join(stuck_on(answer.needs))
            self.fail(held, answer.request, PeerTimeout(
                f"the copies on {names} have not acknowledged what {answer.request.guest.link.peer} pushed or read "
                "(the knob is `timeout`)", peer=names,
            ))  # fmt: skip


def _segment(holding: Holding) -> Segment:
    assert holding.segment is not None
    return holding.segment


def _remove(waiting: list[Any], item: object) -> None:
    if item in waiting:  # else it went with its guest, who was lost meanwhile
        waiting.remove(item)


def _over(held: Held, used: int, most: int) -> ConfigError:
    return ConfigError(
        f"space {held.space.name!r} has {used} bytes on this server and may have {most} on all of them: "
        "raise its `quota.bytes`, or let rows be evicted", field="quota.bytes", used=used, limit=most,
    )  # fmt: skip
