"""The record of a server group on disk, from which a new manager continues: JSON files, each replaced as a whole.

    record.json      the group: {"format": 1, "name": ..., "servers": ..., "seats": segments by space, ...}
    space-N.json     space number N (`Space.to_json`): layout and packed optimizer factory; written when it changes

The record is written before servers receive orders. So a restarted manager never uses a segment's generation number
again. The record survives the manager's process, but not a loss of power, in which the servers are lost too. No file
names a class of rayps.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rayps_client.errors import ConfigError

from rayps.ps.manager.assign_segments import SegmentAssignment, SegmentId
from rayps.ps.protocol.space import Space

FORMAT = 1
_AS_THEY_ARE = ("name", "wanted", "replicas", "port", "born", "next_server", "next_space", "versions", "counts")
_UNREADABLE = (ValueError, KeyError, IndexError, TypeError, AttributeError, OSError, ConfigError)


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
            if found["format"] != FORMAT:
                raise ValueError(f"its format is {found['format']}, but this version of rayps reads format {FORMAT}")
            spaces = {int(number): self._read_space(int(number)) for number in found["seats"]}
            self._written = dict(spaces)
            return _read_record(found, spaces)
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
                _replace(self._name_space_path(number), space.to_json())
                self._written[number] = space
        _replace(self._folder / "record.json", _write_plain(record))
        for number in self._written.keys() - record.spaces.keys():  # last: no record on disk may lack a space's file
            self._name_space_path(number).unlink(missing_ok=True)
            del self._written[number]

    def erase(self) -> None:
        """Remove the record of a group that has ended."""
        if self._folder is not None:
            for path in [self._folder / "record.json", *self._folder.glob("space-*.*")]:
                path.unlink(missing_ok=True)

    def _name_space_path(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"space-{number}.json"

    def _read_space(self, number: int) -> Space:
        return Space.from_json(json.loads(self._name_space_path(number).read_bytes()))


def _replace(path: Path, found: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    # readable by this user alone: the record has the group's secret
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(json.dumps(found, default=sorted))  # sets as sorted lists
    temporary.rename(path)


def _list_values(one: ServerRecord | SegmentAssignment) -> list[Any]:
    """Return the values of the fields in order, not copied."""
    return [getattr(one, each.name) for each in fields(one)]


def _write_plain(record: GroupRecord) -> dict[str, Any]:
    """Return a record without its spaces as JSON-ready data: text keys, lists in place of tuples and sets."""
    segments: dict[int, list[Any]] = {number: [] for number in record.spaces}
    for segment in record.segments.values():
        segments[segment.space].append(_list_values(segment))
    return {
        "format": FORMAT,
        "secret": record.secret.hex(),
        "resizing": record.resizing,
        "range": record.range,
        "pinned": record.pinned,
        "servers": {name: _list_values(server) for name, server in record.servers.items()},
        "seats": segments,
        "ranks": record.incarnations,
        "placed_by_load": [[*segment, name] for segment, name in record.placed_by_load.items()],
        **{name: getattr(record, name) for name in _AS_THEY_ARE},
    }


def _read_record(found: dict[str, Any], spaces: dict[int, Space]) -> GroupRecord:
    """Return the record from the data that `_write_plain` returned, and its spaces."""
    return GroupRecord(
        **{name: found[name] for name in _AS_THEY_ARE}
        | {
            "secret": bytes.fromhex(found["secret"]),
            "resizing": found["resizing"] and tuple(found["resizing"]),
            "range": found["range"] and tuple(found["range"]),
            "pinned": found["pinned"],
            "servers": {name: ServerRecord(*values) for name, values in found["servers"].items()},
            "spaces": spaces,
            "segments": {each.id: each for rows in found["seats"].values() for each in map(_read_segment, rows)},
            "versions": {int(space): version for space, version in found["versions"].items()},
            "incarnations": {
                int(space): {int(rank): count for rank, count in ranks.items()}
                for space, ranks in found["ranks"].items()
            },
            "placed_by_load": {(space, index): name for space, index, name in found["placed_by_load"]},
        }
    )


def _read_segment(values: list[Any]) -> SegmentAssignment:
    found = SegmentAssignment(*values)  # with lists, where JSON had to replace tuples and sets
    parent = None if found.parent is None else (found.parent[0], found.parent[1])
    return replace(found, copies=tuple(found.copies), synced=frozenset(found.synced), parent=parent)
