"""The record of a server group on disk, from which a new manager continues: JSON files, each replaced as a whole.

    record.json      the group: {"format": 2, "name": ..., "servers": ..., "seats": segments by space, ...}
    space-N.json     space number N (`Space.to_json`): layout and packed optimizer factory; written when it changes

The record is written before servers receive orders. So a restarted manager never uses a segment's generation number
again. The record survives the manager's process, but not a loss of power, in which the servers are lost too. No file
names a class of rayps. A record of format 1 (rayps 0.1.0), in which spaces are pickles, can be read; the first write
replaces it.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rayps.core.errors import ConfigError
from rayps.ps.manager.assign_segments import SegmentAssignment, SegmentId
from rayps.ps.protocol.space import Space

FORMAT = 2
_PICKLED = 1  # the format of rayps 0.1.0
_AS_THEY_ARE = ("name", "wanted", "replicas", "port", "born", "next_server", "next_space", "versions", "counts")
_UNREADABLE = (
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    OSError,
    pickle.UnpicklingError,
    EOFError,
    ConfigError,
)


@dataclass(slots=True)
class ServerRecord:
    """A server in the record. `leaving`: whether its segments are moved to other servers, after which it ends."""

    address: str
    host: str
    pid: int
    leaving: bool = False
    node: str = ""  # the host's id in the cluster; "" if the server was started as an actor of its own


@dataclass(slots=True)
class GroupRecord:
    """The facts about a group that must outlive a manager."""

    name: str
    secret: bytes
    wanted: int  # wanted number of servers
    replicas: int
    port: int = 0  # the port on which the manager listens
    born: float = 0.0  # when the group was started, by time.time
    next_server: int = 0
    next_space: int = 1
    resizing: tuple[int, int] | None = None  # from, to
    range: tuple[int, int] | None = None  # the least and most servers; None if the number changes by calls alone
    pinned: bool = False  # whether a call has set the number, so that load does not change it
    servers: dict[str, ServerRecord] = field(default_factory=dict)
    spaces: dict[int, Space] = field(default_factory=dict)
    segments: dict[SegmentId, SegmentAssignment] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)  # number of a space -> version of its map
    incarnations: dict[int, dict[int, int]] = field(default_factory=dict)  # number of a space -> rank -> incarnation
    placed_by_load: dict[SegmentId, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


class RecordFile:
    """Reads and writes a group's record in a folder; with `folder=None` nothing is read or written."""

    def __init__(self, folder: str | Path | None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._written: dict[int, Space] = {}
        self._pickled = False  # whether the record was read in format 1, and has not been written since
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def read(self) -> GroupRecord | None:
        """Return the record that was written last, or None if there is none.

        Raises ConfigError if the file is not a record of a server group.
        """
        path = None if self._folder is None else self._folder / "record.json"
        if path is None or not path.exists():
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["format"] not in (_PICKLED, FORMAT):
                raise ValueError(
                    f"its format is {found['format']}, but this version of rayps reads formats {_PICKLED} and {FORMAT}"
                )
            self._pickled = found["format"] == _PICKLED
            spaces = {int(number): self._read_space(int(number)) for number in found["seats"]}
            self._written = {} if self._pickled else dict(spaces)
            return _record(found, spaces)
        except _UNREADABLE as error:
            raise ConfigError(
                f"{path} is not the record of a server group ({type(error).__name__}: {error}): give another folder, "
                "or remove this one to start a new group without the parameters of the old group",
                field="folder",
            ) from error

    def write(self, record: GroupRecord) -> None:
        """Write the record in place of the last one."""
        if self._folder is None:
            return
        for number, space in record.spaces.items():
            if self._written.get(number) is not space:
                _replace(self._space_path(number), space.to_json())
                self._written[number] = space
        _replace(self._folder / "record.json", _plain(record))
        for number in self._written.keys() - record.spaces.keys():  # last: no record on disk may lack a space's file
            self._space_path(number).unlink(missing_ok=True)
            del self._written[number]
        if self._pickled:
            self._pickled = False
            for path in self._folder.glob("space-*.pickle"):
                path.unlink(missing_ok=True)

    def erase(self) -> None:
        """Remove the record of a group that has ended."""
        if self._folder is not None:
            for path in [self._folder / "record.json", *self._folder.glob("space-*.*")]:
                path.unlink(missing_ok=True)

    def _space_path(self, number: int, kind: str = "json") -> Path:
        assert self._folder is not None
        return self._folder / f"space-{number}.{kind}"

    def _read_space(self, number: int) -> Space:
        if self._pickled:
            return Space.from_json(_read_pickled(self._space_path(number, "pickle").read_bytes()))
        return Space.from_json(json.loads(self._space_path(number).read_bytes()))


def _replace(path: Path, found: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    # readable by this user alone: the record has the group's secret
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(json.dumps(found, default=sorted))  # sets as sorted lists
    temporary.rename(path)


def _values(one: ServerRecord | SegmentAssignment) -> list[Any]:
    """Return the values of the fields in order, not copied."""
    return [getattr(one, each.name) for each in fields(one)]


def _plain(record: GroupRecord) -> dict[str, Any]:
    """Return a record without its spaces as JSON-ready data: text keys, lists in place of tuples and sets."""
    segments: dict[int, list[Any]] = {number: [] for number in record.spaces}
    for segment in record.segments.values():
        segments[segment.space].append(_values(segment))
    return {
        "format": FORMAT,
        "secret": record.secret.hex(),
        "resizing": record.resizing,
        "range": record.range,
        "pinned": record.pinned,
        "servers": {name: _values(server) for name, server in record.servers.items()},
        "seats": segments,
        "ranks": record.incarnations,
        "placed_by_load": [[*segment, name] for segment, name in record.placed_by_load.items()],
        **{name: getattr(record, name) for name in _AS_THEY_ARE},
    }


def _record(found: dict[str, Any], spaces: dict[int, Space]) -> GroupRecord:
    """Return the record from the data that `_plain` returned, and its spaces."""
    return GroupRecord(
        **{name: found[name] for name in _AS_THEY_ARE}
        | {
            "secret": bytes.fromhex(found["secret"]),
            "resizing": found["resizing"] and tuple(found["resizing"]),
            "range": found.get("range") and tuple(found["range"]),  # older records have neither
            "pinned": found.get("pinned", False),
            "servers": {name: ServerRecord(*values) for name, values in found["servers"].items()},
            "spaces": spaces,
            "segments": {each.id: each for rows in found["seats"].values() for each in map(_segment, rows)},
            "versions": {int(space): version for space, version in found["versions"].items()},
            "incarnations": {
                int(space): {int(rank): count for rank, count in ranks.items()}
                for space, ranks in found["ranks"].items()
            },
            "placed_by_load": {(space, index): name for space, index, name in found["placed_by_load"]},
        }
    )


def _segment(values: list[Any]) -> SegmentAssignment:
    found = SegmentAssignment(*values)  # with lists, where JSON had to replace tuples and sets
    parent = None if found.parent is None else (found.parent[0], found.parent[1])
    return replace(found, copies=tuple(found.copies), synced=frozenset(found.synced), parent=parent)


# ---- format 1: spaces are pickles of classes by the paths that they had in rayps 0.1.0
#
# `_FIELDS` has each class of that version, with its fields. A restricted unpickler creates stand-ins for the objects of
# these classes, and the stand-ins become the data that `Space.from_json` reads. So classes of rayps may be moved and
# renamed without a change here. A class or function that is not in `_FIELDS` is refused.

_PACKAGE = "rayps."  # not part of the paths below, so that a rename by script does not change these old paths
_DTYPES = ("float16", "bfloat16", "float32", "float64")
_SPACE = "elastic.space:Space"
_STRATEGIES = {"strategies.parameter_server:ParameterServer": "parameter_server"}
_FIELDS = {
    _SPACE: "name number workers strategy layout cuts factory tables quota branch_of ticks",
    "elastic.space:Table": "name dim segments seed dtype optimizer init policy",
    "elastic.space:Quota": "bytes operations",
    "flat:Layout": "entries dtype",
    "flat:Entry": "name lo hi shape",
    "rates:Ticks": "origin steps",
    "strategies.parameter_server:ParameterServer": "shards staleness compression replay_mb replicas replica",
}


class _StandIn:
    """A stand-in for an object of a rayps 0.1.0 class: the old path of the class, and the object's fields by name."""

    path: str
    fields: tuple[str, ...]

    def __setstate__(self, state: Any) -> None:
        """Store the fields: a list in their order for a dataclass with slots, a dict by name for one without."""
        if isinstance(state, list):
            state = dict(zip(self.fields, state, strict=True))
        if not isinstance(state, dict) or not state.keys() <= set(self.fields):
            raise pickle.UnpicklingError(f"the pickled {self.path} has unknown fields: {state!r:.200}")
        self.state: dict[str, Any] = state

    def __getitem__(self, field: str) -> Any:
        return self.state[field]


_CLASSES = {
    path: type(path.rpartition(":")[2], (_StandIn,), {"path": path, "fields": tuple(fields.split())})
    for path, fields in _FIELDS.items()
}


class _Restricted(pickle.Unpickler):
    """An unpickler that creates only stand-ins for the classes in `_FIELDS`, and names of dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in class for a class. Raises UnpicklingError if the class is not in `_FIELDS`."""
        if module == "torch" and name in _DTYPES:
            return name
        found = _CLASSES.get(f"{module.removeprefix(_PACKAGE)}:{name}") if module.startswith(_PACKAGE) else None
        if found is None:
            raise pickle.UnpicklingError(f"the pickle contains {module}.{name}, which no record of format 1 contains")
        return found


def _read_pickled(data: bytes) -> dict[str, Any]:
    """Return the space in a pickle of format 1, in the form that `Space.from_json` reads.

    Raises:
        UnpicklingError: the pickle contains something else; none of its code was run.
        EOFError, KeyError, TypeError, ValueError, AttributeError: the pickle is truncated.
    """
    space = _Restricted(io.BytesIO(data)).load()
    if getattr(space, "path", None) != _SPACE:
        raise pickle.UnpicklingError(f"the pickle contains a {type(space).__name__} instead of a space")
    half, layout, ticks = space["strategy"], space["layout"], space["ticks"]
    found = dict(space.state) | {
        "strategy": {"name": _STRATEGIES[half.path], **half.state},
        "factory": base64.b64encode(space["factory"]).decode("ascii"),
        "tables": [dict(table.state) for table in space["tables"]],
        "quota": dict(space["quota"].state),
        "ticks": [*ticks["origin"], ticks["steps"]],
    }
    if layout is not None:
        entries = [[entry[field] for field in entry.fields] for entry in layout["entries"]]
        found["layout"] = {"dtype": layout["dtype"], "entries": entries}
    return found
