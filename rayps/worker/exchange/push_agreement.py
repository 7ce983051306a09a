"""What a worker measures about its pushes under an adaptive staleness bound: see `strategy.adaptive_staleness`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rayps.core.job.records import Point


class PushAgreement:
    """Compares each gradient of a worker with the one before, of which it holds a copy.

    `version()` returns the number of the servers' steps at the worker's last pull.
    """

    def __init__(self, version: Callable[[], int]) -> None:
        self._version = version
        self._before: Tensor | None = None
        self._pulled = 0  # the version at the pull before
        self._between = 0
        self._agreement: float | None = None

    def add(self, gradient: Tensor) -> None:
        """Take over the gradient [size] at the parameters of the last pull."""
        version = self._version()
        self._between, self._pulled = version - self._pulled, version
        self._agreement = None if self._before is None else cosine(self._before, gradient)
        if self._before is None:
            self._before = gradient.clone()
        else:
            self._before.copy_(gradient)

    def point(self) -> Point:
        """Return the facts of the last push but one of this worker, as a part of a round's point.

        `between`: the servers' steps between the pulls before and after the push. `agreement`: the cosine of the
        gradients at these pulls; None if it is not known.
        """
        known = self._between > 0  # a restored server counts its steps anew
        return {"between": self._between, "agreement": self._agreement if known else None}


def cosine(a: Tensor, b: Tensor) -> float | None:
    """Return the cosine of two vectors, computed in at least float32. Return None if one of them is zero or empty."""
    if a.element_size() < torch.float32.itemsize:
        a, b = a.float(), b.float()
    found = (torch.dot(a, b) / (torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b))).item()
    return None if found != found else found
