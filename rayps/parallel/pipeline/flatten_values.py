"""Turn a value that one layer passes to the next into a flat list of tensors and a description, and back.

The description (`form`) is a text about how the tensors are nested in tuples, lists and dicts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rayps_client.errors import WorkloadError
from rayps_client.values import Json
from torch import Tensor

from rayps.data.base import Nested

ALONE = ""  # the form of a single tensor


def packed(value: Nested, layer: str) -> tuple[list[Tensor], str]:
    """Return the tensors in `value`, the output of `layer`, and its form.

    Raises:
        WorkloadError: the value contains something other than tensors, numbers, strings, None, and tuples, lists and
        dicts of these.
    """
    if isinstance(value, Tensor):
        return [value], ALONE
    found: list[Tensor] = []
    return found, json.dumps(_form(value, found, layer))


def unpacked(tensors: list[Tensor], form: str) -> Nested:
    """Rebuild the value from its tensors and its form."""
    return tensors[0] if form == ALONE else _value(json.loads(form), iter(tensors))


def _form(value: Nested, found: list[Tensor], layer: str) -> Json:
    if isinstance(value, Tensor):
        found.append(value)
        return "t"
    if value is None or (isinstance(value, (bool, int, float, str)) and type(value) in (bool, int, float, str)):
        return [0, value]
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return [1 if type(value) is tuple else 2, *(_form(item, found, layer) for item in value)]
    if isinstance(value, dict) and type(value) is dict and all(isinstance(key, str) for key in value):
        return [3, list(value), *(_form(item, found, layer) for item in value.values())]
    raise WorkloadError(
        f"layer {layer!r} returns a {type(value).__name__}, which cannot be sent to the next stage: return tensors, or "
        "tuples, lists or dicts of them",
        layer=layer,
    )


def _value(form: Any, tensors: Iterator[Tensor]) -> Any:
    if form == "t":
        return next(tensors)
    kind, *rest = form
    if kind == 0:
        return rest[0]
    if kind == 3:
        return {key: _value(item, tensors) for key, item in zip(rest[0], rest[1:], strict=True)}
    items = [_value(item, tensors) for item in rest]
    return tuple(items) if kind == 1 else items
