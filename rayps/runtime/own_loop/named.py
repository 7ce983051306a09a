"""A function that a user wrote as a loop: found by its name "file.py:train_fn", and called with a run's parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rayps_client.errors import ConfigError, WorkloadError
from rayps_client.values import Json, JsonObject
from rayps_client.workload_name import misnamed_function

from rayps.core.job.user_module import Finder

FINDER = Finder("loop", "loops", "a function")
_KINDS: tuple[type, ...] = (bool, int, float, str)


def load(target: str, working_dir: str | None = None) -> Callable[..., Any]:
    """Return the function that `target` names: "module:train_fn" or "path/file.py:train_fn".

    A path is relative to `working_dir`. The user's files are read again at each call.

    Raises:
        WorkloadError: there is no such function, or its file cannot be imported. The text names the line that failed.
    """
    if (reason := misnamed_function(target)) is not None:
        raise WorkloadError(reason, target=target)
    FINDER.forget()
    return FINDER.find_function(target, working_dir)


def list_arguments(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that a run can give to its function."""
    return list(_find_arguments(function) or ())


def _find_arguments(function: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """Return the arguments that can be given by name; None if they are not known."""
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin: it takes what it takes
        return None
    hidden = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    return {name: p for name, p in found.items() if p.kind not in hidden}


def choose_arguments(function: Callable[..., Any], params: Mapping[str, Json]) -> dict[str, Json]:
    """Return the keyword arguments with which a run calls its function.

    A function without arguments gets none, and reads the parameters by `rayps.params()`.

    Raises:
        ConfigError: the function has no argument of a parameter's name, an argument without default has no value, or a
            value is of another type than the argument's default. The error names the parameter.
    """
    named = _find_arguments(function)
    if named is None:
        return {}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
    if not named and not takes_all:
        return {}
    who = getattr(function, "__name__", "train_fn")
    for name in params:
        if name not in named and not takes_all:
            raise ConfigError(
                f"params has {name!r}, and {who} has no such argument: its arguments are {', '.join(named)}",
                field=f"params.{name}",
            )
    for name, p in named.items():
        if p.default is p.empty and name not in params:
            raise ConfigError(
                f"{who} needs a value for its argument {name!r}: give params={{{name!r}: ...}} (--set {name}=...), or "
                "a default",
                field=f"params.{name}",
            )
        if name in params and not _fits(params[name], p.default):
            raise ConfigError(
                f"params has {name}={params[name]!r}, and the default of {who} is {p.default!r}: give a value of type "
                f"{type(p.default).__name__}",
                field=f"params.{name}",
            )
    return dict(params)


def add_defaults(function: Callable[..., Any], params: Mapping[str, Json]) -> JsonObject:
    """Return the parameters of a run with the defaults of the function's other arguments, if JSON can hold them."""
    defaults = {
        name: p.default
        for name, p in (_find_arguments(function) or {}).items()
        if p.default is None or type(p.default) in _KINDS
    }
    return defaults | dict(params)


def _fits(value: Json, default: Any) -> bool:
    kind = type(default)
    if kind not in _KINDS or default is inspect.Parameter.empty:
        return True
    return type(value) is kind or (kind is float and type(value) is int)
