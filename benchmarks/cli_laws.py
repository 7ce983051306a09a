"""`python -m benchmarks laws`: compare bytes and time of every algorithm with the textbook formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayps.cli import show
from rayps.cli.measure import Format, Json, show_rows, sizes_of, whole_numbers
from rayps.cli.show import Output


def laws(
    workers: Annotated[str, typer.Option(help="Numbers of workers to measure.")] = "2,4,8",
    shards: Annotated[
        str, typer.Option(help="Numbers of shards of a parameter server to measure; 0: no server.")
    ] = "1,2,4,8",
    size: Annotated[str, typer.Option(help="Size of the vector.")] = "1MB",
    rate: Annotated[str, typer.Option(help="The rate of each host's network link, in each direction.")] = "100mbit",
    slow_link: Annotated[
        str | None, typer.Option(help="Also measure the ring with one worker's link at this rate.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Number of repetitions of each measurement.")] = 3,
    picture: Annotated[Path | None, typer.Option(help="Draw the results into this SVG file.")] = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Compare bytes and time with the formulas, for each algorithm, number of workers and number of shards.

    Every worker and every shard has its own host: a network namespace, which needs root.
    """
    (found,) = sizes_of(size)[:1]
    from benchmarks.laws import bench_laws
    from benchmarks.laws import picture as drawn

    rows = bench_laws(
        whole_numbers(workers, "workers"),
        [each for each in whole_numbers(shards, "shards") if each],
        size=found,
        rate=rate,
        slow_link=slow_link,
        repeats=repeats,
    )
    show_rows(
        Output.json if as_json else output,
        rows,
        {
            "way": "way",
            "workers": "workers",
            "shards": "shards",
            "slow": "slow link",
            "busiest": "bytes of busiest",
            "busiest_law": "formula",
            "total": "bytes of all",
            "total_law": "formula",
            "seconds": "seconds",
            "seconds_law": "formula",
            "times_law": "x formula",
        },
    )
    if picture is not None:
        picture.write_text(drawn(rows), encoding="utf-8")
        show.note(f"drawn into {picture}")
