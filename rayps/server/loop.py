"""The loop that serves one shard to many workers, from one thread.

Pulls that the clock does not allow yet are parked. One that waits past its deadline is answered with an error
that names the ranks it waits for.
"""

from __future__ import annotations

import logging
import selectors
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from rayps import errors
from rayps.errors import LinkError, PeerTimeout, RaypsError
from rayps.link import Link, Listener, Message
from rayps.server.messages import Kind, as_bytes, refusal
from rayps.server.shard import Shard, ShardFacts, ShardPart

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Parked:
    link: Link
    rank: int
    message: Message
    patience: float  # seconds
    deadline: float


class ShardLoop:
    """Serves one shard to its workers, in one thread, until it is closed."""

    def __init__(self, shard: Shard, listener: Listener) -> None:
        self.shard = shard
        self._listener = listener
        self._lock = threading.Lock()  # the actor's other threads ask for facts and parts
        self._ranks: dict[Link, int] = {}
        self._patience: dict[Link, float] = {}  # seconds that a link's pulls may wait
        self._links: set[Link] = set()
        self._full: set[Link] = set()  # that take no more for now
        self._parked: list[_Parked] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"shard-{shard.index}", daemon=True)
        self._thread.start()

    def facts(self) -> ShardFacts:
        """What the shard is asked about while it runs."""
        with self._lock:
            return self.shard.facts()

    def part(self, rounds: int) -> ShardPart | None:
        """The shard's share of the checkpoint after `rounds`, if it is still kept."""
        with self._lock:
            return self.shard.parts.get(rounds)

    def close(self) -> None:
        """End the loop and its links; the listener stays open for the next generation."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            for key, events in self._selector.select(timeout=0.05):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._serve(key.fileobj, events)  # type: ignore[arg-type]
            self._expire()
        for link in self._links:
            link.close()
        self._selector.close()

    def _accept(self) -> None:
        while (link := self._listener.accept_ready()) is not None:
            self._links.add(link)
            self._selector.register(link, selectors.EVENT_READ)
            self._serve(link, selectors.EVENT_READ)  # its first request may have come along with the handshake

    def _serve(self, link: Link, events: int) -> None:
        with self._losing(link):
            if events & selectors.EVENT_READ:
                for message in link.feed():
                    self._handle(link, message)
            self._flush(link)

    @contextmanager
    def _losing(self, link: Link) -> Iterator[None]:
        """A link that fails is dropped, whoever was being served; the others are served on."""
        try:
            yield
        except LinkError as error:
            log.info("shard %d: lost %s: %s", self.shard.index, link.peer, error)
            if link in self._links:
                self._selector.unregister(link)
                self._links.discard(link)
                self._full.discard(link)
            self._ranks.pop(link, None)
            self._patience.pop(link, None)
            self._parked = [parked for parked in self._parked if parked.link is not link]
            link.close()

    def _flush(self, link: Link) -> None:
        if link not in self._links:
            return
        full = not link.flush()
        if full != (link in self._full):
            self._selector.modify(link, selectors.EVENT_READ | selectors.EVENT_WRITE if full else selectors.EVENT_READ)
            self._full ^= {link}

    def _handle(self, link: Link, message: Message) -> None:
        try:
            with self._lock:
                self._answer(link, message)
        except (ValueError, RaypsError) as error:
            self._refuse(link, message, error)
        except Exception as error:  # a fault of ours: whoever asked must hear of it, and the loop go on
            log.exception("shard-%d failed", self.shard.index)
            self._refuse(link, message, RaypsError(f"shard-{self.shard.index} failed: {type(error).__name__}: {error}"))
        self._wake()

    def _answer(self, link: Link, message: Message) -> None:
        shard, kind = self.shard, Kind(message.kind)
        if kind is Kind.JOIN:
            if message.a not in shard.clock.done:
                raise ValueError(f"rank {message.a} is not one of {shard.size} workers (0 to {shard.size - 1})")
            for other in [known for known, rank in self._ranks.items() if rank == message.a]:
                del self._ranks[other]  # fenced: what the rank's former holder still says has no effect
            self._ranks[link] = message.a
            self._patience[link] = message.weight
            if message.b >= 0:
                shard.clock.advance(message.a, message.b)
            self._reply(link, message, Kind.ACK, a=shard.clock.done[message.a])
        elif kind is Kind.READ:
            value = shard.read(message.a, message.b)
            self._reply(link, message, Kind.VALUE, a=shard.version, payload=value)
        elif kind is Kind.PUSH:
            self._push(link, message)
            self._reply(link, message, Kind.ACK, a=shard.version)
        elif kind is Kind.PUSH_PULL:
            self._push(link, message)
            self._pull(link, Message(Kind.PULL, tag=message.tag, b=shard.params.numel()))
        elif kind is Kind.PULL:
            self._pull(link, message)

    def _push(self, link: Link, message: Message) -> None:
        shard = self.shard
        value = torch.frombuffer(message.payload, dtype=shard.params.dtype) if message.payload else shard.params[:0]
        shard.push(self._rank(link), message.a, value, message.weight, message.b)

    def _pull(self, link: Link, message: Message) -> None:
        rank = self._rank(link)
        if self.shard.may_pull(rank):
            self._reply_pull(link, rank, message)
        else:
            patience = self._patience[link]
            self._parked.append(_Parked(link, rank, message, patience, time.monotonic() + patience))

    def _rank(self, link: Link) -> int:
        if link not in self._ranks:
            raise errors.StaleGeneration(
                f"{link.peer} does not hold its rank any more: another worker has joined with it", peer=link.peer
            )
        return self._ranks[link]

    def _reply_pull(self, link: Link, rank: int, message: Message) -> None:
        value, lead = self.shard.pull(rank, message.a, message.b)
        self._reply(link, message, Kind.VALUE, a=self.shard.version, b=lead, payload=value)

    def _reply(
        self, link: Link, to: Message, kind: Kind, a: int = 0, b: int = 0, payload: Tensor | None = None
    ) -> None:
        link.queue(Message(kind, tag=to.tag, a=a, b=b), None if payload is None else as_bytes(payload))

    def _refuse(self, link: Link, to: Message, error: Exception) -> None:
        link.queue(*refusal(to, error))
        self._flush(link)

    def _wake(self) -> None:
        """Serve the parked pulls that the clock now allows."""
        if not self._parked:
            return
        for parked in [p for p in self._parked if self.shard.may_pull(p.rank)]:
            self._parked.remove(parked)
            with self._losing(parked.link):
                with self._lock:
                    self._reply_pull(parked.link, parked.rank, parked.message)
                self._flush(parked.link)

    def _expire(self) -> None:
        now = time.monotonic()
        for parked in [p for p in self._parked if p.deadline < now]:
            self._parked.remove(parked)
            late = self.shard.clock.laggards()
            with self._losing(parked.link):
                self._refuse(
                    parked.link,
                    parked.message,
                    PeerTimeout(
                        f"worker-{parked.rank} waited {parked.patience:g} s for rank {', '.join(map(str, late))} "
                        f"to push step {self.shard.clock.slowest}: raise timeout if a step may take longer",
                        peer=f"worker-{late[0]}",
                        seconds=parked.patience,
                    ),
                )
