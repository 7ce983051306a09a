"""`rayps bench device`: measure which layers are faster on a GPU, including the transfer of their input."""

from __future__ import annotations

from typing import Annotated

import typer

from rayps.cli.measure import Format, Json, show_rows, whole_numbers
from rayps.cli.show import Output


def device(
    batches: Annotated[str, typer.Option(help="Batch sizes to measure, in rows.")] = "1,32,128",
    repeats: Annotated[int, typer.Option(help="Number of measurements of each layer and batch size.")] = 9,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Measure layers on this machine's CPU and GPU.

    The layers are convolutions and fully connected layers. The time to copy their input to the GPU is also measured.
    """
    from rayps.bench.device import bench_device

    rows = bench_device(whole_numbers(batches, "batches"), repeats=repeats)
    show_rows(
        Output.json if as_json else output,
        rows,
        {
            "layer": "layer",
            "batch": "batch",
            "parameters": "parameters",
            "cpu": "cpu ms",
            "gpu": "gpu ms",
            "times": "times",
            "copy": "copy ms",
        },
    )
