"""Types of values that many modules exchange: JSON data and byte buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
JsonObject: TypeAlias = dict[str, Json]
Buffer: TypeAlias = bytes | bytearray | memoryview  # contiguous memory; of a numpy array: `array.data`
