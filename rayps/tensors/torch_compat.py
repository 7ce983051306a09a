"""Create optimizers without loading torch's compiler.

`torch.optim` excludes four methods of an optimizer from compilation. For that it loads all of `torch._dynamo` at their
first call, which costs a second of processor time and 75 MB in the driver and in every worker. While `torch._dynamo` is
not loaded, nothing is compiled, and this module calls the methods directly. Once it is loaded, torch's own methods are
used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.optim import Optimizer

_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
_KEPT = "__dynamo_disable"  # the attribute in which torch caches the replacement of a method
P = ParamSpec("P")
T = TypeVar("T")


def spare_compiler() -> None:
    """Replace the four methods by ones that do not load the compiler. Do nothing if this torch lacks the methods."""
    for name in _METHODS:
        method = getattr(vars(Optimizer).get(name), "__wrapped__", None)
        if method is not None and getattr(method, _KEPT, None) is None:
            setattr(method, _KEPT, _plain(name, method))


def _plain(name: str, method: Callable[P, T]) -> Callable[P, T]:
    def plain(*args: P.args, **options: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules:
            return method(*args, **options)
        setattr(method, _KEPT, None)
        replaced: Callable[P, T] = getattr(Optimizer, name)
        return replaced(*args, **options)

    return plain
