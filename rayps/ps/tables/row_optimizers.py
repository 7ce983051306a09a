"""Optimizers of rows: each row has its own state, and only rows with a gradient change. No I/O.

On rows with a gradient, the steps have the same bits as those of torch.optim.SGD, torch.optim.Adagrad and
torch.optim.SparseAdam. Adam counts the steps of each row separately, and the bias correction of a row uses this count.
Weight decay applies only to the rows of a push, and is scaled by the share of a step for which the push counts. A row
that all workers push in a round decays by a whole step; a row that few workers push decays by less.
Duchi et al., "Adaptive Subgradient Methods", JMLR 2011; Kingma and Ba, "Adam", ICLR 2015.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from rayps_client.errors import ConfigError, WorkloadError
from rayps_client.values import Json, is_number
from torch import Tensor, nn
from torch.optim import Optimizer

from rayps.ps.protocol.space import Space, SparseTable
from rayps.ps.tables.pages import Field
from rayps.tensors.learning_rate import Rates, Recipe, Ticks
from rayps.tensors.optim import Factory

State = Mapping[str, Tensor]  # optimizer state of n rows: from field to [n, width]
Betas: TypeAlias = tuple[float, float]
OptimizerOptions = Mapping[str, Any]  # the options of an optimizer, with torch's names: numbers, and betas
_Doubles = NDArray[np.float64]


class RowRule(Protocol):
    """The optimizer of a table, which steps a block of rows."""

    fields: tuple[Field, ...]
    options: OptimizerOptions

    def step(self, rows: Tensor, state: State, grad: Tensor, now: OptimizerOptions) -> None:
        """Step rows [n, dim] and their state in place, with the options `now`. `grad` [n, dim] is overwritten."""


class SGD:
    """SGD on rows w with gradients g: w <- w - lr (g + weight_decay w).

    With momentum m and state b: b <- m b + (g + weight_decay w), w <- w - lr b.
    """

    def __init__(self, table: SparseTable, lr: float, momentum: float, weight_decay: float) -> None:
        self.options: OptimizerOptions = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        self.fields = (Field("momentum", table.dim, table.dtype),) if momentum else ()

    def step(self, rows: Tensor, state: State, grad: Tensor, now: OptimizerOptions) -> None:
        """Apply one step, in place."""
        if now["weight_decay"]:
            grad.add_(rows, alpha=now["weight_decay"])
        if now["momentum"]:
            grad = state["momentum"].mul_(now["momentum"]).add_(grad)
        rows.add_(grad, alpha=-now["lr"])


class Adagrad:
    """Adagrad on rows w with gradients g and state s: s <- s + g^2, w <- w - lr g / (sqrt(s) + eps)."""

    def __init__(
        self, table: SparseTable, lr: float, eps: float, initial_accumulator_value: float, weight_decay: float
    ):
        self.options: OptimizerOptions = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        self.fields = (Field("sum", table.dim, table.dtype, initial_accumulator_value),)

    def step(self, rows: Tensor, state: State, grad: Tensor, now: OptimizerOptions) -> None:
        """Apply one step, in place."""
        if now["weight_decay"]:
            grad.add_(rows, alpha=now["weight_decay"])
        total = state["sum"].addcmul_(grad, grad, value=1)
        rows.addcdiv_(grad, total.sqrt().add_(now["eps"]), value=-now["lr"])


class Adam:
    """Adam on rows w with gradients g: w <- w - lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps).

    m and v are running means of g and g^2 with the factors b1 and b2; t counts the steps of each row.
    """

    def __init__(self, table: SparseTable, lr: float, betas: tuple[float, float], eps: float) -> None:
        self._betas = tuple(betas)
        self.options: OptimizerOptions = {"lr": lr, "betas": betas, "eps": eps}
        self._roots, self._firsts = (
            np.ones(1),
            np.ones(1),
        )  # the two bias corrections of each step: see `_compute_corrections`
        self._last = 1  # from this step on both corrections are 1, to the bit
        while max(betas) ** self._last > 2.0**-54:
            self._last *= 2
        self.fields = (
            Field("mean", table.dim, table.dtype),
            Field("square", table.dim, table.dtype),
            Field("step", 1, "int64"),
        )

    def step(self, rows: Tensor, state: State, grad: Tensor, now: OptimizerOptions) -> None:
        """Apply one step, in place."""
        first, second = now["betas"]
        mean, square, taken = state["mean"], state["square"], state["step"].add_(1)
        part = grad.sub(mean).mul_(1 - first)
        numer = part.add_(mean)
        mean.copy_(numer)
        part = grad.pow_(2).sub_(square).mul_(1 - second)
        denom = part.add_(square)
        square.copy_(denom)
        sizes = torch.from_numpy(self._compute_size(taken.numpy(), now["lr"], (first, second))).to(rows.dtype)
        rows.add_(numer.div_(denom.sqrt_().add_(now["eps"])).mul_(sizes))

    def _compute_size(self, steps: NDArray[np.int64], lr: float, betas: Betas) -> _Doubles:
        """Return the negated step size at each step number, with the rounding of Python's float arithmetic."""
        if betas != self._betas:  # a schedule has changed them
            known, places = np.unique(steps, return_inverse=True)
            roots, firsts = _compute_corrections(known.tolist(), betas)
            return (-lr * roots / firsts)[places.reshape(steps.shape)]
        steps = np.minimum(steps, self._last)
        for t in range(len(self._roots), int(steps.max(initial=0)) + 1):
            if t == len(self._roots):  # computed for twice as many steps at once
                roots, firsts = _compute_corrections(range(t, min(2 * t, self._last) + 1), betas)
                self._roots, self._firsts = np.append(self._roots, roots), np.append(self._firsts, firsts)
        return -lr * self._roots[steps] / self._firsts[steps]


def _compute_corrections(steps: Iterable[int], betas: Betas) -> tuple[_Doubles, _Doubles]:
    """Return sqrt(1 - b2^t) for each step t, and 1 - b1^t for each step t."""
    steps = list(steps)
    first, second = betas
    return np.array([math.sqrt(1 - second**t) for t in steps]), np.array([1 - first**t for t in steps])


_DEFAULTS: dict[str, OptimizerOptions] = {
    "sgd": {"lr": 0.01, "momentum": 0.0, "weight_decay": 0.0},
    "adagrad": {"lr": 0.01, "eps": 1e-10, "initial_accumulator_value": 0.0, "weight_decay": 0.0},
    "adam": {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8},
}
_KINDS = {"sgd": SGD, "adagrad": Adagrad, "adam": Adam}


def rule_of(table: SparseTable) -> RowRule:
    """Return the optimizer of a table, e.g. {"name": "adagrad", "lr": 0.1}; defaults are torch's.

    Raises:
        ConfigError: there is no such optimizer or option, or a number is not finite or below 0.
    """
    given = dict(table.optimizer)
    name = given.pop("name", None)
    if name not in _KINDS:
        raise table.error(ConfigError, f"optimizer is {name!r}: give sgd, adagrad or adam", field="optimizer")
    options = _DEFAULTS[name]
    for key, value in given.items():
        if key not in options:
            raise table.error(
                ConfigError, f"{name} has no option {key!r}; its options are {', '.join(options)}", field="optimizer"
            )
        if not _fits(key, value):
            raise table.error(
                ConfigError,
                f"{key} of {name} is {value!r}: give "
                f"{'two numbers of at least 0 and below 1' if key == 'betas' else 'a number of at least 0'}",
                field="optimizer",
            )
    found: RowRule = _KINDS[name](table, **{**options, **given})
    return found


@dataclass(frozen=True)
class Scheduled:
    """A job's learning-rate schedule for its tables."""

    recipe: Recipe
    ticks: Ticks

    def pace(self, table: SparseTable, rule: RowRule) -> TableSchedule:
        """Return the schedule of one table. Raises WorkloadError if the schedule cannot be evaluated."""
        return TableSchedule(self, table, rule)


def schedule_of(space: Space, factory: Factory | None) -> Scheduled | None:
    """Return the learning-rate schedule of a space's tables, or None if the job has none."""
    return Scheduled(factory, space.ticks) if isinstance(factory, Recipe) else None


def try_schedule(table: SparseTable, recipe: Recipe) -> None:
    """Evaluate a table's schedule at its first steps. Raises WorkloadError if that fails."""
    Scheduled(recipe, Ticks()).pace(table, rule_of(table)).at(1)


class TableSchedule:
    """The options of one table's optimizer in each round."""

    def __init__(self, scheduled: Scheduled, table: SparseTable, rule: RowRule) -> None:
        """Prepare the schedule of a table. Raises WorkloadError if the schedule cannot be evaluated."""
        self._table, self._rule, self._scheduled = table, rule, scheduled
        self._rates = Rates(scheduled.recipe.make, lambda: _make_torch_optimizer(table, rule))

    def at(self, number: int) -> OptimizerOptions:
        """Return the options in round `number`.

        Raises WorkloadError if the schedule cannot be evaluated, or changes the momentum of an optimizer without
        momentum.
        """
        tick = self._scheduled.ticks.of(self._scheduled.recipe.every, number)
        options = self._rule.options
        now = {**options, **{key: value for (_, key), value in self._rates.at(tick).items() if key in options}}
        if now.get("momentum") and not options["momentum"]:
            raise WorkloadError(
                f"the schedule changes the momentum of table {self._table.name!r}, whose optimizer has none: give the "
                "optimizer a momentum, or keep it constant (cycle_momentum=False)",
                table=self._table.name,
            )
        return now


def _make_torch_optimizer(table: SparseTable, rule: RowRule) -> Optimizer:
    """Return torch's optimizer with the same options over a placeholder; its group has the table's name as "table"."""
    kinds: dict[str, Callable[..., Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "adam": torch.optim.Adam,
    }
    placeholder = nn.Parameter(torch.zeros(1, table.dim))
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in rule.options.items()}
    return kinds[str(table.optimizer["name"])]([{"params": [placeholder], "table": table.name}], **options)


def _fits(key: str, value: Json) -> bool:
    if key == "betas":
        return isinstance(value, (list, tuple)) and len(value) == 2 and all(is_number(b) and 0 <= b < 1 for b in value)
    return is_number(value) and value >= 0
