"""The loop that serves one shard to many workers, from one thread.

Requests come as messages and in boxes (`rayps.server.resident`), and are answered the way they came. Pulls that the
clock does not allow yet are parked. One that waits past its deadline is answered with an error that names the ranks
it waits for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rayps import errors
from rayps.errors import LinkError, PeerTimeout, RaypsError
from rayps.link import Link, Listener, Message
from rayps.link.shared import SharedLink
from rayps.server.coded import value_of
from rayps.server.messages import CODED, Kind, refusal
from rayps.server.resident import ASKED, ASLEEP, BELL, BY_MESSAGE, SLICE, Box, Fence, flat_bytes, offered
from rayps.server.shard import Shard, ShardFacts, ShardPart

log = logging.getLogger(__name__)

NAP_MS = 50  # how long the loop may sleep before it looks at its deadlines again


class Guest:
    """A worker's connection, as the shard sees it."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.descriptor = link.fileno()
        self.rank = -1  # none yet, or fenced
        self.patience = 0.0  # seconds that its pulls may wait
        self.box: Box | None = None
        self.full = False  # takes no more for now


@dataclass(slots=True)
class Request:
    """What a guest asks for; the fields are those of `Kind`."""

    guest: Guest
    kind: int
    tag: int
    a: int
    b: int
    weight: float
    payload: memoryview | bytearray | None  # None: the request is in the box, and its payload in the worker's gradient
    count: int = 0  # elements of such a payload
    deadline: float = 0.0

    def value(self, like: Tensor) -> Tensor:
        """The payload, as elements of the shard's kind. Raises ValueError."""
        if self.payload is None:
            assert self.guest.box is not None
            return self.guest.box.value(self.b, self.count)
        if self.kind in CODED.values():
            return value_of(self.payload, like.dtype)
        return torch.frombuffer(self.payload, dtype=like.dtype) if self.payload else like[:0]


class ShardLoop:
    """Serves one shard to its workers, in one thread, until it is closed."""

    def __init__(self, shard: Shard, listener: Listener) -> None:
        self.shard = shard
        self._listener = listener
        self._lock = threading.Lock()  # the actor's other threads ask for facts and parts
        self._guests: dict[int, Guest] = {}  # by descriptor
        self._boxes: list[Guest] = []  # those that have one
        self._answered: list[Box] = []  # their workers may sleep
        self._parked: list[Request] = []
        self._fence = Fence()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if shard.slice.memory is not None else -1
        self._poll = select.poll()
        self._poll.register(listener.fileno(), select.POLLIN)
        if self._bell >= 0:
            self._poll.register(self._bell, select.POLLIN)
        self._answers: dict[int, Callable[[Request], None]] = {
            Kind.JOIN: self._join, Kind.PUSH: self._push, Kind.PULL: self._pull,
            Kind.PUSH_PULL: self._push_pull, Kind.READ: self._read,
            Kind.PUSH_CODED: self._push, Kind.PUSH_PULL_CODED: self._push_pull,
        }  # fmt: skip
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
            if self._parked:
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
            guest = Guest(link)
            self._guests[guest.descriptor] = guest
            self._poll.register(guest.descriptor, select.POLLIN)
            self._serve(guest, select.POLLIN)  # its first request may have come along with the handshake

    def _serve(self, guest: Guest, events: int) -> None:
        try:
            if events & ~select.POLLOUT:
                for m in guest.link.feed():
                    self._handle(Request(guest, m.kind, m.tag, m.a, m.b, m.weight, m.payload))
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
                try:
                    self._handle(Request(guest, kind, box.seen, a, b, weight, None, count))
                except LinkError as error:
                    self._lose(guest, error)
        self._ring()
        return served

    def _ring(self) -> None:
        """Wake whom was answered: after all of them, for the one that wakes may take this processor at once."""
        answered, self._answered = self._answered, []
        for box in answered:
            box.wake()

    def _lose(self, guest: Guest, error: LinkError) -> None:
        """A link that fails is dropped, whoever was being served; the others are served on."""
        log.info("shard %d: lost %s: %s", self.shard.index, guest.link.peer, error)
        self._forget(guest)

    def _forget(self, guest: Guest) -> None:
        if self._guests.pop(guest.descriptor, None) is None:
            return
        self._poll.unregister(guest.descriptor)
        self._fence_off(guest)
        self._boxes = [other for other in self._boxes if other is not guest]
        if guest.box is not None:
            guest.box.close()
            guest.box = None
        guest.link.close()

    def _fence_off(self, guest: Guest) -> None:
        """What this guest still says has no effect; what it said and still counts is no longer in its hands."""
        if guest.rank < 0:
            return
        self.shard.own(guest.rank)
        guest.rank = -1
        waiting = [request for request in self._parked if request.guest is guest]
        self._parked = [request for request in self._parked if request.guest is not guest]
        if guest.descriptor in self._guests:
            for request in waiting:
                self._refuse_or_lose(request, _fenced(guest))

    def _refuse_or_lose(self, request: Request, error: Exception) -> None:
        try:
            self._refuse(request, error)
        except LinkError as lost:
            self._lose(request.guest, lost)

    def _flush(self, guest: Guest) -> None:
        if guest.descriptor not in self._guests:
            return
        full = not guest.link.flush()
        if full != guest.full:
            self._poll.modify(guest.descriptor, select.POLLIN | select.POLLOUT if full else select.POLLIN)
            guest.full = full

    # ---- what is asked

    def _handle(self, request: Request) -> None:
        try:
            answer = self._answers.get(request.kind)
            if answer is None:
                raise ValueError(f"there is no request of kind {request.kind}")
            with self._lock:
                answer(request)
        except (ValueError, RaypsError) as error:
            self._refuse(request, error)
        except Exception as error:  # a fault of ours: whoever asked must hear of it, and the loop go on
            name = f"shard-{self.shard.index}"
            log.exception("%s failed", name)
            self._refuse(request, RaypsError(f"{name} failed: {type(error).__name__}: {error}"))
        if self._parked:
            self._wake()

    def _join(self, request: Request) -> None:
        shard, guest, rank = self.shard, request.guest, request.a
        if rank not in shard.clock.done:
            raise ValueError(f"rank {rank} is not one of {shard.size} workers (0 to {shard.size - 1})")
        for other in [known for known in self._guests.values() if known.rank == rank]:
            self._fence_off(other)
        guest.rank, guest.patience = rank, request.weight
        if request.b >= 0:
            shard.clock.advance(rank, request.b)
        self._share(guest)
        self._reply(request, Kind.ACK, a=shard.clock.done[rank])

    def _share(self, guest: Guest) -> None:
        """Take the memory that a worker of this host has offered, and offer the shard's."""
        link, memory = guest.link, self.shard.slice.memory
        if memory is not None and isinstance(link, SharedLink) and offered(link):
            if guest.box is not None:
                raise ValueError(f"{link.peer} has joined by this link already")
            guest.box = Box(link, self.shard.params, self.shard.lo)
            self._boxes.append(guest)
            link.offer(SLICE, memory, read_only=True)
            link.offer_descriptor(BELL, self._bell)

    def _read(self, request: Request) -> None:
        value = None if request.payload is None else self.shard.read(request.a, request.b)
        self._reply(request, Kind.VALUE, a=self.shard.version, payload=value)

    def _push(self, request: Request) -> None:
        self._take(request)
        if request.payload is None:
            self.shard.own(request.guest.rank)  # once it is acknowledged, the worker may write its next one there
        self._reply(request, Kind.ACK, a=self.shard.version)

    def _push_pull(self, request: Request) -> None:
        self._take(request)
        request.a, request.b = 0, self.shard.params.numel()
        self._pull(request)

    def _take(self, request: Request) -> None:
        shard, lent = self.shard, request.payload is None
        shard.push(self._rank(request.guest), request.a, request.value(shard.params), request.weight, request.b, lent)

    def _pull(self, request: Request) -> None:
        rank = self._rank(request.guest)
        if self.shard.may_pull(rank):
            self._reply_pull(request)
        else:
            request.deadline = time.monotonic() + request.guest.patience
            self._parked.append(request)

    def _rank(self, guest: Guest) -> int:
        if guest.rank < 0:
            raise _fenced(guest)
        return guest.rank

    def _reply_pull(self, request: Request) -> None:
        lead = self.shard.pulled(request.guest.rank)
        value = None if request.payload is None else self.shard.read(request.a, request.b)
        self._reply(request, Kind.VALUE, a=self.shard.version, b=lead, payload=value)

    def _reply(self, to: Request, kind: Kind, a: int = 0, b: int = 0, payload: Tensor | None = None) -> None:
        if to.payload is None and to.guest.box is not None:
            to.guest.box.answer(to.tag, b, a)
            self._answered.append(to.guest.box)
        else:
            body = None if payload is None else flat_bytes(payload)
            to.guest.link.queue(Message(kind, tag=to.tag, a=a, b=b), body)

    def _refuse(self, request: Request, error: Exception) -> None:
        guest = request.guest
        guest.link.queue(*refusal(request.tag, error))
        self._flush(guest)
        if request.payload is None and guest.box is not None:
            if guest.rank >= 0:
                self.shard.own(guest.rank)
            guest.box.answer(request.tag, 0, 0, BY_MESSAGE)
            self._answered.append(guest.box)

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
            late = self.shard.clock.laggards()
            error = PeerTimeout(
                f"worker-{request.guest.rank} waited {request.guest.patience:g} s for rank "
                f"{', '.join(map(str, late))} to push step {self.shard.clock.slowest}: "
                "raise timeout if a step may take longer",
                peer=f"worker-{late[0]}",
                seconds=request.guest.patience,
            )
            self._refuse_or_lose(request, error)


def _fenced(guest: Guest) -> errors.StaleGeneration:
    return errors.StaleGeneration(
        f"{guest.link.peer} does not hold its rank any more: another worker has joined with it", peer=guest.link.peer
    )
