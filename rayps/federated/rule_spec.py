"""What may be asked of an aggregation: its rule, its clipping, and an attack to try it with. Pure, no numpy.

Rules (f: how many of a round's replies may come from attackers; n: its replies)
    mean                                      weighted by samples; bears no attacker
    krum(f=4)                                 one reply, the one nearest to its neighbours      2f + 2 < n
    multi_krum(f=4,m=none)                    the mean of the m nearest (none: n - f)           2f + 2 < n, m <= n - f
    trimmed_mean(f=4)                         of each coordinate, without its f largest and f smallest   2f < n
    median                                    of each coordinate
    geometric_median(iterations=100)          the point with the least sum of distances
    bulyan(f=4)                               a trimmed mean of what Krum chooses               n >= 4f + 3
    centered_clipping(tau=1,iterations=3)     a mean of clipped distances from the last round's result
`bucket=s` for all but mean: means of s replies, drawn from the seed, take the replies' place (Karimireddy, He and
Jaggi, "Byzantine-robust learning on heterogeneous datasets via bucketing", ICLR 2022); n is then ceil(replies / s).
All of them but mean count each reply once: the number of samples is what a client says of itself, and an attacker may
say anything.

Attacks, by `clients=` of the job's clients, drawn from its seed
    sign_flip(clients=4,scale=1)      sends -scale times its update
    gaussian(clients=4,sd=1)          sends noise
    label_flip(clients=4,classes=none) learns label classes - 1 - y in place of y (none: as many as the data has)
    alie(clients=4,z=none)            sends mean - z sd of the honest updates (none: the paper's z)
    inner_product(clients=4,eps=1)    sends -eps times the mean of the honest updates
    nan(clients=4)                    sends what is no number
    inflated_counts(clients=4,factor=100)  says to have so many times the samples that it has
    false_buffers(clients=4,scale=1e6)  sends its update as trained, and its buffers times scale
    false_c(clients=4,scale=100)      sends its update as trained, and -scale times what it sends beside (SCAFFOLD's c)
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayps.core.errors import ConfigError
from rayps.core.spelling import near
from rayps.core.text import form, nested

_REQUIRED = object()
_RULES: dict[str, dict[str, Any]] = {
    "mean": {},
    "krum": {"f": _REQUIRED, "bucket": 1},
    "multi_krum": {"f": _REQUIRED, "m": None, "bucket": 1},
    "trimmed_mean": {"f": _REQUIRED, "bucket": 1},
    "median": {"bucket": 1},
    "geometric_median": {"iterations": 100, "bucket": 1},
    "bulyan": {"f": _REQUIRED, "bucket": 1},
    "centered_clipping": {"tau": 1.0, "iterations": 3, "bucket": 1},
}
RULES = tuple(_RULES)
_ATTACKS: dict[str, dict[str, Any]] = {
    "sign_flip": {"scale": 1.0},
    "gaussian": {"sd": 1.0},
    "label_flip": {"classes": None},
    "alie": {"z": None},
    "inner_product": {"eps": 1.0},
    "nan": {},
    "inflated_counts": {"factor": 100.0},
    "false_buffers": {"scale": 1e6},
    "false_c": {"scale": 100.0},
}
_WHOLE = {"f": 0, "m": 1, "bucket": 1, "iterations": 1, "clients": 1, "classes": 2}  # and the least that makes sense
SKEWED = 0.35  # of `skew`: dealt evenly, ten clients' worth of rows a label stay far below


@dataclass(frozen=True, slots=True)
class RuleSpec:
    """An aggregation rule as it was asked for."""

    name: str = "mean"
    f: int = 0
    m: int | None = None
    tau: float = 1.0
    iterations: int = 1
    bucket: int = 1

    def __str__(self) -> str:
        shown = {key: getattr(self, key) for key in _RULES[self.name] if key != "bucket" or self.bucket > 1}
        return _shown(self.name, {key: value for key, value in shown.items() if value is not None})

    @property
    def robust(self) -> bool:
        """Whether it needs all replies of a round at once, and counts each once."""
        return self.name != "mean"

    @property
    def selects(self) -> bool:
        """Whether it chooses some of the clients by their updates, and takes nothing of the others."""
        return self.name in ("krum", "multi_krum", "bulyan")

    @property
    def least(self) -> int:
        """The fewest replies of a round that it can work with."""
        rows = {
            "krum": 2 * self.f + 3,
            "multi_krum": max(2 * self.f + 3, self.f + (self.m or 1)),
            "trimmed_mean": 2 * self.f + 1,
            "bulyan": 4 * self.f + 3,
        }.get(self.name, 1)
        return (rows - 1) * self.bucket + 1

    def bears(self, replies: int) -> int:
        """How many attackers among so many replies it is made for."""
        if not self.robust or replies < self.least:
            return 0
        return self.f if "f" in _RULES[self.name] else (-(-replies // self.bucket) - 1) // 2

    def lacking(self, replies: int) -> str | None:
        """Why a round with so many replies is skipped, and leaves the model unchanged; None if it is not."""
        if replies >= self.least:
            return None
        if not replies:
            return "no reply came"
        return f"{self} needs {self.least} replies ({self._guard()}), {replies} came"

    def check(self, cohort: int, attack: AttackSpec | None = None) -> None:
        """Whether a cohort of so many clients can be borne, should all of them reply.

        Raises:
            ConfigError: it cannot, or more attackers may be among them than the rule is made for.
        """
        if cohort < self.least:
            raise ConfigError(
                f"{self} needs a round of at least {self.least} replies ({self._guard()}), and a round asks {cohort}\n"
                f"{'bear fewer attackers' if self.f else 'ask more clients'}, or raise fraction",
                field="rule",
                needed=self.least,
                cohort=cohort,
            )
        if self.robust and attack is not None and min(attack.clients, cohort) > self.bears(cohort):
            raise ConfigError(
                f"up to {min(attack.clients, cohort)} of a round's {cohort} replies come from attackers, and {self} "
                f"bears {self.bears(cohort)}",
                field="rule",
                attackers=attack.clients,
                bears=self.bears(cohort),
            )

    def doubt(self, cohort: int, replies: float) -> str | None:
        """A warning where fewer replies are to be expected than the rule needs; None where enough come."""
        if replies >= self.least:
            return None
        return (
            f"of {cohort} clients {replies:.3g} are expected to reply in a round, and {self} needs {self.least} "
            f"({self._guard()}): rounds with fewer are skipped and leave the model unchanged"
        )

    def warning(self, skew: float | None = None) -> str | None:
        """What it costs where clients' data differ by `skew` (see there; None: not known); None for the mean."""
        if not self.robust or (skew is not None and skew < SKEWED):
            return None
        told = "where clients' data differ" if skew is None else f"clients' labels differ (by {skew:.2f} of 1), and"
        cost = {
            "krum": "takes over one client's update in each round: with two labels a client it hardly learns "
            "(buckets help, inside of its parentheses: krum(f=1,bucket=2))",
            "bulyan": "drops the clients that differ most, attackers or not",
            "median": "drops what few clients know: rare labels may never be learnt",
            "trimmed_mean": "drops what few clients know",
            "geometric_median": "gives clients that differ most the least weight",
            "centered_clipping": "learns slowly where its tau is below the updates' norms",
            "multi_krum": "drops the clients that differ most, attackers or not",
        }[self.name]
        return (
            f"{told} {self} costs accuracy even without an attacker: it {cost}; bear fewer attackers, or try "
            "centered_clipping or geometric_median, which cost least where that was measured"
        )

    def _guard(self) -> str:
        guard = {
            "krum": "2f + 2 < n",
            "multi_krum": "2f + 2 < n and m <= n - f",
            "trimmed_mean": "2f < n",
            "bulyan": "n >= 4f + 3",
        }.get(self.name, "n >= 1")
        return guard if self.bucket == 1 else f"{guard} with n = replies / {self.bucket}"


@dataclass(frozen=True, slots=True)
class AttackSpec:
    """What some of the clients do to spoil the model."""

    name: str
    clients: int
    scale: float = 1.0
    sd: float = 1.0
    classes: int | None = None
    z: float | None = None
    eps: float = 1.0
    factor: float = 1.0

    def __str__(self) -> str:
        shown = {key: getattr(self, key) for key in ("clients", *_ATTACKS[self.name])}
        return _shown(self.name, {key: value for key, value in shown.items() if value is not None})

    @property
    def omniscient(self) -> bool:
        """Whether attackers see the honest updates of the round before they send theirs."""
        return self.name in ("alie", "inner_product")

    @property
    def flips_labels(self) -> bool:
        """Whether attackers train as all do, on wrong labels."""
        return self.name == "label_flip"

    def labels(self, y: Any) -> Any:
        """The labels that an attacker learns in place of `y`."""
        return y if self.classes is None else self.classes - 1 - y

    def settled(self, labels: Sequence[str] | None) -> AttackSpec:
        """The same for data with labels of these names: how many classes there are, where it was not said.

        Raises:
            ConfigError: they are no classes (None), so that it has to be said.
        """
        if not self.flips_labels or self.classes is not None:
            return self
        try:
            found = sorted(int(name) for name in labels or ())
        except ValueError:
            found = []
        if not found:
            raise ConfigError(
                f"{self} has to know how many classes there are, and this data's labels do not tell: write "
                f"label_flip(clients={self.clients},classes=10)",
                field="attack",
            )
        return replace(self, classes=found[0] + found[-1] + 1)  # the first becomes the last, also where it is not 0

    def check(self, clients: int) -> None:
        """Raises ConfigError: so many clients leave no honest one."""
        if self.clients >= clients:
            raise ConfigError(
                f"{self}: {self.clients} attackers of {clients} clients leave no honest one", field="attack"
            )

    def attackers(self, seed: int, clients: int) -> frozenset[int]:
        """Which of the clients 0, 1, ... attack: a function of the seed alone."""
        return frozenset(random.Random(f"attackers of {seed}").sample(range(clients), self.clients))


def rule_of(given: Any) -> RuleSpec:
    """A rule from its text or its wire form. Raises ConfigError."""
    found = _read("rule", "mean" if given is None else given, _RULES)
    return RuleSpec(**{key: value for key, value in found.items() if key in RuleSpec.__slots__})


def attack_of(given: Any) -> AttackSpec | None:
    """An attack from its text or its wire form; None as it is. Raises ConfigError."""
    if given is None:
        return None
    known = {name: {"clients": _REQUIRED, **options} for name, options in _ATTACKS.items()}
    return AttackSpec(**_read("attack", given, known))


def clip_of(given: Any) -> float | None:
    """The norm that an update is clipped to. Raises ConfigError."""
    if given is not None and (not _is_number(given) or given <= 0):
        raise ConfigError(f"clip is {given!r}: give the largest norm of an update, above 0, or none", field="clip")
    return None if given is None else float(given)


def skew(counts: Sequence[Sequence[int]]) -> float:
    """How far the clients' labels lie apart: the mean over clients of the total variation distance to all data's.

    `counts` [clients][labels]. 0: all alike; near 1: each client has labels of its own.
    """
    whole = [sum(column) for column in zip(*counts, strict=True)]
    everyone = sum(whole)
    sums = [(row, sum(row)) for row in counts if sum(row)]
    if not sums:
        return 0.0
    apart = [sum(abs(a / n - b / everyone) for a, b in zip(row, whole, strict=True)) / 2 for row, n in sums]
    return float(sum(apart) / len(apart))


def _read(field: str, given: Any, known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Text or a mapping with every option of its form, numbers checked."""
    if not isinstance(given, (str, Mapping)):
        raise ConfigError(f"{field} is {given!r}: give text such as {_example(known)}", field=field)
    spec = form(given) if isinstance(given, str) else dict(given)
    name = spec.pop("name", None)
    if name not in known:
        shown = given if isinstance(given, str) else nested(dict(given))
        raise ConfigError(
            f"{field} is {shown!r}{near(name, known)}: give one of {', '.join(known)}, as in {_example(known)}",
            field=field,
        )
    options = known[name]
    for key, value in spec.items():
        if key not in options:
            raise ConfigError(
                f"{field}: {name} has no option {key!r}{near(key, options)}; it has {', '.join(options) or 'none'}",
                field=field,
            )
        _check(field, f"{name}'s {key}", key, value, options[key] is None)
    missing = [key for key, value in options.items() if value is _REQUIRED and key not in spec]
    if missing:
        what = "how many of a round's replies may come from attackers" if missing[0] == "f" else "how many attack"
        raise ConfigError(f"{field}: {name} has to know {what}: {name}({missing[0]}=4)", field=field)
    return {"name": name, **options, **spec}


def _check(field: str, what: str, key: str, value: Any, free: bool) -> None:
    if value is None and free:
        return
    least = _WHOLE.get(key)
    if least is not None:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{field}: {what} is {value!r}: give a whole number of at least {least}", field=field)
    elif not _is_number(value) or (value <= 0 and key != "z"):
        raise ConfigError(f"{field}: {what} is {value!r}: give a number above 0", field=field)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def inside(option: str) -> str | None:
    """How an option of a rule or an attack is written where it belongs; None: it is none of theirs."""
    rules = {
        "f": "krum(f=1)",
        "bucket": "trimmed_mean(f=1,bucket=2)",
        "m": "multi_krum(f=1,m=3)",
        "tau": "centered_clipping(tau=1)",
        "iterations": "geometric_median(iterations=100)",
    }
    if option in rules:
        return f"rule={rules[option]}"
    found = next((name for name, options in _ATTACKS.items() if option in options), None)
    return None if found is None else f"attack={found}(clients=1,{option}=2)"


def _example(known: dict[str, dict[str, Any]]) -> str:
    return "krum(f=4)" if "krum" in known else "sign_flip(clients=4,scale=5)"


def _shown(name: str, options: dict[str, Any]) -> str:
    inside = ",".join(f"{key}={value:g}" for key, value in options.items())
    return f"{name}({inside})" if inside else name
