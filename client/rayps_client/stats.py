"""The queries of a federated statistic: mean, histogram, quantile. In a user's file this module is `rayps.stats`. Pure.

Numpy computes the vectors with rayps and without, so that all clients send the same bits.

A query turns each row into a vector of norm at most 1 (`encode`), and the mean of such vectors over rows or clients
back into the answer (`decode`). So one client changes the sum of its clients' vectors by at most 1, whatever its rows
are: values below `low` and above `high` are moved to that bound first.

    mean        (x - m) / h, with the middle m and the half width h of [low, high]
    histogram   a one in the place of the row's bin, zeros elsewhere
    quantile    the same for each level of a binary tree over a grid of `bins` cells, divided by sqrt(levels). The
                cells' fractions are fitted to the noised nodes by least squares (Hay, Rastogi, Miklau, Suciu, "Boosting
                the accuracy of differentially private histograms through consistency", VLDB 2010), so that the noise of
                a cumulative fraction grows with log(bins), and not with sqrt(bins). The answer minimizes the check loss
                (Koenker and Bassett 1978) under these fractions, uniform inside a cell.

A mean r = S / N of noised sums has the noise e_S / N - r e_0 / N to first order, where e_S and e_0 are the noise of S
and of the count N. `decode` takes the standard deviation tau of e_S / N and of e_0 / N, and returns that of the answer.

Example:
    rayps.stats.mean(low=0, high=110)
    rayps.stats.histogram(edges=(0, 18.5, 25, 30, 60), column="bmi")
    rayps.stats.quantile((0.25, 0.5, 0.75), low=0, high=10, bins=64)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rayps_client.errors import ConfigError
from rayps_client.values import is_number

__all__ = [
    "Floats",
    "HistogramQuery",
    "MeanQuery",
    "QuantileQuery",
    "Query",
    "QueryAnswer",
    "histogram",
    "mean",
    "quantile",
]

Floats = NDArray[np.float64]
_MOST_BINS = 512  # of a quantile's grid; the fit takes bins^3 operations


@dataclass(frozen=True, slots=True)
class QueryAnswer:
    """The answer of a query.

    `labels` has a text for each number ("" if there is one number), `values` the numbers, and `errors` the standard
    deviations of their noise, 0 without noise. The noise of a quantile is not normal: its error is half the distance
    between the quantiles at q - e and q + e, where e is the standard deviation of the cumulative fraction.
    """

    labels: tuple[str, ...]
    values: Floats
    errors: Floats


@runtime_checkable
class Query(Protocol):
    """A query of one column."""

    @property
    def column(self) -> str | None:
        """The column; None: the column that has the name of the query."""

    @property
    def size(self) -> int:
        """The length of a row's vector."""

    @property
    def text(self) -> str:
        """The query as text. Two queries with the same text compute the same."""

    def encode(self, values: Floats) -> Floats:
        """Return the vectors [n, size], float64, of the values [n], float64. Each has a norm of at most 1."""

    def decode(self, mean: Floats, tau: float) -> QueryAnswer:
        """Return the answer from the mean [size] of such vectors, whose noise has the standard deviation `tau`."""


@dataclass(frozen=True)
class MeanQuery:
    """The mean of values that are clipped to [low, high]."""

    low: float
    high: float
    column: str | None = None

    def __post_init__(self) -> None:
        _check_bounds("mean", self.low, self.high)

    @property
    def size(self) -> int:
        """One number."""
        return 1

    @property
    def text(self) -> str:
        """The query as text."""
        return _written("mean", self.column, low=self.low, high=self.high)

    def encode(self, values: Floats) -> Floats:
        """Return (x - m) / h as [n, 1]."""
        middle, half = (self.low + self.high) / 2, (self.high - self.low) / 2
        found: Floats = ((np.clip(values, self.low, self.high) - middle) / half)[:, None]
        return found

    def decode(self, mean: Floats, tau: float) -> QueryAnswer:
        """Return m + h r."""
        middle, half = (self.low + self.high) / 2, (self.high - self.low) / 2
        return QueryAnswer(("",), middle + half * mean, half * tau * np.sqrt(1 + mean**2))


@dataclass(frozen=True)
class HistogramQuery:
    """The fractions of values in the bins [edges[i], edges[i + 1]); the last bin contains its upper edge."""

    edges: tuple[float, ...]
    column: str | None = None

    def __post_init__(self) -> None:
        known = len(self.edges) > 1 and all(is_number(edge) for edge in self.edges)
        if not known or any(high <= low for low, high in zip(self.edges, self.edges[1:], strict=False)):
            raise ConfigError(
                f"histogram has edges={self.edges!r}: give at least two numbers that increase, such as (0, 18.5, 25)",
                field="edges",
            )

    @property
    def size(self) -> int:
        """The number of bins."""
        return len(self.edges) - 1

    @property
    def text(self) -> str:
        """The query as text."""
        return _written("histogram", self.column, edges=self.edges)

    def encode(self, values: Floats) -> Floats:
        """Return a one in each row's bin."""
        return _one_hot(np.searchsorted(np.asarray(self.edges[1:-1], np.float64), values, side="right"), self.size)

    def decode(self, mean: Floats, tau: float) -> QueryAnswer:
        """Return the fractions."""
        labels = tuple(f"{low:g}..{high:g}" for low, high in zip(self.edges, self.edges[1:], strict=False))
        return QueryAnswer(labels, mean.copy(), tau * np.sqrt(1 + mean**2))


@dataclass(frozen=True)
class QuantileQuery:
    """The quantiles `q` of values that are clipped to [low, high], from the fractions of a grid of `bins` cells."""

    q: tuple[float, ...]
    low: float
    high: float
    bins: int = 64
    column: str | None = None

    def __post_init__(self) -> None:
        _check_bounds("quantile", self.low, self.high)
        if not self.q or not all(is_number(q) and 0 < q < 1 for q in self.q):
            raise ConfigError(f"quantile has q={self.q!r}: give numbers above 0 and below 1", field="q")
        whole = isinstance(self.bins, int) and not isinstance(self.bins, bool)
        if not whole or not 2 <= self.bins <= _MOST_BINS or self.bins & (self.bins - 1):
            raise ConfigError(
                f"quantile has bins={self.bins!r}: give a power of 2 from 2 to {_MOST_BINS}", field="bins"
            )

    @property
    def size(self) -> int:
        """The number of nodes below the root of a binary tree with `bins` leaves."""
        return 2 * self.bins - 2

    @property
    def text(self) -> str:
        """The query as text. The quantiles are not part of it, because the clients' vectors do not depend on them."""
        return _written("quantile", self.column, low=self.low, high=self.high, bins=self.bins)

    def encode(self, values: Floats) -> Floats:
        """Return, for each level of the tree, a one in the place of each row's node, divided by sqrt(levels)."""
        levels = self.bins.bit_length() - 1
        place = (np.clip(values, self.low, self.high) - self.low) / (self.high - self.low) * self.bins
        leaf = np.minimum(np.floor(place), self.bins - 1).astype(np.int64)
        parts = [_one_hot(leaf >> (levels - level), 1 << level) for level in range(1, levels + 1)]
        found: Floats = np.concatenate(parts, axis=1) / math.sqrt(levels)
        return found

    def decode(self, mean: Floats, tau: float) -> QueryAnswer:
        """Return the quantiles of the fitted fractions."""
        below = cumulative_fit(self.bins)
        cumulative = below @ mean
        noise = tau * np.sqrt((below**2).sum(axis=1) + cumulative**2)
        width = (self.high - self.low) / self.bins
        heights = np.concatenate([[0.0], cumulative])
        found, errors = [], []
        for q in self.q:
            at = crossing(heights, q)
            error = float(noise[min(self.bins - 1, int(at))])
            low, high = crossing(heights, q - error), crossing(heights, q + error)
            found.append(self.low + width * at)
            errors.append(width * (high - low) / 2 if error else 0.0)
        labels = ("",) if len(self.q) == 1 else tuple(f"{q:g}" for q in self.q)
        return QueryAnswer(labels, np.array(found), np.array(errors))


def mean(low: float, high: float, *, column: str | None = None) -> MeanQuery:
    """Return a query for the mean of a column, whose values are clipped to [low, high]."""
    return MeanQuery(low, high, column)


def histogram(edges: Sequence[float], *, column: str | None = None) -> HistogramQuery:
    """Return a query for the fractions of values between these edges. Values outside count in the first or last bin.

    Under noise the fractions are not normalised: one may be negative, and they need not add up to 1. Each is unbiased
    to first order; clip them and divide by their sum where a distribution is needed, which discloses nothing more.
    """
    return HistogramQuery(tuple(edges), column)


def quantile(
    q: float | Sequence[float], low: float, high: float, *, bins: int = 64, column: str | None = None
) -> QuantileQuery:
    """Return a query for one or several quantiles of a column, whose values are clipped to [low, high].

    The answer is exact up to a cell's width, (high - low) / bins, where bins is a power of 2.
    """
    return QuantileQuery((q,) if isinstance(q, (int, float)) else tuple(q), low, high, bins, column)


@lru_cache(maxsize=8)
def cumulative_fit(bins: int) -> Floats:
    """Return the matrix [bins, 2 bins - 2] from noised nodes to the cumulative fractions of the fitted cells.

    The nodes are those of `QuantileQuery.encode`: level by level, divided by sqrt(levels).
    """
    levels = bins.bit_length() - 1
    nodes = [np.repeat(np.eye(1 << level), bins >> level, axis=1) for level in range(1, levels + 1)]
    a = np.concatenate(nodes) / math.sqrt(levels)
    fit = np.linalg.solve(a.T @ a, a.T)
    found: Floats = np.cumsum(fit, axis=0)
    found.setflags(write=False)
    return found


def crossing(heights: Floats, q: float) -> float:
    """Return the t in [0, cells] that minimizes the integral from 0 to t of (F - q), the smallest if there are several.

    F is the piecewise linear function with the values `heights` [cells + 1] at 0, 1, ..., cells; it need not increase.
    This t minimizes the check loss of the quantile q under F. If F increases, F(t) = q.
    """
    gap = heights - q
    best, least, total = 0.0, 0.0, 0.0
    for cell, (left, right) in enumerate(zip(gap[:-1].tolist(), gap[1:].tolist(), strict=True)):
        if left < 0 <= right:  # the integral has a minimum inside the cell
            part = left / (left - right)
            inside = total + left * part / 2
            if inside < least:
                best, least = cell + part, inside
        total += (left + right) / 2
        if right < 0 and total < least:
            best, least = cell + 1.0, total
    return best


def _one_hot(index: NDArray[np.int64], size: int) -> Floats:
    found = np.zeros((len(index), size))
    found[np.arange(len(index)), index] = 1.0
    return found


def _check_bounds(name: str, low: float, high: float) -> None:
    if not (is_number(low) and is_number(high)) or not low < high:
        raise ConfigError(
            f"{name} has low={low!r} and high={high!r}: give two numbers, low below high. They are public, and must "
            "not be taken from the data",
            field=name,
        )


def _written(name: str, column: str | None, **options: float | tuple[float, ...]) -> str:
    parts = [] if column is None else [f"column={column}"]
    for key, value in options.items():
        text = ";".join(f"{each:g}" for each in value) if isinstance(value, tuple) else f"{value:g}"
        parts.append(f"{key}={text}")
    return f"{name}({','.join(parts)})"
