"""The part of a model that one worker computes: the whole model, or a slice of a divided model.

`ModelPart` is the interface between `Worker` and the division of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from rayps_client.errors import WorkloadError
from rayps_client.trainers.moved_weight import refuse_moved_weight
from torch import Tensor, nn

from rayps.core.job.records import Point
from rayps.core.job.user_code import user_code
from rayps.core.metrics import Total, Totals
from rayps.data.base import Batch
from rayps.data.pass_random import GLOBAL_RANDOM
from rayps.tensors.flat import Layout, find_outside_vector
from rayps.tensors.optim import Factory
from rayps.tensors.user_loss import check_dtypes, dtypes_of
from rayps.workload.accumulate import Check, MicroBatchGradients, Ready, StepLoss, accumulate, each_micro_batch
from rayps.workload.base import Workload
from rayps.workload.compile_model import uncompiled
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
        """A dict from the name of each buffer, and of each parameter that needed no gradient, to its tensor."""

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


_NO_GRAD = "does not require grad and does not have a grad_fn"  # torch's error for a derivative without gradients


class Whole:
    """The whole model on one worker."""

    needs_grad = False  # whether an evaluation computes derivatives

    def __init__(self, workload: Workload, module: nn.Module) -> None:
        self.workload, self.module, self.reports = workload, module, True
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.layout, self.parameters = Layout.of(named), [p for _, p in named]
        self._trained = frozenset(name for name, _ in named)
        self.check_weight = WeightCheck(workload, module)

    @property
    def beside(self) -> dict[str, Tensor]:
        """A dict from the name of each buffer, and of each parameter that needed no gradient, to its tensor."""
        return {name: value for name, value in find_outside_vector(self.module).items() if name not in self._trained}

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
        """Return the totals of the batch's metrics, including the loss.

        If the loss or a metric itself needs gradients, such as a gradient penalty, it is computed with them.
        """
        if not self.needs_grad:
            try:
                return self._evaluated(batch)
            except RuntimeError as error:
                if _NO_GRAD not in str(error):
                    raise
                self.needs_grad = True
        with torch.enable_grad():
            return self._evaluated(batch)

    def _evaluated(self, batch: Batch) -> Totals:
        found = self._loss(batch, trains=False)
        before = dtypes_of(self.parameters)
        with autocast(self.workload, self.parameters[0].device):
            given = self.workload.evaluate(self.module, batch)
        check_dtypes(before, self.parameters, self.layout, "evaluate")
        return evaluation_totals(found, given, batch.size)

    def _loss(self, batch: Batch, *, trains: bool = True) -> LossResult:
        before = dtypes_of(self.parameters)
        with autocast(self.workload, self.parameters[0].device):
            given = self.workload.loss(self.module, batch)
        check_dtypes(before, self.parameters, self.layout, "loss")
        found = loss_result(given, batch.size, trains=trains)
        if trains:
            self.check_weight.once(found, batch)
        return found

    def factory(self, factory: Factory) -> Factory:
        """Return `factory` unchanged: the optimizer is for all parameters."""
        return factory

    def facts(self) -> Point:
        """Return {}: the whole model has no further numbers."""
        return {}

    def close(self) -> None:
        """Do nothing, because the whole model has no resources of its own."""


class WeightCheck:
    """Checks that the weight of a loss that is a pair (sum, weight) does not depend on the model."""

    def __init__(self, workload: Workload, module: nn.Module, *, is_checked: bool = False) -> None:
        """`is_checked`: whether no loss needs a check, for example because it was checked before."""
        self._workload, self._module = workload, module
        self._weight: float | None = None  # of the last loss, if it was a pair
        self._rows = 0  # of its batch
        self.is_checked = is_checked

    @property
    def is_due(self) -> bool:
        """Whether the last loss that `see` has seen must be checked.

        The number of rows is a weight that needs no check. Of weight 0 nothing is learned, and it says little: an
        accuracy is 0 with most parameters.
        """
        return bool(self._weight) and self._weight != self._rows and not self.is_checked

    def see(self, found: LossResult, batch: Batch) -> None:
        """Note what the loss of a batch returned."""
        self._weight, self._rows = found.weight, batch.size

    def once(self, found: LossResult, batch: Batch) -> None:
        """Check the first loss that must be checked. Raises WorkloadError as `of` does."""
        self.see(found, batch)
        if self.is_due:
            self.is_checked = True
            self.of(batch)

    def of_pairs(self, batch: Batch) -> None:
        """Check the loss of a batch if the loss before it was a pair. Raises WorkloadError as `of` does."""
        if self._weight is not None:
            self.of(batch)

    def of(
        self,
        batch: Batch,
        *,
        replaced: Callable[[int], AbstractContextManager[None]] | None = None,
        most: Callable[[int], int] | None = None,
    ) -> None:
        """Check the loss of a batch. `replaced` and `most` are those of `refuse_moved_weight`.

        Raises WorkloadError if the weight depends on the model's parameters.
        """

        def weight() -> float | None:
            with autocast(self._workload, next(self._module.parameters()).device):
                found = self._workload.loss(self._module, batch)
            return loss_result(found, batch.size, trains=False).weight

        # the check seeds the process's generators; workers of `most` are processes, which wait for each other
        alone = GLOBAL_RANDOM if most is None else nullcontext()
        with user_code("loss"), uncompiled(self._module), alone:
            refuse_moved_weight(weight, self._module, replaced=replaced, most=most)


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
    value = float(loss.total.detach())
    totals = {"loss": Total((value if loss.weight is not None else value * weight) if weight else 0.0, weight)}
    return totals | loss.metrics | totals_of(given, rows, "evaluate(model, batch)")
