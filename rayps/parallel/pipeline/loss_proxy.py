"""Call the user's loss in a pipeline, where no worker has the whole model.

On the first stage the model is a recorder: the loss runs until it calls the model, and the arguments are the
micro-batch's input. On the last stage the model returns the output of the stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, Protocol

import torch
from torch import Tensor, nn

from rayps.core.errors import WorkloadError
from rayps.core.partition import slices
from rayps.core.user_code import user_code
from rayps.data.base import Batch, Nested, map_tensors

Call = tuple[tuple[Nested, ...], dict[str, Nested]]


class Losses(Protocol):
    """The methods of a Workload that are called in a pipeline."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss over the batch."""

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, float | Tensor]:
        """Return named means over the batch."""


def parts(batch: Batch, micro_batches: int) -> list[Batch]:
    """Cut the batch into micro-batches, whose sizes differ by at most one; if the batch is small, some are empty.

    Raises:
        WorkloadError: a tensor of the batch does not have one entry per row.
    """
    cuts = list(slices(batch.size, micro_batches))
    return [
        Batch(_rows(batch.x, batch.size, cut), _rows(batch.y, batch.size, cut), cut.stop - cut.start) for cut in cuts
    ]


def weights(batches: list[Batch]) -> list[float]:
    """Return each micro-batch's share of the samples."""
    total = sum(batch.size for batch in batches)
    return [batch.size / total if total else 0.0 for batch in batches]


def _rows(value: Nested, size: int, cut: slice) -> Nested:
    if isinstance(value, (list, tuple)) and len(value) == size and not any(isinstance(v, Tensor) for v in value):
        return value[cut]
    return map_tensors(value, lambda t: _tensor_rows(t, size, cut))


def _tensor_rows(t: Tensor, size: int, cut: slice) -> Tensor:
    if t.dim() == 0:
        return t
    if t.shape[0] != size:
        raise WorkloadError(
            f"a batch of {size} rows holds a tensor of shape {tuple(t.shape)}: for micro-batches its first dimension "
            "must be the rows (pad ragged tensors)"
        )
    return t[cut]


class _Called(BaseException):
    """The model was called: the rest of the loss is not run. Not an Exception, so that user code does not catch it."""

    def __init__(self, call: Call) -> None:
        self.call = call


class _Model(nn.Module):
    """A stand-in for the model. It has no attributes of the model, only a call."""

    def __getattr__(self, name: str) -> NoReturn:
        raise _unseen(name)


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Nested, **__: Nested) -> NoReturn:
        raise _unseen(f"{name}()")

    return refuse


for _name in ("parameters", "buffers", "modules"):
    setattr(_Model, f"named_{_name}", _refused(_name))
setattr(_Model, "state_dict", _refused("state_dict"))  # noqa: B010


def _unseen(name: str) -> WorkloadError:
    return WorkloadError(
        f"loss() or evaluate() uses model.{name}, and in a pipeline no worker has the whole model: call the model once "
        "and use its output (a penalty on weights can be the optimizer's weight_decay)"
    )


class _Listens(_Model):
    def forward(self, *args: Nested, **kwargs: Nested) -> Nested:
        raise _Called((args, kwargs))


class _Returns(_Model):
    def __init__(self, output: Nested) -> None:
        super().__init__()
        self.__dict__["output"] = output
        self.__dict__["calls"] = 0

    def forward(self, *args: Nested, **kwargs: Nested) -> Nested:
        self.__dict__["calls"] += 1
        if self.__dict__["calls"] > 1:
            raise WorkloadError(
                "loss() calls the model more than once, and a pipeline runs it once per micro-batch: "
                "join the inputs into one, e.g. with torch.cat, and split what it returns"
            )
        output: Nested = self.__dict__["output"]
        return output


def inputs(workload: Losses, batch: Batch, *, training: bool = True) -> Call:
    """Return the arguments with which the user's loss calls the model on a micro-batch. Raises WorkloadError."""
    call = _listen("loss", workload, batch, training)
    if call is None:
        raise WorkloadError("loss(model, batch) did not call the model: a pipeline takes its input from that call")
    if not training:
        other = _listen("evaluate", workload, batch, training)
        if other is not None and not _alike(call, other):
            raise WorkloadError(
                "evaluate() calls the model with other arguments than loss() does, and a pipeline runs "
                "it once for both: use the same input in both"
            )
    return call


def _listen(method: str, workload: Losses, batch: Batch, training: bool) -> Call | None:
    try:
        with user_code(method):
            getattr(workload, method)(_Listens().train(training), batch)
    except _Called as called:
        return called.call
    return None


def _alike(a: Nested, b: Nested) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_alike(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b)


def loss(workload: Losses, batch: Batch, output: Nested, *, training: bool = True) -> Tensor:
    """Return the user's loss of a micro-batch, for the model's output. Raises WorkloadError."""
    with user_code("loss"):
        found = workload.loss(_Returns(output).train(training), batch)
    if not isinstance(found, Tensor) or found.numel() != 1:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise WorkloadError(
            f"loss(model, batch) returned {shape}: return one number as a tensor, the mean over the batch"
        )
    return found


def metrics(workload: Losses, batch: Batch, output: Nested) -> dict[str, float | Tensor]:
    """Return the user's metrics of a micro-batch, for the model's output. Raises WorkloadError."""
    with user_code("evaluate"):
        return workload.evaluate(_Returns(output).train(False), batch)
