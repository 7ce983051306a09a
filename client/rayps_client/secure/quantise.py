"""A client's update as whole numbers modulo 2^32 or 2^64, whose sum over all clients does not wrap.

    levels   2^(bits - 1) - 1; one step is clip / levels
    update   the update, scaled down to the L2 norm `clip`; its elements are times n_k, in steps, rounded to the nearest
    n_k      the client's weight: min(its samples, max_weight), as in McMahan et al. 2018 (DP-FedAvg)
    after it three elements: n_k; the mean loss times n_k; the processed samples

An element of the update is at most `levels` n_k in absolute value, so a sum over n clients is at most
n * max_weight * levels. The modulus is the smaller of 2^32 and 2^64 whose half exceeds this bound and the noise's.

Rounding is to the nearest whole number, not at random: an element of the weighted mean is wrong by at most half a step
times (number of clients / sum of weights), and the same update gives the same numbers, so a repeated round reveals
nothing more. Rounding adds at most sqrt(d) / 2 steps to the norm of a vector of d elements (`noise_sizes.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rayps_client.errors import TrainingError
from rayps_client.secure.secure_facts import levels_of, word_bits

Floats: TypeAlias = NDArray[np.float64]
Words: TypeAlias = NDArray[np.uint32] | NDArray[np.uint64]
Integers: TypeAlias = NDArray[np.int64]
EXTRAS = 3  # elements after the update: weight, weighted loss, processed samples
MOST_LOSS = 128.0  # a mean loss beyond it counts as this


@dataclass(frozen=True, slots=True)
class ClientNumbers:
    """What a client adds to the sum: its update, and the numbers beside it."""

    update: Floats  # w_k - w_t
    weight: int  # n_k before it is limited
    loss: float  # mean loss of the training
    samples: int  # samples processed, with repetitions; not summed with the largest weight 1


@dataclass(frozen=True, slots=True)
class SummedNumbers:
    """The sums over the clients of a round."""

    update: Floats  # sum of n_k times the clipped, rounded update of client k
    weight: int  # sum of the n_k
    loss: float  # sum of n_k times the mean loss
    samples: int
    counts: bool = True  # whether the loss and the processed samples were summed; else they are 0

    @property
    def mean(self) -> Floats:
        """The weighted mean of the updates."""
        return self.update / self.weight


@dataclass(frozen=True, slots=True)
class Quantiser:
    """Writes numbers as words, and reads the sum of words. Equal on the server and on all clients of a round."""

    clip: float  # largest L2 norm of an update
    bits: int  # of an element of an update with the weight 1
    max_weight: int  # largest weight
    clients: int  # largest number of clients in a sum
    norm: float | None = None  # largest L2 norm of an update before rounding, if less than `clip`
    counts: bool = True  # whether the sum has losses and processed samples
    margin: int = 0  # largest absolute value of the noise in an element of the sum; 0: no noise

    def __post_init__(self) -> None:
        word_bits(self.clients, self.max_weight, self.bits, self.margin)

    @property
    def levels(self) -> int:
        """The number of steps in `clip`."""
        return levels_of(self.bits)

    @property
    def step(self) -> float:
        """The size of one step."""
        return self.clip / self.levels

    @property
    def word(self) -> np.dtype[np.uint32] | np.dtype[np.uint64]:
        """The dtype of a word, in little-endian order."""
        bits = word_bits(self.clients, self.max_weight, self.bits, self.margin)
        return np.dtype("<u4") if bits == 32 else np.dtype("<u8")

    def limited(self, samples: int) -> int:
        """Return the weight of a client with so many samples."""
        return min(samples, self.max_weight)

    def integers(self, numbers: ClientNumbers) -> Integers:
        """Return the whole numbers [update, weight, weighted loss, samples] of a client, before noise and masks.

        Raises:
            TrainingError: a number is not finite, or the weight is below 1.
        """
        weight = self.limited(numbers.weight)
        update = np.asarray(numbers.update, dtype=np.float64).reshape(-1)
        norm = float(np.linalg.norm(update))
        if not math.isfinite(norm) or not math.isfinite(numbers.loss) or weight < 1:
            raise TrainingError("its update or loss contains values that are not finite")
        most = self.clip if self.norm is None else self.norm
        scale = min(1.0, most / norm) if norm > 0 else 1.0
        found = np.empty(update.size + EXTRAS, dtype=np.int64)
        bound = self.levels * weight
        found[:-EXTRAS] = np.clip(np.rint(update * (scale * weight / self.step)), -bound, bound)
        loss = max(-MOST_LOSS, min(MOST_LOSS, numbers.loss)) * weight * self.levels / MOST_LOSS
        found[-EXTRAS:] = (weight, round(loss), min(numbers.samples, self.max_weight * self.levels))
        if not self.counts:
            found[1 - EXTRAS :] = 0
        elif self.max_weight == 1:  # so that nothing tells how many samples a client has
            found[-1] = 0
        return found

    def read_words(self, raw: bytes) -> Words:
        """Return the words in little-endian bytes."""
        return np.frombuffer(bytearray(raw), dtype="<u4" if self.word.itemsize == 4 else "<u8")

    def words(self, integers: Integers) -> Words:
        """Return whole numbers modulo 2^32 or 2^64."""
        return integers.astype(np.int32 if self.word.itemsize == 4 else np.int64).view(self.word)

    def read_sum(self, total: Words) -> SummedNumbers:
        """Return the sums that unmasked words stand for."""
        signed = total.view(np.int32 if self.word.itemsize == 4 else np.int64)
        weight, loss, samples = (int(value) for value in signed[-EXTRAS:])
        update = signed[:-EXTRAS].astype(np.float64) * self.step
        return SummedNumbers(update, weight, loss * MOST_LOSS / self.levels, samples, self.counts)
