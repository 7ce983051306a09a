"""Types of values that many modules exchange: JSON data and byte buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
JsonObject: TypeAlias = dict[str, Json]
Keywords: TypeAlias = dict[str, Any]  # arguments by name, for a call that types and checks them itself
Buffer: TypeAlias = bytes | bytearray | memoryview  # contiguous memory; of a numpy array: `array.data`
