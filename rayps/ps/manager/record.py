"""The record of a server group on disk, from which a new manager continues: JSON files, each replaced as a whole.

    record.json      the group: {"format": 2, "name": ..., "servers": ..., "seats": ...}
    space-N.json     space number N (`Space.to_json`): layout and packed optimizer factory, written once

The record is written before servers get orders, so that no generation number is given twice. No file names a class of
rayps. A record of format 1 (rayps 0.1.0), in which spaces are pickles, is read, and replaced by the first write.
"""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayps.core.errors import ConfigError
from rayps.ps.manager.assignment import SegmentAssignment
from rayps.ps.manager.record_v1 import read_space
from rayps.ps.protocol.space import Space

FORMAT = 2
_PICKLED = 1  # the format of rayps 0.1.0
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
class SentOrder:
    """A server as the record knows it."""

    address: str
    host: str
    pid: int
    leaving: bool = False


@dataclass(slots=True)
class GroupRecord:
    """Everything that must outlive a manager."""

    name: str
    secret: bytes
    wanted: int
    replicas: int
    port: int = 0  # of the manager's door
    born: float = 0.0
    next_server: int = 0
    next_space: int = 1
    resizing: tuple[int, int] | None = None  # from, to
    servers: dict[str, SentOrder] = field(default_factory=dict)
    spaces: dict[int, Space] = field(default_factory=dict)
    seats: dict[int, list[SegmentAssignment]] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)  # of the map, by space
    incarnations: dict[int, dict[int, int]] = field(default_factory=dict)  # by space and rank
    placed_by_load: dict[tuple[int, int], str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


class RecordFile:
    """The folder of a group's record; None = nothing is written, and the group ends with its manager."""

    def __init__(self, folder: str | Path | None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._written: dict[int, Space] = {}
        self._pickled = False  # the record was read in format 1, and not written yet
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def read(self) -> GroupRecord | None:
        """What was written last. Raises ConfigError: it is not a record."""
        path = None if self._folder is None else self._folder / "record.json"
        if path is None or not path.exists():
            return None
        try:
            return self._read(json.loads(path.read_text(encoding="utf-8")))
        except _UNREADABLE as error:
            raise ConfigError(
                f"{path} is not the record of a server group ({type(error).__name__}: {error}): give another folder, "
                "or remove it to begin anew, without what its servers held",
                field="folder",
            ) from error

    def write(self, record: GroupRecord) -> None:
        """Replace what was written. It survives this process, not a loss of power: then its servers are gone too."""
        if self._folder is None:
            return
        for number, space in record.spaces.items():
            if self._written.get(number) is not space:
                self._replace(self._space(number), json.dumps(space.to_json()).encode())
                self._written[number] = space
        self._replace(self._folder / "record.json", json.dumps(_plain(record)).encode())
        for number in self._written.keys() - record.spaces.keys():  # last: a record must find all its spaces
            self._space(number).unlink(missing_ok=True)
            del self._written[number]
        if self._pickled:
            self._pickled = False
            for path in self._folder.glob("space-*.pickle"):
                path.unlink(missing_ok=True)

    def erase(self) -> None:
        """The group has ended."""
        if self._folder is not None:
            for path in [self._folder / "record.json", *self._folder.glob("space-*.*")]:
                path.unlink(missing_ok=True)

    def _space(self, number: int, kind: str = "json") -> Path:
        assert self._folder is not None
        return self._folder / f"space-{number}.{kind}"

    def _read(self, found: dict[str, Any]) -> GroupRecord:
        if found["format"] not in (_PICKLED, FORMAT):
            raise ValueError(f"its format is {found['format']}, and this rayps reads {_PICKLED} and {FORMAT}")
        numbers = [int(number) for number in found["seats"]]
        self._pickled = found["format"] == _PICKLED
        if self._pickled:
            spaces = {number: self._read_pickled(number) for number in numbers}
        else:
            spaces = {number: Space.from_json(json.loads(self._space(number).read_bytes())) for number in numbers}
            self._written = dict(spaces)
        return GroupRecord(
            name=found["name"],
            secret=bytes.fromhex(found["secret"]),
            wanted=found["wanted"],
            replicas=found["replicas"],
            port=found["port"],
            born=found["born"],
            next_server=found["next_server"],
            next_space=found["next_space"],
            resizing=None if found["resizing"] is None else (found["resizing"][0], found["resizing"][1]),
            servers={name: SentOrder(*told) for name, told in found["servers"].items()},
            spaces=spaces,
            seats={int(number): [_seat(item) for item in seats] for number, seats in found["seats"].items()},
            versions={int(number): version for number, version in found["versions"].items()},
            incarnations={int(n): {int(r): count for r, count in by.items()} for n, by in found["ranks"].items()},
            placed_by_load={(space, index): name for space, index, name in found["placed_by_load"]},
            counts=found["counts"],
        )

    def _read_pickled(self, number: int) -> Space:
        return Space.from_json(read_space(self._space(number, "pickle").read_bytes()))

    def _replace(self, path: Path, data: bytes) -> None:
        temporary = path.with_suffix(".tmp")
        # the secret is in it: for this user alone
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        temporary.rename(path)


def _plain(record: GroupRecord) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "name": record.name,
        "secret": record.secret.hex(),
        "wanted": record.wanted,
        "replicas": record.replicas,
        "port": record.port,
        "born": record.born,
        "next_server": record.next_server,
        "next_space": record.next_space,
        "resizing": record.resizing,
        "servers": {name: [t.address, t.host, t.pid, t.leaving] for name, t in record.servers.items()},
        "seats": {str(number): [_plain_seat(seat) for seat in seats] for number, seats in record.seats.items()},
        "versions": {str(number): version for number, version in record.versions.items()},
        "ranks": {str(n): {str(rank): count for rank, count in by.items()} for n, by in record.incarnations.items()},
        "placed_by_load": [[*seat, name] for seat, name in record.placed_by_load.items()],
        "counts": record.counts,
    }


def _plain_seat(seat: SegmentAssignment) -> list[Any]:
    return [
        seat.space,
        seat.index,
        seat.key,
        seat.primary,
        seat.generation,
        seat.copies,
        sorted(seat.synced),
        seat.born,
        seat.ready,
        seat.heir,
        seat.handed,
        seat.lost,
        seat.parent,
    ]


def _seat(item: list[Any]) -> SegmentAssignment:
    space, index, key, primary, generation, copies, synced, born, ready, heir, handed, lost, parent = item
    return SegmentAssignment(
        space,
        index,
        key,
        primary,
        generation,
        tuple(copies),
        frozenset(synced),
        born,
        ready,
        heir,
        handed,
        lost,
        None if parent is None else (parent[0], parent[1]),
    )
