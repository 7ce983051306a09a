"""The user's optimizer over a part of a model's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from rayps.tensors.flat import Layout
from rayps.tensors.learning_rate import change_factory
from rayps.tensors.named_parameters import NamedParameters
from rayps.tensors.optim import Factory


def of_some(factory: Factory, layout: Layout, names: Sequence[str]) -> Factory:
    """Return a factory of the user's optimizer that takes some of a model's parameters, in the order of `names`.

    The user's factory is called with all parameters of `layout`, because it may choose groups by a parameter's index.
    Placeholders without memory stand for the other parameters, and are removed from the optimizer afterwards. The
    result has the schedule of `factory`, and can be pickled if `factory` can.
    """
    return change_factory(factory, lambda inner: SubsetFactory(inner, layout, tuple(names)))


@dataclass(frozen=True)
class SubsetFactory:
    """The factory that `of_some` returns: it creates the user's optimizer for the parameters `names` of a layout."""

    factory: Factory
    layout: Layout
    names: tuple[str, ...]

    def __call__(self, params: list[nn.Parameter]) -> Optimizer:
        """Return the optimizer of `params`, in the order of `names`."""
        given = dict(zip(self.names, params, strict=True))
        others = {
            entry.name: nn.Parameter(torch.empty(entry.shape, dtype=self.layout.dtype, device="meta"))
            for entry in self.layout.entries
            if entry.name not in given
        }
        all_of_them = given | others
        names = self.layout.names
        optimizer = self.factory(NamedParameters((all_of_them[name] for name in names), names))
        if not isinstance(optimizer, Optimizer):
            return optimizer  # `optim.made` refuses this result
        foreign = {id(p) for p in others.values()}
        for group in optimizer.param_groups:
            group.pop("param_names", None)
            group["params"] = [p for p in group["params"] if id(p) not in foreign]
        for p in others.values():
            optimizer.state.pop(p, None)
        return optimizer
