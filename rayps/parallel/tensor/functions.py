"""Exchanges between workers that divide a layer. Each function's backward is its transpose.

| function      | forward                     | backward                    |                              |
|---------------|-----------------------------|-----------------------------|------------------------------|
| `spread`      | identity                    | sum over the workers        | Megatron's f                 |
| `total`       | sum over the workers        | identity                    | Megatron's g                 |
| `gather`      | concatenation of slices     | this worker's slice         | after a layer split by `out` |
| `own`         | this worker's slice         | concatenation of slices     | before one split by `in`     |

Shoeybi et al., "Megatron-LM", 2019, part 3. `gather` and `own` connect to tensors that are equal on every worker, so a
gradient from outside is whole and equal everywhere, and only this worker's slice of it is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from rayps.parallel.tensor.communicator import TensorCommunicator

Range = tuple[int, int]
Grads = tuple[Tensor | None, ...]


class _Context(FunctionCtx):
    """What a forward stores for its backward."""

    communicator: TensorCommunicator
    dim: int
    lo: int
    width: int
    widths: Sequence[int]


class _Spread(Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, communicator: TensorCommunicator) -> Tensor:
        ctx.communicator = communicator
        return x.view_as(x)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> Grads:
        ctx.communicator.forget()
        return ctx.communicator.add(_copy(grads[0])), None  # a copy, as other code may use the gradient too


class _Total(Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, communicator: TensorCommunicator, ours: bool) -> Tensor:
        if ours and x.is_contiguous():
            ctx.mark_dirty(x)
            return communicator.add(x)
        return communicator.add(_copy(x))

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> Grads:
        return grads[0], None, None


class _Gather(Function):
    @staticmethod
    def forward(
        ctx: _Context, x: Tensor, communicator: TensorCommunicator, dim: int, widths: Sequence[int], rank: int
    ) -> Tensor:
        ctx.dim, ctx.lo, ctx.width = dim, sum(widths[:rank]), widths[rank]
        return communicator.gather(x, dim, widths)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> Grads:
        return grads[0].narrow(ctx.dim, ctx.lo, ctx.width), None, None, None, None


class _Own(Function):
    @staticmethod
    def forward(
        ctx: _Context, x: Tensor, communicator: TensorCommunicator, dim: int, widths: Sequence[int], rank: int
    ) -> Tensor:
        ctx.communicator, ctx.dim, ctx.widths = communicator, dim, widths
        return x.narrow(dim, sum(widths[:rank]), widths[rank])

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> Grads:
        return ctx.communicator.gather(grads[0], ctx.dim, ctx.widths), None, None, None, None


def spread(x: Tensor, communicator: TensorCommunicator) -> Tensor:
    """Return `x`, equal on every worker, for different uses on each: its gradient is the sum over the workers.

    Layers that take the same tensor one after another share one sum.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    known = communicator.remembered(x)
    if known is not None:
        return known
    made: Tensor = _Spread.apply(x, communicator)  # type: ignore[no-untyped-call]
    return communicator.remember(x, made)


def total(x: Tensor, communicator: TensorCommunicator, *, ours: bool = False) -> Tensor:
    """Return the sum of all workers' `x`; later operations are equal on every worker.

    With `ours`, no other code uses `x`, and it is summed in place.
    """
    made: Tensor = _Total.apply(x, communicator, ours)  # type: ignore[no-untyped-call]
    return made


def gather(x: Tensor, communicator: TensorCommunicator, dim: int, widths: Sequence[int], rank: int) -> Tensor:
    """Return all workers' slices concatenated along `dim`; `widths` are the slices' widths, in the order of ranks."""
    made: Tensor = _Gather.apply(x, communicator, dim, widths, rank)  # type: ignore[no-untyped-call]
    return made


def own(x: Tensor, communicator: TensorCommunicator, dim: int, widths: Sequence[int], rank: int) -> Tensor:
    """Return this worker's slice of an `x` that is equal on every worker. Backward: gather all slices."""
    made: Tensor = _Own.apply(x, communicator, dim, widths, rank)  # type: ignore[no-untyped-call]
    return made


def dropout(x: Tensor, p: float, dim: int, whole: int, ranges: Sequence[Range]) -> Tensor:
    """Apply the unsplit layer's dropout to a slice: the `ranges` along `dim` of a mask that is `whole` wide.

    Every worker draws the whole mask. So all workers draw as many random numbers, and later dropout on tensors that are
    equal on all workers is equal too.
    """
    if p == 0.0:
        return x
    shape = list(x.shape)
    shape[dim] = whole
    mask = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - p)
    if p < 1.0:
        mask.div_(1 - p)
    return x * take(mask, dim, ranges)


def take(t: Tensor, dim: int, ranges: Sequence[Range]) -> Tensor:
    """Return the slices `ranges` of `t` along `dim`, concatenated."""
    parts = [t.narrow(dim, lo, hi - lo) for lo, hi in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _copy(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)
