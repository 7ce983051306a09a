"""Measure the time from a call to the first training step: cold, on a running cluster, and as a job of a service.

Every run of `ray`, `cold` and `joined` is a new process, as a user's script is. Its parts are measured in that process;
the workers record the times of their first two losses. The second loss shows that the first step has ended. The time of
all workers is that of the last. The functions return rows and print nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from rayps_client.errors import ClusterError, ConfigError, TrainingError

from benchmarks.runs.first_steps import STEPS, read_first_times
from rayps.bench.table import BenchRow, Opt, Workers
from rayps.cluster.local import until
from rayps.core.job.job_status import Status
from rayps.service.client import Client
from rayps.service.processes import die_with_parent
from rayps.service.settings import Settings

SCENES = ("ray", "cold", "joined", "service", "warm", "ray_train")
_RUN_SECONDS = 300.0
_WARM_MARK = "RAYPS_BENCH_SERVICE"  # an environment variable that all processes of the measured service inherit
_CALM_SECONDS = 3.0  # seconds before a measurement, in which processes of the previous one end


@dataclass(frozen=True, slots=True)
class StartRow(BenchRow):
    """One scene. Times are medians in seconds from the call; `parts` are seconds of parts, in their order.

    `ray` has no losses: its `first_step` is the whole time of the import of ray and of `ray.init`. A scene that was
    skipped has no times.
    """

    columns: ClassVar[str] = (
        "scene | first_loss: s to first loss | first_step: to first step | slowest | load | shown: parts"
    )

    scene: str
    workers: int
    repeats: int
    first_loss: float | None  # until the last worker computes its first loss
    first_step: float | None  # until the last worker has made its first step
    slowest: float | None  # the longest `first_step` of all repeats
    load: float  # the system's load average over a minute, when the scene began
    parts: dict[str, float] = field(default_factory=dict)
    skipped: str = ""  # why the scene was skipped

    @property
    def note(self) -> str:
        """The row in a line."""
        seconds = "" if self.first_step is None else f"{self.first_step:.2f} s "
        return f"{self.scene}: {seconds}({self.shown}; load {self.load:.1f})"

    @property
    def shown(self) -> str:
        """The parts as text, or why the scene was skipped."""
        if self.skipped:
            return f"skipped: {self.skipped}"
        return ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.parts.items())


class _Skipped(Exception):
    """A scene cannot be measured here; the text is the reason."""


@dataclass(frozen=True, slots=True)
class _Start:
    first_loss: float | None
    first_step: float
    parts: dict[str, float]


def bench_start(
    scenes: Annotated[
        Sequence[str],
        Opt(
            "What to measure: ray (ray.init alone), cold (rayps.train without a Ray), joined (on a running "
            "cluster), service (a job of a service), warm (with warm processes), ray_train (Ray Train's "
            "TorchTrainer)."
        ),
    ] = SCENES,
    *,
    workers: Workers = 2,
    repeats: Annotated[int, Opt("Number of measurements of each scene; the table has medians.")] = 5,
    report: Callable[[StartRow], None] = lambda row: None,
) -> list[StartRow]:
    """Measure each of `scenes`; `report` is called with each row as it is ready.

    - `ray`: the import of ray and `ray.init` alone, with the options of rayps.
    - `cold`: `rayps.train` without a Ray.
    - `joined`: `rayps.train` on a running Ray cluster of this machine.
    - `service`: a job of a running service, from `submit`.
    - `warm`: the same, with a warm process for the driver and for each worker.
    - `ray_train`: a TorchTrainer of Ray Train without a Ray, which trains the same workload in DistributedDataParallel.
      The scene is skipped, with a reason, where Ray Train is not installed.

    Raises:
        ConfigError: there is no such scene, or a number is too small.
        ClusterError, TrainingError: a run failed.
    """
    for scene in scenes:
        if scene not in SCENES:
            raise ConfigError(f"no scene {scene!r}; use some of {', '.join(SCENES)}", scene=scene)
    for name, number in (("workers", workers), ("repeats", repeats)):
        if number < 1:
            raise ConfigError(f"{name} is {number}: give at least 1", field=name)
    rows = []
    for scene in scenes:
        load = os.getloadavg()[0]
        try:
            rows.append(_make_row(scene, workers, _measure(scene, workers, repeats), load))
        except _Skipped as reason:
            rows.append(StartRow(scene, workers, 0, None, None, None, load, skipped=str(reason)))
        report(rows[-1])
    return rows


def _measure(scene: str, workers: int, repeats: int) -> list[_Start]:
    if scene in ("service", "warm"):
        return _measure_jobs(workers, repeats, warm=scene == "warm")
    if scene == "joined":
        with _run_ray(workers) as address:
            _run_script(scene, workers, address)  # the first run on a new Ray also waits for Ray's own processes
            return [_run_script(scene, workers, address) for _ in range(repeats)]
    return [_run_script(scene, workers, None) for _ in range(repeats)]


def _make_row(scene: str, workers: int, found: list[_Start], load: float) -> StartRow:
    losses = [each.first_loss for each in found if each.first_loss is not None]
    steps = [each.first_step for each in found]
    parts = {name: statistics.median(each.parts[name] for each in found) for name in found[0].parts}
    median = statistics.median(losses) if losses else None
    return StartRow(scene, workers, len(found), median, statistics.median(steps), max(steps), load, parts)


def _run_script(scene: str, workers: int, address: str | None) -> _Start:
    """Run `benchmarks.runs.start_script` in a new process. Raises _Skipped if the scene lacks a package."""
    time.sleep(_CALM_SECONDS)
    with tempfile.TemporaryDirectory(prefix="rayps-bench-") as name:
        folder, out, log = Path(name, "losses"), Path(name, "out.json"), Path(name, "log")
        folder.mkdir()
        config = {"scene": scene, "workers": workers, "folder": str(folder), "address": address}
        command = [sys.executable, "-m", "benchmarks.runs.start_script", json.dumps(config), str(out)]
        with log.open("wb") as output:
            done = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, preexec_fn=die_with_parent
            )
            try:
                code: int | None = done.wait(_RUN_SECONDS)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                done.kill()
                done.wait()
        if code != 0 or not out.is_file():
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
            raise ClusterError(f"a run of {scene} failed (exit code {code}):\n{tail}", scene=scene)
        result = json.loads(out.read_text())
        if "skipped" in result:
            raise _Skipped(result["skipped"])
        began, parts = result["began"], result["parts"]
        if scene == "ray":
            return _Start(None, sum(parts.values()), parts)
        if scene == "ray_train" and (times := read_first_times(folder, workers)) is not None:
            parts["workers"] = times[0] - began - sum(parts.values())
        return _read_start(folder, workers, began, parts)


def _read_start(folder: Path, workers: int, began: float, parts: dict[str, float]) -> _Start:
    times = read_first_times(folder, workers)
    if times is None:
        raise TrainingError(f"the {workers} workers did not record their first losses in {folder}")
    loss, step = times
    return _Start(loss - began, step - began, parts | {"first step": step - loss})


@contextlib.contextmanager
def _run_ray(workers: int) -> Iterator[str]:
    """Start a Ray in this process; yield its address. Child processes inherit its token."""
    from rayps.cluster.ray_cluster import RayCluster

    cluster = RayCluster.local(cpus=workers)
    try:
        yield cluster.address
    finally:
        cluster.close()


def _measure_jobs(workers: int, repeats: int, *, warm: bool) -> list[_Start]:
    """Measure jobs of a new service, one after the other."""
    mark = secrets.token_hex(8)
    wanted = 2 * (workers + 1) if warm else 0
    with tempfile.TemporaryDirectory(prefix="rayps-bench-") as name:
        settings = Settings(state_dir=Path(name) / "state").prepare()
        command = [sys.executable, "-m", "rayps.cli", "serve", "--state-dir", str(settings.state_dir), "--port", "0"]
        command += ["--cpus", str(workers), "--warm", str(wanted)]
        with (Path(name) / "log").open("w") as log:
            service = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | {_WARM_MARK: mark}
            )
        try:
            _wait(settings.service_file.exists, service)
            url = json.loads(settings.service_file.read_text())["url"]
            with Client(url, settings.token_file.read_text().strip()) as client:
                _wait(lambda: client.cluster()["total"].get("cpu", 0) >= workers, service)
                _measure_job(client, settings, workers, Path(name) / "first")  # Ray's and the service's first job
                found = []
                for number in range(repeats):
                    if warm:
                        _wait(lambda: warm_processes(mark) >= workers + 1, service, 0.5)
                    time.sleep(_CALM_SECONDS)
                    found.append(_measure_job(client, settings, workers, Path(name) / f"losses-{number}"))
                return found
        finally:
            service.send_signal(signal.SIGTERM)
            service.wait(120)


def _measure_job(client: Client, settings: Settings, workers: int, folder: Path) -> _Start:
    folder.mkdir()
    params = {"folder": str(folder)}
    began = time.time()
    job = client.submit(
        "benchmarks.runs.first_steps:FirstSteps", working_dir=None, workers=workers, steps=STEPS, params=params
    )
    parts = {"submit": time.time() - began}
    job.wait(_RUN_SECONDS)
    if job.status is not Status.SUCCEEDED:
        raise TrainingError(f"a job of the service ended as {job.status}: {job.data['reason']}")
    driver = settings.jobs_dir / job.id / "driver.json"  # written when the driver's process begins the job
    parts["driver"] = driver.stat().st_mtime - began - parts["submit"]
    found = _read_start(folder, workers, began, parts)
    assert found.first_loss is not None
    found.parts["workers"] = found.first_loss - parts["submit"] - parts["driver"]
    found.parts["first step"] = found.parts.pop("first step")  # the last in time
    return found


def _wait(ready: Callable[[], bool], service: subprocess.Popen[bytes], pause: float = 0.2) -> None:
    until(lambda: ready() or service.poll() is not None, _RUN_SECONDS, pause)
    if service.poll() is not None or not ready():
        raise TrainingError(
            f"the service was not ready within {_RUN_SECONDS:g} s, or has ended (exit code {service.poll()})"
        )


def warm_processes(mark: str) -> int:
    """Return how many warm processes wait for a job, of the service with this mark.

    Ray shows the class of an idle actor as its process's title. The environment of its parent, the raylet, has the
    service's mark.
    """
    found = 0
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, IndexError, ValueError):
            title = (folder / "cmdline").read_bytes().rstrip(b"\0 ")
            if title != b"ray::WarmProcess":
                continue
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            found += f"{_WARM_MARK}={mark}".encode() in Path("/proc", parent, "environ").read_bytes()
    return found
