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
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rayps.core.errors import ConfigError, WorkloadError
from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables.pages import Field
from rayps.tensors.learning_rate import Rates, Recipe, Ticks

State = Mapping[str, Tensor]  # by field: [n, width]
Knobs = Mapping[str, Any]  # the numbers of an optimizer by name, e.g. {"lr": 0.1}


class RowRule(Protocol):
    """What a table's optimizer does with a block of rows that were gathered."""

    fields: tuple[Field, ...]
    knobs: Knobs

    def step(self, rows: Tensor, state: State, grad: Tensor, now: Knobs) -> None:
        """Step rows [n, dim] and their state in place, by the knobs of `now`; `grad` may be written to."""


class SGD:
    """w <- w - lr (g + weight_decay w); with momentum m: b <- m b + g, w <- w - lr b."""

    def __init__(self, table: SparseTable, lr: float, momentum: float, weight_decay: float) -> None:
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

    def __init__(
        self, table: SparseTable, lr: float, eps: float, initial_accumulator_value: float, weight_decay: float
    ):
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

    def __init__(self, table: SparseTable, lr: float, betas: tuple[float, float], eps: float) -> None:
        self._betas = tuple(betas)
        self.knobs: Knobs = {"lr": lr, "betas": betas, "eps": eps}
        self._roots, self._firsts = np.ones(1), np.ones(1)  # by step: what corrects the length of a step
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
        sizes = torch.from_numpy(self._size(taken.numpy(), now["lr"], (first, second))).to(rows.dtype)
        rows.add_(numer.div_(denom.sqrt_().add_(now["eps"])).mul_(sizes))

    def _size(self, steps: Any, lr: float, betas: tuple[float, float]) -> Any:
        """By step: minus the length of it, as Python's own arithmetic gives it."""
        if betas != self._betas:  # a schedule has moved them
            known, places = np.unique(steps, return_inverse=True)
            roots, firsts = _corrections(known.tolist(), betas)
            return (-lr * roots / firsts)[places.reshape(steps.shape)]
        steps = np.minimum(steps, self._last)
        for t in range(len(self._roots), int(steps.max(initial=0)) + 1):
            if t == len(self._roots):  # those of twice as many steps are made at once
                roots, firsts = _corrections(range(t, min(2 * t, self._last) + 1), betas)
                self._roots, self._firsts = np.append(self._roots, roots), np.append(self._firsts, firsts)
        return -lr * self._roots[steps] / self._firsts[steps]


def _corrections(steps: Any, betas: tuple[float, float]) -> tuple[Any, Any]:
    """By step t: sqrt(1 - b2^t) and 1 - b1^t."""
    first, second = betas
    return np.array([math.sqrt(1 - second**t) for t in steps]), np.array([1 - first**t for t in steps])


_KNOBS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.01, "momentum": 0.0, "weight_decay": 0.0},
    "adagrad": {"lr": 0.01, "eps": 1e-10, "initial_accumulator_value": 0.0, "weight_decay": 0.0},
    "adam": {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8},
}
_KINDS: dict[str, Any] = {"sgd": SGD, "adagrad": Adagrad, "adam": Adam}


def rule_of(table: SparseTable) -> RowRule:
    """The optimizer that a table names, e.g. {"name": "adagrad", "lr": 0.1}; what is left out is torch's.

    Raises:
        ConfigError: there is no such optimizer or knob, or a number is not finite, or below 0.
    """
    given = dict(table.optimizer)
    name = given.pop("name", None)
    if name not in _KINDS:
        raise ConfigError(
            f"table {table.name!r}: there is no optimizer of rows {name!r}: there are sgd, adagrad and adam",
            field="optimizer",
            table=table.name,
        )
    knobs = _KNOBS[name]
    for key, value in given.items():
        if key not in knobs:
            raise ConfigError(
                f"table {table.name!r}: {name} has no {key!r}: it has {', '.join(knobs)}",
                field="optimizer",
                table=table.name,
            )
        if not _fits(key, value):
            raise ConfigError(
                f"table {table.name!r}: {key} of {name} is {value!r}: give "
                f"{'two numbers from 0 to below 1' if key == 'betas' else 'a number of at least 0'}",
                field="optimizer",
                table=table.name,
            )
    found: RowRule = _KINDS[name](table, **{**knobs, **given})
    return found


@dataclass(frozen=True)
class Scheduled:
    """A job's schedule for its tables: what gives each table's optimizer the knobs of a round."""

    recipe: Recipe
    ticks: Ticks

    def pace(self, table: SparseTable, rule: RowRule) -> TablePace:
        """Of one table. Raises WorkloadError."""
        return TablePace(self, table, rule)


class TablePace:
    """The knobs of one table's optimizer by round."""

    def __init__(self, scheduled: Scheduled, table: SparseTable, rule: RowRule) -> None:
        """Raises WorkloadError: the schedule cannot be evaluated."""
        self._table, self._rule, self._scheduled = table, rule, scheduled
        self._rates = Rates(scheduled.recipe.make, lambda: _torchs(table, rule))

    def at(self, number: int) -> Knobs:
        """In the round with this number. Raises WorkloadError."""
        tick = self._scheduled.ticks.of(self._scheduled.recipe.every, number)
        knobs = self._rule.knobs
        now = {**knobs, **{key: value for (_, key), value in self._rates.at(tick).items() if key in knobs}}
        if now.get("momentum") and not knobs["momentum"]:
            raise WorkloadError(
                f"schedule moves the momentum of table {self._table.name!r}, which was made without: give its "
                "optimizer a momentum, or leave it as it is (cycle_momentum=False)",
                table=self._table.name,
            )
        return now


def _torchs(table: SparseTable, rule: RowRule) -> Optimizer:
    """Torch's optimizer of the same kind and knobs, over a stand-in; its group names the table."""
    kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
    stand_in = nn.Parameter(torch.zeros(1, table.dim))
    knobs = {key: tuple(value) if isinstance(value, list) else value for key, value in rule.knobs.items()}
    made: Optimizer = kinds[table.optimizer["name"]]([{"params": [stand_in], "table": table.name}], **knobs)
    return made


def _fits(key: str, value: Any) -> bool:
    if key == "betas":
        return isinstance(value, (list, tuple)) and len(value) == 2 and all(_number(b) and 0 <= b < 1 for b in value)
    return _number(value) and value >= 0


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
