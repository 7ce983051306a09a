"""Start and end the server processes of a group: a pure queue of starts, and a thread that carries them out."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rayps_client.errors import RaypsError

from rayps.cluster.local import ActorHandle, ActorReply, Cluster

HOST = "rayps.ps.server.server_actor:ServerActor"
START_SECONDS = 90.0  # seconds from the order to start a server until its registration
RETRY_SECONDS = 2.0  # seconds from a failed start to the next attempt
MOST_ROOM = 1000  # the room for servers where nothing limits it
REPLY_SECONDS = 0.1  # seconds between two checks of starts that go on


class PendingServers:
    """The servers that the manager has ordered and that have not registered yet. Pure.

    A server that starts *gently* loads its modules at the lowest priority, so that it does not slow workers. Such
    servers start one after the other.
    """

    def __init__(self) -> None:
        self._until: dict[str, float] = {}  # server -> deadline of its registration; infinite before its start
        self._queue: deque[tuple[str, bool]] = deque()  # servers not started yet, and whether they start gently
        self._last = ""  # the server that was started last
        self._hurried = False  # whether a server was late, after which no server starts gently until the resize ends

    def __len__(self) -> int:
        return len(self._until)

    @property
    def names(self) -> list[str]:
        """The names of all pending servers."""
        return list(self._until)

    def add(self, name: str, *, gently: bool) -> None:
        """Add a server. With `gently` it starts after the others that start gently; otherwise it starts next."""
        gently = gently and not self._hurried
        self._until[name] = math.inf
        if gently:
            self._queue.append((name, True))
        else:
            self._queue.appendleft((name, False))

    def due(self) -> list[tuple[str, bool]]:
        """Return the servers to start now, each with whether it starts gently, and set their deadlines."""
        found: list[tuple[str, bool]] = []
        while self._queue and not (self._queue[0][1] and self._last in self._until):
            name, gently = self._queue.popleft()
            if name in self._until:
                self._until[name] = time.monotonic() + START_SECONDS
                self._last = name
                found.append((name, gently))
        return found

    def registered(self, name: str) -> bool:
        """Remove a server that has registered; return False if it was not pending."""
        return self._until.pop(name, None) is not None

    def failed(self, name: str) -> bool:
        """Record a failed start, so that `late` returns the server after RETRY_SECONDS.

        Return False if the server is not pending.
        """
        if name not in self._until:
            return False
        self._until[name] = time.monotonic() + RETRY_SECONDS
        return True

    def late(self, now: float) -> list[str]:
        """Remove and return the servers that have not registered in time."""
        found = [name for name, until in self._until.items() if until < now]
        for name in found:
            del self._until[name]
            self._hurried = True
        return found

    def settled(self) -> None:
        """Allow gentle starts again after a server was late. Call this when a resize has ended."""
        self._hurried = False


@dataclass(frozen=True, slots=True)
class StartOrder:
    """The order to start a server of a group."""

    server: str
    group: str
    secret: bytes
    manager: str  # the address of the group's manager
    gently: bool = False  # import at the lowest priority, so that workers keep the cores
    placed: Mapping[str, str] = field(default_factory=dict)  # living server -> its host, by the id in the cluster
    avoid: frozenset[str] = frozenset()  # ids of hosts on which no server starts, because they will end


class ServerStarter(Protocol):
    """Starts and ends server processes. Called in one thread."""

    def start(self, order: StartOrder) -> ActorReply | None:
        """Start a server. If the start goes on, return the reply that arrives, or fails, at its end.

        Raises NoResources if no host has room for the server, or another RaypsError if the start fails.
        """

    def room(self, placed: Mapping[str, str], avoid: frozenset[str]) -> int:
        """Return how many more servers have room on hosts that are not in `avoid`. `placed`: server -> its host."""

    def end(self, server: str, node: str) -> None:
        """End a server's process on a host, and release what was reserved for it; do nothing if it has ended."""

    def close(self) -> None:
        """End the group's processes that are no servers, because the group has ended."""


class ActorStarter:
    """Starts each server as an actor of its own, such as in a cluster of threads."""

    def __init__(self, group: str, cluster: Cluster, options: dict[str, Any]) -> None:
        """`options` are arguments of `Cluster.spawn`."""
        self._group, self._cluster, self._options = group, cluster, options
        self._handles: dict[str, ActorHandle] = {}

    def start(self, order: StartOrder) -> None:
        """Start a server. See `ServerStarter.start`."""
        more: dict[str, Any] = {"gently": True} if order.gently else {}
        self._handles[order.server] = self._cluster.spawn(
            HOST,
            order.server,
            order.group,
            order.secret,
            order.manager,
            name=name_actor(self._group, order.server),
            **self._options,
            **more,
        )

    def room(self, placed: Mapping[str, str], avoid: frozenset[str]) -> int:
        """Return MOST_ROOM: threads need no room. See `ServerStarter.room`."""
        return MOST_ROOM

    def end(self, server: str, node: str) -> None:
        """End a server's actor. See `ServerStarter.end`."""
        handle = self._handles.pop(server, None) or self._cluster.find(name_actor(self._group, server))
        if handle is not None:
            self._cluster.kill(handle)

    def close(self) -> None:
        """Do nothing: the group has no other processes."""


class Launcher:
    """A thread that starts and ends server processes, one after the other."""

    def __init__(self, group: str, starter: ServerStarter, failed: Callable[[str, str], None]):
        """Start the thread. `failed(server, reason)` is called for a start that failed."""
        self._starter, self._failed = starter, failed
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started: dict[str, ActorReply] = {}  # starts that go on
        self.room = MOST_ROOM  # how many more servers had room at the last `look`
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"{group}-launcher")
        self._thread.start()

    def start(self, order: StartOrder) -> None:
        """Start a server's process."""
        self._tasks.put(lambda: self._start(order))

    def end(self, server: str, node: str = "") -> None:
        """End a server's process on the host with this id; do nothing if it has ended already."""
        self._tasks.put(lambda: self._end(server, node))

    def look(self, placed: Mapping[str, str], avoid: frozenset[str]) -> None:
        """Find out how many more servers have room, and set `room` some time later. See `ServerStarter.room`."""

        def work() -> None:
            with contextlib.suppress(RaypsError, OSError, RuntimeError):  # the cluster does not answer: `room` stays
                self.room = self._starter.room(placed, avoid)

        self._tasks.put(work)

    def close(self, timeout: float = 30.0, *, ended: bool = False) -> None:
        """Finish the tasks, then end the thread. `ended`: the group has ended, and all its processes end."""
        if ended:
            self._tasks.put(self._starter.close)
        self._tasks.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=REPLY_SECONDS if self._started else None)
            except queue.Empty:
                self._read_replies()
                continue
            if task is None:
                return
            task()

    def _start(self, order: StartOrder) -> None:
        try:
            reply = self._starter.start(order)
        except (RaypsError, OSError, RuntimeError) as error:
            self._failed(order.server, f"{type(error).__name__}: {error}")
        else:
            if reply is not None:
                self._started[order.server] = reply

    def _read_replies(self) -> None:
        for server, reply in list(self._started.items()):
            if reply.done():
                del self._started[server]
                try:
                    reply.result(0)
                except (RaypsError, OSError, RuntimeError, TimeoutError) as error:
                    self._failed(server, f"{type(error).__name__}: {error}")

    def _end(self, server: str, node: str) -> None:
        self._started.pop(server, None)
        with contextlib.suppress(RaypsError, OSError, KeyError, TimeoutError):  # the server has ended by itself
            self._starter.end(server, node)


def name_actor(group: str, server: str) -> str:
    """Return the name of a server's actor in its cluster."""
    return f"rayps-server-{group}-{server}"
