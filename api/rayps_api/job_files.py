"""The files of a job that may be downloaded: complete checkpoints, and traces of `profile`."""

from __future__ import annotations

import re
from pathlib import Path

from rayps_client.errors import NotFound

MANIFEST = "manifest.json"  # written last into a checkpoint; not imported from the module that loads torch
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MOST_DEPTH = 6  # of a path: checkpoints/best/step-00000010/tables/NAME/rows-00000.parquet


def downloads(home: Path) -> dict[str, int]:
    """Return the files in a job's folder that may be downloaded: from the path, with "/", to the size in bytes."""
    folders = [path for path in _inside(home / "checkpoints") if _is_checkpoint(path)]
    for kept in _inside(home / "checkpoints"):  # a folder for a checkpoint that a callback keeps, such as best
        folders += [path for path in _inside(kept) if kept not in folders and _is_checkpoint(path)]
    found: dict[str, int] = {}
    for folder in [*sorted(folders), home / "profile"]:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(home).as_posix()
            if path.is_file() and not path.is_symlink() and _allowed(name):
                found[name] = path.stat().st_size
    return found


def downloadable(home: Path, name: str) -> Path:
    """Return the file in a job's folder that `name` is the path of. Raises NotFound if it may not be downloaded."""
    parts = name.split("/")
    folders = [home / "/".join(parts[:depth]) for depth in (2, 3)]
    known = _allowed(name) and (
        parts[0] == "profile" or (parts[0] == "checkpoints" and any(map(_is_checkpoint, folders)))
    )
    path = home / name
    if not known or not path.is_file() or path.resolve() != home.resolve() / name:
        raise NotFound(f"the job has no file {name[:200]!r}: GET /api/v1/jobs/ID/files lists them", status=404)
    return path


def _is_checkpoint(folder: Path) -> bool:
    return folder.is_dir() and (folder / MANIFEST).is_file()


def _allowed(name: str) -> bool:
    parts = name.split("/")
    return 2 <= len(parts) <= _MOST_DEPTH and all(_NAME.fullmatch(part) and ".tmp-" not in part for part in parts)


def _inside(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
