"""Which files are the user's own, and how a line of them is named in messages."""

from __future__ import annotations

import functools
import site
import sys
import sysconfig
from contextlib import suppress
from importlib.metadata import Distribution
from pathlib import Path

_PACKAGES = ("rayps", "rayps_client")


def package_folders() -> list[Path]:
    """Return the folders of rayps's own packages in this process."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _PACKAGES]
    return [Path(file).parent for file in files if isinstance(file, str)]


def is_ours(filename: str) -> bool:
    """Return whether the file name of a frame is in one of rayps's own packages."""
    return filename.startswith(tuple(f"{folder}/" for folder in package_folders()))


@functools.cache  # called for every loaded module, each time that code is sent
def users_file(file: str) -> bool:
    """Return whether a path is that of a Python file of the user: not installed, not Python's, not rayps's."""
    path = resolved(file)
    return path.suffix == ".py" and not _is_installed(path)


def is_users_code(filename: str) -> bool:
    """Return whether the file name of a frame is the user's: a module, a script, a notebook's cell or `<stdin>`."""
    return not filename.startswith("<frozen") and (filename.startswith("<") or not _is_installed(resolved(filename)))


def place_in(filename: str, line: int) -> str:
    """Return `file:line`, with the file's path from the current directory if it is below it."""
    with suppress(OSError, ValueError):  # there may be no current directory
        return f"{Path(filename).relative_to(Path.cwd())}:{line}"
    return f"{filename}:{line}"


@functools.cache
def resolved(file: str) -> Path:
    """Return the absolute path of a file, without links."""
    return Path(file).resolve()


@functools.cache
def _is_installed(file: Path) -> bool:
    if {"site-packages", "dist-packages"} & set(file.parts):
        return True
    if any(file.is_relative_to(folder) for folder in _installed()):
        return True
    return any(file.relative_to(folder).parts[0] in _put_into(folder) for folder in file.parents)


@functools.cache
def _put_into(folder: Path) -> frozenset[str]:
    """Return the names of the files and folders that `pip install --target` has put into a folder."""
    try:
        records = [Distribution.at(info) for info in folder.glob("*.dist-info")]
        return frozenset(file.parts[0] for each in records for file in each.files or () if file.parts)
    except OSError:  # a folder that cannot be listed
        return frozenset()


@functools.cache
def _installed() -> tuple[Path, ...]:
    paths = [sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages(), *map(str, package_folders())]
    return tuple({Path(path).resolve() for path in paths if path})
