"""The vectors that simulated attackers send, to test a rule. `AttackSpec` says which clients attack, and how.

    sign_flip, gaussian   Blanchard et al., NeurIPS 2017
    alie                  Baruch, Baruch and Goldberg, "A little is enough: circumventing defenses for distributed
                          learning", NeurIPS 2019: mean - z sd, within the spread of the honest
    inner_product         Xie, Koyejo and Gupta, "Fall of empires: breaking Byzantine-tolerant SGD by inner product
                          manipulation", UAI 2019: -eps times the mean
Label flipping (`AttackSpec.labels`), inflated counts (`counted`), false buffers (`false_buffers`) and a false c
(`false_sums`) leave updates as trained. The omniscient attacks, alie and inner_product, use all honest updates of the
round, and all their attackers send one vector.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from rayps.federated.population.attack_spec import AttackSpec
from rayps.federated.rule_arithmetic import Matrix, Vector

OWN = ("sign_flip", "gaussian", "nan")  # attacks that need nothing but the attacker's own update


def spoilt(attack: AttackSpec, update: Tensor, *seed: int) -> Tensor:
    """Return what an attacker sends in place of its update [P]; `seed` (of the run, round, client) draws the noise."""
    if attack.name == "sign_flip":
        return update * -attack.scale
    if attack.name == "gaussian":
        noise = np.random.default_rng(seed).normal(0.0, attack.sd, update.numel())
        return torch.from_numpy(noise).to(update.dtype)
    if attack.name == "nan":
        return torch.full_like(update, torch.nan)
    return update


def counted(attack: AttackSpec, weight: float) -> float:
    """Return the number of samples that an attacker of this kind reports; `weight` is its true number."""
    return weight * attack.factor if attack.name == "inflated_counts" else weight


def false_buffers(attack: AttackSpec, buffers: Tensor) -> Tensor:
    """Return the buffers [B] that an attacker sends: scaled up, so valid for a model (variances are not negative)."""
    return buffers * attack.scale if attack.name == "false_buffers" else buffers


def false_sums(attack: AttackSpec, sent: Tensor) -> Tensor:
    """Return the vector that an attacker sends in place of `sent`, one of its reply's `sums`."""
    return sent * -attack.scale if attack.name == "false_c" else sent


def agreed(attack: AttackSpec, honest: Matrix, attackers: int) -> Vector:
    """Return the vector that all omniscient attackers send, given the honest updates [h, P] of the round."""
    center = np.asarray(honest.mean(axis=0, dtype=np.float64))
    if attack.name == "inner_product":
        return -attack.eps * center
    z = usual_z(len(honest) + attackers, attackers) if attack.z is None else attack.z
    return center - z * np.asarray(honest.std(axis=0, dtype=np.float64))


def usual_z(n: int, attackers: int) -> float:
    """Return the paper's z (its algorithm 3).

    With s = floor(n/2 + 1) - m honest replies farther out, a majority is closer.
    """
    supporters = n // 2 + 1 - attackers
    share = (n - attackers - supporters) / max(1, n - attackers)
    return NormalDist().inv_cdf(min(max(share, 1e-6), 1 - 1e-6))
