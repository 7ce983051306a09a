"""Types of values that many modules exchange (JSON data, byte buffers), and two checks of values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
JsonObject: TypeAlias = dict[str, Json]
Keywords: TypeAlias = dict[str, Any]  # from an argument's name to its value; the called function checks the types
Buffer: TypeAlias = bytes | bytearray | memoryview  # contiguous memory; of a numpy array: `array.data`


def is_number(value: Json) -> TypeGuard[float]:
    """Return whether `value` is a finite number; True and False are not numbers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_json(value: Any) -> bool:
    """Return whether JSON can hold `value`. JSON cannot hold NaN, infinity, or objects of other classes."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
