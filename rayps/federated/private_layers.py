"""The layers of a model that stay with each client, as tensors: `trainers.private_layers` has names and positions.

A client sends the shared part alone, and the server changes the shared part alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Self

import torch
from rayps_client.trainers.private_layers import PrivateParts
from torch import Tensor, nn

from rayps.tensors.flat import Layout


class PrivateLayers(PrivateParts):
    """The private layers of a model whose vector is a tensor. The methods do nothing if none is private."""

    __slots__ = ()

    @classmethod
    def of_layout(cls, patterns: Collection[str], layout: Layout, buffers: Collection[str]) -> Self:
        """Find the private layers among the parameters of `layout` and the names `buffers`: see `of`."""
        return cls.of(patterns, ((entry.name, entry.shape) for entry in layout.entries), buffers)

    @classmethod
    def of_model(cls, patterns: Collection[str], model: nn.Module) -> Self:
        """Find the private layers of a model: see `of`."""
        layout = Layout.of((name, p) for name, p in model.named_parameters() if p.requires_grad)
        return cls.of_layout(patterns, layout, dict(model.named_buffers()))

    def cut(self, vector: Tensor) -> Tensor:
        """Return the shared part of a vector of the whole model: a copy, or the vector itself if nothing is private."""
        if not self.parameters:
            return vector
        return torch.cat([vector[lo:hi] for lo, hi in self.runs])

    def paste(self, vector: Tensor, shared: Tensor) -> None:
        """Copy a shared part into a vector of the whole model, whose private elements do not change."""
        if not self.parameters:
            if shared.data_ptr() != vector.data_ptr():
                vector.copy_(shared)
            return
        at = 0
        for lo, hi in self.runs:
            vector[lo:hi].copy_(shared[at : at + hi - lo])
            at += hi - lo

    def state_of(self, vector: Tensor, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the private parameters and buffers, by their names in a client's state."""
        own = {key: vector[lo:hi].view(shape) for key, lo, hi, shape in self.own} | self.buffers_to_store(buffers)
        return {key: value.detach().clone() for key, value in own.items()}

    def load(self, state: Mapping[str, Tensor], vector: Tensor, buffers: Mapping[str, Tensor]) -> None:
        """Copy the private parameters and buffers of a client's state into a vector and into buffers.

        What the state lacks does not change: a client that has taken no part has the initial values.
        """
        for key, lo, hi, shape in self.own:
            value = state.get(key)
            if value is not None and tuple(value.shape) == shape:
                vector[lo:hi].view(shape).copy_(value)
        for name, value in self.own_buffers(state).items():
            buffers[name].detach().copy_(value)
