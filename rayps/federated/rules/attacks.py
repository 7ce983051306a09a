"""The vectors that simulated attackers send, to test a rule. `AttackSpec` has the number of attackers and the attack.

    sign_flip, gaussian   Blanchard et al., NeurIPS 2017
    alie                  Baruch, Baruch and Goldberg, "A little is enough: circumventing defenses for distributed
                          learning", NeurIPS 2019: mean - z sd of the honest updates, which looks like one of them
    inner_product         Xie, Koyejo and Gupta, "Fall of empires: breaking Byzantine-tolerant SGD by inner product
                          manipulation", UAI 2019: -eps times the mean
Other attacks send the update as trained. Label flipping trains on wrong labels (`AttackSpec.labels`), inflated counts
report a false number of samples (`false_count`), others send false buffers (`false_buffers`) or a false c
(`false_sums`). The omniscient attacks, alie and inner_product, compute one vector from all honest updates of the round,
and all attackers send that vector.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from rayps.federated.population.attack_spec import AttackSpec
from rayps.federated.rules.rule_arithmetic import Matrix, Vector

OWN = ("sign_flip", "gaussian", "nan")  # attacks that are computed from the attacker's own update alone


def false_update(attack: AttackSpec, update: Tensor, *seed: int) -> Tensor:
    """Return what an attacker sends instead of its update [P].

    `seed` (run's seed, round, client) determines the noise.
    """
    if attack.name == "sign_flip":
        return update * -attack.scale
    if attack.name == "gaussian":
        noise = np.random.default_rng(seed).normal(0.0, attack.sd, update.numel())
        return torch.from_numpy(noise).to(update.dtype)
    if attack.name == "nan":
        return torch.full_like(update, torch.nan)
    return update


def false_count(attack: AttackSpec, weight: float) -> float:
    """Return the number of samples that an attacker reports; `weight` is the true number."""
    return weight * attack.factor if attack.name == "inflated_counts" else weight


def false_buffers(attack: AttackSpec, buffers: Tensor) -> Tensor:
    """Return the buffers [B] that an attacker sends: scaled up, but still possible (no variance is negative)."""
    return buffers * attack.scale if attack.name == "false_buffers" else buffers


def false_sums(attack: AttackSpec, sent: Tensor) -> Tensor:
    """Return the vector that an attacker sends instead of `sent`, one of the vectors in its reply's `sums`."""
    return sent * -attack.scale if attack.name == "false_c" else sent


def omniscient_update(attack: AttackSpec, honest: Matrix, attackers: int) -> Vector:
    """Return the vector that all attackers of an omniscient attack send, from the round's honest updates [h, P]."""
    center = np.asarray(honest.mean(axis=0, dtype=np.float64))
    if attack.name == "inner_product":
        return -attack.eps * center
    z = usual_z(len(honest) + attackers, attackers) if attack.z is None else attack.z
    return center - z * np.asarray(honest.std(axis=0, dtype=np.float64))


def usual_z(n: int, attackers: int) -> float:
    """Return the z of the paper on alie (its algorithm 3), for n replies, `attackers` of which come from attackers.

    The result is the largest z for which a majority is expected of two kinds of replies together: the attackers'
    replies, and the honest replies that are farther from the mean than the attackers' replies.
    """
    supporters = n // 2 + 1 - attackers
    share = (n - attackers - supporters) / max(1, n - attackers)
    return NormalDist().inv_cdf(min(max(share, 1e-6), 1 - 1e-6))
