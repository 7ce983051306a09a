"""Copy a state directory while the service runs. A service can be started on the copy.

SQLite's online backup first copies the store as of one moment. The folders of jobs and server groups are copied after
the store, and a job's folder may therefore be newer than the job's row. When a service starts on the copy,
`rayps.service.adoption` updates such rows. Files of running processes (Ray's token and address, locks, the service's
address) are not copied. To restore, copy the backup to the path of the lost state directory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rayps_client.errors import ConfigError

import rayps
from rayps.service.settings import Settings, private_write

MANIFEST = "backup.json"
_NOT_COPIED = re.compile(
    r"(ray[._]|service\.|rayps\.db|\.|lost\+found|backup\.json).*"
)  # not copied by `_yield_files`: files of running processes, and the store, which `_copy_store` copies
_CHECKPOINTS, _CODE = "checkpoints", "code"


@dataclass(frozen=True, slots=True)
class Backup:
    """The manifest of a backup: the path of the copied state directory, and the numbers of jobs, files and bytes."""

    made_at: float
    version: str
    state_dir: str
    jobs: int
    files: int
    bytes: int
    checkpoints: bool


def backup(settings: Settings, target: Path, *, checkpoints: bool = True) -> Backup:
    """Copy the state directory to `target`, which must be new or empty.

    If `checkpoints` is False, no checkpoint is copied. A service that is started on the copy then repeats the jobs that
    had not ended from round 0.

    Raises:
        ConfigError: there is no store, the target is not empty or inside the state directory, or the store is damaged.
        OSError: the target cannot be written.
    """
    source, target = settings.state_dir.resolve(), target.expanduser().absolute()
    if not settings.database.exists():
        raise ConfigError(
            f"there is no store {settings.database}: name the service's state directory with --state-dir",
            field="state_dir",
        )
    if target.resolve() == source or source in target.resolve().parents:
        raise ConfigError(
            f"the backup's folder {target} is inside the state directory {source}: give a folder that is not inside",
            field="target",
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is not empty: give a new folder for each backup", field="target")
    target.mkdir(parents=True, exist_ok=True, mode=0o700)
    target.chmod(0o700)
    jobs = _copy_store(settings.database, target / settings.database.name)
    files = size = 0
    for path in _yield_files(source, checkpoints):
        copied = _copy(path, target / path.relative_to(source))
        files, size = files + (copied is not None), size + (copied or 0)
    _remove_incomplete(source, target)
    made = Backup(time.time(), rayps.__version__, str(source), jobs, files, size, checkpoints)
    private_write(target / MANIFEST, json.dumps(asdict(made)))  # written last: a backup without it is incomplete
    return made


def _copy_store(database: Path, target: Path) -> int:
    os.close(_create_private(target))
    source = sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True, timeout=30.0)
    copy = sqlite3.connect(target)
    try:
        source.backup(copy)
        verdict = copy.execute("PRAGMA integrity_check").fetchone()[0]
        if verdict != "ok":
            raise ConfigError(f"the store {database} and its copy {target} are damaged: {verdict}", field="state_dir")
        jobs: int = copy.execute("SELECT count(*) FROM jobs").fetchone()[0]
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"the store {database} cannot be copied: {error}", field="state_dir") from error
    finally:
        source.close()
        copy.close()
    return jobs


def _yield_files(source: Path, checkpoints: bool) -> Iterator[Path]:
    """Yield the files to copy: no symbolic links, and no temporary files, which a process is about to rename."""
    for folder, folders, names in os.walk(source):
        here = Path(folder)
        if here == source:
            folders[:] = [name for name in folders if not _NOT_COPIED.fullmatch(name)]
            names = [name for name in names if not _NOT_COPIED.fullmatch(name)]
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and ".tmp-" not in name and (checkpoints or name != _CHECKPOINTS)
        )
        if here == source and _CODE in folders:  # last, because a job's archive is older than its folder
            folders.remove(_CODE)
            folders.append(_CODE)
        yield from (
            here / name for name in sorted(names) if not name.startswith(".") and not (here / name).is_symlink()
        )


def _copy(path: Path, target: Path) -> int | None:
    """Copy a file, readable by its owner only; return its size in bytes, or None if the service has just deleted it.

    The service deletes old checkpoints while it runs.
    """
    _make_folder(target.parent)
    try:
        with path.open("rb") as read, os.fdopen(_create_private(target), "wb") as write:
            shutil.copyfileobj(read, write, 1 << 20)
    except FileNotFoundError:
        return None
    return target.stat().st_size


def _create_private(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


def _make_folder(folder: Path) -> None:
    if not folder.exists():
        _make_folder(folder.parent)
        folder.mkdir(mode=0o700)


def _remove_incomplete(source: Path, target: Path) -> None:
    """Delete the copy of each checkpoint that the service has deleted since: the copy may be incomplete."""
    for copy in target.glob(f"jobs/*/{_CHECKPOINTS}/*"):
        if not (source / copy.relative_to(target)).exists():
            shutil.rmtree(copy, ignore_errors=True)
