"""The metrics of models on one client's own evaluation rows: what a client sends of them, in clear or under masks.

In clear: for each metric the sum over the rows and its weight (the number of rows), or a maximum or minimum. Under
masks only means, as elements of one vector, whose sum over clients is all that the service learns:

    v_1 .. v_K          the means of the job's model, each limited to [-bound, bound]
    u_1 .. u_K, bound   the same of the client's personal model. Only if the job has such models; zeros if the client
                        has none, and the job is private: without noise it then takes no part

All are times the client's weight, min(its rows, max_weight). The vector's norm is at most bound sqrt(its length), so
`Quantiser` never scales it down.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rayps_client.errors import DataError

MEAN, SUM, MAX, MIN = "mean", "sum", "max", "min"
_HOWS = (MEAN, SUM, MAX, MIN)
_MOST_METRICS = 1000
Vector: TypeAlias = NDArray[np.float64]


class OwnTotal(NamedTuple):
    """A metric over a client's rows: of a mean the sum times weights, and the sum of the weights."""

    value: float
    weight: float
    how: str = MEAN

    @property
    def mean(self) -> float:
        """The mean; 0 without weight."""
        return self.value / self.weight if self.weight else 0.0


OwnTotals: TypeAlias = dict[str, OwnTotal]


@dataclass(frozen=True, slots=True)
class OwnMetrics:
    """What a client has found: metrics of the job's model, and of its personal model, which is {} if it has none."""

    rows: int
    shared: OwnTotals
    personal: OwnTotals = field(default_factory=dict)


def encode_metrics(found: OwnMetrics) -> bytes:
    """Return the message of a client in clear."""
    return json.dumps({"rows": found.rows, "shared": found.shared, "personal": found.personal}).encode()


def decode_metrics(raw: bytes) -> OwnMetrics | str:
    """Read what `encode_metrics` returned. Return the reason if the message cannot be used."""
    try:
        facts = json.loads(raw)
        rows = facts["rows"]
        shared, personal = (_totals(facts[key]) for key in ("shared", "personal"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return "its metrics cannot be read"
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
        return f"it reports {rows!r} rows"
    return OwnMetrics(rows, shared, personal)


def _totals(facts: Mapping[str, Sequence[object]]) -> OwnTotals:
    found: OwnTotals = {}
    for name, (value, weight, how) in facts.items():
        if not isinstance(value, (int, float)) or not isinstance(weight, (int, float)) or how not in _HOWS:
            raise ValueError(name)
        if not math.isfinite(value) or not math.isfinite(weight) or weight < 0:
            raise ValueError(name)
        found[str(name)] = OwnTotal(float(value), float(weight), str(how))
    if len(found) > _MOST_METRICS:
        raise ValueError("too many metrics")
    return found


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """What the vector of each client has, in an evaluation under masks or with noise."""

    names: Sequence[str]
    bound: float  # largest absolute value of an element
    personal: bool  # whether the job's clients have personal models

    @property
    def size(self) -> int:
        """The number of elements."""
        return 2 * len(self.names) + 1 if self.personal else len(self.names)


def vector_of(found: OwnMetrics, layout: VectorLayout) -> Vector:
    """Return the vector of a client, before it is multiplied by its weight.

    Raises:
        DataError: the workload here does not compute one of the metrics, or a metric is not finite.
    """
    names, bound = layout.names, layout.bound
    missing = [name for name in names if name not in found.shared]
    values = [found.shared[name].mean for name in names if not missing]
    if missing or not all(map(math.isfinite, values)):
        what = f"has no metric {missing[0]!r}" if missing else "has a metric that is not finite"
        raise DataError(f"the evaluation on this client's rows {what}: the job's model is not evaluated here")
    parts = np.clip(values, -bound, bound)
    if not layout.personal:
        return np.asarray(parts, dtype=np.float64)
    own = [found.personal[name].mean for name in names if name in found.personal]
    there = len(own) == len(names) and all(map(math.isfinite, own))
    more = np.clip(own, -bound, bound) if there else np.zeros(len(names))
    return np.concatenate([parts, more, [bound if there else 0.0]])


def totals_of_sum(total: Vector, weight: int, layout: VectorLayout) -> tuple[OwnTotals, OwnTotals]:
    """Return the totals of the job's model and of the personal models, from the sum of the clients' vectors.

    `total` is the sum of the vectors times the weights, and `weight` the sum of the weights.
    """
    names = layout.names
    shared = {name: OwnTotal(float(total[at]), float(weight)) for at, name in enumerate(names)}
    there = float(total[-1]) / layout.bound if layout.personal else 0.0
    if there <= 0.5:
        return shared, {}
    return shared, {name: OwnTotal(float(total[len(names) + at]), there) for at, name in enumerate(names)}
