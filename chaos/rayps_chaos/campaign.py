"""Carry out a plan of faults on one job: at each time find the target, say what follows, inject, take back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rayps_client.errors import ClusterError

from rayps_chaos.faults import NEWBORN, FaultOn, FaultRole
from rayps_chaos.inject import ChaosMeans, injected
from rayps_chaos.measure_recovery import InjectedFault
from rayps_chaos.plan import PlannedFault
from rayps_chaos.targets import ChaosProcess, NewbornProcesses

_FIND_SECONDS = 5.0  # seconds in which a target must be there: a process of this role may just have died


class ProcessFinder(Protocol):
    """Finds the processes that faults may hit."""

    def find(self, role: FaultRole) -> list[ChaosProcess]:
        """Return the living processes of a role."""


@dataclass(frozen=True, slots=True)
class ChaosSite:
    """The job, what faults may use, and two functions: `tell` shows a line of text; `over` returns whether to end.

    `revive` starts the service again, if this run has started it: it is called after each fault.
    """

    processes: ProcessFinder
    means: ChaosMeans
    tell: Callable[[str], None]
    over: Callable[[], bool]
    revive: Callable[[], None] = lambda: None


def carry_out(
    faults: Sequence[PlannedFault], site: ChaosSite, done: list[InjectedFault] | None = None
) -> list[InjectedFault]:
    """Carry out the faults in order; return what was done. End early when `site.over()` is true.

    Each fault is appended to `done` when it is over, for another thread that reads the list meanwhile.
    """
    begun, found = time.monotonic(), [] if done is None else done
    for planned in faults:
        if not _wait(begun + planned.at, site.over):
            break
        found.append(_carry_out(planned, site))
        site.revive()
    return found


def kill_newborn(
    faults: Sequence[PlannedFault], site: ChaosSite, newborn: NewbornProcesses, seconds: float
) -> list[InjectedFault]:
    """Carry out faults on newborn processes in order, each on a process that was started after the one before it died.

    If there is no newborn process of the planned role, one of the other roles of the plan is killed. `seconds`: the
    longest wait for one. End early when `site.over()` is true.
    """
    roles, found = list(dict.fromkeys(planned.fault.role for planned in faults)), list[InjectedFault]()
    for planned in faults:
        deadline = time.monotonic() + seconds
        while not (there := _newborn(planned, newborn, roles)) and time.monotonic() < deadline:
            if not _wait(time.monotonic() + 0.05, site.over):
                return found
        if there is None:
            break
        if not _wait(time.monotonic() + planned.at - newborn.age(there), site.over):
            break
        actual = replace(planned, fault=FaultOn(NEWBORN, there.role), number=there.number)
        found.append(_hit(actual, there, [], site))
        newborn.since = time.time()
        site.revive()
    return found


def _newborn(planned: PlannedFault, newborn: NewbornProcesses, roles: Sequence[FaultRole]) -> ChaosProcess | None:
    for role in [planned.fault.role, *roles]:
        there = newborn.find(role)
        if there:
            return there[planned.number % len(there)]
    return None


def _wait(until: float, over: Callable[[], bool]) -> bool:
    """Wait until a time of time.monotonic; return False if `over()` became true."""
    pause = threading.Event()
    while (left := until - time.monotonic()) > 0:
        if over():
            return False
        pause.wait(min(left, 0.2))
    return not over()


def _carry_out(planned: PlannedFault, site: ChaosSite) -> InjectedFault:
    target = _target(planned, site)
    if target is None:
        site.tell(f"left out: {planned.words}: there is no such process now")
        now = time.time()
        return InjectedFault(planned, now, now, "", skipped="there was no such process")
    others = [
        each
        for role in (FaultRole.WORKER, FaultRole.SERVER, FaultRole.MANAGER)
        for each in site.processes.find(role)
        if each != target
    ]
    return _hit(planned, target, others, site)


def _hit(planned: PlannedFault, target: ChaosProcess, others: Sequence[ChaosProcess], site: ChaosSite) -> InjectedFault:
    site.tell(f"{planned.words} (process {target.pid})")
    at = time.time()
    try:
        with injected(planned, target, others, site.means) as words:
            _wait(time.monotonic() + planned.seconds, lambda: False)
    except ClusterError as error:
        return InjectedFault(planned, at, time.time(), "", skipped=error.message, pid=target.pid)
    return InjectedFault(planned, at, time.time(), words, pid=target.pid)


def _target(planned: PlannedFault, site: ChaosSite) -> ChaosProcess | None:
    """Return the process with the planned number, counted around if there are fewer now; None if there is none."""
    deadline = time.monotonic() + _FIND_SECONDS
    while True:
        there = site.processes.find(planned.fault.role)
        if there:
            same = [each for each in there if each.number == planned.number]
            return same[0] if same else there[planned.number % len(there)]
        if not _wait(min(deadline, time.monotonic() + 0.2), site.over) or time.monotonic() >= deadline:
            return None
