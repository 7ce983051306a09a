"""Whether a loss suits private rows, whose gradients are those of the loss on one row alone.

A loss that compares the rows of a batch, such as a contrastive one, is constant on one row: noise alone would be
learned. A loss that is no mean over rows, such as one with class weights that are divided out, trains, but something
else than without privacy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from rayps_client.errors import WorkloadError
from rayps_client.trainers.module_modes import evaluating
from torch import Tensor

from rayps.core.job.user_code import user_code
from rayps.data.base import Batch
from rayps.data.single_rows import row_of, tensors_of, with_tensors
from rayps.workload.base import Workload
from rayps.workload.clipped_sum import mean_loss
from rayps.workload.model_part import Whole

_EXACT, _HALF = 1e-3, 3e-2  # relative differences of losses that rounding explains, in float32 and in half precision


def check_single_rows(workload: Workload, part: Whole, stacks: Sequence[Batch]) -> str | None:
    """Compare the loss of rows, each alone, with that of a batch of them, in evaluation mode.

    `stacks` are those of `rayps.data.single_rows`; only the rows of the largest one are used. Return a warning if the
    loss of the batch is not the mean of those of its rows. Return None otherwise, or if no batch can be made of them:
    there are not two, or a tensor's first dimension is not the rows.

    Raises:
        WorkloadError: the loss fails, or its gradient on each row alone is zero or not finite, and that on the batch
            is not.
    """
    stack = max(stacks, key=len, default=Batch(None, None, 0))
    if len(stack) < 2 or any(tensor.dim() < 2 or tensor.shape[1] != 1 for tensor in tensors_of(stack)):
        return None
    whole = with_tensors(stack, (tensor.flatten(0, 1) for tensor in tensors_of(stack)), stack.size)
    rows = [row_of(stack, row) for row in range(stack.size)]
    with evaluating(part.module), user_code("loss"):
        if not any(_learns(workload, part, row) for row in rows) and _learns(workload, part, whole):
            raise WorkloadError(
                "loss(model, batch) has no gradient on a batch of one row: it compares the rows of a batch, as a "
                "contrastive loss does, and under privacy each row's gradient is computed alone, so that only noise "
                "would be learned\nuse a loss that is a mean over rows, or leave out privacy"
            )
        with torch.no_grad():
            alone = [float(mean_loss(workload, part.module, row)) for row in rows]
            together = float(mean_loss(workload, part.module, whole))
    mean, size = math.fsum(alone) / len(alone), max(map(abs, (together, *alone)))
    half = workload.precision is not None or part.layout.dtype in (torch.bfloat16, torch.float16)
    if not abs(together - mean) > (_HALF if half else _EXACT) * size:
        return None
    return (
        f"the loss of a batch of {len(rows)} rows is {together:.4g}, and the mean of the losses of these rows, each "
        f"alone, is {mean:.4g}: under privacy only the latter is learned, so that what a loss makes of other rows of "
        "its batch, such as class weights that are divided by their sum, has no effect; multiply each row's loss by "
        "its weight, and return the mean over rows"
    )


def _learns(workload: Workload, part: Whole, batch: Batch) -> bool:
    """Return whether the loss of a batch has a gradient that is finite and not zero."""
    loss = mean_loss(workload, part.module, batch)
    if not loss.requires_grad:
        return False
    found: tuple[Tensor | None, ...] = torch.autograd.grad(loss, part.parameters, allow_unused=True)
    norm = math.hypot(*(float(torch.linalg.vector_norm(g.float())) for g in found if g is not None))
    return math.isfinite(norm) and norm > 0
