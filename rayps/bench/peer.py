"""Peers of a benchmark that only a checkout has: classes of `benchmarks/`, which the wheel does not carry."""

from __future__ import annotations

import importlib
from typing import Any

from rayps.core.errors import ConfigError


def peer(name: str, *args: Any) -> Any:
    """An object of `benchmarks`' class `name` ("module:Class"), made with `args`. Raises ConfigError outside of a
    checkout."""
    module, _, kind = name.partition(":")
    try:
        return getattr(importlib.import_module(f"benchmarks.{module}"), kind)(*args)
    except ModuleNotFoundError as error:
        if error.name not in ("benchmarks", f"benchmarks.{module}"):
            raise
        raise ConfigError(
            f"{module} is measured from a checkout of rayps: run this command in its root folder", contender=module
        ) from error
