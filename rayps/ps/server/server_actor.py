"""The process of one server of a group. Thin: what it does is `GroupServerLoop`'s.

Importing torch and what an optimizer's first step needs takes seconds of a core. A server that joins a group which
trains must not take these from whoever trains beside it: it imports in a thread of the lowest rank there is, which runs
where nobody else wants the core, and serves in ordinary ones. So this module imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rayps.cluster.local import LocalCluster, host_address, rendezvous, surrounding
from rayps.comm.link import Listener
from rayps.ps.protocol.segment_map import address_key

if TYPE_CHECKING:
    from rayps.ps.server.server import GroupServerLoop

log = logging.getLogger(__name__)

ALONE_SECONDS = 60.0  # a server whose manager does not come back ends itself
LOOK_SECONDS = 1.0
LOWEST = 19  # niceness; where others started Ray, workers have 15. SCHED_IDLE would never end beside busy threads
QUIET_SECONDS = 60.0  # for what is done quietly; then it is waited for no longer
HOST = "rayps.ps.server.server"


class ServerActor:
    """The process of one server."""

    def __init__(self, server: str, group: str, secret: bytes, manager: str, *, gently: bool = False) -> None:
        """Start the server. `gently`: load its modules at the lowest priority, so that workers keep the cores."""
        if gently and HOST not in sys.modules:
            quietly(_serving)
        self._group, self._address = group, manager
        self._listener = Listener(server, secret, host=host_address())
        self._host = _serving()(server, self._listener, self._manager, secret, host=socket.gethostname())
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True, name=f"{server}-watch")
        self._watch.start()

    def ping(self) -> int:
        """Return the process id."""
        return os.getpid()

    def facts(self) -> dict[str, Any]:
        """Return the server's load, as in a heartbeat."""
        return self._host.facts()

    def close(self) -> None:
        """Stop serving."""
        self._closing.set()
        self._host.close()
        self._listener.close()

    def _manager(self) -> str:
        """Return the manager's present address, which changes when the manager restarts."""
        found = rendezvous().get(address_key(self._group))
        return self._address if found is None else found.decode()

    def _look(self) -> None:
        while not self._closing.wait(LOOK_SECONDS):
            if self._host.alone > ALONE_SECONDS:
                log.warning("the manager of server group %s does not come back: this server ends", self._group)
                with contextlib.suppress(Exception):
                    self.close()
                if not isinstance(surrounding(), LocalCluster):  # then it is a process of its own
                    os._exit(0)
                return


def _serving() -> type[GroupServerLoop]:
    """Return the class of the loop, with all its imports."""
    importlib.import_module("torch").set_num_threads(1)  # several servers share a machine with the workers
    found: Any = importlib.import_module(HOST)
    found.warm_up()
    served: type[GroupServerLoop] = found.GroupServerLoop
    return served


def quietly(work: Callable[[], object]) -> None:
    """Run `work` in a thread of the lowest scheduling priority; an ordinary thread where the platform has none.

    An exception is only logged. The thread is no longer waited for after `QUIET_SECONDS`.
    """

    def run() -> None:
        if sys.platform == "linux":  # elsewhere it would be the whole process, for ever
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
        try:
            work()
        except Exception as error:
            log.warning("what was to be done quietly failed: %s: %s", type(error).__name__, error)

    thread = threading.Thread(target=run, daemon=True, name="quietly")
    thread.start()
    thread.join(QUIET_SECONDS)
