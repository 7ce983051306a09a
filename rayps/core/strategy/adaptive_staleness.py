"""Which staleness bound costs least: the bound moves by what waiting and staleness cost, as measured. Pure; no I/O.

A greater bound costs less waiting and more staleness. Both are shares of the job's progress, measured over an interval
of rounds under one bound:

- `waiting`: the share of the workers' seconds in which they waited in pulls.
- `lost`: the share of the pushes' progress that is lost because other workers' pushes came between a push's pull and
  the push.

A push of g, computed at w, is applied at a newer w'. To first order it lowers the loss F by the step size times
<grad F(w'), g>. A worker pulls w' right after its push, so its next gradient g' is an independent sample of grad F(w'),
and the expectation of <g', g> is the progress of the push. The *agreement* of a push is the cosine of g' and g. It is
compared between all pushes and those that are *near*: at most `NEAR` times as many pushes came between as in a
synchronous round. This finds old pushes that make no progress. It does not find that old pushes disturb the others,
such as by momentum: if the mean loss of an interval is above that of an earlier one, all of its progress counts as
lost.

The *value* of a bound is (1 - waiting) (1 - lost). `BoundControl` moves along `LADDER` to the neighbour that promises
the greater value. At first nothing is known about a neighbour: a greater bound may end all waiting, and a lower one all
staleness. What was measured under a bound is trusted for some intervals, and for twice as many each time a trial of the
bound was no gain, so that the bound does not flap.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

LADDER: tuple[int | None, ...] = (0, 1, 2, 4, 8, 16, None)
FIRST = 8  # the bound with which a job begins
GAIN = 0.05  # the least gain of value for which the bound moves
NEAR = 1.5
SURE = 2.0  # standard errors beyond which a difference of agreements is no noise
RISES = 3.0  # standard errors beyond which a loss has risen
TRUST = 8  # intervals for which a measured value is trusted at first
LONGEST_TRUST = 256
ROUNDS = 6  # mean number of rounds of a worker in an interval
CLEAR_ROUNDS = 2  # the same, if the waiting is clear
CLEAR = 0.2  # share of waiting that is clear after a few rounds


@dataclass(frozen=True, slots=True)
class PushFacts:
    """What one round of worker `rank` shows.

    `seconds` is the round's length, and `exchange` the part of it that the worker spent in pulls and pushes. `between`:
    how many steps the servers took from the pull before the push to the pull after it. `agreement`: the cosine of the
    gradients before and after; None if it is not known. `loss`: the mean loss of the round's batch; None if it had no
    rows.
    """

    rank: int
    seconds: float
    exchange: float
    between: int
    agreement: float | None = None
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class BoundCost:
    """What a bound has cost in an interval of `rounds` rounds of workers, which lasted `seconds` in sum.

    `waited`: seconds of them in which workers waited. `lost`: the share of the progress that staleness costs. `loss` is
    the mean loss of the rounds, and `loss_error` its standard error.
    """

    rounds: int
    seconds: float
    waited: float
    lost: float = 0.0
    loss: float = math.nan
    loss_error: float = math.inf

    @property
    def waiting(self) -> float:
        """The share of the seconds in which workers waited."""
        return self.waited / self.seconds if self.seconds else 0.0

    @property
    def value(self) -> float:
        """The share of the possible progress that was made: 1 without waiting and staleness."""
        return (1 - self.waiting) * (1 - self.lost)


@dataclass(frozen=True, slots=True)
class BoundMove:
    """A move of the bound from `old` to `new`; None is no bound. `cost`: what `old` has cost, which is the reason.

    `rises`: whether the loss has risen under `old`.
    """

    old: int | None
    new: int | None
    cost: BoundCost
    rises: bool = False


def is_complete(facts: Sequence[PushFacts], workers: int) -> bool:
    """Return whether these rounds are enough to decide by."""
    if len(facts) >= ROUNDS * workers:
        return True
    return len(facts) >= CLEAR_ROUNDS * workers and cost_of(facts, workers).waiting >= CLEAR


def cost_of(facts: Sequence[PushFacts], workers: int) -> BoundCost:
    """Return what a bound has cost in the interval of these rounds.

    A pull and a push take some seconds without any waiting, which are estimated as the shortest exchange of the
    interval. The rest counts as waiting.
    """
    shortest = min((each.exchange for each in facts), default=0.0)
    waited = sum(each.exchange - shortest for each in facts)
    losses = find_mean_and_error([each.loss for each in facts if each.loss is not None])
    return BoundCost(
        len(facts), sum(each.seconds for each in facts), waited, estimate_lost_share(facts, workers), *losses
    )


def estimate_lost_share(facts: Sequence[PushFacts], workers: int) -> float:
    """Return the share of progress that is lost by pushes that are not near, from 0 to 1.

    It is 0 as far as it cannot be told from noise: two standard errors are subtracted.
    """
    near = [f.agreement for f in facts if f.agreement is not None and f.between <= NEAR * workers]
    far = [f.agreement for f in facts if f.agreement is not None and f.between > NEAR * workers]
    (close, close_error), (distant, distant_error) = find_mean_and_error(near), find_mean_and_error(far)
    if min(len(near), len(far)) < 2 or close <= SURE * close_error:
        return 0.0
    lost = close - distant - SURE * math.hypot(close_error, distant_error)
    return min(1.0, max(0.0, lost / close) * len(far) / (len(near) + len(far)))


def find_mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of values (NaN if there are none) and its standard error (infinite for fewer than two)."""
    if len(values) < 2:
        return (values[0] if values else math.nan), math.inf
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


@dataclass(slots=True)
class _Known:
    """The value that a bound had in an interval, and for how many intervals it is trusted."""

    value: float
    interval: int
    trust: int


class BoundControl:
    """The bound now, and what is known about the other bounds."""

    def __init__(self, bound: int | None = FIRST) -> None:
        """Begin with a bound of `LADDER`."""
        self.bound = bound
        self._interval = 0
        self._known: dict[int | None, _Known] = {}
        self._trust: Counter[int | None] = Counter()  # bound -> how often a trial of it was no gain
        self._left: tuple[int | None, float] | None = None  # the bound before the last move, and its value
        self._raises = 0  # raises of the bound since it was lowered last
        self._careful = False  # whether the loss has risen: the bound then rises by one step at a time
        self._lowest: BoundCost | None = None  # the interval with the lowest loss

    def after(self, cost: BoundCost) -> BoundMove | None:
        """Take over what an interval under the present bound has cost. Return the move that follows, or None."""
        self._interval += 1
        old, rises = self.bound, self._rises(cost)
        if self._lowest is None or cost.loss < self._lowest.loss:
            self._lowest = cost
        if rises:
            self.bound = LADDER[LADDER.index(old) // 2]
            for bound in LADDER[LADDER.index(self.bound) + 1 :]:
                self._refuse(bound)
        else:
            self._learn(old, cost.value)
            best = max(self._list_candidates(), key=lambda bound: self._promise(bound, cost))
            if self._promise(best, cost) > cost.value + GAIN:
                self.bound = best
        if self.bound == old:
            return None
        self._careful |= rises
        raised = LADDER.index(self.bound) > LADDER.index(old) and not self._careful
        self._raises = self._raises + 1 if raised else 0
        self._left = old, 0.0 if rises else cost.value
        return BoundMove(old, self.bound, cost, rises)

    def _rises(self, cost: BoundCost) -> bool:
        """Return whether the loss is above the lowest one of earlier intervals, by more than noise."""
        lowest = self._lowest
        if lowest is None or self.bound == LADDER[0]:
            return False
        return cost.loss - lowest.loss > RISES * math.hypot(cost.loss_error, lowest.loss_error)

    def _learn(self, bound: int | None, value: float) -> None:
        """Record the value of a bound. If the last move led here and was no gain, trust this for longer."""
        left = self._left
        if left is not None and value <= left[1]:
            self._trust[bound] += 1
        self._left = None
        self._known[bound] = _Known(value, self._interval, min(LONGEST_TRUST, TRUST << self._trust[bound]))

    def _refuse(self, bound: int | None) -> None:
        """Record that the loss rises under a bound."""
        self._known[bound] = _Known(0.0, self._interval, min(LONGEST_TRUST, TRUST << self._trust[bound]))
        self._trust[bound] += 1

    def _list_candidates(self) -> list[int | None]:
        """Return the neighbours. After n raises in succession, the bound n further up comes first.

        It does not if the loss has risen before.
        """
        at, last = LADDER.index(self.bound), len(LADDER) - 1
        return [LADDER[i] for i in (min(at + 1 + self._raises, last), at + 1, at - 1) if 0 <= i <= last and i != at]

    def _promise(self, bound: int | None, here: BoundCost) -> float:
        """Return the value that a neighbour has shown, or the greatest that it could have if that is not known."""
        known = self._known.get(bound)
        if known is not None and self._interval - known.interval <= known.trust:
            return known.value
        greater = LADDER.index(bound) > LADDER.index(self.bound)
        return 1 - here.lost if greater else 1 - here.waiting
