"""Decide what the manager of a server group does next: pure functions from facts to decisions.

`decide` compares the present assignment of segments to servers with the wanted one, and needs no history. So a manager
that restarts from its record continues where the last one stopped. The manager applies decisions until `decide` returns
none. Servers need time to carry out some of the decisions. They report their progress, and `apply_report` changes the
assignment. A segment is moved to a server by making a backup there, promoting the backup, and dropping the copy on the
old server. A segment is recovered by promoting a backup and making a new one.

`Rebalancer` decides which segments move because of load. Segments are placed by consistent hashing (the *hash ring*),
which ignores load: if the ids of a table follow Zipf's law, a few segments are hot. Segments of a server that stays hot
are moved, one after the other, to the least loaded server, until the hot server is cool (`Balance`). The segment that
moves is the one whose move makes the larger of the two servers' loads smallest. A segment that alone has more load than
the mean load of a server stays, and other segments leave its server. Below a minimum load no segment moves. A segment
that has moved stays for a while, so that its load is measured on the new server before it moves again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from itertools import groupby

from rayps_client.errors import ConfigError

from rayps.core.partition import place_with_backups
from rayps.ps.protocol.messages import Event, Role

BOUND = 1.25  # a server gets at most this times the mean number of a space's segments

SegmentId = tuple[int, int]  # number of the space, index of the segment


class ServerState(StrEnum):
    """The state of a server, as its manager sees it."""

    ALIVE = "alive"
    LEAVING = "leaving"  # alive; its segments are moved away, then the server ends
    SILENT = "silent"  # no heartbeat; its segments' backups take over, and a segment without a backup waits for it
    AWAY = "away"  # not connected since the manager restarted
    DEAD = "dead"


UP = frozenset({ServerState.ALIVE, ServerState.LEAVING})


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The facts about a server that decisions need."""

    name: str
    host: str = ""  # the name of the machine
    state: ServerState = ServerState.ALIVE

    @property
    def stays(self) -> bool:
        """Whether segments may be placed on this server.

        This includes a server that is AWAY, which will connect again: a restart of the manager moves no segment.
        """
        return self.state in (ServerState.ALIVE, ServerState.AWAY)


@dataclass(frozen=True, slots=True)
class SegmentAssignment:
    """The servers of one segment. Backups in `synced` have every acknowledged push; other backups do not yet."""

    space: int
    index: int
    key: str  # the segment's place on the hash ring
    primary: str | None = None  # None if the segment is not placed yet
    generation: int = 0
    copies: tuple[str, ...] = ()
    synced: frozenset[str] = frozenset()
    started: bool = False  # a primary has reported READY since the segment was placed
    ready: bool = False  # the primary of this generation has reported READY
    successor: str | None = None  # the server that the primary hands over to
    handed: bool = False  # the primary has reported HANDED, when all its backups had applied all changes
    lost: bool = False  # the segment was placed empty after its last holder died, and was not loaded since
    parent: SegmentId | None = None  # the segment with whose values this one begins, if it belongs to a branch

    @property
    def id(self) -> SegmentId:
        """The number of the space and the index of the segment."""
        return self.space, self.index

    @property
    def unsynced(self) -> tuple[str, ...]:
        """The backups that do not have every acknowledged push yet."""
        return tuple(copy for copy in self.copies if copy not in self.synced)

    @property
    def holders(self) -> tuple[str, ...]:
        """The primary and all backups."""
        return self.copies if self.primary is None else (self.primary, *self.copies)

    def role(self, server: str) -> Role:
        """Return the role of a server for this segment."""
        if server == self.primary:
            return Role.LEAVING if self.successor is not None else Role.PRIMARY
        return Role.COPY if server in self.copies else Role.NONE


def _drop_copy(segment: SegmentAssignment, server: str) -> SegmentAssignment:
    copies = tuple(copy for copy in segment.copies if copy != server)
    return replace(segment, copies=copies, synced=segment.synced - {server})


def apply_report(
    segment: SegmentAssignment, reporter: str, event: str, generation: int, name: str
) -> SegmentAssignment:
    """Return the assignment after a server's report, or the same object if the report changes nothing.

    A report about another generation of the segment, or from a server without the role that the report presumes,
    changes nothing. `name`: the backup that the report is about.
    """
    if generation != segment.generation:
        return segment
    if event == Event.ASKED:  # sent by a backup that needs a state, or by a primary that has none to begin with
        if reporter == segment.primary and not segment.started:
            return replace(segment, primary=None)
        return _drop_copy(segment, reporter) if reporter in segment.copies else segment
    if reporter != segment.primary:
        return segment
    if event == Event.READY:
        return segment if segment.ready else replace(segment, ready=True, started=True)
    if event == Event.SYNCED and name in segment.unsynced:
        return replace(segment, synced=segment.synced | {name})
    if event == Event.HANDED and segment.successor is not None:
        return replace(segment, handed=True)
    if event == Event.COPY_LOST and name in segment.copies:
        return _drop_copy(segment, name)
    return segment


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """The facts about a group on which the manager decides."""

    servers: tuple[ServerFacts, ...]
    segments: tuple[SegmentAssignment, ...]  # the segments of a space are adjacent
    wanted: int  # wanted number of servers
    replicas: int  # wanted backups of each segment; fewer if there are too few servers
    starting: int = 0  # number of servers that were ordered and have not registered yet
    gathering: bool = False  # more servers register soon; fully copied segments wait for this, so that each moves once
    placed_by_load: Mapping[SegmentId, str] = field(default_factory=dict)  # segment moved because of load -> its server
    failed_copies: frozenset[tuple[str, str]] = frozenset()  # (primary, server): copying to this server failed recently
    # (segment, server) whose order to drop the segment is on its way: the server would take it for one about a new copy
    dropping: frozenset[tuple[SegmentId, str]] = frozenset()
    moves: int = 2  # most segments that a server moves at a time; few, so that training continues
    heals: int = 4  # most missing backups that a server sends or receives at a time


@dataclass(frozen=True, slots=True)
class PlaceSegment:
    """The decision: start an empty segment on `server`. `lost`: the segment had values, and no server has them."""

    segment: SegmentId
    server: str
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Promote:
    """The decision: start a new generation of a segment, on a backup in sync or again on the present primary."""

    segment: SegmentId
    server: str
    copies: tuple[str, ...]
    # "died": the old primary died; "moved": the segment was handed over; "back": the successor is gone, and the primary
    # stays
    reason: str


@dataclass(frozen=True, slots=True)
class StartCopy:
    """The decision: let the primary copy the segment to `server`."""

    segment: SegmentId
    server: str


@dataclass(frozen=True, slots=True)
class HandOver:
    """The decision: the primary refuses requests, and sends all backups the last changes. `server` is promoted next."""

    segment: SegmentId
    server: str


@dataclass(frozen=True, slots=True)
class DropCopy:
    """The decision: remove a backup that is gone, or not needed."""

    segment: SegmentId
    server: str


@dataclass(frozen=True, slots=True)
class StartServers:
    """The decision: start more server processes."""

    count: int


@dataclass(frozen=True, slots=True)
class LeaveServer:
    """The decision: move all segments of a server to others, because more servers than wanted are alive."""

    server: str


@dataclass(frozen=True, slots=True)
class RetireServer:
    """The decision: end a server that holds nothing, or forget a dead server that no segment refers to."""

    server: str


SegmentDecision = PlaceSegment | Promote | StartCopy | HandOver | DropCopy
Decision = SegmentDecision | StartServers | LeaveServer | RetireServer


def apply(segment: SegmentAssignment, decision: SegmentDecision) -> SegmentAssignment:
    """Return the assignment after a decision about it.

    After a promotion the named backups count as in sync: the new primary answers no request before they have its state.
    """
    next_one = replace(segment, generation=segment.generation + 1, ready=False, successor=None, handed=False)
    match decision:
        case PlaceSegment(_, server, lost):
            lost = lost or segment.lost
            return replace(next_one, primary=server, copies=(), synced=frozenset(), started=False, lost=lost)
        case Promote(_, server, copies, _):
            return replace(next_one, primary=server, copies=copies, synced=frozenset(copies))
        case StartCopy(_, server):
            return replace(segment, copies=(*segment.copies, server))
        case DropCopy(_, server):
            return _drop_copy(segment, server)
        case HandOver(_, server):
            return replace(segment, successor=server, handed=False)


def decide(facts: GroupFacts) -> list[Decision]:
    """Return the present decisions, at most one for each segment; [] if the group is settled, or waits for reports."""
    return [*_decide_about_servers(facts), *_SegmentDecisions(facts).decide()]


def settled(facts: GroupFacts) -> bool:
    """Return whether each segment and its backups are where they belong, and the wanted number of servers is alive."""
    staying = sum(server.state == ServerState.ALIVE for server in facts.servers)
    return (
        not decide(replace(facts, failed_copies=frozenset(), dropping=frozenset(), gathering=False))
        and staying == len(facts.servers) == facts.wanted
        and all(each.ready and not each.unsynced and each.successor is None for each in facts.segments)
    )


def choose_targets(facts: GroupFacts) -> dict[SegmentId, tuple[str, ...]]:
    """Return for each segment the servers on which it belongs, the primary first; {} if no server stays."""
    staying = tuple((server.name, server.host) for server in facts.servers if server.stays)
    found: dict[SegmentId, tuple[str, ...]] = {}
    if not staying:
        return found
    names = {name for name, _ in staying}
    for _, group in groupby(facts.segments, lambda segment: segment.space):
        segments = list(group)
        places = _choose_spots(tuple(segment.key for segment in segments), staying, facts.replicas + 1)
        for segment, place in zip(segments, places, strict=True):
            first = facts.placed_by_load.get(segment.id)
            if first in names:
                place = (first, *(name for name in place if name != first))
            found[segment.id] = place[: facts.replicas + 1]
    return found


@lru_cache(256)
def _choose_spots(keys: tuple[str, ...], servers: tuple[tuple[str, str], ...], replicas: int) -> list[tuple[str, ...]]:
    names, hosts = [name for name, _ in servers], [host for _, host in servers]
    bound = BOUND if len(keys) > len(names) else 1.0  # if there are enough servers, each has one segment
    return [
        tuple(names[i] for i in found) for found in place_with_backups(keys, names, replicas, hosts=hosts, bound=bound)
    ]


def _decide_about_servers(facts: GroupFacts) -> list[Decision]:
    used = {name for segment in facts.segments for name in (*segment.holders, segment.successor)}
    found: list[Decision] = []
    alive = [server for server in facts.servers if server.state == ServerState.ALIVE]
    expected = sum(server.state in (ServerState.SILENT, ServerState.AWAY) for server in facts.servers)
    missing = facts.wanted - len(alive) - expected - facts.starting
    if missing > 0:
        found.append(StartServers(missing))
    found += [
        LeaveServer(server.name) for server in alive[facts.wanted :]
    ]  # the servers that were started last; silent servers are not counted
    return found + [
        RetireServer(server.name)
        for server in facts.servers
        if server.state in (ServerState.LEAVING, ServerState.DEAD) and server.name not in used
    ]


class _SegmentDecisions:
    """The computation of the decisions about all segments, for one set of facts."""

    def __init__(self, facts: GroupFacts) -> None:
        self._facts = facts
        self._states = {server.name: server.state for server in facts.servers}
        self._targets = choose_targets(facts)
        self._segments = {segment.id: segment for segment in facts.segments}
        self._busy: Counter[str] = Counter()  # server -> number of segments that it sends, receives or hands over
        self._primaries: Counter[str] = Counter()  # server -> number of primaries, so that promotions are spread
        for segment in facts.segments:
            if segment.primary is not None:
                self._primaries[segment.primary] += 1
                if segment.unsynced or segment.successor is not None:
                    self._busy.update((segment.primary, *segment.unsynced))

    def decide(self) -> list[Decision]:
        found: list[Decision] = []
        later: list[tuple[bool, SegmentAssignment]] = []
        for segment in self._facts.segments:
            decision = self._decide_urgent(segment)
            if decision is not None:
                found.append(decision)
            elif self._can_move(segment):
                later.append((self._is_fully_copied(segment), segment))
        for copied, segment in sorted(later, key=lambda item: item[0]):  # missing backups first
            decision = self._decide_copy_or_move(segment, copied)
            if decision is not None:
                found.append(decision)
        return found

    # ---- decisions that cannot wait

    def _decide_urgent(self, segment: SegmentAssignment) -> SegmentDecision | None:
        primary, successor = segment.primary, segment.successor
        if primary is None or (not segment.started and self._is_gone(primary)):
            return self._place(segment)
        if self._is_gone(primary):
            return self._recover(segment)
        if successor is not None and (successor not in segment.synced or self._is_gone(successor)):
            return Promote(segment.id, primary, self._list_in_sync(segment), "back") if self._is_up(primary) else None
        for copy in segment.copies:
            if self._is_gone(copy):
                return DropCopy(segment.id, copy)
        if successor is not None and segment.handed and self._is_up(successor):
            # the old primary has all changes too, so it becomes a backup if the segment belongs there
            stays = primary in self._targets.get(segment.id, ()) and self._is_up(primary)
            others = tuple(copy for copy in self._list_in_sync(segment) if copy != successor)
            return Promote(segment.id, successor, (*others, primary) if stays else others, "moved")
        return None

    def _place(self, segment: SegmentAssignment) -> SegmentDecision | None:
        if segment.parent not in self._segments:
            return self._place_empty(segment, lost=segment.parent is not None)  # the parent's space was closed
        parent = self._segments[segment.parent]  # a branch begins on its parent's server
        usable = (
            parent.ready and parent.successor is None and parent.primary is not None and self._is_up(parent.primary)
        )
        return PlaceSegment(segment.id, str(parent.primary)) if usable else None

    def _recover(self, segment: SegmentAssignment) -> SegmentDecision | None:
        candidates = [copy for copy in self._list_in_sync(segment) if self._is_up(copy)]
        if candidates:
            first = self._targets.get(segment.id, ("",))[0]
            best = min(candidates, key=lambda name: (name != first, self._primaries[name], name))
            self._primaries[best] += 1
            return Promote(segment.id, best, tuple(name for name in candidates if name != best), "died")
        may_return = (ServerState.AWAY, ServerState.SILENT)
        if self._find_state(str(segment.primary)) in may_return or any(
            self._find_state(c) in may_return for c in segment.synced
        ):
            return None
        return self._place_empty(segment, lost=True)

    def _place_empty(self, segment: SegmentAssignment, *, lost: bool) -> SegmentDecision | None:
        place = [name for name in self._targets.get(segment.id, ()) if self._is_up(name)]
        return PlaceSegment(segment.id, place[0], lost) if place else None

    # ---- decisions that are limited in number, because a server carries out only a few of them at a time

    def _can_move(self, segment: SegmentAssignment) -> bool:
        """Return whether no change of the segment is in progress, and its primary is connected."""
        return (
            segment.ready and segment.successor is None and not segment.unsynced and self._is_up(str(segment.primary))
        )

    def _decide_copy_or_move(self, segment: SegmentAssignment, copied: bool) -> SegmentDecision | None:
        """Return the next decision about a segment: copy it to a missing server, else hand it over, else drop a backup.

        The segment is handed over only when each wanted server that is connected has it, and the new primary is in
        sync. Then the failure of one server during the hand-over does not lose the segment. `copied`: whether the
        segment has as many backups in sync as wanted.
        """
        assert segment.primary is not None
        wanted = self._targets.get(segment.id, ())
        if not wanted or (copied and self._facts.gathering):
            return None
        limit = self._facts.moves if copied else self._facts.heals
        missing = [name for name in wanted if name not in segment.holders and self._is_up(name)]
        missing.sort(key=lambda name: copied and name != wanted[0])
        for name in missing:
            if (segment.primary, name) in self._facts.failed_copies or (segment.id, name) in self._facts.dropping:
                continue
            if self._count_busy(limit, segment.primary, name):
                return StartCopy(segment.id, name)
        if missing:
            return None
        if segment.primary != wanted[0]:
            ready = wanted[0] in segment.synced and self._is_up(wanted[0])
            return HandOver(segment.id, wanted[0]) if ready and self._count_busy(limit, segment.primary) else None
        extra = next((copy for copy in segment.copies if copy not in wanted), None)
        return None if extra is None else DropCopy(segment.id, extra)

    def _count_busy(self, limit: int, *servers: str) -> bool:
        """Count one more segment that these servers copy or hand over; return False if a server has reached `limit`."""
        if any(self._busy[server] >= limit for server in servers):
            return False
        self._busy.update(servers)
        return True

    # ---- states

    def _is_fully_copied(self, segment: SegmentAssignment) -> bool:
        return len(segment.synced) >= len(self._targets.get(segment.id, ())) - 1

    def _list_in_sync(self, segment: SegmentAssignment) -> tuple[str, ...]:
        return tuple(copy for copy in segment.copies if copy in segment.synced and not self._is_gone(copy))

    def _find_state(self, name: str) -> ServerState:
        return self._states.get(name, ServerState.DEAD)

    def _is_up(self, name: str) -> bool:
        return self._find_state(name) in UP

    def _is_gone(self, name: str) -> bool:
        return self._find_state(name) in (ServerState.SILENT, ServerState.DEAD)


@dataclass(frozen=True, slots=True)
class Balance:
    """The rule by which segments move from hot servers to others.

    Load is operations per second. `hot`: segments of a server whose load is above `hot` times the mean move away.
    `cool`: they move until the server's load is at most `cool` times the mean. `floor`: the mean load below which no
    segment moves. `patience`: number of checks in a row at which the server must be hot. `every`: seconds between two
    checks. `rest`: seconds that a segment stays on the server to which it was moved. `at_once`: the largest number of
    segments that move after one check.

    Raises ConfigError: `cool` is below 1 or above `hot`.
    """

    hot: float = 1.5
    cool: float = 1.15
    floor: float = 100.0
    patience: int = 3
    every: float = 1.0
    rest: float = 10.0
    at_once: int = 4

    def __post_init__(self) -> None:
        if not 1.0 <= self.cool <= self.hot:
            raise ConfigError(
                f"balance has hot={self.hot:g} and cool={self.cool:g}, as multiples of the mean load: give 1 <= cool "
                "<= hot",
                field="balance",
            )


class Rebalancer:
    """Decides which segments move because of load, by the rule `balance`; with `balance=None` no segment moves."""

    def __init__(self, balance: Balance | None) -> None:
        self._balance, self._checked = balance, 0.0
        self._hot: dict[str, int] = {}  # server -> number of checks in a row at which it was hot
        self._moved: dict[SegmentId, float] = {}  # segment -> when it was moved

    def due(self, now: float) -> bool:
        """Return whether the load must be checked now. After True, the next check is due `every` seconds later."""
        if self._balance is None or now - self._checked < self._balance.every:
            return False
        self._checked = now
        return True

    def choose_moves(
        self, loads: Mapping[SegmentId, float], at: Mapping[SegmentId, str], servers: Sequence[str], now: float
    ) -> dict[SegmentId, str]:
        """Return the segments that move now, each with its new server.

        `loads`: the load of each segment in operations per second. `at`: the primary of each segment. `now`: seconds.
        """
        balance = self._balance
        if balance is None or not servers:
            return {}
        total = {server: sum(load for each, load in loads.items() if at.get(each) == server) for server in servers}
        mean = sum(total.values()) / len(servers)
        hot = [name for name in servers if mean >= balance.floor and total[name] > balance.hot * mean]
        self._hot = {name: self._hot.get(name, 0) + 1 for name in hot}
        self._moved = {segment: when for segment, when in self._moved.items() if now - when < balance.rest}
        found: dict[SegmentId, str] = {}
        for server in sorted(hot, key=lambda name: -total[name]):
            if self._hot[server] >= balance.patience:
                loads_here = {
                    each: load for each, load in loads.items() if at.get(each) == server and each not in self._moved
                }
                found |= _relieve(server, loads_here, total, balance.cool * mean, balance.at_once - len(found))
        self._moved.update(dict.fromkeys(found, now))
        return found


def _relieve(
    server: str, loads_here: dict[SegmentId, float], total: dict[str, float], cool: float, most: int
) -> dict[SegmentId, str]:
    """Choose at most `most` segments of `server` to move away, until its load is at most `cool`.

    Return a dict from each segment to its new server. `loads_here` has the load of each segment of `server`, and
    `total` the load of each server; both are updated.
    """
    found: dict[SegmentId, str] = {}
    while loads_here and len(found) < most and total[server] > cool:
        coldest = min(total, key=lambda name: (total[name], name))

        def larger(segment: SegmentId, target: str = coldest) -> float:
            return max(total[server] - loads_here[segment], total[target] + loads_here[segment])

        best = min(loads_here, key=lambda segment: (larger(segment), segment))
        if larger(best) >= total[server]:
            break  # no move would help
        load = loads_here.pop(best)
        found[best] = coldest
        total[server] -= load
        total[coldest] += load
    return found


def measure_skew(loads: Sequence[float]) -> float:
    """Return the largest load divided by the mean load; 1.0 if all loads are equal."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0
