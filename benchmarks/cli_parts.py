"""`python -m benchmarks parts`: the accuracy of a workload beside that of the plain script it was ported from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayps.cli import show
from rayps.cli.measure import Format, Json, show_rows, whole_numbers
from rayps.cli.show import Output


def parts(
    names: Annotated[
        str, typer.Option("--parts", help="Parts, each with those before it: batchnorm, schedule, ema.")
    ] = "batchnorm,schedule,ema",
    data: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A folder with digits.parquet, or with MNIST's idx.gz files.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, at least two, e.g. 0,1,2.")] = "0,1,2,3,4",
    rows: Annotated[int, typer.Option(min=1, help="Training images.")] = 4000,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each run.")] = 4,
    workers: Annotated[int, typer.Option(min=1, help="Workers, which are threads.")] = 2,
    decay: Annotated[float, typer.Option(help="Decay of the average.")] = 0.99,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Compare a small residual network as a workload with the plain script, over seeds, with its parts one by one."""
    given = whole_numbers(seeds, "seeds")
    from benchmarks.parts import PartsRow, bench_parts

    def report(row: PartsRow) -> None:
        show.note(f"{row.parts}: plain {row.plain:.2f}, rayps {row.rayps:.2f}, difference {row.difference:+.2f}")

    found = bench_parts(
        names.split(","),
        folder=data,
        seeds=given,
        rows=rows,
        epochs=epochs,
        workers=workers,
        decay=decay,
        report=report,
    )
    show_rows(
        Output.json if as_json else output,
        found,
        {
            "parts": "parts",
            "seeds": "seeds",
            "plain": "plain torch",
            "rayps": "rayps",
            "difference": "difference",
            "error": "standard error",
            "last": "last statistics",
        },
    )
