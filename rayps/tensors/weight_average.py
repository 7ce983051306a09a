"""Averages of a model's weights over training: an exponential moving average, and stochastic weight averaging. Pure.

The average is updated after a step, on the whole vector of trained parameters, as by
`torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn` or `get_swa_multi_avg_fn`. The first update copies the
parameters. Buffers are not averaged. A round in which all workers have skipped their step (`rayps.tensors.loss_scale`)
is no step.

The state of an average is stored in a dict of tensors under the names `PARAMS`, `COUNT` and `STEPS`, among the
strategy's own tensors, which are in every checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rayps.core.errors import ConfigError
from rayps.core.values import JsonObject, Keywords

PREFIX = "average/"
PARAMS = f"{PREFIX}params"  # the average, a vector [size]
COUNT = f"{PREFIX}count"  # the number of parameters in the average
STEPS = f"{PREFIX}steps"  # the number of steps that led to the last parameters that were considered


@dataclass(frozen=True, slots=True)
class EMA:
    """An exponential moving average of the weights: average <- decay * average + (1 - decay) * weights, in each step.

    Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", SIAM J. Control Optim. 1992; in this
    form as in `torch.optim.swa_utils.get_ema_multi_avg_fn`. `decay` is from 0 to below 1.

    Example:
        class Digits(rayps.Workload):
            average = rayps.EMA(0.999)
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        if isinstance(self.decay, bool) or not isinstance(self.decay, (int, float)) or not 0 <= self.decay < 1:
            raise ConfigError(f"decay of EMA is {self.decay!r}: give a number of at least 0 and below 1", field="decay")

    def due(self, step: int) -> bool:
        """Return whether the parameters after `step` steps belong to the average: always, except before the first."""
        return step > 0

    def weight(self, count: int) -> float:
        """Return the weight of the next parameters; `count` is the number of parameters in the average."""
        return 1 - self.decay


@dataclass(frozen=True, slots=True)
class SWA:
    """The equal mean of the weights after step `start` and after every further `every` steps.

    Izmailov et al., "Averaging weights leads to wider optima and better generalization", UAI 2018.

    Example:
        class Digits(rayps.Workload):
            average = rayps.SWA(start=500, every=10)
    """

    start: int = 1
    every: int = 1

    def __post_init__(self) -> None:
        for name in ("start", "every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} of SWA is {value!r}: give a number of steps of at least 1", field=name)

    def due(self, step: int) -> bool:
        """Return whether the parameters after `step` steps belong to the average."""
        return step >= self.start and (step - self.start) % self.every == 0

    def weight(self, count: int) -> float:
        """Return the weight of the next parameters; `count` is the number of parameters in the average."""
        return 1 / (count + 1)


Average: TypeAlias = EMA | SWA


def update(average: Average, state: MutableMapping[str, Any], params: Tensor, step: int) -> None:
    """Consider the parameters [size] after `step` steps: update the average in `state` if they belong to it.

    Do nothing if the state has considered the parameters after as many steps before. The parameters may be on another
    device than the average: those of servers are on the CPU, also if the worker has a GPU.
    """
    if step <= int(state.get(STEPS, -1)):
        return
    if average.due(step):
        count = int(state[COUNT]) if COUNT in state else 0
        if count:
            state[PARAMS].lerp_(params.detach().to(state[PARAMS].device), average.weight(count))
        else:
            state[PARAMS] = params.detach().clone()
        state[COUNT] = torch.tensor(count + 1)
    state[STEPS] = torch.tensor(step)


def averaged(average: Average | None, state: Mapping[str, Any], params: Tensor, step: int) -> Tensor | None:
    """Return the average that includes the parameters [size] after `step` steps, or None if there is no average yet.

    `state` does not change. The parameters are added only if the state has not considered them yet.
    """
    if average is None:
        return None
    held = {name: state[name] for name in (PARAMS, COUNT, STEPS) if name in state}
    if step > int(held.get(STEPS, 0)) and average.due(step):
        if PARAMS in held:
            held[PARAMS] = held[PARAMS].clone()
        update(average, held, params, step)
    found: Tensor | None = held.get(PARAMS)
    return found


def to_json(average: Average | None) -> JsonObject | None:
    """Return an average as JSON data, for a checkpoint: its class and its numbers. None without an average."""
    return None if average is None else {"kind": type(average).__name__, **asdict(average)}


def from_json(data: JsonObject | None) -> Average | None:
    """Return the average that `to_json` returned as JSON data."""
    if data is None:
        return None
    numbers: Keywords = {name: value for name, value in data.items() if name != "kind"}
    return EMA(**numbers) if data["kind"] == "EMA" else SWA(**numbers)


def only(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the average."""
    return {name: value for name, value in state.items() if name.startswith(PREFIX)}


def check_average(average: object) -> None:
    """Refuse what is neither None nor an average. Raises ConfigError."""
    if average is not None and not isinstance(average, EMA | SWA):
        raise ConfigError(
            f"average of the workload is {average!r}: give rayps.EMA(decay), rayps.SWA(start, every), or None",
            field="average",
        )


def mean_of(states: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the state whose average is the mean over workers, or {} if not all workers have an average.

    An average is linear in the parameters: this is the average of the mean of the workers' parameters.
    """
    if not states or not all(PARAMS in state for state in states):
        return {}
    held = {name: states[0][name] for name in (COUNT, STEPS) if name in states[0]}
    return held | {PARAMS: torch.stack([state[PARAMS] for state in states]).mean(0)}
