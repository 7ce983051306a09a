"""Clip a gradient vector by the Euclidean norm of the whole gradient, as `torch.nn.utils.clip_grad_norm_` does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from rayps.tensors.flat import square_of, square_quickly

_TINY = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class Summing(Protocol):
    """The method of a ring that `NormClip` uses to compute a norm."""

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place."""


class NormClip:
    """Scales a gradient down if its norm is above `most`. If `most` is None, all gradients stay unchanged.

    `rings` are the rings within a replica of several workers. They sum the workers' squared norms. Each element of the
    model counts once, because it has one owner in the replica.

    If `measures`, the norm of each gradient before it is scaled is noted: see `take`. A norm that clipping needs costs
    nothing more. Without clipping, of a gradient that all workers have (`mean`) each worker measures its `share`.
    """

    def __init__(self, most: float | None, rings: Iterable[Summing] = (), *, measures: bool = False) -> None:
        self.most, self.measures, self._rings = most, measures, tuple(rings)
        self.mean: Tensor | None = None  # the next gradient if all workers have it
        self.share = (0, 1)  # (this worker's number, the number of workers) that measure it
        self._noted: dict[str, float] = {}

    def clipped(self, vector: Tensor) -> Tensor:
        """Return a gradient [size], or a scaled copy of it. Raises LinkError if a ring fails."""
        mean, self.mean = self.mean, None
        if self.most is None:
            if self.measures:
                self._measure(vector, is_mean=vector is mean)
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
        norm = float(square.sqrt())
        self.note(norm=norm)
        return self.most / (norm + _TINY)

    def note(self, *, norm: float | None = None, square: float = 0.0) -> None:
        """Note the norm of the whole gradient; if it is None, the squared norm of this worker's share of it."""
        if self.measures:
            self._noted = {"grad_square": square} if norm is None else {"grad_norm": norm}

    def take(self) -> dict[str, float]:
        """Return and forget what was noted last: `grad_norm`, or the `grad_square` of this worker's share, or {}.

        The norm of the whole gradient is the root of the sum of all workers' `grad_square`.
        """
        noted, self._noted = self._noted, {}
        return noted

    def _measure(self, vector: Tensor, *, is_mean: bool) -> None:
        if is_mean:
            number, count = self.share
            size = vector.numel()
            self.note(square=square_quickly(vector[size * number // count : size * (number + 1) // count]))
        elif not self._rings:  # the other workers of a replica have the rest of a gradient of this replica alone
            self.note(norm=math.sqrt(square_quickly(vector)))

    def with_sparse(self, params: Sequence[nn.Parameter], vector: Tensor) -> Tensor:
        """Clip a gradient of which a part is sparse and is in the `.grad` of `params`, not in `vector`.

        Both parts count for the norm. The sparse gradients are replaced by scaled ones in `.grad`. Return `vector`, or
        a scaled copy of it. Raises LinkError if a ring fails.
        """
        if self.most is None and not self.measures:
            return vector
        sparse = [(p, p.grad.coalesce()) for p in params if p.grad is not None and p.grad.layout is not torch.strided]
        square = square_of(vector)
        for _, grad in sparse:
            square += square_of(grad.values())
        if self.most is None:
            self.note(norm=float(square.sqrt()))
        factor = self.factor(square)
        if factor >= 1:
            return vector
        for p, grad in sparse:
            p.grad = torch.mul(grad, factor)
        return vector * factor
