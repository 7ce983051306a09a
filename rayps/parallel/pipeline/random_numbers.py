"""Random numbers that do not depend on how a model is cut: the generators are seeded for each layer and micro-batch.

A layer that draws random numbers (dropout) uses torch's generators, which are seeded before each layer is called. To
seed them takes about a microsecond, less than to find out which layers draw random numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MASK = (1 << 64) - 1


class LayerRandomState:
    """Seeds torch's generators for one replica, from (seed, replica number `data`, step, micro-batch, layer)."""

    def __init__(self, seed: int, data: int, device: str | torch.device = "cpu") -> None:
        self._job = (seed, data)
        self._base = 0
        self._generators = [torch.default_generator]
        place = torch.device(device)
        if place.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            self._generators.append(torch.cuda.default_generators[place.index or 0])

    def seed_layer(self, micro: int, layer: int) -> None:
        """Seed the generators before `layer` runs on micro-batch `micro`."""
        seed = _hash(self._base + (micro << 32) + layer)
        for generator in self._generators:
            generator.manual_seed(seed)

    @contextmanager
    def seeds_of_step(self, step: int) -> Iterator[None]:
        """Inside the block, seed layers for `step`. After the block, restore the generators' state."""
        words = hashlib.blake2b(repr((*self._job, step)).encode(), digest_size=8).digest()
        self._base = int.from_bytes(words, "little")
        before = [generator.get_state() for generator in self._generators]
        try:
            yield
        finally:
            for generator, state in zip(self._generators, before, strict=True):
                restore_state(generator, state)


def restore_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """Set a generator to a state that it returned earlier."""
    generator.set_state(state)


def _hash(x: int) -> int:
    """Hash a 64-bit number (the finaliser of splitmix64), so that similar numbers give unrelated seeds."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)
