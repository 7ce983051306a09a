"""The option `privacy=dp(...)` of a strategy, with its checks. Pure; the job service reads it without numpy.

    dp(noise_multiplier=1.1, clip=1.0, delta=1e-5)     the noise is given; epsilon follows from the rounds
    dp(epsilon=8, rounds=100, clip=1.0, delta=1e-5)    the noise is found, so that 100 rounds spend epsilon = 8
    dp(noise_multiplier=1.1, epsilon=8, ...)           both: the run ends before a round that would exceed epsilon = 8

The noise on a sum has the standard deviation noise_multiplier * clip, where `clip` bounds the norm of what one unit
adds to the sum. The unit is a client under federated strategies, and a row under all_reduce and parameter_server.

Sources: Abadi et al., "Deep Learning with Differential Privacy", CCS 2016; McMahan, Ramage, Talwar, Zhang, "Learning
Differentially Private Recurrent Language Models", ICLR 2018; Andrew, Thakkar, McMahan, Ramaswamy, "Differentially
Private Learning with Adaptive Clipping", NeurIPS 2021; Kairouz et al., "Practical and Private (Deep) Learning without
Sampling or Shuffling", ICML 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Protocol, runtime_checkable

from rayps_client.errors import ConfigError
from rayps_client.values import Json, Keywords, is_number

from rayps.core.refusals.table import refuse
from rayps.core.strategy import options
from rayps.core.strategy.text import form, quote

ADAPTIVE = "adaptive"
GAUSSIAN, TREE = "gaussian", "tree"
POISSON, FIXED, ALL = "poisson", "fixed", "all"
SECRET, SEEDED = "secret", "seeded"
DISTRIBUTED = "distributed"  # kind of the releases whose noise the clients add
SERVER, CLIENTS = "server", "clients"
HONEST = 0.8  # as few as `rayps_client.secure.graph` bears: a fifth may work together with the server


@dataclass(frozen=True)
class PrivacySpec:
    """The options of differential privacy.

    Args:
        noise_multiplier: the standard deviation of the noise on a sum, divided by `clip`. None: it is found from
            `epsilon` and `rounds`.
        clip: the largest norm of what one unit adds to a sum, or "adaptive" (client level only).
        delta: the probability with which epsilon need not hold; below 1 / the number of units.
        epsilon: the budget. A round that would exceed it is not run. None: there is no budget.
        rounds: the number of rounds that the budget must suffice for, if the noise is to be found.
        mechanism: "gaussian" (independent noise in each round), or "tree" (DP-FTRL: correlated noise, for clients that
            cannot be sampled).
        sampling: "poisson" (each unit is drawn independently), "fixed" (a fixed number of units is drawn), or "all"
            (no amplification: anyone may take part in any round). None: poisson; all for real clients.
        noise: "secret" (noise and cohorts come from the system's random generator), or "seeded" (from the job's seed:
            for tests; it proves nothing).
        noise_by: client level only: "server" (the server adds the noise to the sum), or "clients" (each client adds a
            share before it masks its update, under `secure`).
        honest: under noise_by=clients: the fraction of a round's clients that add their share as agreed, and tell it to
            nobody. Their shares alone are the noise that is claimed. None: 0.8.
        quantile, clip_lr, first_clip, bit_noise: of adaptive clipping: the fraction of updates below the clip, the
            clip's learning rate, its first value, and the noise on the number of updates below the clip (None: a
            twentieth of the expected cohort).
        divisor: client level only: the number by which a noised sum is divided. It is fixed, because the number of
            replies is not public. None: the expected number of a round's clients.
        restart: rounds of one tree under "tree"; a client takes part at most once in these rounds. None: 1 / fraction.
        physical_batch: row level only: the rows whose gradients are in memory at once. None: the data's batch size.
    """

    noise_multiplier: float | None = None
    clip: float | str = 1.0
    delta: float = 1e-5
    epsilon: float | None = None
    rounds: int | None = None
    mechanism: str = GAUSSIAN
    sampling: str | None = None
    noise: str = SECRET
    noise_by: str = SERVER
    honest: float | None = None
    quantile: float = 0.5
    clip_lr: float = 0.2
    first_clip: float = 0.1
    bit_noise: float | None = None
    divisor: float | None = None
    restart: int | None = None
    physical_batch: int | None = None
    name: ClassVar[str] = "dp"

    def __post_init__(self) -> None:
        """Check the options. Raises ConfigError."""
        options.number(self, "noise_multiplier", above=0, none=True)
        if self.clip != ADAPTIVE:
            options.number(self, "clip", above=0, expected="the largest norm, a number above 0, or adaptive")
        options.number(self, "delta", above=0, below=1)
        options.number(self, "epsilon", above=0, none=True)
        options.whole(self, "rounds", none=True)
        options.choice(self, "mechanism", (GAUSSIAN, TREE))
        if self.sampling is not None:
            options.choice(self, "sampling", (POISSON, FIXED, ALL))
        if is_number(self.noise):
            raise ConfigError(
                f"noise is {self.noise!r}: how much noise there is, is noise_multiplier={self.noise!r}; noise says "
                "where it comes from, secret or seeded",
                field="noise",
            )
        options.choice(self, "noise", (SECRET, SEEDED))
        options.choice(self, "noise_by", (SERVER, CLIENTS))
        options.number(self, "honest", above=0, most=1, none=True)
        options.number(self, "quantile", above=0, below=1)
        options.number(self, "clip_lr", above=0)
        options.number(self, "first_clip", above=0)
        options.number(self, "bit_noise", above=0, none=True)
        options.number(self, "divisor", above=0, none=True)
        options.whole(self, "restart", none=True)
        options.whole(self, "physical_batch", none=True)
        refuse(features_of_privacy(self))
        if self.noise_multiplier is None and (self.epsilon is None or self.rounds is None):
            raise ConfigError(
                "privacy has no noise: give noise_multiplier (1.1, for example), or epsilon and rounds, from which the "
                "noise is found: dp(epsilon=8,rounds=100)",
                field="privacy",
            )

    @property
    def by_clients(self) -> bool:
        """Whether the clients add the noise, and not the server."""
        return self.noise_by == CLIENTS

    @property
    def honest_fraction(self) -> float:
        """The fraction of a round's clients whose noise counts, if the clients add it."""
        return HONEST if self.honest is None else self.honest

    @property
    def adaptive(self) -> bool:
        """Whether the clip follows the clients' norms."""
        return self.clip == ADAPTIVE

    @property
    def proves(self) -> bool:
        """Whether noise and cohorts are secret, so that the claim holds."""
        return self.noise == SECRET


def features_of_privacy(spec: PrivacySpec) -> dict[str, Json]:
    """Return the features of a job that its options of privacy declare, as `rayps.core.refusals` names them."""
    drawn = spec.sampling if spec.sampling in (POISSON, FIXED) else None
    found: dict[str, Json] = {
        "epsilon": spec.epsilon,
        "a budget without noise": (spec.epsilon is not None and spec.noise_multiplier is None) or None,
        "noise_multiplier": spec.noise_multiplier,
        "rounds": spec.rounds,
        "no rounds": spec.rounds is None or None,
        "tree noise": spec.mechanism if spec.mechanism == TREE else None,
        "an adaptive clip": spec.clip if spec.adaptive else None,
        "a sample of clients": drawn,
        "sampling of clients": spec.sampling if spec.sampling in (FIXED, ALL) else None,
        "samples of a fixed size": spec.sampling == FIXED or None,
        "honest": spec.honest,
        "noise of clients": spec.noise_by if spec.by_clients else None,
        "noise of the server": not spec.by_clients or None,
        "seeded noise": spec.noise == SEEDED or None,
        "bit_noise": spec.bit_noise,
        "divisor": spec.divisor,
        "restart": spec.restart,
        "physical_batch": spec.physical_batch,
    }
    return {name: value for name, value in found.items() if value is not None}


def dp(**given: Json) -> PrivacySpec:
    """Return the options of differential privacy: the value of a strategy's `privacy`.

    Raises:
        ConfigError: an option is unknown, or its value is not allowed.

    Example:
        rayps.FedAvg(fraction=0.1, privacy=rayps.dp(noise_multiplier=1.1, clip=1.0, delta=1e-5))
    """
    known = [field.name for field in fields(PrivacySpec)]
    for key in given:
        if key not in known:
            raise ConfigError(f"privacy: dp has no option {key!r}: its options are {', '.join(known)}", field="privacy")
    found: Keywords = dict(given)
    return PrivacySpec(**found)


def privacy_of(given: Json | PrivacySpec) -> PrivacySpec | None:
    """Parse the option `privacy`: a PrivacySpec, a mapping of its options, or the text `dp(...)`. None: no privacy.

    Raises:
        ConfigError: it has none of these forms, or an option is not allowed.
    """
    if given is None or isinstance(given, PrivacySpec):
        return given
    facts = form(given) if isinstance(given, str) else given
    if not isinstance(facts, Mapping) or facts.get("name", PrivacySpec.name) != PrivacySpec.name:
        raise ConfigError(
            f"privacy is {quote(given)}: give dp(noise_multiplier=1.1,clip=1.0,delta=1e-5), or leave it out",
            field="privacy",
        )
    return dp(**{key: value for key, value in facts.items() if key != "name"})


@runtime_checkable
class HasPrivacy(Protocol):
    """A strategy with the option `privacy`."""

    @property
    def privacy_spec(self) -> PrivacySpec | None:
        """The options of differential privacy; None if the job is not private."""


def privacy_in(strategy: object) -> PrivacySpec | None:
    """Return the options of a strategy's `privacy`; None if it has none, or no such option."""
    return strategy.privacy_spec if isinstance(strategy, HasPrivacy) else None
