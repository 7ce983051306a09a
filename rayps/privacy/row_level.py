"""Differential privacy of single rows: DP-SGD.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang, "Deep Learning with Differential Privacy", CCS 2016, algorithm
1. Of N rows, each is drawn with the probability q = L / N in each step, independently. L is the logical batch: the
batch of the data times the number of workers. With g_i, the gradient of the loss of row i alone:

    g~ = (sum_{i drawn} g_i min(1, C / |g_i|) + N(0, (z C)^2)) / L
    w <- w - step(g~)

A step may draw no row: only noise is then released. The divisor is L, never the number of rows that were drawn, which
is secret. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayps.core.refusals.table import refuse
from rayps.privacy.mechanism import Mechanism
from rayps.privacy.options import PrivacySpec, features_of_privacy


@dataclass(frozen=True, slots=True)
class RowPrivacy:
    """What the workers of one generation need to know of row-level privacy.

    `releases` is the number of releases in the ledger when the generation began. `end` is the round after which the
    budget ends the phase, because of `reason`; None if there is no budget.
    """

    spec: PrivacySpec
    mechanism: Mechanism
    rows: int  # N
    batch: int  # L
    releases: int = 0
    end: int | None = None
    reason: str = ""

    @property
    def clip(self) -> float:
        """The largest norm C of a row's gradient."""
        return float(self.spec.clip)

    @property
    def std(self) -> float:
        """The standard deviation z C of the noise on a sum."""
        return self.mechanism.noise_multiplier * self.clip


def check_row_level(spec: PrivacySpec | None) -> None:
    """Refuse options that only clients have. Raises ConfigError."""
    if spec is None:
        return
    refuse(features_of_privacy(spec) | {"privacy of rows": True})
