"""Connections of the service: limits on their number and their silence, and descriptors in reserve for token holders.

uvicorn parses HTTP and has neither a header nor a body time-out nor a limit on connections. Here are the decisions
(pure functions), uvicorn's protocol with the facts that they need, and a loop that accepts.

A connection is *known* once a request on it showed a valid token. A newcomer is unknown until its headers are there,
so a full house lets it in and closes another for it: the oldest unknown connection that keeps the service waiting and
has had `grace` seconds. Until there is one, newcomers stay in the kernel's queue. A token holder is known well within
the grace; peers that send nothing close each other's connections.
"""

from __future__ import annotations

import asyncio
import enum
import json
import logging
import resource
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

log = logging.getLogger(__name__)

STATE = "rayps_connection"  # the key of `Held` in a request's scope["state"]
_MOST = 1000
_WORK = 48  # descriptors for the store, job folders and Ray
_BATCH = 8  # connections that are accepted before anything else runs, and those that were closed are gone
_PAUSE = 0.5  # seconds without accepting where there is no descriptor and nothing can be closed
_SWEEP = 1.0  # seconds between two looks at the time-outs


class Phase(enum.Enum):
    """What a connection is in."""

    IDLE = "idle"  # between two requests
    HEADER = "header"  # nothing, or a part of a request's head, has come
    BODY = "body"  # a part of a request's body has come
    ANSWER = "answer"  # the service is at work
    WRITE = "write"  # the peer does not read what was written


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds and numbers of connections."""

    total: int  # connections in all
    strangers: int  # of those, unknown ones: the rest is the reserve of token holders
    per_address: int  # unknown ones of one address
    grace: float = 0.25  # that an unknown connection has before it may be closed for another
    header: float = 10.0  # from the first moment to a request's whole head
    body: float = 30.0  # without a byte of the body; in all so much, and a second for each `body_rate` bytes
    body_rate: float = 1000.0
    idle: float = 15.0  # between two requests
    write: float = 60.0  # without the peer reading a byte


def limits(most_descriptors: int, used: int) -> Limits:
    """The limits for a process that may hold so many descriptors, of which it uses some before it serves."""
    total = min(_MOST, max(8, (most_descriptors - used - _WORK) * 3 // 4))
    strangers = total * 3 // 4
    return Limits(total, strangers, strangers * 3 // 4)


def limits_here() -> Limits:
    """The limits for this process, by RLIMIT_NOFILE and the descriptors that it has now."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    folder = Path("/proc/self/fd" if Path("/proc/self/fd").is_dir() else "/dev/fd")
    return limits(1 << 20 if most == resource.RLIM_INFINITY else most, len(list(folder.iterdir())))


@dataclass(slots=True, eq=False)
class Held:
    """A connection as the decisions see it."""

    address: str
    since: float = 0.0  # when it was let in
    known: bool = False
    phase: Phase = Phase.HEADER
    waited: float = 0.0  # seconds in this phase of this request
    silent: float = 0.0  # seconds of it since a byte came or went
    received: int = 0  # bytes since this phase began


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer to a newcomer: let in (for `closed`), decide again after `wait` seconds, or refused."""

    accepted: bool
    closed: Held | None = None
    wait: float | None = None
    reason: str = ""


def admit(address: str, held: Sequence[Held], most: Limits, now: float) -> Admission:
    """Whether a newcomer is let in, beside connections in the order in which they came."""
    strangers = [each for each in held if not each.known]
    of_address = [each for each in strangers if each.address == address]
    if len(of_address) >= most.per_address:
        return _replace(of_address, f"{most.per_address} connections of one address have shown no token", most, now)
    if len(strangers) >= most.strangers:
        return _replace(strangers, f"{most.strangers} connections have shown no token", most, now)
    if len(held) >= most.total:
        return _replace(strangers, f"{most.total} connections are open", most, now)
    return Admission(True)


def _replace(among: Sequence[Held], reason: str, most: Limits, now: float) -> Admission:
    if not among:
        return Admission(False, reason=reason)
    waiting = [each for each in among if each.phase is not Phase.ANSWER]
    if not waiting:
        return Admission(False, wait=most.grace, reason=reason)
    left = waiting[0].since + most.grace - now
    return Admission(False, wait=left, reason=reason) if left > 0 else Admission(True, waiting[0], reason=reason)


def overdue(held: Held, most: Limits) -> str | None:
    """Why a connection is closed now; None: it stays."""
    if held.phase is Phase.HEADER and held.waited > most.header:
        return f"no whole request head within {most.header:g} s"
    if held.phase is Phase.BODY and held.silent > most.body:
        return f"no byte of the body for {most.body:g} s"
    if held.phase is Phase.BODY and held.waited > most.body + held.received / most.body_rate:
        return f"a body slower than {most.body_rate:g} bytes/s"
    if held.phase is Phase.IDLE and held.waited > most.idle:
        return f"no request for {most.idle:g} s"
    if held.phase is Phase.WRITE and held.silent > most.write:
        return f"the answer was not read for {most.write:g} s"
    return None


class Protocol(H11Protocol):
    """uvicorn's HTTP/1.1 with the facts for `overdue` and `admit`, and a way to be closed."""

    def __init__(
        self, held: Held, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any]
    ) -> None:
        self.held = held
        super().__init__(config, server_state, {**app_state, STATE: self.held})
        self._seen: object = None  # the request of the last look
        self._unwritten = 0
        self._dropped = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, unless it was closed before it could."""
        super().connection_made(transport)
        if self._dropped:
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Count, and parse."""
        self.held.silent = 0.0
        self.held.received += len(data)
        super().data_received(data)

    def resume_writing(self) -> None:
        """The peer has read."""
        self.held.silent = 0.0
        super().resume_writing()

    def look(self, elapsed: float) -> None:
        """Take in how the connection stands, `elapsed` seconds after the look before."""
        held, phase, unwritten = self.held, self._phase(), self.transport.get_write_buffer_size()
        if phase is not held.phase or self.cycle is not self._seen:
            held.phase, held.waited, held.silent = phase, 0.0, 0.0
            held.received, self._seen = 0, self.cycle
        else:
            held.waited += elapsed
            held.silent = 0.0 if 0 < unwritten < self._unwritten else held.silent + elapsed
        self._unwritten = unwritten

    def _phase(self) -> Phase:
        answering = self.cycle is not None and not self.cycle.response_complete
        if self.flow.write_paused:
            return Phase.WRITE
        if (
            self.conn.their_state is h11.SEND_BODY
            and not self.flow.read_paused
            and not (answering and self.cycle.waiting_for_100_continue)
        ):
            return Phase.BODY
        if answering:
            return Phase.ANSWER
        return Phase.HEADER if self.cycle is None or self.conn.trailing_data[0] else Phase.IDLE

    def drop(self, reason: str) -> None:
        """Close, with a 408 where a request has begun and has no answer yet."""
        self._dropped = True
        if self.transport is None or self.transport.is_closing():
            return
        begun = self.cycle is not None and not self.cycle.response_complete
        silent = not begun and not self.conn.trailing_data[0]
        if not silent and not (begun and self.cycle.response_started):
            self._say(408, reason)
        if begun:
            self.cycle.disconnected = True  # what the app says from now on goes nowhere
            self.cycle.message_event.set()
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # a peer that does not read would keep the descriptor

    def _say(self, status: int, detail: str) -> None:
        body = json.dumps(
            {
                "type": "about:blank",
                "title": "Request Timeout",
                "status": status,
                "detail": detail,
                "code": "timeout",
                "errors": [],
            }
        ).encode()
        head = [
            (b"content-type", b"application/problem+json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        try:
            events = (h11.Response(status_code=status, headers=head), h11.Data(data=body), h11.EndOfMessage())
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        except h11.LocalProtocolError:
            log.debug("a connection was closed in a state without an answer")


class Connections:
    """The connections of one server: lets in, looks at time-outs, closes."""

    def __init__(self, most: Limits) -> None:
        self.most = most
        self._protocols: dict[Held, Protocol] = {}  # in the order in which they came
        self._looked = 0.0

    def newcomer(self, address: str, now: float) -> Admission:
        """Decide about a newcomer, and close what is to be closed for it."""
        self._forget()
        found = admit(address, list(self._protocols), self.most, now)
        if found.reason:  # phases are as old as the last sweep: look, and decide again
            self._look(0.0)
            found = admit(address, list(self._protocols), self.most, now)
        if found.closed is not None:
            self._close(found.closed, found.reason)
        elif found.reason and found.wait is None:
            log.warning("a connection was refused: %s", found.reason)
        return found

    def add(self, protocol: Protocol) -> None:
        """Hold a connection that was let in."""
        self._protocols[protocol.held] = protocol

    def remove(self, protocol: Protocol) -> None:
        """Forget one that could not begin."""
        self._protocols.pop(protocol.held, None)

    def make_room(self, error: OSError, now: float) -> bool:
        """Close the oldest unknown connection that waits, because accepting failed; whether there was one."""
        log.warning("a connection cannot be accepted: %s", error.strerror)
        self._forget()
        self._look(0.0)
        strangers = [held for held in self._protocols if not held.known]
        found = _replace(strangers, "the service has no descriptor left", self.most, now)
        if found.closed is not None:
            self._close(found.closed, found.reason)
        return found.closed is not None

    def sweep(self, now: float) -> None:
        """Close what is overdue. A pause of the service itself is nobody's silence."""
        elapsed = min(now - self._looked, 2 * _SWEEP) if self._looked else 0.0
        self._looked = now
        self._forget()
        self._look(elapsed)
        for held in list(self._protocols):
            reason = overdue(held, self.most)
            if reason is not None:
                self._close(held, reason)

    def _look(self, elapsed: float) -> None:
        for protocol in self._protocols.values():
            if protocol.transport is not None:
                protocol.look(elapsed)

    def _close(self, held: Held, reason: str) -> None:
        log.info("a connection was closed: %s", reason)
        self._protocols.pop(held).drop(reason)

    def _forget(self) -> None:
        for held, protocol in list(self._protocols.items()):
            if protocol.transport is not None and protocol.transport.is_closing():
                del self._protocols[held]


class Acceptor:
    """Accepts on one listening socket. Without descriptors it makes room or pauses, and never spins."""

    def __init__(self, door: socket.socket, server: Server) -> None:
        self._door, self._server = door, server
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._again: asyncio.TimerHandle | None = None
        self._first: tuple[socket.socket, str] | None = None  # accepted, and not let in yet
        door.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Accept no more."""
        self._loop.remove_reader(self._door.fileno())
        if self._again is not None:
            self._again.cancel()
        if self._first is not None:
            self._first[0].close()

    def _listen(self) -> None:
        self._again = None
        self._loop.add_reader(self._door.fileno(), self._ready)
        if self._first is not None:
            self._ready()

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._door.fileno())
        self._again = self._loop.call_later(seconds, self._listen)

    def _ready(self) -> None:
        for _ in range(_BATCH):
            try:
                peer, address = self._first or self._accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if not self._server.held.make_room(error, self._loop.time()):
                    self._pause(_PAUSE)
                return  # a connection that was closed gives its descriptor back after this callback
            self._first = None
            found = self._server.held.newcomer(address, self._loop.time())
            if found.accepted:
                self._begin(peer, address)
            elif found.wait is None:
                peer.close()
            else:
                self._first = peer, address
                self._pause(found.wait)
                return

    def _accept(self) -> tuple[socket.socket, str]:
        peer, address = self._door.accept()
        return peer, str(address[0])

    def _begin(self, peer: socket.socket, address: str) -> None:
        protocol = self._server.protocol(Held(address, self._loop.time()))
        self._server.held.add(protocol)
        task = self._loop.create_task(self._serve(protocol, peer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, protocol: Protocol, peer: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, peer)
        except OSError as error:
            log.warning("a connection was lost at its start: %s", error)
            self._server.held.remove(protocol)
            peer.close()


class Server(uvicorn.Server):
    """uvicorn with `Connections`: it serves on given sockets only."""

    def __init__(self, config: uvicorn.Config, most: Limits | None = None) -> None:
        super().__init__(config)
        self.held = Connections(most or limits_here())
        config.timeout_keep_alive = int(self.held.most.idle) + 5  # after the look at time-outs, which says why
        self._acceptors: list[Acceptor] = []

    def protocol(self, held: Held) -> Protocol:
        """The protocol of a new connection."""
        return Protocol(held, self.config, self.server_state, self.lifespan.state)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the app, then accept."""
        if not sockets:
            raise ValueError("give listening sockets: uvicorn's own are without limits")
        await super().startup([])
        if self.started:
            self._acceptors = [Acceptor(door, self) for door in sockets]

    async def on_tick(self, counter: int) -> bool:
        """Look at the time-outs once a second."""
        if counter % 10 == 0:
            self.held.sweep(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, and end as uvicorn does."""
        for acceptor in self._acceptors:
            acceptor.close()
        await super().shutdown(sockets)
