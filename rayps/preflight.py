"""What is wrong with a workload is found before any worker starts."""

from __future__ import annotations

import inspect

import torch
from torch.optim import Optimizer

from rayps import optim
from rayps.data import Data
from rayps.errors import ConfigError, WorkloadError
from rayps.flat import Layout
from rayps.strategy import Phase
from rayps.user_code import user_code
from rayps.worker import model_of
from rayps.workload import Workload


def preflight(workload: Workload, phases: list[Phase], workers: int) -> tuple[int, list[str]]:
    """Try data, model and optimizer: the number of batches per worker and epoch, and warnings for the user.

    Raises:
        DataError, WorkloadError, ConfigError: what is wrong and the way out.
    """
    data = _data(workload)
    with torch.random.fork_rng(devices=[]):  # the user's own random numbers stay as they were
        model = model_of(workload)
    layout = Layout.of((name, p) for name, p in model.named_parameters() if p.requires_grad)
    _refuse_closure(optim.build(workload.optimizer, layout))
    warnings = []
    if any(phase.strategy.shards for phase in phases):
        optim.check_elementwise(workload.optimizer, layout)
        loose = any(not phase.strategy.lockstep for phase in phases)
        if loose and workers > 1 and optim.ignores_scale(workload.optimizer, layout):
            warnings.append(
                "each push is scaled by 1/N, but this optimizer takes steps of the same "
                "size whatever the gradient's: N workers take N times the steps; lower its learning rate"
            )
    return data.steps(workers), warnings


def _data(workload: Workload) -> Data:
    with user_code("data"):
        data = workload.data()
    with user_code("evaluation_data"):
        evaluation = workload.evaluation_data()
    for given, method in ((data, "data"), (evaluation, "evaluation_data")):
        if not isinstance(given, Data):
            raise ConfigError(
                f"{method}() gave {type(given).__name__}: return rayps.data.parquet(...), "
                "rayps.data.tensors(...) or rayps.data.dataset(...)"
            )
        given.check()
    return data


def _refuse_closure(optimizer: Optimizer) -> None:
    # a step may evaluate a closure as often as it likes; a round of several workers gives it one gradient
    needed = [p.name for p in inspect.signature(optimizer.step).parameters.values()
              if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if needed:
        name = type(optimizer).__name__
        raise WorkloadError(
            f"optimizer(params) gave {name}, whose step() needs {', '.join(needed)}: a round has one gradient to give "
            "it, under every strategy\nuse an optimizer whose step() needs no closure, such as SGD, Adam or Adagrad"
        )
