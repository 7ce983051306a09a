"""`python -m benchmarks pipeline` and `tensor`: compare pipeline and tensor parallelism with those of torch."""

from __future__ import annotations

from typing import Annotated

import typer

from rayps.cli.measure import Address, Format, Json, run, show_rows, whole_numbers
from rayps.cli.show import Output


def pipeline(
    stages: Annotated[int, typer.Option(help="Stages; each is one worker.")] = 2,
    contenders: Annotated[str, typer.Option(help="Contenders: own (rayps), torch.")] = "own,torch",
    schedules: Annotated[str, typer.Option(help="Schedules to measure: gpipe, 1f1b, interleaved.")] = "gpipe,1f1b",
    micro_batches: Annotated[int, typer.Option(help="Micro-batches of a step.")] = 8,
    width: Annotated[int, typer.Option(help="Width of the layers.")] = 64,
    batch: Annotated[int, typer.Option(help="Rows of a batch.")] = 64,
    repeats: Annotated[int, typer.Option(help="Number of measurements of each contender, of 20 steps each.")] = 9,
    address: Address = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Measure a pipeline's overhead, beyond the computation of its stages.

    It is compared with torch.distributed.pipelining on gloo.
    """
    from benchmarks.pipeline import bench_pipeline

    rows = run(
        address,
        stages,
        lambda cluster: bench_pipeline(
            cluster,
            stages,
            contenders.split(","),
            schedules=schedules.split(","),
            micros=micro_batches,
            width=width,
            batch=batch,
            repeats=repeats,
        ),
    )
    show_rows(
        Output.json if as_json else output,
        rows,
        {
            "contender": "contender",
            "schedule": "schedule",
            "stages": "stages",
            "micro_batches": "micro-batches",
            "step": "ms a step",
            "ideal": "ideal",
            "beyond": "beyond",
            "times_torch": "torch's beyond / own",
        },
    )


def tensor(
    workers: Annotated[int, typer.Option(help="Workers that share the layers.")] = 2,
    contenders: Annotated[
        str, typer.Option(help="Contenders: own (rayps), dtensor, alone (both layers on one worker).")
    ] = "own,dtensor,alone",
    widths: Annotated[str, typer.Option(help="Widths d of Linear(d, 4d), ReLU, Linear(4d, d).")] = "64,256,1024",
    batch: Annotated[int, typer.Option(help="Rows of a batch.")] = 32,
    repeats: Annotated[int, typer.Option(help="Number of measurements of each contender, of 50 steps each.")] = 9,
    address: Address = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Measure the forward and backward pass of two split layers.

    They are compared with torch's DTensor styles on gloo and with unsplit layers.
    """
    from benchmarks.tensor import bench_tensor

    rows = run(
        address,
        workers,
        lambda cluster: bench_tensor(
            cluster,
            workers,
            contenders.split(","),
            widths=whole_numbers(widths, "widths"),
            batch=batch,
            repeats=repeats,
        ),
    )
    show_rows(
        Output.json if as_json else output,
        rows,
        {
            "contender": "contender",
            "width": "width",
            "batch": "batch",
            "step": "µs a step",
            "times_dtensor": "x dtensor",
            "times_alone": "x alone",
        },
    )
