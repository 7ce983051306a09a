"""`rayps bench start`: measure the time from a call to the first training step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rayps.cli import show
from rayps.cli.measure import Format, Json, show_rows
from rayps.cli.show import Output

if TYPE_CHECKING:
    from rayps.bench.start import StartRow


def start(
    scenes: Annotated[
        str,
        typer.Option(
            help="What to measure: ray (ray.init alone), cold (rayps.train without a Ray), joined (on a running "
            "cluster), service (a job of a service), warm (with warm processes), ray_train (Ray Train's TorchTrainer)."
        ),
    ] = "ray,cold,joined,service,warm,ray_train",
    workers: Annotated[int, typer.Option(help="Workers.")] = 2,
    repeats: Annotated[int, typer.Option(help="Number of measurements of each scene; the table has medians.")] = 5,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Measure the seconds from a call to the first training step.

    The workers record the times themselves. The parts of each time are shown too.
    """
    from rayps.bench.start import bench_start

    def report(row: StartRow) -> None:
        seconds = "" if row.first_step is None else f"{row.first_step:.2f} s "
        show.note(f"{row.scene}: {seconds}({row.shown}; load {row.load:.1f})")

    rows = bench_start(scenes.split(","), workers=workers, repeats=repeats, report=report)
    show_rows(
        Output.json if as_json else output,
        rows,
        {
            "scene": "scene",
            "first_loss": "s to first loss",
            "first_step": "to first step",
            "slowest": "slowest",
            "load": "load",
            "shown": "parts",
        },
    )
