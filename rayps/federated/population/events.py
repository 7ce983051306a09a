"""What happens in a federated run, round by round: the one door to the virtual clock for who carries it out. Pure.

A run's clock is an int64 array [1 + m, 7] in microseconds: in its head the moment at which the last round ended, and
how many trainings have begun; below it a row for each training that is under way (asynchronous runs only).
It is all that one round leaves to the next: save it, and a run goes on from any round.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from rayps.federated.population.availability import micros
from rayps.federated.population.cohort import Ints
from rayps.federated.population.population import Plan, Population


class Events(Protocol):
    """The rounds of a run."""

    def round(self, t: int, clock: Ints) -> tuple[Plan, Ints]:
        """Round `t`, and the clock after it. Raises TrainingError: no client is there, and none will be."""


class InStep:
    """Rounds that wait for their replies: all clients of one begin together."""

    def __init__(self, world: Population) -> None:
        self.world = world

    def round(self, t: int, clock: Ints) -> tuple[Plan, Ints]:
        """See Events."""
        plan = self.world.round(t, int(clock[0, 0]) / 1e6)
        return plan, clock_at(plan.end)


def clock_at(seconds: float = 0.0) -> Ints:
    """The clock of a run at this virtual time, with nobody under way."""
    clock = np.zeros((1, 7), dtype=np.int64)
    clock[0, 0] = micros(seconds)
    return clock
