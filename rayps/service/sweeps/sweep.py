"""A sweep: the jobs that one specification and several values of some names make. Pure; no I/O.

A name of `over` is a field of the job (such as seed, workers, strategy, epochs), or else a parameter of the workload or
an argument of the function. "job.NAME" is always the field and "params.NAME" always the parameter.
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayps_client.errors import ConfigError
from rayps_client.values import Json, JsonObject

from rayps.core.job.job_fields import FIELDS
from rayps.core.refusals.of_jobs import NOT_IN_LOOPS
from rayps.core.strategy.text import write_strategy

MOST_JOBS = 200  # jobs of one sweep
NAME = r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,62}[A-Za-z0-9])?$"
_ONE = "a sweep has one workload or function: start a sweep for each, and compare them"
_FIXED = {  # fields that a sweep cannot vary, and what to do instead
    "params": "give the parameter's own name, e.g. lr",
    "env": "the jobs are named after their values, and those of variables are not shown: give a parameter",
    "name": "the jobs of a sweep are named after their values",
    "workload": _ONE,
    "run": _ONE,
    "working_dir": _ONE,
    "code": _ONE,
}
_LABEL = 64  # most characters of a job's name


@dataclass(frozen=True, slots=True)
class SweepJob:
    """One job of a sweep: its fields as JSON data, its params among them, and a label such as "lr=0.1 seed=0"."""

    fields: JsonObject
    label: str


def make_sweep_jobs(job: Mapping[str, Json], over: Mapping[str, Sequence[Json]]) -> list[SweepJob]:
    """Return the cross product: one job for each combination of values; the values of the last name vary fastest.

    Raises:
        ConfigError: a name has no values, one value twice, or cannot be varied, or there are too many jobs.

    Example:
        sweep_jobs({"workload": "digits:Digits"}, {"lr": [0.1, 0.3], "seed": [0, 1]})     # four jobs
    """
    if not over:
        raise ConfigError("a sweep needs at least one name with values, e.g. lr=[0.1, 0.3]", field="over")
    places = {name: _find_place(name) for name in over}
    if len(set(places.values())) < len(places):
        raise ConfigError(f"over has one name twice: {', '.join(over)}", field="over")
    for name, values in over.items():
        _check_values(name, values)
        if name in NOT_IN_LOOPS and job.get("run") is not None:
            raise ConfigError(
                f"over has {name!r}, and a function with a loop of its own has no such field of a job: write "
                f"params.{name} for the function's argument {name!r}, as in --over params.{name}=...",
                field="over",
            )
    count = 1
    for values in over.values():
        count *= len(values)
    if count > MOST_JOBS:
        raise ConfigError(f"the sweep has {count} jobs: give at most {MOST_JOBS}", field="over")
    return [
        _make_job(job, {places[name]: value for name, value in zip(over, combination, strict=True)})
        for combination in itertools.product(*over.values())
    ]


def find_bare_fields(over: Mapping[str, Sequence[Json]]) -> list[str]:
    """Return the names that mean fields of the job although a parameter may have the same name."""
    return [name for name in over if name in FIELDS]


def explain_ambiguous(name: str) -> ConfigError:
    """Return the error for a name that is a field of the job and a parameter of its workload or function."""
    return ConfigError(
        f"{name!r} is a field of the job and a parameter of its workload or function: write params.{name} for the "
        f"parameter, or job.{name} for the field",
        field="over",
    )


def check_name(name: str) -> str:
    """Return the name of a sweep. Raises ConfigError if it cannot stand in an address."""
    if not re.fullmatch(NAME, name):
        raise ConfigError(
            f"the sweep's name is {name!r}: give at most 64 letters (A-Z, a-z), digits and _ . -, with a letter or "
            "digit first and last",
            field="name",
        )
    return name


def _find_place(name: str) -> tuple[str, str]:
    """Return whether a name means a field ("job") or a parameter ("params"), and its own name."""
    kind, dot, rest = name.partition(".")
    if dot and kind == "job" and rest not in FIELDS:
        near = difflib.get_close_matches(rest, FIELDS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"the fields are {', '.join(sorted(FIELDS))}"
        raise ConfigError(f"over has {name!r}, and a job has no field {rest!r}: {hint}", field="over")
    if dot and kind not in ("job", "params"):
        raise ConfigError(f"over has {name!r}: write params.NAME, job.NAME, or a name without a dot", field="over")
    found = (kind, rest) if dot else ("job" if name in FIELDS else "params", name)
    if found[0] == "job" and found[1] in _FIXED:
        raise ConfigError(f"a sweep cannot vary {found[1]!r}: {_FIXED[found[1]]}", field="over")
    return found


def _check_values(name: str, values: Sequence[Json]) -> None:
    if not isinstance(values, (list, tuple)) or not values:
        raise ConfigError(f"over has {name}={values!r}: give a list of at least one value", field="over")
    for number, value in enumerate(values):
        if any(value == other and type(value) is type(other) for other in values[:number]):
            raise ConfigError(f"over has {name}={value!r} twice: give each value once", field="over")


def _make_job(job: Mapping[str, Json], chosen: Mapping[tuple[str, str], Json]) -> SweepJob:
    given = job.get("params") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f'params is {given!r}: give names with values, e.g. {{"lr": 0.1}}', field="params")
    params = dict(given) | {name: value for (kind, name), value in chosen.items() if kind == "params"}
    fields = {name: value for (kind, name), value in chosen.items() if kind == "job"}
    label = " ".join(f"{name}={_shorten(value)}" for (_, name), value in chosen.items())
    return SweepJob({**job, **fields, "params": params}, label)


def _shorten(value: Json) -> str:
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, (dict, list)):
        return write_strategy(value) if _is_strategy(value) else json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _is_strategy(value: Json) -> bool:
    """Return whether a value has the wire form of a strategy, or of a list of phases."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(each, dict) and _is_strategy(each.get("strategy")) for each in value)
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("name"), str))


def name_job(base: str, label: str) -> str:
    """Return the name of a job of a sweep: the base name and the label, cut to 64 characters."""
    text = f"{base} {label}"
    return text if len(text) <= _LABEL else f"{text[: _LABEL - 3]}..."
