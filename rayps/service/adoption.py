"""Restore jobs that the store lost (a database moved away, a deleted WAL, an old backup) from their folders.

A job's folder holds `job.json` from its submission on, and the files that its driver wrote: `driver.json` (the attempt
that has started), `progress.json`, `outcome.json`. At each start the service compares the folders with the store:

- a folder with a valid `job.json` whose job has no row, or has the row of an earlier attempt: the service writes the
  row from the folder. The scheduler then finds the job's driver, records the outcome, or starts the job again from its
  newest checkpoint;
- a folder without a valid `job.json` whose job has no row: the service names the folder in the log and does not change
  it. It kills the job's driver if the driver is alive.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rayps_client.errors import ConfigError

from rayps.core.job.job_status import Status
from rayps.core.job.records import OutcomeRecord, read_json
from rayps.service import job_folders, processes
from rayps.service.job_folders import JobRow
from rayps.service.plan import EndJob, OpenJob, plan
from rayps.strategies.job import JobSpec

if TYPE_CHECKING:  # `rayps doctor` compares without the store's packages
    from rayps.service.store import Store

log = logging.getLogger(__name__)

ROW_MISSING = "the store had no row for this job: the row was restored from the job's folder"
ROW_OUTDATED = "the store's row was older than this job's folder: the row was updated from the folder"
_SHOWN = 5  # the most job ids that a message lists


@dataclass(frozen=True, slots=True)
class FolderRow:
    """The facts in a job's folder."""

    row: JobRow | None  # the content of `job.json`; None if the file is missing or invalid
    attempt: int = 0  # the number of the last attempt; 0 if no attempt has started
    failures: int = 0
    outcome: OutcomeRecord | None = None  # None if the job has not ended


@dataclass(frozen=True, slots=True)
class StoreRow:
    """The columns of a store's row that the comparison needs."""

    status: Status
    attempt: int


@dataclass(frozen=True, slots=True)
class FolderDifferences:
    """The ids of the jobs whose folder and row differ: one field for each kind of difference."""

    rows_missing: tuple[str, ...] = ()  # the folder has a job.json, the store has no row
    rows_outdated: tuple[str, ...] = ()  # the row has not ended, and its attempt is earlier than the folder's
    folders_invalid: tuple[str, ...] = ()  # the folder has no job.json, the store has no row
    job_files_missing: tuple[str, ...] = ()  # the row has not ended, and there is no job.json


def read_folder(folder: Path) -> FolderRow:
    """Read the job's row, the number of the last attempt that was started, and the outcome from the job's folder."""
    attempts = [job_folders.read_attempt(folder / name).get("attempt") for name in ("driver.json", "launch.json")]
    begun = any((folder / name).exists() for name in ("events.jsonl", "progress.json", "outcome.json"))
    attempt = max([each for each in attempts if isinstance(each, int)], default=int(begun))
    failures = (read_json(folder / "progress.json") or {}).get("failures", 0)
    return FolderRow(
        job_folders.read_row(folder),
        attempt,
        failures if isinstance(failures, int) else 0,
        read_json(folder / "outcome.json"),
    )


def find_differences(jobs_dir: Path, rows: Mapping[str, StoreRow]) -> tuple[FolderDifferences, dict[str, FolderRow]]:
    """Compare the job folders with the store's rows; return the differences, and a dict from job id to folder facts.

    A folder is read only if its job has no row or has not ended.
    """
    folders: dict[str, FolderRow] = {}
    for job_id in job_folders.list_job_ids(jobs_dir):
        if job_id not in rows or not rows[job_id].status.terminal:
            folders[job_id] = read_folder(jobs_dir / job_id)
    return compare(rows, folders), folders


def compare(rows: Mapping[str, StoreRow], folders: Mapping[str, FolderRow]) -> FolderDifferences:
    """Return the differences between the store's rows and the folders' contents. Pure."""
    without = [job_id for job_id in folders if job_id not in rows]
    live = [job_id for job_id, row in rows.items() if not row.status.terminal]
    return FolderDifferences(
        tuple(job_id for job_id in without if _is_usable(folders[job_id].row)),
        tuple(job_id for job_id in live if job_id in folders and folders[job_id].attempt > rows[job_id].attempt),
        tuple(job_id for job_id in without if not _is_usable(folders[job_id].row)),
        tuple(job_id for job_id in live if job_id not in folders or folders[job_id].row is None),
    )


def make_restored_columns(found: FolderRow) -> JobRow:
    """Return the columns that a restored row takes from the folder: status, attempt, failures and those of the outcome.

    The status is that of the outcome if there is one, QUEUED if no attempt has started, and otherwise UNKNOWN.
    """
    if found.outcome is not None:
        end = plan([OpenJob("", status=Status.UNKNOWN, outcome=found.outcome)], None, None, None)[0]
        assert isinstance(end, EndJob)
        facts: JobRow = {
            "status": end.status,
            "reason": end.message or None,
            "metrics": end.metrics,
            "checkpoint": end.checkpoint,
            "finished_at": end.finished_at,
        }
    elif found.attempt == 0:
        facts = {"status": Status.QUEUED, "reason": None}
    else:  # a lost driver does not count as a failure of the job
        facts = {"status": Status.UNKNOWN, "reason": "searching for the job's driver", "interrupted": True}
    return {**facts, "attempt": found.attempt, "failures": found.failures}


async def adopt(store: Store, jobs_dir: Path) -> FolderDifferences:
    """Restore the rows that the store lost, and log the folders from which no row can be restored."""
    await asyncio.to_thread(job_folders.complete_removals, jobs_dir)
    rows = {job_id: StoreRow(status, attempt) for job_id, status, attempt in await store.statuses()}
    findings, folders = await asyncio.to_thread(find_differences, jobs_dir, rows)
    # an older rayps wrote no job.json, or the service ended before it wrote the file
    for job_id in findings.job_files_missing:
        await asyncio.to_thread(job_folders.write_row, jobs_dir / job_id, await store.json_row(job_id), sync=False)
    restored = [
        ((folders[job_id].row or {}) | make_restored_columns(folders[job_id]), ROW_MISSING)
        for job_id in findings.rows_missing
    ]
    restored += [
        ({"id": job_id} | make_restored_columns(folders[job_id]), ROW_OUTDATED) for job_id in findings.rows_outdated
    ]
    if restored:
        await store.restore_rows(restored)
        log.warning(
            "the rows of %d jobs were missing, or older than the jobs' folders, and were restored from the folders: %s",
            len(restored),
            list_ids([*findings.rows_missing, *findings.rows_outdated]),
        )
    for job_id in findings.folders_invalid:
        await asyncio.to_thread(_kill_driver, jobs_dir / job_id)
    if findings.folders_invalid:
        log.warning(
            "%d job folders in %s have no row in the store and no valid %s, and are not changed: %s",
            len(findings.folders_invalid),
            jobs_dir,
            job_folders.ROW_FILE,
            list_ids(findings.folders_invalid),
        )
    return findings


def list_ids(job_ids: list[str] | tuple[str, ...]) -> str:
    """Return the first few ids, and how many more there are, as text."""
    more = f" and {len(job_ids) - _SHOWN} more" if len(job_ids) > _SHOWN else ""
    return ", ".join(job_ids[:_SHOWN]) + more


def _kill_driver(folder: Path) -> None:
    """Kill the driver of a job without a row. The driver's workers then end too, and free their CPUs."""
    begun = job_folders.read_attempt(folder / "driver.json")
    pid, since = begun.get("pid"), begun.get("started")
    if isinstance(pid, int) and isinstance(since, int) and processes.is_alive(pid, since):
        log.warning(
            "the driver of job %s (process %d) is killed: the store has no row for the job, and the job's folder has "
            "no valid %s",
            folder.name,
            pid,
            job_folders.ROW_FILE,
        )
        processes.kill_all([pid])


def _is_usable(row: JobRow | None) -> bool:
    try:
        JobSpec.from_dict((row or {}).get("spec") or {})
    except (ConfigError, TypeError, AttributeError):
        return False
    return all(row and row.get(key) is not None for key in ("id", "name", "created_at"))
