"""Abandon the gradient of a step that has become useless: the members of the step are known, and the worker is late.

Before each layer's forward, and after each parameter's gradient, the worker asks whether its step is still open. If it
is not, an exception ends the loss or the backward. The user's code cannot catch it by `except Exception`. A call that
runs for long inside one layer, or that reads a batch, is not interrupted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType

from torch import nn


class StepAbandoned(BaseException):
    """Ends the computation of a gradient that does not count. No error: the worker goes on with the next step."""


class AbandonHooks:
    """The hooks of one model. In a `with` block, the computation of a gradient ends when `is_useless` returns True."""

    def __init__(self, model: nn.Module, is_useless: Callable[[], bool], *, compiled: bool) -> None:
        """Register the hooks. A model that is `compiled` has them on its parameters only."""
        self._is_useless, self._active = is_useless, False
        hook = _Hook(weakref.ref(self))
        for module in () if compiled else model.modules():
            module.register_forward_pre_hook(hook)
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def look(self) -> None:
        """Raise StepAbandoned if the gradient that is computed now has become useless."""
        if self._active and self._is_useless():
            raise StepAbandoned

    def __enter__(self) -> None:
        self._active = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._active = False


class _Hook:
    """A hook with a weak reference, because a model may exist longer than its worker. Copies of the model have none."""

    def __init__(self, hooks: weakref.ref[AbandonHooks] | None = None) -> None:
        self._hooks = hooks

    def __call__(self, *given: object) -> None:
        found = None if self._hooks is None else self._hooks()
        if found is not None:
            found.look()

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()
