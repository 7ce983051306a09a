"""The numbers of workers that an elastic job may have, and how its batches and learning rate follow them. Pure.

A job with `workers=(2, 8)` starts when 2 workers can run, grows up to 8 where there is room, and shrinks again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from rayps_client.errors import ConfigError
from rayps_client.values import Json, JsonObject

from rayps.core.refusals.table import refuse
from rayps.core.spelling import near

LR_RULES = ("keep", "linear", "sqrt")


@dataclass(frozen=True, slots=True)
class ElasticWorkers:
    """What a job states beside the least number of its workers.

    `global_batch`: the rows of a round over all workers. If it is None, each worker takes `batch_size` rows (times the
    workload's `accumulate`), and the rows of a round grow with the workers. `lr_scaling` says how the learning rate
    then follows the rows of a round, relative to the least number of workers: "keep", "linear" (Goyal et al. 2017), or
    "sqrt" (Krizhevsky 2014).

    `replay` has pairs (round, workers): the job changes its number of workers after exactly these rounds, and at no
    other time. The membership log of an earlier run, given as `replay`, repeats that run.
    """

    most: int
    global_batch: int | None = None
    lr_scaling: str = "keep"
    cooldown: float = 30.0  # seconds between two changes of the number of workers that are not forced
    gain: float = 0.5  # the least part of its own speed that an added worker must add, so that the job grows further
    replay: tuple[tuple[int, int], ...] | None = None
    balance: bool = False  # whether faster workers take more of a round's rows

    def check(self, least: int) -> Self:
        """Return these values. `least` is the job's least number of workers.

        Raises:
            ConfigError: a value is invalid.
        """
        if not _is_whole(self.most) or self.most < least:
            raise ConfigError(
                f"workers is ({least}, {self.most!r}): give the least and the most number of workers, in this order",
                field="workers",
            )
        if self.global_batch is not None and (not _is_whole(self.global_batch) or self.global_batch < self.most):
            raise ConfigError(
                f"global_batch is {self.global_batch!r} and there are up to {self.most} workers: give a whole number "
                f"of rows, at least {self.most}, so that each worker has a row in each round",
                field="global_batch",
            )
        if self.lr_scaling not in LR_RULES:
            raise ConfigError(
                f"lr_scaling is {self.lr_scaling!r}: give one of {', '.join(LR_RULES)}", field="lr_scaling"
            )
        refuse(self.features())
        for name, value, below in (("cooldown", self.cooldown, math.inf), ("gain", self.gain, 1.0)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ConfigError(f"{name} is {value!r}: give a finite number of at least 0", field=name)
            if value > below:
                raise ConfigError(f"{name} is {value!r}: give at most {below:g}", field=name)
        if not isinstance(self.balance, bool):
            raise ConfigError(f"balance is {self.balance!r}: give True or False", field="balance")
        last = -1
        for at, count in self.replay or ():
            if not _is_whole(at) or at <= last or not _is_whole(count) or count < 1:
                raise ConfigError(
                    f"replay has ({at!r}, {count!r}) after round {last}: give pairs (round, workers) with increasing "
                    "rounds",
                    field="replay",
                )
            if count > self.most:
                raise ConfigError(
                    f"replay has {count} workers after round {at}, and workers is ({least}, {self.most}): raise the "
                    "most number of workers",
                    field="replay",
                )
            last = at
        return self

    def features(self) -> dict[str, Json]:
        """Return the options that are given, as `rayps.core.refusals` names them."""
        found: dict[str, Json] = {
            "global_batch": self.global_batch,
            "lr_scaling": None if self.lr_scaling == "keep" else self.lr_scaling,
            "balance": self.balance or None,
            "replay": self.replay,
        }
        return {name: value for name, value in found.items() if value is not None}

    def lr_factor(self, rows: int, reference: int) -> float:
        """Return the factor of the learning rate for rounds of `rows` rows; `reference` rows have the factor 1."""
        ratio = rows / reference
        return {"keep": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.lr_scaling]

    def to_json(self) -> JsonObject:
        """Return the values as JSON data, without those that have their defaults."""
        found: JsonObject = {"most": self.most}
        defaults = ElasticWorkers(self.most)
        for name in ("global_batch", "lr_scaling", "cooldown", "gain", "balance"):
            if getattr(self, name) != getattr(defaults, name):
                found[name] = getattr(self, name)
        if self.replay is not None:
            found["replay"] = [list(pair) for pair in self.replay]
        return found

    @classmethod
    def of(cls, given: Mapping[str, Json]) -> Self:
        """Return the values that `to_json` wrote, or that a user wrote as a mapping. Call `check` next.

        Raises:
            ConfigError: `given` has an unknown name, or lacks `most`.
        """
        known = tuple(cls.__dataclass_fields__)
        for name in given:
            if name not in known:
                raise ConfigError(f"elastic has no field {name!r}{near(name, known)}", field="elastic")
        if "most" not in given:
            raise ConfigError("elastic lacks most, the largest number of workers", field="elastic")
        values: dict[str, Json] = dict(given)
        replay = values.get("replay")
        if replay is not None:
            values["replay"] = _parse_pairs(replay)
        return cls(**values)  # type: ignore[arg-type]


def explain_misplaced(name: object) -> str | None:
    """Return the way out if a job has the field `name` beside `workers` that belongs into `elastic`, else None."""
    if name in ElasticWorkers.__dataclass_fields__:
        return f"a job has no field {name!r} itself: write it into elastic, as in elastic: {{{name}: ...}}"
    return None


def range_of(workers: object) -> tuple[int, int] | None:
    """Return (least, most) if `workers` is a pair, or None if it is one number.

    Raises:
        ConfigError: `workers` is neither.
    """
    if _is_whole(workers):
        return None
    if isinstance(workers, (tuple, list)) and len(workers) == 2 and all(_is_whole(each) for each in workers):
        least, most = workers
        if 1 <= least <= most:
            return least, most
    raise ConfigError(
        f"workers is {workers!r}: give a whole number of at least 1, or the least and the most of an elastic job, such "
        "as (2, 8)",
        field="workers",
    )


def workers_of_text(text: str) -> int | tuple[int, int]:
    """Return the number of workers that the text "4" means, or the range that "2..8" means.

    Raises:
        ConfigError: the text is neither.
    """
    least, dots, most = text.partition("..")
    try:
        found = (int(least), int(most)) if dots else int(least)
    except ValueError:
        raise ConfigError(
            f"workers is {text!r}: give a number such as 4, or the least and the most of an elastic job: 2..8",
            field="workers",
        ) from None
    range_of(found)
    return found


def _parse_pairs(value: Json) -> tuple[tuple[int, int], ...]:
    if not isinstance(value, Sequence) or not all(isinstance(each, Sequence) and len(each) == 2 for each in value):
        raise ConfigError(f"replay is {value!r:.100}: give pairs (round, workers)", field="replay")
    return tuple((each[0], each[1]) for each in value)  # type: ignore[misc, index]


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
