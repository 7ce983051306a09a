"""What a misspelt name may have been meant to be. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


def near(name: Any, known: Iterable[str]) -> str:
    """` (did you mean 'this'?)` where a known name is like this one; else nothing."""
    found = difflib.get_close_matches(str(name), list(known), 1)
    return f" (did you mean {found[0]!r}?)" if found else ""
