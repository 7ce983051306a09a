"""Measure what a real federated client costs its machine: the time until it trains, its memory, and what it installs.

The service is a process of this benchmark that speaks the routes of real clients and signs one order, with nothing of
Ray: the time until a client has its order is the client's own. Each client trains the same linear model, of numpy or of
torch, with `parameters` parameters, on the same rows.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from rayps_client.errors import ClusterError, ConfigError
from rayps_client.exchange.signed_orders import ClientToken, Key

from benchmarks.federated.client_flower import run_flower
from benchmarks.federated.client_service import JOB, Moments, StandIn, start
from benchmarks.peers import make_environment
from rayps.bench.table import BenchRow, Opt

CONTENDERS = ("rayps-client, numpy", "rayps-client, torch", "rayps client, torch", "flower, numpy", "flower, torch")
FLOWER = ["flwr>=1.42,<2"]  # from here on, all its connections are HTTP on one port
_SECONDS = 120.0  # the longest time of one run
_POLL = 0.005  # seconds between two looks at the memory of the client's processes
_ROWS = 64
_LINES = 12  # last lines of a client's output that an error shows

WORK = """
import numpy as np
from rayps_client import NumpyWorkload, tensors

class Line(NumpyWorkload):
    def parameters(self):
        return {{"weight": np.zeros((1, {width}), dtype=np.float32), "bias": np.zeros(1, dtype=np.float32)}}

    def data(self):
        x = np.random.default_rng(0).normal(size=({rows}, {width})).astype(np.float32)
        return tensors(x, x.sum(axis=1, keepdims=True), batch_size=16)

    def loss_and_gradient(self, parameters, batch):
        error = batch.x @ parameters["weight"].T + parameters["bias"] - batch.y
        slope = 2 * error / error.size
        return float((error**2).mean()), {{"weight": slope.T @ batch.x, "bias": slope.sum(axis=0)}}
"""
TORCH = """
import numpy as np
import torch
from rayps import Workload
import rayps

class Line(Workload):
    def model(self):
        return torch.nn.Linear({width}, 1)

    def data(self):
        x = np.random.default_rng(0).normal(size=({rows}, {width})).astype(np.float32)
        return rayps.data.tensors(x, x.sum(axis=1, keepdims=True), batch_size=16)

    def loss(self, model, batch):
        return torch.nn.functional.mse_loss(model(batch.x), batch.y)
"""
_ALONE = (
    "import sys; from pathlib import Path; "
    "sys.path[:] = [p for p in sys.path if not (Path(p or '.') / 'rayps' / '__init__.py').is_file()]; "
    "sys.path.insert(0, {client!r}); from rayps_client.__main__ import main; sys.exit(main())"
)


@dataclass(frozen=True, slots=True)
class ClientRow(BenchRow):
    """The medians of some runs of one contender."""

    columns: ClassVar[str] = (
        "contender: client | joined: joined (s) | order: first order (s) | update: update sent (s) | "
        "memory_mb: memory (MB) | private_mb: private (MB) | processes"
    )

    contender: str
    joined: float  # seconds from the start of the process until the service knows the client
    order: float  # seconds until the client has received the parameters of the first round
    update: float  # seconds until its update has arrived
    memory_mb: float  # the most memory of its processes until then: pages that processes share count in each
    private_mb: float  # of it, what no other process of the machine shares
    processes: int  # number of processes at the peak

    @property
    def note(self) -> str:
        """The row in a line."""
        return f"{self.contender}: order after {self.order:.2f} s, {self.memory_mb:.0f} MB"


def bench_clients(
    contenders: Annotated[
        Sequence[str], Opt("Contenders, separated by semicolons (default: all).", split=";")
    ] = CONTENDERS,
    parameters: Annotated[int, Opt("Parameters of the linear model.", least=2)] = 10_001,
    runs: Annotated[int, Opt("Runs of each contender; the rows show medians.", least=1)] = 3,
    folder: Annotated[Path, Opt("The folder of the peers' environments.", "--peers")] = Path("build/peers"),
    report: Callable[[ClientRow], None] = lambda row: None,
) -> list[ClientRow]:
    """Measure each contender `runs` times, one after another. `folder` has the peers' environments.

    Raises:
        ConfigError: a contender is unknown, or its environment cannot be made.
        ClusterError: a client has failed, or did not send its update in time.
    """
    for name in contenders:
        if name not in CONTENDERS:
            raise ConfigError(f"contender {name!r}: give some of {', '.join(CONTENDERS)}", field="contenders")
    rows = []
    for name in contenders:
        found = [_run(name, parameters, folder) for _ in range(runs)]
        columns = ("joined", "order", "update", "memory_mb", "private_mb")
        medians = {column: statistics.median(getattr(each, column) for each in found) for column in columns}
        rows.append(ClientRow(name, **medians, processes=max(each.processes for each in found)))
        report(rows[-1])
    return rows


def _run(name: str, parameters: int, peers: Path) -> ClientRow:
    system, _, library = name.partition(", ")
    with tempfile.TemporaryDirectory(prefix="rayps-bench-") as place:
        folder, width = Path(place), parameters - 1
        if system == "flower":
            python = make_environment(peers, "flower-client", FLOWER, "import flwr, torch")
            with run_flower(python, folder, library, width, _ROWS) as (began, moments, processes):
                return _measure_client(name, began, moments, processes, folder / "log")
        return _run_rayps(name, system, library, folder, width)


def _run_rayps(name: str, system: str, library: str, folder: Path, width: int) -> ClientRow:
    (folder / "line.py").write_text((WORK if library == "numpy" else TORCH).format(width=width, rows=_ROWS))
    key = Key.load_or_create(folder / "key")
    service = StandIn(key, width)
    client = str(Path(__file__).parents[2] / "client")
    head = [sys.executable, "-c", _ALONE.format(client=client)]
    if system == "rayps client":
        head = [sys.executable, "-m", "rayps.cli", "client"]
    token = str(ClientToken.create(JOB, key, "one"))
    arguments = ["line.py:Line", "--url", service.url, "--state", str(folder / "state"), "--patience", "20"]
    try:
        began = time.monotonic()
        with start([*head, *arguments], folder, RAYPS_CLIENT_TOKEN=token) as process:
            return _measure_client(name, began, lambda: service.moments, lambda: [process.pid], folder / "log", process)
    finally:
        service.shutdown()
        service.server_close()


def _measure_client(
    name: str,
    began: float,
    moments: Callable[[], Moments],
    processes: Callable[[], Sequence[int]],
    log: Path,
    process: subprocess.Popen[bytes] | None = None,
) -> ClientRow:
    """Look at the memory of a client's processes until its update has arrived. `log` has what it printed."""
    most, private, count = 0, 0, 0
    while (found := moments()).update is None:
        if time.monotonic() - began > _SECONDS or (process is not None and process.poll() not in (None, 0)):
            tail = log.read_text(errors="replace").splitlines()[-_LINES:]
            raise ClusterError(f"the client of {name} sent no update:\n" + "\n".join(tail), contender=name)
        sizes = [_read_memory(pid) for pid in processes()]
        if (size := sum(whole for whole, _ in sizes)) > most:
            most, private, count = size, sum(own for _, own in sizes), len(sizes)
        time.sleep(_POLL)
    assert found.joined is not None and found.order is not None and found.update is not None
    joined, order, update = (moment - began for moment in (found.joined, found.order, found.update))
    return ClientRow(name, joined, order, update, memory_mb=most / 1e6, private_mb=private / 1e6, processes=count)


def _read_memory(pid: int) -> tuple[int, int]:
    """Return the bytes of memory of a process, and those of them that no other process shares; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return 0, 0
    found = {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}
    return found.get("Rss", 0), found.get("Private_Clean", 0) + found.get("Private_Dirty", 0)
