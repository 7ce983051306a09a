"""Aggregation rules, one class for each: options, text form, needed replies, tolerated attackers. Add a rule here.

A rule makes one update of a round's replies. f: how many of the replies may come from attackers; n: the replies.

    mean                                      weighted by samples; tolerates no attacker
    krum(f=4)                                 the one reply nearest to its neighbours           2f + 2 < n
    multi_krum(f=4,m=none)                    the mean of the m nearest (none: n - f)           2f + 2 < n, m <= n - f
    trimmed_mean(f=4)                         of each coordinate the mean without f largest, f smallest   2f < n
    median                                    of each coordinate the median
    geometric_median(iterations=100)          the point with the least sum of distances
    bulyan(f=4)                               a trimmed mean of what Krum chooses               n >= 4f + 3
    centered_clipping(tau=1,iterations=3)     a mean of clipped distances from the last round's result

`bucket=s` for all but mean: means of s replies, drawn from the seed, replace the replies (Karimireddy, He and Jaggi,
"Byzantine-robust learning on heterogeneous datasets via bucketing", ICLR 2022); n is then ceil(replies / s). All rules
but mean count each reply once: the number of samples is reported by the client, and an attacker may report any number.
`rayps.federated.rule_arithmetic` has the arithmetic of the rules, with their papers; `rayps.federated.aggregate`
applies a rule to a round's replies; `rayps.federated.aggregation` has the options of a strategy, of which the rule is
one.

To add a rule, write a class here: a frozen dataclass derived from `AggregationRule` with a `name`, its options as
fields, `needs`, `drawback`, and `combine`. numpy is imported only when a rule is applied: the job service parses rules
without it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rayps.core.errors import ConfigError
from rayps.core.text import may_stand_first
from rayps.core.values import Json
from rayps.federated.population.attack_spec import AttackSpec
from rayps.federated.population.option_text import REQUIRED, Option, read, shown

if TYPE_CHECKING:
    from types import ModuleType

    from rayps.federated.rule_arithmetic import Matrix, Picks, Vector

SKEWED = 0.35  # largest `skew` without a warning; evenly distributed rows stay far below
_WHOLE = {"f": 0, "m": 1, "bucket": 1, "iterations": 1}  # options with whole numbers, and their least value
RULES: dict[str, type[AggregationRule]] = {}


def _kernels() -> ModuleType:
    """Return the module with the rules' arithmetic; importing it imports numpy."""
    from rayps.federated import rule_arithmetic

    return rule_arithmetic


@dataclass(frozen=True)
class AggregationRule:
    """The base class of aggregation rules: one rule with its options. Derived classes are found by their `name`."""

    bucket: int = dataclasses.field(default=1, kw_only=True)
    name: ClassVar[str] = ""
    robust: ClassVar[bool] = True  # whether the rule needs all replies of a round at once, and counts each once
    selects: ClassVar[bool] = False  # whether it chooses some clients by their updates, and ignores the others
    remembers: ClassVar[bool] = False  # whether it starts with the last round's result
    by_distance: ClassVar[bool] = False  # whether it measures distances of whole rows, in which counts would dominate
    guard: ClassVar[str] = "n >= 1"  # the condition of `needs` on n, in symbols
    drawback: ClassVar[str] = ""  # what the rule does wrong where clients' data differ: the end of a warning's sentence

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
        """Return how many attackers among n replies the rule tolerates: fewer than half. n is at least `needs()`."""
        return (n - 1) // 2

    @property
    def least(self) -> int:
        """The fewest replies of a round for which the rule is defined."""
        return (self.needs() - 1) * self.bucket + 1

    def bears(self, replies: int) -> int:
        """Return how many attackers among this many replies the rule tolerates, bucketing included."""
        if not self.robust or replies < self.least:
            return 0
        return self.attackers_of(-(-replies // self.bucket))

    def lacking(self, replies: int) -> str | None:
        """Return why a round with this many replies is skipped and leaves the model unchanged.

        None if it is not skipped.
        """
        if replies >= self.least:
            return None
        if not replies:
            return "no reply came"
        return f"{self} needs {self.least} replies ({self._guard()}), received {replies}"

    def check(self, cohort: int, attack: AttackSpec | None = None) -> None:
        """Check the rule against a cohort of this many clients, all of which reply.

        Raises:
            ConfigError: the rule needs more replies, or more of the replies may come from attackers than it tolerates.
        """
        if cohort < self.least:
            raise ConfigError(
                f"{self} needs a round of at least {self.least} replies ({self._guard()}), and a round asks {cohort}\n"
                f"{'lower f' if self.attackers_of(0) > 0 else 'ask more clients'}, or raise fraction",
                field="rule",
                needed=self.least,
                cohort=cohort,
            )
        if self.robust and attack is not None and min(attack.clients, cohort) > self.bears(cohort):
            raise ConfigError(
                f"up to {min(attack.clients, cohort)} of a round's {cohort} replies come from attackers, and {self} "
                f"tolerates {self.bears(cohort)}",
                field="rule",
                attackers=attack.clients,
                bears=self.bears(cohort),
            )

    def doubt(self, cohort: int, replies: float) -> str | None:
        """Return a warning if fewer replies are expected than the rule needs; None otherwise."""
        if replies >= self.least:
            return None
        return (
            f"of {cohort} clients {replies:.3g} are expected to reply in a round, and {self} needs {self.least} "
            f"({self._guard()}): rounds with fewer are skipped and leave the model unchanged"
        )

    def warning(self, skew: float | None = None) -> str | None:
        """Return a warning about the rule's cost where clients' data differ by `skew` (None: not known).

        The mean has no such warning: the result is None.
        """
        if not self.robust or (skew is not None and skew < SKEWED):
            return None
        told = "where clients' data differ" if skew is None else f"clients' labels differ (by {skew:.2f} of 1), and"
        return (
            f"{told} {self} costs accuracy even without an attacker: it {self.drawback}; lower f, or try "
            "centered_clipping or geometric_median, which cost least where that was measured"
        )

    def _guard(self) -> str:
        return self.guard if self.bucket == 1 else f"{self.guard} with n = replies / {self.bucket}"

    # ---- the rule

    def combine(self, x: Matrix, before: Vector | None) -> Vector:
        """Return the rule's result [P], float64, for the rows of x [n, P].

        A rule that `selects` combines only the rows that it chooses. `before` is the last round's result; None = there
        is none.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define how to make one update: define combine")

    def picks(self, x: Matrix) -> Picks:
        """Return the indices of the rows of x that the rule chooses, ascending; only for a rule that `selects`."""
        raise NotImplementedError(f"{type(self).__name__} selects, and does not define which: define picks")

    def beside(self, x: Matrix, before: Vector | None) -> Vector:
        """Combine the rows of x, which clients sent besides their updates; arguments and result as for `combine`."""
        return self.combine(x, before)


@dataclass(frozen=True)
class Mean(AggregationRule):
    """The mean of the replies, weighted by samples."""

    name: ClassVar[str] = "mean"
    robust: ClassVar[bool] = False

    def combine(self, x: Matrix, before: Vector | None) -> Vector:
        """See AggregationRule. Here each row counts once: the weighted mean is computed by `ExactSum`."""
        found: Vector = _kernels().mean(x)
        return found


@dataclass(frozen=True)
class Krum(AggregationRule):
    """The rule Krum: the one reply that is nearest to its neighbours."""

    f: int
    name: ClassVar[str] = "krum"
    selects: ClassVar[bool] = True
    guard: ClassVar[str] = "2f + 2 < n"
    drawback: ClassVar[str] = (
        "takes over one client's update in each round: with two labels a client it hardly converges "
        "(buckets help, inside of its parentheses: krum(f=1,bucket=2))"
    )

    def needs(self) -> int:
        """See AggregationRule."""
        return 2 * self.f + 3

    def attackers_of(self, n: int) -> int:
        """See AggregationRule."""
        return self.f

    def picks(self, x: Matrix) -> Picks:
        """See AggregationRule."""
        found: Picks = _kernels().krum_picks(x, self.f, 1)
        return found

    def combine(self, x: Matrix, before: Vector | None) -> Vector:
        """See AggregationRule."""
        found: Vector = _kernels().mean(x)
        return found


@dataclass(frozen=True)
class MultiKrum(Krum):
    """The rule multi-Krum: the mean of the m replies that are nearest to their neighbours."""

    m: int | None = None
    name: ClassVar[str] = "multi_krum"
    guard: ClassVar[str] = "2f + 2 < n and m <= n - f"
    drawback: ClassVar[str] = "drops the clients that differ most, attackers or not"

    def needs(self) -> int:
        """See AggregationRule."""
        return max(2 * self.f + 3, self.f + (self.m or 1))

    def picks(self, x: Matrix) -> Picks:
        """See AggregationRule."""
        found: Picks = _kernels().krum_picks(x, self.f, len(x) - self.f if self.m is None else self.m)
        return found

    def beside(self, x: Matrix, before: Vector | None) -> Vector:
        """Return a trimmed mean, because a client that was chosen for its update may send false values besides."""
        found: Vector = _kernels().trimmed_mean(x, min(self.f, (len(x) - 1) // 2))
        return found


@dataclass(frozen=True)
class Bulyan(Krum):
    """The rule Bulyan: for each coordinate the mean of the values nearest to the median.

    The values are those of the n - 2f replies that Krum chooses one after another.
    """

    name: ClassVar[str] = "bulyan"
    guard: ClassVar[str] = "n >= 4f + 3"
    drawback: ClassVar[str] = "drops the clients that differ most, attackers or not"

    def needs(self) -> int:
        """See AggregationRule."""
        return 4 * self.f + 3

    def picks(self, x: Matrix) -> Picks:
        """See AggregationRule."""
        found: Picks = _kernels().bulyan_picks(x, self.f)
        return found

    def combine(self, x: Matrix, before: Vector | None) -> Vector:
        """See AggregationRule: the mean of n - 4f values of each coordinate, out of the n - 2f chosen replies."""
        found: Vector = _kernels().near_the_median(x, len(x) - 2 * self.f)
        return found


@dataclass(frozen=True)
class TrimmedMean(AggregationRule):
    """The rule trimmed mean: for each coordinate the mean without the f largest and f smallest values."""

    f: int
    name: ClassVar[str] = "trimmed_mean"
    guard: ClassVar[str] = "2f < n"
    drawback: ClassVar[str] = "drops what few clients know"

    def needs(self) -> int:
        """See AggregationRule."""
        return 2 * self.f + 1

    def attackers_of(self, n: int) -> int:
        """See AggregationRule."""
        return self.f

    def combine(self, x: Matrix, before: Vector | None) -> Vector:
        """See AggregationRule."""
        found: Vector = _kernels().trimmed_mean(x, self.f)
        return found


@dataclass(frozen=True)
class Median(AggregationRule):
    """The rule median: for each coordinate the median."""

    name: ClassVar[str] = "median"
    drawback: ClassVar[str] = "drops what few clients know: rare labels may never be predicted"

    def combine(self, x: Matrix, before: Vector | None) -> Vector:
        """See AggregationRule."""
        found: Vector = _kernels().median(x)
        return found


@dataclass(frozen=True)
class GeometricMedian(AggregationRule):
    """The rule geometric median: the point with the least sum of distances to the replies."""

    iterations: int = 100
    name: ClassVar[str] = "geometric_median"
    by_distance: ClassVar[bool] = True
    drawback: ClassVar[str] = "gives clients that differ most the least weight"

    def combine(self, x: Matrix, before: Vector | None) -> Vector:
        """See AggregationRule."""
        found: Vector = _kernels().geometric_median(x, self.iterations)
        return found


@dataclass(frozen=True)
class CenteredClipping(AggregationRule):
    """The rule centered clipping: the last round's result plus the mean of the clipped differences from it."""

    tau: float = 1.0
    iterations: int = 3
    name: ClassVar[str] = "centered_clipping"
    remembers: ClassVar[bool] = True
    by_distance: ClassVar[bool] = True
    drawback: ClassVar[str] = "converges slowly where its tau is below the updates' norms"

    def combine(self, x: Matrix, before: Vector | None) -> Vector:
        """See AggregationRule."""
        found: Vector = _kernels().centered_clipping(x, self.tau, self.iterations, before)
        return found


for _kind in RULES.values():
    may_stand_first(_kind.name, next((option for option in _kind.options() if option != "bucket"), None))


def rule_of(given: Json | AggregationRule) -> AggregationRule:
    """Parse a rule from its text or wire form. Raises ConfigError: there is no such rule, or an option is invalid.

    A rule is returned unchanged; None gives the mean.
    """
    if isinstance(given, AggregationRule):
        return given
    found = read("rule", "mean" if given is None else given, _known(), "krum(f=4)")
    return RULES[found["name"]](**{key: value for key, value in found.items() if key != "name"})


def rule_with(option: str) -> str | None:
    """Return an example of a rule that has this option, as text; None if no rule has it."""
    for kind in sorted(RULES.values(), key=lambda kind: kind.selects):  # rules that need few replies first
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
