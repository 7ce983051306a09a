"""The process of a group's manager. Thin: what it does is `Manager`'s."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rayps.cluster.local import Cluster, rendezvous
from rayps.ps.manager.manager import Manager
from rayps.ps.protocol.registry import enlist, key_of, strike


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
