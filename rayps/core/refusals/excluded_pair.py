"""Two features of a job that do not go together, and how rows of them are written. Pure.

A feature is an option that is given (`backup`), or what follows from options, the model or the data (`slices of
gradients`, `sparse tables`). Also what lacks is a feature (`no shard`): an option that needs another does not go
together with its lack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Flag, auto

from rayps_client.errors import ConfigError
from rayps_client.values import Json


class Door(Flag):
    """Where a job comes in, and what is known of it there."""

    REQUEST = auto()  # a job's fields: of a job file, `rayps submit` and POST /api/v1/jobs
    TRAIN = auto()  # the arguments of `rayps.train`, and the options of `rayps train`
    RUN = auto()  # the check before a run, in which the workload, its data and its model are known


# the features of a job that are given, each with its value, and `strategy`, the strategy's name
Features = Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class ExcludedPair:
    """Two features of a job that exclude each other. `says`, `why` and `way` in a row are the text of the error.

    The names of features in braces stand for their values.
    """

    one: str
    other: str
    says: str
    why: str
    way: str
    field: str  # which option the error names

    def error(self, given: Features) -> ConfigError:
        """Return the error for a job with these features."""
        return ConfigError((self.says + self.why + self.way).format_map(given), field=self.field)


def exclude(one: str, rows: Mapping[str, tuple[str, str, str]], field: str = "") -> Iterator[ExcludedPair]:
    """Yield the pairs of one feature with others; of each others' name: what the error says, why, and the way out."""
    for other, (says, why, way) in rows.items():
        yield ExcludedPair(one, other, says, why, way, field or one)


def exclude_each(
    ones: Iterable[str], other: str, says: str, why: str, way: str, field: str = ""
) -> Iterator[ExcludedPair]:
    """Yield the pairs of several features with one, for one reason. `[it]` stands for the name of the feature."""
    for one in ones:
        begin, reason, end = (part.replace("[it]", one) for part in (says, why, way))
        yield ExcludedPair(one, other, begin, reason, end, field or one)


def leave_out(one: str, what: str, rows: Mapping[str, str]) -> Iterator[ExcludedPair]:
    """Yield pairs of which one may be left out: `one` is called `what`. From the other's name to the reason."""
    for other, why in rows.items():
        says = f"{what} cannot be combined with {other} {{{other}}}: "
        yield ExcludedPair(one, other, says, why, f"; leave out {other}, or {one}", one)
