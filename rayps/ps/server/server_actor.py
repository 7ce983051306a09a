"""The process of one server of a group, which runs a `GroupServerLoop`.

Importing torch, and what an optimizer's first step needs, takes seconds of a core. A server that joins a group during
training must not slow the workers on its machine. It therefore imports in a thread of the lowest scheduling priority,
which runs only when the core is idle, and serves in threads of ordinary priority. So this module itself must not import
torch.
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
from rayps.ps.protocol.segment_map import make_address_key

if TYPE_CHECKING:
    from rayps.ps.server.server import GroupServerLoop

log = logging.getLogger(__name__)

ALONE_SECONDS = 60.0  # a server ends after this time without a manager
LOOK_SECONDS = 1.0  # time between two checks for the manager
# niceness. Ray may have started the workers with 15. With SCHED_IDLE the thread would get no core while others are busy
LOWEST = 19
QUIET_SECONDS = 60.0  # longest wait of `run_quietly`
HOST = "rayps.ps.server.server"


class ServerActor:
    """The actor of one server. It serves until it is closed, or has had no manager for `ALONE_SECONDS`."""

    def __init__(self, server: str, group: str, secret: bytes, manager: str, *, gently: bool = False) -> None:
        """Start the server. `gently`: load its modules at the lowest priority, so that workers keep the cores."""
        if gently and HOST not in sys.modules:
            run_quietly(load_server)
        self._group, self._address = group, manager
        self._listener = Listener(server, secret, host=host_address())
        self._host = load_server()(
            server, self._listener, self._find_manager, secret, host=socket.gethostname(), node=surrounding().node
        )
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._watch_manager, daemon=True, name=f"{server}-watch")
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

    def _find_manager(self) -> str:
        """Return the manager's present address, which changes when the manager restarts."""
        found = rendezvous().get(make_address_key(self._group))
        return self._address if found is None else found.decode()

    def _watch_manager(self) -> None:
        while not self._closing.wait(LOOK_SECONDS):
            if self._host.alone > ALONE_SECONDS:
                log.warning("server group %s has had no manager for %g s: this server ends", self._group, ALONE_SECONDS)
                with contextlib.suppress(Exception):
                    self.close()
                if not isinstance(surrounding(), LocalCluster):  # then this server has a process of its own
                    os._exit(0)
                return


def load_server() -> type[GroupServerLoop]:
    """Import torch and the server, warm torch up, and return the class of the server's loop."""
    importlib.import_module("torch").set_num_threads(1)  # several servers share a machine with the workers
    found: Any = importlib.import_module(HOST)
    found.warm_up()
    served: type[GroupServerLoop] = found.GroupServerLoop
    return served


def run_quietly(work: Callable[[], object]) -> None:
    """Run `work` in a thread of the lowest scheduling priority (on Linux; elsewhere in an ordinary thread).

    Return when `work` is done, or after `QUIET_SECONDS`. An exception of `work` is logged and not raised.
    """

    def run() -> None:
        if sys.platform == "linux":  # elsewhere this would lower the priority of the whole process, for good
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
        try:
            work()
        except Exception as error:
            log.warning("work in a low-priority thread failed: %s: %s", type(error).__name__, error)

    thread = threading.Thread(target=run, daemon=True, name="quietly")
    thread.start()
    thread.join(QUIET_SECONDS)
