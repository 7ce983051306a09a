"""The events of a federated run, round by round: the interface of the virtual clock. Pure.

A run's clock is an int64 array [1 + m, 7] in microseconds: its first row has the end of the last round and the number
of started trainings; then follows a row for each running training (asynchronous runs only). It is the whole state
between rounds: save it, and a run continues from any round.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from rayps.federated.population.availability import micros
from rayps.federated.population.cohort import Ints
from rayps.federated.population.population import Plan, Population


class Events(Protocol):
    """The interface of a run's virtual clock: it computes the rounds one after another."""

    def round(self, t: int, clock: Ints) -> tuple[Plan, Ints]:
        """Return round `t`, and the clock after it. Raises TrainingError: no client is available now or later."""


class InStep:
    """Synchronous rounds: all clients of a round start together, and the round waits for their replies."""

    def __init__(self, world: Population) -> None:
        self.world = world

    def round(self, t: int, clock: Ints) -> tuple[Plan, Ints]:
        """See Events."""
        plan = self.world.round(t, int(clock[0, 0]) / 1e6)
        return plan, clock_at(plan.end)


def clock_at(seconds: float = 0.0) -> Ints:
    """Return the clock of a run at this virtual time, without running trainings."""
    clock = np.zeros((1, 7), dtype=np.int64)
    clock[0, 0] = micros(seconds)
    return clock
