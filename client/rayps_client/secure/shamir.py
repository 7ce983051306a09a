"""Shamir's t-of-n secret sharing of 32 bytes, over the prime field of 2^256 + 297 elements.

Shamir, "How to Share a Secret", Communications of the ACM 22, 1979. A secret is the value at 0 of a random polynomial
of degree t - 1; the share of a holder is the value at the holder's point, a whole number from 1. Any t shares give the
secret; fewer give nothing, because every secret is then equally likely. The prime is the smallest above 2^256, so that
every 32 bytes are an element of the field.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from rayps_client.errors import ConfigError

PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33  # an element of the field may need one bit more than 256


def split(secret: bytes, threshold: int, points: Iterable[int]) -> dict[int, bytes]:
    """Return a dict from each of `points` to its share [33 bytes]; any `threshold` of them give the secret [32 bytes].

    Raises:
        ConfigError: the secret has another length, a point is below 1 or occurs twice, or there are too few points.
    """
    holders = list(points)
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"a shared secret has {len(secret)} bytes: expected {SECRET_BYTES}")
    if len(set(holders)) < len(holders) or min(holders, default=0) < 1 or not 1 <= threshold <= len(holders):
        raise ConfigError(f"{threshold} of {len(holders)} shares at {holders}: give different points of at least 1")
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    found: dict[int, bytes] = {}
    for point in holders:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * point + coefficient) % PRIME
        found[point] = value.to_bytes(SHARE_BYTES, "big")
    return found


def combine(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Return the secret [32 bytes] of at least `threshold` shares, given as a dict from point to share.

    Raises:
        ConfigError: there are too few shares, or they are not shares of one secret of 32 bytes.
    """
    if len(shares) < threshold:
        raise ConfigError(f"{len(shares)} shares of a secret that needs {threshold}")
    points = tuple(sorted(shares)[:threshold])
    values = [int.from_bytes(shares[point], "big") for point in points]
    secret = sum(factor * value for factor, value in zip(_factors(points), values, strict=True)) % PRIME
    if secret >= 1 << (8 * SECRET_BYTES):
        raise ConfigError("these shares do not belong to one secret of 32 bytes")
    return secret.to_bytes(SECRET_BYTES, "big")


@lru_cache(maxsize=64)
def _factors(points: Sequence[int]) -> list[int]:
    """Return Lagrange's factors for the value at 0 of the polynomial through these points."""
    found = []
    for point in points:
        above, below = 1, 1
        for other in points:
            if other != point:
                above, below = above * other % PRIME, below * (other - point) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return found
