"""List Parquet files, read their footers, and open them safely. Decodes no rows.

A footer may name Arrow extension types, whose readers can run code from the file (CVE-2023-47248, CVE-2026-41486).
So the footer's bytes are checked before pyarrow reads them, and a file with such types is refused.
"""

from __future__ import annotations

import base64
import binascii
import difflib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from rayps.core.errors import DataError
from rayps.data.unsupported import OTHERWISE, is_pattern, other_format, pattern, refuse_ray_data

if TYPE_CHECKING:
    import fsspec  # type: ignore[import-untyped]

SUFFIXES = (".parquet", ".parq", ".pq")
_BUFFER = 1 << 20  # bytes that are read ahead per column; pyarrow's default is the whole column of a row group
_FOOTERS = 64  # the most parsed footers in a `Files` object's cache

PathGiven = str | PathLike[str]
FileSystem: TypeAlias = "pafs.FileSystem | fsspec.AbstractFileSystem | None"  # None: chosen by the path


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group: the number of its file, its number in the file, its first row in the file, its number of rows."""

    file: int
    number: int
    first: int
    rows: int


@dataclass(frozen=True, slots=True)
class Index:
    """The content of the footers of all files: paths, sizes in bytes, row groups, number of rows, schema."""

    files: tuple[str, ...]
    sizes: tuple[int, ...]
    groups: tuple[RowGroup, ...]
    rows: int
    schema: pa.Schema  # the schema of the first file


class Files:
    """The Parquet files at some paths of a file system. Pickling includes the paths, not the cached footers."""

    def __init__(self, path: PathGiven | Sequence[PathGiven], filesystem: FileSystem = None) -> None:
        refuse_ray_data("parquet", path)
        given = [path] if isinstance(path, (str, PathLike)) else list(path)
        if not given:
            raise DataError("parquet: the list of paths is empty: give a file, a directory or a list of them")
        self._fs, self._paths = _resolve([str(item) for item in given], filesystem)
        for name in self._paths:
            self._refuse_unread(name)
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"_fs": self._fs, "_paths": self._paths, "_footers": OrderedDict()}

    def _refuse_unread(self, path: str) -> None:
        """Raise DataError if the path is a pattern, or a file of another format. Other paths are checked later."""
        if not (glob := is_pattern(path)) and other_format(path) is None:
            return
        with told(path):
            info = self._fs.get_file_info(path)
            if info.type == pafs.FileType.NotFound and glob:
                raise DataError(pattern(path, self._fs), file=path)
            if info.type == pafs.FileType.File and other_format(path):
                with self._fs.open_input_file(path) as source:
                    _look_at_ends(path, source)

    def index(self, columns: Callable[[pa.Schema, str], Sequence[str]]) -> Index:
        """Read every footer. `columns` checks a schema and returns the columns to use.

        Raises:
            DataError: there is no file, a file is incomplete, or a schema is refused or differs.
        """
        files = tuple(self._list())
        groups: list[RowGroup] = []
        sizes: list[int] = []
        schema: pa.Schema | None = None
        for number, name in enumerate(files):
            with self.open(name) as file:
                used = columns(file.schema_arrow, name)
                schema = schema or file.schema_arrow
                _same_types(used, schema, file.schema_arrow, files[0], name)
                sizes.append(self._size(name))
                groups += _groups(number, name, file.metadata)
        rows = sum(group.rows for group in groups)
        if rows == 0 or schema is None:
            raise DataError(
                f"{self._paths[0]}: no rows in its {len(files)} file(s): there is nothing to train on",
                file=self._paths[0],
            )
        return Index(files, tuple(sizes), tuple(groups), rows, schema)

    def changed(self, files: Sequence[str]) -> list[str]:
        """Return the time of each file's last change as text, "None" if the file system does not know it."""
        with told(files[0]):
            return [str(info.mtime_ns) for info in self._fs.get_file_info(list(files))]

    def nulls(self, index: Index, group: RowGroup, used: Sequence[str]) -> bool:
        """Return whether the statistics of a row group count nulls in a used column.

        Call this method after rows of the group were read: pyarrow's reader refuses a damaged footer, while an access
        to the column chunks of such a footer can crash the process.

        Raises:
            DataError: the file ends before the row group does.
        """
        name, size = index.files[group.file], index.sizes[group.file]
        with self.open(name, size) as file:
            found = file.metadata.row_group(group.number)
            chunks = [found.column(leaf) for leaf in _leaves(file.metadata, used)]
            _inside_file(name, group.number, chunks, size)
            return any(map(_has_nulls, chunks))

    def _list(self) -> list[str]:
        found: list[str] = []
        for path in self._paths:
            with told(path):
                info = self._fs.get_file_info(path)
            if info.type == pafs.FileType.NotFound:
                raise DataError(f"{path}: there is no such file or directory{self._near(path)}", file=path)
            found += self._inside(path) if info.type == pafs.FileType.Directory else [path]
        return found

    def _inside(self, folder: str) -> list[str]:
        with told(folder):
            infos = self._fs.get_file_info(pafs.FileSelector(folder, recursive=True))
        names = sorted(info.path for info in infos if info.type == pafs.FileType.File)
        chosen = [name for name in names if name.endswith(SUFFIXES) and not _hidden(name[len(folder) :])]
        if not chosen:
            there = f"it has {names[0].rpartition('/')[2]}" if names else "it is empty"
            said = other_format(names[0]) if names else None
            raise DataError(
                f"{folder}: the directory has no file that ends in .parquet ({there})"
                f"{f'{chr(10)}{said}' if said else ''}",
                file=folder,
            )
        return chosen

    def _near(self, path: str) -> str:
        folder, _, name = path.rpartition("/")
        try:
            infos = self._fs.get_file_info(pafs.FileSelector(folder or "."))
        except (OSError, pa.ArrowException):
            return ""
        near = difflib.get_close_matches(name, [info.base_name for info in infos], n=1)
        return f": did you mean {near[0]!r}?" if near else ""

    def _size(self, name: str) -> int:
        with told(name):
            return int(self._fs.get_file_info(name).size)

    @contextmanager
    def open(self, name: str, size: int | None = None) -> Iterator[pq.ParquetFile]:
        """Open one file for reading. `size`: the number of bytes that the file had before and must still have.

        Raises:
            DataError: the file is missing, is damaged, has another size than `size`, or has extension types.
        """
        with told(name), self._fs.open_input_file(name) as source:
            if size is not None and source.size() != size:
                raise DataError(f"{name}: the file changed while it was in use: start the run again", file=name)
            footer = self._footers.get(name) if size is not None else None
            if footer is None:
                _look(name, source)
            file = pq.ParquetFile(
                source, metadata=footer, buffer_size=_BUFFER, pre_buffer=False, page_checksum_verification=True
            )
            self._keep(name, file.metadata)
            yield file

    def _keep(self, name: str, footer: pq.FileMetaData) -> None:
        self._footers[name] = footer
        self._footers.move_to_end(name)
        while len(self._footers) > _FOOTERS:
            self._footers.popitem(last=False)


def _hidden(inside: str) -> bool:
    return any(part[:1] in ("_", ".") for part in inside.split("/"))


@contextmanager
def told(name: str, group: int | None = None) -> Iterator[None]:
    """Turn errors of pyarrow and the file system into a DataError with the file's name and the row group's number."""
    try:
        yield
    except (OSError, ValueError, OverflowError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        where = name if group is None else f"{name}, row group {group}"
        raise DataError(
            f"{where}: cannot be read: {reason}\nwrite the file again, or leave it out",
            file=name,
            row_group=group,
            reason=reason,
        ) from error


def _resolve(paths: list[str], filesystem: FileSystem) -> tuple[pafs.FileSystem, list[str]]:
    if filesystem is not None:
        known = isinstance(filesystem, pafs.FileSystem)
        return filesystem if known else pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), paths
    if not any("://" in path for path in paths):
        return pafs.LocalFileSystem(), [Path(path).expanduser().absolute().as_posix() for path in paths]
    with told(paths[0]):
        found = [pafs.FileSystem.from_uri(path) for path in paths]
    if any(one != found[0][0] for one, _ in found):
        raise DataError(f"parquet: the paths are on different file systems: {paths[0]} and {paths[-1]}")
    return found[0][0], [path for _, path in found]


def _leaves(footer: pq.FileMetaData, used: Sequence[str]) -> list[int]:
    paths = [footer.schema.column(leaf).path for leaf in range(footer.num_columns)]
    return [
        leaf
        for leaf, path in enumerate(paths)
        if any(path == column or path.startswith(column + ".") for column in used)
    ]


def _groups(number: int, name: str, footer: pq.FileMetaData) -> list[RowGroup]:
    groups: list[RowGroup] = []
    first = 0
    for place in range(footer.num_row_groups):
        groups.append(RowGroup(number, place, first, footer.row_group(place).num_rows))
        first += groups[-1].rows
    if first != footer.num_rows or any(group.rows < 0 for group in groups):
        raise DataError(
            f"{name}: the footer is damaged: it counts {footer.num_rows} rows, but {first} in all its row groups",
            file=name,
        )
    return groups


def _has_nulls(chunk: pq.ColumnChunkMetaData) -> bool:
    return chunk.statistics is not None and (chunk.statistics.null_count or 0) > 0


def _inside_file(name: str, place: int, chunks: list[pq.ColumnChunkMetaData], size: int) -> None:
    for chunk in chunks:
        starts = [offset for offset in (chunk.dictionary_page_offset, chunk.data_page_offset) if offset]
        if min(starts, default=0) + chunk.total_compressed_size > size:
            raise DataError(
                f"{name}: row group {place} is cut off, or the footer is damaged: write the file again",
                file=name,
                row_group=place,
            )


def _same_types(used: Sequence[str], schema: pa.Schema, other: pa.Schema, first: str, name: str) -> None:
    for column in used:
        ours, theirs = schema.field(column).type, other.field(column).type
        if ours != theirs:
            raise DataError(
                f"{name}: column {column!r} is {theirs}, but it is {ours} in {first}\nwrite the files with one schema",
                file=name,
                column=column,
            )


# ------------------------------------------------------------------------ checks of the bytes, before pyarrow


def _look(name: str, source: pa.NativeFile) -> None:
    """Check a file's footer. Raises DataError: it is not a Parquet file, is damaged, or has an extension type."""
    size, tail = source.size(), _look_at_ends(name, source)
    length = int.from_bytes(tail[:4], "little")
    if length > size - 12:
        raise DataError(
            f"{name}: the footer is damaged: its length is {length} bytes, and the file has {size} bytes", file=name
        )
    extensions = _extensions(source.read_at(length, size - 8 - length))
    if extensions is None:
        raise DataError(f"{name}: the footer is damaged: its Arrow schema cannot be read", file=name)
    if extensions:
        raise DataError(
            f"{name}: it has columns of Arrow extension types, which can carry code and are not "
            "read\nwrite them as plain columns or lists of numbers",
            file=name,
        )


def _look_at_ends(name: str, source: pa.NativeFile) -> bytes:
    """Return the last 8 bytes of a Parquet file.

    Raises:
        DataError: the file is empty, encrypted, incomplete or not a Parquet file; names another format if it is known.
    """
    size = source.size()
    tail: bytes = source.read_at(min(size, 8), max(size - 8, 0))
    if size == 0:
        raise DataError(f"{name}: the file is empty (0 bytes)", file=name)
    if tail[-4:] == b"PARE":
        raise DataError(f"{name}: the file is encrypted: write it without encryption", file=name)
    if size < 12 or tail[-4:] != b"PAR1":
        begun = source.read_at(min(size, 4), 0) == b"PAR1"
        what = "a Parquet file whose end is cut off, or not a Parquet file" if begun else "not a Parquet file"
        way = "\nwrite it again" if begun else f"\n{other_format(name) or OTHERWISE}"
        raise DataError(f"{name}: {what} ({size} bytes){way}", file=name)
    return tail


def _extensions(footer: bytes) -> bool | None:
    """Return whether an Arrow schema in the footer names an extension type; None if it cannot be parsed."""
    key = b"ARROW:schema"
    place = footer.find(key)
    while place >= 0:
        text = _thrift_text(footer, place + len(key))
        try:
            schema = base64.b64decode(text, validate=True) if text is not None else None
        except binascii.Error:
            schema = None
        if schema is None:
            return None
        if b"ARROW:extension" in schema:
            return True
        place = footer.find(key, place + len(key))
    return False


def _thrift_text(data: bytes, place: int) -> bytes | None:
    """Return the text at `place` in Thrift's compact form: a header byte, the length (7 bits per byte), the text.

    Return None if there is no complete text.
    """
    if data[place : place + 1] != b"\x18":
        return None
    length = shift = 0
    for at in range(place + 1, min(place + 6, len(data))):
        length |= (data[at] & 0x7F) << shift
        shift += 7
        if data[at] < 0x80:
            text = data[at + 1 : at + 1 + length]
            return text if len(text) == length else None
    return None
