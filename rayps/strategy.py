"""The catalogue of strategies: find one by name, read it from text, YAML or JSON, write it back.

No torch here, so that the job service can check a strategy without loading any.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

from rayps.errors import ConfigError
from rayps.strategies.all_reduce import AllReduce
from rayps.strategies.base import ShardView, Strategy, WorkerView
from rayps.strategies.hybrid import Hybrid
from rayps.strategies.parameter_server import ParameterServer

__all__ = ["CATALOGUE", "Phase", "ShardView", "Strategy", "WorkerView", "catalogue", "parse", "phase_ends", "wire"]

CATALOGUE: dict[str, type[Strategy]] = {kind.name: kind for kind in (AllReduce, ParameterServer, Hybrid)}


@dataclass(frozen=True, slots=True)
class Phase:
    """A strategy and for how many epochs it runs; None = until the job ends."""

    epochs: int | None
    strategy: Strategy


def parse(given: Any) -> list[Phase]:
    """Read what a user wrote as the phases of a run.

    Accepts a Strategy, the text form `parameter_server:staleness=3,shards=2` (several joined by ` > ` with
    their epochs in front: `2*parameter_server:staleness=none > all_reduce`), the wire form
    `{"name": ..., option: ...}`, and lists of (epochs, strategy) or `{"epochs": n, "strategy": ...}`.

    Raises:
        ConfigError: naming the strategies or options that there are.
    """
    if isinstance(given, str) and ">" in given:
        given = [part.strip() for part in given.split(">")]
    if not isinstance(given, list):
        given = [given]
    if not given:
        raise ConfigError("strategy is an empty list: give at least one of " + _names(), field="strategy")
    phases = [_phase(item) for item in given]
    for phase in phases[:-1]:
        if phase.epochs is None:
            raise ConfigError(
                "only the last strategy of a list may leave out its number of epochs: "
                "write [(2, ParameterServer()), AllReduce()]",
                field="strategy",
            )
    return phases


def wire(phases: list[Phase]) -> Any:
    """The phases as JSON-ready data; one phase without epochs is its strategy alone."""
    if len(phases) == 1 and phases[0].epochs is None:
        return _wire(phases[0].strategy)
    return [{"epochs": phase.epochs, "strategy": _wire(phase.strategy)} for phase in phases]


def catalogue() -> list[dict[str, Any]]:
    """Every strategy by name, with its summary and its options, for help texts and the dashboard."""
    return [
        {
            "name": name,
            "summary": (kind.__doc__ or "").strip().splitlines()[0],
            "options": [{"name": f.name, "type": str(f.type), "default": f.default} for f in _options(kind)],
        }
        for name, kind in CATALOGUE.items()
    ]


def phase_ends(phases: list[Phase], steps_per_epoch: int, *, epochs: int | None, steps: int | None) -> list[int]:
    """The position at which each phase ends.

    Raises:
        ConfigError: the phases' epochs and the job's epochs or steps do not fit together.
    """
    before = sum(phase.epochs or 0 for phase in phases[:-1])
    if steps is not None and phases[-1].epochs is not None:
        raise ConfigError(
            f"the last phase has {phases[-1].epochs} epochs and steps is {steps}: give one of them", field="steps"
        )
    total = steps
    if total is None:
        last = phases[-1].epochs
        if epochs is None:
            epochs = before + (last if last is not None else 1)
        if last is not None and epochs != before + last:
            raise ConfigError(
                f"the phases have {before + last} epochs and epochs is {epochs}: give one of them", field="epochs"
            )
        total = epochs * steps_per_epoch
    ends, at = [], 0
    for phase in phases[:-1]:
        at += (phase.epochs or 0) * steps_per_epoch
        ends.append(at)
    if ends and ends[-1] >= total:
        raise ConfigError(
            f"the phases before the last take {before} epochs = {ends[-1]} rounds, and the job has {total}: "
            "raise epochs",
            field="epochs",
        )
    return [*ends, total]


def _phase(item: Any) -> Phase:
    epochs: int | None = None
    if isinstance(item, tuple) and len(item) == 2:
        epochs, item = item
    elif isinstance(item, dict) and "strategy" in item:
        unknown = set(item) - {"epochs", "strategy"}
        if unknown:
            raise ConfigError(
                f"a phase has no field {sorted(unknown)[0]!r}: write epochs and strategy", field="strategy"
            )
        epochs, item = item.get("epochs"), item["strategy"]
    elif isinstance(item, str) and "*" in item:
        count, item = item.split("*", 1)
        epochs = _value(count)
    if epochs is not None and (isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1):
        raise ConfigError(f"a phase has epochs {epochs!r}: give a whole number of at least 1", field="strategy")
    return Phase(epochs, _strategy(item))


def _strategy(item: Any) -> Strategy:
    if isinstance(item, Strategy):
        return item
    if isinstance(item, str):
        name, _, options = item.strip().partition(":")
        return _build(name, _text_options(options))
    if isinstance(item, dict) and isinstance(item.get("name"), str):
        return _build(item["name"], {key: value for key, value in item.items() if key != "name"})
    raise ConfigError(
        f"strategy {item!r} cannot be read: write a name such as 'all_reduce', or "
        '{"name": "parameter_server", "staleness": 3}',
        field="strategy",
    )


def _build(name: str, options: dict[str, Any]) -> Strategy:
    kind = CATALOGUE.get(name.replace("-", "_"))
    if kind is None:
        near = difflib.get_close_matches(name, CATALOGUE, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(f"there is no strategy {name!r}{hint}: there are {_names()}", field="strategy")
    known = [f.name for f in _options(kind)]
    for key in options:
        if key not in known:
            has = f"its options are {', '.join(known)}" if known else "it has none"
            raise ConfigError(f"strategy {kind.name} has no option {key!r}: {has}", field="strategy")
    return kind(**options)


def _text_options(text: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(
                f"strategy option {part!r} should be key=value, as in parameter_server:staleness=3,shards=2",
                field="strategy",
            )
        options[key.strip()] = _value(value.strip())
    return options


def _value(text: str) -> Any:
    words = {"none": None, "null": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _wire(strategy: Strategy) -> dict[str, Any]:
    name = strategy.name or type(strategy).__name__
    options = {f.name: getattr(strategy, f.name) for f in _options(type(strategy)) if f.default is not None}
    unusual = {f.name: getattr(strategy, f.name) for f in _options(type(strategy)) if f.default is None}
    return {"name": name, **options, **{key: value for key, value in unusual.items() if value is not None}}


def _options(kind: type[Strategy]) -> list[dataclasses.Field[Any]]:
    return list(dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else []


def _names() -> str:
    return ", ".join(CATALOGUE)
