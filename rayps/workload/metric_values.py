"""Values of a user's metrics with their reductions: `rayps.Mean`, `rayps.Sum`, `rayps.Max` and `rayps.Min`.

`evaluate` returns them in its dict, and `loss` beside its loss. A plain number is a mean over the rows of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from rayps_client.errors import WorkloadError
from torch import Tensor

from rayps.core.metrics import Total, Totals
from rayps.tensors.user_loss import refuse_divided

Number: TypeAlias = float | Tensor  # one number


@dataclass(frozen=True, slots=True)
class MeanMetric:
    """The mean of a metric, weighted: sum(value * weight) / sum(weight) over batches and workers.

    `value` is the mean over the batch, and `weight` is what it is a mean over, such as the number of tokens. A value
    with weight 0 is not read.

    Example:
        def evaluate(self, model, batch):
            return {"token_accuracy": rayps.Mean(correct / tokens, weight=tokens)}
    """

    value: Number
    weight: Number
    how: ClassVar[str] = "mean"


@dataclass(frozen=True, slots=True)
class SumMetric:
    """The sum of a metric over all batches and workers.

    Example:
        def evaluate(self, model, batch):
            return {"errors": rayps.Sum((model(batch.x).argmax(1) != batch.y).sum())}
    """

    value: Number
    how: ClassVar[str] = "sum"


@dataclass(frozen=True, slots=True)
class MaxMetric:
    """The largest value of a metric over all batches and workers.

    Example:
        def evaluate(self, model, batch):
            return {"worst": rayps.Max((model(batch.x) - batch.y).abs().max())}
    """

    value: Number
    how: ClassVar[str] = "max"


@dataclass(frozen=True, slots=True)
class MinMetric:
    """The smallest value of a metric over all batches and workers.

    Example:
        def evaluate(self, model, batch):
            return {"least_margin": rayps.Min(margins.min())}
    """

    value: Number
    how: ClassVar[str] = "min"


Mean, Sum, Max, Min = MeanMetric, SumMetric, MaxMetric, MinMetric  # the names under `rayps`
Metric: TypeAlias = Number | MeanMetric | SumMetric | MaxMetric | MinMetric


def totals_of(given: Mapping[str, Metric], rows: float, method: str) -> Totals:
    """Return the totals of a batch's metrics. The weight of a plain number is `rows`.

    Raises WorkloadError if a metric is not one number; the text names the user's `method`.
    """
    return {name: _total(name, metric, rows, method) for name, metric in given.items()}


def _total(name: str, given: Metric, rows: float, method: str) -> Total:
    if isinstance(given, (SumMetric, MaxMetric, MinMetric)):
        return Total(_number(name, given.value, method), rows, given.how)
    if not isinstance(given, MeanMetric):
        return Total(_number(name, given, method) * rows, rows)
    weight = _number(name, given.weight, method)
    if not 0 <= weight < float("inf"):
        raise WorkloadError(f"{method} returned {name!r} with weight {weight:g}: give a weight of 0 or more")
    return Total(_number(name, given.value, method) * weight if weight else 0.0, weight)


def _number(name: str, given: Number, method: str) -> float:
    if isinstance(given, Tensor):
        refuse_divided(given, f"{method} for {name!r}")
    try:
        return float(given.detach() if isinstance(given, Tensor) else given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WorkloadError(
            f"{method} returned a {type(given).__name__} for {name!r}: return one number, "
            "its mean over the batch, or rayps.Mean, Sum, Max or Min of one number"
        ) from error
