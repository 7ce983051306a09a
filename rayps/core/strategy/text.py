"""Strategies as text: `2*all_reduce:replica=pipeline(stages=4,stage=tensor_parallel(size=2))`. Pure.

A value is a word, a number, `name(option=value,...)`, a list `(2,5)` or a mapping `(layer=split,...)`. `FIRST` has the
names whose first option may omit its key: `krum(4)` is `krum(f=4)`.
"""

from __future__ import annotations

from collections.abc import Mapping

from rayps_client.errors import ConfigError
from rayps_client.values import Json, JsonObject

from rayps.core.spelling import near

DEEPEST = 20  # deepest nesting of parentheses; a strategy needs three
FIRST = {
    "iid": "clients",
    "by_quantity": "clients",
    "shards": "per_client",
    "dirichlet": "alpha",
    "l1": "weight",
    "l2": "weight",
    "sign_flip": "clients",
    "gaussian": "clients",
    "label_flip": "clients",
    "alie": "clients",
    "inner_product": "clients",
    "nan": "clients",
    "inflated_counts": "clients",
    "false_buffers": "clients",
    "false_c": "clients",
}
_WORDS = {"none": None, "null": None, "true": True, "false": False}


def allow_omitted_key(name: str, option: str | None) -> None:
    """Allow `name(4)` for `name(option=4)`. If `option` is None, no key may be omitted."""
    if option is not None:
        FIRST[name] = option


def form(text: str, depth: int = 0) -> JsonObject:
    """Parse `name`, `name:option=value,...` or `name(option=value,...)` into {"name": ..., option: ...}.

    Raises:
        ConfigError: the text has none of these forms.
    """
    text = text.strip()
    opens, colon = text.find("("), text.find(":")
    if opens >= 0 and (colon < 0 or opens < colon):
        name, inside = text[:opens], _read_inside(text, opens, depth)
    else:
        name, _, inside = text.partition(":")
    name = name.strip()
    found: JsonObject = {"name": name}
    for part in _split(inside):
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or "(" in key:
            if len(found) > 1 or name not in FIRST:
                raise _explain_nameless(name, part)
            key, value = FIRST[name], part
        if key in found:
            raise ConfigError(f"strategy option {key!r} is given twice in {_shorten(text)}", field="strategy")
        found[key] = _parse_value(value.strip(), depth)
    return found


def parse_scalar(text: str) -> Json:
    """Convert a word of the text form to None, True, False or a number; return any other word unchanged."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def write_strategy(spec: Json) -> str:
    """Convert a strategy from wire form to text that `rayps.strategies.catalogue.parse` can read."""
    if isinstance(spec, list):
        return " > ".join(
            f"{phase['epochs']}*{write_strategy(phase['strategy'])}"
            if phase.get("epochs")
            else write_strategy(phase["strategy"])
            for phase in spec
        )
    if not isinstance(spec, dict):
        return str(spec)
    options = _write_options({key: value for key, value in spec.items() if key != "name"})
    return f"{spec.get('name')}:{options}" if options else str(spec.get("name"))


def _write_options(options: JsonObject) -> str:
    return ",".join(f"{key}={write_nested(value)}" for key, value in options.items())


def write_nested(value: Json) -> str:
    """Return a value in its text form within options, such as `krum(f=4)`."""
    if isinstance(value, dict):
        return f"{value.get('name', '')}({_write_options({k: v for k, v in value.items() if k != 'name'})})"
    if isinstance(value, (list, tuple)):
        return f"({','.join(map(write_nested, value))})"
    return "none" if value is None else str(value)


def quote(value: object) -> str:
    """Return a value for an error's text: options in wire form as the text that a user writes, others by repr."""
    return repr(write_nested(dict(value))) if isinstance(value, Mapping) else repr(value)


def _explain_nameless(name: str, part: str) -> ConfigError:
    """Return the error for an option without a key."""
    if name in FIRST:
        to = repr(name)
        hint = f"only the first option, {FIRST[name]}, may omit its key; write the others as key=value"
    elif part.isidentifier():
        return ConfigError(
            f"option {_shorten(part)} of {name!r} has no value: write {part}=..., as in parameter_server:staleness=3",
            field="strategy",
        )
    else:
        to = f"{name!r}{near(name, FIRST)}"
        hint = "write its options as key=value, as in parameter_server:staleness=3,shards=2 or krum(f=4)"
    return ConfigError(f"{_shorten(part)} is given to {to} without a key: {hint}", field="strategy")


def _parse_value(text: str, depth: int) -> Json:
    if "(" not in text:
        return parse_scalar(text)
    inside = _read_inside(text, text.find("("), depth)
    if not text.startswith("("):
        return form(text, depth + 1)
    parts = _split(inside)
    if any("=" in part.partition("(")[0] for part in parts):
        return {key: value for key, value in form(f"-({inside})", depth + 1).items() if key != "name"}
    return [_parse_value(part, depth + 1) for part in parts]


def _read_inside(text: str, opens: int, depth: int) -> str:
    """Return the text in the parentheses that begin at `opens` and must end at the end of the text."""
    if depth > DEEPEST:
        raise ConfigError(f"a strategy's parentheses may be nested at most {DEEPEST} deep", field="strategy")
    inside, level = text[opens + 1 : -1], 1
    for letter in inside:
        level += (letter == "(") - (letter == ")")
        if level == 0:
            break
    if not text.endswith(")") or level != 1:
        raise ConfigError(f"the parentheses of {_shorten(text)} do not match", field="strategy")
    return inside


def _split(text: str) -> list[str]:
    """Split at the commas outside of parentheses."""
    parts, level, begin = [], 0, 0
    for at, letter in enumerate(text):
        level += (letter == "(") - (letter == ")")
        if letter == "," and level == 0:
            parts.append(text[begin:at])
            begin = at + 1
    if level:
        raise ConfigError(f"the parentheses of {_shorten(text)} do not match", field="strategy")
    return [part for part in (each.strip() for each in [*parts, text[begin:]]) if part]


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 100 else text[:97] + "...")
