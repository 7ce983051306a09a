"""Noise that several parties add: the sum of discrete Gaussians, and what it discloses. Pure.

Kairouz, Liu and Steinke, "The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure Aggregation",
ICML 2021, proposition 14 (theorem 1 is the third bound). Each of n parties adds to each of d whole numbers a discrete
Gaussian of the parameter sigma >= 1/2. The sum of these is not a discrete Gaussian, but nearly:

    tau = 10 sum_{k=1}^{n-1} exp(-2 pi^2 sigma^2 k / (k + 1))

If the sums of two neighbouring data sets differ by a vector of whole numbers with the norms D_2 and D_1, the Renyi
divergence of order a >= 1 of the noised sums is at most each of

    a D_2^2 / (2 n sigma^2) + tau d
    a / 2 (D_2^2 / (n sigma^2) + 2 D_1 tau / (sqrt(n) sigma) + tau^2 d)
    a / 2 (D_2 / (sqrt(n) sigma) + tau sqrt(d))^2

D_1 <= min(sqrt(d) D_2, D_2^2), because the numbers are whole. For tau = 0 all are the divergence of the continuous
Gaussian with the variance n sigma^2; tau is below 1e-30 for sigma >= 3 and n < 10^7. More than n such parties only add
independent noise, so the bounds hold for them too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rayps_client.errors import ConfigError
from rayps_client.secure.noise_sizes import MOST_SIGMA, share_of


@dataclass(frozen=True, slots=True)
class NoiseShares:
    """The noise in a sum of `asked` parties' whole numbers, of which at least `least` are in it, or there is no sum."""

    sigma: int  # parameter of each party's discrete Gaussian, in steps
    count: int  # shares of noise in each sum that nobody can take out of it
    asked: int  # parties that are asked for a sum
    least: int  # parties without which there is no sum
    norm: int  # largest L2 norm of one party's numbers, in steps
    size: int  # elements of the sum

    @property
    def colluding(self) -> int:
        """The number of parties that may add no noise, or tell theirs to others."""
        return self.least - self.count

    @property
    def tau(self) -> float:
        """How far the sum of the shares is from a discrete Gaussian."""
        exponent = 2 * math.pi**2 * self.sigma**2
        return 10 * sum(math.exp(-exponent * k / (k + 1)) for k in range(1, self.count))

    def bounds(self) -> list[tuple[float, float]]:
        """Return bounds of the divergence, as pairs (rho, xi): that of order a is at most xi + rho a, for each pair."""
        std, tau = math.sqrt(self.count) * self.sigma, self.tau
        two = self.norm / std
        one = min(math.sqrt(self.size) * self.norm, float(self.norm) ** 2) / std
        return [
            (two**2 / 2, tau * self.size),
            ((two**2 + 2 * one * tau + tau**2 * self.size) / 2, 0.0),
            ((two + tau * math.sqrt(self.size)) ** 2 / 2, 0.0),
        ]


def share_noise(multiplier: float, people: tuple[int, int, float], norm: int, size: int) -> NoiseShares:
    """Return shares whose sum has at least the standard deviation `multiplier` * `norm` in each of `size` elements.

    `people` is (parties that are asked, parties without which there is no sum, fraction of the asked that is honest).

    Raises:
        ConfigError: too few honest parties are certain, or a share would be too large to draw.
    """
    asked, least, honest = people
    count = least - math.ceil((1 - honest) * asked - 1e-9)
    if count < 1:
        raise ConfigError(
            f"noise_by=clients: a sum needs {least} of the {asked} clients of a round, and with honest={honest:g} "
            f"{least - count} of these may add no noise: raise threshold in secure=secagg(threshold=...), or honest",
            field="privacy",
        )
    sigma = share_of(multiplier * norm, count)
    if sigma > MOST_SIGMA:
        raise ConfigError(
            f"noise_by=clients: each client's noise would have the standard deviation of {sigma} steps, and "
            f"{MOST_SIGMA} is the most: lower bits in secure=secagg(bits=...)",
            field="privacy",
        )
    return NoiseShares(sigma, count, asked, least, norm, size)
