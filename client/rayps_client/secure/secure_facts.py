"""What the order of a secure round says about it, and the modulus that follows. Without numpy: the service reads it."""

from __future__ import annotations

from typing import TypedDict

from rayps_client.errors import ConfigError

MOST_BITS = 32  # of an element of an update, with its sign
MOST_WEIGHT = 1 << 20


class SecureFacts(TypedDict):
    """The entry `secure` of a round's order."""

    clip: float  # largest L2 norm of an update
    bits: int  # of an element of an update with the weight 1
    max_weight: int  # largest weight
    clients: int  # number of clients that the order is for
    threshold: float  # more than this fraction of a closed neighbourhood must survive
    least: int  # with fewer survivors the round is void
    verify: bool  # whether the round has a consistency check
    norm: float  # largest L2 norm of an update before rounding: with differential privacy less than `clip`
    counts: bool  # whether the sum has losses and processed samples; without, they are 0 in it
    noise: int  # standard deviation, in steps, of the noise that each client adds to each element; 0: none


def levels_of(bits: int) -> int:
    """Return the number of steps in `clip`, for elements of `bits` bits with their sign."""
    return int(2 ** (bits - 1) - 1)


def word_bits(clients: int, max_weight: int, bits: int, margin: int = 0) -> int:
    """Return the bits of a word, 32 or 64, in which the sum of so many clients' numbers cannot wrap.

    `margin`: the largest absolute value of noise in an element of the sum.

    Raises:
        ConfigError: 64 bits are too few.
    """
    bound = clients * max_weight * levels_of(bits) + margin
    for found in (32, 64):
        if bound < 1 << (found - 1):
            return found
    raise ConfigError(
        f"the sum of {clients} clients x max_weight {max_weight} x {levels_of(bits)} levels "
        + ("and its noise do" if margin else "does")
        + " not fit into 64 bits: "
        "lower bits or\nmax_weight in secure=secagg(bits=...,max_weight=...), or fraction",
        field="secure",
    )
