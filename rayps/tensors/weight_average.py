"""Averages of a model's weights over training: an exponential moving average, and stochastic weight averaging. Pure.

The average is updated after a step, on the whole vector of trained parameters, as by
`torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn` or `get_swa_multi_avg_fn`. The first update copies the
parameters. A round in which all workers have skipped their step (`rayps.tensors.loss_scale`) is no step.

The model's floating-point buffers are averaged like the parameters, as with `use_buffers=True` of torch: the running
statistics of BatchNorm are those of the parameters with which they were measured, and not those of an average of
earlier parameters. Other buffers, such as counts and masks with an infinite value, are the last ones.

The state of an average is stored in a dict of tensors under the names `PARAMS`, `COUNT` and `STEPS`, and `BUFFER` with
each buffer's name, among the strategy's own tensors, which are in every checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
from rayps_client.errors import ConfigError
from rayps_client.values import JsonObject, Keywords
from torch import Tensor

PREFIX = "average/"
PARAMS = f"{PREFIX}params"  # the average, a vector [size]
COUNT = f"{PREFIX}count"  # the number of parameters in the average
STEPS = f"{PREFIX}steps"  # the number of steps that led to the last parameters that were considered
BUFFER = f"{PREFIX}buffer/"  # before the name of a buffer: its average


@dataclass(frozen=True, slots=True)
class EMA:
    """An exponential moving average of the weights: average <- decay * average + (1 - decay) * weights, in each step.

    Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", SIAM J. Control Optim. 1992; in this
    form as in `torch.optim.swa_utils.get_ema_multi_avg_fn`. `decay` is from 0 to below 1. The average is over about
    1 / (1 - decay) steps. They must be a small part of all steps, because the first parameters are in it too.

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


def update(
    average: Average, state: MutableMapping[str, Any], params: Tensor, buffers: Mapping[str, Tensor], step: int
) -> None:
    """Consider the parameters [size] and the buffers after `step` steps: update the average in `state` if they are due.

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
        for name, value in _select_averaged_buffers(buffers, state, first=not count):
            key = f"{BUFFER}{name}"
            new = value.detach()
            state[key] = new.clone() if not count else state[key].lerp(new.to(state[key].device), average.weight(count))
        state[COUNT] = torch.tensor(count + 1)
    state[STEPS] = torch.tensor(step)


def _select_averaged_buffers(
    buffers: Mapping[str, Tensor], state: Mapping[str, Tensor], *, first: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that have an average. It is decided at the first update, so that later ones wait for no GPU."""
    for name, value in buffers.items():
        if (value.is_floating_point() and bool(value.isfinite().all())) if first else f"{BUFFER}{name}" in state:
            yield name, value


def read_average(
    average: Average | None, state: Mapping[str, Any], params: Tensor, buffers: Mapping[str, Tensor], step: int
) -> tuple[Tensor, dict[str, Tensor]] | None:
    """Return the averages of the parameters [size] and of the buffers, by name, or None if there is no average yet.

    They include `params` and `buffers`, which are those after `step` steps: they are added if the state has not
    considered them yet. `state` does not change.
    """
    if average is None:
        return None
    held = dict(select_average(state))
    if step > int(held.get(STEPS, 0)) and average.due(step):
        if PARAMS in held:
            held[PARAMS] = held[PARAMS].clone()
        update(average, held, params, buffers, step)
    if PARAMS not in held:
        return None
    return held[PARAMS], {name: held[f"{BUFFER}{name}"] for name in buffers if f"{BUFFER}{name}" in held}


def to_json(average: Average | None) -> JsonObject | None:
    """Return an average as JSON data, for a checkpoint: its class and its numbers. None without an average."""
    return None if average is None else {"kind": type(average).__name__, **asdict(average)}


def from_json(data: JsonObject | None) -> Average | None:
    """Return the average that `to_json` returned as JSON data."""
    if data is None:
        return None
    numbers: Keywords = {name: value for name, value in data.items() if name != "kind"}
    return EMA(**numbers) if data["kind"] == "EMA" else SWA(**numbers)


def select_average(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
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

    An average is linear in the parameters: this is the average of the mean of the workers' parameters. The buffers are
    those of the first worker.
    """
    if not states or not all(PARAMS in state for state in states):
        return {}
    return select_average(states[0]) | {PARAMS: torch.stack([state[PARAMS] for state in states]).mean(0)}
