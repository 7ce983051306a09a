"""The parameters of a workload: which fields of its class can be set, the check of values, and the creation. Pure.

A parameter is a public class attribute with a default, in the user's class or in any class above it:

    class Digits(rayps.Workload):
        lr: float = 0.1
        layers: list[int] = [64, 32]
        activation: Literal["relu", "tanh"] = "relu"
        dropout = 0.0                       # without an annotation, the type of the default: int, float, str or bool

An annotated type is int, float, str, bool, None, Literal, Optional or a union of these, a list or tuple of these, or a
mapping from text to these (dict or Mapping) or to any JSON data (`rayps_client.values.Json`).
A dataclass's parameters are its fields. The fields of `rayps.Workload`, such as `clip_norm` and `compile`, are
parameters too.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from rayps_client.errors import ConfigError
from rayps_client.values import Json, JsonObject, is_json

W = TypeVar("W")
_SCALARS = (int, float, str, bool)
_MAPPINGS = (dict, Mapping)  # origins of the types of mappings
_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: its name, its type as `typing` writes it, and its default (`REQUIRED` if it has none)."""

    name: str
    type: Any
    default: Any

    @property
    def required(self) -> bool:
        """Whether a value must be given: a field of a dataclass without a default."""
        return self.default is REQUIRED


class _Required:
    def __repr__(self) -> str:
        return "no default"


REQUIRED = _Required()


class _Refused(Exception):
    """A value does not have the type. The text says what is expected."""


def declared(kind: type) -> dict[str, Parameter]:
    """Return the parameters that a workload's class declares, by name, those of its base classes first."""
    found: dict[str, Parameter] = {}
    hints: dict[str, Any] = {}
    for each in reversed(kind.__mro__):
        hints |= {name: hint for name, hint in _hints(each).items() if not name.startswith("_")}
        fields = {field.name: field for field in dataclasses.fields(each)} if _own_fields(each) else {}
        for name in dict.fromkeys([*fields, *vars(each)]):
            if name.startswith("_"):
                continue
            default = _default(each, name, fields)
            found.pop(name, None)
            if name in fields and not fields[name].init:
                continue
            hint = hints.get(name, type(default) if type(default) in _SCALARS else None)
            if hint is not None and _supported(hint) and (default is REQUIRED or _plain(default)):
                found[name] = Parameter(name, hint, default)
    return found


def checked(kind: type, given: Mapping[str, Json]) -> dict[str, Any]:
    """Return the values of `given` in the types that the class `kind` declares; an int becomes a float for a float.

    Raises:
        ConfigError: a name is no parameter of the class, or a value does not have the type of its parameter. The
            error's `field` is "params.NAME".

    Example:
        checked(Digits, {"lr": 1})     # {"lr": 1.0}
    """
    known = declared(kind)
    values = {}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(_unknown(kind, str(name), known), field=f"params.{name}")
        parameter = known[name]
        try:
            values[name] = _converted(parameter.type, value)
        except _Refused as expected:
            default = "" if parameter.required else f", e.g. {shown(parameter.default)}"
            raise ConfigError(
                f"params.{name} is {shown(value)} ({_kind_of(value)}), and {kind.__name__}.{name} is "
                f"{_written(parameter.type)}: give {expected}{default if parameter.default is not None else ''}",
                field=f"params.{name}",
            ) from None
    return values


def create(kind: type[W], given: Mapping[str, Json]) -> W:
    """Return a new object of the class with these parameters, which `__init__` sees already.

    An argument of `__init__` with the name of a parameter gets its value; the other parameters are attributes of the
    object before `__init__` runs.

    Raises:
        ConfigError: a value is refused by `checked`, or `__init__` replaces a value that was given.
    """
    values = checked(kind, given)
    takes = _arguments(kind)
    made = kind.__new__(kind)
    before = {name: value for name, value in values.items() if name not in takes}
    for name, value in before.items():
        object.__setattr__(made, name, value)
    kind.__init__(made, **{name: value for name, value in values.items() if name in takes})
    for name, value in values.items():
        now = getattr(made, name, REQUIRED)
        if not _same(now, value):
            raise ConfigError(
                f"params.{name} is {shown(value)}, and __init__ of {kind.__name__} replaces it by {shown(now)}: "
                f"read self.{name} there, and give what is computed from it another name",
                field=f"params.{name}",
            )
    return made


def effective(workload: object) -> JsonObject:
    """Return all parameters of a workload as JSON data, by name: those that were given, and the others' defaults.

    A value that JSON cannot hold, such as infinity, is its text.
    """
    return {name: _json(getattr(workload, name, None)) for name in declared(type(workload))}


def differing(workload: object, base: type) -> JsonObject:
    """Return the parameters that the user's classes declare, and those of `base` whose value is not its default."""
    theirs, values = declared(base), effective(workload)
    return {
        name: value for name, value in values.items() if name not in theirs or not _same(theirs[name].default, value)
    }


def shown(value: object) -> str:
    """Return a value as short text for a message."""
    text = {True: "true", False: "false", None: "null"}[value] if isinstance(value, (bool, type(None))) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---------------------------------------------------------------------------------------------- the class


def _hints(kind: type) -> dict[str, Any]:
    """Return the annotations of one class, as types. One that cannot be evaluated is None, and is no parameter."""
    module = sys.modules.get(kind.__module__)
    scope = {**vars(typing), **(vars(module) if module is not None else {})}
    found: dict[str, Any] = {}
    for name, hint in inspect.get_annotations(kind).items():
        found[name] = hint
        if isinstance(hint, str):
            try:
                found[name] = eval(hint, scope, dict(vars(kind)))
            except Exception:  # such as a name that is imported for type checkers only
                found[name] = None
    return found


def _own_fields(kind: type) -> bool:
    return "__dataclass_fields__" in vars(kind)


def _default(kind: type, name: str, fields: Mapping[str, dataclasses.Field[Any]]) -> Any:
    field = fields.get(name)
    if field is None:
        return vars(kind)[name]
    if field.default is not dataclasses.MISSING:
        return field.default
    return REQUIRED if field.default_factory is dataclasses.MISSING else field.default_factory()


def _arguments(kind: type) -> set[str]:
    """Return the names that `__init__` takes as keywords."""
    try:
        found = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return set()
    return {each.name for each in found if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}


def _plain(value: Any) -> bool:
    """Return whether a default is data: a number, text, true, false, None, or a list, tuple or mapping of these."""
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _plain(each) for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return all(_plain(each) for each in value)
    return value is None or isinstance(value, _SCALARS)


def _unknown(kind: type, name: str, known: Mapping[str, Parameter]) -> str:
    what = f"{kind.__name__} has no parameter {name!r}"
    if name.startswith("_"):
        return f"{what}: a private name cannot be set"
    held = inspect.getattr_static(kind, name, REQUIRED)
    if callable(held) or isinstance(held, (staticmethod, classmethod, property)):
        return f"{what}: {name} is a {'property' if isinstance(held, property) else 'method'}, and only fields are set"
    hint = next((hints[name] for each in kind.__mro__ if name in (hints := _hints(each))), None)
    if hint is not None and held is not REQUIRED:
        return (
            f"{what}: its type {_written(hint)} cannot be set, only int, float, str, bool, Literal, Optional, and "
            "lists, tuples and mappings of these"
        )
    if held is not REQUIRED:
        return f"{what}: annotate the field, e.g. `{name}: list[int] = ...`"
    if name in _arguments(kind) or hint is not None:
        return f"{what}: give the class a field with a default, e.g. `{name}: float = 0.1`"
    near = difflib.get_close_matches(name, known, 1)
    return f"{what}: " + (f"did you mean {near[0]!r}?" if near else f"its parameters are {', '.join(known)}")


# ---------------------------------------------------------------------------------------------- types and values


def _supported(hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if hint in _SCALARS or hint is None or hint is type(None) or origin is Literal or hint == Json:
        return True
    if origin in (Union, types.UnionType):
        return all(_supported(each) for each in inner)
    if origin is Annotated:
        return _supported(inner[0])
    if origin in _MAPPINGS:
        return inner[0] is str and _supported(inner[1])
    return origin in (list, tuple) and all(each is Ellipsis or _supported(each) for each in inner)


def _converted(hint: Any, value: Json) -> Any:
    """Return `value` in the type `hint`, or raise _Refused."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint == Json:
        if not is_json(value):
            raise _Refused(_expected(hint))
        return value
    if origin in (Union, types.UnionType):
        return _of_union(inner, value)
    if origin is Annotated:
        return _converted(inner[0], value)
    if origin is Literal:
        return _of_literal(inner, value)
    if origin in _MAPPINGS:
        return _of_mapping(hint, inner[1], value)
    if origin in (list, tuple):
        return _of_sequence(origin, inner, value)
    kind = type(None) if hint is None else hint
    if kind is float and type(value) is int:
        return _as_float(value)
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        raise _Refused(_expected(hint))
    return value


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise _Refused("a number below 1.8e308") from None


def _of_union(inner: Sequence[Any], value: Json) -> Any:
    found = []
    for each in inner:
        try:
            found.append(_converted(each, value))
        except _Refused:
            continue
    if not found:
        raise _Refused(" or ".join(_expected(each) for each in inner))
    return next((each for each in found if type(each) is type(value)), found[0])  # 3 stays an int in `float | int`


def _of_literal(inner: Sequence[Any], value: Json) -> Any:
    for each in inner:
        if type(each) is type(value) and each == value:
            return each
    raise _Refused(_expected(Literal[tuple(inner)]))


def _of_sequence(kind: Callable[[list[Any]], Any], inner: Sequence[Any], value: Json) -> Any:
    whole = tuple[inner] if kind is tuple else list[inner]  # type: ignore[valid-type]
    if not isinstance(value, (list, tuple)):
        raise _Refused(_expected(whole))
    repeated = kind is list or (len(inner) == 2 and inner[1] is Ellipsis)
    kinds = [inner[0]] * len(value) if repeated else list(inner)
    if len(kinds) != len(value):
        raise _Refused(_expected(whole))
    try:
        return kind([_converted(each, item) for each, item in zip(kinds, value, strict=True)])
    except _Refused:
        raise _Refused(_expected(whole)) from None


def _of_mapping(hint: Any, inner: Any, value: Json) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise _Refused(_expected(hint))
    try:
        return {name: _converted(inner, each) for name, each in value.items()}
    except _Refused:
        raise _Refused(_expected(hint)) from None


def _expected(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if hint == Json:
        return "any JSON data"
    if origin is Literal:
        return f"one of {', '.join(shown(each) for each in inner)}"
    if origin in (Union, types.UnionType):
        return " or ".join(_expected(each) for each in inner)
    if origin is Annotated:
        return _expected(inner[0])
    if origin is list or (origin is tuple and inner[1:] == (Ellipsis,)):
        return f"a list, each item {_expected(inner[0])}"
    if origin in _MAPPINGS:
        return f"a mapping, each value {_expected(inner[1])}"
    if origin is tuple:
        return f"a list of {len(inner)} items: {', '.join(_expected(each) for each in inner)}"
    return _NAMES[type(None) if hint is None else hint]


def _written(hint: Any) -> str:
    if isinstance(hint, type) and get_origin(hint) is None:
        return hint.__name__
    text = str(hint).replace(str(Json), "Json")
    return text.replace("typing.", "").replace("collections.abc.", "")


def _kind_of(value: Json) -> str:
    kinds: dict[type, str] = {
        bool: "a bool",
        int: "an int",
        float: "a float",
        str: "text",
        list: "a list",
        dict: "a mapping",
    }
    return kinds.get(type(value), "null" if value is None else type(value).__name__)


def _same(now: Any, value: Any) -> bool:
    """Return whether two values are the same JSON data; a tuple and a list are, 1 and true are not."""
    return json.dumps(_json(now)) == json.dumps(_json(value))


def _json(value: Any) -> Json:
    if isinstance(value, (list, tuple)):
        return [_json(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): _json(each) for name, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, _SCALARS) else repr(value)
