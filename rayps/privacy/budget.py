"""Refuse a run whose budget allows not even one release."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from rayps_client.errors import ConfigError

from rayps.privacy import accountant
from rayps.privacy.mechanism import Mechanism, Spent
from rayps.privacy.options import DISTRIBUTED, PrivacySpec

_UP = 1.001  # a budget or a noise that is named is rounded up by this factor, so that it suffices


def must_allow_one(
    spec: PrivacySpec, mechanism: Mechanism, *, tree: bool = False, spent: Mapping[Mechanism, Spent] | None = None
) -> None:
    """Check that the budget allows one release of `mechanism` beside what is `spent`.

    `tree`: whether the release begins a tree.

    Raises:
        ConfigError: the budget allows none. The text says what is left of it, and what would suffice.
    """
    budget, before = spec.epsilon, dict(spent or {})
    if budget is None:
        return
    own = before.get(mechanism, Spent())
    after = dataclasses.replace(own, releases=own.releases + 1, trees=(*own.trees, 1) if tree else own.trees)
    cost = accountant.epsilon({**before, mechanism: after}, spec.delta)
    if cost <= budget * (1 + 1e-9):
        return
    enough = f"epsilon={_rounded_up(cost)}" if math.isfinite(cost) else "a larger epsilon"
    releases = sum(each.releases for each in before.values())
    if releases:
        costs = accountant.epsilon(before, spec.delta)
        raise ConfigError(
            f"the privacy budget epsilon={budget:g} is spent: the {releases} release{'s' * (releases > 1)} in the "
            f"ledger cost {costs:.4g} at delta {spec.delta:g}, so {max(0.0, budget - costs):.4g} is left, and one more "
            f"with noise_multiplier={mechanism.noise_multiplier:.4g} would make it {cost:.4g}: give {enough}, or more "
            "noise",
            field="privacy",
        )
    raise ConfigError(
        f"the privacy budget epsilon={budget:g} allows no release: one with noise_multiplier="
        f"{mechanism.noise_multiplier:.4g} costs {cost:.4g} at delta {spec.delta:g}. Give {enough}, or "
        f"{_noise_for(spec, mechanism, tree=tree)}",
        field="privacy",
    )


def _noise_for(spec: PrivacySpec, mechanism: Mechanism, *, tree: bool) -> str:
    """Return the least noise with which the budget allows one release, as text."""
    if mechanism.kind == DISTRIBUTED or spec.epsilon is None:
        return "more noise"
    try:
        found = accountant.find_noise(
            lambda noise: dataclasses.replace(mechanism, noise_multiplier=noise),
            spec.epsilon,
            spec.delta,
            1,
            1 if tree else None,
        )
    except ConfigError:
        return "more noise"
    return f"noise_multiplier={_rounded_up(found)}"


def _rounded_up(value: float) -> str:
    return f"{value * _UP:.4g}"
