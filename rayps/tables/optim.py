"""Optimizers of rows: each row has its own state, and only rows that a gradient names move. Pure.

On the rows that are touched they take, to the bit, the steps of torch.optim.SGD, torch.optim.Adagrad and
torch.optim.SparseAdam; Adam counts the steps of each row by itself, so that a rare row is corrected as if it were new.
Weight decay is applied to the rows of a push, by the share of a step that the push counts for: a row that all workers
touch in a round decays as in step, a row that few touch decays less.
Duchi et al., "Adaptive Subgradient Methods", JMLR 2011; Kingma and Ba, "Adam", ICLR 2015.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rayps.elastic.space import Table
from rayps.errors import ConfigError
from rayps.tables.pages import Field

State = Mapping[str, Tensor]  # by field: [n, width]
Knobs = Mapping[str, Any]  # the numbers of an optimizer by name, e.g. {"lr": 0.1}


class Rule(Protocol):
    """What a table's optimizer does with a block of rows that were gathered."""

    fields: tuple[Field, ...]
    knobs: Knobs

    def step(self, rows: Tensor, state: State, grad: Tensor, now: Knobs) -> None:
        """Step rows [n, dim] and their state in place, by the knobs of `now`; `grad` may be written to."""


class SGD:
    """w <- w - lr (g + weight_decay w); with momentum m: b <- m b + g, w <- w - lr b."""

    def __init__(self, table: Table, lr: float, momentum: float, weight_decay: float) -> None:
        self.knobs: Knobs = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        self.fields = (Field("momentum", table.dim, table.dtype),) if momentum else ()

    def step(self, rows: Tensor, state: State, grad: Tensor, now: Knobs) -> None:
        """One step, in place."""
        if now["weight_decay"]:
            grad.add_(rows, alpha=now["weight_decay"])
        if now["momentum"]:
            grad = state["momentum"].mul_(now["momentum"]).add_(grad)
        rows.add_(grad, alpha=-now["lr"])


class Adagrad:
    """s <- s + g^2, w <- w - lr g / (sqrt(s) + eps)."""

    def __init__(self, table: Table, lr: float, eps: float, initial_accumulator_value: float, weight_decay: float):
        self.knobs: Knobs = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        self.fields = (Field("sum", table.dim, table.dtype, initial_accumulator_value),)

    def step(self, rows: Tensor, state: State, grad: Tensor, now: Knobs) -> None:
        """One step, in place."""
        if now["weight_decay"]:
            grad.add_(rows, alpha=now["weight_decay"])
        total = state["sum"].addcmul_(grad, grad, value=1)
        rows.addcdiv_(grad, total.sqrt().add_(now["eps"]), value=-now["lr"])


class Adam:
    """m and v are running means of g and g^2; w <- w - lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps), t by row."""

    def __init__(self, table: Table, lr: float, betas: tuple[float, float], eps: float) -> None:
        self._lr, self._betas = lr, betas
        self.knobs: Knobs = {"lr": lr, "betas": betas, "eps": eps}
        self._sizes = np.zeros(1)
        self._last = 1  # from this step on both corrections are 1, to the bit
        while max(betas) ** self._last > 2.0**-54:
            self._last *= 2
        self.fields = (
            Field("mean", table.dim, table.dtype),
            Field("square", table.dim, table.dtype),
            Field("step", 1, "int64"),
        )

    def step(self, rows: Tensor, state: State, grad: Tensor, now: Knobs) -> None:
        """One step, in place."""
        first, second = now["betas"]
        mean, square, taken = state["mean"], state["square"], state["step"].add_(1)
        part = grad.sub(mean).mul_(1 - first)
        numer = part.add_(mean)
        mean.copy_(numer)
        part = grad.pow_(2).sub_(square).mul_(1 - second)
        denom = part.add_(square)
        square.copy_(denom)
        sizes = torch.from_numpy(self._size(taken.numpy())).to(rows.dtype)
        rows.add_(numer.div_(denom.sqrt_().add_(now["eps"])).mul_(sizes))

    def _size(self, steps: Any) -> Any:
        """By step: minus the length of it, as Python's own arithmetic gives it."""
        steps = np.minimum(steps, self._last)
        for t in range(len(self._sizes), int(steps.max(initial=0)) + 1):
            if t == len(self._sizes):  # lengths of twice as many steps are made at once
                more = [self._length(k) for k in range(t, min(2 * t, self._last) + 1)]
                self._sizes = np.concatenate([self._sizes, more])
        return self._sizes[steps]

    def _length(self, t: int) -> float:
        first, second = self._betas
        return -self._lr * math.sqrt(1 - second**t) / (1 - first**t)


_KNOBS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.01, "momentum": 0.0, "weight_decay": 0.0},
    "adagrad": {"lr": 0.01, "eps": 1e-10, "initial_accumulator_value": 0.0, "weight_decay": 0.0},
    "adam": {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8},
}
_KINDS: dict[str, Any] = {"sgd": SGD, "adagrad": Adagrad, "adam": Adam}


def rule_of(table: Table) -> Rule:
    """The optimizer that a table names, e.g. {"name": "adagrad", "lr": 0.1}; what is left out is torch's.

    Raises:
        ConfigError: there is no such optimizer or knob, or a number is not finite, or below 0.
    """
    given = dict(table.optimizer)
    name = given.pop("name", None)
    if name not in _KINDS:
        raise ConfigError(f"table {table.name!r}: there is no optimizer of rows {name!r}: there are sgd, adagrad and "
                          "adam", field="optimizer", table=table.name)  # fmt: skip
    knobs = _KNOBS[name]
    for key, value in given.items():
        if key not in knobs:
            raise ConfigError(f"table {table.name!r}: {name} has no {key!r}: it has {', '.join(knobs)}",
                              field="optimizer", table=table.name)  # fmt: skip
        if not _fits(key, value):
            raise ConfigError(f"table {table.name!r}: {key} of {name} is {value!r}: give "
                              f"{'two numbers from 0 to below 1' if key == 'betas' else 'a number of at least 0'}",
                              field="optimizer", table=table.name)  # fmt: skip
    found: Rule = _KINDS[name](table, **{**knobs, **given})
    return found


def _fits(key: str, value: Any) -> bool:
    if key == "betas":
        return isinstance(value, (list, tuple)) and len(value) == 2 and all(_number(b) and 0 <= b < 1 for b in value)
    return _number(value) and value >= 0


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
