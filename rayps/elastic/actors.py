"""The processes of a server group: a manager, and servers. Thin: what they do is `Manager`'s and `Host`'s."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from pathlib import Path
from typing import Any

import torch

from rayps.cluster import Cluster, LocalCluster, host_address, rendezvous, surrounding
from rayps.elastic.manager.manager import Manager
from rayps.elastic.manager.names import enlist, key_of, strike
from rayps.elastic.server.host import Host
from rayps.link import Listener

log = logging.getLogger(__name__)

ALONE_SECONDS = 60.0  # a server whose manager does not come back ends itself
LOOK_SECONDS = 1.0


class ManagerActor(Manager):
    """`Manager` as an actor, to be found by its group's name."""

    def __init__(
        self,
        name: str,
        servers: int = 2,
        replicas: int = 1,
        folder: str | Path | None = None,
        *,
        cluster: Cluster | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """`options` are further arguments of Manager: detached, cpus, silence, balance."""
        super().__init__(name, servers, replicas, folder, cluster=cluster, **(options or {}))
        self._name = name
        values = rendezvous()
        enlist(values, name)
        values.put(key_of(name), self.door()["address"].encode())

    def ping(self) -> int:
        """The process id: a sign of life."""
        return os.getpid()

    def stop(self) -> None:
        """See Manager."""
        strike(rendezvous(), self._name)
        super().stop()


class HostActor:
    """One server's process."""

    def __init__(self, server: str, group: str, secret: bytes, manager: str) -> None:
        torch.set_num_threads(1)  # several servers share a machine with the workers
        self._group, self._address = group, manager
        self._listener = Listener(server, secret, host=host_address())
        self._host = Host(server, self._listener, self._manager, secret, host=socket.gethostname())
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True, name=f"{server}-watch")
        self._watch.start()

    def ping(self) -> int:
        """The process id: a sign of life."""
        return os.getpid()

    def facts(self) -> dict[str, Any]:
        """As a heartbeat."""
        return self._host.facts()

    def close(self) -> None:
        """Stop serving."""
        self._closing.set()
        self._host.close()
        self._listener.close()

    def _manager(self) -> str:
        """Where the manager is now: another one may have begun in its place."""
        found = rendezvous().get(key_of(self._group))
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


__all__ = ["HostActor", "ManagerActor"]
