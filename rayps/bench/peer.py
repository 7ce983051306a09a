"""Load contenders of a benchmark from `benchmarks/`. A checkout has this folder; an installed wheel does not."""

from __future__ import annotations

import importlib
from typing import Any

from rayps_client.errors import ConfigError


def peer(name: str, *args: Any) -> Any:
    """Make an object of the class `name` ("module:Class") of `benchmarks`.

    Raises ConfigError if `benchmarks` cannot be imported.
    """
    module, _, kind = name.partition(":")
    try:
        return getattr(importlib.import_module(f"benchmarks.{module}"), kind)(*args)
    except ModuleNotFoundError as error:
        if error.name not in ("benchmarks", f"benchmarks.{module}"):
            raise
        raise ConfigError(
            f"the contender {module} needs a checkout of rayps: run this command in its root folder", contender=module
        ) from error
