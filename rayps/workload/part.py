"""What a worker computes with: the whole model, or its part of one. The seam between `Worker` and what cuts a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from torch import Tensor, nn

from rayps.core.errors import WorkloadError
from rayps.core.records import Point
from rayps.core.user_code import user_code
from rayps.data import Batch
from rayps.tensors.flat import Layout, beside
from rayps.tensors.optim import Factory
from rayps.workload.base import Workload

Metric: TypeAlias = float | Tensor  # a mean over a batch
Check = Callable[[Tensor], float]  # of a loss: its value; raises where it is none


class ModelPart(Protocol):
    """What a `Worker` trains."""

    module: nn.Module
    layout: Layout  # of what is owned, by its name in the whole model; it may be nothing
    parameters: list[nn.Parameter]  # the same
    reports: bool  # whether this worker's loss, samples and metrics count; the others of its replica have the same rows

    @property
    def beside(self) -> dict[str, Tensor]:
        """Buffers and parameters that need no gradient, by name."""

    def refresh(self) -> None:
        """Have the current values of what is borrowed; before `evaluate`. Raises LinkError."""

    def backward(self, batch: Batch, step: int, check: Check) -> float | None:
        """The loss, where it is known; leaves in `.grad` what the mean over the batch gives to what is owned.

        Raises:
            TrainingError, WorkloadError, LinkError.
        """

    def evaluate(self, batch: Batch) -> dict[str, Metric]:
        """Named means over the batch, of them the loss; nothing where they are not known. In eval mode, no gradient."""

    def factory(self, factory: Factory) -> Factory:
        """The workload's `factory` of optimizers, for what is owned."""

    def facts(self) -> Point:
        """Numbers of the last step for the worker's point, such as `activations` or `idle`."""

    def close(self) -> None:
        """End what it holds."""


class Whole:
    """The whole model, on one worker."""

    def __init__(self, workload: Workload, module: nn.Module) -> None:
        self.workload, self.module, self.reports = workload, module, True
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.layout, self.parameters = Layout.of(named), [p for _, p in named]

    @property
    def beside(self) -> dict[str, Tensor]:
        """See Part."""
        return beside(self.module)

    def refresh(self) -> None:
        """See Part: nothing is borrowed."""

    def backward(self, batch: Batch, step: int, check: Check) -> float:
        """See Part."""
        with user_code("loss"):
            loss = self.workload.loss(self.module, batch)
            value = check(loss)
            loss.backward()  # type: ignore[no-untyped-call]
        return value

    def evaluate(self, batch: Batch) -> dict[str, Metric]:
        """See Part."""
        loss = self.workload.loss(self.module, batch)
        return {"loss": loss} | metrics_of(self.workload.evaluate(self.module, batch))

    def factory(self, factory: Factory) -> Factory:
        """See Part."""
        return factory

    def facts(self) -> Point:
        """See Part."""
        return {}

    def close(self) -> None:
        """See Part."""


def metrics_of(given: dict[str, Metric]) -> dict[str, Metric]:
    """What the user's evaluate() gave. Raises WorkloadError."""
    if not isinstance(given, dict):
        raise WorkloadError(
            f"evaluate(model, batch) gave {type(given).__name__}: return a dict of means such as {{'accuracy': 0.9}}"
        )
    return given


def number(name: str, mean: Metric) -> float:
    """A mean of the user's. Raises WorkloadError."""
    try:
        return float(mean)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WorkloadError(
            f"evaluate(model, batch) gave {name!r} a {type(mean).__name__}: return one number, its mean over the batch"
        ) from error
