"""A stand-in for a server group's manager, of the same methods, without any server; and a place of threads for it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rayps_client.errors import ConfigError, Conflict

from rayps.cluster.local import LocalCluster

MANAGER = "fake_manager:FakeManager"
DRIVER = "fake_manager:FakeDriver"


class ThreadPlace:
    """A cluster of threads as the service's place."""

    owned = True
    address = None

    def __init__(self) -> None:
        self.threads = LocalCluster(cpus=8)

    def capacity(self) -> dict[str, float]:
        return {"cpu": 8.0}

    def cluster(self) -> LocalCluster:
        return self.threads

    def renew_lease(self) -> None:
        pass

    def disconnect(self, *, end: bool) -> None:
        pass


class FakeDriver:
    """A job in its seventh round, which never gets further."""

    def __init__(self, spec: dict[str, Any], folder: str, attempt: int, failures: int) -> None:
        said = {"status": "RUNNING", "round": 7, "time": time.time() + 1}
        (Path(folder) / "progress.json").write_text(json.dumps(said))


class FakeManager:
    """Remembers its size in its folder, as the real one remembers all."""

    def __init__(self, name: str, servers: Any, replicas: int, folder: str, options: Any = None) -> None:
        self.name, self.replicas, self.record = name, replicas, Path(folder) / "fake_record.json"
        self.range, self.pinned = (list(servers), False) if isinstance(servers, tuple) else (None, False)
        servers = servers if self.range is None else self.range[0]
        self.servers = json.loads(self.record.read_text()) if self.record.exists() else servers
        self.resizing, self.options = False, options
        self.spaces: list[dict[str, Any]] = []
        self.stopped, self.pause = False, 0.0
        self._keep()

    def _keep(self) -> None:
        self.record.write_text(json.dumps(self.servers))

    def be_slow(self, seconds: float) -> None:
        self.pause = seconds

    def facts(self) -> dict[str, Any]:
        servers = [
            {
                "name": f"server-{i}",
                "address": f"tcp:127.0.0.1:{i}",
                "host": "node-a",
                "pid": 100 + i,
                "state": "alive",
                "bytes": 1000.0,
                "rows": 0,
                "operations_s": 2.5,
                "cpu": 0.1,
                "seen_s": 0.1,
                "primaries": 1,
                "copies": 1,
            }
            for i in range(self.servers)
        ]
        return {
            "name": self.name,
            "status": "resizing" if self.resizing else "ready",
            "wanted": self.servers,
            "replicas": self.replicas,
            "range": self.range,
            "pinned": self.pinned,
            "since": time.time(),
            "servers": servers,
            "spaces": self.spaces,
            "moves": [],
            "counts": {"moves": 0},
            "events": [{"time": 1.0, "kind": "started", "message": "here"}],
        }

    def open_space(self, name: str) -> None:
        self.spaces.append(
            {
                "name": name,
                "number": 1,
                "workers": 2,
                "version": 1,
                "bytes": 800,
                "rows": 0,
                "operations_s": 5.0,
                "rejected": 0,
                "quota": {"bytes": 10_000, "operations": None},
                "branch_of": None,
                "tables": [],
                "segments": [
                    {
                        "index": i,
                        "table": None,
                        "primary": "server-0",
                        "copies": ["server-1"],
                        "generation": 1,
                        "bytes": 400,
                        "rows": 0,
                        "operations_s": 2.5,
                        "state": "ready",
                    }
                    for i in range(2)
                ],
            }
        )

    def resize(self, servers: Any) -> None:
        time.sleep(self.pause)
        if isinstance(servers, tuple):
            self.range, self.pinned = list(servers), False
            servers = max(servers[0], min(servers[1], self.servers))
        else:
            self.pinned = self.range is not None
        if self.resizing:
            raise Conflict("the group is resizing already: wait until it is ready")
        if servers < self.replicas + 1:
            raise ConfigError("too few", field="servers")
        self.servers = servers
        self._keep()

    def drain(self, server: str) -> None:
        self.resize(self.servers - 1)

    def set_quota(self, name: str, quota: dict[str, Any]) -> None:
        next(space for space in self.spaces if space["name"] == name)["quota"] = quota

    def drop(self, name: str) -> None:
        self.spaces = [space for space in self.spaces if space["name"] != name]

    def stop(self) -> None:
        self.stopped = True
        self.record.unlink(missing_ok=True)

    def hang(self) -> None:
        self.resizing = True
