"""`rayps bench`: how fast the data plane is on this machine, beside named peers, in one run."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any

import typer

from rayps.cli import show
from rayps.cli.show import Output
from rayps.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Measure the data plane beside its peers, in one run.")

Sizes = Annotated[str, typer.Option(help="Sizes of the vector, e.g. 10KB,1MB (1 KB = 1000 bytes).")]
Address = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Measure on this Ray cluster.")]
Format = Annotated[Output, typer.Option("--output", "-o", help="table or json.")]
_UNITS = {"b": 1, "kb": 1_000, "mb": 1_000_000, "gb": 1_000_000_000}


@app.command()
def ring(
    workers: Annotated[int, typer.Option(help="Ranks.")] = 4,
    sizes: Sizes = "1KB,100KB,1MB,10MB,100MB",
    algorithms: Annotated[str, typer.Option(help="Contenders: auto, resident, ring, tree, one_shot, two_shot, star, "
                                            "hierarchical, gloo, nccl.")] = "auto,resident,ring,tree,one_shot,gloo",
    address: Address = None,
    output: Format = Output.table,
) -> None:
    """All-reduce between Ray actors: time, bandwidth, share of the machine's copy bandwidth, times gloo."""
    found = _sizes(sizes)
    from rayps.bench.ring import bench_ring

    rows = _run(address, workers, lambda cluster: bench_ring(cluster, workers, found, algorithms.split(",")))
    _show(output, rows, {"bytes": "bytes", "algorithm": "algorithm", "transport": "over", "seconds": "seconds",
                         "bandwidth": "bytes/s", "ratio": "of copy", "times_gloo": "x gloo"})


@app.command()
def server(
    workers: Annotated[int, typer.Option(help="Workers.")] = 4,
    shards: Annotated[int, typer.Option(help="Servers.")] = 2,
    sizes: Sizes = "10KB,1MB,40MB",
    transports: Annotated[str, typer.Option(help="Contenders: own, ray.")] = "own,ray",
    address: Address = None,
    output: Format = Output.table,
) -> None:
    """Push and pull between Ray actors, asynchronously: turns a second, and how many times those of Ray calls."""
    found = _sizes(sizes)
    from rayps.bench.server import bench_server

    rows = _run(address, workers, lambda cluster: bench_server(cluster, workers, shards, found, transports.split(",")))
    _show(output, rows, {"bytes": "bytes", "contender": "transport", "turns": "turns/s", "bandwidth": "bytes/s",
                         "times_ray": "x ray"})


def _run(address: str | None, workers: int, measure: Any) -> list[Any]:
    if workers < 1:
        raise ConfigError(f"workers is {workers}: give at least 1", field="workers")
    from rayps.ray_cluster import RayCluster

    cluster = RayCluster.join(address) if address else RayCluster.local(cpus=workers)
    try:
        rows: list[Any] = measure(cluster)
        return rows
    finally:
        cluster.close()


def _sizes(text: str) -> list[int]:
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?b)?", part.strip().lower())
        if match is None:
            raise ConfigError(f"size {part!r} cannot be read: write 10KB, 1MB or a number of bytes", field="sizes")
        found.append(int(float(match[1]) * _UNITS[match[2] or "b"]))
    return found


def _show(output: Output, rows: list[Any], columns: dict[str, str]) -> None:
    if output is Output.json:
        show.dump([dataclasses.asdict(row) for row in rows])
        return
    show.table(list(columns.values()), [[show.number(getattr(row, name)) for name in columns] for row in rows])
