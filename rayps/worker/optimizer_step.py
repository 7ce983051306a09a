"""How a worker's own optimizer takes a step: the gradient's norm, and whether the optimizer only reads it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks as _GLOBAL_HOOKS

from rayps.core.user_code import user_code
from rayps.tensors.flat import square_of

_TINY = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def clipped(vector: Tensor, most: float | None, rings: Iterable[Any]) -> Tensor:
    """A gradient, or a shorter copy of it where the Euclidean norm of the whole model's is above `most`.

    `rings` are those within a replica: each element of the model has one owner there, so it counts once.
    """
    if most is None:
        return vector
    factor = clip_factor(square_of(vector), most, rings)
    return vector if factor >= 1 else vector * factor


def clip_factor(square: Tensor, most: float, rings: Iterable[Any] = ()) -> float:
    """What `torch.nn.utils.clip_grad_norm_` multiplies a gradient of this squared norm by; it shortens if below 1.

    `square` is of this worker's part, and becomes that of the whole model: the sum over `rings`.
    """
    for ring in rings:
        ring.sum(square)
    return most / (float(square.sqrt()) + _TINY)


def clip_sparse(params: Sequence[nn.Parameter], vector: Tensor, most: float) -> Tensor:
    """As `clipped`, where gradients of sparse layout stay in `.grad` beside the vector: they count, and are shortened.

    Their rows are zero in `vector`.
    """
    sparse = [(p, p.grad.coalesce()) for p in params if p.grad is not None and p.grad.layout is not torch.strided]
    square = square_of(vector)
    for _, grad in sparse:
        square += square_of(grad.values())
    factor = clip_factor(square, most)
    if factor >= 1:
        return vector
    for p, grad in sparse:
        p.grad = torch.mul(grad, factor)
    return vector * factor


def steps_by_reading(optimizer: Any, params: Sequence[nn.Parameter]) -> bool:
    """Take a step; whether it, and every later one, leaves the gradients as they are.

    Only torch's own optimizers without hooks always do what they did once; some of them write (SGD with nesterov and
    foreach does).
    """
    before = [None if p.grad is None else p.grad._version for p in params]
    with user_code("optimizer.step"):
        optimizer.step()
    after = [None if p.grad is None else p.grad._version for p in params]
    own = type(optimizer).__module__.startswith("torch.optim.") and "step" not in vars(optimizer)
    return own and before == after and not optimizer._optimizer_step_pre_hooks and not _GLOBAL_HOOKS
