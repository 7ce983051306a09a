"""Which optimizer steps on a shard: the workload's, or an Adagrad that the strategy asks for."""

from __future__ import annotations

from torch.optim import Adagrad

from rayps.tensors.learning_rate import within
from rayps.tensors.optim import Factory


def chosen(factory: Factory, adagrad: float | None) -> Factory:
    """The workload's own; where a rate is given, Adagrad: Duchi, Hazan, Singer, JMLR 2011. Its schedule stays."""
    if adagrad is None:
        return factory
    # a group: a part of a model may own nothing
    return within(factory, lambda _: lambda params: Adagrad([{"params": params}], lr=adagrad))
