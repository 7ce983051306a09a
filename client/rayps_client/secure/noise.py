"""Discrete Gaussian noise, exact, from a cryptographic source: a client's share of the noise of a sum.

Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020, algorithms 1 to 3, on
vectors: every decision compares whole numbers, so no rounding of floats distorts a probability. `sigma` is a whole
number, which makes t = sigma in algorithm 3 and all quantities fit into 64 bits. A client adds its noise to its whole
numbers before masks (`noise_sizes.py` says how much). The noise is in memory alone, and only the masked sum of both
leaves the client.
"""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

from rayps_client.errors import ConfigError
from rayps_client.secure.masks import Keystream
from rayps_client.secure.noise_sizes import MOST_SIGMA
from rayps_client.secure.quantise import EXTRAS, Integers

_Bools = NDArray[np.bool_]


class NoiseSource:
    """Draws exact discrete noise from AES-256 in counter mode, under a key of the operating system."""

    def __init__(self, key: bytes | None = None) -> None:
        """Prepare. `key` [32 bytes] is for tests; None means a new secret one."""
        self._stream = Keystream(secrets.token_bytes(32) if key is None else key)

    def gaussian(self, size: int, sigma: int) -> Integers:
        """Return `size` independent draws x with probability proportional to exp(-x^2 / (2 sigma^2)).

        Raises:
            ConfigError: sigma is not a whole number from 1 to 2^24.
        """
        if not 1 <= sigma <= MOST_SIGMA:
            raise ConfigError(f"the noise has the standard deviation {sigma} steps: it must be from 1 to {MOST_SIGMA}")
        found, filled = np.empty(size, dtype=np.int64), 0
        while filled < size:
            y = self._laplace(max(64, size - filled), sigma)
            excess = np.abs(np.abs(y) - sigma)
            far = excess >= 64 * sigma  # accepted with a probability below e^-2000: never
            kept = y[self._exp_minus(np.where(far, 0, excess) ** 2, 2 * sigma * sigma) & ~far][: size - filled]
            found[filled : filled + len(kept)] = kept
            filled += len(kept)
        return found

    def _laplace(self, size: int, scale: int) -> Integers:
        """Return at least one draw, of `size` tried, with probability proportional to exp(-|x| / scale)."""
        low = self._below(np.full(size, scale, dtype=np.int64))
        low = low[self._exp_minus(low, scale)]
        high, more = np.zeros(len(low), dtype=np.int64), np.arange(len(low))
        while len(more):
            more = more[self._exp_minus(np.ones(len(more), dtype=np.int64), 1)]
            high[more] += 1
        x = low + scale * high
        negative = self._below(np.full(len(x), 2, dtype=np.int64)) == 1
        kept = ~(negative & (x == 0))
        found: Integers = np.where(negative, -x, x)[kept]
        return found

    def _exp_minus(self, above: Integers, below: int) -> _Bools:
        """Return for each element whether an event of the probability exp(-above / below) occurred."""
        whole, rest = np.divmod(above, below)
        found = self._exp_minus_fraction(rest, below)
        one = np.ones(1, dtype=np.int64)
        open_ = np.flatnonzero(found & (whole > 0))
        while len(open_):
            happened = self._exp_minus_fraction(np.repeat(one, len(open_)), 1)
            found[open_[~happened]] = False
            open_ = open_[happened]
            whole[open_] -= 1
            open_ = open_[whole[open_] > 0]
        return found

    def _exp_minus_fraction(self, above: Integers, below: int) -> _Bools:
        """The same for fractions above / below from 0 to 1: algorithm 1."""
        count = np.ones(len(above), dtype=np.int64)
        open_ = np.arange(len(above))
        while len(open_):
            happened = self._below(np.full(len(open_), below, dtype=np.int64)) < above[open_]
            happened &= self._below(count[open_]) == 0  # together of the probability (above / below) / count
            open_ = open_[happened]
            count[open_] += 1
        found: _Bools = count % 2 == 1
        return found

    def _below(self, bounds: Integers) -> Integers:
        """Return for each bound a uniform whole number from 0 to bound - 1."""
        found = np.zeros(len(bounds), dtype=np.int64)
        open_ = np.flatnonzero(bounds > 1)
        while len(open_):
            raw = np.frombuffer(self._stream.read(8 * len(open_)), dtype="<i8") & np.int64(2**63 - 1)
            bound = bounds[open_]
            fits = raw < (2**63 - 1) // bound * bound  # whole multiples of the bound: no value is more likely
            found[open_[fits]] = raw[fits] % bound[fits]
            open_ = open_[~fits]
        return found


def add_share(integers: Integers, sigma: int, source: NoiseSource) -> None:
    """Add a client's share of the noise to its whole numbers, in place: to the update, not to the `EXTRAS` after it.

    `sigma` 0 adds nothing.
    """
    if sigma:
        integers[:-EXTRAS] += source.gaussian(len(integers) - EXTRAS, sigma)
