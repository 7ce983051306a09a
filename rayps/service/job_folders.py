"""The job folders of a state directory: a copy of each job's row, and the removal of folders.

    jobs/ID/job.json      the job's row of the store, as of its submission or its last attempt
    jobs/.deleted-ID      a folder that is being removed

The store is authoritative. `job.json` is read only to restore a row that the store lost.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from rayps_client.values import JsonObject

from rayps.core.job.records import AttemptRecord, read_json

log = logging.getLogger(__name__)

ROW_FILE = "job.json"
VERSION = 1
_ID = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")
_DELETED = ".deleted-"


class JobRow(TypedDict, total=False):
    """A job's row of the store as JSON data: what `job.json` holds."""

    id: str
    name: str
    status: str
    reason: str | None
    spec: JsonObject
    attempt: int
    failures: int
    interrupted: bool
    created_at: float
    started_at: float | None
    finished_at: float | None
    attempt_at: float | None
    stop_requested_at: float | None
    metrics: dict[str, float] | None
    checkpoint: str | None
    idempotency_key: str | None
    sweep: str | None
    scale_to: int | None
    allowed: int | None
    allowed_at: float | None


def write_row(folder: Path, row: JobRow, *, sync: bool = True) -> None:
    """Write a job's row to `job.json` in its folder, which only the owner can read. With `sync`, call fsync."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = folder / f".{ROW_FILE}.{os.getpid()}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump({"version": VERSION, **row}, file)
        file.flush()
        if sync:
            os.fsync(file.fileno())
    draft.replace(folder / ROW_FILE)


def read_row(folder: Path) -> JobRow | None:
    """Return the row in a folder's `job.json`, or None if it is missing, of another job, or of a newer rayps."""
    found = read_json(folder / ROW_FILE)
    if found is None or found.pop("version", None) != VERSION or found.get("id") != folder.name:
        return None
    row: JobRow = found
    return row


def read_attempt(path: Path) -> AttemptRecord:
    """Return the content of `driver.json` or `launch.json`; an empty dict if the file does not exist."""
    found: AttemptRecord | None = read_json(path)
    return {} if found is None else found


def list_job_ids(jobs_dir: Path) -> Iterator[str]:
    """List the ids of the jobs that have a folder, oldest first."""
    names = (path.name for path in jobs_dir.iterdir()) if jobs_dir.is_dir() else ()
    return (name for name in sorted(names) if _ID.fullmatch(name))


def remove_folder(jobs_dir: Path, job_id: str) -> None:
    """Remove a job's folder. After an interruption, `complete_removals` completes the removal.

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


def complete_removals(jobs_dir: Path) -> None:
    """Complete the interrupted removals of folders."""
    for doomed in jobs_dir.glob(f"{_DELETED}*"):
        try:
            shutil.rmtree(doomed)
        except OSError as error:
            log.warning("%s cannot be removed: %s", doomed, error)
