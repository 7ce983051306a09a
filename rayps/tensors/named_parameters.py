"""Optimizers whose parameter groups are chosen by the parameters' names.

An optimizer is also built over placeholders, small copies or slices of the parameters, on servers and in checks.
Therefore each list of parameters that a factory receives carries the names of the parameters in the whole model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rayps_client.errors import WorkloadError
from torch import nn
from torch.optim import Optimizer

ARGUMENT = "named_parameters"  # the name of the argument that requests pairs of name and parameter


class NamedParameters(list[nn.Parameter]):
    """A list of parameters with their names in the whole model, in the same order."""

    def __init__(self, parameters: Iterable[nn.Parameter], names: Iterable[str]) -> None:
        """Pair `parameters` with `names`, which must be equally many."""
        super().__init__(parameters)
        self.names = tuple(names)
        if len(self) != len(self.names):
            raise ValueError(f"{len(self)} parameters have {len(self.names)} names")

    def pairs(self) -> list[tuple[str, nn.Parameter]]:
        """Return a list of (name, parameter), as `model.named_parameters()` gives them."""
        return list(zip(self.names, self, strict=True))


@dataclass(frozen=True)
class NamedFactory:
    """An optimizer factory that calls the user's `optimizer(named_parameters)`."""

    method: Callable[[list[tuple[str, nn.Parameter]]], Optimizer]

    def __call__(self, params: list[nn.Parameter]) -> Optimizer:
        """Return the user's optimizer of `params`, which must be `NamedParameters`.

        Raises WorkloadError if the parameters have no names here.
        """
        if not isinstance(params, NamedParameters):
            raise WorkloadError(
                "optimizer(named_parameters) is called here with parameters that have no names: use optimizer(params)"
            )
        return self.method(params.pairs())


def factory_of(method: Callable[..., Any]) -> Callable[[list[nn.Parameter]], Optimizer]:
    """Return a workload's method `optimizer` as a factory that takes a list of parameters.

    If the method's argument is called `named_parameters`, it receives a list of (name, parameter); otherwise it
    receives the parameters.
    """
    return NamedFactory(method) if takes_names(method) else method


def takes_names(method: Callable[..., Any]) -> bool:
    """Return whether the first argument of a bound method or function is called `named_parameters`."""
    try:
        return next(iter(inspect.signature(method).parameters), None) == ARGUMENT
    except (TypeError, ValueError):  # the signature of a callable written in C may not be known
        return False
