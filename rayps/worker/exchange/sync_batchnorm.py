"""BatchNorm over the batches of all workers: mean and variance of a layer are those of the union of the batches.

Ioffe and Szegedy, "Batch normalization", ICML 2015. `torch.nn.SyncBatchNorm` computes the same over a process group of
torch, and refuses tensors on the CPU. Here the sums go over the workers' ring.

With n_i elements of a channel on worker i, mean m_i and sum of squared differences s_i, the union has

    M = sum n_i,   m = sum n_i m_i / M,   s = sum (s_i + n_i (m_i - m)^2)      (Chan et al., 1983)

and variance s / M. The loss of the union is sum w_i L_i / sum w_i, where w_i is the number of rows of worker i and L_i
the mean loss over them. A worker computes the gradient of L_i, and the ring weights it by w_i. The backward pass
therefore sums w_i dy over the workers, and divides by the worker's own w_i.

A worker with an empty batch takes part with a row of another batch and n_i = w_i = 0.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class SumRing(Protocol):
    """The part of a ring that synchronized layers use."""

    @property
    def size(self) -> int:
        """The number of workers."""

    def sum(self, t: Tensor) -> Tensor:
        """Sum a tensor over the workers, in place."""

    def all_gather(self, t: Tensor) -> Tensor:
        """Return the workers' tensors [n], one after another: [size * n]."""


class BatchNormSync:
    """What all synchronized layers of a model share: the ring, and the rows of this worker's current batch."""

    def __init__(self, ring: SumRing) -> None:
        self.ring = ring
        self.rows = 1.0  # w_i of the current batch; 0 if the worker takes part with a row that does not count


class RingBatchNorm(nn.Module):
    """A BatchNorm layer whose statistics in training are those of all workers' batches.

    It has the parameters and buffers of the layer that it replaces, with the same names. In evaluation mode it uses the
    running statistics, as that layer does. All workers must call it equally often and in the same order.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor

    def __init__(self, layer: _BatchNorm, sync: BatchNormSync) -> None:
        """Replace `layer`, whose parameters and buffers become those of this module."""
        super().__init__()
        self.momentum, self.eps, self.sync = layer.momentum, layer.eps, sync
        self.num_features = layer.num_features
        for name, p in layer._parameters.items():
            self.register_parameter(name, p)
        for name, value in layer._buffers.items():
            self.register_buffer(name, value)
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` [rows, channels, ...]. Raises LinkError if a connection to another worker fails."""
        if not self.training and self.running_mean is not None:
            return nn.functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        weight = x.new_ones(x.shape[1]) if self.weight is None else self.weight
        bias = x.new_zeros(x.shape[1]) if self.bias is None else self.bias
        y: Tensor
        y, mean, var, count = _Normalize.apply(x, weight, bias, self.eps, self.sync)  # type: ignore[no-untyped-call]
        if self.training and count > 1:
            self._update(mean, var * (count / (count - 1)))
        return y

    def _update(self, mean: Tensor, var: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        with torch.no_grad():
            self.num_batches_tracked += 1
            rate = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.mul_(1 - rate).add_(mean.to(self.running_mean.dtype), alpha=rate)
            self.running_var.mul_(1 - rate).add_(var.to(self.running_var.dtype), alpha=rate)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, sync: BatchNormSync
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        flat = _put_channels_first(x).to(_widen(x))  # [channels, elements]
        counts = flat.shape[1] > 0 and sync.rows > 0
        mine = flat.new_zeros(2 * len(flat) + 1)  # on the layer's device, to which the ring returns the sums
        if counts:
            mine[: len(flat)] = flat.mean(1)
            mine[len(flat) : -1] = (flat - flat.mean(1, keepdim=True)).square().sum(1)
            mine[-1] = flat.shape[1]
        every = sync.ring.all_gather(mine).view(sync.ring.size, -1)
        means, squares, n = every[:, : len(flat)], every[:, len(flat) : -1], every[:, -1:]
        count = float(n.sum())
        mean = (n * means).sum(0) / count
        var = (squares + n * (means - mean).square()).sum(0) / count
        scale = (var + eps).rsqrt()
        shape = [1, -1, *[1] * (x.dim() - 2)]
        normal = (x - mean.view(shape).to(x.dtype)) * scale.view(shape).to(x.dtype)
        ctx.save_for_backward(normal, weight, scale)
        ctx.sync, ctx.count, ctx.rows = sync, count, sync.rows
        ctx.mark_non_differentiable(mean, var)
        return (normal * weight.view(shape) + bias.view(shape)).to(x.dtype), mean, var, count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0]
        normal, weight, scale = ctx.saved_tensors
        shape = [1, -1, *[1] * (dy.dim() - 2)]
        flat, hat = _put_channels_first(dy).to(_widen(dy)), _put_channels_first(normal).to(_widen(dy))
        own = torch.stack([flat.sum(1), (flat * hat).sum(1)])  # [2, channels]
        total = ctx.sync.ring.sum(own * ctx.rows if ctx.rows else torch.zeros_like(own))
        if not ctx.rows:
            return torch.zeros_like(dy), torch.zeros_like(weight), torch.zeros_like(weight), None, None
        mean_dy, mean_dy_hat = (total / (ctx.rows * ctx.count)).to(dy.dtype)
        dx = (dy - mean_dy.view(shape) - normal * mean_dy_hat.view(shape)) * (scale.to(dy.dtype) * weight).view(shape)
        return dx, own[1].to(weight.dtype), own[0].to(weight.dtype), None, None


def synchronize(model: nn.Module, ring: SumRing) -> BatchNormSync | None:
    """Replace every BatchNorm layer of a model, in place, by one that is synchronized over `ring`.

    A layer with several names is replaced by one layer under all of them. The model itself cannot be replaced. Return
    what the new layers share, or None if the model has no BatchNorm layer.
    """
    sync, made = BatchNormSync(ring), dict[_BatchNorm, RingBatchNorm]()
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if isinstance(child, _BatchNorm):
                made[child] = made.get(child) or RingBatchNorm(child, sync)
                setattr(module, name, made[child])
    return sync if made else None


def _put_channels_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).reshape(x.shape[1], -1)


def _widen(x: Tensor) -> torch.dtype:
    """Return the dtype in which sums are computed: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)
