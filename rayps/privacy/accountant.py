"""Compute epsilon with the accountants of Google's library dp-accounting (the extra `privacy`).

    poisson   privacy loss distributions (Doroshenko et al., "Connect the dots", PoPETs 2022), add or remove one unit
    all       the same; if all releases have the same noise, the exact formula of one Gaussian with noise z / sqrt(k)
              (Balle and Wang, "Improving the Gaussian mechanism", ICML 2018)
    fixed     Renyi divergences of sampling without replacement (Wang, Balle, Kasiviswanathan, "Subsampled Renyi
              differential privacy", AISTATS 2019), replace one unit; such a sum has the sensitivity 2 * clip
    distributed
              Renyi divergences of sums of discrete Gaussians (`rayps.privacy.noise_shares`); one unit is replaced by
              one that adds zeros
    tree      Renyi divergences of tree aggregation (Kairouz et al. 2021); a unit takes part at most once in each tree

Each value is an upper bound. Losses are rounded upwards to a grid of about 1,500 points in the range of one release,
for which the value may be too large by about 0.1%. If the losses are so large (little noise) that a distribution would
need too much memory, Renyi divergences are used under poisson and all as well; their bound is looser.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import ModuleType
from typing import Protocol

import numpy as np
from rayps_client.errors import ConfigError

from rayps.privacy.mechanism import Mechanism, Spent
from rayps.privacy.noise import Floats
from rayps.privacy.noise_shares import NoiseShares
from rayps.privacy.options import ALL, DISTRIBUTED, FIXED, POISSON, TREE

NAMES = {
    POISSON: "privacy loss distributions",
    ALL: "privacy loss distributions",
    FIXED: "Renyi divergences",
    TREE: "Renyi divergences",
    DISTRIBUTED: "Renyi divergences of sums of discrete Gaussians",
}
_LARGEST_NOISE = 1e6
_POINTS = 1500  # points of the grid in the range of one release
_LARGEST_LOSS = 2000.0  # with larger losses, Renyi divergences are used
_ALWAYS_INFINITE = 1e6  # an epsilon above this is reported as infinite


class _Distribution(Protocol):
    """A privacy loss distribution of dp-accounting."""

    def self_compose(self, num_times: int) -> _Distribution:
        """Return the distribution of `num_times` releases."""

    def compose(self, privacy_loss_distribution: _Distribution) -> _Distribution:
        """Return the distribution of both releases."""

    def get_epsilon_for_delta(self, delta: float) -> float:
        """Return epsilon."""


def missing() -> str | None:
    """Return why epsilon cannot be computed here: the library is not installed. None: it is."""
    try:
        _library()
    except ConfigError as error:
        return error.message
    return None


def require() -> None:
    """Check that the library is installed. Raises ConfigError if it is not."""
    _library()


def epsilon(spent: Mapping[Mechanism, Spent], delta: float) -> float:
    """Return the epsilon of all these releases together, for `delta`; infinity if there is no finite bound.

    Raises:
        ConfigError: the library is not installed, or the releases have kinds whose neighbours differ.
    """
    made = {mechanism: each for mechanism, each in spent.items() if each.releases}
    if not made:
        return 0.0
    kinds = {POISSON if mechanism.kind in (ALL, DISTRIBUTED) else mechanism.kind for mechanism in made}
    if len(kinds) > 1:
        raise ConfigError(
            f"the ledger has releases of the kinds {' and '.join(sorted(kinds))}, whose claims cannot be added: their "
            "neighbouring data sets differ. Start a new job in a new folder",
            field="privacy",
        )
    by_distribution = (
        kinds == {POISSON}
        and not any(mechanism.kind == DISTRIBUTED for mechanism in made)
        and sum(_loss(each, made[each]) for each in made) < _LARGEST_LOSS
    )
    found = _of_distributions(made, delta) if by_distribution else _of_divergences(made, delta)
    return found if found < _ALWAYS_INFINITE else math.inf


def releases_within(
    mechanism: Mechanism,
    budget: float,
    delta: float,
    restart: int | None = None,
    spent: Mapping[Mechanism, Spent] | None = None,
    most: int = 10_000_000,
) -> int:
    """Return the largest number of releases, up to `most`, whose epsilon does not exceed `budget`.

    `spent` is what earlier releases have spent, whose epsilon is part of it.
    """
    before = dict(spent or {})

    def fits(releases: int) -> bool:
        own = before.get(mechanism, Spent()).plus(releases, restart)
        return epsilon({**before, mechanism: own}, delta) <= budget

    if most < 1_000_000 and fits(most):  # the usual case, of a budget that suffices
        return most
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def find_noise(
    mechanism: Callable[[float], Mechanism], budget: float, delta: float, releases: int, restart: int | None = None
) -> float:
    """Return the least noise multiplier, to 1e-3 of itself, with which `releases` releases stay within `budget`.

    `mechanism` returns the mechanism with a given noise multiplier.

    Raises:
        ConfigError: no noise suffices.
    """

    def fits(noise: float) -> bool:
        return epsilon({mechanism(noise): Spent().plus(releases, restart)}, delta) <= budget

    high = 1.0
    while not fits(high):
        high *= 2
        if high > _LARGEST_NOISE:
            raise ConfigError(
                f"no noise keeps {releases} rounds within epsilon={budget:g} at delta={delta:g}: give a larger epsilon "
                "or fewer rounds",
                field="privacy",
            )
    low = high / 2 if high > 1 else 0.0
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if middle > 0.05 and fits(middle) else (middle, high)
    return high


def _of_distributions(made: Mapping[Mechanism, Spent], delta: float) -> float:
    if len(made) == 1:
        ((mechanism, each),) = made.items()
        if mechanism.kind == ALL or mechanism.probability >= 1:
            noise = mechanism.noise_multiplier / math.sqrt(each.releases)
            return float(_library().get_epsilon_gaussian(noise, delta))
    whole: _Distribution | None = None
    interval = max(_interval(mechanism) for mechanism in made)
    for mechanism, each in made.items():
        part = _distribution(mechanism, interval).self_compose(each.releases)
        whole = part if whole is None else whole.compose(part)
    assert whole is not None, "there are releases"
    return float(whole.get_epsilon_for_delta(delta))


def _loss(mechanism: Mechanism, spent: Spent) -> float:
    """Return about how large the losses of these releases are."""
    inverse, q = mechanism.noise_multiplier**-2, mechanism.probability
    mean = inverse / 2 if inverse > 500 else min(inverse / 2, q**2 * math.expm1(inverse) / 2)
    return spent.releases * mean + 6 * math.sqrt(spent.releases * inverse)


def _interval(mechanism: Mechanism) -> float:
    """Return the interval of the grid of losses."""
    noise, q = mechanism.noise_multiplier, mechanism.probability
    whole = 6 / noise + 0.5 / noise**2  # about the largest loss without sampling
    largest = whole if whole > 500 else math.log1p(q * math.expm1(whole))
    return max(1e-6, largest / _POINTS)


@lru_cache(maxsize=16)
def _distribution(mechanism: Mechanism, interval: float) -> _Distribution:
    _library()
    from dp_accounting.pld import privacy_loss_distribution

    found: _Distribution = privacy_loss_distribution.from_gaussian_mechanism(
        mechanism.noise_multiplier, sampling_prob=mechanism.probability, value_discretization_interval=interval
    )
    return found


def _of_divergences(made: Mapping[Mechanism, Spent], delta: float) -> float:
    from dp_accounting import rdp

    orders, total = None, None
    for mechanism, each in made.items():
        for steps, times in _steps(mechanism, each):
            orders, one = _divergences(mechanism, steps)
            total = one * times if total is None else total + one * times
    return float(rdp.compute_epsilon(orders, total, delta)[0])


def _steps(mechanism: Mechanism, spent: Spent) -> list[tuple[int, int]]:
    """Return (releases of one tree, number of such trees), or (1, number of releases) without tree noise."""
    return sorted(Counter(spent.trees).items()) if mechanism.kind == TREE else [(1, spent.releases)]


@lru_cache(maxsize=256)
def _divergences(mechanism: Mechanism, steps: int) -> tuple[Floats, Floats]:
    """Return orders, and the Renyi divergences of these orders, of one release, or of a tree with `steps` releases."""
    library = _library()
    from dp_accounting import rdp

    if mechanism.shares is not None:
        return _divergences_of_shares(mechanism.shares)
    relations = library.NeighboringRelation
    if mechanism.kind == TREE:
        relation = relations.REPLACE_SPECIAL
        event = library.SingleEpochTreeAggregationDpEvent(
            noise_multiplier=mechanism.noise_multiplier, step_counts=steps
        )
    elif mechanism.kind in (POISSON, ALL):
        relation = relations.ADD_OR_REMOVE_ONE
        event = library.PoissonSampledDpEvent(
            mechanism.probability, library.GaussianDpEvent(mechanism.noise_multiplier)
        )
    else:  # the library's noise multiplier is relative to the sensitivity, which is 2 * clip
        relation = relations.REPLACE_ONE
        event = library.SampledWithoutReplacementDpEvent(
            mechanism.units, mechanism.drawn, library.GaussianDpEvent(mechanism.noise_multiplier / 2)
        )
    found = rdp.RdpAccountant(neighboring_relation=relation)
    found.compose(event)
    return found.orders, found.rdp


def _divergences_of_shares(shares: NoiseShares) -> tuple[Floats, Floats]:
    """Return orders, and the least of the bounds of the Renyi divergence of each order, of one release."""
    library = _library()
    from dp_accounting import rdp

    least: Floats | None = None
    for rho, xi in shares.bounds():
        found = rdp.RdpAccountant(neighboring_relation=library.NeighboringRelation.REPLACE_SPECIAL)
        found.compose(library.ZCDpEvent(rho, xi))
        least = found.rdp if least is None else np.minimum(least, found.rdp)
    assert least is not None, "there are three bounds"
    return found.orders, least


def _library() -> ModuleType:
    try:
        import dp_accounting
    except ImportError as error:
        raise ConfigError(
            "privacy needs the package dp-accounting, which computes epsilon: pip install 'rayps[privacy]'",
            field="privacy",
        ) from error
    found: ModuleType = dp_accounting
    return found
