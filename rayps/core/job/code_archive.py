"""A code archive: the files of a working directory as one tar file whose bytes depend on the files alone.

An archive contains regular files and symbolic links that stay inside of it, sorted by path, with a fixed time, owner
and mode. Equal trees therefore give equal bytes, and the archive's SHA-256 names the code. `unpack` trusts no archive:
it refuses a path that leaves the folder, every other kind of member, a member that overlaps another, a name that no
file may have, and more files or bytes than the limits. Therefore the files have no more bytes than the archive.
"""

from __future__ import annotations

import hashlib
import io
import os
import posixpath
import re
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rayps_client.errors import ConfigError
from rayps_client.machine.terminal_text import has_controls

MOST_FILES = 20_000  # members of an archive
HASH = r"^[0-9a-f]{64}$"  # the form of an archive's name: its SHA-256 in hexadecimal digits
FOLDER = "code"  # in the state directory: the archives
FIELD = "code"
_HASH = re.compile(HASH)
_LONGEST_PATH = 1000  # bytes of a member's path or of a link's target
_LONGEST_NAME = 255  # bytes of one part of a path, on the file systems of Linux and macOS


@dataclass(frozen=True, slots=True)
class ArchiveEntry:
    """A member of an archive: a file's content, or the target of a symbolic link. `path` uses `/`."""

    path: str
    content: bytes = b""
    executable: bool = False
    link: str | None = None


def write(entries: Iterable[ArchiveEntry]) -> bytes:
    """Return the archive of these entries, in the order of their paths.

    Raises:
        ConfigError: two entries contradict each other, or a path or link leaves the archive.
    """
    ordered = sorted(entries, key=lambda entry: entry.path.encode(errors="surrogateescape"))
    _Tree().add_all((entry.path, entry.link) for entry in ordered)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in ordered:
            member = tarfile.TarInfo(entry.path)
            member.mode = 0o755 if entry.executable else 0o644
            if entry.link is None:
                member.size = len(entry.content)
                tar.addfile(member, io.BytesIO(entry.content))
            else:
                member.type, member.linkname, member.mode = tarfile.SYMTYPE, entry.link, 0o777
                tar.addfile(member)
    return archive.getvalue()


def hash_of(archive: bytes) -> str:
    """Return the archive's name: its SHA-256 as 64 hexadecimal digits."""
    return hashlib.sha256(archive).hexdigest()


def locate_archive(state_dir: Path, code: str) -> Path:
    """Return the file of the archive named `code` in a service's state directory."""
    return state_dir / FOLDER / f"{code}.tar"


def is_hash(text: str) -> bool:
    """Return whether `text` has the form of an archive's name."""
    return _HASH.fullmatch(text) is not None


def read(file: BinaryIO, most_bytes: int) -> list[str]:
    """Check an archive without unpacking it; return the paths of its files and links.

    Raises:
        ConfigError: the file is no archive, or contains something that `unpack` refuses.
    """
    return [member.name for member in _read_members(file, most_bytes)[1]]


def unpack(archive: bytes, folder: Path, most_bytes: int | None = None) -> None:
    """Write the archive's files below `folder`, which must be empty. Without `most_bytes`, the archive's size limits.

    Raises:
        ConfigError: the bytes are no archive, or a member's path or link leaves the folder, or a member is neither a
            file nor a link, or the limits are exceeded. Nothing is written then.
    """
    tar, members = _read_members(io.BytesIO(archive), len(archive) if most_bytes is None else most_bytes)
    for member in (each for each in members if each.isreg()):
        path = folder / member.name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        content = tar.extractfile(member)
        assert content is not None, "the member is a file"
        mode = 0o700 if member.mode & 0o100 else 0o600
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.read())
    for member in (each for each in members if each.issym()):  # last, so that no file is written through a link
        path = folder / member.name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.symlink_to(member.linkname)


def check_link(path: str, link: str) -> str | None:
    """Return why the target of the symbolic link at `path` is refused, or None if it stays inside of the archive.

    `..` is accepted at the beginning of a target only, where it is resolved from the link's own folder. After another
    name it could be resolved from the folder to which a second link leads.
    """
    if link.startswith("/"):
        return "is absolute"
    parts = [part for part in link.split("/") if part not in ("", ".")]
    ups = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    if ".." in parts[ups:]:
        return "has '..' after another name"
    if ups > path.count("/"):
        return "leads out of the folder"
    return None


class _Tree:
    """The paths of an archive so far; refuses a path that is unsafe or contradicts another path."""

    def __init__(self) -> None:
        self._leaves: set[str] = set()
        self._folders: set[str] = set()

    def add_all(self, members: Iterable[tuple[str, str | None]]) -> None:
        """Add members, as pairs of a path and a link's target (None: a file). Raises ConfigError for an unsafe one."""
        for path, link in members:
            self._add(path, link)

    def _add(self, path: str, link: str | None) -> None:
        parts = path.split("/")
        if not path or any(part in ("", ".", "..") for part in parts) or "\0" in path:
            raise _explain_refusal(f"the path {path!r:.200} is not a plain path inside of the archive")
        if max(len(os.fsencode(path)), len(os.fsencode(link or ""))) > _LONGEST_PATH:
            raise _explain_refusal(f"the path {path[:60]!r}... or its link has more than {_LONGEST_PATH} bytes")
        names = [*parts, *(link or "").split("/")]
        if (longest := max(names, key=_bytes_of)) and _bytes_of(longest) > _LONGEST_NAME:
            raise _explain_refusal(
                f"{longest[:60]!r}... in the path {path[:60]!r} or its link has {_bytes_of(longest)} bytes, and a name "
                f"may have {_LONGEST_NAME}"
            )
        if has_controls(path) or has_controls(link or ""):
            raise _explain_refusal(
                f"the path {path!r:.200} or its link has a control character, such as a line end: rename the file, or "
                "list it in .raypsignore"
            )
        if link is not None and (not link or "\0" in link or (why := check_link(path, link)) is not None):
            raise _explain_refusal(f"the link {path!r:.200} -> {link!r:.200} {why if link else 'is empty'}")
        above = [posixpath.join(*parts[:count]) for count in range(1, len(parts))]
        if path in self._leaves or path in self._folders or not self._leaves.isdisjoint(above):
            raise _explain_refusal(f"the path {path!r:.200} occurs twice, or below a file or a link")
        self._leaves.add(path)
        self._folders.update(above)


def _bytes_of(name: str) -> int:
    return len(os.fsencode(name))


def _read_members(file: BinaryIO, most_bytes: int) -> tuple[tarfile.TarFile, list[tarfile.TarInfo]]:
    tree, size, end = _Tree(), 0, 0
    found: list[tarfile.TarInfo] = []
    try:
        tar = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115  the caller reads from it; never compressed
        while (member := tar.next()) is not None:
            if member.type not in (tarfile.REGTYPE, tarfile.SYMTYPE) or member.sparse is not None:
                raise _explain_refusal(f"{member.name!r:.200} is neither a file nor a symbolic link")
            if member.size < 0 or member.offset < end:  # tarfile follows a size from a header wherever it leads
                raise _explain_refusal(f"{member.name!r:.200} overlaps another member: a size in its header is wrong")
            end = member.offset_data + member.size
            tree.add_all([(member.name, member.linkname if member.issym() else None)])
            found.append(member)
            size += member.size
            if len(found) > MOST_FILES:
                raise _explain_refusal(f"it has more than {MOST_FILES} files")
            if size > most_bytes or end > _measure_length(file):
                raise _explain_refusal(f"its files have more than {most_bytes} bytes, or it is cut off")
    except (tarfile.TarError, ValueError, EOFError, OSError, OverflowError, MemoryError) as error:
        raise _explain_refusal(f"it is not a tar file: {error}") from error
    return tar, found


def _measure_length(file: BinaryIO) -> int:
    at = file.tell()
    end = file.seek(0, os.SEEK_END)
    file.seek(at)
    return end


def _explain_refusal(why: str) -> ConfigError:
    return ConfigError(f"the code archive is refused: {why}", field=FIELD)
