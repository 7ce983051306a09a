"""What one release discloses, as the accountant needs it: how units are sampled, and how much noise is added. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rayps_client.values import JsonObject, Keywords

from rayps.privacy.noise_shares import NoiseShares
from rayps.privacy.options import ALL, DISTRIBUTED, FIXED, POISSON, TREE

CLIENT, ROW = "client", "row"  # the unit that a release protects
KINDS = (POISSON, FIXED, ALL, TREE, DISTRIBUTED)
NEIGHBOURS = {  # what differs between two data sets that the claim cannot tell apart
    POISSON: "one {unit} is added or removed",
    FIXED: "one {unit} is replaced by another",
    ALL: "one {unit} is replaced by one that adds zeros (that it takes part is not hidden)",
    TREE: "one {unit} is replaced by one that adds zeros (that it takes part is not hidden)",
    DISTRIBUTED: "one {unit} is replaced by one that adds zeros (that it takes part is not hidden)",
}


@dataclass(frozen=True, slots=True)
class Mechanism:
    """How one sum is released: `kind`, the noise, and the sampling of the units that add to the sum.

    `noise_multiplier` is the standard deviation of the noise divided by the clip. `probability` is that with which each
    unit is drawn ("poisson"). `drawn` of `units` units are drawn without replacement ("fixed"). `shares` is the noise
    that the clients add ("distributed"); `noise_multiplier` is then what was asked for, and they add at least so much.
    """

    kind: str
    noise_multiplier: float
    probability: float = 1.0
    units: int = 0
    drawn: int = 0
    shares: NoiseShares | None = None

    def to_wire(self) -> JsonObject:
        """Return the mechanism as JSON-ready data, without the numbers that its kind does not have."""
        own = {POISSON: ("probability",), FIXED: ("units", "drawn"), DISTRIBUTED: ("shares",)}.get(self.kind, ())
        return {name: value for name, value in asdict(self).items() if name in ("kind", "noise_multiplier", *own)}

    @staticmethod
    def from_wire(facts: Keywords) -> Mechanism:
        """Return the mechanism that `to_wire` returned. Raises ValueError if `facts` is something else."""
        try:
            shares = facts.get("shares")
            found = Mechanism(**{**facts, "shares": None if shares is None else NoiseShares(**shares)})
        except TypeError as error:
            raise ValueError(f"no mechanism: {facts}") from error
        if found.kind not in KINDS or not found.noise_multiplier > 0 or (found.kind == DISTRIBUTED) == (shares is None):
            raise ValueError(f"no mechanism: {facts}")
        return found


@dataclass(frozen=True, slots=True)
class Spent:
    """Releases that were made: their number and, for tree noise, the number of releases of each tree."""

    releases: int = 0
    trees: tuple[int, ...] = ()

    def plus(self, releases: int, restart: int | None = None) -> Spent:
        """Return what is spent after `releases` more releases; a tree has at most `restart` releases."""
        trees = list(self.trees)
        for _ in range(releases if restart is not None else 0):
            if not trees or trees[-1] >= (restart or 1):
                trees.append(0)
            trees[-1] += 1
        return Spent(self.releases + releases, tuple(trees))
