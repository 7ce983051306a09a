"""Draw Gaussian noise from a cryptographic random generator.

The bits are the key stream of AES-256 in counter mode. By default the key comes from the operating system for each
draw, is used once and is dropped. Box and Muller's method makes normal numbers from them. Each number of the noise is
half the sum of four such numbers: Holohan and Braghin, "Secure Random Sampling in Differential Privacy", ESORICS 2021,
show that the sum hides the gaps between floating-point numbers, by which a single number could be recognized (Mironov
2012). The noise is added to a sum in fixed point, which is rounded after that.
"""

from __future__ import annotations

import hashlib
import math
import os
from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_TERMS = 4  # normal numbers in the sum
_BLOCK = 1 << 16  # numbers that are made at once


class NoiseSource(Protocol):
    """Where noise and the cohorts' random numbers come from."""

    def normal(self, size: int, std: float, *at: int) -> Floats:
        """Return `size` independent numbers of the normal distribution with mean 0 and standard deviation `std`.

        `at` says what the draw is for, such as the round. No two draws may have the same `at`.
        """

    def uniform(self, size: int, *at: int) -> Floats:
        """Return `size` independent numbers, uniform from 0 to below 1."""


class SecretNoise:
    """Noise that nobody can draw again: each draw has a new key of the operating system's random generator."""

    def normal(self, size: int, std: float, *at: int) -> Floats:
        """Return normal numbers. See `NoiseSource.normal`."""
        return normal(os.urandom(32), size, std)

    def uniform(self, size: int, *at: int) -> Floats:
        """Return uniform numbers. See `NoiseSource.uniform`."""
        return KeyStream(os.urandom(32)).uniform(size)


class KeyedNoise:
    """Noise that is a function of a key and of `at`.

    With the job's seed as the key it can be drawn again by anyone, and proves nothing. With a secret key it lets one
    process draw the noise of a tree's node again (`rayps.privacy.tree_noise`).
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    @staticmethod
    def of_seed(seed: int) -> KeyedNoise:
        """Return the noise of a job's seed, which proves nothing."""
        return KeyedNoise(hashlib.sha256(f"rayps noise of seed {seed}".encode()).digest())

    def normal(self, size: int, std: float, *at: int) -> Floats:
        """Return normal numbers. See `NoiseSource.normal`."""
        return normal(self._derived("normal", at), size, std)

    def uniform(self, size: int, *at: int) -> Floats:
        """Return uniform numbers. See `NoiseSource.uniform`."""
        return KeyStream(self._derived("uniform", at)).uniform(size)

    def _derived(self, purpose: str, at: tuple[int, ...]) -> bytes:
        return hashlib.blake2b(f"{purpose} {at}".encode(), key=self._key, digest_size=32).digest()


class KeyStream:
    """Random numbers from the key stream of AES-256 in counter mode under a key of 32 bytes."""

    def __init__(self, key: bytes) -> None:
        self._stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def words(self, count: int) -> NDArray[np.uint64]:
        """Return the next `count` words of 64 bits."""
        return np.frombuffer(self._stream.update(bytes(8 * count)), dtype="<u8")

    def uniform(self, count: int) -> Floats:
        """Return `count` numbers, uniform from 0 to below 1, as multiples of 2^-53."""
        return np.asarray((self.words(count) >> np.uint64(11)) * 2.0**-53, dtype=np.float64)

    def normal(self, count: int) -> Floats:
        """Return `count` standard normal numbers (Box and Muller 1958)."""
        half = (count + 1) // 2
        radius = np.sqrt(-2 * np.log1p(-self.uniform(half)))
        angle = 2 * math.pi * self.uniform(half)
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def normal(key: bytes, size: int, std: float) -> Floats:
    """Return `size` normal numbers of standard deviation `std`, each made of four from the key stream of `key`."""
    stream, out = KeyStream(key), np.empty(size)
    for at in range(0, size, _BLOCK):
        count = min(_BLOCK, size - at)
        terms = stream.normal(_TERMS * count).reshape(_TERMS, count)
        out[at : at + count] = terms.sum(axis=0) * (std / math.sqrt(_TERMS))
    return out
