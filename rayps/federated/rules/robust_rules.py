"""Aggregation rules, one class for each: options, text form, needed replies, tolerated attackers. Add a rule here.

A rule combines the n replies of a round into one update. Up to f of the replies may come from attackers.

    mean                                      weighted by samples; tolerates no attacker
    krum(f=4)                                 the reply nearest to its neighbours               2f + 2 < n
    multi_krum(f=4,m=none)                    the mean of the m such replies (none: n - f)      2f + 2 < n, m <= n - f
    trimmed_mean(f=4)                         of each coordinate the mean without f largest, f smallest   2f < n
    median                                    of each coordinate the median
    geometric_median(iterations=100)          the point with the least sum of distances to the replies
    bulyan(f=4)                               a trimmed mean of the replies that Krum chooses   n >= 4f + 3
    centered_clipping(tau=1,iterations=3)     the last round's result plus the mean of the clipped differences from it

All rules except mean have the option `bucket=s`: the seed divides the replies into buckets of s replies, and the rule
is applied to the means of the buckets instead of the replies. n is then ceil(replies / s) (Karimireddy, He and Jaggi,
"Byzantine-robust learning on heterogeneous datasets via bucketing", ICLR 2022). All rules except mean count each reply
once, because a client reports its number of samples itself, and an attacker may report any number.
`rayps.federated.rules.rule_arithmetic` has the arithmetic of the rules, with their papers.
`rayps.federated.combine_replies` applies a rule to a round's replies. The rule is one of the options in
`rayps.federated.rules.aggregation_options`.

To add a rule, write a class here: a frozen dataclass derived from `AggregationRule` with a `name`, its options as
fields, `needs`, `drawback`, and `combine`. Import numpy only when a rule is applied: the job service parses rules
without numpy.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rayps_client.errors import ConfigError
from rayps_client.values import Json

from rayps.core.strategy.text import allow_omitted_key
from rayps.federated.population.attack_spec import AttackSpec
from rayps.federated.population.option_text import REQUIRED, Option, read, shown

if TYPE_CHECKING:
    from types import ModuleType

    from rayps.federated.rules.rule_arithmetic import Matrix, Picks, Vector

SKEWED = 0.35  # a larger `skew` gives a warning; with evenly distributed rows it is far smaller
_WHOLE = {"f": 0, "m": 1, "bucket": 1, "iterations": 1}  # options that are whole numbers, with their least values
RULES: dict[str, type[AggregationRule]] = {}


def _kernels() -> ModuleType:
    """Return the module with the rules' arithmetic; importing it imports numpy."""
    from rayps.federated.rules import rule_arithmetic

    return rule_arithmetic


@dataclass(frozen=True)
class AggregationRule:
    """The base class of aggregation rules. An object is a rule with its options.

    `rule_of` finds a class by its `name`.
    """

    bucket: int = dataclasses.field(default=1, kw_only=True)
    name: ClassVar[str] = ""
    robust: ClassVar[bool] = True  # whether the rule needs all replies of a round at once, and counts each once
    selects: ClassVar[bool] = False  # whether it chooses some clients by their updates, and ignores the others
    remembers: ClassVar[bool] = False  # whether it starts from the last round's result
    by_distance: ClassVar[bool] = False  # whether it measures distances between whole rows; counts would dominate them
    guard: ClassVar[str] = "n >= 1"  # the condition of `needs` on n, as a formula
    drawback: ClassVar[str] = ""  # the rule's drawback if clients' data differ, as the end of a sentence "it ..."

    def __init_subclass__(cls) -> None:
        RULES[cls.name] = cls

    def __str__(self) -> str:
        kept = [key for key in self.options() if key != "bucket" or self.bucket > 1]
        return shown(self.name, {key: getattr(self, key) for key in kept})

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Return the rule's options by name, `bucket` last."""
        fields = sorted(dataclasses.fields(cls), key=lambda field: field.name == "bucket")
        if not cls.robust:
            return {}
        return {
            field.name: Option(
                REQUIRED if field.default is dataclasses.MISSING else field.default, _WHOLE.get(field.name)
            )
            for field in fields
        }

    # ---- how many replies

    def needs(self) -> int:
        """Return the least number n of replies (after bucketing) for which the rule is defined."""
        return 1

    def attackers_of(self, n: int) -> int:
        """Return how many attackers among n replies (after bucketing) the rule tolerates; n is at least `needs()`.

        By default, the largest number below half of n.
        """
        return (n - 1) // 2

    @property
    def least(self) -> int:
        """The least number of replies of a round (before bucketing) for which the rule is defined."""
        return (self.needs() - 1) * self.bucket + 1

    def count_tolerated(self, replies: int) -> int:
        """Return how many attackers among `replies` replies (before bucketing) the rule tolerates."""
        if not self.robust or replies < self.least:
            return 0
        return self.attackers_of(-(-replies // self.bucket))

    def lacking(self, replies: int) -> str | None:
        """Return why `replies` replies are too few for the rule, or None if they are enough.

        A round with too few replies leaves the model unchanged.
        """
        if replies >= self.least:
            return None
        if not replies:
            return "no reply came"
        return f"{self} needs {self.least} replies ({self._guard()}), received {replies}"

    def check(self, cohort: int, attack: AttackSpec | None = None) -> None:
        """Check the rule for rounds of `cohort` clients, assuming that all of them reply.

        Raises:
            ConfigError: the rule needs more replies, or `attack` has more attackers than the rule tolerates.
        """
        if cohort < self.least:
            raise ConfigError(
                f"{self} needs a round of at least {self.least} replies ({self._guard()}), but a round asks {cohort} "
                f"clients:\n{'lower f' if self.attackers_of(0) > 0 else 'ask more clients'}, or raise fraction",
                field="rule",
                needed=self.least,
                cohort=cohort,
            )
        if self.robust and attack is not None and min(attack.clients, cohort) > self.count_tolerated(cohort):
            raise ConfigError(
                f"up to {min(attack.clients, cohort)} of a round's {cohort} replies come from attackers, but {self} "
                f"tolerates {self.count_tolerated(cohort)}: choose another rule or a larger f, or fewer attackers",
                field="rule",
                attackers=attack.clients,
                bears=self.count_tolerated(cohort),
            )

    def warn_of_few_replies(self, cohort: int, replies: float) -> str | None:
        """Return a warning if the rule needs more than the `replies` expected of `cohort` clients, else None."""
        if replies >= self.least:
            return None
        return (
            f"of {cohort} clients {replies:.3g} are expected to reply in a round, and {self} needs {self.least} "
            f"replies ({self._guard()}): rounds with fewer replies leave the model unchanged"
        )

    def warning(self, skew: float | None = None) -> str | None:
        """Return a warning about the rule's cost in accuracy if clients' data differ, else None. For mean, return None.

        `skew` is how much the clients' labels differ, from 0 to 1; None means not known.
        """
        if not self.robust or (skew is not None and skew < SKEWED):
            return None
        condition = (
            "if clients' data differ," if skew is None else f"clients' labels differ (by {skew:.2f} of 1), and then"
        )
        return (
            f"{condition} {self} costs accuracy even without an attacker: it {self.drawback}; lower f, or try "
            "centered_clipping or geometric_median, which cost the least accuracy in measurements"
        )

    def _guard(self) -> str:
        return self.guard if self.bucket == 1 else f"{self.guard} with n = replies / {self.bucket}"

    # ---- the rule

    def combine(self, x: Matrix, before: Vector | None) -> Vector:
        """Return the rule's result [P], float64, for the updates x [n, P].

        For a rule that `selects`, x has only the rows that `picks` chose. `before` is the last round's result; None
        if there is none.
        """
        raise NotImplementedError(
            f"rule {type(self).__name__} does not define how updates are combined: define combine(self, x, before)"
        )

    def picks(self, x: Matrix) -> Picks:
        """Return the ascending indices of the rows of x that the rule chooses. Only for a rule that `selects`."""
        raise NotImplementedError(
            f"rule {type(self).__name__} has selects=True, but does not define which rows: define picks(self, x)"
        )

    def combine_others(self, x: Matrix, before: Vector | None) -> Vector:
        """Combine the vectors x that clients sent in addition to their updates. By default, call `combine`."""
        return self.combine(x, before)


@dataclass(frozen=True)
class Mean(AggregationRule):
    """The mean of the replies, weighted by samples."""

    name: ClassVar[str] = "mean"
    robust: ClassVar[bool] = False

    def combine(self, x: Matrix, before: Vector | None) -> Vector:
        """Return the unweighted mean of the rows. A job does not call this: `ExactSum` computes its weighted mean."""
        found: Vector = _kernels().mean(x)
        return found


@dataclass(frozen=True)
class Krum(AggregationRule):
    """The rule Krum: the result is the one reply that is nearest to its neighbours."""

    f: int
    name: ClassVar[str] = "krum"
    selects: ClassVar[bool] = True
    guard: ClassVar[str] = "2f + 2 < n"
    drawback: ClassVar[str] = (
        "uses a single client's update in each round, and hardly converges if a client has only two labels "
        "(buckets help: krum(f=1,bucket=2))"
    )

    def needs(self) -> int:
        """Return the least n for which 2f + 2 < n."""
        return 2 * self.f + 3

    def attackers_of(self, n: int) -> int:
        """Return f: the rule tolerates f attackers."""
        return self.f

    def picks(self, x: Matrix) -> Picks:
        """Return the index of the row that is nearest to its neighbours."""
        found: Picks = _kernels().krum_picks(x, self.f, 1)
        return found

    def combine(self, x: Matrix, before: Vector | None) -> Vector:
        """Return the mean of the chosen rows. Krum chooses one row."""
        found: Vector = _kernels().mean(x)
        return found


@dataclass(frozen=True)
class MultiKrum(Krum):
    """The rule multi-Krum: the result is the mean of the m replies that are nearest to their neighbours."""

    m: int | None = None
    name: ClassVar[str] = "multi_krum"
    guard: ClassVar[str] = "2f + 2 < n and m <= n - f"
    drawback: ClassVar[str] = "drops the clients that differ most, attackers or not"

    def needs(self) -> int:
        """Return the least n for which 2f + 2 < n and m <= n - f."""
        return max(2 * self.f + 3, self.f + (self.m or 1))

    def picks(self, x: Matrix) -> Picks:
        """Return the ascending indices of the m rows (by default n - f) that are nearest to their neighbours."""
        found: Picks = _kernels().krum_picks(x, self.f, len(x) - self.f if self.m is None else self.m)
        return found

    def combine_others(self, x: Matrix, before: Vector | None) -> Vector:
        """Return a trimmed mean, because a client that was chosen for its update may send a false vector here."""
        found: Vector = _kernels().trimmed_mean(x, min(self.f, (len(x) - 1) // 2))
        return found


@dataclass(frozen=True)
class Bulyan(Krum):
    """The rule Bulyan: Krum chooses n - 2f of the n replies, one after another. Then a trimmed mean is computed.

    The result is, for each coordinate, the mean of the n - 4f values of the chosen replies that are nearest to the
    median of the chosen replies.
    """

    name: ClassVar[str] = "bulyan"
    guard: ClassVar[str] = "n >= 4f + 3"
    drawback: ClassVar[str] = "drops the clients that differ most, attackers or not"

    def needs(self) -> int:
        """Return the least n for which n >= 4f + 3."""
        return 4 * self.f + 3

    def picks(self, x: Matrix) -> Picks:
        """Return the ascending indices of the n - 2f rows that Krum chooses one after another."""
        found: Picks = _kernels().bulyan_picks(x, self.f)
        return found

    def combine(self, x: Matrix, before: Vector | None) -> Vector:
        """Return for each coordinate the mean of the n - 4f values nearest to the median of the n - 2f chosen rows."""
        found: Vector = _kernels().near_the_median(x, len(x) - 2 * self.f)
        return found


@dataclass(frozen=True)
class TrimmedMean(AggregationRule):
    """The rule trimmed mean: for each coordinate, the mean of the values without the f largest and f smallest."""

    f: int
    name: ClassVar[str] = "trimmed_mean"
    guard: ClassVar[str] = "2f < n"
    drawback: ClassVar[str] = "drops what only a few clients have learned"

    def needs(self) -> int:
        """Return the least n for which 2f < n."""
        return 2 * self.f + 1

    def attackers_of(self, n: int) -> int:
        """Return f: the rule tolerates f attackers."""
        return self.f

    def combine(self, x: Matrix, before: Vector | None) -> Vector:
        """Return for each column the mean of its values without the f largest and f smallest."""
        found: Vector = _kernels().trimmed_mean(x, self.f)
        return found


@dataclass(frozen=True)
class Median(AggregationRule):
    """The rule median: the result is, for each coordinate, the median of the replies."""

    name: ClassVar[str] = "median"
    drawback: ClassVar[str] = "drops what only a few clients have learned, so that rare labels may never be predicted"

    def combine(self, x: Matrix, before: Vector | None) -> Vector:
        """Return for each column the median."""
        found: Vector = _kernels().median(x)
        return found


@dataclass(frozen=True)
class GeometricMedian(AggregationRule):
    """The rule geometric median: the result is the point with the least sum of distances to the replies."""

    iterations: int = 100
    name: ClassVar[str] = "geometric_median"
    by_distance: ClassVar[bool] = True
    drawback: ClassVar[str] = "gives the least weight to the clients that differ most"

    def combine(self, x: Matrix, before: Vector | None) -> Vector:
        """Return the point with the least sum of distances to the rows, after at most `iterations` iterations."""
        found: Vector = _kernels().geometric_median(x, self.iterations)
        return found


@dataclass(frozen=True)
class CenteredClipping(AggregationRule):
    """The rule centered clipping: the last round's result plus the mean of the replies' clipped differences to it."""

    tau: float = 1.0
    iterations: int = 3
    name: ClassVar[str] = "centered_clipping"
    remembers: ClassVar[bool] = True
    by_distance: ClassVar[bool] = True
    drawback: ClassVar[str] = "converges slowly if its tau is below the norms of the updates"

    def combine(self, x: Matrix, before: Vector | None) -> Vector:
        """Return `before` (by default 0) after `iterations` steps by the mean difference, clipped to the norm tau."""
        found: Vector = _kernels().centered_clipping(x, self.tau, self.iterations, before)
        return found


for _kind in RULES.values():
    allow_omitted_key(_kind.name, next((option for option in _kind.options() if option != "bucket"), None))


def rule_of(given: Json | AggregationRule) -> AggregationRule:
    """Parse a rule from its text or wire form. Return an AggregationRule unchanged, and the mean for None.

    Raises ConfigError if there is no such rule, or if an option is invalid.
    """
    if isinstance(given, AggregationRule):
        return given
    found = read("rule", "mean" if given is None else given, _known(), "krum(f=4)")
    return RULES[found["name"]](**{key: value for key, value in found.items() if key != "name"})


def rule_with(option: str) -> str | None:
    """Return an example, as text, of a rule that has this option, or None if no rule has the option."""
    # rules that choose clients come last, because they need more replies
    for kind in sorted(RULES.values(), key=lambda kind: kind.selects):
        own = kind.options()
        if option in own:
            needed: dict[str, float] = {name: 1 for name, each in own.items() if each.default is REQUIRED}
            default = own[option].default
            value = default if isinstance(default, (int, float)) else 3
            shown_value = 2 if option == "bucket" else value
            return shown(kind.name, {**needed, option: needed.get(option, shown_value)})
    return None


def _known() -> dict[str, dict[str, Option]]:
    return {name: kind.options() for name, kind in RULES.items()}
