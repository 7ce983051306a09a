"""Read the spaces of a group record of format 1 (rayps 0.1.0): pickles of classes by the paths that they had then.

The classes of that version are in a table here, each with its fields. A space is read without them: a restricted
unpickler makes stand-ins, and what is made of these is the JSON-ready data that `Space.from_json` reads. Classes may
be moved and renamed without a change here. A class or function that is not in the table is refused.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Iterator
from typing import Any

_PACKAGE = "rayps."  # apart, so that a rename by script leaves the old paths below as they are
_DTYPES = ("float16", "bfloat16", "float32", "float64")


class _StandIn:
    """An object of a class of rayps 0.1.0: its class by the old name, and its fields."""

    path: str
    fields: tuple[str, ...]

    def __setstate__(self, state: Any) -> None:
        """Take the values of all fields in their order (a dataclass with slots), or by name (one without)."""
        if isinstance(state, list):
            if len(state) != len(self.fields):
                raise pickle.UnpicklingError(f"a {self.path} with {len(state)} values: {len(self.fields)} are expected")
            state = dict(zip(self.fields, state, strict=True))
        if not isinstance(state, dict) or not state.keys() <= set(self.fields):
            raise pickle.UnpicklingError(f"a {self.path} with the state {state!r:.200}")
        self.state: dict[str, Any] = state

    def __getitem__(self, field: str) -> Any:
        return self.state[field]


def _class(path: str, *fields: str) -> tuple[str, type[_StandIn]]:
    return path, type(path.rpartition(":")[2], (_StandIn,), {"path": path, "fields": fields})


_SPACE = "elastic.space:Space"
_STRATEGIES = {"strategies.parameter_server:ParameterServer": "parameter_server"}
_CLASSES = dict(
    [
        _class(
            _SPACE,
            "name",
            "number",
            "workers",
            "strategy",
            "layout",
            "cuts",
            "factory",
            "tables",
            "quota",
            "branch_of",
            "ticks",
        ),
        _class("elastic.space:Table", "name", "dim", "segments", "seed", "dtype", "optimizer", "init", "policy"),
        _class("elastic.space:Quota", "bytes", "operations"),
        _class("flat:Layout", "entries", "dtype"),
        _class("flat:Entry", "name", "lo", "hi", "shape"),
        _class("rates:Ticks", "origin", "steps"),
        _class(
            "strategies.parameter_server:ParameterServer",
            "shards",
            "staleness",
            "compression",
            "replay_mb",
            "replicas",
            "replica",
        ),
    ]
)


class _Restricted(pickle.Unpickler):
    """Makes stand-ins of the classes in the table, names of dtypes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """A stand-in's class. Raises UnpicklingError: it is not in the table."""
        if module == "torch" and name in _DTYPES:
            return name
        found = _CLASSES.get(f"{module.removeprefix(_PACKAGE)}:{name}") if module.startswith(_PACKAGE) else None
        if found is None:
            raise pickle.UnpicklingError(f"it holds a {module}.{name}, which no record of format 1 has")
        return found


def read_space(data: bytes) -> dict[str, Any]:
    """The space in a pickle of format 1, as `Space.from_json` reads it.

    Raises:
        UnpicklingError: the pickle holds something else; none of its code was run.
        EOFError, KeyError, TypeError, ValueError, AttributeError: it is not whole.
    """
    space = _Restricted(io.BytesIO(data)).load()
    if getattr(space, "path", None) != _SPACE:
        raise pickle.UnpicklingError(f"it holds a {type(space).__name__} in place of a space")
    held, layout, ticks = space["strategy"], space["layout"], space["ticks"]
    return {
        "name": space["name"],
        "number": space["number"],
        "workers": space["workers"],
        "strategy": {"name": _STRATEGIES[held.path], **held.state},
        "layout": None
        if layout is None
        else {"dtype": layout["dtype"], "entries": [_fields(each) for each in layout["entries"]]},
        "cuts": [list(bounds) for bounds in space["cuts"]],
        "factory": base64.b64encode(space["factory"]).decode("ascii"),
        "tables": [dict(table.state) for table in space["tables"]],
        "quota": dict(space["quota"].state),
        "branch_of": space["branch_of"],
        "ticks": [*ticks["origin"], ticks["steps"]],
    }


def _fields(made: _StandIn) -> list[Any]:
    return list(_values(made))


def _values(made: _StandIn) -> Iterator[Any]:
    return (made[field] for field in made.fields)
