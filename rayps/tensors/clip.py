"""Clip a gradient vector by the Euclidean norm of the whole gradient, as `torch.nn.utils.clip_grad_norm_` does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from rayps.tensors.flat import square_of

_TINY = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class Summing(Protocol):
    """The method of a ring that `NormClip` uses to compute a norm."""

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place."""


class NormClip:
    """Scales a gradient down if its norm is above `most`. If `most` is None, all gradients stay unchanged.

    `rings` are the rings within a replica of several workers. They sum the workers' squared norms. Each element of the
    model counts once, because it has one owner in the replica.
    """

    def __init__(self, most: float | None, rings: Iterable[Summing] = ()) -> None:
        self.most, self._rings = most, tuple(rings)

    def clipped(self, vector: Tensor) -> Tensor:
        """Return a gradient [size], or a scaled copy of it. Raises LinkError if a ring fails."""
        if self.most is None:
            return vector
        factor = self.factor(square_of(vector))
        return vector if factor >= 1 else vector * factor

    def factor(self, square: Tensor) -> float:
        """Return the factor by which to multiply a gradient to clip it; if it is 1 or more, do not clip.

        `square` is the squared norm of this worker's part of the gradient. It is overwritten with the squared norm of
        the whole gradient. Raises LinkError if a ring fails.
        """
        if self.most is None:
            return 1.0
        for ring in self._rings:
            ring.sum(square)
        return self.most / (float(square.sqrt()) + _TINY)

    def with_sparse(self, params: Sequence[nn.Parameter], vector: Tensor) -> Tensor:
        """Clip a gradient of which a part is sparse and is in the `.grad` of `params`, not in `vector`.

        Both parts count for the norm. The sparse gradients are replaced by scaled ones in `.grad`. Return `vector`, or
        a scaled copy of it. Raises LinkError if a ring fails.
        """
        if self.most is None:
            return vector
        sparse = [(p, p.grad.coalesce()) for p in params if p.grad is not None and p.grad.layout is not torch.strided]
        square = square_of(vector)
        for _, grad in sparse:
            square += square_of(grad.values())
        factor = self.factor(square)
        if factor >= 1:
            return vector
        for p, grad in sparse:
            p.grad = torch.mul(grad, factor)
        return vector * factor
