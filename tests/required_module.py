"""A module that only some tests need. It is no part of `conftest`, because there are two files of this name."""

import importlib
import os

import pytest


def required(name):
    """The module of this name; without it, skip, or fail where everything is required."""
    try:
        return importlib.import_module(name)
    except ImportError:
        if os.environ.get("RAYPS_REQUIRE_ALL") == "1":
            pytest.fail(f"RAYPS_REQUIRE_ALL=1, and there is no module {name}")
        return pytest.skip(f"there is no module {name}", allow_module_level=True)
