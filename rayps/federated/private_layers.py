"""The layers of a model that stay with each client: parameters and buffers whose names match patterns.

`rayps_client.private_layers` says what a pattern is. The shared part has the elements of the vector in their order,
without the private ones. A client sends the shared part alone, and the server changes the shared part alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from rayps_client.private_layers import PRIVATE, private_names
from torch import Tensor, nn

from rayps.tensors.flat import Layout


@dataclass(frozen=True, slots=True)
class PrivateLayers:
    """Which parameters and buffers of one model are private. The methods do nothing if none is."""

    layout: Layout
    parameters: frozenset[str]  # the names of the private parameters
    buffers: frozenset[str]  # the names of the private buffers

    @classmethod
    def of(cls, patterns: Collection[str], layout: Layout, buffers: Iterable[str]) -> PrivateLayers:
        """Find the names that match `patterns` among the parameters of `layout` and the names `buffers`.

        Raises:
            ConfigError: a pattern matches nothing, or the patterns match all parameters.
        """
        return cls(layout, *private_names(patterns, layout.names, list(buffers)))

    @classmethod
    def of_model(cls, patterns: Collection[str], model: nn.Module) -> PrivateLayers:
        """Find the private layers of a model: see `of`."""
        layout = Layout.of((name, p) for name, p in model.named_parameters() if p.requires_grad)
        return cls.of(patterns, layout, dict(model.named_buffers()))

    def __bool__(self) -> bool:
        """Return whether anything is private."""
        return bool(self.parameters or self.buffers)

    @property
    def shared(self) -> frozenset[str]:
        """The names of the parameters that are not private."""
        return frozenset(self.layout.names) - self.parameters

    @property
    def shared_size(self) -> int:
        """The number of elements of the shared part."""
        return sum(hi - lo for lo, hi in self._runs())

    def cut(self, vector: Tensor) -> Tensor:
        """Return the shared part of a vector of the whole model: a copy, or the vector itself if nothing is private."""
        if not self.parameters:
            return vector
        return torch.cat([vector[lo:hi] for lo, hi in self._runs()])

    def paste(self, vector: Tensor, shared: Tensor) -> None:
        """Copy a shared part into a vector of the whole model, whose private elements do not change."""
        if not self.parameters:
            if shared.data_ptr() != vector.data_ptr():
                vector.copy_(shared)
            return
        at = 0
        for lo, hi in self._runs():
            vector[lo:hi].copy_(shared[at : at + hi - lo])
            at += hi - lo

    def without_private(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the buffers that are not private."""
        return {name: value for name, value in buffers.items() if name not in self.buffers}

    def state_of(self, vector: Tensor, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the private parameters and buffers, under their names in a client's state."""
        own = {e.name: vector[e.lo : e.hi].view(e.shape) for e in self.layout.entries if e.name in self.parameters}
        own |= {name: buffers[name] for name in buffers if name in self.buffers}
        return {f"{PRIVATE}{name}": value.detach().clone() for name, value in own.items()}

    def load(self, state: Mapping[str, Tensor], vector: Tensor, buffers: Mapping[str, Tensor]) -> None:
        """Copy the private parameters and buffers of a client's state into a vector and into buffers.

        What the state lacks does not change: a client that has taken no part has the initial values.
        """
        for entry in self.layout.entries:
            value = state.get(f"{PRIVATE}{entry.name}")
            if entry.name in self.parameters and value is not None and tuple(value.shape) == entry.shape:
                vector[entry.lo : entry.hi].view(entry.shape).copy_(value)
        for name in self.buffers:
            if f"{PRIVATE}{name}" in state:
                buffers[name].detach().copy_(state[f"{PRIVATE}{name}"])

    def _runs(self) -> list[tuple[int, int]]:
        """Return the bounds (lo, hi) of each run of elements that are shared."""
        runs = list[tuple[int, int]]()
        for entry in self.layout.entries:
            if entry.name in self.parameters:
                continue
            if runs and runs[-1][1] == entry.lo:
                runs[-1] = (runs[-1][0], entry.hi)
            else:
                runs.append((entry.lo, entry.hi))
        return runs
