"""Vectors in fewer bytes, for the messages between a job and its real clients. numpy alone, no I/O.

| name    | bytes for n elements     | decoded                                                                  |
|---------|--------------------------|--------------------------------------------------------------------------|
| whole   | 4 n (8 n of float64)     | the vector itself                                                        |
| int8    | n + 4 ceil(n / 256)      | each element rounded to a step: 1/127 of its block's largest magnitude   |
| top_k:F | 8 k, k = max(1, F n)     | the k elements of largest magnitude; the others are 0                    |
| mask:F  | 4 k, k = max(1, F n)     | k elements drawn at random, times n / k; the others are 0                |

A block is 256 elements. int8 rounds to the nearest step, or, with a generator, at random to one of the two next steps,
so that the expected value is the element. The mask is a function of a number that both sides know, so its indices are
not sent; each element is in it with probability k / n, so the expected value is again the vector. top_k's expected
value is not the vector: its sender adds what was left out to its next vector (`rayps_client.exchange.upload_coding`).

A vector that is not finite is decoded as one that is not finite.

Konecny et al., "Federated Learning: Strategies for Improving Communication Efficiency", 2016 (random masks, random
rounding); Stich et al., "Sparsified SGD with memory", NeurIPS 2018 (top_k with error feedback); Alistarh et al.,
"QSGD", NeurIPS 2017 (random rounding in blocks). `rayps.comm.compress` has the codecs of gradients, for tensors of
torch on any device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rayps_client.exchange.random_numbers import numbers

Floats: TypeAlias = NDArray[np.float32] | NDArray[np.float64]
Parts: TypeAlias = Mapping[str, NDArray[Any]]  # the arrays of a coded vector, by name

BLOCK = 256  # elements that share one scale under int8
_LEVELS = 127


class Malformed(ValueError):
    """A message that is not the encoding of a vector of the expected length. Its text completes "its update ..."."""


class VectorCoding(Protocol):
    """Encodes vectors as few bytes, and decodes them."""

    feeds_back: bool  # whether a sender must add what one encoding lost to its next vector

    def size(self, n: int, item: int = 4) -> int:
        """Return the bytes of n encoded elements, each of which has `item` bytes (4 or 8)."""

    def encode(self, x: Floats, draw: int) -> Parts:
        """Encode a vector, which does not change. `draw`: the number from which random numbers follow."""

    def decode(self, parts: Parts, n: int, draw: int) -> Floats:
        """Return the n elements. Raises Malformed if `parts` is not an encoding of n elements."""


class Whole:
    """Every element, as it is."""

    feeds_back = False

    def size(self, n: int, item: int = 4) -> int:
        """Return the bytes of n elements."""
        return item * n

    def encode(self, x: Floats, draw: int) -> Parts:
        """Return the vector."""
        return {"values": x}

    def decode(self, parts: Parts, n: int, draw: int) -> Floats:
        """Return the n elements. Raises Malformed if there are others."""
        kind = "float64" if parts.get("values", np.empty(0)).dtype == np.float64 else "float32"
        return _part(_only(parts, "values"), "values", kind, n)


class Int8:
    """8 bits for each element, and one float32 scale for each block."""

    feeds_back = False

    def __init__(self, nearest: bool) -> None:
        """`nearest`: round to the nearest step. If not, round at random, so that the expected value is the element."""
        self._nearest = nearest

    def size(self, n: int, item: int = 4) -> int:
        """Return the bytes of n encoded elements: 1 each, and 4 for each block's scale."""
        return n + 4 * _blocks(n)

    def encode(self, x: Floats, draw: int) -> Parts:
        """Encode a vector as the scales of its blocks and its elements in steps."""
        n = x.size
        with np.errstate(over="ignore", invalid="ignore"):
            rows = _rows(x.astype(np.float32, copy=False))
            scales = (np.abs(rows).max(axis=1, initial=0) / np.float32(_LEVELS)).astype(np.float32)
            rows /= np.where(scales == 0, np.float32(1), scales)[:, None]  # a scale of 0: all elements are zero
            if self._nearest:
                rows = np.rint(rows)
            else:
                generator = np.random.Generator(np.random.PCG64(draw))
                rows = np.floor(rows + generator.random(rows.shape, dtype=np.float32))
        # a block with NaN or infinity has a scale that is not finite, so its elements are decoded as NaN or infinity
        steps = np.clip(np.nan_to_num(rows, copy=False, nan=1.0, posinf=1.0, neginf=-1.0), -_LEVELS, _LEVELS)
        return {"scales": scales, "steps": steps.reshape(-1)[:n].astype(np.int8)}

    def decode(self, parts: Parts, n: int, draw: int) -> Floats:
        """Return the n elements. Raises Malformed if `parts` is not an encoding of n elements."""
        _only(parts, "scales", "steps")
        scales = _part(parts, "scales", "float32", _blocks(n))
        steps = _part(parts, "steps", "int8", n)
        rows = _rows(steps.astype(np.float32))
        with np.errstate(over="ignore", invalid="ignore"):
            rows *= scales[:, None]
        return rows.reshape(-1)[:n]


class TopK:
    """The k elements of largest magnitude: their indices (uint32, ascending) and values (float32)."""

    feeds_back = True

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def size(self, n: int, item: int = 4) -> int:
        """Return the bytes of n encoded elements: 8 for each that is sent."""
        return 8 * share(n, self._fraction)

    def encode(self, x: Floats, draw: int) -> Parts:
        """Encode a vector; NaN counts as the largest."""
        k = share(x.size, self._fraction)
        places = np.sort(np.argpartition(np.abs(x), x.size - k)[x.size - k :]) if k else np.empty(0, dtype=np.int64)
        with np.errstate(over="ignore"):
            return {"places": places.astype(np.uint32), "values": x[places].astype(np.float32)}

    def decode(self, parts: Parts, n: int, draw: int) -> Floats:
        """Return the n elements. Raises Malformed if `parts` is not an encoding of n elements."""
        k = share(n, self._fraction)
        _only(parts, "places", "values")
        places, values = _part(parts, "places", "uint32", k), _part(parts, "values", "float32", k)
        if k and (int(places[-1]) >= n or bool(np.any(places[1:] <= places[:-1]))):
            raise Malformed(f"has indices that do not ascend within the {n} parameters")
        found = np.zeros(n, dtype=np.float32)
        found[places] = values
        return found


class RandomMask:
    """k elements that are drawn at random, times n / k. Their values alone are sent (float32)."""

    feeds_back = False

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def size(self, n: int, item: int = 4) -> int:
        """Return the bytes of n encoded elements: 4 for each that is sent."""
        return 4 * share(n, self._fraction)

    def places(self, n: int, draw: int) -> NDArray[np.int64]:
        """Return, sorted, the indices of the mask that `draw` stands for."""
        k = share(n, self._fraction)
        if k == n:
            return np.arange(n)
        keys = numbers(draw, "mask", np.arange(n, dtype=np.int64))
        return np.sort(np.argpartition(keys, k)[:k])

    def encode(self, x: Floats, draw: int) -> Parts:
        """Encode a vector as the values in the mask, which are not multiplied yet."""
        with np.errstate(over="ignore"):
            values = x[self.places(x.size, draw)].astype(np.float32)
        if not np.isfinite(x).all():
            values[:] = np.nan  # such an element may be outside of the mask
        return {"values": values}

    def decode(self, parts: Parts, n: int, draw: int) -> Floats:
        """Return the n elements. Raises Malformed if `parts` is not an encoding of n elements."""
        k = share(n, self._fraction)
        values = _part(_only(parts, "values"), "values", "float32", k)
        found = np.zeros(n, dtype=np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            found[self.places(n, draw)] = values * np.float32(n / max(k, 1))
        return found


def share(n: int, fraction: float) -> int:
    """Return how many of n elements are sent: max(1, `fraction` * n), rounded down."""
    return min(n, max(1, int(fraction * n)))


def _blocks(n: int) -> int:
    return -(-n // BLOCK)


def _rows(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a copy of a vector as rows of a block each, filled up with zeros."""
    rows = np.zeros((_blocks(x.size), BLOCK), dtype=np.float32)
    rows.reshape(-1)[: x.size] = x
    return rows


def _only(parts: Parts, *names: str) -> Parts:
    if parts.keys() != set(names):
        odd = sorted(parts.keys() ^ set(names))[0]
        raise Malformed(f"{'lacks' if odd in names else 'has an unknown'} part {odd!r}")
    return parts


def _part(parts: Parts, name: str, kind: str, count: int) -> NDArray[Any]:
    found = parts[name]
    if found.dtype.name != kind or found.shape != (count,):
        raise Malformed(f"has {found.dtype.name} {found.shape} as {name!r}, but {kind} {(count,)} was expected")
    return found
