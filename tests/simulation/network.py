"""The simulated network: connections with delays, that break, and that a partition stops.

A connection is like TCP: messages arrive in order and once, or the connection breaks, and what was on its way is lost.
Its two ends learn of this at different times. What an application sees as lost, repeated or reordered messages comes
from broken connections, from several connections, and from calls of actors (`cluster`).
"""

from __future__ import annotations

import select as real_select
from collections import deque
from collections.abc import Callable
from typing import Any

from rayps_client.errors import LinkError, PeerLost, PeerTimeout, StaleGeneration

from rayps.comm.link import Link, Message
from rayps.comm.link.listener import parse_address
from rayps.comm.link.socket_link import as_bytes
from simulation.kernel import Process, Simulation, Waiters, simulation

POLLIN, POLLOUT, POLLHUP, POLLNVAL = real_select.POLLIN, real_select.POLLOUT, real_select.POLLHUP, real_select.POLLNVAL

SPIN_SECONDS = 0.001  # what a poll without a wait takes: time passes for a loop that polls so until a deadline


class Network:
    """Delays and partitions between hosts, listeners by address, and open connections."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self.blocked: set[tuple[str, str]] = set()  # (from, to): no message arrives
        self.scale = 1.0  # of all delays: 1 is a fast network in one room
        self.slow: dict[tuple[str, str], float] = {}  # (from, to) -> seconds of additional delay
        self.listeners: dict[tuple[str, int], SimListener] = {}
        self.descriptors: dict[int, Any] = {}
        self.connections: list[Connection] = []
        self._held: list[tuple[str, str, Callable[[], None]]] = []
        self._port = 20000

    def delay(self, source: str, target: str) -> float:
        """Draw the seconds that a message is on its way."""
        rng = self._sim.rng
        base = (1e-4 + rng.random() * 1e-3) * self.scale
        if rng.random() < 0.01:
            base += rng.random() * 0.3
        return base + self.slow.get((source, target), 0.0)

    def deliver(self, source: str, target: str, work: Callable[[], None], delay: float | None = None) -> None:
        """Run `work` when a message from host `source` arrives at host `target`; a partition holds it back."""

        def arrive() -> None:
            if (source, target) in self.blocked:
                self._held.append((source, target, work))
            else:
                work()

        self._sim.after(self.delay(source, target) if delay is None else delay, arrive)

    def cut(self, source: str, target: str) -> None:
        """Stop messages in one direction."""
        self.blocked.add((source, target))

    def heal(self) -> None:
        """End all partitions and additional delays; what was held back arrives."""
        self.blocked.clear()
        self.slow.clear()
        held, self._held = self._held, []
        for _, _, work in held:
            self._sim.after(self.delay("", ""), work)

    def port(self) -> int:
        """Return a free port."""
        self._port += 1
        return self._port


class Connection:
    """Two links, one for each end."""

    def __init__(self, network: Network, caller: Process, listener: SimListener, name: str, generation: int) -> None:
        self.network = network
        self.ends = (
            SimLink(self, 0, caller, listener.name, generation),
            SimLink(self, 1, listener.process, name, generation),
        )
        network.connections.append(self)

    def break_now(self) -> None:
        """Break the connection: both ends learn of it later, and what is on its way is lost."""
        for end in self.ends:
            end.cut_off = True
        for end in self.ends:
            self.network._sim.after(self.network._sim.rng.random() * 0.05, end.broke)
        self.forget()

    def forget(self) -> None:
        """Remove the connection from the list of open ones."""
        if self in self.network.connections:
            self.network.connections.remove(self)


class SimLink(Link):
    """One end of a connection."""

    def __init__(self, connection: Connection, side: int, process: Process, peer: str, generation: int) -> None:
        self.peer, self.generation, self.transport = peer, generation, "tcp"
        self.bytes_sent = self.bytes_received = 0
        self.queue_limit = 1 << 30
        self._out = deque()  # nothing is queued: every connection accepts what is sent
        self.process = process
        self.waiters = Waiters()
        self.inbox: deque[tuple[int, Message]] = deque()  # (generation, message)
        self.cut_off = False  # nothing that this end sends arrives any more
        self._connection, self._side = connection, side
        self._ended = False  # the peer's end, or the connection, has ended
        self._closed = False
        self._arrives = 0.0  # when the last message that was sent arrives: the next one does not overtake it
        self._descriptor = process.sim.number()
        connection.network.descriptors[self._descriptor] = self
        process.on_death.append(self._die)

    @property
    def other(self) -> SimLink:
        """The other end."""
        return self._connection.ends[1 - self._side]

    def fileno(self) -> int:
        return -1 if self._closed else self._descriptor

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def queued(self) -> int:
        return 0

    def absorb(self) -> None:
        pass

    def readable(self) -> bool:
        """Whether `poll` reports input."""
        return bool(self.inbox) or self._ended

    # ---- sending

    def send(self, message: Message, payload: Any = None, *, timeout: float) -> None:
        self.queue(message, payload)

    def queue(self, message: Message, payload: Any = None, *, copy: bool = True) -> None:
        self.process.sim.alive()
        self._append(message, payload)

    def flush(self) -> bool:
        if self._closed:
            raise self._gone()
        return True

    def _append(self, message: Message, payload: Any) -> None:
        if self._closed or self._ended:
            raise self._gone()
        data = memoryview(bytearray(as_bytes(message.payload if payload is None else payload)))
        self.bytes_sent += len(data) + 64
        sent = Message(message.kind, message.tag, message.a, message.b, message.weight, data)
        generation, other = self.generation, self.other
        self._transmit(lambda: other.arrived(generation, sent))

    def _transmit(self, work: Callable[[], None]) -> None:
        network, other = self._connection.network, self.other
        now = network._sim.now
        self._arrives = max(self._arrives + 1e-9, now + network.delay(self.process.host, other.process.host))

        def arrive() -> None:
            if not self.cut_off:
                work()

        network.deliver(self.process.host, other.process.host, arrive, self._arrives - now)

    def _copy_last_payload(self) -> None:
        pass

    # ---- receiving

    def arrived(self, generation: int, message: Message) -> None:
        """Receive a message."""
        if not self._closed and self.process.dead is None:
            self.inbox.append((generation, message))
            self.waiters.wake_all()

    def broke(self) -> None:
        """Learn that the connection has ended."""
        if not self._ended:
            self._ended = True
            self.waiters.wake_all()

    def try_recv(self, into: Any = None) -> Message | None:
        self.process.sim.alive()
        if self._closed:
            raise self._gone()
        if not self.inbox:
            if self._ended:
                raise self._gone()
            return None
        generation, message = self.inbox.popleft()
        self.bytes_received += len(message.payload) + 64
        if generation != self.generation:
            raise StaleGeneration(
                f"a message of {self.peer!r} has generation {generation}, not {self.generation}",
                peer=self.peer,
                generation=generation,
                expected=self.generation,
            )
        if into is not None and len(message.payload):
            view = as_bytes(into)
            view[:] = message.payload
            message.payload = view
        return message

    def peek(self) -> Message | None:
        self.process.sim.alive()
        if self._closed or (not self.inbox and self._ended):
            raise self._gone()
        return self.inbox[0][1] if self.inbox else None

    @property
    def head(self) -> Message | None:
        return None

    @property
    def pending_bytes(self) -> int:
        return len(self.inbox[0][1].payload)

    def drain(self) -> bool:
        self.inbox.clear()
        return self._ended

    def wait(self, events: int, timeout: float, doing: str = "answer") -> None:
        if self._closed:
            raise self._gone()
        if not self.readable() and not self.waiters.wait(timeout):
            raise PeerTimeout(f"{self.peer!r} did not {doing} within {timeout:g} s", peer=self.peer, seconds=timeout)

    def _gone(self) -> PeerLost:
        return PeerLost(f"{self.peer!r} closed the connection or died", peer=self.peer)

    # ---- the end

    def hang_up(self, *, more_to_send: bool = False) -> None:
        self.broke()

    def send_last(self, end: float, read: bool) -> None:
        pass

    def close(self) -> None:
        if self._closed or self.process.dead is not None:
            return
        self._closed = True
        self._connection.network.descriptors.pop(self._descriptor, None)
        self._connection.forget()
        self.waiters.wake_all()
        if not self.cut_off:
            self._transmit(self.other.broke)

    def _die(self) -> None:
        if not self._closed:
            self._closed = True
            self._connection.network.descriptors.pop(self._descriptor, None)
            self._connection.forget()
            if not self.cut_off:
                self._transmit(self.other.broke)


class SimListener:
    """Stands in for `rayps.comm.link.Listener`."""

    def __init__(self, name: str, secret: bytes, generation: int = 0, host: str = "127.0.0.1", port: int = 0) -> None:
        sim = simulation()
        self.process = sim.alive().process
        self.name, self.generation, self.secret = name, generation, secret
        self.waiters = Waiters()
        self.sockets: list[Any] = []
        network = self._network = sim.network
        if port and (host, port) in network.listeners:
            raise LinkError(f"{name!r} cannot listen on {(host, port)!r}: address already in use", peer=name)
        self._at = host, port or network.port()
        network.listeners[self._at] = self
        self.address = f"{name}@{host}:{self._at[1]}/"
        self._ready: list[SimLink] = []
        self._descriptor = sim.number()
        network.descriptors[self._descriptor] = self
        self.process.on_death.append(self.close)

    def fileno(self) -> int:
        return self._descriptor if self._descriptor in self._network.descriptors else -1

    def readable(self) -> bool:
        return bool(self._ready)

    def arrived(self, link: SimLink) -> None:
        """Receive a connection."""
        self._ready.append(link)
        self.waiters.wake_all()

    def accept_ready(self) -> SimLink | None:
        if self.fileno() < 0:
            raise PeerLost(f"the listener of {self.name!r} has been closed", peer=self.name)
        return self._ready.pop(0) if self._ready else None

    def close(self) -> None:
        if self._network.listeners.get(self._at) is self:
            del self._network.listeners[self._at]
        self._network.descriptors.pop(self._descriptor, None)


def connect(
    address: str, *, name: str, secret: bytes, generation: int, timeout: float, prefer: str = "auto"
) -> SimLink:
    """Stand in for `rayps.comm.link.connect`."""
    sim = simulation()
    network, caller = sim.network, sim.alive().process
    target = parse_address(address)
    where = target.host, target.port
    deadline, pause = sim.now + timeout, 0.005
    while True:
        there, back = (caller.host, target.host), (target.host, caller.host)
        round_trip = network.delay(*there) + network.delay(*back)
        sim.park(min(round_trip, max(0.0, deadline - sim.now)))
        found = network.listeners.get(where)
        silent = there in network.blocked or back in network.blocked
        silent = silent or (found is not None and found.process.frozen_until > sim.now)
        if silent or sim.now + 1e-9 >= deadline:
            sim.park(max(0.0, deadline - sim.now))
            raise PeerTimeout(f"{target.name!r} did not answer within {timeout:g} s", peer=target.name, seconds=timeout)
        if found is not None and found.process.dead is None:
            if found.secret != secret:
                raise LinkError(f"{target.name!r} has another secret", peer=target.name)
            if found.generation == generation:
                made = Connection(network, caller, found, name, generation)
                found.arrived(made.ends[1])
                return made.ends[0]
            if found.generation > generation:
                raise StaleGeneration(
                    f"{target.name!r} is at generation {found.generation}",
                    peer=target.name,
                    generation=generation,
                    expected=found.generation,
                )
        if sim.now + pause >= deadline:
            raise PeerLost(f"no listener of {target.name!r}; tried for {timeout:g} s", peer=target.name)
        sim.park(pause)
        pause = min(2 * pause, 0.2)


class SimWakeup:
    """Stands in for `rayps.comm.link.wakeup.Wakeup`."""

    def __init__(self, descriptor: int = -1) -> None:
        sim = simulation()
        self.waiters = Waiters()
        self._set = False
        self._network = sim.network
        self._descriptor = sim.number()
        self._network.descriptors[self._descriptor] = self

    def fileno(self) -> int:
        return self._descriptor

    def readable(self) -> bool:
        return self._set

    def wake(self) -> None:
        self._set = True
        self.waiters.wake_all()

    def clear(self) -> None:
        self._set = False

    def close(self) -> None:
        self._network.descriptors.pop(self._descriptor, None)
        self._descriptor = -1


class SimPoll:
    """Stands in for `select.poll`. Every connection accepts what is sent."""

    def __init__(self) -> None:
        self._events: dict[int, int] = {}
        self._descriptors = simulation().network.descriptors

    def register(self, what: Any, events: int = POLLIN) -> None:
        self._events[what if isinstance(what, int) else what.fileno()] = events

    modify = register

    def unregister(self, what: Any) -> None:
        del self._events[what if isinstance(what, int) else what.fileno()]

    def poll(self, milliseconds: float | None = None) -> list[tuple[int, int]]:
        sim = simulation()
        task = sim.alive()
        found = self._ready()
        if found:
            return found
        if milliseconds == 0:
            sim.park(SPIN_SECONDS)
            return self._ready()
        sources = [source for number in self._events if (source := self._descriptors.get(number)) is not None]
        for source in sources:
            source.waiters.add(task)
        sim.park(None if milliseconds is None or milliseconds < 0 else milliseconds / 1000)
        for source in sources:
            source.waiters.discard(task)
        return self._ready()

    def _ready(self) -> list[tuple[int, int]]:
        found = []
        for number, events in self._events.items():
            source = self._descriptors.get(number)
            if source is None:
                found.append((number, POLLNVAL))
                continue
            now = (POLLIN if events & POLLIN and source.readable() else 0) | (events & POLLOUT)
            if now:
                found.append((number, now))
        return found
