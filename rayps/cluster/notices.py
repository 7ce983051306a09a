"""Notices: announcements that a host, or one process, will end.

A notice comes from Ray (a node that drains), from a process that received SIGTERM (`rayps.cluster.termination`), or
from outside, such as a cloud's agent that heard of a preemption and called the service. `Cluster.notices` returns all
of them. `Cluster.announce` adds one, which every process of the cluster then gets.

The driver of a job reads them, not its workers: `rayps.runtime.size.job_size.JobSize.decide` lets the workers of the
host leave in time.

A deadline is stored as a time since the epoch, as Ray stores it: if the clocks of two hosts differ, so do the seconds
that are left there.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rayps_client.values import Keywords

LINGER_SECONDS = 60.0  # seconds after its deadline at which a notice is dropped: what it announced did not happen
PREFIX = "notice/"  # of the keys under which announced notices are stored


@dataclass(frozen=True, slots=True)
class Notice:
    """An announcement that a host or a process will end, as of the moment of the call that returned it."""

    node: str  # the host's id in the cluster, a Ray node id; "" if it is not known, or in a cluster of threads
    host: str  # the host's name or IP address; "" if it is not known
    seconds: float | None  # seconds until the end, at least 0; None if no deadline was given
    reason: str
    pid: int | None = None  # the process of that host that will end; None: all of them

    @property
    def key(self) -> str:
        """The key under which the notice is stored. A later notice about the same host or process replaces it."""
        return f"{PREFIX}{self.node}/{self.host}/{'' if self.pid is None else self.pid}"

    def concerns(self, node: str, host: str, address: str, pid: int) -> bool:
        """Return whether a process will end: its node id (or ""), host name, address, and process id.

        The address is "IP:port" or that of a listener, "name@IP:port/socket".
        Node ids are compared if both are known; otherwise the notice's host must be the name or the IP address.
        """
        if self.pid is not None and self.pid != pid:
            return False
        if self.node and node:
            return self.node == node
        return bool(self.host) and self.host in (host, address.rpartition(":")[0].rpartition("@")[2].strip("[]"))

    def ends_host(self, node: str, names: Collection[str]) -> bool:
        """Return whether a whole host will end: its id in the cluster, and its names and addresses.

        Ids are compared if the notice has one; otherwise the notice's host must be one of the names.
        """
        if self.pid is not None:
            return False
        return self.node == node if self.node else self.host in names


@dataclass(frozen=True, slots=True)
class StoredNotice:
    """A notice with its deadline as a time."""

    notice: Notice  # its `seconds` is not used
    until: float | None  # the deadline, in seconds since the epoch; None if there is none

    @classmethod
    def of(cls, notice: Notice, now: float) -> StoredNotice:
        """Return the notice, which arrived at the time `now`, in seconds since the epoch."""
        return cls(notice, None if notice.seconds is None else now + notice.seconds)

    @classmethod
    def unpack(cls, data: bytes) -> StoredNotice:
        """Return the notice that `pack` wrote. Raises ValueError or KeyError if the data are not from there."""
        found: Keywords = json.loads(data)
        notice = Notice(found["node"], found["host"], None, found["reason"], found["pid"])
        return cls(notice, found["until"])

    def pack(self) -> bytes:
        """Return the notice as JSON."""
        one = self.notice
        fields = {"node": one.node, "host": one.host, "reason": one.reason, "pid": one.pid, "until": self.until}
        return json.dumps(fields).encode()

    def over(self, now: float) -> bool:
        """Return whether the deadline passed so long ago that the notice is dropped."""
        return self.until is not None and now > self.until + LINGER_SECONDS

    def at(self, now: float) -> Notice:
        """Return the notice with the seconds that are left at the time `now`."""
        one = self.notice
        seconds = None if self.until is None else max(0.0, self.until - now)
        return Notice(one.node, one.host, seconds, one.reason, one.pid)


def earliest(notices: tuple[Notice, ...]) -> Notice | None:
    """Return the notice that ends first; one without a deadline is the last. None if there is none."""
    return min(notices, key=lambda one: float("inf") if one.seconds is None else one.seconds, default=None)


def ending_hosts(notices: Collection[Notice], names: Mapping[str, Collection[str]]) -> frozenset[str]:
    """Return the ids of the hosts that will end. `names`: from the id of each host to its names and addresses."""
    return frozenset(node for node, own in names.items() if any(one.ends_host(node, own) for one in notices))
