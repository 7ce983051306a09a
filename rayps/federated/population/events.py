"""What happens in a federated run, round by round: the one door to the virtual clock for who carries it out. Pure.

A run's clock is an int64 array [1 + m, 7] in microseconds: in its head the moment at which the last round ended, and
how many trainings have begun; below it a row for each training that is under way (asynchronous runs only).
It is all that one round leaves to the next: save it, and a run goes on from any round.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from rayps.federated.population.async_events import AsyncBuffer
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


def events_of(strategy: Any, sizes: Any, seed: int, batch_size: int) -> Events:
    """The events of a `Federated` strategy on clients with so many samples; `batch_size` is the data's own.

    Raises:
        ConfigError: the strategy's options do not fit so many clients, or a trace cannot be read.
    """
    s, n = strategy, np.asarray(sizes, dtype=np.int64)
    batch = n if s.batch_size == 0 else np.full(len(n), s.batch_size or batch_size)
    work = n * s.epochs if s.local_steps is None else s.local_steps * np.minimum(batch, n)
    world = Population(
        seed,
        work,
        fraction=s.fraction,
        speed=s.speed,
        available=s.available,
        dropout=s.dropout,
        deadline=s.deadline,
        enough=s.enough,
        over_selection=s.over_selection,
    )
    return AsyncBuffer(world, s.buffer, s.concurrency, s.max_staleness) if s.asynchronous else InStep(world)
