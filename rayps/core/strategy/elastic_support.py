"""How the workers of each family of strategies can change while a job runs. Pure.

all_reduce                       the workers hold the state in memory, and newcomers get it from a peer
servers in step, averages,       all workers stop after one round, the driver takes the state of this round, and the
sharded state, federated         new group starts from it
servers not in step              workers join and leave at any time, and get their rows by leases
"""

from __future__ import annotations

from collections.abc import Sequence

from rayps_client.values import Json

from rayps.core.refusals.of_elastic_workers import BY_LEASES, IN_STEP
from rayps.core.refusals.table import refuse
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
from rayps.core.strategy.topology import Peers, features_of, runs_in_step, servers_of

_IN_STEP = (SYNC_GRADIENTS, SERVER_STEPS, LOCAL_UPDATES, SHARDED_STATE, SHARDED_PARAMETERS, FEDERATED_ROUNDS)

_BALANCED = (SYNC_GRADIENTS, SERVER_STEPS)


def hands_over(strategy: StrategyView) -> bool:
    """Return whether each worker holds the whole state of the job in memory after each round."""
    return isinstance(strategy.topology, Peers) and strategy.loop == SYNC_GRADIENTS


def _features(phase: Phase, elastic: ElasticWorkers, *, tables: bool) -> dict[str, Json]:
    """Return the features of a phase of an elastic job, as `rayps.core.refusals` names them."""
    strategy = phase.strategy
    topology, by_client = strategy.topology, learns_by_client(strategy)
    servers = servers_of(strategy)
    found: dict[str, Json] = {
        "sparse tables": tables,
        "real clients": by_client and has_remote_clients(strategy),
        "rows of clients": by_client,
        "rows that workers keep": not by_client and not isinstance(strategy.rows, Reshuffled),
        "a loop that is not of rayps": strategy.loop not in _IN_STEP,
        "no mean of one batch": strategy.loop not in _BALANCED,
        "parameters that workers change": servers is not None and (servers.own_copies or servers.update.spans),
    }
    given = features_of(topology) | elastic.features() | {"strategy": phase.name}
    return given | {name: value for name, value in found.items() if value}


def check_phases(
    phases: Sequence[Phase], elastic: ElasticWorkers, *, tables: bool = False, by_epoch: bool = False
) -> None:
    """Refuse a job whose workers cannot change: by leases if those of the first phase are not in step, else in step.

    `tables`: whether the model has sparse tables. `by_epoch`: whether the learning rate has a schedule by epoch.

    Raises:
        ConfigError: the text says why, and what can be used instead.
    """
    if takes_leases(phases):
        shared: dict[str, Json] = {BY_LEASES: True}
        shared |= {"a schedule by epoch": True} if by_epoch else {}
        shared |= {"several phases": len(phases)} if len(phases) > 1 else {}
        refuse(_features(phases[0], elastic, tables=tables) | shared)
        return
    for phase in phases:
        in_step: dict[str, Json] = {IN_STEP: True}
        in_step |= {"steps by servers": True} if servers_of(phase.strategy) is not None else {}
        refuse(_features(phase, elastic, tables=tables) | in_step)
    if len({learns_by_client(phase.strategy) for phase in phases}) > 1:
        refuse({IN_STEP: True, "phases by client and by row": True})


def takes_leases(phases: Sequence[Phase]) -> bool:
    """Return whether the workers of an elastic job get their rows by leases: those of the first phase are not in step.

    Otherwise the workers change in step, if they can.
    """
    first = phases[0].strategy
    return servers_of(first) is not None and not runs_in_step(first)
