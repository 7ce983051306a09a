"""Skip connections that may cross the stages of a pipeline: `Stash` stores a value, a later `Unstash` merges it.

In one process the pair is an ordinary skip connection. In a pipeline the value is sent directly from the stage of the
Stash to the stage of its Unstash, and its gradient is sent back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from rayps_client.errors import WorkloadError
from torch import nn

from rayps.data.base import Nested
from rayps.tensors.division import Route


class _StashedValues(threading.local):
    """A dict from names to the values that are stashed now. Each thread has its own."""

    def __init__(self) -> None:
        self.values: dict[str, Nested] = {}


_stash = _StashedValues()


class Stash(nn.Module):
    """A layer that returns its input unchanged, and stores it for the `Unstash` of the same name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Nested) -> Nested:
        """Return x unchanged, after storing it."""
        _stash.values[self.name] = x
        return x

    def extra_repr(self) -> str:
        """Return the name of the skip connection."""
        return repr(self.name)


class Unstash(nn.Module):
    """A layer that returns `merge(x, stashed)`, where `stashed` is the value of the `Stash` of the same name.

    By default `merge` adds the two values.
    """

    def __init__(self, name: str, merge: Callable[..., Nested] = torch.add) -> None:
        super().__init__()
        self.name = name
        self.merge = merge

    def forward(self, x: Nested) -> Nested:
        """Return the merged value. Raises WorkloadError if no value was stashed under the name."""
        if self.name not in _stash.values:
            raise WorkloadError(
                f"Unstash({self.name!r}) found no stashed value: put a layer Stash({self.name!r}) before it",
                name=self.name,
            )
        return self.merge(x, _stash.values.pop(self.name))

    def extra_repr(self) -> str:
        """Return the name of the skip connection."""
        return repr(self.name)


@contextmanager
def stash_in(values: dict[str, Nested]) -> Iterator[None]:
    """Inside the block, `Stash` and `Unstash` layers that run on this thread use `values` as their store."""
    before, _stash.values = _stash.values, values
    try:
        yield
    finally:
        _stash.values = before


def skip_layers(modules: Sequence[nn.Module]) -> dict[str, tuple[int, int]]:
    """Return a dict from each skip connection's name to the numbers of the layers with its Stash and its Unstash.

    Raises:
        WorkloadError: a Stash or an Unstash is missing or occurs twice, or they are in the wrong order.
    """
    found: dict[str, dict[type[nn.Module], list[int]]] = {}
    for number, module in enumerate(modules):
        for part in module.modules():
            if isinstance(part, (Stash, Unstash)):
                found.setdefault(part.name, {Stash: [], Unstash: []})[type(part)].append(number)
    for name, where in found.items():
        for kind, numbers in where.items():
            if len(numbers) != 1:
                raise WorkloadError(
                    f"{kind.__name__}({name!r}) is in the model {len(numbers)} times"
                    f"{f' (layers {numbers})' if numbers else ''}: a skip connection has exactly one Stash and one "
                    "Unstash; give each skip connection its own name",
                    name=name,
                )
        if where[Stash][0] > where[Unstash][0]:
            raise WorkloadError(
                f"Unstash({name!r}) in layer {where[Unstash][0]} comes before its Stash in layer {where[Stash][0]}: "
                "a value must be stashed first",
                name=name,
            )
    return {name: (where[Stash][0], where[Unstash][0]) for name, where in found.items()}


def routes(modules: Sequence[nn.Module], boundaries: Sequence[int]) -> tuple[Route, ...]:
    """Return the skip connections that go from one chunk to another if the layers are cut at `boundaries`.

    Raises WorkloadError under the conditions of `skip_layers`.
    """

    def chunk(layer: int) -> int:
        return sum(layer >= boundary for boundary in boundaries)

    crossing = [Route(name, chunk(source), chunk(target)) for name, (source, target) in skip_layers(modules).items()]
    return tuple(sorted(route for route in crossing if route.source != route.target))
