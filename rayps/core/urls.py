"""Tell URLs from local paths, without torch and fsspec."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeAlias

Location: TypeAlias = Path | str  # a local path, or the URL of a checkpoint or of a place that is not local

_URL = re.compile(r"[a-z][a-z0-9+.-]*://|[a-z][a-z0-9+.-]*::", re.IGNORECASE)


def is_url(given: object) -> bool:
    """Return whether `given` is a text with a protocol, such as "s3://bucket/run"; False for a path."""
    return isinstance(given, str) and _URL.match(given) is not None


def is_web(given: str) -> bool:
    """Return whether a URL, or the one inside of a chain of protocols, is of the web, which cannot be listed."""
    return re.search(r"(^|::)https?://", given, re.IGNORECASE) is not None


def location_of(given: Location) -> Location:
    """Return a path as Path, and a URL as text, without a slash at its end."""
    return given.rstrip("/") if isinstance(given, str) and is_url(given) else Path(given)
