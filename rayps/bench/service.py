"""Measure the idle job service with many waiting jobs: its CPU time, and the time to stop one of the jobs.

The service is a real `rayps serve` whose Ray has one logical CPU; every waiting job needs two. The CPU time is that of
the service's process, without Ray's processes, read from /proc after the service has seen Ray for the first time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from rayps_client.errors import RaypsError, TrainingError

from rayps.bench.table import BenchRow, Opt
from rayps.core.job.job_status import Status
from rayps.service import job_folders
from rayps.service.client import Client
from rayps.service.settings import Settings
from rayps.service.store import Store
from rayps.strategies.job import JobSpec

_START_SECONDS = 600.0
_CREATED_AT = 1.7e9


@dataclass(frozen=True, slots=True)
class WaitingRow(BenchRow):
    """One measurement of a service in which `waiting` jobs wait."""

    columns: ClassVar[str] = "waiting | cpu: of one core | memory_mb: MB | stop_s: s to stop one"

    waiting: int
    cpu: float  # share of one core that the service uses while it gets no request
    memory_mb: float
    stop_s: float  # seconds from the request to stop a job until the job is STOPPED


def bench_service(
    waiting: Annotated[Sequence[int], Opt("Numbers of waiting jobs to measure, each at least 1.")] = (1, 1500, 20_000),
    seconds: Annotated[
        float, Opt("Seconds of the measurement, in which the service gets no request.", least=1.0)
    ] = 20.0,
) -> list[WaitingRow]:
    """Measure a service with each number of waiting jobs. The CPU time is measured for `seconds` seconds."""
    return [_measure(number, seconds) for number in waiting]


def _measure(waiting: int, seconds: float) -> WaitingRow:
    with tempfile.TemporaryDirectory(prefix="rayps-bench-") as folder:
        settings = Settings(state_dir=Path(folder) / "state").prepare()
        last = asyncio.run(_fill(settings, waiting))
        with (Path(folder) / "log").open("w") as log:
            service = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "rayps.cli",
                    "serve",
                    "--state-dir",
                    str(settings.state_dir),
                    "--port",
                    "0",
                    "--cpus",
                    "1",
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        try:
            _until(settings.service_file.exists, service)
            url = json.loads(settings.service_file.read_text())["url"]
            with Client(url, settings.token_file.read_text().strip()) as client:
                _until(lambda: _waits(client, last), service)
                before, began = _cpu_seconds(service.pid), time.monotonic()
                time.sleep(seconds)
                cpu = (_cpu_seconds(service.pid) - before) / (time.monotonic() - began)
                memory = _memory_mb(service.pid)
                began = time.monotonic()
                job = client.job(last).stop()
                _until(lambda: job.status is Status.STOPPED, service, pause=0.01)
                return WaitingRow(waiting, cpu, memory, time.monotonic() - began)
        finally:
            service.terminate()
            service.wait(120)


async def _fill(settings: Settings, waiting: int) -> str:
    spec = JobSpec("digits:Digits", workers=2).to_dict()
    rows: list[job_folders.JobRow] = [
        {
            "id": f"{number:026}",
            "name": "digits",
            "status": Status.QUEUED,
            "spec": spec,
            "attempt": 0,
            "failures": 0,
            "created_at": _CREATED_AT,
        }
        for number in range(waiting)
    ]
    store = await Store.open(settings.database)
    try:
        await store.restore_rows([(row, "filed") for row in rows])
    finally:
        await store.close()
    for row in rows:
        job_folders.write_row(settings.jobs_dir / str(row["id"]), row, sync=False)
    return str(rows[-1]["id"])


def _waits(client: Client, job_id: str) -> bool:
    with contextlib.suppress(RaypsError):
        return "the whole cluster has 1" in str(client.job(job_id).data["reason"])
    return False


def _until(ready: Callable[[], bool], service: subprocess.Popen[bytes], pause: float = 0.2) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not ready():
        if service.poll() is not None or time.monotonic() > deadline:
            raise TrainingError(
                f"the service was not ready within {_START_SECONDS:g} s, or has ended (exit code {service.poll()})"
            )
        time.sleep(pause)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
