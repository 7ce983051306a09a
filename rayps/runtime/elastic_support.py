"""Which strategies can run with a number of workers that changes. Pure."""

from __future__ import annotations

from rayps.core.errors import ConfigError
from rayps.core.strategy import StrategyView
from rayps.core.strategy_families import SYNC_GRADIENTS
from rayps.core.topology import Peers, replica_of, shard_of


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
