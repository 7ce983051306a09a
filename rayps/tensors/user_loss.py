"""Check what a workload's `loss` returns."""

from __future__ import annotations

from torch import Tensor

from rayps.core.errors import WorkloadError

# what to do with several losses or several optimizers, for errors
OWN_LOOP_WAY = (
    "a workload has one loss and one optimizer (its groups may have different rates); for several, such as those of a "
    "GAN, write the loop: rayps.run(train_fn), with a rayps.wrap(model, optimizer) for each pair, as in examples/gan.py"
)


def checked_loss(loss: object, *, trains: bool = True) -> Tensor:
    """Check a loss, and return it as a tensor with one number.

    Raises:
        WorkloadError: the loss is not a tensor with one number; or `trains` is true, and the loss has no gradient.
    """
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
