"""The interface of the simulations that plan the rounds of a federated run, and the simulation of synchronous rounds.

The state of a simulation between rounds is its clock, an int64 array [1 + m, 7]. The first row has the end of the last
round, in virtual microseconds, and the number of started trainings. One row follows for each of the m running trainings
(in asynchronous runs only). With a saved clock, a run can continue from any round.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from rayps.federated.population.availability import micros
from rayps.federated.population.cohort import Ints
from rayps.federated.population.population import Plan, Population


class Events(Protocol):
    """The interface of a simulation, which plans the rounds of a run one after another."""

    def round(self, t: int, clock: Ints, cohort: Ints | None = None) -> tuple[Plan, Ints]:
        """Return the plan of round `t`, which starts at `clock`, and the clock after the round.

        `cohort`: the clients that are asked; None: they are drawn from the seed.

        Raises TrainingError if no client is available now or later, or if too many replies are lost.
        """


class InStep:
    """Synchronous rounds: all clients of a round start together, and the round waits for their replies."""

    def __init__(self, population: Population) -> None:
        self.population = population

    def round(self, t: int, clock: Ints, cohort: Ints | None = None) -> tuple[Plan, Ints]:
        """Return the plan of round `t`, which starts at `clock`, and the clock after the round."""
        plan = self.population.round(t, int(clock[0, 0]) / 1e6, cohort)
        return plan, clock_at(plan.end)


def clock_at(seconds: float = 0.0) -> Ints:
    """Return the clock at this virtual time, with no training running."""
    clock = np.zeros((1, 7), dtype=np.int64)
    clock[0, 0] = micros(seconds)
    return clock
