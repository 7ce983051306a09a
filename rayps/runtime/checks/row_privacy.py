"""With which workloads and data rows can be private: DP-SGD."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rayps_client.errors import ConfigError
from rayps_client.values import Json
from torch import nn

from rayps.core.grid import Grid
from rayps.core.refusals.table import refuse
from rayps.core.strategy.strategy import StrategyView
from rayps.core.strategy.strategy_families import SERVER_STEPS, SYNC_GRADIENTS, Reshuffled, learns_by_client
from rayps.core.strategy.topology import is_private
from rayps.data.base import Data
from rayps.privacy.account import solve_noise
from rayps.privacy.budget import must_allow_one
from rayps.privacy.mechanism import Mechanism
from rayps.privacy.options import POISSON, privacy_in
from rayps.privacy.row_level import RowPrivacy
from rayps.workload.base import Workload, evaluates_training_data
from rayps.workload.norm_by_row import mixing_layer, norm_by_row


def private_phases(
    phases: Sequence[tuple[StrategyView, Grid]], workload: Workload, data: Data, model: nn.Module
) -> tuple[RowPrivacy, ...]:
    """Return the privacy of each phase whose rows are private: see `private_rows`."""
    found = (private_rows(strategy, workload, data, model, grid) for strategy, grid in phases)
    return tuple(each for each in found if each is not None)


def private_rows(
    strategy: StrategyView, workload: Workload, data: Data, model: nn.Module, grid: Grid
) -> RowPrivacy | None:
    """Return the privacy of the rows under a strategy, with the noise that was found; None if they are not private.

    Raises:
        ConfigError: the workload, its data or its model cannot be combined with privacy, no noise suffices, or the
            budget allows no step.
    """
    spec = privacy_in(strategy)
    if learns_by_client(strategy) or (spec is None and not is_private(strategy)):
        return None
    if spec is None or not is_private(strategy):
        raise ConfigError(
            f"strategy {strategy.name} is private by only one of its property privacy_spec and its topology: derive it "
            "from all_reduce or parameter_server without a topology of its own, or leave out privacy",
            field="privacy",
        )
    found: dict[str, Json] = {
        "rows without numbers": None if data.has_length and data.has_row_numbers else type(data).__name__,
        "loaded_by": data.ahead is not None,
        "an evaluation of training data": evaluates_training_data(workload),
        "rows or a loop of its own": strategy.rows != Reshuffled()
        or strategy.loop not in (SYNC_GRADIENTS, SERVER_STEPS),
    }
    given = {name: value for name, value in found.items() if value}
    refuse(given | {"privacy": True, "strategy": strategy.name})
    _check_layers(model)
    if strategy.loop == SERVER_STEPS and grid.data > 1:
        _check_pushes(model)
    rows = data.rows()
    batch = min(rows, data.batch_size * grid.data)
    mechanism = solve_noise(spec, lambda noise: Mechanism(POISSON, noise, batch / rows))
    must_allow_one(spec, mechanism)
    return RowPrivacy(spec, mechanism, rows, batch)


def _check_layers(model: nn.Module) -> None:
    """Refuse layers whose output for one row depends on other rows, or that keep statistics of rows."""
    found = mixing_layer(model)
    if found is not None:
        name, layer = found
        raise ConfigError(
            f"layer {name!r} is a {type(layer).__name__}, whose statistics mix rows and would be released without "
            f"noise: to normalize each row alone, replace it by {norm_by_row(layer)}; or leave out privacy",
            field="privacy",
        )


def _check_pushes(model: nn.Module) -> None:
    """Refuse parameters in whose dtype a worker's part of the sum would be rounded by more than one row adds."""
    for name, p in model.named_parameters():
        if p.requires_grad and p.element_size() < torch.float32.itemsize:
            dtype = str(p.dtype).removeprefix("torch.")
            raise ConfigError(
                f"parameter {name!r} is {dtype}, and workers push their parts of a private sum to servers in this "
                "dtype, before the noise is in all of them: use all_reduce, which adds them in float32, one worker, or "
                "float32 parameters with precision='bf16'",
                field="privacy",
            )
