"""Which strategies can run with a number of workers that changes, and how their rows are then divided. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rayps.core.elastic import ElasticWorkers
from rayps.core.errors import ConfigError
from rayps.core.strategy import Phase, StrategyView
from rayps.core.strategy_families import SYNC_GRADIENTS
from rayps.core.topology import Peers, replica_of, runs_in_step, servers_of, shard_of


def check_elastic(name: str, strategy: StrategyView, *, tables: bool) -> None:
    """Refuse a strategy whose workers cannot change while it runs. `tables`: whether the model has sparse tables.

    Raises:
        ConfigError: the workers must be a fixed number. The text says why, and what can be used instead.
    """
    why: str | None = None
    if replica_of(strategy) is not None:
        why = "a replica is several workers"
    elif shard_of(strategy) is not None:
        why = "each worker owns a part of the state"
    elif tables:
        why = "the model has sparse tables"
    elif not isinstance(strategy.topology, Peers) or strategy.loop != SYNC_GRADIENTS:
        why = "each worker has a state or rows of its own"
    if why is not None:
        raise ConfigError(
            f"workers is a range, and under {name} {why}: use all_reduce, or give a fixed number of workers",
            field="workers",
        )


def takes_leases(phases: Sequence[Phase]) -> bool:
    """Return whether the workers of an elastic job get their rows by leases: those of the first phase are not in step.

    Otherwise `check_elastic` says whether the workers can change.
    """
    first = phases[0].strategy
    return servers_of(first) is not None and not runs_in_step(first)


def check_leased(phases: Sequence[Phase], elastic: ElasticWorkers, *, tables: bool, by_epoch: bool) -> None:
    """Refuse a job whose workers are not in step and cannot change while it runs.

    `tables`: whether the model has sparse tables. `by_epoch`: whether the learning rate has a schedule by epoch.

    Raises:
        ConfigError: the text says why, and what can be used instead.
    """
    name, servers = phases[0].name, servers_of(phases[0].strategy)
    assert servers is not None, "takes_leases() said that servers have the parameters"
    why: str | None = None
    if len(phases) > 1:
        why = "the job has several phases"
    elif replica_of(phases[0].strategy) is not None:
        why = "a replica is several workers"
    elif servers.own_copies or servers.update.spans:
        why = "each worker has a copy of the parameters that it has changed itself"
    elif tables:
        why = "the model has sparse tables"
    if why is not None:
        raise ConfigError(
            f"workers is a range, and under {name} {why}: use parameter_server in one phase, or give a fixed number of "
            "workers",
            field="workers",
        )
    if elastic.global_batch is not None or elastic.lr_scaling != "keep" or elastic.replay is not None:
        raise ConfigError(
            f"under {name} workers are not in step: each takes batch_size rows at a time, servers scale a push by 1/N "
            "with the N workers that take part, and no run is repeated exactly:\n"
            "leave out global_batch, lr_scaling and replay, or use all_reduce",
            field="elastic",
        )
    if by_epoch:
        raise ConfigError(
            "schedule_every is 'epoch', and the number of workers may change, so that the rounds of an epoch are not "
            "known: give a schedule by step",
            field="schedule_every",
        )
