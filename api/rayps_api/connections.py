"""Limit the number of the service's connections and their silent time, and reserve descriptors for token holders.

Guarantee: peers without a token cannot keep a token holder out. A connection is *known* after a request on it has had a
valid token. When a limit is reached, the service closes an unknown connection and accepts the new one. It closes the
oldest unknown connection on which the service waits for the peer, if this connection is older than `grace` seconds.
Otherwise new connections wait in the kernel's queue. A token holder's connection is known long before `grace` seconds
have passed.

uvicorn parses HTTP, but has no header or body time-out and no limit on connections. This module has the decisions (pure
functions), a protocol for uvicorn that collects the facts for these decisions, and a loop that accepts connections.
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

STATE = "rayps_connection"  # the key of the connection's `ConnectionFacts` in a request's scope["state"]
_MOST = 1000
_WORK = 48  # descriptors reserved for the store, job folders and Ray
_BATCH = 8  # connections accepted in one callback; between callbacks, closed connections free their descriptors
_PAUSE = 0.5  # seconds without accepting when there is no free descriptor and no connection can be closed
_SWEEP = 1.0  # seconds between two checks of the time-outs


class Phase(enum.Enum):
    """The phase of a connection: what the service waits for, or does."""

    IDLE = "idle"  # between two requests
    HEADER = "header"  # a request's head is incomplete
    BODY = "body"  # a request's body is incomplete
    ANSWER = "answer"  # the service works on the answer
    WRITE = "write"  # the peer does not read the answer


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a service's connections."""

    total: int  # connections in all
    unknown: int  # unknown connections; the rest is reserved for token holders
    per_address: int  # unknown connections of one address
    grace: float = 0.25  # age in seconds after which an unknown connection may be closed to accept a new one
    header: float = 10.0  # seconds until the request's head is complete
    body: float = 30.0  # seconds without a byte of the body; the whole body may take `body` + its bytes / `body_rate`
    body_rate: float = 1000.0  # bytes per second
    idle: float = 15.0  # seconds between two requests
    write: float = 60.0  # seconds in which the peer reads no byte of the answer


def limits(most_descriptors: int, used: int) -> Limits:
    """Return the limits for a process that may open `most_descriptors` and has `used` of them open already. Pure."""
    total = min(_MOST, max(8, (most_descriptors - used - _WORK) * 3 // 4))
    unknown = total * 3 // 4
    return Limits(total, unknown, unknown * 3 // 4)


def limits_here() -> Limits:
    """Return the limits for this process, from RLIMIT_NOFILE and its open descriptors."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    folder = Path("/proc/self/fd" if Path("/proc/self/fd").is_dir() else "/dev/fd")
    return limits(1 << 20 if most == resource.RLIM_INFINITY else most, len(list(folder.iterdir())))


@dataclass(slots=True, eq=False)
class ConnectionFacts:
    """The facts about an open connection that the decisions need."""

    address: str
    since: float = 0.0  # when the connection was accepted, in seconds of the event loop's clock
    known: bool = False  # whether a request on it has had a valid token
    phase: Phase = Phase.HEADER
    waited: float = 0.0  # seconds in this phase
    silent: float = 0.0  # seconds in this phase without a byte read or written
    received: int = 0  # bytes in this phase


@dataclass(frozen=True, slots=True)
class Admission:
    """The decision on a new connection: accept (and close `closed`), decide again after `wait` seconds, or refuse."""

    accepted: bool
    closed: ConnectionFacts | None = None
    wait: float | None = None
    reason: str = ""


def admit(address: str, facts: Sequence[ConnectionFacts], bounds: Limits, now: float) -> Admission:
    """Decide on a new connection from `address`. `facts`: the facts of the open connections, oldest first. Pure."""
    unknown = [each for each in facts if not each.known]
    of_address = [each for each in unknown if each.address == address]
    if len(of_address) >= bounds.per_address:
        return _replace(of_address, f"{bounds.per_address} connections of one address have shown no token", bounds, now)
    if len(unknown) >= bounds.unknown:
        return _replace(unknown, f"{bounds.unknown} connections have shown no token", bounds, now)
    if len(facts) >= bounds.total:
        return _replace(unknown, f"{bounds.total} connections are open", bounds, now)
    return Admission(True)


def _replace(among: Sequence[ConnectionFacts], reason: str, bounds: Limits, now: float) -> Admission:
    if not among:
        return Admission(False, reason=reason)
    waiting = [each for each in among if each.phase is not Phase.ANSWER]
    if not waiting:
        return Admission(False, wait=bounds.grace, reason=reason)
    left = waiting[0].since + bounds.grace - now
    return Admission(False, wait=left, reason=reason) if left > 0 else Admission(True, waiting[0], reason=reason)


def overdue(facts: ConnectionFacts, bounds: Limits) -> str | None:
    """Return why a connection must be closed now, or None if it stays open. Pure."""
    if facts.phase is Phase.HEADER and facts.waited > bounds.header:
        return f"no complete request head within {bounds.header:g} s"
    if facts.phase is Phase.BODY and facts.silent > bounds.body:
        return f"no byte of the body for {bounds.body:g} s"
    if facts.phase is Phase.BODY and facts.waited > bounds.body + facts.received / bounds.body_rate:
        return f"a body slower than {bounds.body_rate:g} bytes/s"
    if facts.phase is Phase.IDLE and facts.waited > bounds.idle:
        return f"no request for {bounds.idle:g} s"
    if facts.phase is Phase.WRITE and facts.silent > bounds.write:
        return f"the answer was not read for {bounds.write:g} s"
    return None


class Protocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, which also collects the facts for `overdue` and `admit`, and can be dropped."""

    def __init__(
        self, facts: ConnectionFacts, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any]
    ) -> None:
        self.facts = facts
        super().__init__(config, server_state, {**app_state, STATE: self.facts})
        self._seen: object = None  # the request that was being served at the last update
        self._unwritten = 0
        self._dropped = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Serve the connection, or close it if `drop` was called before."""
        super().connection_made(transport)
        if self._dropped:
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Count the bytes, then parse them."""
        self.facts.silent = 0.0
        self.facts.received += len(data)
        super().data_received(data)

    def resume_writing(self) -> None:
        """Record that the peer has read, and continue to write."""
        self.facts.silent = 0.0
        super().resume_writing()

    def update(self, elapsed: float) -> None:
        """Update the facts, `elapsed` seconds after the last update."""
        facts, phase, unwritten = self.facts, self._phase(), self.transport.get_write_buffer_size()
        if phase is not facts.phase or self.cycle is not self._seen:
            facts.phase, facts.waited, facts.silent = phase, 0.0, 0.0
            facts.received, self._seen = 0, self.cycle
        else:
            facts.waited += elapsed
            facts.silent = 0.0 if 0 < unwritten < self._unwritten else facts.silent + elapsed
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
        """Close the connection. If a request has begun and has no answer yet, first answer it with status 408."""
        self._dropped = True
        if self.transport is None or self.transport.is_closing():
            return
        begun = self.cycle is not None and not self.cycle.response_complete
        silent = not begun and not self.conn.trailing_data[0]
        if not silent and not (begun and self.cycle.response_started):
            self._answer(408, reason)
        if begun:
            self.cycle.disconnected = True  # from now on the app's output is discarded
            self.cycle.message_event.set()
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # otherwise the descriptor stays in use until the peer reads

    def _answer(self, status: int, detail: str) -> None:
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
    """The open connections of one server: decides on new ones, and closes overdue ones."""

    def __init__(self, bounds: Limits) -> None:
        self.bounds = bounds
        self._protocols: dict[ConnectionFacts, Protocol] = {}  # oldest first
        self._updated_at = 0.0

    def decide(self, address: str, now: float) -> Admission:
        """Decide on a new connection, and close the open connection that the decision names, if there is one."""
        self._remove_closed()
        found = admit(address, list(self._protocols), self.bounds, now)
        if found.reason:  # the facts may be as old as the last close_overdue: update them, and decide again
            self._update(0.0)
            found = admit(address, list(self._protocols), self.bounds, now)
        if found.closed is not None:
            self._close(found.closed, found.reason)
        elif found.reason and found.wait is None:
            log.warning("a connection was refused: %s", found.reason)
        return found

    def add(self, protocol: Protocol) -> None:
        """Add an accepted connection."""
        self._protocols[protocol.facts] = protocol

    def remove(self, protocol: Protocol) -> None:
        """Remove a connection that could not be started."""
        self._protocols.pop(protocol.facts, None)

    def make_room(self, error: OSError, now: float) -> bool:
        """Close the oldest unknown connection on which the service waits for the peer; return whether there was one."""
        log.warning("a connection cannot be accepted: %s", error.strerror)
        self._remove_closed()
        self._update(0.0)
        unknown = [facts for facts in self._protocols if not facts.known]
        found = _replace(unknown, "the service has no descriptor left", self.bounds, now)
        if found.closed is not None:
            self._close(found.closed, found.reason)
        return found.closed is not None

    def close_overdue(self, now: float) -> None:
        """Close overdue connections. Call it once a second; a pause of over two seconds counts as two."""
        elapsed = min(now - self._updated_at, 2 * _SWEEP) if self._updated_at else 0.0
        self._updated_at = now
        self._remove_closed()
        self._update(elapsed)
        for facts in list(self._protocols):
            reason = overdue(facts, self.bounds)
            if reason is not None:
                self._close(facts, reason)

    def _update(self, elapsed: float) -> None:
        for protocol in self._protocols.values():
            if protocol.transport is not None:
                protocol.update(elapsed)

    def _close(self, facts: ConnectionFacts, reason: str) -> None:
        log.info("a connection was closed: %s", reason)
        self._protocols.pop(facts).drop(reason)

    def _remove_closed(self) -> None:
        for facts, protocol in list(self._protocols.items()):
            if protocol.transport is not None and protocol.transport.is_closing():
                del self._protocols[facts]


class Acceptor:
    """The loop that accepts connections on one listening socket.

    If there is no free descriptor, the loop closes an unknown connection, or pauses.
    """

    def __init__(self, listener: socket.socket, server: Server) -> None:
        self._listener, self._server = listener, server
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._again: asyncio.TimerHandle | None = None
        self._pending: tuple[socket.socket, str] | None = None  # an accepted connection on which `admit` has to decide
        # of each accepted socket: else the body of an answer waits 40 ms for the acknowledgement of its headers, as
        # asyncio sets the option only on sockets that were made with the number of the protocol
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Stop accepting."""
        self._loop.remove_reader(self._listener.fileno())
        if self._again is not None:
            self._again.cancel()
        if self._pending is not None:
            self._pending[0].close()

    def _listen(self) -> None:
        self._again = None
        self._loop.add_reader(self._listener.fileno(), self._ready)
        if self._pending is not None:
            self._ready()

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._again = self._loop.call_later(seconds, self._listen)

    def _ready(self) -> None:
        for _ in range(_BATCH):
            try:
                peer, address = self._pending or self._accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if not self._server.open_connections.make_room(error, self._loop.time()):
                    self._pause(_PAUSE)
                return  # a closed connection frees its descriptor after this callback
            self._pending = None
            found = self._server.open_connections.decide(address, self._loop.time())
            if found.accepted:
                self._start(peer, address)
            elif found.wait is None:
                peer.close()
            else:
                self._pending = peer, address
                self._pause(found.wait)
                return

    def _accept(self) -> tuple[socket.socket, str]:
        peer, address = self._listener.accept()
        return peer, str(address[0])

    def _start(self, peer: socket.socket, address: str) -> None:
        protocol = self._server.protocol(ConnectionFacts(address, self._loop.time()))
        self._server.open_connections.add(protocol)
        task = self._loop.create_task(self._serve(protocol, peer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, protocol: Protocol, peer: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, peer)
        except OSError as error:
            log.warning("a connection was lost at its start: %s", error)
            self._server.open_connections.remove(protocol)
            peer.close()


class Server(uvicorn.Server):
    """A uvicorn server whose connections are limited by `Connections`. It serves only on given sockets."""

    def __init__(self, config: uvicorn.Config, bounds: Limits | None = None) -> None:
        super().__init__(config)
        self.open_connections = Connections(bounds or limits_here())
        # later than `close_overdue`, which logs the reason
        config.timeout_keep_alive = int(self.open_connections.bounds.idle) + 5
        self._acceptors: list[Acceptor] = []

    def protocol(self, facts: ConnectionFacts) -> Protocol:
        """Return the protocol object of a new connection."""
        return Protocol(facts, self.config, self.server_state, self.lifespan.state)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the app, then accept connections."""
        if not sockets:
            raise ValueError(
                "give listening sockets, because connections on sockets that uvicorn opens itself have no limits"
            )
        await super().startup([])
        if self.started:
            self._acceptors = [Acceptor(listener, self) for listener in sockets]

    async def on_tick(self, counter: int) -> bool:
        """Check the time-outs once a second."""
        if counter % 10 == 0:
            self.open_connections.close_overdue(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, then shut down as uvicorn does."""
        for acceptor in self._acceptors:
            acceptor.close()
        await super().shutdown(sockets)
