"""The client of one server group of a job service."""

from __future__ import annotations

import time
import urllib.parse
from collections.abc import Callable
from typing import Any, Self

from rayps_client.errors import ConfigError, Conflict, NotFound, Unreachable

from rayps.service.rest_answers import GroupAnswer


class RemoteGroup:
    """One server group of a service; `Client.start_servers` and `Client.servers` return it.

    `data` is the service's newest answer about the group: servers, spaces, moves, events, jobs.
    """

    def __init__(self, call: Callable[..., Any], data: GroupAnswer) -> None:
        self._call = call
        self.data = data

    def __repr__(self) -> str:
        return f"RemoteGroup({self.name!r}, {self.data.get('status')})"

    @property
    def name(self) -> str:
        """The group's name, which a job gives as `server_group`."""
        return str(self.data["name"])

    @property
    def _path(self) -> str:
        return f"/api/v1/server-groups/{urllib.parse.quote(self.name, safe='')}"

    def refresh(self) -> Self:
        """Read the service's newest answer into `data`. Raises NotFound if the group has ended."""
        self.data = self._call("GET", self._path)
        return self

    def resize(self, servers: int | tuple[int, int]) -> Self:
        """Grow or shrink the group. Jobs continue while segments move.

        If `servers` is a pair, the least and the most, the load chooses the number from now on. A number stays until
        `resize` is called with a pair.

        Raises:
            ConfigError: too few servers for the replicas.
            Conflict: the group is resizing already, or is not ready.
        """
        self.data = self._call("PATCH", self._path, json=make_size_fields(servers))
        return self

    def drain(self, server: str) -> Self:
        """Migrate all segments from one server to the others, then stop this server.

        Raises:
            NotFound: there is no such group or server.
            ConfigError: too few servers would be left for the replicas.
            Conflict: the group is resizing already, or is not ready.
        """
        self.data = self._call("POST", f"{self._path}/drain", json={"server": server})
        return self

    def set_quota(self, space: str, *, bytes: int | None = None, operations: float | None = None) -> Self:
        """Limit a space to `bytes` of data and `operations` per second; None means no limit.

        Raises:
            NotFound: there is no such group or space.
            Conflict: the group is not ready.
        """
        path = f"{self._path}/spaces/{urllib.parse.quote(space, safe='')}"
        self.data = self._call("PATCH", path, json={"bytes": bytes, "operations": operations})
        return self

    def drop(self, space: str) -> Self:
        """Delete a space whose job has ended, or a branch.

        Raises:
            NotFound: there is no such group or space.
            Conflict: the job of the space has not ended, or the group is not ready.
        """
        self.data = self._call("DELETE", f"{self._path}/spaces/{urllib.parse.quote(space, safe='')}")
        return self

    def stop(self, *, force: bool = False) -> Self:
        """Stop the group. Its parameters are lost. Raises Conflict if jobs use the group and `force` is False."""
        self.data = self._call("DELETE", self._path, params={"force": "true"} if force else {})
        return self

    def wait(self, timeout: float = 300.0, pause: float = 0.5) -> Self:
        """Wait until all servers and backups are ready and no segment migrates; after `stop`, until the group ends.

        Raises:
            TimeoutError: the group was not ready, or had not ended, within `timeout` seconds.
            Conflict: another client is stopping the group.
            NotFound: the group has ended.
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
                what = "has not ended" if ending else f"is {summarize(self.data)}"
                raise TimeoutError(
                    f"server group {self.name!r} {what} after {timeout:g} s: give a larger timeout=, or read the events"
                )
            time.sleep(pause)


def make_size_fields(servers: int | tuple[int, int]) -> dict[str, Any]:
    """Return the fields of a request for a number of servers, or for the range of a pair."""
    if isinstance(servers, (tuple, list)):
        if len(servers) != 2:
            raise ConfigError(
                f"servers is {servers!r}: give a number, or the least and the most, such as (2, 8)", field="servers"
            )
        return {"servers": servers[0], "most": servers[1]}
    return {"servers": servers}


def summarize(data: GroupAnswer) -> str:
    """Describe a group's status in one line."""
    alive = sum(each.get("state") == "alive" for each in data["servers"])
    moves = len(data["moves"])
    unseen = data["status"] == "unreachable" and not alive  # the number of living servers is unknown
    text = f"{data['status']}, {'' if unseen else f'{alive} of '}{data['wanted']} servers"
    if (found := data.get("range")) is not None:
        text += f" ({'fixed by a call' if data.get('pinned') else f'{found[0]} to {found[1]} by load'})"
    if moves:
        text += f", {moves} {'move' if moves == 1 else 'moves'}"
    return f"{text}: {data['reason']}" if data.get("reason") else text
