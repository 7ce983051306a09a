"""Draw a plan of faults from a seed: when, which fault, on which process. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rayps_client.errors import ConfigError

from rayps_chaos.faults import KINDS, NEWBORN, NEWBORN_SECONDS, SHIFTS, FaultOn, FaultRole, Scope, scope_of

_JITTER = 0.3  # of the time between two faults
_PAUSE_SECONDS = 1.0  # the least time between the end of a fault and the next fault
_CALM = 0.5  # of the time between two faults: the least time before the first
USUAL_FAULTS = 20  # the faults of a plan without an end
# the processes whose death counts as a failure of the job; a server counts only if no manager replaces it
_COUNTED = (FaultRole.WORKER, FaultRole.SERVER, FaultRole.DRIVER, FaultRole.RAYLET, FaultRole.GCS)


@dataclass(frozen=True, slots=True)
class ChaosFacts:
    """What there is to disturb, as of the plan's time."""

    counts: Mapping[FaultRole, int]  # number of processes of each role
    shared_group: bool = False  # whether other jobs may use the job's servers
    cannot: Mapping[FaultOn, str] = field(default_factory=dict)  # why this machine cannot inject a fault


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault of a plan. `number` is the target's number among the processes of its role when the plan was drawn."""

    at: float  # seconds after the start; of a newborn fault, the age in seconds at which the process is killed
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


def check_seconds(option: str, seconds: float) -> None:
    """Raise ConfigError if the value of an option, such as `--every`, is not a finite number of seconds above 0."""
    if not 0 < seconds < math.inf:
        raise ConfigError(
            f"{option} is {seconds:g}: give a finite number of seconds above 0, such as {option} 300",
            field=option.removeprefix("--").replace("-", "_"),
        )


def counts_as_failure(fault: FaultOn, facts: ChaosFacts) -> bool:
    """Return whether a fault counts as a failure of the job, of which it survives `max_failures`."""
    managed = fault.role is FaultRole.SERVER and facts.counts.get(FaultRole.MANAGER, 0) > 0
    return fault.kind in ("kill", NEWBORN) and fault.role in _COUNTED and not managed


def too_many_failures(plan: ChaosPlan, facts: ChaosFacts, max_failures: int) -> str | None:
    """Return a warning if a plan has more faults that count as failures than the job survives, or None."""
    count = sum(counts_as_failure(planned.fault, facts) for planned in plan.faults)
    if count <= max_failures:
        return None
    return (
        f"{count} of the planned faults count as failures of the job, and its max_failures is {max_failures}: the job "
        f"will fail unless it ends before failure {max_failures + 1}; choose other faults with --faults, give a larger "
        f"--every, or set max_failures of the job to at least {count}"
    )


def draw_plan(
    seed: int,
    wanted: Sequence[FaultOn],
    facts: ChaosFacts,
    allowed: frozenset[Scope],
    times: tuple[float, float | None],
) -> ChaosPlan:
    """Return a plan of faults. `times`: the mean seconds between two faults, and the seconds of the whole plan.

    Without the latter, the plan has `USUAL_FAULTS` faults. Each wanted fault that can be injected comes once, in random
    order, before any comes again. A longer plan begins with the faults of a shorter one.

    Raises:
        ConfigError: no wanted fault can be injected, or a time is not finite and above 0.
    """
    every, whole = times
    check_seconds("--every", every)
    if whole is not None:
        check_seconds("--for", whole)
    usable, left_out = _usable(wanted, facts, allowed)
    chance = random.Random(seed)
    found, deck = list[PlannedFault](), list[FaultOn]()
    at = every * (_CALM + _JITTER * chance.random())
    while len(found) < USUAL_FAULTS if whole is None else at < whole:
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


def draw_newborn_plan(
    seed: int, wanted: Sequence[FaultOn], facts: ChaosFacts, allowed: frozenset[Scope], attempts: int
) -> ChaosPlan:
    """Return a plan of `attempts` faults on newborn processes: one in the first seconds of each attempt of a job.

    `facts` are those of the job when it will train.

    Raises:
        ConfigError: no wanted fault can be injected, or `attempts` is 0.
    """
    if attempts < 1:
        raise ConfigError("max_failures of the job is 0, and a killed process is a failure: set it to 1 or more")
    usable, left_out = _usable(wanted, facts, allowed)
    chance, found = random.Random(seed), list[PlannedFault]()
    for _ in range(attempts):
        age, fault = chance.uniform(0.0, NEWBORN_SECONDS), chance.choice(usable)
        found.append(PlannedFault(round(age, 3), fault, chance.randrange(facts.counts[fault.role]), 0.0))
    return ChaosPlan(seed, tuple(found), left_out)


def _usable(
    wanted: Sequence[FaultOn], facts: ChaosFacts, allowed: frozenset[Scope]
) -> tuple[list[FaultOn], dict[FaultOn, str]]:
    """Return the faults that can be injected, and why the others are left out. Raises ConfigError if none can be."""
    reasons = {fault: why_not(fault, facts, allowed) for fault in dict.fromkeys(wanted)}
    left_out = {fault: reason for fault, reason in reasons.items() if reason is not None}
    usable = [fault for fault in reasons if fault not in left_out]
    if not usable:
        first = next(iter(left_out.items()), ("", "no fault was named"))
        raise ConfigError(f"no fault can be injected; for instance {first[0]}: {first[1]}", field="faults")
    return usable, left_out
