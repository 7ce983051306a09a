"""What workers that share a layer tell each other, forwards and backwards. Each function's backward is its transpose.

| function      | forward                     | backward                    |                              |
|---------------|-----------------------------|-----------------------------|------------------------------|
| `spread`      | as it is                    | sum over the workers        | Megatron's f                 |
| `total`       | sum over the workers        | as it is                    | Megatron's g                 |
| `gather`      | slices side by side         | this worker's slice         | after a layer split by `out` |
| `own`         | this worker's slice         | slices side by side         | before one split by `in`     |
| `scatter_sum` | this worker's slice of the sum | slices side by side      | sum and own in one           |

Shoeybi et al., "Megatron-LM", 2019, part 3. `gather` and `own` take and give what is the same on every worker, so a
gradient that arrives from outside is whole and equal everywhere, and only the slice of it counts here.
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
    """What a forward keeps for its backward."""

    talk: TensorCommunicator
    dim: int
    lo: int
    width: int
    widths: Sequence[int]


class _Spread(Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, talk: TensorCommunicator) -> Tensor:
        ctx.talk = talk
        return x.view_as(x)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> Grads:
        ctx.talk.forget()
        return ctx.talk.add(_copy(grads[0])), None  # a gradient may be held elsewhere too


class _Total(Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, talk: TensorCommunicator, ours: bool) -> Tensor:
        if ours and x.is_contiguous():
            ctx.mark_dirty(x)
            return talk.add(x)
        return talk.add(_copy(x))

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> Grads:
        return grads[0], None, None


class _Gather(Function):
    @staticmethod
    def forward(
        ctx: _Context, x: Tensor, talk: TensorCommunicator, dim: int, widths: Sequence[int], rank: int
    ) -> Tensor:
        ctx.dim, ctx.lo, ctx.width = dim, sum(widths[:rank]), widths[rank]
        return talk.gather(x, dim, widths)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> Grads:
        return grads[0].narrow(ctx.dim, ctx.lo, ctx.width), None, None, None, None


class _Own(Function):
    @staticmethod
    def forward(
        ctx: _Context, x: Tensor, talk: TensorCommunicator, dim: int, widths: Sequence[int], rank: int
    ) -> Tensor:
        ctx.talk, ctx.dim, ctx.widths = talk, dim, widths
        return x.narrow(dim, sum(widths[:rank]), widths[rank])

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> Grads:
        return ctx.talk.gather(grads[0], ctx.dim, ctx.widths), None, None, None, None


class _ScatterSum(Function):
    @staticmethod
    def forward(
        ctx: _Context, x: Tensor, talk: TensorCommunicator, dim: int, widths: Sequence[int], rank: int
    ) -> Tensor:
        ctx.talk, ctx.dim, ctx.widths = talk, dim, widths
        return talk.add(_copy(x)).narrow(dim, sum(widths[:rank]), widths[rank]).contiguous()

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> Grads:
        return ctx.talk.gather(grads[0], ctx.dim, ctx.widths), None, None, None, None


def spread(x: Tensor, talk: TensorCommunicator) -> Tensor:
    """`x`, the same on every worker, where each goes on with it in its own way: its gradient is everyone's sum.

    Layers that take the same tensor one after another share one sum.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    known = talk.remembered(x)
    if known is not None:
        return known
    made: Tensor = _Spread.apply(x, talk)  # type: ignore[no-untyped-call]
    return talk.remember(x, made)


def total(x: Tensor, talk: TensorCommunicator, *, ours: bool = False) -> Tensor:
    """The sum of everyone's `x`; what follows is the same on every worker.

    With `ours`, nobody else needs `x`, and it is summed where it lies.
    """
    made: Tensor = _Total.apply(x, talk, ours)  # type: ignore[no-untyped-call]
    return made


def gather(x: Tensor, talk: TensorCommunicator, dim: int, widths: Sequence[int], rank: int) -> Tensor:
    """Everyone's slices side by side along `dim`; `widths` has the slices' widths, in the order of ranks."""
    made: Tensor = _Gather.apply(x, talk, dim, widths, rank)  # type: ignore[no-untyped-call]
    return made


def own(x: Tensor, talk: TensorCommunicator, dim: int, widths: Sequence[int], rank: int) -> Tensor:
    """Return this worker's slice of an `x` that is equal on every worker. Backward: gather all slices."""
    made: Tensor = _Own.apply(x, talk, dim, widths, rank)  # type: ignore[no-untyped-call]
    return made


def scatter_sum(x: Tensor, talk: TensorCommunicator, dim: int, widths: Sequence[int], rank: int) -> Tensor:
    """Return this worker's slice, along `dim`, of the sum of all workers' `x`. Backward: gather all slices."""
    made: Tensor = _ScatterSum.apply(x, talk, dim, widths, rank)  # type: ignore[no-untyped-call]
    return made


def dropout(x: Tensor, p: float, dim: int, whole: int, ranges: Sequence[Range]) -> Tensor:
    """Dropout of a slice as the unsplit layer has it: the `ranges` along `dim` of a mask that is `whole` wide.

    Every worker draws the whole mask. So all draw the same amount of random numbers, and what is dropped later, where
    the workers hold the same tensors, is the same on all of them.
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
    """The slices `ranges` of `t` along `dim`, one behind another."""
    parts = [t.narrow(dim, lo, hi - lo) for lo, hi in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _copy(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)
