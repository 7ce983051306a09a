"""How the workers of each family of strategies can change while a job runs. Pure.

all_reduce                       the workers hold the state in memory, and newcomers get it from a peer
servers in step, averages,       all workers stop after one round, the driver takes the state of this round, and the
sharded state, federated         new group starts from it
"""

from __future__ import annotations

from rayps.core.elastic import ElasticWorkers
from rayps.core.errors import ConfigError
from rayps.core.strategy import StrategyView
from rayps.core.strategy_families import (
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
from rayps.core.topology import Peers, Servers, backup_in, replica_of, servers_of

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
        why = "a worker that is late has rows and means of its own"
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
    elif not isinstance(strategy.topology, (Peers, Servers)) or strategy.loop not in _IN_STEP:
        why = "all workers share one vector in memory, or the loop is not one of rayps"
    if why is not None:
        raise ConfigError(
            f"workers is a range or elastic, and under {name} {why}: give a fixed number of workers, or use "
            "all_reduce, parameter_server with staleness=0, local_sgd or diloco",
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
