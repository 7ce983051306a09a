"""The loop that serves one shard to many workers, from one thread.

Requests come as messages and in boxes (`rayps.ps.protocol.shared_memory`), and are answered the way they came. Pulls
that the clock does not allow yet are parked, and so are pushes while a reader holds the shard
(`rayps.ps.protocol.consistent_cut`). What waits
past its deadline is answered with an error that names the ranks it waits for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable

from torch import Tensor

from rayps.comm.link import Listener, Message
from rayps.comm.link.memory import Fence
from rayps.core.errors import LinkError, RaypsError
from rayps.core.failpoint import passing
from rayps.ps.fixed.connection import ShardPeer, ShardRequest, fenced
from rayps.ps.fixed.consistent_readers import ShardReaders, too_late
from rayps.ps.fixed.messages import ShardMessage, refusal
from rayps.ps.fixed.shard import Shard, ShardFacts, ShardPart
from rayps.ps.protocol.rows import KEPT_LISTS, ShardRows, rows_here
from rayps.ps.protocol.shared_memory import ASKED, ASLEEP, BY_MESSAGE, RequestMailbox
from rayps.tensors.packing import flat_bytes

log = logging.getLogger(__name__)

NAP_MS = 50  # how long the loop may sleep before it looks at its deadlines again


class ShardLoop:
    """Serves one shard to its workers, in one thread, until it is closed."""

    def __init__(self, shard: Shard, listener: Listener) -> None:
        self.shard = shard
        self._listener = listener
        self._lock = threading.RLock()  # the actor's other threads ask for facts and parts
        self._guests: dict[int, ShardPeer] = {}  # by descriptor
        self._boxes: list[ShardPeer] = []  # those that have one
        self._parked: list[ShardRequest] = []  # pulls that wait for the clock
        self._readers = ShardReaders(shard, self._reply_or_lose, self._refuse_or_lose, self._redo)
        self._answered: list[RequestMailbox] = []  # their workers may sleep
        self._fence = Fence()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if shard.slice.memory is not None else -1
        self._poll = select.poll()
        self._poll.register(listener.fileno(), select.POLLIN)
        if self._bell >= 0:
            self._poll.register(self._bell, select.POLLIN)
        self._answers: dict[int, Callable[[ShardRequest], None]] = {
            ShardMessage.JOIN: self._join,
            ShardMessage.PUSH: self._push,
            ShardMessage.PULL: self._pull,
            ShardMessage.PUSH_PULL: self._push_pull,
            ShardMessage.PUSH_PULL_CODED: self._push_pull,
            ShardMessage.PUSH_CODED: self._push,
            ShardMessage.READ: self._read,
            ShardMessage.IDS: self._ids,
            ShardMessage.PUSH_ROWS: self._push,
            ShardMessage.PULL_ROWS: self._pull,
            ShardMessage.HOLD: self._hold,
            ShardMessage.AIM: self._readers.aim,
            ShardMessage.RELEASE: self._readers.release,
            ShardMessage.REACHED: self._reached,
        }
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"shard-{shard.index}", daemon=True)
        self._thread.start()

    def facts(self, wanted: int = 0) -> ShardFacts:
        """What the shard is asked about while it runs; `wanted` is the round whose share it is to keep."""
        with self._lock:
            self.shard.parts.wanted = wanted
            return self.shard.facts()

    def part(self, rounds: int) -> ShardPart | None:
        """The shard's share of the checkpoint after `rounds`, if it is still kept."""
        with self._lock:
            return self.shard.parts.get(rounds)

    def saved(self, rounds: int) -> None:
        """Note that the snapshot after `rounds` is kept elsewhere."""
        with self._lock:
            self.shard.saved(rounds)

    def close(self) -> None:
        """End the loop and its links; the listener stays open for the next generation."""
        self._closing.set()
        self._thread.join()

    # ---- who speaks

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._serve_boxes():
                self._look(0)
            else:
                self._sleep()
            if self._readers.busy:
                with self._lock:
                    self._readers.expire()
            if self._parked:
                self._wake()
                self._expire()
            self._ring()
        for guest in list(self._guests.values()):
            self._forget(guest)
        if self._bell >= 0:
            os.close(self._bell)

    def _sleep(self) -> None:
        """Wait for a bell or a message; says so first, and then looks into the boxes once more."""
        words = self.shard.slice.words
        words[ASLEEP] = 1
        self._fence()
        asked = any(guest.box.words[ASKED] != guest.box.seen for guest in self._boxes if guest.box is not None)
        self._look(0 if asked else NAP_MS)
        words[ASLEEP] = 0

    def _look(self, milliseconds: int) -> None:
        for descriptor, events in self._poll.poll(milliseconds):
            if descriptor == self._bell:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
            elif descriptor in self._guests:
                self._serve(self._guests[descriptor], events)
            else:
                self._accept()

    def _accept(self) -> None:
        while (link := self._listener.accept_ready()) is not None:
            guest = ShardPeer(link)
            self._guests[guest.descriptor] = guest
            self._poll.register(guest.descriptor, select.POLLIN)
            self._serve(guest, select.POLLIN)  # its first request may have come along with the handshake

    def _serve(self, guest: ShardPeer, events: int) -> None:
        try:
            if events & ~select.POLLOUT:
                for m in guest.link.feed():
                    self._handle(ShardRequest(guest, m.kind, m.tag, m.a, m.b, m.weight, m.payload))
            self._flush(guest)
        except LinkError as error:
            self._lose(guest, error)

    def _serve_boxes(self) -> bool:
        """Answer what lies in the boxes; whether there was anything."""
        served = False
        for guest in self._boxes:
            box = guest.box
            if box is not None and box.words[ASKED] != box.seen:
                served = True
                kind, a, b, count, weight = box.take()
                request = ShardRequest(guest, kind, box.seen, a, b, weight, None, count)
                try:
                    with self._lock:
                        if kind == ShardMessage.PUSH_PULL and count == box.elements and not self._readers.busy:
                            self._turn(request, box)
                        else:
                            self._try(request)
                except LinkError as error:
                    self._lose(guest, error)
        self._ring()
        return served

    def _turn(self, request: ShardRequest, box: RequestMailbox) -> None:
        """As `_push_pull`, of a whole slice in a box while nobody holds the shard: the commonest turn, in few calls."""
        shard, rank = self.shard, request.guest.rank
        try:
            if rank < 0:
                raise fenced(request.guest)
            shard.push(rank, request.a, box.gradient, request.weight, 0, True)
        except Exception as error:
            self._fail(request, error)
            return
        passing("shard: applied, not acknowledged")
        if shard.may_pull(rank):
            box.answer(request.tag, shard.pulled(rank), shard.version, shard.durable[rank])
            self._answered.append(box)
        else:
            request.kind, request.a, request.b = ShardMessage.PULL, 0, box.elements
            self._pull(request)
        passing("shard: acknowledged, not saved")

    def _ring(self) -> None:
        """Wake whom was answered: after all of them, for the one that wakes may take this processor at once."""
        answered, self._answered = self._answered, []
        for box in answered:
            box.wake()

    def _lose(self, guest: ShardPeer, error: LinkError) -> None:
        """A link that fails is dropped, whoever was being served; the others are served on."""
        # as text: a log that keeps its records would keep the error, its frames, and this shard with them
        log.info("shard %d: lost %s: %s", self.shard.index, guest.link.peer, str(error))
        self._forget(guest)

    def _forget(self, guest: ShardPeer) -> None:
        if self._guests.pop(guest.descriptor, None) is None:
            return
        self._poll.unregister(guest.descriptor)
        with self._lock:
            self._fence_off(guest)
            self._readers.forget(guest)
        self._boxes = [other for other in self._boxes if other is not guest]
        if guest.box is not None:
            guest.box.close()
            guest.box = None
        guest.link.close()

    def _fence_off(self, guest: ShardPeer) -> None:
        """What this guest still says has no effect; what it said and still counts is no longer in its hands."""
        if guest.rank < 0:
            return
        self.shard.own(guest.rank)
        guest.rank = -1
        waiting = [request for request in self._parked if request.guest is guest]
        self._parked = [request for request in self._parked if request.guest is not guest]
        if guest.descriptor in self._guests:
            for request in waiting:
                self._refuse_or_lose(request, fenced(guest))

    def _refuse_or_lose(self, request: ShardRequest, error: Exception) -> None:
        try:
            self._refuse(request, error)
        except LinkError as lost:
            self._lose(request.guest, lost)

    def _flush(self, guest: ShardPeer) -> None:
        if guest.descriptor not in self._guests:
            return
        full = not guest.link.flush()
        if full != guest.full:
            self._poll.modify(guest.descriptor, select.POLLIN | select.POLLOUT if full else select.POLLIN)
            guest.full = full

    # ---- what is asked

    def _handle(self, request: ShardRequest) -> None:
        with self._lock:
            self._try(request)
        if self._parked:
            self._wake()

    def _try(self, request: ShardRequest) -> None:
        try:
            answer = self._answers.get(request.kind)
            if answer is None:
                raise ValueError(f"there is no request of kind {request.kind}")
            answer(request)
        except Exception as error:
            self._fail(request, error)

    def _fail(self, request: ShardRequest, error: Exception) -> None:
        """Tell whoever asked what went wrong; a fault of ours too, and the loop goes on."""
        if not isinstance(error, (ValueError, RaypsError)):
            name = f"shard-{self.shard.index}"
            log.error("%s failed", name, exc_info=error)
            error = RaypsError(f"{name} failed: {type(error).__name__}: {error}")
        self._refuse(request, error)

    def _join(self, request: ShardRequest) -> None:
        shard, guest, rank = self.shard, request.guest, request.a
        if rank not in shard.clock.done:
            raise ValueError(f"rank {rank} is not one of {shard.size} workers (0 to {shard.size - 1})")
        for other in [known for known in self._guests.values() if known.rank == rank]:
            self._fence_off(other)
        guest.rank, guest.patience = rank, request.weight
        if request.b >= 0:
            shard.skip(rank, request.b)
        if guest.share(shard.slice, shard.lo, self._bell):
            self._boxes.append(guest)
        self._reply(request, ShardMessage.ACK, a=shard.clock.done[rank])

    def _read(self, request: ShardRequest) -> None:
        value = None if request.payload is None else self.shard.read(request.a, request.b)
        self._reply(request, ShardMessage.VALUE, a=self.shard.version, payload=value)

    def _push(self, request: ShardRequest) -> None:
        if self._take(request):
            if request.payload is None:
                self.shard.own(request.guest.rank)  # once it is acknowledged, the worker may write its next one there
            self._reply(request, ShardMessage.ACK, a=self.shard.version)
            passing("shard: acknowledged, not saved")

    def _push_pull(self, request: ShardRequest) -> None:
        if self._take(request):
            request.kind, request.a, request.b = ShardMessage.PULL, 0, self.shard.params.numel()
            self._pull(request)
            passing("shard: acknowledged, not saved")

    def _take(self, request: ShardRequest) -> bool:
        """Apply a push; False when it must wait for a reader."""
        shard, rank, lent = self.shard, self._rank(request.guest), request.payload is None
        if not self._readers.admit(request):
            return False
        if request.kind == ShardMessage.PUSH_ROWS:
            rows = self._named(request, request.b)
            shard.push(rank, request.a, request.value(shard.params), request.weight, 0, lent, rows)
        else:
            value = request.value(shard.params, request.b)
            shard.push(rank, request.a, value, request.weight, request.b, lent)
        passing("shard: applied, not acknowledged")
        self._readers.look()
        return True

    def _reached(self, request: ShardRequest) -> None:
        self._reply(request, ShardMessage.ACK, a=self.shard.clock.done.get(request.a, 0))

    def _hold(self, request: ShardRequest) -> None:
        self._rank(request.guest)
        self._readers.hold(request)

    def _ids(self, request: ShardRequest) -> None:
        shard = self.shard
        if not 0 <= request.a < KEPT_LISTS:
            raise ValueError(f"ids come under a number below {KEPT_LISTS}, not {request.a}")
        request.guest.ids[request.a] = rows_here(shard.layout, shard.lo, shard.hi, request.b, request.numbers())
        self._reply(request, ShardMessage.ACK)

    def _named(self, request: ShardRequest, number: int) -> ShardRows:
        if number not in request.guest.ids:
            raise ValueError(f"{request.guest.link.peer} has named no ids {number}")
        return request.guest.ids[number]

    def _pull(self, request: ShardRequest) -> None:
        rank = self._rank(request.guest)
        if self.shard.may_pull(rank):
            self._reply_pull(request)
        else:
            request.deadline = time.monotonic() + request.guest.patience
            self._parked.append(request)

    def _rank(self, guest: ShardPeer) -> int:
        if guest.rank < 0:
            raise fenced(guest)
        return guest.rank

    def _reply_pull(self, request: ShardRequest) -> None:
        lead = self.shard.pulled(request.guest.rank)
        value = None
        if request.kind == ShardMessage.PULL_ROWS:
            value = self._named(request, request.a).of(self.shard.params)
        elif request.payload is not None:
            value = self.shard.read(request.a, request.b)
        self._reply(request, ShardMessage.VALUE, a=self.shard.version, b=lead, payload=value)

    def _reply(
        self, to: ShardRequest, kind: ShardMessage, a: int = 0, b: int = 0, payload: Tensor | None = None
    ) -> None:
        guest, durable = to.guest, self.shard.durable.get(to.guest.rank, 0)
        if to.payload is None and guest.box is not None:
            guest.box.answer(to.tag, b, a, durable)
            self._answered.append(guest.box)
        else:
            body = None if payload is None else flat_bytes(payload)
            guest.link.queue(Message(kind, to.tag, a, b, durable), body)

    def _reply_or_lose(self, to: ShardRequest, kind: ShardMessage, payload: Tensor | None = None) -> None:
        """As `_reply`, to another guest than the one whose request is being served."""
        try:
            self._reply(to, kind, a=self.shard.version, payload=payload)
            self._flush(to.guest)
        except LinkError as error:
            self._lose(to.guest, error)

    def _refuse(self, request: ShardRequest, error: Exception) -> None:
        guest = request.guest
        guest.link.queue(*refusal(request.tag, error))
        self._flush(guest)
        if request.payload is None and guest.box is not None:
            if guest.rank >= 0:
                self.shard.own(guest.rank)
            guest.box.answer(request.tag, 0, 0, 0, BY_MESSAGE)
            self._answered.append(guest.box)

    def _redo(self, request: ShardRequest) -> None:
        """Serve what a guest asked for before, while another is being served."""
        try:
            self._try(request)
            self._flush(request.guest)
        except LinkError as error:
            self._lose(request.guest, error)

    # ---- who waits

    def _wake(self) -> None:
        """Serve the parked pulls that the clock now allows."""
        for request in [waiting for waiting in self._parked if self.shard.may_pull(waiting.guest.rank)]:
            self._parked.remove(request)
            try:
                with self._lock:
                    self._reply_pull(request)
                self._flush(request.guest)
            except LinkError as error:
                self._lose(request.guest, error)

    def _expire(self) -> None:
        now = time.monotonic()
        for request in [waiting for waiting in self._parked if waiting.deadline < now]:
            self._parked.remove(request)
            self._refuse_or_lose(request, too_late(self.shard, request))
