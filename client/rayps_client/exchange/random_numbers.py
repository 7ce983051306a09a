"""Random numbers that depend on whole numbers only, equal on every machine: of a client's rows and of its model.

Numbers of clients and rounds are mixed by a hash (the finalizer of SplitMix64, Steele, Lea and Flood 2014), not by a
library's generator, so that they do not depend on the version of a library.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # constants of SplitMix64
_MASK = (1 << 64) - 1


def random_of(seed: int, *more: int) -> np.random.Generator:
    """Return a random generator whose numbers depend on these whole numbers only."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed % 2**64, *more])))


def number(seed: int, purpose: str, *at: int) -> int:
    """Return 64 random bits, a function of seed, purpose and `at`."""
    found = mixed(seed ^ (zlib.crc32(purpose.encode()) << 32))
    for each in at:
        found = mixed(found ^ mixed(each + GOLDEN))
    return found


def numbers(seed: int, purpose: str, which: NDArray[np.int64], *at: int) -> NDArray[np.uint64]:
    """Return 64 random bits for each element of `which`: a function of seed, purpose, this element and `at`.

    Different elements never have the same bits for the same `at`. The bits therefore also define an order of them.
    """
    z = which.astype(np.uint64) * np.uint64(GOLDEN) + np.uint64(number(seed, purpose, *at))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND)
    return np.asarray(z ^ (z >> np.uint64(31)), dtype=np.uint64)


def mixed(z: int) -> int:
    """Return the hash of 64 bits."""
    z &= _MASK
    z = ((z ^ (z >> 30)) * FIRST) & _MASK
    z = ((z ^ (z >> 27)) * SECOND) & _MASK
    return z ^ (z >> 31)
