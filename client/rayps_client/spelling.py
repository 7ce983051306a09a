"""Suggest a known name for a misspelt one. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from rayps_client.values import Json


def near(name: Json, known: Iterable[str]) -> str:
    """Return ` (did you mean 'this'?)` if a known name is similar to `name`, else ""."""
    found = difflib.get_close_matches(str(name), list(known), 1)
    return f" (did you mean {found[0]!r}?)" if found else ""
