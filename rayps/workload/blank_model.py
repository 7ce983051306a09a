"""Build a user's model without memory for its tensors, if that is possible."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from rayps_client.errors import RaypsError
from torch import Tensor, nn

from rayps.data.base import Nested
from rayps.workload.base import Workload
from rayps.workload.model import model_of

_REGISTERED = ("_parameters", "_buffers", "_modules")


def blank(workload: Workload, *, only_meta: bool = False) -> nn.Module:
    """Return a new model on the meta device, where it takes no memory, or a real model if that is impossible.

    Raises:
        WorkloadError: the model cannot be built; with `only_meta`, it cannot be built on the meta device.
    """
    try:
        with torch.device("meta"):
            model = model_of(workload)
    except RaypsError:  # for instance, the model reads values while it is built
        if only_meta:
            raise
        return model_of(workload)
    if only_meta:
        return model
    return model_of(workload) if any(value.is_meta for value in _unregistered(model)) else model


def _unregistered(model: nn.Module) -> Iterator[Tensor]:
    """Yield the model's tensors that are neither parameters nor buffers: no code would fill them later."""
    for module in model.modules():
        yield from _tensors({key: value for key, value in vars(module).items() if key not in _REGISTERED})


def _tensors(value: Nested, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter):  # skips lists of registered parameters, as in nn.LSTM
            yield value
    elif isinstance(value, (dict, list, tuple)) and depth < 3:
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each, depth + 1)
