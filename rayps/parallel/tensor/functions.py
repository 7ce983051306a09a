"""Exchanges between the workers of a tensor group, as differentiable functions.

| function      | forward                     | backward                    |                              |
|---------------|-----------------------------|-----------------------------|------------------------------|
| `spread`      | identity                    | sum over the workers        | Megatron's f                 |
| `total`       | sum over the workers        | identity                    | Megatron's g                 |
| `gather`      | concatenation of slices     | this worker's slice         | after a layer split by `out` |
| `own_slice`      | this worker's slice         | concatenation of slices     | before a layer split by `in` |

Shoeybi et al., "Megatron-LM", 2019, part 3. The result of `gather` and the argument of `own_slice` are equal on every
worker. The gradient of the result of `gather` is therefore also equal on every worker, and each worker takes its slice
of the gradient without a sum.
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
    """The values that the functions below store in the forward pass for the backward pass."""

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
        return ctx.communicator.add(_copy(grads[0])), None  # a copy: other code may use this gradient too


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


class _OwnSlice(Function):
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
    """Return `x`, which is equal on every worker, as the input of computations that differ between workers.

    The backward pass sums the gradient of `x` over the workers. Successive layers with the same input share one sum.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    known = communicator.remembered(x)
    if known is not None:
        return known
    made: Tensor = _Spread.apply(x, communicator)  # type: ignore[no-untyped-call]
    return communicator.remember(x, made)


def total(x: Tensor, communicator: TensorCommunicator, *, ours: bool = False) -> Tensor:
    """Return the sum of all workers' `x`, as the input of computations that are the same on every worker.

    `ours`: no other code uses `x`, so the sum is computed in place.
    """
    made: Tensor = _Total.apply(x, communicator, ours)  # type: ignore[no-untyped-call]
    return made


def gather(x: Tensor, communicator: TensorCommunicator, dim: int, widths: Sequence[int], rank: int) -> Tensor:
    """Return all workers' slices concatenated along `dim`; `widths` are the slices' widths, in the order of ranks."""
    made: Tensor = _Gather.apply(x, communicator, dim, widths, rank)  # type: ignore[no-untyped-call]
    return made


def own_slice(x: Tensor, communicator: TensorCommunicator, dim: int, widths: Sequence[int], rank: int) -> Tensor:
    """Return the slice of worker `rank` along `dim` of an `x` that is equal on every worker.

    `widths` are the slices' widths, in the order of ranks. The backward pass gathers the gradients of all slices.
    """
    made: Tensor = _OwnSlice.apply(x, communicator, dim, widths, rank)  # type: ignore[no-untyped-call]
    return made


def dropout(x: Tensor, p: float, dim: int, whole: int, ranges: Sequence[Range]) -> Tensor:
    """Apply dropout to this worker's slice `x` (the `ranges` along `dim`) of a tensor that is `whole` wide along `dim`.

    Every worker draws the mask of the whole tensor and uses its slice of it. All workers thus draw equally many random
    numbers, so that a later dropout on a tensor that is equal on all workers drops the same elements on all of them.
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
