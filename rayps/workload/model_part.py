"""The part of a model that one worker computes: the whole model, or a slice of a divided model.

`ModelPart` is the interface between `Worker` and the division of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from rayps.core.errors import WorkloadError
from rayps.core.metrics import Total, Totals
from rayps.core.records import Point
from rayps.data.base import Batch
from rayps.tensors.flat import Layout, outside_vector
from rayps.tensors.optim import Factory
from rayps.workload.accumulate import Check, MicroBatchGradients, Ready, StepLoss, accumulate, each_micro_batch
from rayps.workload.base import Workload
from rayps.workload.loss_result import LossResult, loss_result
from rayps.workload.metric_values import Metric, totals_of
from rayps.workload.precision import autocast


class ModelPart(Protocol):
    """The part of the model that a `Worker` trains: its parameters, its backward pass and its evaluation."""

    module: nn.Module
    layout: Layout  # the owned parameters, with their names in the whole model; may be empty
    parameters: list[nn.Parameter]  # the owned parameters, in the order of the layout
    reports: bool  # whether this worker reports loss, samples and metrics; one worker of each replica does

    @property
    def beside(self) -> dict[str, Tensor]:
        """A dict from the name of each buffer, and of each parameter that needs no gradient, to its tensor."""

    def refresh(self) -> None:
        """Receive the current values of borrowed parameters before `evaluate`.

        Raises LinkError if a connection to another worker of the replica fails.
        """

    def backward(
        self, batch: Batch, step: int, check: Check, *, ready: Ready | None = None, scale: float = 1.0
    ) -> StepLoss:
        """Leave gradients in `.grad` of the owned parameters, and return the loss of the step.

        The gradients times the loss's `factor` are the gradient of the mean loss. `ready` and `scale` are those of
        `rayps.workload.accumulate.accumulate`.

        Raises:
            TrainingError: the loss is not finite.
            WorkloadError: the user's loss failed or is neither a scalar nor a pair (sum, weight).
            LinkError: a connection to another worker of the replica failed.
        """

    def evaluate(self, batch: Batch) -> Totals:
        """Return the totals of the batch's metrics, including the loss, or {} on workers that do not know them.

        The caller has set the model to evaluation mode and turned off gradients.
        """

    def factory(self, factory: Factory) -> Factory:
        """Return the workload's `factory` of optimizers, adapted to the parameters that this part owns."""

    def facts(self) -> Point:
        """Return numbers of the last step for the worker's point, such as `activations` or `idle`."""

    def close(self) -> None:
        """Release the part's resources."""


class Whole:
    """The whole model on one worker."""

    def __init__(self, workload: Workload, module: nn.Module) -> None:
        self.workload, self.module, self.reports = workload, module, True
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.layout, self.parameters = Layout.of(named), [p for _, p in named]

    @property
    def beside(self) -> dict[str, Tensor]:
        """A dict from the name of each buffer, and of each parameter that needs no gradient, to its tensor."""
        return outside_vector(self.module)

    def refresh(self) -> None:
        """Do nothing, because the whole model borrows no parameter."""

    def backward(
        self, batch: Batch, step: int, check: Check, *, ready: Ready | None = None, scale: float = 1.0
    ) -> StepLoss:
        """Leave gradients in `.grad` of the parameters, and return the loss of the step: see `accumulate`."""
        return accumulate(self._loss, batch, check, ready=ready, scale=scale)

    def backward_each(
        self, batch: Batch, check: Check, gradients: MicroBatchGradients, *, scale: float = 1.0
    ) -> StepLoss:
        """Pass the gradient of each micro-batch on to `gradients`, and return the loss: see `each_micro_batch`."""
        return each_micro_batch(self._loss, batch, check, gradients, scale=scale)

    def evaluate(self, batch: Batch) -> Totals:
        """Return the totals of the batch's metrics, including the loss."""
        found = self._loss(batch, trains=False)
        with autocast(self.workload, self.parameters[0].device):
            given = self.workload.evaluate(self.module, batch)
        return evaluation_totals(found, given, batch.size)

    def _loss(self, batch: Batch, *, trains: bool = True) -> LossResult:
        with autocast(self.workload, self.parameters[0].device):
            given = self.workload.loss(self.module, batch)
        return loss_result(given, batch.size, trains=trains)

    def factory(self, factory: Factory) -> Factory:
        """Return `factory` unchanged: the optimizer is for all parameters."""
        return factory

    def facts(self) -> Point:
        """Return {}: the whole model has no further numbers."""
        return {}

    def close(self) -> None:
        """Do nothing, because the whole model has no resources of its own."""


def evaluation_totals(loss: LossResult, given: Mapping[str, Metric], rows: int) -> Totals:
    """Return the totals of a batch of `rows` rows: the loss, the metrics beside it, and the result of evaluate().

    Raises WorkloadError if the result of evaluate() is not a dict of numbers.
    """
    if not isinstance(given, dict):
        raise WorkloadError(
            f"evaluate(model, batch) returned {type(given).__name__}: return a dict of means such as "
            "{'accuracy': 0.9}"
        )
    weight = loss.weight_of(rows)
    value = float(loss.total)
    totals = {"loss": Total((value if loss.weight is not None else value * weight) if weight else 0.0, weight)}
    return totals | loss.metrics | totals_of(given, rows, "evaluate(model, batch)")
