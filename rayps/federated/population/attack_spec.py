"""The options of a simulated attack: how many clients attack, and what they falsify. The module does not use numpy.

`clients` is the number of attackers, which are drawn from the job's seed. An attacker does the following:
    sign_flip(clients=4,scale=1)      sends -scale times its update
    gaussian(clients=4,sd=1)          sends noise
    label_flip(clients=4,classes=none) trains on label `classes` - 1 - y instead of y; by default the data's classes
    alie(clients=4,z=none)            sends mean - z sd of the honest updates; by default the paper's z
    inner_product(clients=4,eps=1)    sends -eps times the mean of the honest updates
    nan(clients=4)                    sends NaN
    inflated_counts(clients=4,factor=100)  reports `factor` times its number of samples
    false_buffers(clients=4,scale=1e6)  sends its update as trained, and its buffers times scale
    false_c(clients=4,scale=100)      sends its update as trained, and -scale times the other vectors (SCAFFOLD's c)
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rayps_client.errors import ConfigError
from rayps_client.values import Json

from rayps.federated.population.option_text import REQUIRED, Option, read, shown

if TYPE_CHECKING:
    from torch import Tensor

_CLIENTS = Option(REQUIRED, 1)
_ATTACKS: dict[str, dict[str, Option]] = {
    "sign_flip": {"clients": _CLIENTS, "scale": Option(1.0)},
    "gaussian": {"clients": _CLIENTS, "sd": Option(1.0)},
    "label_flip": {"clients": _CLIENTS, "classes": Option(None, 2)},
    "alie": {"clients": _CLIENTS, "z": Option(None, signed=True)},
    "inner_product": {"clients": _CLIENTS, "eps": Option(1.0)},
    "nan": {"clients": _CLIENTS},
    "inflated_counts": {"clients": _CLIENTS, "factor": Option(100.0)},
    "false_buffers": {"clients": _CLIENTS, "scale": Option(1e6)},
    "false_c": {"clients": _CLIENTS, "scale": Option(100.0)},
}


@dataclass(frozen=True, slots=True)
class AttackSpec:
    """A simulated attack: its name, the number of attackers, and its options."""

    name: str
    clients: int
    scale: float = 1.0
    sd: float = 1.0
    classes: int | None = None
    z: float | None = None
    eps: float = 1.0
    factor: float = 1.0

    def __str__(self) -> str:
        return shown(self.name, {key: getattr(self, key) for key in _ATTACKS[self.name]})

    @property
    def omniscient(self) -> bool:
        """Whether attackers compute their vector from the honest updates of the round."""
        return self.name in ("alie", "inner_product")

    @property
    def flips_labels(self) -> bool:
        """Whether attackers train on false labels."""
        return self.name == "label_flip"

    def labels(self, y: Tensor) -> Tensor:
        """Return the labels on which an attacker trains instead of `y`."""
        return y if self.classes is None else self.classes - 1 - y

    def with_classes(self, labels: Sequence[str] | None) -> AttackSpec:
        """Return the attack with its number of classes, by default the number of classes in the data's `labels`.

        Raises:
            ConfigError: the number was not given, and the labels are not class numbers.
        """
        if not self.flips_labels or self.classes is not None:
            return self
        try:
            found = sorted(int(name) for name in labels or ())
        except ValueError:
            found = []
        if not found:
            raise ConfigError(
                f"{self} needs the number of classes, which cannot be taken from this data's labels: write "
                f"label_flip(clients={self.clients},classes=10)",
                field="attack",
            )
        # `labels` then maps the first label to the last label, even if the first label is not 0
        return replace(self, classes=found[0] + found[-1] + 1)

    def check(self, clients: int) -> None:
        """Check the number of attackers. Raises ConfigError if all of `clients` clients would be attackers."""
        if self.clients >= clients:
            raise ConfigError(
                f"{self}: {self.clients} attackers of {clients} clients leave no honest client; give fewer attackers",
                field="attack",
            )

    def attackers(self, seed: int, clients: int) -> frozenset[int]:
        """Return the numbers of the attackers among `clients` clients. `seed` determines the draw."""
        return frozenset(random.Random(f"attackers of {seed}").sample(range(clients), self.clients))


def attack_of(given: Json) -> AttackSpec | None:
    """Parse an attack from its text or wire form. Return None for None. Raises ConfigError if `given` is no attack."""
    if given is None:
        return None
    return AttackSpec(**read("attack", given, _ATTACKS, "sign_flip(clients=4,scale=5)"))


def attack_with(option: str) -> str | None:
    """Return an example, as text, of an attack that has this option, or None if no attack has the option."""
    found = next((name for name, options in _ATTACKS.items() if option in options), None)
    return None if found is None else f"{found}(clients=1,{option}=2)"


def skew(counts: Sequence[Sequence[int]]) -> float:
    """Return how much the clients' labels differ: the mean total variation distance to the labels of all data.

    `counts` has the numbers of samples, as [clients][labels]. The result is 0 if all clients have the same distribution
    of labels, and near 1 if no two clients have a label in common.
    """
    whole = [sum(column) for column in zip(*counts, strict=True)]
    everyone = sum(whole)
    sums = [(row, sum(row)) for row in counts if sum(row)]
    if not sums:
        return 0.0
    apart = [sum(abs(a / n - b / everyone) for a, b in zip(row, whole, strict=True)) / 2 for row, n in sums]
    return float(sum(apart) / len(apart))
