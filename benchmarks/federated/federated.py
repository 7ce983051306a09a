"""Compare federated rounds with Flower's simulation engine, Apple's pfl and a plain loop, in one run on one host.

The scenes:

- `train`: 20 clients with 100 samples each, a network 784-200-200-10, 5 epochs in batches of 10. Every round trains all
  clients.
- `nothing`: 100 clients that return a model of two numbers unchanged. This is the cost of a round without training.
- `empty`: 100 clients that return the 199,210 numbers of the model of `train` unchanged.
- `many`: 10,000 clients with 5 samples each. Each round trains 1,000 clients. It shows whether memory grows. Only rayps
  is measured.
- `private`: `many` with client-level privacy: Poisson cohorts of 1,000 expected clients, noise, and epsilon each round.
- `states`: 100,000 clients with one sample each. Every client has a state as large as the model (SCAFFOLD), and each
  round trains 1,000 clients. Only rayps is measured.

Every run is its own process: its first rounds include the start of Python, of Ray and of the workers. Contenders
alternate, and figures are medians over the runs. No contender evaluates the model.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from rayps_client.errors import ConfigError

from benchmarks.peers import make_environment, run_script
from rayps.bench.table import BenchRow, Opt

CONTENDERS = ("own", "flower", "pfl", "bare")
FIRST = 5  # number of rounds that belong to the start; the later rounds are called steady
LIMIT = 400.0  # the most seconds that one run may take
FOLDER = Path.home() / ".cache" / "rayps" / "bench"
_HERE = Path(__file__).resolve().parent
_TRAIN = {
    "clients": 20,
    "rows": 100,
    "epochs": 5,
    "batch": 10,
    "lr": 0.1,
    "hidden": 200,
    "fraction": 1.0,
    "states": False,
}
SCENES: dict[str, dict[str, Any]] = {
    "train": _TRAIN,
    "nothing": _TRAIN | {"clients": 100, "rows": 1, "epochs": 0, "hidden": 0},
    "empty": _TRAIN | {"clients": 100, "rows": 1, "epochs": 0},
    "many": _TRAIN | {"clients": 10_000, "rows": 5, "epochs": 1, "batch": 5, "hidden": 32, "fraction": 0.1},
    "private": _TRAIN
    | {"clients": 10_000, "rows": 5, "epochs": 1, "batch": 5, "hidden": 32, "fraction": 0.1}
    | {"privacy": "dp(noise_multiplier=1.1,clip=1.0)"},
    "states": _TRAIN
    | {"clients": 100_000, "rows": 1, "epochs": 1, "batch": 1, "hidden": 16, "fraction": 0.01, "states": True},
}
_WHO = {  # the contenders of each scene
    "train": CONTENDERS,
    "nothing": ("own", "flower"),
    "empty": ("own", "flower"),
    "many": ("own",),
    "private": ("own",),
    "states": ("own",),
}
FLOWER = ["flwr[simulation]>=1.20,<2"]
PFL = ["pfl>=0.4,<1"]


@dataclass(frozen=True, slots=True)
class FederatedRow(BenchRow):
    """One contender in one scene. Figures are medians over the runs."""

    columns: ClassVar[str] = (
        "scene | contender | clients | round_s: s a round | updates_s: updates/s | first_s: first 5 s | "
        "of_bare: of bare | cpu_ms: cpu ms an update | cpu_of_bare: of bare's | times_flower: x flower | "
        "first_times_flower: first 5 x flower | times_pfl: x pfl | memory_mb: MB | "
        "memory_growth_mb: grown MB | disk_mb: disk MB"
    )

    scene: str
    contender: str
    workers: int
    clients: int
    runs: int
    round_s: float  # seconds of a steady round
    updates_s: float  # client updates per second in steady rounds
    first_s: float | None  # seconds from the start of the process to the end of round five; None for the plain loop
    of_bare: float | None  # updates_s / (the plain loop's updates_s x workers)
    cpu_ms: float | None  # CPU milliseconds of the workers per update; other processes have little influence on it
    cpu_of_bare: float | None  # the plain loop's cpu_ms / cpu_ms
    times_flower: float | None  # Flower's round_s / round_s
    times_pfl: float | None  # pfl's round_s / round_s
    first_times_flower: float | None  # Flower's first_s / first_s
    memory_mb: float | None  # resident memory of the first worker after round five
    memory_growth_mb: float | None  # growth of that memory until the last round
    disk_mb: float | None  # size of the clients' states on disk, of the first worker, after the last round
    load: float  # the machine's load average when the measurement began


@dataclass(frozen=True, slots=True)
class _FederatedRun:
    steady: float
    first: float
    cpu: float | None  # CPU seconds of a process for a round
    memory: float | None
    growth: float | None
    disk: float | None


def bench_federated(
    scenes: Annotated[Sequence[str], Opt("Scenes to measure: train, nothing, empty, many, private, states.")] = tuple(
        SCENES
    ),
    contenders: Annotated[
        Sequence[str], Opt("Contenders: own (rayps), flower, pfl, bare (a plain loop on one core).")
    ] = CONTENDERS,
    *,
    workers: Annotated[int, Opt("Processes that train.")] = 2,
    rounds: Annotated[int, Opt("Rounds after the first five.")] = 20,
    repeats: Annotated[int, Opt("Number of runs of each contender and scene.")] = 3,
    folder: Annotated[
        Path | None,
        Opt(
            "The folder of the virtual environments of flower and pfl, which pip fills once. By default "
            "~/.cache/rayps/bench."
        ),
    ] = None,
) -> list[FederatedRow]:
    """Measure each scene with each of its contenders; return a row for each. `rounds` does not count the first five.

    Raises:
        ConfigError: there is no such scene or contender, or a peer's environment cannot be made in `folder`.
        ClusterError: a run failed.
    """
    for given, known, field in ((scenes, SCENES, "scenes"), (contenders, CONTENDERS, "contenders")):
        for name in given:
            if name not in known:
                raise ConfigError(f"no {field[:-1]} {name!r}; use some of {', '.join(known)}", field=field)
    for field, value in (("workers", workers), ("rounds", rounds), ("repeats", repeats)):
        if value < 1:
            raise ConfigError(f"{field} is {value}: give at least 1", field=field)
    load = os.getloadavg()[0]
    commands = {
        name: make_command(name, workers, folder or FOLDER)
        for name in contenders
        if any(name in _WHO[scene] for scene in scenes)
    }
    rows: list[FederatedRow] = []
    for scene in scenes:
        here = [name for name in commands if name in _WHO[scene]]
        config = SCENES[scene] | {"workers": workers, "rounds": FIRST + rounds}
        found: dict[str, list[_FederatedRun]] = {name: [] for name in here}
        for turn in range(repeats):
            for name in here[turn % max(1, len(here)) :] + here[: turn % max(1, len(here))]:
                found[name].append(_run(name, commands[name], config))
        rows += _make_rows(scene, config, found, load)
    return rows


def make_command(contender: str, workers: int, folder: Path) -> list[str]:
    """Return the command that runs a contender. If the contender needs a virtual environment, make it first.

    Raises:
        ConfigError: the environment cannot be made.
    """
    if contender == "flower":
        python = make_environment(
            folder, "flower", FLOWER, "import torch, ray, flwr.simulation, flwr.serverapp.strategy"
        )
        return [str(python), str(_HERE / "federated_flower.py")]
    if contender == "pfl":
        python = make_environment(folder, "pfl", PFL, "import torch, pfl.aggregate.simulate, pfl.model.pytorch")
        return [
            str(python),
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(workers),
            str(_HERE / "federated_pfl.py"),
        ]
    return [sys.executable, "-c", "from benchmarks.federated.federated_own import main; main()"]


def _run(name: str, command: list[str], config: dict[str, Any]) -> _FederatedRun:
    """Run a contender once."""
    bare = name == "bare"
    began, out = run_script(name, command, config | ({"bare": True, "rounds": 9} if bare else {}), LIMIT)
    return run_of(began, out, 2 if bare else FIRST)


def run_of(began: float, out: dict[str, list[float]], first: int) -> _FederatedRun:
    """Return the figures of a run from its output `out`. The first `first` rounds belong to the start."""
    stamps, held = out["stamps"], [each / 1e6 for each in out.get("rss", ())[first - 1 :]]
    return _FederatedRun(
        _find_median_difference(stamps[first - 1 :]),
        stamps[first - 1] - began,
        _find_median_difference(out["cpu"][first - 1 :]) if "cpu" in out else None,
        held[0] if held else None,
        held[-1] - held[0] if held else None,
        out["disk"][-1] / 1e6 if "disk" in out else None,
    )


def _find_median_difference(values: list[float]) -> float:
    """Return the median difference between consecutive values."""
    return statistics.median(b - a for a, b in itertools.pairwise(values))


def _make_rows(
    scene: str, config: dict[str, Any], found: dict[str, list[_FederatedRun]], load: float
) -> list[FederatedRow]:
    def median(name: str, what: str) -> float | None:
        values = [getattr(run, what) for run in found.get(name, ())]
        return statistics.median(values) if values and None not in values else None

    def ratio(over: float | None, under: float | None) -> float | None:
        return over / under if over is not None and under else None

    asked, workers = max(1, round(config["clients"] * config["fraction"])), config["workers"]
    bare, bare_cpu = median("bare", "steady"), median("bare", "cpu")
    rows = []
    for name, runs in found.items():
        steady, first, own = median(name, "steady") or 0.0, median(name, "first"), name == "own"
        cpu = median(name, "cpu")
        used = None if cpu is None else cpu if name == "bare" else cpu * workers
        rows.append(
            FederatedRow(
                scene,
                name,
                1 if name == "bare" else workers,
                asked,
                len(runs),
                steady,
                ratio(asked, steady) or 0.0,
                None if name == "bare" else first,
                None if name == "bare" else ratio(bare, steady * workers),
                None if used is None else 1000 * used / asked,
                None if name == "bare" else ratio(bare_cpu, used),
                ratio(median("flower", "steady"), steady) if own else None,
                ratio(median("pfl", "steady"), steady) if own else None,
                ratio(median("flower", "first"), first) if own else None,
                median(name, "memory"),
                median(name, "growth"),
                median(name, "disk"),
                load,
            )
        )
    return rows
