"""The initial value of a row: a function of the table's seed and the id alone. Pure.

The value has the same bits on every processor, server and library version, because only whole-number arithmetic and
exactly rounded operations are used. Element j of row i is computed from a hash of (seed, i, j). Rows can therefore be
made in any order, at any time, on any server. This is a counter-based generator (Salmon et al., "Parallel Random
Numbers: As Easy as 1, 2, 3", SC 2011).
"""

from __future__ import annotations

import functools
import math
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from rayps_client.errors import ConfigError

from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables.wire_format import Ids, Rows, mix

Floats = NDArray[np.float64]
_Bits = TypeVar("_Bits", np.uint16, np.uint32)

KINDS = ("normal", "uniform", "zeros", "constant")
_GOLDEN = 0x9E3779B97F4A7C15
_LEVELS = 1 << 16
_BLOCK = 4096  # rows made at a time: temporaries stay in the processor's cache


def check(table: SparseTable) -> None:
    """Check `table.init`. Raises ConfigError if its name or a number in it is not valid."""
    _read(table)


def _read(table: SparseTable) -> tuple[str, float]:
    given = dict(table.init)
    name = given.pop("name", None)
    knob = {"normal": "scale", "uniform": "scale", "constant": "value"}.get(str(name), "")
    value = given.pop(knob, 0.01 if knob == "scale" else 0.0) if knob else 0.0
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf")
    if name not in KINDS or given or not number or (knob == "scale" and value < 0):
        raise table.error(
            ConfigError,
            f'init is {table.init!r}: give {{"name": "normal" or "uniform", '
            '"scale": 0 or more}, {"name": "zeros"} or {"name": "constant", "value": a number}',
            field="init",
        )
    return str(name), float(value)


def draw_initial(table: SparseTable, ids: Ids) -> Rows:
    """Return the initial values of the rows of n ids, [n, dim] of the table's dtype.

    Under "normal" an element is one of 65,536 equally likely quantiles of the normal distribution with mean 0 and
    standard deviation `scale`. Under "uniform" it is one of 2^32 levels between -scale and scale. Under "constant" it
    is `value`.
    """
    name, value = _read(table)
    dtype, count = np.dtype(table.dtype), len(ids)
    if name in ("zeros", "constant"):
        return np.full((count, table.dim), value, dtype)
    found = np.empty((count, table.dim), dtype)
    for lo in range(0, count, _BLOCK):
        part = found[lo : lo + _BLOCK]
        if name == "normal":
            np.multiply(
                _normals(dtype.name).take(_draw_bits(table, ids[lo : lo + _BLOCK], np.uint16)),
                dtype.type(value),
                out=part,
            )
        else:
            spread = _draw_bits(table, ids[lo : lo + _BLOCK], np.uint32).astype(np.float64)
            np.multiply(spread + 0.5, 2.0**-31, out=spread)
            part[:] = (spread - 1.0) * value
    return found


def _draw_bits(table: SparseTable, ids: Ids, kind: type[_Bits]) -> NDArray[_Bits]:
    """Return pseudo-random whole numbers [n, dim] of the dtype `kind` (16 or 32 bits), computed from seed and ids."""
    words = -(-table.dim * np.dtype(kind).itemsize // 8)
    key = mix(ids ^ np.int64(key_of(table.seed)))
    steps = (np.arange(1, words + 1, dtype=np.uint64) * np.uint64(_GOLDEN))[None, :]
    return mix((key[:, None] + steps).view(np.int64)).view(kind)[:, : table.dim]


def key_of(seed: int) -> int:
    """Return a 63-bit hash of a seed."""
    return int(mix(np.array([seed % (1 << 63)], np.int64) ^ np.int64(0x5DEECE66D))[0]) >> 1


@functools.cache
def _normals(dtype: str) -> Rows:
    """Return the quantiles of the normal distribution at (i + 1/2) / 65536, scaled to a variance of 1."""
    half = quantile((np.arange(_LEVELS // 2) + 0.5) / _LEVELS)
    values = np.concatenate([half, -half[::-1]])
    return (values / math.sqrt(math.fsum(values * values) / _LEVELS)).astype(dtype)  # fsum: exact in any order


def quantile(p: Floats) -> Floats:
    """Return the quantiles of the normal distribution at probabilities 0 < p <= 1/2, float64, by its series.

    The distribution function at -x is 1/2 - x phi(x) (1 + x^2/3 + x^4/(3 5) + ...); Newton's method from a start below
    the root converges from one side. Abramowitz and Stegun, 26.2.11.
    """
    x = np.zeros_like(p)
    for _ in range(16):
        density = _exp(-0.5 * x * x) * 0.3989422804014327
        term = x.copy()
        total = x.copy()
        for k in range(1, 46):
            term = term * x * x / (2 * k + 1)
            total = total + term
        below = 0.5 - density * total
        x = x + (below - p) / density
    return -x


def _exp(x: Floats) -> Floats:
    """Return e^x for -16 <= x <= 0, computed by exactly rounded operations only."""
    small = x * 2.0**-8
    total = np.ones_like(x)
    for k in range(12, 0, -1):
        total = 1.0 + small * total / k
    for _ in range(8):
        total = total * total
    return total
