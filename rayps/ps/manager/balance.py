"""Who gives segments away because it has more to do than the others. Pure.

Segments stand where the ring puts them, and the ring knows nothing of load: a table whose ids follow Zipf's law makes a
few segments hot. The rule: a server that is hot for a while gives the segment to the least loaded server that lowers
the larger of the two loads the most, again and again until it is cool. A segment that alone is hotter than the mean
cannot be split, so the others leave it. There is a floor, so that idle groups do not move, and a rest, so that what has
moved is measured where it is before it moves again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rayps.core.errors import ConfigError
from rayps.ps.manager.assignment import SeatId


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
