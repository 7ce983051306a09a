"""Call the user's loss(model, batch) in a pipeline, where no worker has the whole model.

The loss gets a stand-in for the model. On the first stage, the stand-in records the arguments of the loss's call of the
model, which are the pipeline's input, and the rest of the loss does not run. On the last stage, the stand-in returns
the pipeline's output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn, Protocol

import torch
from rayps_client.errors import WorkloadError
from torch import Tensor, nn

from rayps.core.job.user_code import user_code
from rayps.data.base import Batch, Nested
from rayps.workload.base import Loss
from rayps.workload.loss_result import LossResult, loss_result
from rayps.workload.metric_values import Metric

Call = tuple[tuple[Nested, ...], dict[str, Nested]]


class Losses(Protocol):
    """The methods of a `Workload` that this module calls."""

    def loss(self, model: nn.Module, batch: Batch) -> Loss | Mapping[str, Loss | Metric]:
        """Return the mean loss over the batch."""

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Metric]:
        """Return metrics of the batch by name."""


def weights(batches: list[Batch]) -> list[float]:
    """Return each micro-batch's fraction of all samples. All fractions are 0 if there are no samples."""
    total = sum(batch.size for batch in batches)
    return [batch.size / total if total else 0.0 for batch in batches]


class _Called(BaseException):
    """Raised when the loss calls the recording stand-in, so that the rest of the loss does not run.

    This class is not an Exception, because user code might catch that.
    """

    def __init__(self, call: Call) -> None:
        self.call = call


class _ModelProxy(nn.Module):
    """A stand-in for the model that the loss can call. To read an attribute of the stand-in is an error."""

    def __getattr__(self, name: str) -> NoReturn:
        raise _whole_model_error(name)


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Nested, **__: Nested) -> NoReturn:
        raise _whole_model_error(f"{name}()")

    return refuse


for _name in ("parameters", "buffers", "modules"):
    setattr(_ModelProxy, f"named_{_name}", _refuse(_name))
setattr(_ModelProxy, "state_dict", _refuse("state_dict"))  # noqa: B010


def _whole_model_error(name: str) -> WorkloadError:
    return WorkloadError(
        f"loss() or evaluate() uses model.{name}, but in a pipeline no worker has the whole model: only call the "
        "model, once, and use its output (for a penalty on weights, use the optimizer's weight_decay)"
    )


class _RecordsCall(_ModelProxy):
    def forward(self, *args: Nested, **kwargs: Nested) -> Nested:
        raise _Called((args, kwargs))


class _ReturnsOutput(_ModelProxy):
    def __init__(self, output: Nested) -> None:
        super().__init__()
        self.__dict__["output"] = output
        self.__dict__["calls"] = 0

    def forward(self, *args: Nested, **kwargs: Nested) -> Nested:
        self.__dict__["calls"] += 1
        if self.__dict__["calls"] > 1:
            raise WorkloadError(
                "loss() calls the model more than once, but a pipeline runs the model once per micro-batch: "
                "join the inputs into one, e.g. with torch.cat, and split the output"
            )
        output: Nested = self.__dict__["output"]
        return output


def inputs(workload: Losses, batch: Batch, *, training: bool = True) -> Call:
    """Return the arguments with which the user's loss calls the model on a micro-batch.

    If not `training`, also check that evaluate() calls the model with the same arguments.

    Raises:
        WorkloadError: the loss fails, does not call the model, or uses more than its output.
    """
    call = _record_call("loss", workload, batch, training)
    if call is None:
        raise WorkloadError(
            "loss(model, batch) did not call the model: in a pipeline, the arguments of that call are the first "
            "stage's input"
        )
    if not training:
        other = _record_call("evaluate", workload, batch, training)
        if other is not None and not _equal(call, other):
            raise WorkloadError(
                "evaluate() calls the model with other arguments than loss() does, but a pipeline runs the model once "
                "for both: use the same input in both"
            )
    return call


def _record_call(method: str, workload: Losses, batch: Batch, training: bool) -> Call | None:
    try:
        with user_code(method):
            getattr(workload, method)(_RecordsCall().train(training), batch)
    except _Called as called:
        return called.call
    return None


def _equal(a: Nested, b: Nested) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b)


def loss(workload: Losses, batch: Batch, output: Nested, *, training: bool = True) -> LossResult:
    """Return the user's loss of a micro-batch, computed from the pipeline's output.

    Raises WorkloadError if the user's loss fails, or is neither a mean nor a pair (sum, weight).
    """
    with user_code("loss"):
        found = workload.loss(_ReturnsOutput(output).train(training), batch)
    return loss_result(found, batch.size, trains=False)


def metrics(workload: Losses, batch: Batch, output: Nested) -> Mapping[str, Metric]:
    """Return the user's metrics of a micro-batch, computed from the pipeline's output.

    Raises WorkloadError if the user's evaluate() fails.
    """
    with user_code("evaluate"):
        return workload.evaluate(_ReturnsOutput(output).train(False), batch)
