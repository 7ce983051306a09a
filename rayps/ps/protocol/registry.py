"""Which groups there are, in the map that all actors of a cluster share. A name may be stale: its actor decides."""

from __future__ import annotations

import json

from rayps.cluster.local import KeyValues

_ALL = "rayps-servers"


def key_of(group: str) -> str:
    """Under which its manager's address is found."""
    return f"{_ALL}/{group}"


def actor_of(group: str) -> str:
    """What its manager's actor is called."""
    return f"{_ALL}-{group}"


def listed(values: KeyValues) -> list[str]:
    """The names that managers have left."""
    found = values.get(_ALL)
    names: list[str] = json.loads(found) if found else []
    return names


def enlist(values: KeyValues, group: str) -> None:
    """A manager is there."""
    values.put(_ALL, json.dumps(sorted({*listed(values), group})).encode())


def strike(values: KeyValues, group: str) -> None:
    """It has ended."""
    values.put(_ALL, json.dumps(sorted({*listed(values)} - {group})).encode())
    values.delete(key_of(group))
