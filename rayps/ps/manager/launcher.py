"""The processes of a group's servers: started and ended by a thread, for a cluster may take its time over either."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

from rayps.cluster.local import ActorHandle, Cluster
from rayps.core.errors import RaypsError

HOST = "rayps.ps.server.server_actor:ServerActor"
START_SECONDS = 90.0  # from the order to a server's first word


class Launcher:
    """Starts and ends servers, one after the other."""

    def __init__(self, group: str, cluster: Cluster, options: dict[str, Any], failed: Callable[[str, str], None]):
        """`options` go to `Cluster.spawn`; `failed(server, reason)` hears of a start that did not work."""
        self._group, self._cluster, self._options, self._failed = group, cluster, options, failed
        self._handles: dict[str, ActorHandle] = {}
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"{group}-crew")
        self._thread.start()

    def start(self, server: str, *args: Any, **more: Any) -> None:
        """Begin a server's process; the rest goes to `ServerActor`."""
        self._orders.put(lambda: self._start(server, args, more))

    def end(self, server: str) -> None:
        """End it, whether it lives or not."""
        self._orders.put(lambda: self._end(server))

    def close(self, timeout: float = 30.0) -> None:
        """Do what was ordered, then nothing more."""
        self._orders.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            order()

    def _start(self, server: str, args: tuple[Any, ...], more: dict[str, Any]) -> None:
        name = actor_name(self._group, server)
        try:
            self._handles[server] = self._cluster.spawn(HOST, server, *args, name=name, **self._options, **more)
        except (RaypsError, OSError, RuntimeError) as error:
            self._failed(server, f"{type(error).__name__}: {error}")

    def _end(self, server: str) -> None:
        handle = self._handles.pop(server, None) or self._cluster.find(actor_name(self._group, server))
        if handle is not None:
            with contextlib.suppress(RaypsError, OSError, KeyError):  # it has ended by itself
                self._cluster.kill(handle)


def actor_name(group: str, server: str) -> str:
    """What a server's actor is called in its cluster."""
    return f"rayps-server-{group}-{server}"
