"""Decide how many workers an elastic job has: when newcomers start, and when the workers regroup. Pure; no clock.

Rules, in this order:

1. Workers under notice leave before their deadline. If too few would remain, replacements start first. If none would
   remain, the replacements join before the others leave.
2. If the job may have fewer workers than it has, the highest ranks leave at once, down to the least number.
3. If newcomers are ready, they join.
4. If the job may have more workers, resources are free, the last change is `cooldown` seconds ago, and the last growth
   has paid, newcomers start in the background while the others train.

A change that was ordered from outside (rules 1 and 2) does not wait for the cooldown.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

SOON_SECONDS = 5.0  # this long before a deadline, workers leave although replacements are not ready


@dataclass(frozen=True, slots=True)
class SizeFacts:
    """What is known when the number of workers is decided."""

    size: int  # current workers
    least: int
    most: int
    allowed: int  # the largest number that the job may have now, by its user or by the service
    why: str = ""  # who has set `allowed`, and why
    room: int = 0  # how many more workers fit into the free resources
    starting: int = 0  # newcomers that have been started and are not ready
    ready: int = 0  # newcomers that are ready to join
    # from a rank under notice to the seconds until it ends; None if they are not known
    noticed: Mapping[int, float | None] = field(default_factory=dict)
    since_change: float = math.inf  # seconds since the last change of the workers
    cooldown: float = 30.0
    ceiling: int | None = None  # the number of workers beyond which growth has not paid; None if it is not known


@dataclass(frozen=True, slots=True)
class SizeDecision:
    """What to do now: start `start` newcomers, drop `drop` of them, or regroup.

    If `regroup`, the ranks `leavers` leave, and `joiners` newcomers that are ready join.
    """

    start: int = 0
    drop: int = 0
    regroup: bool = False
    leavers: tuple[int, ...] = ()
    joiners: int = 0
    reason: str = ""


def decide_size(facts: SizeFacts) -> SizeDecision:
    """Return the decision for these facts."""
    target = max(facts.least, min(facts.allowed, facts.most))
    leaving = sorted(rank for rank in facts.noticed if rank < facts.size)
    if leaving:
        return _decide_for_notices(facts, leaving, target)
    if facts.size > target:
        leavers = tuple(range(target, facts.size))
        reason = facts.why or f"the job may have {target} workers"
        return SizeDecision(drop=facts.ready + facts.starting, regroup=True, leavers=leavers, reason=reason)
    excess = facts.size + facts.ready + facts.starting - target
    if excess > 0:
        return SizeDecision(drop=min(excess, facts.ready + facts.starting), reason=facts.why)
    if facts.ready and not facts.starting:
        return SizeDecision(regroup=True, joiners=facts.ready, reason="there was room for more workers")
    if facts.ready or facts.starting:
        return SizeDecision()  # all newcomers join together
    limit = target if facts.ceiling is None else min(target, max(facts.ceiling, facts.least))
    wanted = min(limit - facts.size, facts.room)
    if facts.size < facts.least:  # after deaths: replacements do not wait
        return SizeDecision(start=facts.least - facts.size, reason="the job has fewer workers than its least number")
    if wanted > 0 and facts.since_change >= facts.cooldown:
        return SizeDecision(start=wanted, reason="there is room for more workers")
    return SizeDecision()


def _decide_for_notices(facts: SizeFacts, leaving: Sequence[int], target: int) -> SizeDecision:
    """Decide about workers under notice, which are `leaving`."""
    reason = f"notice for {', '.join(f'worker-{rank}' for rank in leaving)}"
    staying = facts.size - len(leaving)
    if staying == 0 and facts.ready:  # newcomers get the state from the leavers, which leave after that
        return SizeDecision(regroup=True, joiners=facts.ready, reason=reason)
    joiners = min(facts.ready, max(0, target - staying))
    if staying + joiners >= facts.least:
        return SizeDecision(regroup=True, leavers=tuple(leaving), joiners=joiners, reason=reason)
    seconds = min((left for left in facts.noticed.values() if left is not None), default=math.inf)
    missing = facts.least - staying - facts.ready - facts.starting
    if missing > 0:
        return SizeDecision(start=missing, reason=reason)
    if seconds <= SOON_SECONDS and staying + joiners > 0:
        return SizeDecision(regroup=True, leavers=tuple(leaving), joiners=joiners, reason=reason)
    return SizeDecision()


def gain_of(before: tuple[int, float], after: tuple[int, float]) -> float:
    """Return the gain of a growth: the speed that each added worker has added, as a part of a worker's speed before.

    `before` and `after` are pairs (workers, samples per second). The gain is 1 if speed grows with the workers.
    """
    (few, slow), (many, fast) = before, after
    each = slow / few
    return (fast - slow) / (many - few) / each if each > 0 else 1.0


def assign_ranks(size: int, leaving: Collection[int], joiners: int) -> list[int | None]:
    """Return for each rank of the new group its rank in the old one, or None for a newcomer.

    Workers keep their ranks where possible. Newcomers take the ranks of leavers, and if there are not enough, the
    workers with the highest ranks take them.
    """
    staying = [rank for rank in range(size) if rank not in leaving]
    count = len(staying) + joiners
    found: list[int | None] = [rank if rank in staying else None for rank in range(count)]
    moved = [rank for rank in staying if rank >= count]
    gaps = [rank for rank, old in enumerate(found) if old is None]
    for rank, old in zip(reversed(gaps), moved, strict=False):
        found[rank] = old
    return found
