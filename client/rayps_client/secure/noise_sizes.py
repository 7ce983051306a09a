"""How large a client's share of the noise is, and the room that it needs in a word. The service reads it: no numpy.

Kairouz, Liu and Steinke, "The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure Aggregation",
ICML 2021: each client adds a share of the noise to its whole numbers, before masks. A share is sized for the fewest
honest clients whose numbers are in a sum that can be unmasked: clients that drop out never leave too little, and more
of them make more noise than is claimed.
"""

from __future__ import annotations

import math

MOST_SIGMA = 1 << 24  # the largest standard deviation of a share, in steps
TAIL = 12.0  # standard deviations for which the modulus leaves room: beyond is a probability of 2^-107


def share_of(sigma: float, shares: int) -> int:
    """Return the sigma of one client's share, so that the sum of so many shares has at least `sigma` [steps]."""
    return max(1, math.ceil(sigma / math.sqrt(shares)))


def margin_of(sigma: int, clients: int) -> int:
    """Return the largest absolute value of the sum of `clients` shares of noise for which the modulus needs room."""
    return math.ceil(TAIL * sigma * math.sqrt(clients))


def rounding(size: int) -> float:
    """Return the most by which rounding to the nearest moves a vector of `size` elements, as an L2 norm in steps.

    Each element moves by at most 1/2. (Kairouz et al. 2021 round at random, and bound the growth of the norm with high
    probability, or reject.) A client scales its update down by this before it rounds, so the rounded update does not
    exceed the clip: that norm is the sensitivity. The modulus changes nothing, because the reduced sum is a function of
    the sum.
    """
    return math.sqrt(size) / 2
