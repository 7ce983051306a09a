"""Measure coded updates of real clients: bytes a round, the accuracy after some rounds, and seconds on a slow line.

The service is a real `rayps serve`. For bytes and accuracy, the clients are light clients in threads of this process,
each with its own HTTP connection, which counts bytes with their headers. For the slow line, service and client are
processes in network namespaces of their own (`rayps.bench.netns`), and the client's link has the given rate in each
direction; the bytes are those of the client's own count. The formula is bytes times 8 / rate, without training.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar

import numpy as np
import pyarrow.parquet as pq
from rayps_client.client_options import ClientOptions
from rayps_client.errors import ClusterError, ConfigError, TrainingError
from rayps_client.exchange.connection import Line, ServiceConnection
from rayps_client.exchange.signed_orders import ClientToken
from rayps_client.load_workload import trainer_of
from rayps_client.machine.client_folder import ClientFolder
from rayps_client.process import ClientProcess

from benchmarks.job_service import START_SECONDS, JobService
from rayps.bench.netns import Hosts, bits
from rayps.bench.table import BenchRow, Opt
from rayps.service.client import Job

HERE = Path(__file__).resolve().parent
DATA = HERE.parent.parent / "examples" / "data"
CODINGS = {
    "plain": "",
    "int8": "upload=int8,download=int8,",
    "top_k 5%": "upload=top_k:0.05,download=int8,",
    "mask 10%": "upload=mask:0.1,download=int8,",
}
_JOB_SECONDS = 300.0
_TARGET = "uploads_work.py:Digits"


@dataclass(frozen=True, slots=True)
class UploadRow(BenchRow):
    """One coding: means over the clients and rounds, and the model after the last round."""

    columns: ClassVar[str] = (
        "coding | clients | rounds | received_kb: received kB a round | sent_kb: sent kB a round | accuracy"
    )

    coding: str
    clients: int
    rounds: int
    received_kb: float  # per client and round
    sent_kb: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class LineRow(BenchRow):
    """One coding on a slow line: a round of one client."""

    columns: ClassVar[str] = "coding | rate: line | bytes_kb: kB a round | formula_s: formula s | round_s: s a round"

    coding: str
    rate: str
    bytes_kb: float  # received and sent in a round
    formula_s: float
    round_s: float  # from the order to the update's arrival, median


class CountedBytes:
    """The meter of one client's connection."""

    def __init__(self) -> None:
        self.sent_bytes = self.received_bytes = 0

    def sent(self, count: int) -> None:
        """Count bytes that were sent."""
        self.sent_bytes += count

    def received(self, count: int) -> None:
        """Count bytes that were received."""
        self.received_bytes += count


def bench_uploads(codings: Sequence[str], clients: int, rounds: int) -> list[UploadRow]:
    """Measure bytes and accuracy of each coding. Raises ConfigError if there is no such coding."""
    _check(codings)
    with tempfile.TemporaryDirectory(prefix="rayps-bench-") as folder, JobService(Path(folder)) as service:
        _prepare(service.folder)
        return [_measure(service, coding, clients, rounds) for coding in codings]


def bench_line(codings: Sequence[str], rounds: int, rate: str) -> list[LineRow]:
    """Measure a round of one client whose link has the rate `rate`.

    Raises:
        ConfigError: there is no such coding, or the rate cannot be read.
        ClusterError: this machine cannot make network namespaces, or the service failed.
    """
    _check(codings)
    with tempfile.TemporaryDirectory(prefix="rayps-bench-") as folder, Hosts(2, "1gbit", slow={1: rate}) as hosts:
        config = {
            "folder": folder,
            "address": hosts.addresses[0],
            "client": hosts.enter(1),
            "codings": list(codings),
            "rounds": rounds,
            "rate": rate,
        }
        code = "from benchmarks.federated.uploads import line_main; line_main()"
        done = subprocess.run(
            [*hosts.enter(0), sys.executable, "-c", code, json.dumps(config)],
            capture_output=True,
            text=True,
            timeout=START_SECONDS + _JOB_SECONDS * len(codings),
            check=False,
        )
        if done.returncode:
            raise ClusterError(f"the run in a network namespace failed:\n{done.stderr.strip()[-800:]}")
        return [LineRow(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def line_main() -> None:
    """Run the jobs of `bench_line` from inside the service's network namespace; write the rows as JSON."""
    config: dict[str, Any] = json.loads(sys.argv[1])
    more = ["--host", config["address"], "--allow-host", config["address"]]
    with JobService(Path(config["folder"]), more) as service:
        _prepare(service.folder)
        rows = [
            asdict(_measure_line(service, coding, config["rounds"], config["rate"], config["client"]))
            for coding in config["codings"]
        ]
    sys.stdout.write(json.dumps(rows) + "\n")


def _check(codings: Sequence[str]) -> None:
    if unknown := set(codings) - CODINGS.keys():
        raise ConfigError(f"there is no coding {unknown.pop()!r}: give some of {', '.join(CODINGS)}", field="codings")


def _prepare(folder: Path) -> None:
    """Write the workload and its images into `folder`."""
    shutil.copy(HERE / "uploads_work.py", folder / "uploads_work.py")
    arrays = {}
    for name, file in (("train", "digits.parquet"), ("test", "digits_test.parquet")):
        table = pq.read_table(DATA / file)
        pixels = table["pixels"].combine_chunks().flatten().to_numpy()
        arrays[f"{name}_x"] = pixels.astype(np.uint8).reshape(table.num_rows, -1)
        arrays[f"{name}_y"] = table["digit"].to_numpy().astype(np.uint8)
    np.savez_compressed(folder / "digits.npz", **arrays)


def _submit(service: JobService, coding: str, clients: int, rounds: int) -> tuple[Job, str]:
    strategy = f"fedavg:{CODINGS[coding]}clients=remote(least={clients},wait={START_SECONDS:g})"
    work = service.folder / "work"
    work.mkdir(exist_ok=True)
    for name in ("uploads_work.py", "digits.npz"):
        shutil.copy(service.folder / name, work / name)
    job = service.user.submit(
        _TARGET, working_dir=work, strategy=strategy, epochs=rounds, evaluate_every=rounds, seed=1
    )
    return job, str(service.user.call("POST", "/api/v1/client-tokens", json={"job": job.id})["token"])


def _measure(service: JobService, coding: str, clients: int, rounds: int) -> UploadRow:
    job, token = _submit(service, coding, clients, rounds)
    meters, running = [CountedBytes() for _ in range(clients)], list[threading.Thread]()
    for k, meter in enumerate(meters):
        os.environ["UPLOADS_PART"] = f"{k}/{clients}"
        trainer = trainer_of(ClientOptions(str(service.folder / "uploads_work.py") + ":Digits"))
        connection = ServiceConnection(service.url, token, 60.0, lambda text: None, line=Line(meter=meter))
        folder = ClientFolder(service.folder / "homes" / job.id / f"c{k}")
        client = ClientProcess(trainer, ClientToken.read(token), job.id, connection, folder, name=f"c{k}")
        running.append(threading.Thread(target=client.run, daemon=True))
    for thread in running:
        thread.start()
    job.wait(_JOB_SECONDS)
    for thread in running:
        thread.join(60)
    replied = sum(event["replied"] for event in job.events() if event["kind"] == "cohort")
    if not job.status.terminal or replied != clients * rounds:
        raise TrainingError(f"{replied} of {clients * rounds} updates have counted: {job.data['reason']}")
    return UploadRow(
        coding,
        clients,
        rounds,
        sum(meter.received_bytes for meter in meters) / replied / 1000,
        sum(meter.sent_bytes for meter in meters) / replied / 1000,
        job.result["accuracy"],
    )


def _measure_line(service: JobService, coding: str, rounds: int, rate: str, enter: list[str]) -> LineRow:
    job, token = _submit(service, coding, 1, rounds)
    home = service.folder / "homes" / job.id
    command = [*enter, sys.executable, "-m", "rayps_client", f"{service.folder / _TARGET}", "--url", service.url]
    own = {"UPLOADS_PART": "0/8", "RAYPS_CLIENT_TOKEN": token}
    home.mkdir(parents=True)
    with (home / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--name", "slow", "--state", str(home)], stdout=log, stderr=log, env=os.environ | own
        )
    try:
        job.wait(_JOB_SECONDS)
        process.wait(60)
    finally:
        process.kill()
        process.wait()
    events = [event for event in job.events() if event["kind"] == "cohort" and event["replied"]]
    if len(events) != rounds:
        raise TrainingError(
            f"{len(events)} of {rounds} rounds have counted: {job.data['reason']}\n{(home / 'log').read_text()[-500:]}"
        )
    spent = json.loads((home / job.id / "slow" / "traffic.json").read_text())["bytes"] / rounds
    seconds = median(float(event["seconds"]) for event in events)
    return LineRow(coding, rate, spent / 1000, spent * 8 / bits(rate), seconds)


def bench_coded(
    codings: Annotated[
        Sequence[str], Opt("Codings, separated by commas: plain, int8, top_k 5%, mask 10% (default: all).")
    ] = tuple(CODINGS),
    clients: Annotated[int, Opt("Clients, each with an equal part of the digits.", least=1)] = 8,
    rounds: Annotated[int, Opt("Rounds of a run.", least=1)] = 20,
    line: Annotated[
        str | None, Opt("Measure the seconds of a round of one client whose link has this rate (1mbit).")
    ] = None,
) -> Sequence[BenchRow]:
    """Measure bytes and accuracy, or seconds on a slow line. Raises the errors of the measurement."""
    return bench_uploads(codings, clients, rounds) if line is None else bench_line(codings, rounds, line)
