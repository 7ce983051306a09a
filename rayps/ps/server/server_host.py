"""The actor of a group on one host: it starts and ends the servers there, through a template that has imported torch.

One of these actors runs on each host that has servers of the group. It reserves nothing; the CPUs of each server are
reserved under the server's name (`name_reservation`) before the server starts, and released when its process ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any

from rayps_client.errors import ClusterError, RaypsError

from rayps.cluster.local import LocalCluster, host_address, rendezvous, surrounding
from rayps.cluster.notices import Notice
from rayps.cluster.termination import REASON
from rayps.ps.protocol.segment_map import make_address_key, manager_actor
from rayps.ps.server.server_actor import ALONE_SECONDS, LOOK_SECONDS
from rayps.ps.server.server_template import GENTLY, ServerOrder

log = logging.getLogger(__name__)

START_SECONDS = 90.0  # seconds in which a template must be ready and fork a server
END_SECONDS = 5.0  # seconds in which a template must end after its input has ended


def name_host_actor(group: str, node: str) -> str:
    """Return the name of the actor that runs a group's servers on a host, which has the id `node`."""
    return f"rayps-servers-at-{group}-{node}"


def name_reservation(group: str, server: str) -> str:
    """Return the name under which the CPUs of a server are reserved."""
    return f"{group}/{server}"


class TemplateProcess:
    """A running template, and the servers that it has forked.

    `ended(server)` is called when a server's process has ended, and `ending(process id, seconds)` when a server got
    SIGTERM and will end. The first `start` waits until the template has imported what servers need.
    """

    def __init__(
        self, ended: Callable[[str], None], ending: Callable[[int, float], None], *, gently: bool = False
    ) -> None:
        self._ended, self._ending, self._gone = ended, ending, False
        self._pids: dict[str, int] = {}
        self._changed = threading.Condition()
        path = os.pathsep.join(folder for folder in sys.path if folder)
        command = [sys.executable, "-m", "rayps.ps.server.server_template", *([GENTLY] if gently else [])]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
        )
        assert self._process.stdout is not None
        reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True, name="server-template")
        reader.start()

    @property
    def alive(self) -> bool:
        """Whether the template can fork servers."""
        return not self._gone

    @property
    def servers(self) -> dict[str, int]:
        """The living servers, each with its process id."""
        with self._changed:
            return dict(self._pids)

    def start(self, order: ServerOrder) -> int:
        """Fork a server, and return its process id.

        Raises ClusterError: the template has ended, or did not fork the server within `START_SECONDS`.
        """
        self.send({"start": order.to_json()})
        with self._changed:
            self._changed.wait_for(lambda: order.server in self._pids or self._gone, START_SECONDS)
            found = self._pids.get(order.server)
        if found is None:
            how = "has ended" if self._gone else f"did not fork it within {START_SECONDS:g} s"
            raise ClusterError(f"{order.server} was not started: the process that forks servers on this host {how}")
        return found

    def send(self, command: dict[str, Any]) -> None:
        """Send a command to the template, if it lives."""
        assert self._process.stdin is not None
        with self._changed, contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Kill the servers, and end the template."""
        assert self._process.stdin is not None
        with self._changed, contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # it imports: there are no servers yet
            self._process.kill()
            self._process.wait()

    def _read(self, replies: IO[bytes]) -> None:
        for line in replies:
            reply = json.loads(line)
            if "started" in reply:
                with self._changed:
                    self._pids[reply["started"]] = reply["pid"]
                    self._changed.notify_all()
            elif "ended" in reply:
                self._forget(reply["ended"])
            elif "ending" in reply:
                self._ending(reply["pid"], reply["seconds"])
        with self._changed:
            self._gone = True
            self._changed.notify_all()
        for server in self.servers:  # they end when the template does
            self._forget(server)
        replies.close()
        self._process.wait()

    def _forget(self, server: str) -> None:
        with self._changed:
            self._pids.pop(server, None)
        self._ended(server)


class ServerHost:
    """The actor that runs the servers of the group `group` on one host, which has the id `node` in the cluster."""

    def __init__(self, group: str, node: str, *, gently: bool = False) -> None:
        """Start the template. `gently`: it imports at the lowest priority, so that workers keep the cores."""
        self._group, self._node, self._gently = group, node, gently
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._template = self._start_template()
        self._manager, self._busy = "", time.monotonic()
        self._watch = threading.Thread(target=self._watch_manager, daemon=True, name=f"{group}-host")
        self._watch.start()

    def start(self, server: str, secret: bytes, manager: str) -> int:
        """Start a server of the group whose manager is at the address `manager`; return the server's process id.

        Raises ClusterError if the server could not be started.
        """
        with self._lock:
            if not self._template.alive:
                self._template = self._start_template()
            template, self._manager, self._busy = self._template, manager, time.monotonic()
        return template.start(
            ServerOrder(server, secret.hex(), manager, host_address(), socket.gethostname(), self._node)
        )

    def end(self, server: str) -> None:
        """Kill a server; do nothing if it has ended."""
        self._template.send({"end": server})

    def servers(self) -> dict[str, int]:
        """Return the living servers of this host, each with its process id."""
        return self._template.servers

    def ping(self) -> int:
        """Return the process id of this actor."""
        return os.getpid()

    def close(self) -> None:
        """Kill all servers of this host."""
        self._closing.set()
        self._template.close()

    def _start_template(self) -> TemplateProcess:
        return TemplateProcess(self._release, self._announce, gently=self._gently)

    def _announce(self, pid: int, seconds: float) -> None:
        """Announce that a server will end, so that the manager moves its segments."""
        with contextlib.suppress(RaypsError, OSError, RuntimeError):
            surrounding().announce(Notice(self._node, socket.gethostname(), seconds, REASON, pid))

    def _release(self, server: str) -> None:
        """Release the CPUs of a server whose process has ended."""
        with contextlib.suppress(RaypsError, OSError, RuntimeError):
            found = surrounding().reservation(name_reservation(self._group, server))
            if found is not None:
                found.release()

    def _watch_manager(self) -> None:
        """Tell the servers where the manager is after a restart; end when there is neither a manager nor a server."""
        while not self._closing.wait(LOOK_SECONDS):
            found = rendezvous().get(make_address_key(self._group))
            if found is not None and found.decode() != self._manager:
                self._manager = found.decode()
                self._template.send({"manager": self._manager})
            if self._template.servers:
                self._busy = time.monotonic()
            elif time.monotonic() - self._busy > ALONE_SECONDS:
                self._busy = time.monotonic()
                if surrounding().find(manager_actor(self._group)) is None:
                    log.warning("server group %s has no manager and no server here: this process ends", self._group)
                    self.close()
                    if not isinstance(surrounding(), LocalCluster):
                        os._exit(0)
                    return
