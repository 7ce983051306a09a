"""How the workers of each family of strategies can change while a job runs. Pure.

all_reduce                       the workers hold the state in memory, and newcomers get it from a peer
servers in step, averages,       all workers stop after one round, the driver takes the state of this round, and the
sharded state, federated         new group starts from it
servers not in step              workers join and leave at any time, and get their rows by leases
"""

from __future__ import annotations

from collections.abc import Sequence

from rayps_client.errors import ConfigError

from rayps.core.strategy.elastic import ElasticWorkers
from rayps.core.strategy.strategy import Phase, StrategyView
from rayps.core.strategy.strategy_families import (
    FEDERATED_ROUNDS,
    LOCAL_UPDATES,
    SERVER_STEPS,
    SHARDED_PARAMETERS,
    SHARDED_STATE,
    SYNC_GRADIENTS,
    Reshuffled,
    has_remote_clients,
    learns_by_client,
)
from rayps.core.strategy.topology import (
    Adaptive,
    Peers,
    Servers,
    backup_in,
    is_private,
    replica_of,
    runs_in_step,
    servers_of,
)

_IN_STEP = (SYNC_GRADIENTS, SERVER_STEPS, LOCAL_UPDATES, SHARDED_STATE, SHARDED_PARAMETERS, FEDERATED_ROUNDS)

_BALANCED = (SYNC_GRADIENTS, SERVER_STEPS)


def hands_over(strategy: StrategyView) -> bool:
    """Return whether each worker holds the whole state of the job in memory after each round."""
    return isinstance(strategy.topology, Peers) and strategy.loop == SYNC_GRADIENTS


def check_elastic(name: str, strategy: StrategyView, elastic: ElasticWorkers, *, tables: bool) -> None:
    """Refuse a strategy whose workers cannot change while it runs. `tables`: whether the model has sparse tables.

    Raises:
        ConfigError: the workers must be a fixed number. The text says why, and what can be used instead.
    """
    why, servers, by_client = None, servers_of(strategy), learns_by_client(strategy)
    if replica_of(strategy) is not None:
        why = "a replica is several workers"
    elif backup_in(strategy):
        why = "a worker that is late has rows and means of its own, with backup"
    elif is_private(strategy):
        why = "each worker draws rows of its own for privacy"
    elif tables:
        why = "the model has sparse tables"
    elif by_client and has_remote_clients(strategy):
        why = "the clients are processes outside of the cluster, and the workers only combine their replies"
    elif not by_client and not isinstance(strategy.rows, Reshuffled):
        why = "each worker keeps its rows"
    elif servers is not None and servers.replicas is not None:
        why = "the parameters are on a group of servers"
    elif servers is not None and not servers.in_step:
        why = "workers are not in step"
    elif not isinstance(strategy.topology, (Peers, Servers)):
        why = "all workers share one vector in memory"
    elif strategy.loop not in _IN_STEP:
        why = "the loop is not one of rayps"
    if why is not None:
        raise ConfigError(
            f"workers is a range or elastic, and under {name} {why}: give a fixed number of workers, or use "
            "all_reduce, parameter_server, local_sgd or diloco without what stands in the way",
            field="workers",
        )
    if servers is not None and elastic.lr_scaling != "keep":
        raise ConfigError(
            f"lr_scaling is {elastic.lr_scaling!r}, and under {name} servers step: give global_batch instead, or use "
            "all_reduce",
            field="lr_scaling",
        )
    if elastic.balance and strategy.loop not in _BALANCED:
        raise ConfigError(
            f"balance is True, and under {name} the workers do not average the gradients of one batch in each round: "
            "leave it out, or use all_reduce or parameter_server with staleness=0",
            field="balance",
        )
    if by_client and (elastic.global_batch is not None or elastic.lr_scaling != "keep"):
        raise ConfigError(
            f"global_batch and lr_scaling are for rows that workers share, and under {name} rows belong to clients: "
            "leave them out",
            field="global_batch",
        )


def check_phases(
    phases: Sequence[Phase], elastic: ElasticWorkers, *, tables: bool = False, by_epoch: bool = False
) -> None:
    """Refuse a job whose workers cannot change: by leases if those of the first phase are not in step, else in step.

    `tables`: whether the model has sparse tables. `by_epoch`: whether the learning rate has a schedule by epoch.

    Raises:
        ConfigError: the text says why, and what can be used instead.
    """
    if takes_leases(phases):
        check_leased(phases, elastic, tables=tables, by_epoch=by_epoch)
        return
    for phase in phases:
        check_elastic(phase.name, phase.strategy, elastic, tables=tables)
    if len({learns_by_client(phase.strategy) for phase in phases}) > 1:
        raise ConfigError(
            "workers is a range, and some phases learn by client: give a fixed number of workers", field="workers"
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
    elif isinstance(servers.consistency, Adaptive):
        why = "the staleness bound moves"
    fixed = elastic.global_batch is not None or elastic.lr_scaling != "keep" or elastic.replay is not None
    if fixed or elastic.balance:
        raise ConfigError(
            f"under {name} workers are not in step: each takes batch_size rows at a time, servers scale a push by 1/N "
            "with the N workers that take part, and no run is repeated exactly: "
            "leave out global_batch, lr_scaling, replay and balance, or use all_reduce",
            field="elastic",
        )
    if why is not None:
        raise ConfigError(
            f"workers is a range, and under {name} {why}: use parameter_server in one phase, or give a fixed number of "
            "workers",
            field="workers",
        )
    if by_epoch:
        raise ConfigError(
            "schedule_every is 'epoch', and the number of workers may change, so that the rounds of an epoch are not "
            "known: give a schedule by step",
            field="schedule_every",
        )
