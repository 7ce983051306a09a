"""Find local files by path, directory or pattern. A pickled `LocalFiles` has the paths, not the files."""

from __future__ import annotations

import difflib
import glob
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import cast

from rayps_client.errors import DataError

from rayps.data.unsupported import is_pattern, refuse_ray_data

PathsGiven = str | PathLike[str] | Sequence[str | PathLike[str]]


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """Files of this host at some absolute paths, which may be directories or patterns such as `part-*.csv`.

    `call`: the function of `rayps.data` that reads them, for error messages. `suffixes`: the files of a directory that
    are read, with those of its subdirectories.
    """

    call: str
    paths: tuple[str, ...]
    suffixes: tuple[str, ...]

    def list(self) -> tuple[str, ...]:
        """Return the files in the order of the paths; the files of a directory or pattern are sorted.

        Raises:
            DataError: a path does not exist, or a directory or pattern has no file.
        """
        return tuple(file for path in self.paths for file in self._files_at(path))

    def _files_at(self, path: str) -> Sequence[str]:
        here = Path(path)
        if here.is_file():
            return [path]
        if here.is_dir():
            inside = (file for file in here.rglob("*") if file.is_file() and file.name.lower().endswith(self.suffixes))
            found = sorted(
                str(file) for file in inside if not any(part[0] in "._" for part in file.relative_to(here).parts)
            )
            if not found:
                raise DataError(
                    f"{path}: the directory has no file that ends in {' or '.join(self.suffixes)}", file=path
                )
            return found
        if is_pattern(path):
            found = sorted(file for file in glob.glob(path, recursive=True) if Path(file).is_file())  # noqa: PTH207
            if not found:
                raise DataError(f"{path}: no file matches this pattern", file=path)
            return found
        near = difflib.get_close_matches(here.name, _names(here.parent), n=1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise DataError(f"{path}: there is no such file or directory{hint}", file=path)

    def digest(self, *options: object) -> str:
        """Return a hash of the files' paths, sizes and times of change, and of these options."""
        facts = [(file, Path(file).stat().st_size, Path(file).stat().st_mtime_ns) for file in self.list()]
        return hashlib.sha256(repr((self.call, facts, options)).encode()).hexdigest()[:24]


def local_files(call: str, paths: PathsGiven, suffixes: tuple[str, ...]) -> LocalFiles:
    """Return the files at these paths; relative paths become absolute.

    Raises:
        DataError: there is no path, or a path is not of this host's file system.
    """
    refuse_ray_data(call, paths)
    given = list(paths) if isinstance(paths, (list, tuple)) else [cast(str, paths)]
    if not given:
        raise DataError(f"{call}: the list of paths is empty: give a file, a directory, a pattern or a list of them")
    for path in given:
        if not isinstance(path, (str, PathLike)):
            raise DataError(f"{call}: {type(path).__name__} is not a path: give a file, a directory or a pattern")
        if "://" in str(path):
            raise DataError(
                f"{call}: {path} is not on this host's file system: copy or mount it, or give "
                "rayps.data.arrow(pyarrow.dataset.dataset(URL, ...))\nor rayps.data.parquet, which read other file "
                "systems",
                file=str(path),
            )
    return LocalFiles(call, tuple(str(Path(path).expanduser().absolute()) for path in given), suffixes)


def _names(folder: Path) -> Sequence[str]:
    return [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
