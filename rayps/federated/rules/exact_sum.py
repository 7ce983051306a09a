"""A weighted sum of updates with the same bits in any order, and over any number of workers.

A sum of floats depends on the order of its terms; a sum of integers does not. Each product n_k x_k (weight times
update) is written in fixed point, as digits of 40 bits in several int64 numbers called limbs. One unit of the first
limb (its quantum) is 2^-10, one unit of the second limb is 2^-50, and so on. Limbs are added, on one worker or over a
ring, and converted to floats at the end, with one rounding. (Kulisch and Miranker, "The arithmetic of the digital
computer: a new approach", SIAM Review 28, 1986, use enough digits for all floats. Here the range is fixed, and a reply
beyond the range is rejected.)

| dtype            | limbs | bytes an element | quantum |
|------------------|-------|------------------|---------|
| float16 bfloat16 | 2     | 16               | 2^-50   |
| float32          | 2     | 16               | 2^-50   |
| float64          | 3     | 24               | 2^-90   |

Each reply is rounded once, by at most half a quantum of the last limb (and by 2^-53 of itself if its weight is not an
integer below 2^24). The error of a mean is therefore at most half a quantum divided by the replies' mean weight. For
weights of at least 1 and float32 this is 2^-51, which is less than the spacing of float32 for all magnitudes above
2^-27 (7e-9). A ring sends 4 times (float64: 3 times) the vector's bytes, once a round. |n_k x_k| must be below 2^32,
and there may be at most 2^20 replies. Adding a reply takes about twelve operations per element, on blocks that fit into
the cache. The memory does not grow with the number of replies.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from rayps_client.errors import ConfigError
from torch import Tensor

from rayps.comm.ring.ring import Ring

Floats = NDArray[np.float64]
DIGIT = 40  # bits of each limb after the first
FIRST = 10  # the first limb counts multiples of 2^-FIRST
LIMIT = 2.0**32  # |n x| must be below it: then 2^20 replies add up to less than 2^62 quanta of the first limb
MOST = 1 << 20  # the largest number of replies in a sum
LIMBS = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 2, torch.float64: 3}
_BLOCK = 1 << 15  # elements that are added at once: three such blocks of float64 fit into a core's cache
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
NOT_FINITE = "its update contains values that are not finite"
TOO_LARGE = f"its update times its weight exceeds {LIMIT:.3g}"


class ExactSum:
    """Sums the n_k x_k and the n_k of replies, and counts the replies.

    `limbs` is int64 [limbs, size + 2]: first the sum of the vectors, then the sum of the weights, then the number of
    replies. To add several ExactSums, add their limbs. `sum_over_ranks` adds the limbs of all ranks of a ring.
    """

    def __init__(self, size: int, dtype: torch.dtype, memory: Tensor | None = None) -> None:
        """Prepare for vectors of `size` elements of `dtype`, on the CPU.

        `memory` holds the limbs. It has `count_limbs(size, dtype)` zeros; None means that it is allocated here.

        Raises:
            ConfigError: the dtype is not a floating-point dtype.
        """
        if dtype not in LIMBS:
            raise ConfigError(f"an exact sum cannot add {dtype}; it adds float16, bfloat16, float32 and float64")
        self.size, self.dtype = size, dtype
        block = min(_BLOCK, max(1, size))
        self._product = torch.empty(block, dtype=torch.float64)
        self._whole, self._back = np.empty(block), np.empty(block)
        self._only = torch.empty(size, dtype=dtype)
        memory = torch.zeros(self.count_limbs(size, dtype), dtype=torch.int64) if memory is None else memory
        self._sums = memory.view(LIMBS[dtype], size + 2)
        self._magic = [1.5 * 2.0 ** (52 - FIRST - DIGIT * j) for j in range(LIMBS[dtype])]
        self._uncorrected = 0  # number of products whose limbs still include the bits of `_magic`
        # weights and number of the replies that are not in the limbs yet; number of all replies added here
        self._weights, self._replies, self._mine = [0] * len(self._sums), 0, 0

    @staticmethod
    def count_limbs(size: int, dtype: torch.dtype) -> int:
        """Return the number of int64 elements of the limbs for vectors of `size` elements."""
        return LIMBS[dtype] * (size + 2)

    # ---- add

    def add(self, update: Tensor, weight: float = 1.0) -> str | None:
        """Add weight * update and return None. If the reply is rejected, change nothing and return the reason.

        Raises:
            ConfigError: the weight is not a finite number above 0, the lengths differ, or the sum has 2^20 replies.
        """
        why = self.refusal(update, weight)
        if why is not None:
            return why
        if self._mine == 0:
            self._only.copy_(update)
        elif self._mine >= MOST:
            raise ConfigError(f"an exact sum has {MOST} replies already, the largest number that it can add")
        update, weights = update.detach(), _halves(weight)
        for at in range(0, self.size, _BLOCK):
            self._add_block(update[at : at + _BLOCK], at, weights)
        self._uncorrected += len(weights) * (2 if self.dtype == torch.float64 else 1)
        self._mine += 1
        self._add_weight(weight)
        return None

    def add_noise(self, noise: Tensor) -> None:
        """Add noise, float64 [size], to the sum, rounded to the last limb's quantum. It does not count as a reply.

        Raises:
            ConfigError: the length differs, or the noise is not finite or too large for the sum.
        """
        if noise.numel() != self.size or (why := refusal(noise)) is not None:
            cause = why if noise.numel() == self.size else f"it has {noise.numel()} elements instead of {self.size}"
            raise ConfigError(f"the noise cannot be added: {cause}; lower clip or noise_multiplier", field="privacy")
        for at in range(0, self.size, _BLOCK):
            product = self._product[: min(_BLOCK, self.size - at)]
            product.copy_(noise[at : at + _BLOCK])
            self._digits(product.numpy(), 1.0, self._sums[:, at : at + len(product)].numpy())
        self._uncorrected += 1

    def refusal(self, update: Tensor, weight: float = 1.0) -> str | None:
        """Return the reason why `add` would reject this reply, or None.

        Raises ConfigError if the weight or the length is invalid.
        """
        if not (isinstance(weight, (int, float)) and 0 < weight < math.inf):
            raise ConfigError(f"a reply's weight is {weight!r}: it must be a finite number above 0")
        if update.numel() != self.size:
            raise ConfigError(f"a reply has {update.numel()} elements, but the model has {self.size}")
        return refusal(update, weight)

    def _add_block(self, x: Tensor, at: int, weights: list[float]) -> None:
        """Add each of `weights` times `x`, the block of the update that starts at element `at`.

        The products are exact, as they have at most 53 bits: a float64 is multiplied as two halves.
        """
        product = self._product[: len(x)]
        limbs = self._sums[:, at : at + len(x)].numpy()
        high = x.float().double() if self.dtype == torch.float64 else x
        for part in [high, x - high] if self.dtype == torch.float64 else [x]:
            for weight in weights:
                product.copy_(part)
                self._digits(product.numpy(), weight, limbs)

    def _digits(self, value: Floats, weight: float, limbs: NDArray[np.int64]) -> None:
        """Add the digits of weight * value to the limbs.

        To count the quanta in a float, add 1.5 * 2^52 quanta to it. The bits of the sum, minus the bits of that number,
        are the count.
        """
        whole, back, last = self._whole[: len(value)], self._back[: len(value)], len(limbs) - 1
        np.multiply(value, weight, out=value)
        for j, magic in enumerate(self._magic):
            np.add(value, magic, out=whole)
            if j < last:
                # the exact remainder, for the next limbs
                np.subtract(value, np.subtract(whole, magic, out=back), out=value)
            np.add(limbs[j], whole.view(np.int64), out=limbs[j])  # modulo 2^64, until `limbs` carries

    def _add_weight(self, weight: float) -> None:
        self._replies += 1
        if weight == int(weight):
            self._weights[0] += int(weight) << FIRST
            return
        left = Fraction(weight) * 2**FIRST
        for j in range(len(self._weights)):
            digit = round(left)
            self._weights[j] += digit
            left = (left - digit) * 2**DIGIT

    @property
    def limbs(self) -> Tensor:
        """The current limbs, int64 [limbs, size + 2], not copied."""
        if self._uncorrected:
            for row, magic in zip(self._sums.numpy(), self._magic, strict=True):
                bits = int(np.float64(magic).view(np.int64)) * self._uncorrected % 2**64
                np.subtract(row[:-2].view(np.uint64), np.uint64(bits), out=row[:-2].view(np.uint64))
            self._uncorrected = 0
        if self._replies:
            self._sums[:, -2] += torch.tensor(self._weights)
            self._sums[0, -1] += self._replies
            self._weights, self._replies = [0] * len(self._sums), 0
        return self._sums

    # ---- collective

    def sum_over_ranks(self, ring: Ring) -> None:
        """Add the sums of all ranks. Every rank must call this method.

        If all ranks together have a single reply, every rank receives that reply unchanged, and `mean` returns it.
        """
        ring.sum(self.limbs)
        self.share_single_reply(ring)

    def share_single_reply(self, ring: Ring) -> None:
        """If all ranks together have a single reply, send it to every rank. The ranks' limbs must have been added."""
        if self.count == 1:
            bits = self._only.view(_BITS[self.dtype.itemsize])
            sent = bits.to(torch.int64) if self._mine else torch.zeros(self.size, dtype=torch.int64)
            bits.copy_(ring.sum(sent))

    # ---- read

    @property
    def count(self) -> int:
        """The number of replies in the sum."""
        return int(self.limbs[0, -1])

    @property
    def weight(self) -> Fraction:
        """The sum of the weights. The sum is exact if the weights are integers."""
        return _fraction(self.limbs[:, -2])

    def total(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the sum of the n_k x_k, rounded once, as a new vector of `dtype` (by default the updates' dtype)."""
        return self._rounded(Fraction(1), dtype or self.dtype)

    def mean(self, weight: float | Fraction | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return the sum of the n_k x_k divided by `weight`, rounded once, as a new vector of `dtype`.

        If `weight` is None, divide by the sum of the weights; a single reply is then returned bit for bit. The result
        is zeros if the weights are so small that their sum is 0 in fixed point.

        Raises:
            ConfigError: there is no reply.
        """
        if not self.count:
            raise ConfigError("there is no mean of no replies: the caller must leave the model unchanged")
        if weight is None and self.count == 1:
            return self._only.to(dtype or self.dtype, copy=True)
        divisor = self.weight if weight is None else Fraction(weight)
        if not divisor:
            return torch.zeros(self.size, dtype=dtype or self.dtype)
        return self._rounded(divisor, dtype or self.dtype)

    def clear(self) -> None:
        """Reset the sum to zero."""
        self._sums.zero_()
        self._uncorrected = self._replies = self._mine = 0
        self._weights = [0] * len(self._sums)

    def _rounded(self, divisor: Fraction, dtype: torch.dtype) -> Tensor:
        out = torch.empty(self.size, dtype=dtype)
        n = float(divisor)
        for at in range(0, self.size, _BLOCK):
            limbs = self.limbs[:, at : min(at + _BLOCK, self.size)]
            if self.dtype == torch.float64:
                high, low = _value(limbs)
                out[at : at + _BLOCK] = high + low if n == 1 else _quotient(high, low, n)
            else:  # the roundings in float64 do not change a result that has at most 24 bits
                high, low = limbs.double()
                out[at : at + _BLOCK] = high.mul_(2.0**-FIRST).add_(low, alpha=2.0 ** -(FIRST + DIGIT)).div_(n)
        return out


def refusal(update: Tensor, weight: float = 1.0) -> str | None:
    """Return the reason why weight * update cannot be added (not finite, or beyond `LIMIT`), or None if it can."""
    if weight >= LIMIT:
        return TOO_LARGE
    if not update.numel():
        return None
    low, high = (end.item() for end in torch.aminmax(update.detach()))  # NaN propagates through both
    if not (math.isfinite(low) and math.isfinite(high)):
        return NOT_FINITE
    return None if max(-low, high) * weight < LIMIT else TOO_LARGE


def _halves(weight: float) -> list[float]:
    """Return one or two numbers, of at most 24 and 29 bits, that add up to a weight."""
    high = float(np.float32(weight))
    return [high] if high == weight else [high, weight - high]


def _fraction(limbs: Tensor) -> Fraction:
    return sum((Fraction(int(limb), 1 << (FIRST + DIGIT * j)) for j, limb in enumerate(limbs)), Fraction(0))


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a + b rounded, and the exact rounding error (Knuth)."""
    s = a + b
    part = s - a
    return s, (a - (s - part)) + (b - part)


def _value(limbs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value of limbs [limbs, n] as two float64 vectors [n]: the rounded value, and the remainder."""
    limbs = limbs.clone()
    for j in range(len(limbs) - 1, 0, -1):  # carry: each limb but the first becomes 0 to 2^DIGIT - 1
        carry = limbs[j] >> DIGIT
        limbs[j] -= carry << DIGIT
        limbs[j - 1] += carry
    top = limbs[0] >> DIGIT
    terms = [top.double() * 2.0 ** (DIGIT - FIRST), (limbs[0] - (top << DIGIT)).double() * 2.0**-FIRST]
    terms += [limbs[j].double() * 2.0 ** -(FIRST + DIGIT * j) for j in range(1, len(limbs))]
    high, low = terms[0], torch.zeros_like(terms[0])
    for term in terms[1:]:
        high, left = _two_sum(high, term)
        low += left
    return _two_sum(high, low)


def _quotient(high: Tensor, low: Tensor, n: float) -> Tensor:
    """Return (high + low) / n, correctly rounded to float64, except for a tie that this method cannot detect."""
    q = high / n
    q_high = q.float().double()
    q_low = q - q_high
    rest = high
    for part in _halves(n):
        rest = rest - q_high * part
    for part in _halves(n):
        rest = rest - q_low * part
    return q + (rest + low) / n
