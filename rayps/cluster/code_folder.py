"""A job's code at a host of the cluster: an archive that is unpacked into a temporary folder of the host.

The driver reads the archive from the service's state directory and sends it to each worker as an argument of the actor,
through the cluster's object store. No folder is shared between hosts. All processes of a job on one host use one
folder, and the last of them removes it; a folder whose processes were killed is removed by a later process.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rayps_client.errors import ConfigError

from rayps.cluster.scratch import SharedScratch
from rayps.cluster.user_packages import UserPackages
from rayps.core.job.code_archive import hash_of, unpack


@dataclass(frozen=True, slots=True)
class JobCode:
    """What a process of a job needs to run the user's code: an archive or a folder, required packages, arguments.

    `folder` is a path that some hosts may have; it is used without an archive. `paths` are folders below it, relative,
    from which modules are imported. `requirements` are lines for pip. `argv` is what the user's code finds in
    `sys.argv`; None leaves the process's own. `variables` are environment variables, as pairs (name, value).
    """

    job: str
    archive: bytes | None = None
    folder: str | None = None
    paths: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    argv: tuple[str, ...] | None = None
    variables: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @classmethod
    def of_caller(cls, folder: str | None) -> JobCode:
        """Return the code of a run without a service: from `folder`, with the arguments of this process."""
        return cls("", folder=folder, argv=tuple(sys.argv))

    @property
    def may_be_warm(self) -> bool:
        """Whether a process that has imported torch will do: packages keep their version, and torch reads variables."""
        return not self.requirements and not self.variables

    @property
    def leaves_files(self) -> bool:
        """Whether a process with this code has files on its host, which it should remove at its end."""
        return self.archive is not None or bool(self.requirements)


class OpenCode(Protocol):
    """The user's code that this process uses."""

    @property
    def folder(self) -> str | None:
        """The folder that is the current directory, or None if the code has none on this host."""

    def close(self) -> None:
        """Leave the folder, and remove it if this process is the last that uses it."""


class _Opened:
    def __init__(self, code: JobCode) -> None:
        self._scratch: SharedScratch | None = None
        self._packages: UserPackages | None = None
        self._home = str(Path.home()) if Path.home().is_dir() else "/"
        self._argv = list(sys.argv)
        self._before = {name: os.environ.get(name) for name, _ in code.variables}
        os.environ.update(code.variables)
        if code.argv is not None:
            sys.argv[:] = code.argv  # a worker's own are Ray's, which a parser of the user's would refuse
        self.folder: str | None = code.folder if code.folder and Path(code.folder).is_dir() else None
        if code.archive is not None:
            self.folder = self._unpacked(code.job, code.archive)
        try:
            if self.folder is not None and Path.cwd() != Path(self.folder):
                os.chdir(self.folder)
                _import_from([self.folder, *(str(Path(self.folder) / path) for path in code.paths)])
            if code.requirements:
                self._packages = UserPackages(code.requirements, self.folder)
        except BaseException:
            self.close()
            raise

    def _unpacked(self, job: str, archive: bytes) -> str:
        key = f"code-{job}-{hash_of(archive)[:16]}"
        self._scratch = SharedScratch(key, lambda path: _fill(path, archive), what="unpacking the job's code")
        return str((self._scratch.path / _FOLDER).resolve())

    def close(self) -> None:
        """Leave the folder, and remove it if this process is the last that uses it."""
        if self._packages is not None:
            self._packages.close()
        if self._scratch is not None:
            if Path(os.getcwd()).is_relative_to(self._scratch.path.resolve()):  # noqa: PTH109  as Path.cwd
                os.chdir(self._home)
            self._scratch.close()
        self._scratch = self._packages = None
        sys.argv[:] = self._argv
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._before = {}


_FOLDER = "code"


def _fill(path: Path, archive: bytes) -> None:
    """Unpack the archive. A process that was killed while it did may have left a part of the files."""
    shutil.rmtree(path / _FOLDER, ignore_errors=True)
    (path / _FOLDER).mkdir(mode=0o700, exist_ok=True)
    unpack(archive, path / _FOLDER)


def enter_code(code: JobCode) -> OpenCode:
    """Change to the folder of a job's code, so that relative paths and imports work in this process.

    An archive is unpacked first. Required packages are installed for this process. `sys.argv` becomes the job's, and
    its environment variables are set, until the code is closed.

    Raises:
        ConfigError: the archive is refused, or a requirement cannot be installed.
        DataError: another process has not unpacked the archive in time.
    """
    return _Opened(code)


def read_archive(file: Path, wanted: str) -> bytes:
    """Return the archive in `file`, whose SHA-256 must be `wanted`.

    Raises:
        ConfigError: there is no such file, or its content has changed.
    """
    try:
        archive = file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the job's code {wanted[:12]} is not in the state directory ({error.strerror}): submit the job again",
            field="code",
        ) from error
    if hash_of(archive) != wanted:
        raise ConfigError(
            f"the job's code {file} is damaged, since its SHA-256 is another: submit the job again", field="code"
        )
    return archive


def _import_from(folders: list[str]) -> None:
    sys.path[:] = [*dict.fromkeys(folders), *(each for each in sys.path if each not in folders)]
