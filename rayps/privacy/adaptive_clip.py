"""Adaptive clipping: the clip follows a quantile of the clients' norms.

Andrew, Thakkar, McMahan, Ramaswamy, "Differentially Private Learning with Adaptive Clipping", NeurIPS 2021, algorithm
1. In a round with the expected cohort m, client i sends the bit b_i = 1 if the norm of its update is at most C:

    b   = (sum_i (b_i - 1/2) + N(0, sigma_b^2)) / m + 1/2
    C  <- C exp(-clip_lr (b - quantile))

The bits are charged: with noise z_delta on the updates, where z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2), both sums
together disclose as much as one sum with the noise z. (A bit's contribution is at most 1/2.) As the paper's fraction of
a Poisson cohort, b uses the expected size m. Pure.
"""

from __future__ import annotations

import math

from rayps_client.errors import ConfigError

SHARE = 20  # default of sigma_b: m / SHARE


def update_noise(noise_multiplier: float, bit_noise: float) -> float:
    """Return z_delta: the noise multiplier on the updates with which updates and bits together cost z.

    Raises:
        ConfigError: `bit_noise` is too small: the bits alone cost more than z.
    """
    left = noise_multiplier**-2 - (2 * bit_noise) ** -2
    if left <= 0:
        raise ConfigError(
            f"bit_noise is {bit_noise:g}, but adaptive clipping with noise_multiplier={noise_multiplier:g} needs more "
            f"than {noise_multiplier / 2:g}: raise bit_noise, or ask more clients in a round (bit_noise is a twentieth "
            "of their number by default)",
            field="privacy",
        )
    return 1 / math.sqrt(left)


def next_clip(clip: float, noised_bits: float, expected: float, quantile: float, rate: float) -> float:
    """Return the clip of the next round. `noised_bits` is the noised sum of the b_i - 1/2."""
    below = noised_bits / expected + 0.5
    return clip * math.exp(-rate * (below - quantile))
