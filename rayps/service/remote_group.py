"""A server group of a job service, seen from Python."""

from __future__ import annotations

import time
import urllib.parse
from collections.abc import Callable
from typing import Any, Self

from rayps.core.errors import Conflict, NotFound, Unreachable


class RemoteGroup:
    """One server group of a service; `data` is what it last said: servers, spaces, moves, events, jobs.

    Made by `Client.start_servers` and `Client.servers`.
    """

    def __init__(self, call: Callable[..., Any], data: dict[str, Any]) -> None:
        self._call = call
        self.data = data

    def __repr__(self) -> str:
        return f"RemoteGroup({self.name!r}, {self.data.get('status')})"

    @property
    def name(self) -> str:
        """Its name: a job's `server_group`."""
        return str(self.data["name"])

    @property
    def _path(self) -> str:
        return f"/api/v1/server-groups/{urllib.parse.quote(self.name, safe='')}"

    def refresh(self) -> Self:
        """Ask how it stands. Raises NotFound once it is gone."""
        self.data = self._call("GET", self._path)
        return self

    def resize(self, servers: int) -> Self:
        """Grow or shrink it; segments move on while jobs go on.

        Raises:
            ConfigError: too few for its replicas, Conflict: it is resizing, or not up.
        """
        self.data = self._call("PATCH", self._path, json={"servers": servers})
        return self

    def drain(self, server: str) -> Self:
        """Move everything off one server, which then leaves. Raises NotFound, ConfigError, Conflict."""
        self.data = self._call("POST", f"{self._path}/drain", json={"server": server})
        return self

    def set_quota(self, space: str, *, bytes: int | None = None, operations: float | None = None) -> Self:
        """Set what a job's space may take in all, and requests a second; None = no limit. Raises NotFound, Conflict."""
        path = f"{self._path}/spaces/{urllib.parse.quote(space, safe='')}"
        self.data = self._call("PATCH", path, json={"bytes": bytes, "operations": operations})
        return self

    def drop(self, space: str) -> Self:
        """Forget a space whose job has ended, or a branch. Raises NotFound, Conflict while its job runs."""
        self.data = self._call("DELETE", f"{self._path}/spaces/{urllib.parse.quote(space, safe='')}")
        return self

    def stop(self, *, force: bool = False) -> Self:
        """End it, and all parameters on it. Raises Conflict while jobs use it, unless `force`."""
        self.data = self._call("DELETE", self._path, params={"force": "true"} if force else {})
        return self

    def wait(self, timeout: float = 300.0, pause: float = 0.5) -> Self:
        """Wait until every segment is held as wanted and nothing moves; after `stop`, until it is gone.

        Raises:
            TimeoutError: naming what it still waits for; wait longer with `timeout` (seconds).
            Conflict: it is being stopped by somebody else, NotFound: it is gone.
        """
        deadline = time.monotonic() + timeout
        ending = self.data.get("status") == "stopping"
        while True:
            try:
                self.refresh()
            except NotFound:
                if ending:
                    return self
                raise
            except Unreachable:
                if time.monotonic() >= deadline:
                    raise
            if self.data["status"] == "stopping" and not ending:
                raise Conflict(f"server group {self.name!r} is being stopped", status=409)
            if self.data["settled"] and not ending:
                return self
            if time.monotonic() >= deadline:
                what = "is still there" if ending else f"is {standing(self.data)}"
                raise TimeoutError(
                    f"server group {self.name!r} {what} after {timeout:g} s: wait longer with timeout=, "
                    "and look at its events"
                )
            time.sleep(pause)


def standing(data: dict[str, Any]) -> str:
    """Where a group stands, in a few words."""
    alive = data["alive"] if "alive" in data else sum(each.get("state") == "alive" for each in data["servers"])
    moves = data["moves"] if isinstance(data["moves"], int) else len(data["moves"])
    unseen = data["status"] == "unreachable" and not alive  # how many live is not known
    said = f"{data['status']}, {'' if unseen else f'{alive} of '}{data['wanted']} servers"
    if moves:
        said += f", {moves} {'move' if moves == 1 else 'moves'}"
    return f"{said}: {data['reason']}" if data.get("reason") else said
