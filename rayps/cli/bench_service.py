"""`rayps bench service`: measure the CPU time and memory of the job service while many jobs wait."""

from __future__ import annotations

from typing import Annotated

import typer

from rayps.cli.measure import Format, Json, show_rows, whole_numbers
from rayps.cli.show import Output


def service(
    waiting: Annotated[str, typer.Option(help="Numbers of waiting jobs to measure, each at least 1.")] = "1,1500,20000",
    seconds: Annotated[
        float, typer.Option(min=1.0, help="Seconds of the measurement, in which the service gets no request.")
    ] = 20.0,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Measure the CPU time of a service with waiting jobs.

    The time to stop one of these jobs is measured too.
    """
    from rayps.bench.service import bench_service

    rows = bench_service(whole_numbers(waiting, "waiting"), seconds)
    show_rows(
        Output.json if as_json else output,
        rows,
        {"waiting": "waiting", "cpu": "of one core", "memory_mb": "MB", "stop_s": "s to stop one"},
    )
