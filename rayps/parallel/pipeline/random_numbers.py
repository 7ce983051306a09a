"""Random numbers that do not depend on how a model is cut: reseeded for each layer and micro-batch.

A layer that draws (dropout) uses torch's own generators, which are seeded before the layer is called. That takes about
a microsecond, less than finding out which layers draw.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MASK = (1 << 64) - 1


class LayerRandomState:
    """The random state of one replica, seeded by (seed, step, data index, micro-batch, layer)."""

    def __init__(self, seed: int, data: int, device: str | torch.device = "cpu") -> None:
        self._job = (seed, data)
        self._base = 0
        self._generators = [torch.default_generator]
        place = torch.device(device)
        if place.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            self._generators.append(torch.cuda.default_generators[place.index or 0])

    def at(self, micro: int, layer: int) -> None:
        """Seed the generators for `layer` on the micro-batch `micro`."""
        seed = _mixed(self._base + (micro << 32) + layer)
        for generator in self._generators:
            generator.manual_seed(seed)

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Set the step inside the block, and restore the generators after it."""
        words = hashlib.blake2b(repr((*self._job, step)).encode(), digest_size=8).digest()
        self._base = int.from_bytes(words, "little")
        before = [generator.get_state() for generator in self._generators]
        try:
            yield
        finally:
            for generator, state in zip(self._generators, before, strict=True):
                put_back(generator, state)


def put_back(generator: torch.Generator, state: torch.Tensor) -> None:
    """Restore a generator's state."""
    generator.set_state(state)


def _mixed(x: int) -> int:
    """Apply the finaliser of splitmix64: similar numbers become unrelated ones."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)
