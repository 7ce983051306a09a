"""Rooms: folders that the rest of rayps can do without. The table below is the only place that names them.

Nobody else imports a room: what others need of it is one object, its face, which is loaded by name when a job needs it.
`scripts/without.py` checks that the tree stands without each of them.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec
from typing import Any

from rayps_client.errors import ConfigError

FACES = {  # from what a job needs to the face of the room that has it
    "divided models": "rayps.parallel.face:FACE",
    "sparse tables": "rayps.ps.tables.face:FACE",
}


@cache
def face_of(feature: str) -> object:
    """Return the face of the room that has a feature, a key of `FACES`. Raises ConfigError if the room is absent."""
    target = FACES[feature]
    room = target.partition(":")[0].rpartition(".")[0]
    if find_spec(room) is None:
        raise ConfigError(f"{feature} are in {room}, which this installation of rayps lacks: install all of rayps")
    return load(target)


def load(target: str) -> Any:
    """Import and return the object that "module:Name" names. Raises ConfigError if there is no such object."""
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{target!r} cannot be loaded: {error}", field="strategy") from error
