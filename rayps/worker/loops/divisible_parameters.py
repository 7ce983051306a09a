"""Which models have parameters that workers can divide (`shard="parameters"`), without importing torch's FSDP."""

from __future__ import annotations

from rayps_client.errors import ConfigError, WorkloadError
from torch import nn

from rayps.core.refusals.table import refuse
from rayps.workload.model import has_tables

_OTHER = "shard='gradients' or shard='optimizer'"


def check_divisible(model: nn.Module) -> None:
    """Refuse a model whose parameters cannot be divided.

    Raises:
        ConfigError: it has sparse tables or synchronized BatchNorm layers.
        WorkloadError: a parameter has no dimension, or a layer has sparse gradients.
    """
    if has_tables(model):
        refuse({"slices of parameters": True, "sparse tables": True})
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ConfigError(
                f"layer {name!r} is a torch.nn.SyncBatchNorm: use BatchNorm layers, whose statistics are each "
                "worker's own",
                field="shard",
            )
        if getattr(module, "sparse", False):
            raise WorkloadError(
                f"layer {name!r} has sparse gradients, which shard='parameters' does not have: set sparse=False, or "
                f"use {_OTHER}",
                layer=name,
            )
    for name, p in model.named_parameters():
        if not p.dim():
            raise WorkloadError(
                f"parameter {name!r} is a scalar, which cannot be cut along its first dimension: give it the shape "
                f"[1], or use {_OTHER}",
                parameter=name,
            )
