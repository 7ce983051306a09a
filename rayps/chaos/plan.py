"""Draw a plan of faults from a seed: when, which fault, on which process. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rayps.chaos.faults import KINDS, SHIFTS, FaultOn, FaultRole, Scope, scope_of
from rayps.core.errors import ConfigError

_JITTER = 0.3  # of the time between two faults
_PAUSE_SECONDS = 1.0  # the least time between the end of a fault and the next fault
_CALM = 0.5  # of the time between two faults: the least time before the first


@dataclass(frozen=True, slots=True)
class ChaosFacts:
    """What there is to disturb, as of the plan's time."""

    counts: Mapping[FaultRole, int]  # number of processes of each role
    shared_group: bool = False  # whether other jobs may use the job's servers
    cannot: Mapping[FaultOn, str] = field(default_factory=dict)  # why this machine cannot inject a fault


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault of a plan. `number` is the target's number among the processes of its role when the plan was drawn."""

    at: float  # seconds after the start
    fault: FaultOn
    number: int
    seconds: float  # duration; 0 if the fault has none
    amount: float = 0.0  # seconds by which a clock is shifted; 0 for other faults

    @property
    def target(self) -> str:
        """The target's name, such as worker-1."""
        numbered = self.fault.role in (FaultRole.WORKER, FaultRole.SERVER)
        return f"{self.fault.role}-{self.number}" if numbered else f"the {self.fault.role}"

    @property
    def words(self) -> str:
        """What will happen, as a sentence without its end."""
        lasting = f", for {self.seconds:.1f} s" if self.seconds else ""
        by = f" by {self.amount:+g} s" if self.amount else ""
        return f"{self.target} {KINDS[self.fault.kind].words}{by}{lasting}"


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """The faults of a run in order of time, and why the other wanted faults are left out."""

    seed: int
    faults: tuple[PlannedFault, ...]
    left_out: Mapping[FaultOn, str]


def why_not(fault: FaultOn, facts: ChaosFacts, allowed: frozenset[Scope]) -> str | None:
    """Return why a fault is left out, or None if it can be injected."""
    if not facts.counts.get(fault.role):
        return f"there is no {fault.role} process of this job on this machine"
    scope = scope_of(fault.role, shared_group=facts.shared_group)
    if scope not in allowed:
        return f"it disturbs more than the job: allow it with --allow {scope}"
    return facts.cannot.get(fault)


def draw_plan(
    seed: int, wanted: Sequence[FaultOn], facts: ChaosFacts, allowed: frozenset[Scope], times: tuple[float, float]
) -> ChaosPlan:
    """Return a plan of faults. `times`: the mean seconds between two faults, and the seconds of the whole plan.

    Each wanted fault that can be injected comes once, in random order, before any comes again.

    Raises:
        ConfigError: no wanted fault can be injected, or the times are not positive.
    """
    every, whole = times
    if every <= 0 or whole <= 0:
        raise ConfigError(
            f"every is {every:g} and for is {whole:g}: give seconds above 0, such as --every 15 --for 300",
            field="every" if every <= 0 else "for",
        )
    reasons = {fault: why_not(fault, facts, allowed) for fault in dict.fromkeys(wanted)}
    left_out = {fault: reason for fault, reason in reasons.items() if reason is not None}
    usable = [fault for fault in reasons if fault not in left_out]
    if not usable:
        first = next(iter(left_out.items()), ("", "no fault was named"))
        raise ConfigError(f"no fault can be injected; for instance {first[0]}: {first[1]}", field="faults")
    chance = random.Random(seed)
    found, deck = list[PlannedFault](), list[FaultOn]()
    at = every * (_CALM + _JITTER * chance.random())
    while at < whole:
        if not deck:
            deck = chance.sample(usable, len(usable))
        fault = deck.pop()
        low, high = KINDS[fault.kind].seconds
        found.append(
            PlannedFault(
                round(at, 3),
                fault,
                chance.randrange(facts.counts[fault.role]),
                round(chance.uniform(low, high), 3) if high else 0.0,
                chance.choice(SHIFTS) if fault.kind == "clock" else 0.0,
            )
        )
        at += max(every * chance.uniform(1 - _JITTER, 1 + _JITTER), found[-1].seconds + _PAUSE_SECONDS)
    return ChaosPlan(seed, tuple(found), left_out)
