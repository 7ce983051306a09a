"""The features of a job that the strategy of a phase declares, as `rayps.core.refusals` names them."""

from __future__ import annotations

from rayps_client.values import Json

from rayps.core.strategy.replica import Pipeline
from rayps.core.strategy.strategy import Phase
from rayps.core.strategy.strategy_families import (
    SERVER_STEPS,
    SHARED_VECTOR,
    SYNC_GRADIENTS,
    Reshuffled,
    has_remote_clients,
)
from rayps.core.strategy.topology import features_of, replica_of
from rayps.federated.strategy_interface import FederatedView
from rayps.privacy.options import privacy_in
from rayps.strategies.admm import ADMM


def features_of_phase(phase: Phase) -> dict[str, Json]:
    """Return the features that the strategy of a phase declares."""
    strategy = phase.strategy
    replica = replica_of(strategy)
    several = replica is not None and replica.stages * replica.tensor > 1
    found: dict[str, Json] = {
        "privacy of any kind": privacy_in(strategy) is not None,
        "clients": isinstance(strategy, FederatedView),
        "real clients": has_remote_clients(strategy),
        "rows of workers": strategy.rows != Reshuffled(),
        "a loop of its own": strategy.loop if strategy.loop not in (SYNC_GRADIENTS, SERVER_STEPS) else None,
        "one shared vector": strategy.loop == SHARED_VECTOR,
        "no consensus before the end": isinstance(strategy, ADMM),
        "parts of a model": several,
        "stages of a pipeline": isinstance(replica, Pipeline) and replica.stages > 1,
        "tensor ranks": replica is not None and replica.tensor > 1,
    }
    declared = features_of(strategy.topology) | {"strategy": phase.name}
    return declared | {name: value for name, value in found.items() if value}
