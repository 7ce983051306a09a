"""Measure secure aggregation with many client processes that die, beside the formulas of the papers and Flower.

The service is a real `rayps serve`, and each client a process of the light client (`secure_client.py`) with a workload
of numpy. In each run, `dying` of the clients kill themselves (SIGKILL) in one stage; in the last run, as many in each
stage. The sum is exact if it equals, bit for bit, the sum of the whole numbers that the survivors wrote before masking
into folders that the service does not read. Bytes are those of the bodies of the stages' requests and answers.

Bonawitz et al. 2017: a client sends and receives 2 n a_K + (5 n - 4) a_S + m log2 R + n bits in the protocol, for n
clients, keys of a_K bits, shares of a_S bits, and a vector of m words below R. With the graph of Bell et al. 2020, n is
the number of a client's neighbours + 1.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, ClassVar

import numpy as np
from rayps_client.errors import ConfigError, TrainingError
from rayps_client.secure.protocol import Stage
from rayps_client.secure.secure_facts import word_bits

from benchmarks.job_service import START_SECONDS, JobService
from benchmarks.peers import make_environment, run_script
from rayps.bench.table import BenchRow, Opt
from rayps.service.client import Job

HERE = Path(__file__).resolve().parent
FLOWER = ["flwr[simulation]==1.42.*"]  # the last that was tried; SecAgg+ is in its older workflow only
BITS, MAX_WEIGHT, HIDDEN, ROWS = 16, 1000, 250, 20
KEY_BITS, SHARE_BITS = 256, 264
NONE = "none"
_STAGES = (Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.UNMASK)
_JOB_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class SecureRow(BenchRow):
    """One run of one contender. Medians are over the clients whose update is in the sum."""

    columns: ClassVar[str] = (
        "contender | dying: dying before | clients | neighbours | result: sum | survivors: in it | "
        "sent_kb: sent kB | received_kb: received kB | formula_kb: formula kB | plain_kb: plain kB | "
        "cpu_s: cpu s a client | round_s: s a round"
    )

    contender: str
    dying: str  # in which stage how many clients die
    clients: int
    neighbours: int
    result: str  # exact, void, WRONG; of Flower: ended
    survivors: int
    sent_kb: float | None  # per client
    received_kb: float | None
    formula_kb: float  # sent and received, of the paper
    plain_kb: float  # an update in float32
    cpu_s: float | None  # of a client, for its messages
    round_s: float  # from the order to the sum


def count_parameters(hidden: int = HIDDEN) -> int:
    """Return the number of parameters of the network."""
    return 784 * hidden + hidden + 10 * hidden + 10


def compute_bytes(holders: int, words: int, bits: int) -> float:
    """Return the bytes that a client sends and receives, for a closed neighbourhood of `holders` clients."""
    return (2 * holders * KEY_BITS + (5 * holders - 4) * SHARE_BITS + words * bits + holders) / 8


def bench_own(
    runs: Sequence[str], clients: int, share: float, neighbours: int | None, deadline: float
) -> list[SecureRow]:
    """Measure rayps. A run is `none`, without deaths, the name of a stage in which clients die, or `all`.

    Raises:
        ConfigError: there is no such run.
    """
    count = round(share * clients)
    known = {NONE: {}, **{str(stage): {stage: count} for stage in _STAGES}, "all": dict.fromkeys(_STAGES, count)}
    if unknown := set(runs) - known.keys():
        raise ConfigError(f"there is no run {unknown.pop()!r}: give some of {', '.join(known)}", field="runs")
    plans = [known[run] for run in runs]
    with tempfile.TemporaryDirectory(prefix="rayps-bench-") as folder, JobService(Path(folder)) as service:
        (service.folder / "work").mkdir()  # travels with each job, so nothing else may be in it
        shutil.copy(HERE / "secure_work.py", service.folder / "work" / "secure_work.py")
        return [_run(service, clients, plan, neighbours, deadline) for plan in plans]


def bench_flower(clients: int, share: float, neighbours: int | None, folder: Path | None) -> list[SecureRow]:
    """Measure Flower's SecAgg+ on the same sizes, in its simulation, without deaths and with clients that fail.

    Raises:
        ConfigError: its environment cannot be made.
        ClusterError: it failed.
    """
    place = Path.home() / ".cache" / "rayps" / "bench" if folder is None else folder
    python = make_environment(place, "flower-secagg", FLOWER, "import flwr.server.workflow, flwr.client.mod")
    rows = []
    for dying in (0, round(share * clients)):
        config = {
            "clients": clients,
            "neighbours": neighbours or clients - 1,
            "size": count_parameters(),
            "dying": dying,
            "rows": ROWS,
        }
        script = [str(python), str(HERE / "secure_flower.py")]
        _, found = run_script("flower", script, config, _JOB_SECONDS)
        words = count_parameters() + 1
        rows.append(
            SecureRow(
                "flower",
                f"masked_input {dying}" if dying else NONE,
                clients,
                config["neighbours"],
                "ended" if found["changed"] else "void",
                clients - dying,
                median(found["sent"]) / 1000,
                median(found["received"]) / 1000,
                compute_bytes(config["neighbours"] + 1, words, 32) / 1000,
                count_parameters() * 4 / 1000,
                median(found["cpu"]),
                found["round_s"],
            )
        )
    return rows


def _run(
    service: JobService, clients: int, plan: dict[Stage, int], neighbours: int | None, deadline: float
) -> SecureRow:
    """Run one job of one round."""
    near = "auto" if neighbours is None else neighbours
    job = service.user.submit(
        "secure_work.py:Wide",
        working_dir=service.folder / "work",
        strategy=(
            f"fedavg:deadline={deadline:g},secure=secagg(clip=4,bits={BITS},max_weight={MAX_WEIGHT},neighbours={near}),"
            f"clients=remote(least={clients},wait={START_SECONDS:g})"
        ),
        epochs=1,
    )
    token = service.user.call("POST", "/api/v1/client-tokens", json={"job": job.id})["token"]
    dies = [stage for stage, count in plan.items() for _ in range(count)]
    homes = [service.folder / "homes" / job.id / f"c{k}" for k in range(clients)]
    processes = [
        _start_client(service, job, token, home, dies[k] if k < len(dies) else None) for k, home in enumerate(homes)
    ]
    try:
        job.wait(_JOB_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return _make_row(service, job, homes, plan, neighbours or clients - 1)


def _start_client(service: JobService, job: Job, token: str, home: Path, dies: Stage | None) -> subprocess.Popen[bytes]:
    home.mkdir(parents=True)
    config = {"url": service.url, "token": token, "job": job.id, "name": home.name, "folder": str(home)}
    work = f"{service.folder / 'work' / 'secure_work.py'}:Wide"
    command = [sys.executable, str(HERE / "secure_client.py"), json.dumps({**config, "work": work, "dies": dies})]
    own = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "SECURE_CLIENT": home.name.removeprefix("c")}
    with (home / "log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | own)


def _make_row(
    service: JobService, job: Job, homes: Sequence[Path], plan: dict[Stage, int], neighbours: int
) -> SecureRow:
    event = next((event for event in job.events() if event["kind"] == "cohort"), None)
    if event is None:
        raise TrainingError(f"the job had no round: {job.data['reason']}")
    stored = list((service.settings.jobs_dir / job.id / "clients" / "sums").glob("*.sum"))
    names, result = set(event["trained"]), "void"
    bits = word_bits(len(homes), MAX_WEIGHT, BITS)
    if stored:
        total = np.frombuffer(stored[0].read_bytes(), dtype=f"<i{bits // 8}")
        sent = [np.load(home / "sent.npy") for home in homes if home.name in names]
        result = "exact" if np.array_equal(sum(sent), total) else "WRONG"
    costs = [json.loads(path.read_text()) for home in homes for path in home.glob("cost.json")]
    cost: Callable[[str], float | None] = lambda key: median(each[key] for each in costs) if costs else None  # noqa: E731
    kb: Callable[[str], float | None] = lambda key: None if (found := cost(key)) is None else found / 1000  # noqa: E731
    words = count_parameters() + 3
    return SecureRow(
        "own",
        ", ".join(f"{stage} {count}" for stage, count in plan.items()) or NONE,
        len(homes),
        neighbours,
        result,
        len(names) if stored else 0,
        kb("sent"),
        kb("received"),
        compute_bytes(neighbours + 1, words, bits) / 1000,
        count_parameters() * 4 / 1000,
        cost("cpu"),
        float(event["seconds"]),
    )


def bench_secure(
    contenders: Annotated[Sequence[str], Opt("Contenders, one after another: own (rayps), flower.")] = (
        "own",
        "flower",
    ),
    runs: Annotated[
        Sequence[str], Opt("Runs of rayps: none (no deaths), a stage in which clients die, all (in each).")
    ] = (NONE, *map(str, _STAGES), "all"),
    clients: Annotated[int, Opt("Client processes.")] = 50,
    share: Annotated[float, Opt("Share of the clients that die in a stage.")] = 0.2,
    neighbours: Annotated[int | None, Opt("Neighbours of each client; by default all the others.")] = None,
    deadline: Annotated[float, Opt("Deadline of a round of rayps, in seconds.")] = 30.0,
    folder: Annotated[
        Path | None, Opt("The folder of Flower's environment, which pip fills once. By default ~/.cache/rayps/bench.")
    ] = None,
) -> list[SecureRow]:
    """Measure the contenders. Raises the errors of `bench_own` and `bench_flower`."""
    rows = list[SecureRow]()
    for contender in contenders:
        if contender == "own":
            rows += bench_own(runs, clients, share, neighbours, deadline)
        else:
            rows += bench_flower(clients, share, neighbours, folder)
    return rows
