"""Create optimizers, and take their steps, without loading torch's compiler.

`torch.optim` excludes four methods of an optimizer from compilation, and marks the begin and the end of `step` for the
compiler. For that it loads all of `torch._dynamo` at their first call, which costs some seconds of processor time and
75 MB in the driver and in every worker. While `torch._dynamo` is not loaded, nothing is compiled, and this module calls
the methods directly. Once it is loaded, torch's own methods are used.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _use_grad_for_differentiable

_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
_KEPT = "__dynamo_disable"  # the attribute in which torch caches the replacement of a method
P = ParamSpec("P")
T = TypeVar("T")


def spare_compiler() -> None:
    """Replace the four methods by ones that do not load the compiler. Do nothing if this torch lacks the methods."""
    for name in _METHODS:
        method = getattr(vars(Optimizer).get(name), "__wrapped__", None)
        if method is not None and getattr(method, _KEPT, None) is None:
            setattr(method, _KEPT, _avoid_compiler(name, method))
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, Optimizer):
            _spare_in_step(kind)


def _spare_in_step(kind: type[Optimizer]) -> None:
    """Replace `step` of an optimizer class, unless an optimizer of this class exists already."""
    marked = vars(kind).get("step")
    inner = getattr(marked, "__wrapped__", None)
    if marked is None or inner is None or getattr(marked, "__code__", None) is not _find_marking_code():
        return

    @functools.wraps(inner)
    def step(self: Optimizer, *args: Any, **options: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return marked(self, *args, **options)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return inner(self, *args, **options)

    setattr(kind, "step", step)  # noqa: B010


def _find_marking_code() -> object:
    """Return the code of the function by which torch wraps `step` of its optimizers."""
    return getattr(_use_grad_for_differentiable(lambda self: None), "__code__", None)


def _avoid_compiler(name: str, method: Callable[P, T]) -> Callable[P, T]:
    def plain(*args: P.args, **options: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules:
            return method(*args, **options)
        setattr(method, _KEPT, None)
        replaced: Callable[P, T] = getattr(Optimizer, name)
        return replaced(*args, **options)

    return plain
