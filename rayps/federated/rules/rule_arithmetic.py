"""The arithmetic of the aggregation rules: pure functions of a matrix of updates with one row for each reply.

    krum, multi_krum    Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine learning with adversaries: Byzantine
                        tolerant gradient descent", NeurIPS 2017
    trimmed_mean, median  Yin, Chen, Ramchandran and Bartlett, "Byzantine-robust distributed learning: towards optimal
                        statistical rates", ICML 2018, definitions 1 and 2
    geometric_median    Pillutla, Kakade and Harchaoui, "Robust aggregation for federated learning", IEEE Transactions
                        on Signal Processing 70, 2022; the iteration is Weiszfeld's with the rule for an iterate at a
                        row of Vardi and Zhang, "The multivariate L1-median and associated data depth", PNAS 97(4), 2000
    bulyan              El Mhamdi, Guerraoui and Rouault, "The hidden vulnerability of distributed learning in
                        Byzantium", ICML 2018
    centered_clipping   Karimireddy, He and Jaggi, "Learning from history for Byzantine robust optimization", ICML 2021,
                        algorithm 2. The paper clips the clients' momenta; here the clients' updates are clipped, which
                        have no momentum of earlier rounds

The classes of the rules in `rayps.federated.rules.robust_rules` call these functions. Add a new rule there.

The matrix x [n, P] of n replies with P elements is float32 or float64, and must be finite: the caller drops other rows
first. f is the number of replies that may come from attackers. Distances are computed in float64 as sums of squares of
differences, never as |a|^2 + |b|^2 - 2ab, which loses all digits if updates are large and similar. Rows are in cohort
order, and of equal rows the first is chosen. All functions use numpy on one thread, so that the bits do not depend on
the number of threads or workers. Each row counts once, whatever its number of samples.

Clients also send vectors other than their updates (buffers, SCAFFOLD's c). `aggregate_others` combines these vectors,
each as a separate matrix. Krum, multi-Krum and Bulyan choose clients by their updates alone (`picks`), and use the
vectors of the chosen clients only. Krum uses the vectors of its one client. Multi-Krum uses the mean of each column
without its f largest and f smallest values, because a client that was chosen for its update may send a false vector
here. Bulyan applies its second step. The other rules treat these vectors like updates.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from rayps_client.errors import ConfigError

from rayps.federated.rules.robust_rules import AggregationRule

Matrix = NDArray[np.float64] | NDArray[np.float32]
Vector = NDArray[np.float64]
Picks = NDArray[np.int64]
_BLOCK = 1 << 16  # elements of a block of columns
_NEAR = 1e-9  # Weiszfeld's iteration ends when the point moves less than this, relative to the median distance
_AT = 1e-12  # a row nearer to the point than this, relative to the median distance, counts as equal to it


def aggregate(
    rule: AggregationRule, x: Matrix, before: Vector | None = None, seed: int = 0, *, chosen: Picks | None = None
) -> Vector:
    """Return the result of a rule for the updates x: a vector [P] in float64.

    `before` is the last round's result, for a rule that `remembers` it; None means zeros. `seed` determines the
    buckets: give another seed in each round. `chosen` is the result of `picks` for x, if the caller has that result.

    Raises:
        ConfigError: x has fewer rows than the rule needs.
    """
    lacking = rule.lacking(len(x))
    if lacking is not None:
        raise ConfigError(lacking, field="rule")
    if rule.selects and chosen is None:
        chosen = picks(rule, x, seed)
    x = buckets(x, rule.bucket, seed)
    return rule.combine(x if chosen is None else x[chosen], before)


def aggregate_others(
    rule: AggregationRule, x: Matrix, before: Vector | None = None, seed: int = 0, *, chosen: Picks | None = None
) -> Vector:
    """Return the result of a rule for the vectors x that clients sent in addition to their updates.

    `chosen` is the result of `picks` for the updates, if the rule chooses clients. The other arguments are those of
    `aggregate`.
    """
    if chosen is None:
        return aggregate(rule, x, before, seed)
    return rule.combine_others(buckets(x, rule.bucket, seed)[chosen], before)


def picks(rule: AggregationRule, x: Matrix, seed: int = 0) -> Picks:
    """Return the ascending indices of the buckets of x that the rule chooses. Only for a rule that `selects`."""
    return rule.picks(buckets(x, rule.bucket, seed))


def members(rule: AggregationRule, n: int, chosen: Picks, seed: int = 0) -> list[int]:
    """Return the ascending indices of the rows, of n rows, that are in the chosen buckets."""
    rows = _rows_of_buckets(n, rule.bucket, seed)
    return sorted(int(row) for bucket in chosen for row in rows[int(bucket)])


def mean(x: Matrix) -> Vector:
    """Return the mean of the rows."""
    return np.asarray(np.add.reduce(x, axis=0, dtype=np.float64) / len(x))


def trimmed_mean(x: Matrix, f: int) -> Vector:
    """Return for each column the mean of its values without the f largest and f smallest."""
    out = np.empty(x.shape[1])
    for part in _blocks(x):
        out[part] = np.sort(x[:, part], axis=0)[f : len(x) - f].mean(axis=0, dtype=np.float64)
    return out


def median(x: Matrix) -> Vector:
    """Return for each column the median: the middle value, or the mean of the two middle values."""
    return trimmed_mean(x, (len(x) - 1) // 2)


def geometric_median(x: Matrix, iterations: int = 100) -> Vector:
    """Return argmin_z sum_i |x_i - z|, by Weiszfeld's iteration, which starts at the coordinate-wise median.

    A step is z <- z + max(0, 1 - eta / r) (T - z) (Vardi and Zhang 2000), where eta is the number of rows equal to z,
    and, with sums over the other rows, T = (sum_i x_i / |x_i - z|) / (sum_i 1 / |x_i - z|) and r = |sum_i (x_i - z) /
    |x_i - z||. A row is the minimum if and only if r <= eta at that row. Near a row the iteration is slow. Therefore
    each row that is the nearest row to z is tested once. If the row's sum of distances is smaller than that of z, the
    iteration continues from the row. The iteration ends when z moves by less than 1e-9 of the median distance.
    """
    z, tested = median(x), set[int]()
    for _ in range(iterations):
        apart = np.sqrt(_squares(x, z))
        nearest = int(np.argmin(apart))
        if nearest not in tested:
            tested.add(nearest)
            row = np.asarray(x[nearest], dtype=np.float64)
            to_row = np.sqrt(_squares(x, row))
            _, share = _weiszfeld(x, row, to_row)
            if share == 0:
                return row
            if to_row.sum() < apart.sum():
                z, apart = row, to_row
        target, share = _weiszfeld(x, z, apart)
        if share == 0:
            break
        step = share * (target - z)
        z = z + step
        if np.sqrt(float(np.square(step).sum())) <= _NEAR * float(np.median(apart)):
            break
    return z


def _weiszfeld(x: Matrix, z: Vector, apart: Vector) -> tuple[Vector, float]:
    """Return T, and the factor max(0, 1 - eta / r) of the step from z to T, which is 0 if z is the minimum.

    `apart` are the rows' distances to z. `geometric_median` defines T, eta and r.
    """
    away = apart > _AT * np.median(apart)
    at = len(x) - int(away.sum())
    if at == len(x):
        return z, 0.0
    weights = np.zeros(len(x))
    weights[away] = 1 / apart[away]
    target = _weighted(x, weights / weights.sum())
    pull = float(weights.sum()) * np.sqrt(float(np.square(target - z).sum()))
    return target, max(0.0, 1.0 - at / pull) if pull else 0.0


def krum_picks(x: Matrix, f: int, count: int) -> Picks:
    """Return the ascending indices of the `count` rows, of n rows, that are nearest to their neighbours.

    The measure is the sum of a row's squared distances to its n - f - 2 nearest other rows.
    """
    return np.sort(np.argsort(scores(distances(x), f), kind="stable")[:count])


def bulyan_picks(x: Matrix, f: int) -> Picks:
    """Return the ascending indices of the n - 2f rows, of n rows, that Krum chooses one after another."""
    n, d = len(x), distances(x)
    left, chosen = list(range(n)), list[int]()
    while len(chosen) < n - 2 * f:
        best = left[int(np.argmin(scores(d[np.ix_(left, left)], f)))]
        chosen.append(best)
        left.remove(best)
    return np.sort(np.asarray(chosen, dtype=np.int64))


def near_the_median(picked: Matrix, keep: int) -> Vector:
    """Return for each column the mean of the `keep` values that are nearest to the column's median."""
    out = np.empty(picked.shape[1])
    for part in _blocks(picked):
        column = np.sort(picked[:, part], axis=0).astype(np.float64)
        middle = (column[(len(column) - 1) // 2] + column[len(column) // 2]) / 2
        nearest = np.argsort(np.abs(column - middle), axis=0, kind="stable")[:keep]
        out[part] = np.take_along_axis(column, np.sort(nearest, axis=0), axis=0).mean(axis=0)
    return out


def centered_clipping(x: Matrix, tau: float, iterations: int = 1, before: Vector | None = None) -> Vector:
    """Return v after `iterations` iterations of v <- v + mean_i (x_i - v) min(1, tau / |x_i - v|).

    v starts at `before`, the last round's result, or at 0 if `before` is None.
    """
    v = np.zeros(x.shape[1]) if before is None else before.astype(np.float64)
    for _ in range(iterations):
        apart = np.sqrt(_squares(x, v))
        share = tau / np.maximum(apart, tau) / len(x)
        v = v * (1 - share.sum()) + _weighted(x, share)
    return v


def clip_factor(norm: float, largest: float | None) -> float:
    """Return the factor that scales an update of norm `norm` to at most the norm `largest`. None means no limit."""
    return 1.0 if largest is None or norm <= largest else largest / norm


def distances(x: Matrix) -> NDArray[np.float64]:
    """Return the squared distances between all pairs of rows, [n, n]."""
    found = np.zeros((len(x), len(x)))
    for part in _blocks(x):
        block = np.ascontiguousarray(x[:, part], dtype=np.float64)
        for i in range(len(x) - 1):
            apart = block[i + 1 :] - block[i]
            found[i, i + 1 :] += np.einsum("ij,ij->i", apart, apart)
    return found + found.T


def scores(d: NDArray[np.float64], f: int) -> Vector:
    """Return for each of n rows the sum of its n - f - 2 (at least one) smallest distances to other rows.

    `d` [n, n] has the squared distances between rows.
    """
    n = len(d)
    others = np.sort(d + np.diag(np.full(n, np.inf)), axis=1)
    sums: Vector = others[:, : max(1, n - f - 2)].sum(axis=1)
    return sums if n > 1 else np.zeros(1)


def buckets(x: Matrix, size: int, seed: int) -> Matrix:
    """Return the mean of each bucket of `size` rows. The seed determines the buckets; the last may be smaller."""
    if size == 1:
        return x
    return np.stack([mean(x[rows]) for rows in _rows_of_buckets(len(x), size, seed)])


def _rows_of_buckets(n: int, size: int, seed: int) -> list[Picks]:
    """Return the row numbers of each bucket of `size` rows, drawn by the seed. With size 1, keep the order of rows."""
    order = np.arange(n) if size == 1 else np.random.default_rng(seed).permutation(n)
    return [np.sort(order[at : at + size]) for at in range(0, n, size)]


def _blocks(x: Matrix) -> Iterator[slice]:
    width = max(1, _BLOCK // max(1, len(x)))
    return (slice(at, at + width) for at in range(0, x.shape[1], width))


def _squares(x: Matrix, z: Vector) -> Vector:
    """Return for each row of x the squared distance to z."""
    found = np.zeros(len(x))
    for part in _blocks(x):
        apart = x[:, part] - z[part]
        found += np.einsum("ij,ij->i", apart, apart)
    return found


def _weighted(x: Matrix, weights: Vector) -> Vector:
    """Return sum_i weights_i x_i, added in the order of rows."""
    out = np.zeros(x.shape[1])
    for part in _blocks(x):
        for row, weight in zip(x, weights, strict=True):
            out[part] += weight * row[part].astype(np.float64)
    return out
