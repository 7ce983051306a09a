"""The rows of a segment that do not fit into memory, in an SQLite file for each segment.

The file does not survive the process, because it is unlinked as soon as it is open. Checkpoints make rows durable.
SQLite comes with Python. A row takes about 30 bytes more than its numbers, and is read in a few microseconds. (LMDB,
measured for comparison, reads 2.5 times as fast, writes as fast, and takes three times the space.)
A Bloom filter in memory, 2 to 4 bytes a row, tells without a read that an id is not on disk, for nearly all such ids
(Bloom, "Space/Time Trade-offs in Hash Coding with Allowable Errors", CACM 1970).
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from rayps_client.errors import ConfigError

from rayps.ps.tables.pages import Field
from rayps.ps.tables.wire_format import Bytes, Ids, Rows, mix

FieldValues: TypeAlias = dict[str, Rows]  # values by field: [n, width]
_QUERY_IDS = 500  # most ids in one query
_BITS = 16  # bits of the Bloom filter for each row
_HASHES = 4  # bits of the Bloom filter that are set for one id
_CACHE = 1024  # KiB of SQLite's page cache


class Disk:
    """A map from ids to records in an SQLite file. A record has the values of all `fields`.

    Only one thread at a time may use it.
    """

    def __init__(self, fields: Sequence[Field], folder: str | None) -> None:
        """Create the file in `folder` (None: the system's temporary folder). Raises ConfigError if this fails."""
        self._fields, self._folder = tuple(fields), folder
        self._size = sum(field.width * np.dtype(field.dtype).itemsize for field in fields)
        self._count = 0
        self._filter = np.zeros(1 << 10, np.uint8)
        try:
            with tempfile.TemporaryDirectory(prefix="rayps-rows-", dir=folder) as place:
                self._db = sqlite3.connect(Path(place) / "rows", isolation_level=None, check_same_thread=False)
                for setting in (
                    "locking_mode = exclusive",
                    "journal_mode = off",
                    "synchronous = off",
                    "page_size = 8192",
                    f"cache_size = -{_CACHE}",
                ):
                    self._db.execute(f"pragma {setting}")
                self._db.execute("create table rows (id integer primary key, record blob not null)")
        except (OSError, sqlite3.Error) as error:
            place = folder or tempfile.gettempdir()
            raise ConfigError(
                f"cannot store rows on disk in {place}: {error}; give another `folder` in the table's policy, or leave "
                "out its `memory`, so that all rows stay in memory",
                field="policy",
            ) from error

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """The bytes of memory that the Bloom filter and SQLite's cache use."""
        return int(self._filter.nbytes) + (_CACHE << 10 if self._count else 0)

    def put(self, ids: Ids, values: FieldValues) -> None:
        """Store records of ids that have none. `values` maps each field to [n, width], in the order of the ids."""
        raw = np.concatenate([_view_bytes(values[field.name]) for field in self._fields], axis=1)
        order = np.argsort(ids)
        records = raw[order].reshape(-1).data
        size = self._size
        with self._db:
            self._db.execute("begin")
            self._db.executemany(
                "insert into rows values (?, ?)",
                (
                    (key, records[at : at + size])
                    for key, at in zip(ids[order].tolist(), range(0, len(raw) * size, size), strict=True)
                ),
            )
        self._count += len(ids)
        if self._count * _BITS > len(self._filter) * 8:
            self._filter = np.zeros(1 << (self._count * _BITS * 2 // 8).bit_length(), np.uint8)
            ids = np.fromiter((key for (key,) in self._db.execute("select id from rows")), np.int64, self._count)
        self._mark(ids)

    def has(self, ids: Ids) -> NDArray[np.bool_]:
        """Return bool [n]: True for every id that has a record, and rarely for an id that has none."""
        found = np.full(len(ids), self._count > 0)
        if self._count:
            for byte, bit in self._find_places(ids):
                found &= (self._filter.take(byte) & bit) != 0
        return found

    def peek(self, ids: Ids) -> tuple[Ids, FieldValues]:
        """Return those of `ids` that have a record, ascending, and the values of their records by field."""
        wanted = np.sort(ids[self.has(ids)]).tolist()
        found: list[tuple[int, bytes]] = []
        for lo in range(0, len(wanted), _QUERY_IDS):
            some = ",".join(map(str, wanted[lo : lo + _QUERY_IDS]))
            found += self._db.execute(f"select id, record from rows where id in ({some}) order by id")
        return self._read(found)

    def delete(self, ids: Ids) -> None:
        """Delete the records of these ids, all of which must exist."""
        if len(ids):
            with self._db:
                self._db.execute("begin")
                self._db.executemany("delete from rows where id = ?", ((key,) for key in np.sort(ids).tolist()))
            self._count -= len(ids)

    def all(self) -> tuple[Ids, FieldValues]:
        """Return all ids, ascending, and the values of their records by field."""
        return self._read(self._db.execute("select id, record from rows order by id").fetchall())

    def column(self, name: str) -> tuple[Ids, Rows]:
        """Return all ids, ascending, and one field of their records [n, width]."""
        at = 1
        for field in self._fields:
            size = field.width * np.dtype(field.dtype).itemsize
            if field.name == name:
                break
            at += size
        parts = self._db.execute(f"select id, substr(record, {at}, {size}) from rows order by id").fetchall()
        raw = b"".join(part for _, part in parts)
        ids = np.fromiter((key for key, _ in parts), np.int64, len(parts))
        return ids, np.frombuffer(raw, field.dtype).reshape(-1, field.width)

    def branch(self) -> Disk:
        """Return a copy in another file."""
        other = Disk(self._fields, self._folder)
        self._db.backup(other._db)
        other._count, other._filter = self._count, self._filter.copy()
        return other

    def _read(self, found: list[tuple[int, bytes]]) -> tuple[Ids, FieldValues]:
        ids = np.fromiter((key for key, _ in found), np.int64, len(found))
        raw = np.frombuffer(b"".join(record for _, record in found), np.uint8).reshape(-1, self._size)
        values: FieldValues = {}
        at = 0
        for field in self._fields:
            size = field.width * np.dtype(field.dtype).itemsize
            part = np.ascontiguousarray(raw[:, at : at + size])
            values[field.name] = part.view(field.dtype).reshape(-1, field.width)
            at += size
        return ids, values

    def _mark(self, ids: Ids) -> None:
        for byte, bit in self._find_places(ids):
            np.bitwise_or.at(self._filter, byte, bit)

    def _find_places(self, ids: Ids) -> Iterator[tuple[Ids, Bytes]]:
        hashed = mix(ids)
        step = (hashed >> np.uint64(32)) | np.uint64(1)
        for _ in range(_HASHES):
            place = hashed & np.uint64(len(self._filter) * 8 - 1)
            yield (place >> np.uint64(3)).view(np.int64), np.uint8(1) << (place & np.uint64(7)).astype(np.uint8)
            hashed = hashed + step


def _view_bytes(values: Rows) -> Bytes:
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)
