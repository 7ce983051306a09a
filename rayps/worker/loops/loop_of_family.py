"""The table of the families of strategies and their loops. A strategy names its family in `Strategy.loop`.

Loops are named by strings "module:Name". Therefore a job imports only the code of its own family.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rayps_client.errors import ConfigError

from rayps.core.rooms import load
from rayps.core.strategy import strategy_families

if TYPE_CHECKING:
    from rayps.core.strategy.strategy import StrategyView
    from rayps.worker.loops.loop import Loop

FAMILIES = {
    strategy_families.SYNC_GRADIENTS: "rayps.worker.loops.sync_gradients:SyncGradients",
    strategy_families.SERVER_STEPS: "rayps.worker.loops.server_steps:ServerSteps",
    strategy_families.LOCAL_UPDATES: "rayps.worker.loops.local_updates:LocalUpdates",
    strategy_families.SHARED_VECTOR: "rayps.worker.loops.shared_vector:SharedVectorSteps",
    strategy_families.SHARDED_STATE: "rayps.worker.loops.sharded_state:ShardedState",
    strategy_families.SHARDED_PARAMETERS: "rayps.worker.loops.sharded_parameters:ShardedParameters",
    strategy_families.FEDERATED_ROUNDS: "rayps.worker.loops.federated_rounds:FederatedRounds",
}
MEMBERS = {  # decides whose gradients of a step count, with backup workers: by the exchange of the family
    strategy_families.SYNC_GRADIENTS: "rayps.worker.first_on_ring:FirstOnRing",
    strategy_families.SERVER_STEPS: "rayps.worker.first_at_servers:FirstAtServers",
}
ROW_PRIVACY = "rayps.worker.noised_sums:NoisedSums"  # makes the sums of a worker private
ROW_DRAWS = "rayps.worker.rows.private_rows:draws_of"  # draws the rows of private sums


def loop_class(strategy: StrategyView) -> type[Loop]:
    """Return the loop that runs a strategy: its family's loop, or the strategy's own.

    Raises:
        ConfigError: `strategy.loop` is neither the name of a family, nor a subclass of `Loop`, nor the name
            "module:Class" of a subclass.
    """
    given: Any = strategy.loop
    known = isinstance(given, str) and (given in FAMILIES or ":" in given)
    found = load(FAMILIES.get(given, given)) if known else given
    if not isinstance(found, type) or not hasattr(found, "run_round"):
        raise ConfigError(
            f"strategy {strategy.name!r} has loop {given!r}: give {', '.join(FAMILIES)}, or a subclass of "
            "rayps.worker.loops.loop.Loop, or its path as 'module:Class'",
            field="strategy",
        )
    return found
