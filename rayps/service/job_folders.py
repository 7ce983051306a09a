"""The job folders of a state directory: what each says about its job where the store does not know it, and its removal.

    jobs/ID/job.json      the job's row of the store, as of its submission or its last attempt
    jobs/.deleted-ID      a folder on its way out

The store decides what a job is. `job.json` is what a job is made from again after the store was lost.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

SPEC = "job.json"
VERSION = 1
_ID = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")
_DELETED = ".deleted-"


def keep(folder: Path, row: dict[str, Any], *, sync: bool = True) -> None:
    """Write `job.json` into a job's folder, which is made for its owner only; with `sync` on disk when this returns."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = folder / f".{SPEC}.{os.getpid()}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump({"version": VERSION, **row}, file)
        file.flush()
        if sync:
            os.fsync(file.fileno())
    draft.replace(folder / SPEC)


def read(folder: Path) -> dict[str, Any] | None:
    """The row that `keep` wrote; None where there is none of this folder's job, or of a newer rayps."""
    found = read_json(folder / SPEC)
    if found is None or found.pop("version", None) != VERSION or found.get("id") != folder.name:
        return None
    return found


def read_json(path: Path) -> dict[str, Any] | None:
    """An object from a small file that is replaced in one step; None while it is not there."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def ids(jobs_dir: Path) -> Iterator[str]:
    """The ids of the jobs that have a folder, oldest first."""
    names = (path.name for path in jobs_dir.iterdir()) if jobs_dir.is_dir() else ()
    return (name for name in sorted(names) if _ID.fullmatch(name))


def remove(jobs_dir: Path, job_id: str) -> None:
    """Remove a job's folder. A removal that is cut off is completed by `sweep`.

    Raises:
        OSError: the folder cannot be removed.
    """
    doomed = jobs_dir / f"{_DELETED}{job_id}"
    if (jobs_dir / job_id).exists():
        if doomed.exists():
            shutil.rmtree(doomed)
        (jobs_dir / job_id).rename(doomed)
    if doomed.exists():
        shutil.rmtree(doomed)


def sweep(jobs_dir: Path) -> None:
    """Complete removals that were cut off."""
    for doomed in jobs_dir.glob(f"{_DELETED}*"):
        try:
            shutil.rmtree(doomed)
        except OSError as error:
            log.warning("%s cannot be removed: %s", doomed, error)
