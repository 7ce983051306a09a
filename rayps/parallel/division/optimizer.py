"""The user's optimizer over a part of a model's parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from rayps.tensors.flat import Layout
from rayps.tensors.learning_rate import within
from rayps.tensors.optim import Factory


def of_some(factory: Factory, layout: Layout, names: Sequence[str]) -> Factory:
    """The user's factory for some of a model's parameters, which are given to it in the order of `names`.

    It is called with all of `layout`'s, so that a group that is chosen by number stays the same; those that are not
    given are stand-ins without memory, of which the optimizer is freed afterwards. A schedule goes along.
    """
    return within(factory, lambda inner: _of_some(inner, layout, names))


def _of_some(factory: Factory, layout: Layout, names: Sequence[str]) -> Factory:

    def some(params: list[nn.Parameter]) -> Optimizer:
        given = dict(zip(names, params, strict=True))
        others = {
            entry.name: nn.Parameter(torch.empty(entry.shape, dtype=layout.dtype, device="meta"))
            for entry in layout.entries
            if entry.name not in given
        }
        all_of_them = given | others
        optimizer = factory([all_of_them[entry.name] for entry in layout.entries])
        if not isinstance(optimizer, Optimizer):
            return optimizer  # whoever asked says so
        foreign = {id(p) for p in others.values()}
        for group in optimizer.param_groups:
            group.pop("param_names", None)
            group["params"] = [p for p in group["params"] if id(p) not in foreign]
        for p in others.values():
            optimizer.state.pop(p, None)
        return optimizer

    return some
