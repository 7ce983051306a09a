"""Decide how many servers a group has, from their load: pure functions from facts to a decision.

A server is *busy* for the share of time in which its loop serves requests. If the mean of these shares stays above
`high`, servers are added until it would be `goal`. If it stays so low that it would be at most `low` with one server
less, one server is removed. `low` is below `goal`, and `goal` below `high`, so under a constant load no change is
followed by one in the other direction. Servers are also added while a host has too little memory left and another host
has room. Horizontal pod autoscaling computes the number in the same way: desired = ceil(present * load / goal)
(Kubernetes documentation, "Horizontal Pod Autoscaling", algorithm details).

A growth that did not pay is not continued: if neither the rate of requests rose nor the busy share fell, no server is
added until the rate has changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rayps_client.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ScaleRule:
    """The rule by which a group has from `least` to `most` servers.

    `high`, `goal`, `low`: busy shares, see the module. `memory`: the share of a host's memory in use above which
    servers are added. `patience` and `calm`: seconds for which the load must be high, or low, before a change.
    `cooldown`: least seconds between two changes. `every`: seconds between two checks.

    Raises ConfigError: `least` is below 1 or above `most`, or the shares are not in order.
    """

    least: int
    most: int
    high: float = 0.7
    goal: float = 0.5
    low: float = 0.35
    memory: float = 0.85
    patience: float = 5.0
    calm: float = 60.0
    cooldown: float = 30.0
    every: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError(
                f"servers is {self.least}..{self.most}: give the least number and then the most, such as 2..8",
                field="servers",
            )
        if not 0 < self.low < self.goal < self.high <= 1:
            raise ConfigError(
                f"the rule has low={self.low:g}, goal={self.goal:g} and high={self.high:g}: give 0 < low < goal < high "
                "<= 1",
                field="scale",
            )


@dataclass(frozen=True, slots=True)
class ServerUse:
    """The load of one server."""

    busy: float  # share of time in which its loop serves requests
    touches: float  # pushes and pulls of segments of parameters, and rows of tables, per second
    bytes: int  # bytes of its segments, as primary and as backup
    memory: float = 0.0  # share of the host's memory in use
    host_bytes: int = 0  # bytes of the host's memory; 0 if unknown


@dataclass(frozen=True, slots=True)
class ScaleFacts:
    """The facts on which `decide_scale` decides."""

    servers: tuple[ServerUse, ...]  # the alive ones
    wanted: int  # wanted number of servers
    replicas: int
    room: int  # how many more servers the cluster's hosts have room for
    settled: bool = True  # no server starts or leaves, and no segment moves because of a resize
    high_for: float = 0.0  # seconds for which `is_high` has been true
    low_for: float = 0.0  # seconds for which `is_low` has been true
    since_change: float = math.inf  # seconds since the number was last changed
    paid: bool = True  # whether the last growth paid, or the load has changed since


@dataclass(frozen=True, slots=True)
class SetServers:
    """The decision: let the group have this many servers."""

    servers: int
    reason: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What a group of `servers` servers did: the mean busy share, and touches per second of all servers together."""

    servers: int
    busy: float
    touches: float

    @classmethod
    def of(cls, servers: Sequence[ServerUse]) -> Measured:
        """Return the measurement of these servers."""
        return cls(len(servers), average_busy(servers), sum(each.touches for each in servers))


def average_busy(servers: Sequence[ServerUse]) -> float:
    """Return the mean busy share; 0 without servers."""
    return sum(each.busy for each in servers) / len(servers) if servers else 0.0


def is_high(rule: ScaleRule, servers: Sequence[ServerUse]) -> bool:
    """Return whether the load asks for more servers."""
    return average_busy(servers) > rule.high or _find_fullest(servers) > rule.memory


def is_low(rule: ScaleRule, servers: Sequence[ServerUse]) -> bool:
    """Return whether one server less would still have little load, and memory enough."""
    rest = len(servers) - 1
    if rest < 1:
        return False
    return average_busy(servers) * len(servers) / rest <= rule.low and _find_fullest(servers, rest) <= 0.9 * rule.memory


def _find_fullest(servers: Sequence[ServerUse], count: int | None = None) -> float:
    """Return the share of memory in use on the fullest host, if the bytes were spread over `count` servers."""
    total = sum(each.bytes for each in servers)
    found = 0.0
    for each in servers:
        more = 0.0 if count is None or not each.host_bytes else (total / count - each.bytes) / each.host_bytes
        found = max(found, each.memory + max(0.0, more))
    return found


def paid(before: Measured, now: Measured) -> bool:
    """Return whether a growth paid: the rate rose, or the busy share fell, by at least a tenth."""
    return now.touches >= 1.1 * before.touches or now.busy <= 0.9 * before.busy


def changed(before: Measured, now: Measured) -> bool:
    """Return whether the load differs so much from `before` that a growth may pay again."""
    return not 0.8 * before.touches <= now.touches <= 1.25 * before.touches


def decide_scale(rule: ScaleRule, facts: ScaleFacts) -> SetServers | None:
    """Return the number of servers that the group is to have from now on, or None if it stays."""
    now, least = facts.wanted, max(rule.least, facts.replicas + 1)
    if not facts.settled:
        return None
    if now < least or now > rule.most:
        target = min(max(now, least), max(least, rule.most))
        return None if target == now else SetServers(target, f"the group has {least} to {rule.most} servers")
    if facts.since_change < rule.cooldown:
        return None
    if facts.high_for >= rule.patience and is_high(rule, facts.servers):
        return _grow(rule, facts)
    if facts.low_for >= rule.calm and is_low(rule, facts.servers) and now > least:
        share = average_busy(facts.servers)
        return SetServers(
            now - 1, f"the servers were busy for {share:.0%} of the last {facts.low_for:.0f} s, and one less suffices"
        )
    return None


def _grow(rule: ScaleRule, facts: ScaleFacts) -> SetServers | None:
    now, share, full = facts.wanted, average_busy(facts.servers), _find_fullest(facts.servers)
    if share > rule.high:
        if not facts.paid:
            return None
        target = math.ceil(share * len(facts.servers) / rule.goal - 1e-9)
        why = f"the servers are busy for {share:.0%} of the time, more than {rule.high:.0%}"
    else:
        target = now + 1
        why = f"{full:.0%} of a host's memory is in use, more than {rule.memory:.0%}"
    target = min(max(target, now + 1), 2 * now, rule.most, now + facts.room)
    return SetServers(target, why) if target > now else None


class ServerScaler:
    """Follows a group's load over time, and decides by `decide_scale`."""

    def __init__(self) -> None:
        self._checked = self._changed = -math.inf
        self._high_since: float | None = None
        self._low_since: float | None = None
        self._grew_from: Measured | None = None  # before the last growth, until its gain is known
        self._unpaid: Measured | None = None  # the load at which a growth did not pay

    def due(self, rule: ScaleRule, now: float) -> bool:
        """Return whether the load must be checked now. After True, the next check is due `every` seconds later."""
        if now - self._checked < rule.every:
            return False
        self._checked = now
        return True

    def resized(self, now: float) -> None:
        """Record that the number of servers has changed for a reason other than the load: a cooldown begins."""
        self._changed, self._high_since, self._low_since, self._grew_from = now, None, None, None

    def decide(self, rule: ScaleRule, facts: ScaleFacts, now: float) -> SetServers | None:
        """Return the new number of servers, or None. `facts` need not have the times and `paid`, which are set here."""
        if not facts.settled:
            self._high_since = self._low_since = None
            self._changed = max(self._changed, now - rule.cooldown / 2)  # half a cooldown begins when it is settled
            return None
        self._high_since = _find_since(self._high_since, is_high(rule, facts.servers), now)
        self._low_since = _find_since(self._low_since, is_low(rule, facts.servers), now)
        measured = Measured.of(facts.servers)
        if self._grew_from is not None and now - self._changed >= rule.cooldown:
            self._unpaid = None if paid(self._grew_from, measured) else measured
            self._grew_from = None
        if self._unpaid is not None and changed(self._unpaid, measured):
            self._unpaid = None
        timed = ScaleFacts(
            facts.servers,
            facts.wanted,
            facts.replicas,
            facts.room,
            facts.settled,
            0.0 if self._high_since is None else now - self._high_since,
            0.0 if self._low_since is None else now - self._low_since,
            now - self._changed,
            self._unpaid is None,
        )
        found = decide_scale(rule, timed)
        if found is not None:
            self.resized(now)
            self._grew_from = measured if found.servers > facts.wanted else None
        return found


def _find_since(since: float | None, true: bool, now: float) -> float | None:
    """Return since when a condition is true, or None if it is not."""
    return None if not true else now if since is None else since
