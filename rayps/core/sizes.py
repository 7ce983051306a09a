"""Parse sizes in bytes with units: 512, 10KB, 2.5 GB."""

from __future__ import annotations

import re

from rayps_client.errors import ConfigError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_size(text: str, field: str) -> float:
    """Return the number of bytes that a text such as "2.5 GB" means. Units are powers of 1000.

    Raises:
        ConfigError: the text is not a size. The error names `field`.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"{field} is {text!r}: give bytes, or a size such as 512MB", field=field)
    return float(match[1]) * _UNITS[match[2]]
