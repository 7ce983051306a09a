"""The part of a model that one worker computes: the whole model, or a slice of a divided model.

`ModelPart` is the interface between `Worker` and the division of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from torch import Tensor, nn

from rayps.core.errors import WorkloadError
from rayps.core.records import Point
from rayps.core.user_code import user_code
from rayps.data import Batch
from rayps.tensors.flat import Layout, outside_vector
from rayps.tensors.optim import Factory
from rayps.workload.base import Workload

Metric: TypeAlias = float | Tensor  # a mean over a batch
Check = Callable[[Tensor], float]  # returns the value of a loss; raises an error if the loss is not a finite number


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

    def backward(self, batch: Batch, step: int, check: Check) -> float | None:
        """Leave the gradient of the batch's mean loss in `.grad` of the owned parameters, and return the loss.

        Return None on workers that do not know the loss.

        Raises:
            TrainingError: the loss is not finite.
            WorkloadError: the user's loss failed or is not a scalar.
            LinkError: a connection to another worker of the replica failed.
        """

    def evaluate(self, batch: Batch) -> dict[str, Metric]:
        """Return named means over the batch, including the loss, or {} on workers that do not know them.

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

    def backward(self, batch: Batch, step: int, check: Check) -> float:
        """Leave the gradient of the batch's mean loss in `.grad` of the parameters, and return the loss."""
        with user_code("loss"):
            loss = self.workload.loss(self.module, batch)
            value = check(loss)
            loss.backward()  # type: ignore[no-untyped-call]
        return value

    def evaluate(self, batch: Batch) -> dict[str, Metric]:
        """Return named means over the batch, including the loss."""
        loss = self.workload.loss(self.module, batch)
        return {"loss": loss} | metrics_of(self.workload.evaluate(self.module, batch))

    def factory(self, factory: Factory) -> Factory:
        """Return `factory` unchanged: the optimizer is for all parameters."""
        return factory

    def facts(self) -> Point:
        """Return {}: the whole model has no further numbers."""
        return {}

    def close(self) -> None:
        """Do nothing, because the whole model has no resources of its own."""


def metrics_of(given: dict[str, Metric]) -> dict[str, Metric]:
    """Return the result of the user's evaluate(). Raises WorkloadError if it is not a dict."""
    if not isinstance(given, dict):
        raise WorkloadError(
            f"evaluate(model, batch) returned {type(given).__name__}: return a dict of means such as "
            "{'accuracy': 0.9}"
        )
    return given


def number(name: str, mean: Metric) -> float:
    """Return the mean of metric `name`, from the user's evaluate(), as a float.

    Raises WorkloadError if `mean` is not one number.
    """
    try:
        return float(mean)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WorkloadError(
            f"evaluate(model, batch) returned a {type(mean).__name__} for {name!r}: return one number, "
            "its mean over the batch"
        ) from error
