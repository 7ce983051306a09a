"""Write the state of a user's data set as JSON data, and read it back. Checkpoints hold no pickles."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import torch
from rayps_client.errors import DataError
from rayps_client.values import Json

_KIND = "__kind__"


def to_json(value: Any) -> Json:
    """Return `value` as JSON data: plain values, lists, tuples, dicts, bytes, tensors and numpy arrays and numbers.

    Raises:
        DataError: a value is of another type.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value  # type: ignore[no-any-return]
    if isinstance(value, np.generic):
        return to_json(value.item())
    if isinstance(value, (list, tuple)):
        items = [to_json(item) for item in value]
        return items if isinstance(value, list) else {_KIND: "tuple", "value": items}
    if isinstance(value, dict):
        return {_KIND: "dict", "value": [[to_json(key), to_json(item)] for key, item in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        return {_KIND: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        return {_KIND: "tensor", "value": _array(value.detach().cpu().numpy())}
    if isinstance(value, np.ndarray) and value.dtype != object:
        return {_KIND: "array", "value": _array(value)}
    raise DataError(
        f"state_dict() of the data set has a {type(value).__name__}, which a checkpoint cannot hold: use plain values, "
        "lists, dicts, bytes and tensors"
    )


def from_json(value: Json) -> Any:
    """Return the value that `to_json` wrote."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    held: Any = value["value"]
    match value[_KIND]:
        case "tuple":
            return tuple(from_json(item) for item in held)
        case "dict":
            return {from_json(key): from_json(item) for key, item in held}
        case "bytes":
            return base64.b64decode(held)
        case "tensor":
            return torch.from_numpy(_loaded(held))
    return _loaded(held)


def _array(value: np.ndarray[Any, Any]) -> str:
    file = io.BytesIO()
    np.save(file, value, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def _loaded(text: str) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return found
