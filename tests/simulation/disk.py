"""The simulated disk: files in memory, shared by all hosts. A process can be killed at each write.

What a process has written and not flushed is lost with it, as in a crash of the process; what was flushed stays.
"""

from __future__ import annotations

import errno
import fnmatch
import os
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any

from simulation.kernel import Broken, Process, simulation


class Disk:
    """The files by path, and the folders."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.folders: set[str] = {"/"}
        self.stamps: dict[str, int] = {}  # path -> number of the last write
        self.opened: dict[int, tuple[Process, SimPath]] = {}  # by descriptor, with the process that has opened it
        self.full = False  # whether a write fails
        self.watch: list[Any] = []  # called with (path, content) after each change of a file
        self._writes = 0

    def put(self, path: str, data: bytes) -> None:
        """Set the content of a file."""
        self._writes += 1
        self.files[path], self.stamps[path] = data, self._writes
        self.folders.add(path.rpartition("/")[0] or "/")
        simulation().changed = True
        for watch in self.watch:
            watch(path, data)


class SimFile:
    """An open file."""

    def __init__(self, path: SimPath, mode: str) -> None:
        self._path, self._text = path, "b" not in mode
        disk, name = path.disk, str(path)
        self._writes = mode[0] in "wa" or "+" in mode
        if mode[0] == "w":
            path.write(b"")
        elif mode[0] == "a":
            if name not in disk.files:
                path.write(b"")
        elif name not in disk.files:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        self._buffer = b""
        self._at = 0
        self._append = mode[0] == "a"

    def write(self, data: Any) -> int:
        self._buffer += data.encode() if isinstance(data, str) else bytes(data)
        return len(data)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        if self._buffer:
            found, self._buffer = self._buffer, b""
            self._path.write(self._path.disk.files.get(str(self._path), b"") + found)

    def read(self, count: int = -1) -> Any:
        data = self._path.read_bytes()[self._at :]
        data = data if count < 0 else data[:count]
        self._at += len(data)
        return data.decode() if self._text else data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> None:
        self._at = offset + (len(self._path.read_bytes()) if whence == os.SEEK_END else 0)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read().splitlines(keepends=True))

    def fileno(self) -> SimFile:
        return self

    def sync(self) -> None:
        self.flush()

    def close(self) -> None:
        self.flush()

    def __enter__(self) -> SimFile:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self.close()


class _Stat:
    def __init__(self, size: int, stamp: int) -> None:
        self.st_size, self.st_mtime_ns, self.st_mtime = size, stamp, float(stamp)


class SimPath(PurePosixPath):
    """Stands in for `pathlib.Path`."""

    @property
    def disk(self) -> Disk:
        return simulation().disk

    def __fspath__(self) -> str:
        raise Broken(f"{self} is given to the system's files: a module of the product is not simulated")

    def write(self, data: bytes) -> None:
        """Write the whole file. The process may be killed before it."""
        sim = simulation()
        sim.alive()
        sim.place(f"disk: before a write of {self.name}")
        if self.disk.full:
            raise OSError(errno.ENOSPC, "No space left on device", str(self))
        self.disk.put(str(self), data)

    @classmethod
    def cwd(cls) -> SimPath:
        return cls("/work")

    def resolve(self) -> SimPath:
        return self

    absolute = resolve

    def exists(self) -> bool:
        name = str(self)
        return name in self.disk.files or name in self.disk.folders or any(self._below())

    def is_file(self) -> bool:
        return str(self) in self.disk.files

    def is_dir(self) -> bool:
        return str(self) in self.disk.folders or any(self._below())

    def _below(self) -> Iterator[str]:
        start = f"{self}/"
        return (name for name in [*self.disk.files, *self.disk.folders] if name.startswith(start))

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        simulation().alive()
        self.disk.folders.update(map(str, [self, *self.parents]))

    def read_bytes(self) -> bytes:
        if str(self) == "/proc/self/stat":
            return f"1 (x) S {' '.join(['0'] * 18)} {simulation().alive().process.pid} 0".encode()
        found = self.disk.files.get(str(self))
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(self))
        return found

    def read_text(self, encoding: str | None = None) -> str:
        return self.read_bytes().decode()

    def write_bytes(self, data: bytes) -> None:
        self.write(data)

    def write_text(self, text: str, encoding: str | None = None) -> None:
        self.write(text.encode())

    def open(self, mode: str = "r", encoding: str | None = None) -> SimFile:
        return SimFile(self, mode)

    def rename(self, target: Any) -> SimPath:
        sim = simulation()
        sim.alive()
        sim.place(f"disk: before the rename to {SimPath(target).name}")
        files, start = self.disk.files, f"{self}/"
        if str(self) in files:
            self.disk.put(str(target), files.pop(str(self)))
        else:
            for name in [name for name in files if name.startswith(start)]:
                self.disk.put(str(target) + name[len(str(self)) :], files.pop(name))
            moved = {name for name in self.disk.folders if name == str(self) or name.startswith(start)}
            self.disk.folders = (self.disk.folders - moved) | {str(target) + n[len(str(self)) :] for n in moved}
        sim.place(f"disk: after the rename to {SimPath(target).name}")
        return SimPath(target)

    replace = rename

    def unlink(self, missing_ok: bool = False) -> None:
        simulation().alive()
        if self.disk.files.pop(str(self), None) is None and not missing_ok:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(self))

    def stat(self) -> _Stat:
        return _Stat(len(self.read_bytes()), self.disk.stamps[str(self)])

    def chmod(self, mode: int) -> None:
        pass

    def iterdir(self) -> Iterator[SimPath]:
        start = f"{self}/"
        names = {name[len(start) :].partition("/")[0] for name in self._below()}
        return iter([self / name for name in sorted(names)])

    def glob(self, pattern: str) -> Iterator[SimPath]:
        head, _, rest = pattern.partition("/")
        found = [path for path in self.iterdir() if fnmatch.fnmatch(path.name, head)]
        return iter([each for path in found for each in path.glob(rest)] if rest else found)


def rmtree(path: Any, ignore_errors: bool = False) -> None:
    """Stand in for `shutil.rmtree`."""
    sim = simulation()
    sim.alive()
    disk, start = sim.disk, f"{path}/"
    for name in [name for name in disk.files if name == str(path) or name.startswith(start)]:
        del disk.files[name]
    disk.folders = {name for name in disk.folders if name != str(path) and not name.startswith(start)}
