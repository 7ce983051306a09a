"""Abandon the gradient of a step that has become useless: the members of the step are known, and the worker is late.

Before each layer's forward, and after each parameter's gradient, the worker asks whether its step is still open. If it
is not, an exception ends the loss or the backward. The user's code cannot catch it by `except Exception`. A call that
runs for long inside one layer, or that reads a batch, is not interrupted.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import Tensor, nn


class StepAbandoned(BaseException):
    """Ends the computation of a gradient that does not count. No error: the worker goes on with the next step."""


class AbandonHooks:
    """The hooks of one model. In a `with` block, the computation of a gradient ends when `is_useless` returns True."""

    def __init__(self, model: nn.Module, is_useless: Callable[[], bool], *, compiled: bool) -> None:
        """Register the hooks. A model that is `compiled` has them on its parameters only."""
        self._is_useless, self._active = is_useless, False
        for module in () if compiled else model.modules():
            module.register_forward_pre_hook(self._before_forward)
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._after_gradient)  # type: ignore[no-untyped-call]

    def _before_forward(self, module: nn.Module, given: Any) -> None:
        self._look()

    def _after_gradient(self, p: Tensor) -> None:
        self._look()

    def _look(self) -> None:
        if self._active and self._is_useless():
            raise StepAbandoned

    def __enter__(self) -> None:
        self._active = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._active = False
