"""The backward of one step over its micro-batches: the gradients of their sums, divided by their total weight.

A mean of the micro-batches' means is wrong if their weights differ, such as their numbers of tokens. Here the loss of
each micro-batch is divided by the same number, and `StepLoss.factor` is what remains to be multiplied at the end. For
one micro-batch it is 1, and the gradient has the bits of `loss.backward()`. If the losses are means, they are divided
by k for k micro-batches of equal size, as in a plain loop of torch with `(loss / k).backward()`.

A loss on the CPU is checked before its backward. A loss on a device is copied to the host while backward is started,
and is checked after that: the host then does not wait for forward, and the device does not wait for the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from rayps.core.job.user_code import user_code
from rayps.core.metrics import Totals, add_totals
from rayps.data.base import Batch
from rayps.tensors.device import Device
from rayps.workload.loss_result import LossResult, is_pair, whole

Compute = Callable[[Batch], LossResult]  # the loss of one micro-batch
Check = Callable[[Tensor], float]  # returns the value of a loss; raises an error if the loss is not a finite number
Ready = Callable[[float, float], None]  # called with (weight, factor)


@dataclass(slots=True)
class StepLoss:
    """The loss of one step on one worker.

    `mean` is the mean loss, or NaN if `weight`, the total weight, is 0; None on workers that do not know the loss.
    The gradients in `.grad` times `factor` are the gradient of the mean.
    """

    mean: float | None
    weight: float
    factor: float = 1.0
    metrics: Totals = field(default_factory=dict)


class MicroBatchGradients(Protocol):
    """Takes the gradient of each micro-batch, instead of their sum at the end of the step."""

    def begin(self, weight: float, factor: float = 1.0) -> None:
        """Start a micro-batch, before its backward. `.grad` times `factor` is the gradient of a mean of this weight."""

    def end(self) -> None:
        """End a micro-batch, after its backward. Its gradients are taken, and `.grad` is None."""


def micro_batches(batch: Batch) -> list[Batch]:
    """Return the micro-batches of a step that have rows."""
    return [part for part in batch.parts or (batch,) if part.size]


def is_checked_late(loss: Tensor) -> bool:
    """Return whether a loss is checked after its backward was started: whether it is on a device."""
    return loss.device.type != "cpu"


def accumulate(
    compute: Compute, batch: Batch, check: Check, *, ready: Ready | None = None, scale: float = 1.0
) -> StepLoss:
    """Compute loss and backward of each micro-batch of `batch`, which has at least one row.

    Before the last backward, the step's weight and factor are known, and `ready(weight, factor)` is called; it is not
    called if the weight is 0. A micro-batch with weight 0 has no backward. The losses are multiplied by `scale` for
    backward, and `factor` includes 1 / `scale`.

    Raises:
        WorkloadError: the user's loss fails, or returns a pair for one micro-batch and a mean for another.
        TrainingError: a loss is not finite. If it is on a device, its backward has then been started.
    """
    parts = micro_batches(batch)
    total, weight, divisor = 0.0, 0.0, 0.0
    pairs: bool | None = None
    metrics: Totals = {}
    for number, part in enumerate(parts):
        with user_code("loss"):  # each micro-batch is a call of its own for the time limit
            found = compute(part)
            add_totals(metrics, found.metrics)
            pairs = is_pair(found, pairs)
            own = found.weight_of(part.size)
            if own:
                read = _reader(found.total, check)
                weight += own
                divisor = divisor or (own if pairs else batch.size)
            factor = divisor / weight if pairs and weight else 1.0
            if number == len(parts) - 1 and weight and ready is not None:
                ready(whole(weight), factor / scale)
            if own:
                share = divisor if pairs else divisor / own
                loss = found.total if share == 1 else found.total / share
                (loss if scale == 1 else loss * scale).backward()  # type: ignore[no-untyped-call]
                value = read()
                total += value if pairs else value * own
            del found
    mean = total / weight if weight else math.nan
    if len(parts) == 1 and weight and not pairs:
        mean = value
    return StepLoss(mean, whole(weight), factor / scale, metrics)


def each_micro_batch(
    compute: Compute, batch: Batch, check: Check, gradients: MicroBatchGradients, *, scale: float = 1.0
) -> StepLoss:
    """Compute loss and backward of each micro-batch, and pass each gradient on to `gradients` with its weight.

    A micro-batch with weight 0 begins and ends too, without a backward. The losses are multiplied by `scale` for
    backward. The factor of the result is 1. Raises the errors of `accumulate`, and those of `gradients`.
    """
    total, weight = 0.0, 0.0
    pairs: bool | None = None
    metrics: Totals = {}
    for part in micro_batches(batch):
        with user_code("loss"):  # each micro-batch is a call of its own for the time limit
            found = compute(part)
            add_totals(metrics, found.metrics)
            pairs = is_pair(found, pairs)
            own = found.weight_of(part.size)
            if own:
                read = _reader(found.total, check)
                weight += own
            gradients.begin(whole(own), 1 / scale)
            if own:
                loss = found.total / own if pairs else found.total
                (loss if scale == 1 else loss * scale).backward()  # type: ignore[no-untyped-call]
                value = read()
                total += value if pairs else value * own
            gradients.end()
            del found
    single = value if weight and len(micro_batches(batch)) == 1 and not pairs else None
    mean = total / weight if weight else math.nan
    return StepLoss(mean if single is None else single, whole(weight), 1.0, metrics)


def _reader(loss: Tensor, check: Check) -> Callable[[], float]:
    """Return a function that returns the checked value of a loss. A loss on the CPU is checked now.

    Of a loss on a device only the copy is started now, and the function waits for this copy.
    """
    if not is_checked_late(loss):
        value = check(loss)
        return lambda: value
    device = Device.of(loss.device)
    held = device.pinned(1, loss.dtype)
    copied = device.current().copy(held, loss.detach().reshape(1))

    def read() -> float:
        copied.wait()
        return check(held)

    return read
