"""Refuse `max_norm` of embeddings where forward would change the parameters of workers that hold one model."""

from __future__ import annotations

from rayps_client.errors import WorkloadError
from torch import nn

from rayps.core.strategy.strategy import StrategyView
from rayps.core.strategy.strategy_families import FEDERATED_ROUNDS, LOCAL_UPDATES, SHARED_VECTOR
from rayps.core.strategy.topology import servers_of


def check_max_norm(model: nn.Module, strategy: StrategyView, replicas: int) -> None:
    """Refuse an embedding with `max_norm`, whose forward scales the rows that it looks up, in place.

    Under a strategy in step each worker would scale other rows than the others, and under servers the scaled rows would
    be lost. Workers with parameters of their own, and one worker without servers, scale them as plain torch does.

    Raises:
        WorkloadError: the error names the layer.
    """
    apart = strategy.loop in (LOCAL_UPDATES, FEDERATED_ROUNDS, SHARED_VECTOR)
    if apart or (replicas == 1 and servers_of(strategy) is None):
        return
    for name, module in model.named_modules():
        learns = any(p.requires_grad for p in module.parameters(recurse=False))
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None and learns:
            raise WorkloadError(
                f"layer {name!r} has max_norm={module.max_norm:g}, so that each forward changes the rows of its weight "
                f"that it looks up, but under {strategy.name} with {replicas} worker{'s'[: replicas != 1]} the "
                "model is one for all:\nleave out max_norm, and scale what is looked up, by torch.renorm(found, 2, 0, "
                "most); or use one worker of all_reduce, or local_sgd, whose workers have parameters of their own",
                layer=name,
            )
