"""Check what a workload's `loss` returns, and that the user's methods leave the dtypes of parameters as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rayps_client.error_hints import READ_OUTSIDE_WAY
from rayps_client.errors import WorkloadError
from torch import Tensor

from rayps.tensors.flat import Layout

# what to do with several losses or several optimizers, for errors
OWN_LOOP_WAY = (
    "a workload has one loss and one optimizer (its groups may have different rates); for several, such as those of a "
    "GAN, write the loop: rayps.run(train_fn), with a rayps.wrap(model, optimizer) for each pair, as in examples/gan.py"
)


def refuse_divided(value: Tensor, what: str) -> None:
    """Raise WorkloadError if `value` was computed from a worker's shard of a parameter, as torch's DTensor says."""
    if type(value).__name__ == "DTensor":
        raise WorkloadError(f"{what} read a parameter outside of its module's forward:\n{READ_OUTSIDE_WAY}")


def check_loss(loss: object, *, trains: bool = True) -> Tensor:
    """Check a loss, and return it as a tensor with one number.

    Raises:
        WorkloadError: the loss is not a tensor with one number; or `trains` is true, and the loss has no gradient.
    """
    if isinstance(loss, Tensor):
        refuse_divided(loss, "loss(model, batch)")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        several = isinstance(loss, (list, tuple)) and sum(isinstance(one, Tensor) for one in loss) > 1
        raise WorkloadError(
            f"loss(model, batch) returned {shape}: return one number as a tensor, the mean over the batch, or a "
            "pair (sum, weight)" + (f"\n{OWN_LOOP_WAY}" if several else "")
        )
    if trains and not loss.requires_grad:
        raise WorkloadError(
            "loss(model, batch) returned a number without a gradient: compute it from the model's output, without "
            "detach(), item() or torch.no_grad(), and leave at least one parameter with requires_grad"
        )
    return loss


def check_dtypes(before: Sequence[torch.dtype], parameters: Sequence[Tensor], layout: Layout, method: str) -> None:
    """Refuse that a call of the user's `method` has converted a parameter, whose dtypes were `before` the call.

    Raises:
        WorkloadError: the parameter with this name of `layout` has another dtype.
    """
    for old, p, entry in zip(before, parameters, layout.entries, strict=True):
        if p.dtype != old:
            names = [str(dtype).removeprefix("torch.") for dtype in (old, p.dtype)]
            raise WorkloadError(
                f"{method}(model, batch) has converted the parameter {entry.name!r} from {names[0]} to {names[1]}, as "
                "model.half() does: it must keep its dtype\n"
                'to compute in half precision, set precision = "bf16" or "fp16" on the workload; to train parameters '
                "of another dtype, convert the model in model()"
            )


def dtypes_of(parameters: Sequence[Tensor]) -> list[torch.dtype]:
    """Return the dtype of each parameter."""
    return [p.dtype for p in parameters]
