"""The options of simulated clients: speed, availability, dropout, deadline, attack. The module does not use numpy.

`speed` is the virtual seconds that a client takes per sample: a number (equal for all clients), a list (client k has
entry k modulo the length), or one of
    constant(seconds=0.001)                            equal for all clients
    lognormal(sigma=0.5,median=0.001,jitter=0)         median * exp(sigma z), with a normal z for each client
    uniform(low=0.001,high=0.002,jitter=0)             uniform between low and high, for each client
    trace(file=speeds.csv)                             columns client,seconds; or trace(seconds=(0.001,0.002))
With `jitter`, the seconds are multiplied by exp(jitter z), with a normal z for each client and round.
`available` is when clients are available, one of
    always
    bernoulli(p=0.8,every=60)                          each client with probability p in each round; if no client is
                                                       available, all are drawn again after `every` seconds
    diurnal(share=0.5,day=86400,spread=1)              each client for a share of each day; its start is drawn for each
                                                       client from the first `spread` of the day
    trace(file=there.csv,period=none)                  columns client,on,off in seconds, repeated after `period`; or
                                                       trace(intervals=[[[0, 60]], [[30, 90]]])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rayps_client.errors import ConfigError
from rayps_client.values import Json, JsonObject, is_number

from rayps.core.strategy.text import form, quote
from rayps.federated.population.attack_spec import AttackSpec, attack_of
from rayps.federated.population.option_text import CheckedForm

_SPEEDS: dict[str, JsonObject] = {
    "constant": {"seconds": 0.001},
    "lognormal": {"sigma": 0.5, "median": 0.001, "jitter": 0.0},
    "uniform": {"low": 0.001, "high": 0.002, "jitter": 0.0},
    "trace": {"file": None, "seconds": None},
}
_AVAILABLE: dict[str, JsonObject] = {
    "always": {},
    "bernoulli": {"p": 0.8, "every": 60.0},
    "diurnal": {"share": 0.5, "day": 86400.0, "spread": 1.0},
    "trace": {"file": None, "intervals": None, "period": None},
}
_SHARES = {"p", "share"}  # options whose value is above 0 and up to 1
_POSITIVE = {"median", "low", "high", "every", "day", "period"}
_SPREAD = {"spread"}  # options whose value is from 0 to 1
_LONGEST = 1e9  # seconds (thirty years): in microseconds far below the largest int64


def speed_of(given: Json) -> CheckedForm:
    """Parse the option `speed`. Raises ConfigError if `given` has none of the forms in this module's docstring."""
    if given is None:
        given = "constant"
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        given = {"name": "constant", "seconds": given}
    if isinstance(given, (list, tuple)):
        given = {"name": "trace", "seconds": list(given)}
    found = _read("speed", given, _SPEEDS)
    if found["name"] == "trace":
        _one_of("speed", found, "file", "seconds")
        for value in found["seconds"] or ():
            _number("speed", "seconds", value, least=0.0)
    if found["name"] == "uniform" and found["low"] > found["high"]:
        raise ConfigError(f"speed: low {found['low']:g} is above high {found['high']:g}: swap them", field="speed")
    return found


def available_of(given: Json) -> CheckedForm:
    """Parse the option `available`. Raises ConfigError if `given` has none of the forms in this module's docstring."""
    if given is None:
        given = "always"
    if isinstance(given, (list, tuple)):
        given = {"name": "trace", "intervals": list(given)}
    found = _read("available", given, _AVAILABLE)
    if found["name"] == "trace":
        _one_of("available", found, "file", "intervals")
        if found["intervals"] is not None:
            found["intervals"] = intervals(found["intervals"], found["period"])
    return found


def intervals(given: Iterable[Iterable[Sequence[float]]], period: float | None) -> list[list[tuple[float, float]]]:
    """Check the (on, off) intervals of each client, in seconds, and return the intervals sorted.

    Raises ConfigError if intervals overlap or exceed the period, or if there is no interval.
    """
    checked: list[list[tuple[float, float]]] = []
    for client, each in enumerate(given):
        try:
            pairs = sorted((float(on), float(off)) for on, off in each)
        except (TypeError, ValueError):
            raise ConfigError(
                f"available: the intervals of trace {client} are {each!r}: give a list of (on, off) in seconds",
                field="available",
            ) from None
        end = 0.0
        for on, off in pairs:
            if not end <= on < off <= (_LONGEST if period is None else period):
                raise ConfigError(
                    f"available: trace {client} has the interval from {on:g} to {off:g}: give intervals with on < off "
                    "that do not overlap, one after another, between 0 and "
                    f"{'30 years' if period is None else f'the period {period:g}'}",
                    field="available",
                )
            end = off
        checked.append(pairs)
    if not any(checked):
        raise ConfigError(
            "available: no client of the trace is ever available: give at least one interval", field="available"
        )
    return checked


@dataclass(frozen=True)
class PopulationSpec:
    """The options of the simulated clients: speed, availability, dropout, deadline, attack.

    The options do not depend on the algorithm. Only `deadline` also applies to real clients.

    Args:
        speed, available: one of the forms in this module's docstring.
        dropout: the probability that a client that was asked never replies, from 0 to below 1.
        deadline: seconds after which a round stops waiting for a client, in virtual time for simulated clients and
            in real time for real clients; None means that a round waits for all clients.
        attack: how some of the clients attack the model: one of the forms in `rayps.federated.population.attack_spec`.
    """

    attack: Json = None
    dropout: float = 0.0
    deadline: float | None = None
    speed: Json = None
    available: Json = None

    def __post_init__(self) -> None:
        if not is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise ConfigError(
                f"dropout is {self.dropout!r}: give the probability that a client never replies, from 0 to below 1",
                field="dropout",
            )
        if self.deadline is not None and not (is_number(self.deadline) and 0 < self.deadline <= _LONGEST):
            raise ConfigError(
                f"deadline is {self.deadline!r}: give seconds above 0 and up to {_LONGEST:g}, or none (a round waits "
                "for all clients)",
                field="deadline",
            )
        speed_of(self.speed), available_of(self.available), attack_of(self.attack)

    @property
    def attackers(self) -> AttackSpec | None:
        """The attack, parsed from its text or wire form; None if there are no attackers."""
        return attack_of(self.attack)


def check_fraction(fraction: Json) -> None:
    """Raise ConfigError unless `fraction` is a number above 0 and up to 1."""
    if not is_number(fraction) or not 0 < fraction <= 1:
        raise ConfigError(
            f"fraction is {fraction!r}: give the fraction of the clients that each round asks, above 0 and up to 1",
            field="fraction",
        )


def check_replies(min_replies: int, enough: int | None, over_selection: float) -> None:
    """Check the options on the number of replies.

    Raises ConfigError if an option is invalid, or if a round would always end before it has `min_replies` replies.
    """
    if not is_number(over_selection) or not 0 <= over_selection <= 10:
        raise ConfigError(
            f"over_selection is {over_selection!r}: give a number from 0 to 10, the additional clients to ask as a "
            "fraction of the needed clients (0.3 asks 13 clients if 10 are needed)",
            field="over_selection",
        )
    for field, value, least, free in (("min_replies", min_replies, 0, False), ("enough", enough, 1, True)):
        if value is None and free:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(
                f"{field} is {value!r}: give a whole number of at least {least}" + (", or none" if free else ""),
                field=field,
            )
    if enough is not None and enough < min_replies:
        raise ConfigError(
            f"enough is {enough} and min_replies is {min_replies}: a round ends before it has min_replies replies, "
            "so no round would ever change the model; raise enough, or lower min_replies",
            field="enough",
        )


def _read(field: str, given: Json, known: dict[str, JsonObject]) -> CheckedForm:
    """Parse text or a mapping into one of the `known` forms, with its name and all its options; check the numbers."""
    spec = form(given) if isinstance(given, str) else dict(given) if isinstance(given, Mapping) else {"name": given}
    name = spec.pop("name", None)
    if name not in known:
        forms = ", ".join(
            each + (f"({','.join(f'{key}={_shown(value)}' for key, value in options.items())})" if options else "")
            for each, options in known.items()
        )
        raise ConfigError(f"{field} is {quote(given)}: give one of {forms}", field=field)
    options = known[name]
    for key, value in spec.items():
        if key not in options:
            raise ConfigError(
                f"{field}: {name} has no option {key!r}; its options: {', '.join(options) or 'none'}", field=field
            )
        if key in ("file", "intervals") or (name, key) == ("trace", "seconds") or (key == "period" and value is None):
            continue
        spec[key] = _number(
            field,
            key,
            value,
            least=0.0,
            positive=key in _POSITIVE | _SHARES,
            most=1.0 if key in _SHARES | _SPREAD else _LONGEST,
        )
    return {"name": name, **options, **spec}


def _shown(value: Json) -> str:
    return "..." if value is None else f"{value:g}"


def _one_of(field: str, found: CheckedForm, first: str, second: str) -> None:
    """Raise ConfigError unless a trace has either a file (`first`) or a list (`second`)."""
    if (found[first] is None) == (found[second] is None):
        raise ConfigError(f"{field}: give trace either {first}=... or {second}=..., not both or none", field=field)
    if found[first] is not None and not isinstance(found[first], str):
        raise ConfigError(f"{field}: {first} is {found[first]!r}: give the name of a CSV file", field=field)
    if found[second] is not None and not (isinstance(found[second], (list, tuple)) and found[second]):
        raise ConfigError(
            f"{field}: {second} is {found[second]!r}: give a list with an entry for each client", field=field
        )


def _number(
    field: str, key: str, value: Json, *, least: float, most: float = _LONGEST, positive: bool = False
) -> float:
    if not is_number(value) or not least <= value <= most or (positive and not value):
        raise ConfigError(
            f"{field}: {key} is {value!r}: give a number {'above' if positive else 'of at least'} {least:g} "
            f"and up to {most:g}",
            field=field,
        )
    return float(value)
