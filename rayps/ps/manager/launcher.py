"""Start and end the server processes of a group: a pure queue of starts, and a thread that carries them out."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rayps.cluster.local import ActorHandle, Cluster
from rayps.core.errors import RaypsError

HOST = "rayps.ps.server.server_actor:ServerActor"
START_SECONDS = 90.0  # seconds from the order to start a server until its registration
RETRY_SECONDS = 2.0  # seconds from a failed start to the next attempt


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


class Launcher:
    """A thread that starts and ends server processes, one after the other."""

    def __init__(self, group: str, cluster: Cluster, options: dict[str, Any], failed: Callable[[str, str], None]):
        """Start the thread.

        `options` are arguments of `Cluster.spawn`; `failed(server, reason)` is called for a start that failed.
        """
        self._group, self._cluster, self._options, self._failed = group, cluster, options, failed
        self._handles: dict[str, ActorHandle] = {}
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"{group}-launcher")
        self._thread.start()

    def start(self, server: str, *args: Any, **more: Any) -> None:
        """Start a server's process; the other arguments are those of `ServerActor`."""
        self._tasks.put(lambda: self._start(server, args, more))

    def end(self, server: str) -> None:
        """End a server's process; do nothing if it has ended already."""
        self._tasks.put(lambda: self._end(server))

    def close(self, timeout: float = 30.0) -> None:
        """Finish the tasks, then end the thread."""
        self._tasks.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def _start(self, server: str, args: tuple[Any, ...], more: dict[str, Any]) -> None:
        name = actor_name(self._group, server)
        try:
            self._handles[server] = self._cluster.spawn(HOST, server, *args, name=name, **self._options, **more)
        except (RaypsError, OSError, RuntimeError) as error:
            self._failed(server, f"{type(error).__name__}: {error}")

    def _end(self, server: str) -> None:
        handle = self._handles.pop(server, None) or self._cluster.find(actor_name(self._group, server))
        if handle is not None:
            with contextlib.suppress(RaypsError, OSError, KeyError):  # the server has ended by itself
                self._cluster.kill(handle)


def actor_name(group: str, server: str) -> str:
    """Return the name of a server's actor in its cluster."""
    return f"rayps-server-{group}-{server}"
