"""List Parquet files, read their footers, and open them safely. No rows are decoded here.

A footer may name Arrow extension types, whose readers can run code from the file (CVE-2023-47248, CVE-2026-41486).
Therefore the footer's bytes are checked before pyarrow reads them, and a file with such types is refused.
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
from rayps_client.errors import DataError

from rayps.data.unsupported import CONVERT, is_pattern, other_format, pattern, refuse_ray_data

if TYPE_CHECKING:
    import fsspec

SUFFIXES = (".parquet", ".parq", ".pq")
_BUFFER = 1 << 20  # bytes that are read ahead for each column; pyarrow's default is the whole column of a row group
_FOOTERS = 64  # the largest number of parsed footers in the cache of a `Files` object

PathGiven = str | PathLike[str]
FileSystem: TypeAlias = "pafs.FileSystem | fsspec.AbstractFileSystem | None"  # None: it follows from the path


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The place and the length of a row group."""

    file: int  # index in `Index.files`
    number: int  # the group's number in the file
    first: int  # the number of its first row in the file
    rows: int  # its number of rows


@dataclass(frozen=True, slots=True)
class Index:
    """The content of the footers of all files."""

    files: tuple[str, ...]  # paths
    sizes: tuple[int, ...]  # the bytes of each file
    groups: tuple[RowGroup, ...]  # of all files
    rows: int  # in all files
    schema: pa.Schema  # the schema of the first file


class Files:
    """The Parquet files at some paths of a file system. A pickled object has the paths, but not the cached footers."""

    def __init__(self, path: PathGiven | Sequence[PathGiven], filesystem: FileSystem = None) -> None:
        refuse_ray_data("parquet", path)
        given = [path] if isinstance(path, (str, PathLike)) else list(path)
        if not given:
            raise DataError("parquet: the list of paths is empty: give a file, a directory or a list of them")
        self._fs, self._paths = _resolve([str(item) for item in given], filesystem)
        for name in self._paths:
            self._refuse_unsupported(name)
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"_fs": self._fs, "_paths": self._paths, "_footers": OrderedDict()}

    def _refuse_unsupported(self, path: str) -> None:
        """Raise DataError if the path is a pattern, or a file of another format. Other paths are checked later."""
        if not (glob := is_pattern(path)) and other_format(path) is None:
            return
        with as_data_error(path):
            info = self._fs.get_file_info(path)
            if info.type == pafs.FileType.NotFound and glob:
                raise DataError(pattern(path, self._fs), file=path)
            if info.type == pafs.FileType.File and other_format(path):
                with self._fs.open_input_file(path) as source:
                    _check_ends(path, source)

    def index(self, columns: Callable[[pa.Schema, str], Sequence[str]]) -> Index:
        """Read the footers of all files. `columns(schema, file)` checks a schema and returns the columns to use.

        Raises:
            DataError: there is no file or no row, a file is incomplete, `columns` refuses a schema, or schemas differ.
        """
        files = tuple(self._list())
        groups: list[RowGroup] = []
        sizes: list[int] = []
        schema: pa.Schema | None = None
        for number, name in enumerate(files):
            with self.open(name) as file:
                used = columns(file.schema_arrow, name)
                schema = schema or file.schema_arrow
                _check_same_types(used, schema, file.schema_arrow, files[0], name)
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
        """Return the time of each file's last change as text, or "None" if the file system does not know the time."""
        with as_data_error(files[0]):
            return [str(info.mtime_ns) for info in self._fs.get_file_info(list(files))]

    def nulls(self, index: Index, group: RowGroup, used: Sequence[str]) -> bool:
        """Return whether the statistics of a row group count nulls in one of the columns `used`.

        Read rows of the group before you call this method. If the footer is damaged, pyarrow's reader refuses it, while
        the access to its column chunks here can crash the process.

        Raises:
            DataError: the file ends before the row group does.
        """
        name, size = index.files[group.file], index.sizes[group.file]
        with self.open(name, size) as file:
            found = file.metadata.row_group(group.number)
            chunks = [found.column(leaf) for leaf in _leaves(file.metadata, used)]
            _check_inside_file(name, group.number, chunks, size)
            return any(map(_has_nulls, chunks))

    def _list(self) -> list[str]:
        found: list[str] = []
        for path in self._paths:
            with as_data_error(path):
                info = self._fs.get_file_info(path)
            if info.type == pafs.FileType.NotFound:
                raise DataError(f"{path}: there is no such file or directory{self._near(path)}", file=path)
            found += self._inside(path) if info.type == pafs.FileType.Directory else [path]
        return found

    def _inside(self, folder: str) -> list[str]:
        with as_data_error(folder):
            infos = self._fs.get_file_info(pafs.FileSelector(folder, recursive=True))
        names = sorted(info.path for info in infos if info.type == pafs.FileType.File)
        chosen = [name for name in names if name.endswith(SUFFIXES) and not _hidden(name[len(folder) :])]
        if not chosen:
            there = f"it has {names[0].rpartition('/')[2]}" if names else "it is empty"
            hint = other_format(names[0]) if names else None
            raise DataError(
                f"{folder}: the directory has no file that ends in .parquet ({there})"
                f"{f'{chr(10)}{hint}' if hint else ''}",
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
        with as_data_error(name):
            return int(self._fs.get_file_info(name).size)

    @contextmanager
    def open(self, name: str, size: int | None = None) -> Iterator[pq.ParquetFile]:
        """Open one file for reading. `size`: the bytes that the file must have; None if they are not known yet.

        Raises:
            DataError: the file is missing, is damaged, has another size than `size`, or has extension types.
        """
        with as_data_error(name), self._fs.open_input_file(name) as source:
            if size is not None and source.size() != size:
                raise DataError(f"{name}: the file changed while it was in use: start the run again", file=name)
            footer = self._footers.get(name) if size is not None else None
            if footer is None:
                _check_footer(name, source)
            file = pq.ParquetFile(
                source, metadata=footer, buffer_size=_BUFFER, pre_buffer=False, page_checksum_verification=True
            )
            self._cache_footer(name, file.metadata)
            yield file

    def _cache_footer(self, name: str, footer: pq.FileMetaData) -> None:
        self._footers[name] = footer
        self._footers.move_to_end(name)
        while len(self._footers) > _FOOTERS:
            self._footers.popitem(last=False)


def _hidden(inside: str) -> bool:
    return any(part[:1] in ("_", ".") for part in inside.split("/"))


@contextmanager
def as_data_error(name: str, group: int | None = None) -> Iterator[None]:
    """Turn errors of pyarrow and of the file system into a DataError with the file and the number of the row group."""
    try:
        yield
    except (OSError, ValueError, OverflowError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        where = name if group is None else f"{name}, row group {group}"
        way_out = "write the file again, or leave it out"
        if reason.startswith("Expected all lists to be of size"):
            way_out = (
                "pyarrow before 26 cannot read a null in a column of lists of fixed size: install pyarrow 26, or write "
                "the column as lists of any length"
            )
        raise DataError(
            f"{where}: cannot be read: {reason}\n{way_out}", file=name, row_group=group, reason=reason
        ) from error


def _resolve(paths: list[str], filesystem: FileSystem) -> tuple[pafs.FileSystem, list[str]]:
    if filesystem is not None:
        known = isinstance(filesystem, pafs.FileSystem)
        return filesystem if known else pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), paths
    if not any("://" in path for path in paths):
        return pafs.LocalFileSystem(), [Path(path).expanduser().absolute().as_posix() for path in paths]
    with as_data_error(paths[0]):
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


def _check_inside_file(name: str, place: int, chunks: list[pq.ColumnChunkMetaData], size: int) -> None:
    for chunk in chunks:
        starts = [offset for offset in (chunk.dictionary_page_offset, chunk.data_page_offset) if offset]
        if min(starts, default=0) + chunk.total_compressed_size > size:
            raise DataError(
                f"{name}: row group {place} is cut off, or the footer is damaged: write the file again",
                file=name,
                row_group=place,
            )


def _check_same_types(used: Sequence[str], schema: pa.Schema, other: pa.Schema, first: str, name: str) -> None:
    for column in used:
        ours, theirs = schema.field(column).type, other.field(column).type
        if ours != theirs:
            raise DataError(
                f"{name}: column {column!r} is {theirs}, but it is {ours} in {first}\nwrite the files with one schema",
                file=name,
                column=column,
            )


# ------------------------------------------------------------------------ checks of the bytes, before pyarrow


def _check_footer(name: str, source: pa.NativeFile) -> None:
    """Check a file's footer. Raises DataError if the file is no Parquet file, is damaged, or has an extension type."""
    size, tail = source.size(), _check_ends(name, source)
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


def _check_ends(name: str, source: pa.NativeFile) -> bytes:
    """Return the last 8 bytes of a Parquet file.

    Raises:
        DataError: the file is empty, encrypted, incomplete or not a Parquet file. The text names a known other format.
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
        way = "\nwrite it again" if begun else f"\n{other_format(name) or CONVERT}"
        raise DataError(f"{name}: {what} ({size} bytes){way}", file=name)
    return tail


def _extensions(footer: bytes) -> bool | None:
    """Return whether an Arrow schema in the footer names an extension type, or None if it cannot be parsed."""
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
    """Return the text at `place`, or None if there is no complete text.

    In Thrift's compact form, a text is a header byte, its length with 7 bits in each byte, and its bytes.
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
