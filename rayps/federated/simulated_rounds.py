"""Create the simulation of a federated strategy's clients in virtual time, from the strategy's options."""

from __future__ import annotations

from collections.abc import Iterable

from rayps.federated.population.async_events import AsyncBuffer
from rayps.federated.population.events import Events, InStep
from rayps.federated.population.population import Population
from rayps.federated.strategy_interface import Federation


def events_of(given: Federation, sizes: Iterable[int], seed: int, batch_size: int, accumulate: int = 1) -> Events:
    """Return the simulation that plans the rounds of a federated strategy.

    `sizes` are the clients' numbers of samples, `batch_size` is the data's batch size, and a step takes
    `accumulate` batches.

    Raises:
        ConfigError: the strategy's options do not fit this many clients, or a trace cannot be read.
    """
    population, aggregation, local = given.population, given.aggregation, given.local
    simulated = Population(
        seed,
        [local.work(int(own), batch_size, accumulate) for own in sizes],
        fraction=given.fraction,
        speed=population.speed,
        available=population.available,
        dropout=population.dropout,
        deadline=population.deadline,
        enough=aggregation.enough,
        over_selection=aggregation.over_selection,
    )
    buffered = given.buffered
    if buffered is None:
        return InStep(simulated)
    return AsyncBuffer(simulated, buffered.size, buffered.concurrency, buffered.max_staleness)
