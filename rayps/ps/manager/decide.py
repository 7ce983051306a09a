"""What the manager of a server group does next: pure functions from facts to decisions.

`decide` is level-triggered: it compares the present state with the wanted one, not how it came to be, so a manager that
begins again from its record continues where the last one was. Its loop is `for decision in decide(facts): apply it`,
until there is none; what takes time (a copy, a move) is reported by servers and changes the facts. A move is a new
copy, a promotion and a removal; a recovery is a promotion and a new copy (see `rayps.ps.manager.assignment`).

`Balance` decides which servers give segments away because of their load. Segments are placed by the hash ring, which
does not know the load: a table whose ids follow Zipf's law makes a few segments hot. The rule: a server that is hot for
a while gives the segment to the least loaded server that lowers the larger of the two loads the most, until it is cool.
A segment that alone is hotter than the mean cannot be split, so the others leave it. Below a least load nothing moves,
and what has moved is measured at its new place before it moves again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby

from rayps.core.errors import ConfigError
from rayps.core.partition import spots
from rayps.ps.manager.assignment import (
    SeatId,
    SegmentAssignment,
    ServerFacts,
    ServerState,
    handing,
    placed,
    promoted,
    with_copy,
    without_copy,
)

BOUND = 1.25  # no server is given more than this times the mean of a space's segments


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What the manager knows."""

    servers: tuple[ServerFacts, ...]
    seats: tuple[SegmentAssignment, ...]  # those of a space one after the other
    wanted: int  # servers
    replicas: int  # copies of each segment, where there are servers for them
    starting: int = 0  # servers that are on their way
    gathering: bool = False  # they will be here soon: what has its copies waits for them, and moves once, not twice
    placed_by_load: Mapping[SeatId, str] = field(default_factory=dict)  # primaries that are not where the ring says
    apart: frozenset[tuple[str, str]] = frozenset()  # a primary and a server that it has just failed to copy to
    moves: int = 2  # segments that a server may move, or copy, at a time, so that training goes on
    heals: int = 4  # the same for copies that are missing


@dataclass(frozen=True, slots=True)
class PlaceSegment:
    """An empty segment begins on `server`; `lost`: it had a life before, and nobody has it."""

    seat: SeatId
    server: str
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Promote:
    """A copy that is in sync (or the primary itself, whose heir is gone) goes on in a new generation."""

    seat: SeatId
    server: str
    copies: tuple[str, ...]
    reason: str  # died, moved, back


@dataclass(frozen=True, slots=True)
class StartCopy:
    """The primary begins a copy on `server`."""

    seat: SeatId
    server: str


@dataclass(frozen=True, slots=True)
class HandOver:
    """The primary brings the copies up to date and says so, for `server` to be promoted."""

    seat: SeatId
    server: str


@dataclass(frozen=True, slots=True)
class DropCopy:
    """A copy that is gone, or not needed."""

    seat: SeatId
    server: str


@dataclass(frozen=True, slots=True)
class StartServers:
    """More processes."""

    count: int


@dataclass(frozen=True, slots=True)
class LeaveServer:
    """There is one too many: this one is to be emptied."""

    server: str


@dataclass(frozen=True, slots=True)
class RetireServer:
    """Nothing is on it: it may end, or it is dead and nothing refers to it any more."""

    server: str


OfSeat = PlaceSegment | Promote | StartCopy | HandOver | DropCopy
Decision = OfSeat | StartServers | LeaveServer | RetireServer


def apply(seat: SegmentAssignment, decision: OfSeat) -> SegmentAssignment:
    """The seat after a decision about it."""
    match decision:
        case PlaceSegment(_, server, lost):
            return placed(seat, server, lost=lost)
        case Promote(_, server, copies, _):
            return promoted(seat, server, copies)
        case StartCopy(_, server):
            return with_copy(seat, server)
        case DropCopy(_, server):
            return without_copy(seat, server)
        case HandOver(_, server):
            return handing(seat, server)


def decide(facts: GroupFacts) -> list[Decision]:
    """What to do now; at most one thing for each segment. Nothing: wait for reports, or all is settled."""
    return [*_of_servers(facts), *_Seats(facts).decide()]


def settled(facts: GroupFacts) -> bool:
    """Whether each segment is where it belongs with its copies, and as many servers are there as are wanted."""
    staying = sum(server.state == ServerState.ALIVE for server in facts.servers)
    return (
        not decide(dataclasses.replace(facts, apart=frozenset(), gathering=False))
        and staying == len(facts.servers) == facts.wanted
        and all(seat.ready and not seat.making and seat.heir is None for seat in facts.seats)
    )


def targets(facts: GroupFacts) -> dict[SeatId, tuple[str, ...]]:
    """For each segment the servers that are to have it, the primary first; none where no server stays."""
    # those that are away are expected back: nothing moves because a manager began again
    staying = tuple((s.name, s.host) for s in facts.servers if s.state in (ServerState.ALIVE, ServerState.AWAY))
    found: dict[SeatId, tuple[str, ...]] = {}
    if not staying:
        return found
    names = {name for name, _ in staying}
    for _, group in groupby(facts.seats, lambda seat: seat.space):
        seats = list(group)
        places = _spots(tuple(seat.key for seat in seats), staying, facts.replicas + 1)
        for seat, place in zip(seats, places, strict=True):
            first = facts.placed_by_load.get(seat.id)
            if first in names:
                place = (first, *(name for name in place if name != first))
            found[seat.id] = place[: facts.replicas + 1]
    return found


@lru_cache(256)
def _spots(keys: tuple[str, ...], servers: tuple[tuple[str, str], ...], replicas: int) -> list[tuple[str, ...]]:
    names, hosts = [name for name, _ in servers], [host for _, host in servers]
    bound = BOUND if len(keys) > len(names) else 1.0  # no server has two where there is one for each segment
    return [tuple(names[i] for i in found) for found in spots(keys, names, replicas, hosts=hosts, bound=bound)]


def _of_servers(facts: GroupFacts) -> list[Decision]:
    used = {name for seat in facts.seats for name in (*seat.holders, seat.heir)}
    found: list[Decision] = []
    here = [
        server for server in facts.servers if server.state in (ServerState.ALIVE, ServerState.SILENT, ServerState.AWAY)
    ]
    missing = facts.wanted - len(here) - facts.starting
    if missing > 0:
        found.append(StartServers(missing))
    alive = [server for server in here if server.state == ServerState.ALIVE]
    if len(alive) > facts.wanted:  # those that are silent do not count here: nobody leaves because of them
        found += [LeaveServer(server.name) for server in alive[facts.wanted :]]  # the youngest
    return found + [
        RetireServer(server.name)
        for server in facts.servers
        if server.state in (ServerState.LEAVING, ServerState.DEAD) and server.name not in used
    ]


class _Seats:
    """One look at all segments."""

    def __init__(self, facts: GroupFacts) -> None:
        self._facts = facts
        self._states = {server.name: server.state for server in facts.servers}
        self._targets = targets(facts)
        self._seats = {seat.id: seat for seat in facts.seats}
        self._busy: dict[str, int] = {}  # by server: segments that it copies or hands over
        self._given: dict[str, int] = {}  # by server: segments that it is promoted for, so that they are spread
        for seat in facts.seats:
            if seat.primary is not None:
                self._given[seat.primary] = self._given.get(seat.primary, 0) + 1
                if seat.making or seat.heir is not None:
                    self._occupy(seat.primary, *seat.making)

    def decide(self) -> list[Decision]:
        found: list[Decision] = []
        later: list[tuple[bool, SegmentAssignment]] = []
        for seat in self._facts.seats:
            decision = self._urgent(seat)
            if decision is not None:
                found.append(decision)
            elif self._can_move(seat):
                later.append((len(seat.synced) >= self._copies(seat), seat))
        for whole, seat in sorted(later, key=lambda item: item[0]):  # missing copies first
            decision = self._unhurried(seat, self._facts.moves if whole else self._facts.heals)
            if decision is not None:
                found.append(decision)
        return found

    # ---- what cannot wait

    def _urgent(self, seat: SegmentAssignment) -> OfSeat | None:
        if seat.primary is None or (not seat.born and self._gone(seat.primary)):
            return self._begin(seat)
        if self._gone(seat.primary):
            return self._recover(seat)
        if seat.heir is not None and (seat.heir not in seat.synced or self._gone(seat.heir)):
            return Promote(seat.id, seat.primary, self._standing(seat), "back") if self._up(seat.primary) else None
        for copy in seat.copies:
            if self._gone(copy):
                return DropCopy(seat.id, copy)
        if seat.heir is not None and seat.handed and self._up(seat.heir):
            # the one who leaves has everything too: it is a copy where one is wanted there
            stays = seat.primary in self._targets.get(seat.id, ()) and self._up(seat.primary)
            others = [copy for copy in self._standing(seat) if copy != seat.heir]
            return Promote(seat.id, seat.heir, (*others, seat.primary) if stays else tuple(others), "moved")
        return None

    def _begin(self, seat: SegmentAssignment) -> OfSeat | None:
        if seat.parent in self._seats:  # a branch begins where its parent is
            parent = self._seats[seat.parent]
            usable = parent.ready and parent.heir is None and parent.primary is not None and self._up(parent.primary)
            return PlaceSegment(seat.id, str(parent.primary)) if usable else None
        return self._afresh(seat, lost=seat.parent is not None)  # what it was to begin from is closed

    def _recover(self, seat: SegmentAssignment) -> OfSeat | None:
        heirs = [copy for copy in self._standing(seat) if self._up(copy)]
        if heirs:
            first = self._targets.get(seat.id, ("",))[0]
            best = min(heirs, key=lambda name: (name != first, self._given.get(name, 0), name))
            self._given[best] = self._given.get(best, 0) + 1
            return Promote(seat.id, best, tuple(name for name in heirs if name != best), "died")
        waits = any(self._states.get(copy) in (ServerState.AWAY, ServerState.SILENT) for copy in seat.synced)
        if self._states.get(str(seat.primary), ServerState.DEAD) != ServerState.DEAD or waits:
            return None  # it, or who has a copy, may come back
        return self._afresh(seat, lost=True)

    def _afresh(self, seat: SegmentAssignment, *, lost: bool) -> OfSeat | None:
        place = [name for name in self._targets.get(seat.id, ()) if self._up(name)]
        return PlaceSegment(seat.id, place[0], lost) if place else None

    # ---- what a server may do a few of at a time

    def _can_move(self, seat: SegmentAssignment) -> bool:
        """Nothing about it is under way, and its primary is there."""
        return seat.ready and seat.heir is None and not seat.making and self._up(str(seat.primary))

    def _unhurried(self, seat: SegmentAssignment, limit: int) -> OfSeat | None:
        assert seat.primary is not None
        wanted = self._targets.get(seat.id, ())
        if not wanted:
            return None
        missing = [name for name in wanted if name not in seat.holders and self._up(name)]
        # a copy before a move: who is in sync can be promoted whatever happens
        whole = len(seat.synced) >= self._copies(seat)
        if whole and self._facts.gathering:
            return None
        missing.sort(key=lambda name: whole and name != wanted[0])
        for name in missing:
            if (seat.primary, name) not in self._facts.apart and self._free(limit, seat.primary, name):
                self._occupy(seat.primary, name)
                return StartCopy(seat.id, name)
        if missing:
            return None
        if seat.primary != wanted[0]:
            if wanted[0] in seat.synced and self._up(wanted[0]) and self._free(limit, seat.primary):
                self._occupy(seat.primary)
                return HandOver(seat.id, wanted[0])
            return None
        extra = next((copy for copy in seat.copies if copy not in wanted), None)
        return None if extra is None else DropCopy(seat.id, extra)

    # ---- how things are

    def _copies(self, seat: SegmentAssignment) -> int:
        return max(0, len(self._targets.get(seat.id, ())) - 1)

    def _standing(self, seat: SegmentAssignment) -> tuple[str, ...]:
        return tuple(copy for copy in seat.copies if copy in seat.synced and not self._gone(copy))

    def _up(self, name: str) -> bool:
        return self._states.get(name) in (ServerState.ALIVE, ServerState.LEAVING)

    def _gone(self, name: str) -> bool:
        return self._states.get(name, ServerState.DEAD) in (ServerState.SILENT, ServerState.DEAD)

    def _free(self, limit: int, *names: str) -> bool:
        return all(self._busy.get(name, 0) < limit for name in names)

    def _occupy(self, *names: str) -> None:
        for name in names:
            self._busy[name] = self._busy.get(name, 0) + 1


@dataclass(slots=True)
class Heat:
    """What a `Balance` remembers from look to look."""

    streak: dict[str, int] = field(default_factory=dict)  # looks in a row at which a server was hot
    moved: dict[SeatId, float] = field(default_factory=dict)  # when a segment was given away


@dataclass(frozen=True, slots=True)
class Balance:
    """A server sheds segments from `hot` times the mean load until it is at `cool` times the mean.

    Load is operations a second. `patience`: looks in a row at which it must be hot, one each `every` seconds. `floor`:
    the mean below which nothing moves. `rest`: seconds that a segment stays where it was moved. `at_once`: segments a
    look. Raises ConfigError.
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
                f"a server cannot shed from hot={self.hot:g} down to cool={self.cool:g} times the mean: "
                "give 1 <= cool <= hot",
                field="balance",
            )

    def shed(
        self, loads: Mapping[SeatId, float], at: Mapping[SeatId, str], servers: Sequence[str], heat: Heat, now: float
    ) -> dict[SeatId, str]:
        """The segments that move now, and to whom. `loads` are by segment, `at` says who serves it; `now`: seconds."""
        of = {server: sum(load for seat, load in loads.items() if at.get(seat) == server) for server in servers}
        mean = sum(of.values()) / len(servers) if servers else 0.0
        heat.moved = {seat: when for seat, when in heat.moved.items() if now - when < self.rest}
        heat.streak = {
            server: heat.streak.get(server, 0) + 1
            for server in servers
            if mean >= self.floor and of[server] > self.hot * mean
        }
        found: dict[SeatId, str] = {}
        for server in sorted(heat.streak, key=lambda name: -of[name]):
            if heat.streak[server] >= self.patience:
                self._relieve(server, mean, of, loads, at, heat, found)
        heat.moved.update(dict.fromkeys(found, now))
        return found

    def _relieve(
        self,
        server: str,
        mean: float,
        of: dict[str, float],
        loads: Mapping[SeatId, float],
        at: Mapping[SeatId, str],
        heat: Heat,
        found: dict[SeatId, str],
    ) -> None:
        own = [seat for seat in loads if at.get(seat) == server and seat not in heat.moved]
        while own and len(found) < self.at_once and of[server] > self.cool * mean:
            coldest = min(of, key=lambda name: (of[name], name))
            best = min(own, key=lambda seat: (max(of[server] - loads[seat], of[coldest] + loads[seat]), seat))
            if max(of[server] - loads[best], of[coldest] + loads[best]) >= of[server]:
                return  # nothing that moves would help
            own.remove(best)
            found[best] = coldest
            of[server] -= loads[best]
            of[coldest] += loads[best]


class Rebalancer:
    """Applies a `Balance` once each `every` seconds; None = never."""

    def __init__(self, balance: Balance | None) -> None:
        self._balance, self._heat, self._looked = balance, Heat(), 0.0

    def due(self, now: float) -> bool:
        """Whether it is time to look again; then the next look is `every` seconds later."""
        if self._balance is None or now - self._looked < self._balance.every:
            return False
        self._looked = now
        return True

    def shed(
        self, loads: Mapping[SeatId, float], at: Mapping[SeatId, str], servers: Sequence[str], now: float
    ) -> dict[SeatId, str]:
        """See `Balance.shed`."""
        return {} if self._balance is None else self._balance.shed(loads, at, servers, self._heat, now)


def skew(loads: Sequence[float]) -> float:
    """The largest load over the mean; 1 = even."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0
