"""With which workloads and data backup workers can train. Pure."""

from __future__ import annotations

from rayps_client.errors import ConfigError

from rayps.core.strategy.strategy import StrategyView
from rayps.core.strategy.strategy_families import MEMBER_GRADIENTS, MEMBER_PUSHES, Reshuffled
from rayps.core.strategy.topology import backup_in
from rayps.data.base import Data


def check_backup_workers(strategy: StrategyView, data: Data, *, sync_batchnorm: bool) -> None:
    """Refuse backup workers where a late worker would be missed, or where its rows cannot be given to the next step.

    `sync_batchnorm`: whether BatchNorm layers are synchronized.

    Raises:
        ConfigError: the workload, its data or the strategy's rows or loop cannot be combined with backup workers.
    """
    if not backup_in(strategy):
        return
    why, way_out = None, ""
    if not data.has_length:
        why, way_out = "data without a length, whose batches no worker can read again", "give data with a length"
    elif data.ahead is not None:
        why = "loaded_by, because which batch a worker reads next is known only after each step"
        way_out = "leave out loaded_by"
    elif sync_batchnorm:
        why, way_out = "sync_batchnorm, for which each layer waits for all workers", "set sync_batchnorm to False"
    elif strategy.rows != Reshuffled():
        why, way_out = "rows that belong to workers", "use a strategy whose rows are Reshuffled()"
    elif strategy.loop not in (MEMBER_GRADIENTS, MEMBER_PUSHES):
        why = f"the loop {strategy.loop}, which waits for all workers"
        way_out = f"leave out `loop`, or derive yours from that of {MEMBER_GRADIENTS}"
    if why is not None:
        raise ConfigError(
            f"backup workers cannot be combined with {why}: {way_out}, or leave out backup", field="backup"
        )
