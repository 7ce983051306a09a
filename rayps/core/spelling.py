"""Suggest a known name for a misspelt one: `rayps_client.spelling`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from rayps_client.errors import ConfigError
from rayps_client.spelling import near

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def suggests_names(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Return the function, which refuses an unknown keyword argument with a ConfigError that names the nearest one."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        for name in kwargs:
            if name not in known:
                raise ConfigError(
                    f"{function.__name__}() has no argument {name!r}{near(name, known)}: its arguments are "
                    f"{', '.join(known)}",
                    field=name,
                )
        return function(*args, **kwargs)

    return call


__all__ = ["near", "suggests_names"]
