"""`rayps bench device`: measure layers, sums among workers of one device and a training step, on the CPU and a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rayps_client.errors import ConfigError

from rayps.cli import show
from rayps.cli.measure import Format, Json, show_rows, whole_numbers
from rayps.cli.show import Output

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PARTS = {  # the columns of each part's table
    "layers": ("layer", "batch", "parameters", "cpu", "gpu", "times", "copy"),
    "sum": ("device", "transport", "workers", "vector", "turns", "ms", "copies_ms", "times_copies", "adds_ms", "error"),
    "step": ("device", "contender", "parameters", "turns", "ms", "of_torch", "error"),
    "server": ("device", "servers", "shards", "operation", "bytes", "ms", "gb_s", "of_copy", "hidden"),
    "rows": ("device", "lookup", "ids", "dim", "ms", "of_torch"),
}
_HEADINGS = {"cpu": "cpu ms", "gpu": "gpu ms", "copy": "copy ms"}


def device(
    what: Annotated[str, typer.Option(help="Parts to measure: layers, sum, step, server, rows.")] = "layers,sum,step",
    devices: Annotated[str, typer.Option(help="Devices of the parts sum and step; those that exist by default.")] = "",
    workers: Annotated[str, typer.Option(help="Numbers of workers of one device that sum a vector.")] = "2,4",
    megabytes: Annotated[float, typer.Option(help="The size of the vector to sum, in 10^6 bytes.")] = 100.0,
    seconds: Annotated[float, typer.Option(help="Longest time of each part on each device, without starts.")] = 60.0,
    batches: Annotated[str, typer.Option(help="Batch sizes of the layers, in rows.")] = "1,32,128",
    repeats: Annotated[int, typer.Option(help="Number of measurements of each layer and batch size.")] = 9,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Measure this machine's CPU and GPU. Needs no cluster.

    layers: convolutions and fully connected layers, and the copy of their input to the GPU. sum: a vector of all
    workers of one device, by each transport, beside the copies that it needs. step: one worker's training step in bf16
    beside plain torch's. server: pushes and pulls of one worker, beside plain copies, and what a step hides of them.
    rows: rows of a table that a batch looks up, beside torch's EmbeddingBag.
    """
    names, counts, sizes = what.split(","), whole_numbers(workers, "workers"), whole_numbers(batches, "batches")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise ConfigError(f"there is no part {unknown[0]!r}: use some of {', '.join(PARTS)}", what=what)
    from rayps.bench.device import bench_device, devices_here
    from rayps.bench.device_ring import bench_device_sums
    from rayps.bench.device_server import bench_device_rows, bench_device_server
    from rayps.bench.device_step import bench_device_step

    places = devices.split(",") if devices else devices_here()
    measure: dict[str, Callable[[], Sequence[DataclassInstance]]] = {
        "layers": lambda: bench_device(sizes, repeats=repeats),
        "sum": lambda: [
            row for each in places for row in bench_device_sums(each, counts, megabytes=megabytes, seconds=seconds)
        ],
        "step": lambda: [row for each in places for row in bench_device_step(each, seconds=seconds)],
        "server": lambda: [row for each in places for row in bench_device_server(each, megabytes=megabytes)],
        "rows": lambda: [row for each in places for row in bench_device_rows(each)],
    }
    found = {name: measure[name]() for name in names}
    if as_json or output is Output.json:
        show.dump({name: [dataclasses.asdict(row) for row in rows] for name, rows in found.items()})
        return
    for name, rows in found.items():
        show_rows(output, rows, {field: _HEADINGS.get(field, field.replace("_", " ")) for field in PARTS[name]})
