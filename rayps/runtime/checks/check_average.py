"""Under which strategies the weights can be averaged (`Workload.average`). Pure."""

from __future__ import annotations

from rayps_client.errors import ConfigError

from rayps.core.strategy.strategy import StrategyView
from rayps.core.strategy.strategy_families import MEMBER_PUSHES, SHARED_VECTOR
from rayps.core.strategy.topology import replica_of, servers_of, shard_of
from rayps.strategies.admm import ADMM
from rayps.tensors.weight_average import Average

_WAY_OUT = "leave average out, or use all_reduce, local_sgd, parameter_server or a federated strategy"


def check_average_under(strategy: StrategyView, average: Average | None) -> None:
    """Refuse an average under a strategy that cannot compute it.

    Raises:
        ConfigError: the model is divided, or no worker holds the parameters that the average is of.
    """
    if average is None:
        return
    servers, why = servers_of(strategy), None
    if replica_of(strategy) is not None:
        why = "its workers hold parts of the model"
    elif shard_of(strategy) is not None:
        why = "each worker holds a slice of its state"
    elif strategy.loop == SHARED_VECTOR:
        why = "its workers change the parameters while one of them would read them"
    elif strategy.loop == MEMBER_PUSHES:
        why = "with backup workers a late worker does not pull the parameters of every step"
    elif isinstance(strategy, ADMM):
        why = "its workers' parameters agree only at the end"
    elif servers is not None and servers.own_copies:
        why = "its workers step copies of the servers' parameters"
    if why is not None:
        raise ConfigError(
            f"average is {average}, and {strategy.name} cannot average: {why}; {_WAY_OUT}", field="average"
        )
