"""Optimizers made without loading torch's compiler, which nobody may need.

`torch.optim` keeps four of an optimizer's methods out of compiled code, and loads all of `torch._dynamo` for it at the
first call of each: a second of processor time and 75 MB, in the driver and in every worker. While nothing has loaded it
nothing is being compiled, and the methods may be called as they are; as soon as somebody has, torch's own way is gone.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.optim import Optimizer

_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
_KEPT = "__dynamo_disable"  # where torch looks for what it calls in place of a method


def spare_compiler() -> None:
    """Do so in this process. Where torch is made otherwise, nothing changes."""
    for name in _METHODS:
        method = getattr(vars(Optimizer).get(name), "__wrapped__", None)
        if method is not None and getattr(method, _KEPT, None) is None:
            setattr(method, _KEPT, _plain(name, method))


def _plain(name: str, method: Any) -> Any:
    def plain(*args: Any, **options: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return method(*args, **options)
        setattr(method, _KEPT, None)
        return getattr(Optimizer, name)(*args, **options)

    return plain
