"""What a workload's `loss` returned: a mean, or a sum and its weight, and metrics of the training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rayps_client.errors import WorkloadError
from torch import Tensor

from rayps.core.job.records import ROUND_FIELDS
from rayps.core.metrics import Totals
from rayps.tensors.user_loss import OWN_LOOP_WAY, check_loss
from rayps.workload.metric_values import Metric, totals_of

_TAKEN = ROUND_FIELDS | {"skipped", "loss_scale"}  # names of a round's own metrics and facts


@dataclass(slots=True)
class LossResult:
    """A loss over one batch. If `weight` is None, `total` is the mean over the batch; else it is a sum.

    `metrics` are the user's metrics of the training.
    """

    total: Tensor
    weight: float | None = None
    metrics: Totals = field(default_factory=dict)

    def weight_of(self, rows: int) -> float:
        """Return the weight of the batch, which has `rows` rows."""
        return rows if self.weight is None else self.weight

    def mean(self) -> Tensor:
        """Return the mean loss: of a pair, sum / weight. A sum of weight 0 has the mean 0."""
        if self.weight is None:
            return self.total
        return self.total / self.weight if self.weight else self.total.detach() * 0.0


def loss_result(given: object, rows: int, *, trains: bool = True) -> LossResult:
    """Read what `loss(model, batch)` returned for a batch of `rows` rows.

    It is a mean, a pair (sum, weight), or a dict with either as "loss" and metrics by name.

    Raises:
        WorkloadError: the result is none of these, or, if `trains` is true, the loss has no gradient.
    """
    metrics: Totals = {}
    if isinstance(given, Mapping):
        if "loss" not in given:
            found = ", ".join(map(repr, given)) or "no name"
            several = sum(isinstance(value, Tensor) and value.requires_grad for value in given.values()) > 1
            raise WorkloadError(
                f"loss(model, batch) returned a dict with {found}: add the loss under the name 'loss'"
                + (f"\n{OWN_LOOP_WAY}" if several else "")
            )
        named: dict[str, Metric] = {name: value for name, value in given.items() if name != "loss"}
        taken = sorted(_TAKEN & named.keys())
        if taken:
            raise WorkloadError(
                f"loss(model, batch) returned a metric {taken[0]!r}, but each round has a number of this name: "
                "give the metric another name"
            )
        metrics = totals_of(named, rows, "loss(model, batch)")
        given = given["loss"]
    if isinstance(given, tuple) and len(given) == 2:
        weight = _weight(given[1])
        return LossResult(check_loss(given[0], trains=trains and weight > 0), weight, metrics)
    return LossResult(check_loss(given, trains=trains), None, metrics)


def is_pair(found: LossResult, before: bool | None) -> bool:
    """Return whether the loss is a pair (sum, weight). `before`: whether earlier ones are, or None if there are none.

    Raises WorkloadError if both kinds occur.
    """
    pair = found.weight is not None
    if before is not None and pair != before:
        raise WorkloadError(
            "loss(model, batch) returned a pair (sum, weight) for one micro-batch and a mean for another: "
            "return the same kind for each"
        )
    return pair


def _weight(given: object) -> float:
    if isinstance(given, Tensor) and given.requires_grad:
        raise WorkloadError(
            "loss(model, batch) returned a pair whose second value has a gradient, but the weight of a pair "
            "(sum, weight) is a plain number: for a metric beside the loss, return a dict such as "
            f'{{"loss": ..., "mae": ...}}\n{OWN_LOOP_WAY}'
        )
    number = math.nan
    if isinstance(given, (int, float)) or (isinstance(given, Tensor) and given.numel() == 1):
        number = float(given)
    if not 0 <= number < math.inf:
        what = f"{number:g}" if isinstance(given, (int, float, Tensor)) else type(given).__name__
        raise WorkloadError(
            f"loss(model, batch) returned a pair with the weight {what}: return (sum, weight) such as the sum of the "
            "tokens' losses and the number of tokens, a number of 0 or more"
        )
    return whole(number)


def whole(weight: float) -> float:
    """Return a weight as an int if it is a whole number, such as a number of rows or tokens."""
    return int(weight) if float(weight).is_integer() else weight
