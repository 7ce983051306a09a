"""Allocate one worker's part of a user's model, without memory for the other parts."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def keep_only(model: nn.Module, kept: set[int], device: str = "cpu") -> None:
    """Allocate the parameters and buffers whose `id` is in `kept` on `device`, and put all others on the meta device.

    The model is changed in place. Tied parameters stay tied. The content of new memory is undefined.
    """
    done: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        for name, value in [*module._parameters.items(), *module._buffers.items()]:
            if value is None:
                continue
            if id(value) not in done:
                done[id(value)] = (value, _moved(value, device if id(value) in kept else "meta"))
            if done[id(value)][1] is not value:
                setattr(module, name, done[id(value)][1])


def _moved(value: Tensor, device: str) -> Tensor:
    if value.device.type == torch.device(device).type:
        return value
    unfilled = value.is_meta or device == "meta"
    moved = torch.empty_like(value, device=device) if unfilled else value.detach().to(device)
    return nn.Parameter(moved, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else moved
