"""The modules of a state that `rayps.save` wrote, as safetensors files that need no rayps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from rayps_client.errors import CheckpointError
from torch import Tensor

from rayps.runtime.own_loop.state import SavedPart
from rayps.runtime.results.saved_model import create_folder

WRAPPED = "model"  # the name of a wrapped model, if the saved state has nothing of this name


def modules_of(part: SavedPart) -> dict[str, dict[str, Tensor]]:
    """Return the modules of rank 0's part of a saved state: parameters and buffers by name, by the module's name.

    A module is each dict of the saved state whose values are tensors, such as a `state_dict()`; its name is its place,
    with dots. A wrapped model is `model`, or `model_0`, `model_1`... if there are several, unless the saved state has a
    module of this name. A wrapped model has its learning parameters and its buffers.
    """
    wraps: list[dict[str, Any]] = part.content("wraps")
    found = dict(_find_dicts(part.content("state"), ""))
    for number, state in enumerate(wraps):
        name = WRAPPED if len(wraps) == 1 else f"{WRAPPED}_{number}"
        if "layout" in state and name not in found:
            found[name] = _unpack_wrapped(state)
    return found


def _unpack_wrapped(state: Mapping[str, Any]) -> dict[str, Tensor]:
    vector, named, lo = state.get("servers", state["vector"]), dict[str, Tensor](), 0
    for name, shape in state["layout"]["parameters"]:
        count = math.prod(shape)
        named[name] = vector[lo : lo + count].reshape(shape).clone()
        lo += count
    return named | {name: state["buffers"][name] for name in state["layout"]["buffers"]}


def _find_dicts(value: object, name: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield (place, dict) of each dict of tensors in a saved state."""
    if not isinstance(value, dict) or value.keys() >= {"state", "param_groups"}:  # not an optimizer
        return
    if value and all(isinstance(key, str) and isinstance(item, Tensor) for key, item in value.items()):
        yield name or WRAPPED, value
        return
    for key, item in value.items():
        yield from _find_dicts(item, f"{name}.{key}" if name else str(key))


def export_modules(part: SavedPart, folder: str | Path, path: str) -> list[str]:
    """Write each module of a saved state as NAME.safetensors into a new folder. Return the names.

    `path` is the state's place, for errors.

    Raises:
        CheckpointError: the state has no module, or the folder has files already or cannot be written.
    """
    found = modules_of(part)
    if not found:
        raise CheckpointError(
            f"{path} has no module: save one in the loop, e.g. rayps.save({{'model': model, 'epoch': epoch}})",
            path=path,
        )

    def write(draft: Path) -> None:
        for name, tensors in found.items():
            file = draft / f"{name.replace('/', '_')}.safetensors"
            safetensors.torch.save_file({key: value.clone().contiguous() for key, value in tensors.items()}, file)

    create_folder(folder, write)
    return list(found)
