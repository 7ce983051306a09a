"""What `shard="parameters"` refuses: fields of a workload, and models, without importing torch's FSDP."""

from __future__ import annotations

from rayps_client.errors import ConfigError, WorkloadError
from torch import nn

from rayps.workload.base import Workload
from rayps.workload.compile_model import options_of
from rayps.workload.model import has_tables

_OTHER = "shard='gradients' or shard='optimizer'"


def check_fields(workload: Workload) -> None:
    """Refuse fields of a workload that a model with divided parameters does not have here.

    Raises:
        ConfigError: the text names the field, and what to use instead.
    """
    refused: dict[str, tuple[bool, str]] = {
        "compile": (options_of(workload.compile) is not None, "set compile to False"),
        "sync_batchnorm": (workload.sync_batchnorm, "set sync_batchnorm to False"),
        "average": (workload.average is not None, "leave out the average"),
        "precision": (workload.precision == "fp16", "set precision to 'bf16', which skips no step"),
    }
    for field, (given, way) in refused.items():
        if given:
            raise ConfigError(
                f"{field} is {getattr(workload, field)!r}, which shard='parameters' does not have: {way}, or use "
                f"{_OTHER}",
                field=field,
            )


def check_model(model: nn.Module) -> None:
    """Refuse a model whose parameters cannot be divided.

    Raises:
        ConfigError: it has sparse tables or synchronized BatchNorm layers.
        WorkloadError: a parameter has no dimension, or a layer has sparse gradients.
    """
    if has_tables(model):
        raise ConfigError(
            "the model has sparse tables, whose rows are on servers already: leave out shard='parameters'",
            field="shard",
        )
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
