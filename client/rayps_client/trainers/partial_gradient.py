"""Compute the gradients of some of a model's parameters, such as those of private layers. It does not import torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def gradients_of(names: Collection[str], parameters: Iterable[tuple[str, Tensor]]) -> Iterator[None]:
    """In this context backward writes gradients of the `parameters` with these names only; others have none."""
    others = [p for name, p in parameters if name not in names]
    try:
        for p in others:
            p.requires_grad_(False)
        yield
    finally:
        for p in others:
            p.requires_grad_(True)
