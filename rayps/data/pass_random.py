"""The random numbers that a data set draws in a pass from the global generators of torch, numpy and `random`.

All readers of one data set must draw the same numbers: if the set shuffles its items, rank r of N keeps every N-th item
of one common order. Therefore a pass has generators of its own, seeded with the job's seed and the epoch. While a
reader takes items, they replace the process's generators, whose states are restored afterwards. Neither the model nor
another set sees the difference.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

# held while the global generators are replaced or seeded, because workers that are threads share them
GLOBAL_RANDOM = threading.RLock()


class _States(NamedTuple):
    """The states of the global generators."""

    torch: torch.Tensor
    numpy: tuple[Any, ...]  # as `numpy.random.get_state()`
    random: tuple[Any, ...]

    @classmethod
    def now(cls) -> _States:
        """Return the states of this moment."""
        return cls(torch.default_generator.get_state(), _numpy_state(), random.getstate())

    def set(self) -> None:
        """Set the states of the global generators."""
        torch.default_generator.set_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.random)

    def equals(self, other: _States) -> bool:
        """Return whether no number was drawn between the two."""
        _, key, *rest = self.numpy
        _, other_key, *other_rest = other.numpy
        return (
            torch.equal(self.torch, other.torch)
            and self.random == other.random
            and np.array_equal(key, other_key)
            and rest == other_rest
        )


def _numpy_state() -> tuple[Any, ...]:
    found = np.random.get_state()
    assert isinstance(found, tuple), "numpy's global generator is an MT19937, unless someone has replaced it"
    return found


def seed_generators(seed: int, *more: int) -> None:
    """Seed the global generators of torch, numpy and `random` by these whole numbers; `more` are 0 or greater."""
    words = np.random.SeedSequence([seed % 2**64, *more]).generate_state(2)
    mixed = int(words[0]) << 16 ^ int(words[1])
    torch.default_generator.manual_seed(mixed)
    np.random.seed(mixed % 2**32)
    random.seed(mixed)


class PassRandom:
    """The generators of one pass. Inside `with drawing():` they are the process's global generators."""

    def __init__(self, seed: int, *more: int) -> None:
        """Seed the generators by these whole numbers."""
        self._seed = seed, *more
        self._first: _States | None = None
        self._states: _States | None = None

    @property
    def drawn(self) -> bool:
        """Whether numbers were drawn since the start of the pass."""
        return self._first is not None and self._states is not None and not self._first.equals(self._states)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Replace the process's generators inside the block. One thread at a time is inside."""
        with GLOBAL_RANDOM:
            before = _States.now()
            try:
                if self._states is None:
                    seed_generators(*self._seed)
                    self._first = _States.now()
                else:
                    self._states.set()
                yield
            finally:
                self._states = _States.now()
                before.set()
