"""Convert tensors of torch into bytes, and back, without a change of a bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rayps_client.exchange.raw_tensors import RawTensor


def raw_of(tensor: Tensor) -> RawTensor:
    """Return a tensor as bytes. On the CPU, the result uses the tensor's memory if that is contiguous."""
    plain = tensor.detach().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b""
    return RawTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def tensor_of(raw: RawTensor) -> Tensor:
    """Return bytes as a tensor on the CPU, which uses the memory of the bytes if that can be written."""
    kind: torch.dtype = getattr(torch, raw.dtype)
    if not raw.elements:
        return torch.empty(raw.shape, dtype=kind)
    data = memoryview(raw.data)
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=kind).reshape(raw.shape)


def raws_of(tensors: Mapping[str, Tensor]) -> dict[str, RawTensor]:
    """Return named tensors as bytes."""
    return {name: raw_of(value) for name, value in tensors.items()}


def tensors_of(raws: Mapping[str, RawTensor]) -> dict[str, Tensor]:
    """Return named bytes as tensors."""
    return {name: tensor_of(value) for name, value in raws.items()}
