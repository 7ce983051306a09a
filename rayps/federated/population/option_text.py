"""Parse and check options such as `krum(f=4)`, a name with numbers, in text or wire form. The module uses no numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from rayps_client.errors import ConfigError
from rayps_client.values import Json, is_number

from rayps.core.spelling import near
from rayps.core.strategy.text import form, write_nested

REQUIRED = "required"  # the default of an option that must be given

# {"name": ..., OPTION: ..., ...} with all options of the name, and values that `read` has checked
CheckedForm: TypeAlias = dict[str, Any]


class Option(NamedTuple):
    """How a numeric option is checked."""

    default: Json
    least: int | None = None  # the value is a whole number of at least this; None means a number above 0
    signed: bool = False  # whether, without `least`, 0 and negative numbers are allowed too


def read(field: str, given: Json, known: Mapping[str, Mapping[str, Option]], example: str) -> CheckedForm:
    """Parse text or a mapping into a `CheckedForm`.

    `known` is a dict from allowed name to options. `field` and `example` are used in errors.

    Raises:
        ConfigError: the form or a value is invalid. The error names the field, the given value and the allowed values.
    """
    if not isinstance(given, (str, Mapping)):
        raise ConfigError(f"{field} is {given!r}: give text such as {example}", field=field)
    spec = form(given) if isinstance(given, str) else dict(given)
    name = spec.pop("name", None)
    if not isinstance(name, str) or name not in known:
        shown_value = given if isinstance(given, str) else write_nested(dict(given))
        raise ConfigError(
            f"{field} is {shown_value!r}{near(name, known)}: give one of {', '.join(known)}, as in {example}",
            field=field,
        )
    options = known[name]
    for key, value in spec.items():
        if key not in options:
            raise ConfigError(
                f"{field}: {name} has no option {key!r}{near(key, options)}; options: {', '.join(options) or 'none'}",
                field=field,
            )
        _check(field, f"{name}'s {key}", options[key], value)
    missing = [key for key, option in options.items() if option.default is REQUIRED and key not in spec]
    if missing:
        what = (
            "the number of replies of a round that may come from attackers"
            if missing[0] == "f"
            else "the number of attackers"
        )
        raise ConfigError(f"{field}: {name} needs {what}: write {name}({missing[0]}=4)", field=field)
    return {"name": name, **{key: option.default for key, option in options.items()}, **spec}


def shown(name: str, options: Mapping[str, float | None]) -> str:
    """Return the text form of a name with its options, without options that are None."""
    inside = ",".join(f"{key}={value:g}" for key, value in options.items() if value is not None)
    return f"{name}({inside})" if inside else name


def _check(field: str, what: str, option: Option, value: Json) -> None:
    if value is None and option.default is None:
        return
    if option.least is not None:
        if isinstance(value, bool) or not isinstance(value, int) or value < option.least:
            raise ConfigError(
                f"{field}: {what} is {value!r}: give a whole number of at least {option.least}", field=field
            )
    elif not is_number(value) or (value <= 0 and not option.signed):
        expected = "a number" if option.signed else "a number above 0"
        raise ConfigError(f"{field}: {what} is {value!r}: give {expected}", field=field)
