"""The public facts of a private federated job, and its budget as far as the job's options alone decide it. Pure.

The service reads this file without torch. A round's mechanism follows from the options for clients that are drawn
independently, for everyone, and for one release under tree noise. A fixed number of drawn clients needs the number of
clients, and noise that the clients add needs the model's size: both are known only where the data or the model is.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayps_client.secure.graph import shares_needed
from rayps_client.secure.secure_facts import levels_of

from rayps.core.strategy.strategy import StrategyView
from rayps.federated.population.cohort import cohort_size
from rayps.federated.remote.secure_options import LEAST, SecureOptions
from rayps.federated.strategy_interface import FederatedView
from rayps.privacy.account import solve_noise
from rayps.privacy.adaptive_clip import SHARE, update_noise
from rayps.privacy.budget import must_allow_one
from rayps.privacy.claim import Setting, void
from rayps.privacy.mechanism import CLIENT, Mechanism
from rayps.privacy.noise_shares import share_noise
from rayps.privacy.options import ALL, DISTRIBUTED, FIXED, POISSON, TREE, PrivacySpec


@dataclass(frozen=True, slots=True)
class PrivateJob:
    """The public facts of a private federated job."""

    spec: PrivacySpec
    clients: int  # simulated clients; of real clients, the least number that must be connected
    fraction: float
    real: bool = False
    secure: SecureOptions | None = None  # how real clients' updates are summed; None: each is seen
    size: int = 0  # elements of an update; needed if the clients add the noise
    answers: bool = False  # whether the job computes statistics, and trains no model
    void: str | None = None  # why the job proves nothing, whatever it releases

    @property
    def kind(self) -> str:
        """The kind of the mechanism."""
        if self.spec.mechanism == TREE:
            return TREE
        if self.spec.by_clients:
            return DISTRIBUTED
        return self.spec.sampling or (ALL if self.real else POISSON)

    @property
    def hides_cohorts(self) -> bool:
        """Whether it is secret which clients take part. Without sampling, the job's seed says who is asked."""
        return not self.real and self.kind != ALL

    @property
    def drawn(self) -> int:
        """The number of clients of a round with a fixed number."""
        return cohort_size(self.clients, self.fraction)

    @property
    def expected(self) -> float:
        """The expected number of clients of a round."""
        return self.fraction * self.clients if self.kind == POISSON else float(self.drawn)

    @property
    def divisor(self) -> float:
        """The number by which the noised sum is divided."""
        return self.expected if self.spec.divisor is None else self.spec.divisor

    @property
    def restart(self) -> int | None:
        """The rounds of a tree; None without tree noise."""
        if self.kind != TREE:
            return None
        return self.spec.restart or max(1, self.clients // self.drawn)

    @property
    def bit_noise(self) -> float:
        """The standard deviation of the noise on the number of updates below the clip."""
        return self.expected / SHARE if self.spec.bit_noise is None else self.spec.bit_noise

    def mechanism(self, noise_multiplier: float) -> Mechanism:
        """Return the mechanism of one round with this noise multiplier."""
        if self.kind == POISSON:
            return Mechanism(POISSON, noise_multiplier, probability=self.fraction)
        if self.kind == FIXED:
            return Mechanism(FIXED, noise_multiplier, units=self.clients, drawn=self.drawn)
        if self.kind == DISTRIBUTED:
            assert self.secure is not None, "noise of clients without `secure` is refused"
            asked, norm = self.drawn, levels_of(self.secure.bits)
            least = max(LEAST, shares_needed(asked, self.secure.threshold))
            people = asked, least, self.spec.honest_fraction
            return Mechanism(
                DISTRIBUTED, noise_multiplier, shares=share_noise(noise_multiplier, people, norm, self.size)
            )
        return Mechanism(self.kind, noise_multiplier)

    def solved(self) -> Mechanism:
        """Return the mechanism of one round, with the noise that is given or found. Raises ConfigError."""
        found = solve_noise(self.spec, self.mechanism, self.restart)
        if self.spec.adaptive:
            update_noise(found.noise_multiplier, self.bit_noise)  # refuses a noise that is too small
        return found

    @property
    def setting(self) -> Setting:
        """What the claim depends on."""
        masked, restart = self.secure is not None, self.restart
        return Setting(CLIENT, self.clients, self.real, masked, restart=restart, answers=self.answers, void=self.void)


def private_job(strategy: FederatedView, clients: int | None, size: int) -> PrivateJob | None:
    """Return the public facts of a job with so many simulated clients, or None if it is not private.

    `clients` is None for real clients. `size` is the number of elements of an update.
    """
    given = strategy.federation
    spec, joining = given.privacy, given.joining
    if spec is None:
        return None
    count = joining.least if joining is not None else clients
    assert count is not None, "simulated clients are counted"
    real, answers = joining is not None, given.client_side.answers
    return PrivateJob(spec, count, given.fraction, real, given.secure, size, answers, void(spec, strategy))


def must_allow_a_round(strategy: StrategyView) -> None:
    """Check the budget of a strategy as far as its options alone decide it; the job's start checks the rest.

    What one step with private rows costs depends on the number of rows, so that only federated strategies are checked.

    Raises:
        ConfigError: the budget allows no round, or no noise keeps the rounds within it. The words are those of the
            check at the job's start.
    """
    if not isinstance(strategy, FederatedView):
        return
    joining = strategy.federation.joining
    job = private_job(strategy, None if joining is not None else 1, 0)
    if job is None or job.spec.epsilon is None or job.kind in (FIXED, DISTRIBUTED):
        return
    found, tree = job.spec.noise_multiplier is None, job.kind == TREE
    if found and tree and joining is None and job.spec.restart is None:
        return  # the rounds of a tree follow from the number of clients
    must_allow_one(job.spec, solve_noise(job.spec, job.mechanism, job.restart), tree=tree)
