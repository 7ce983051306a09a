"""`python -m benchmarks laws`: bytes and time of every algorithm against the number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayps.cli import show
from rayps.cli.measure import Format, Json, show_rows, sizes_of, whole
from rayps.cli.show import Output


def laws(
    workers: Annotated[str, typer.Option(help="Numbers of workers.")] = "2,4,8",
    shards: Annotated[str, typer.Option(help="Numbers of shards; 0 leaves the server out.")] = "1,2,4,8",
    size: Annotated[str, typer.Option(help="Size of the vector.")] = "1MB",
    rate: Annotated[str, typer.Option(help="What each host's line carries, each way.")] = "100mbit",
    slow_link: Annotated[str | None, typer.Option(help="Also the ring with one line at this rate.")] = None,
    repeats: Annotated[int, typer.Option(help="Turns of each.")] = 3,
    picture: Annotated[Path | None, typer.Option(help="Draw the rows into this SVG file.")] = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Bytes and time against the number of workers, for every algorithm and number of shards, beside the formulas.

    Every worker and shard is a host of its own: a network namespace, which needs root.
    """
    (found,) = sizes_of(size)[:1]
    from benchmarks.laws import bench_laws
    from benchmarks.laws import picture as drawn

    rows = bench_laws(
        whole(workers, "workers"),
        [each for each in whole(shards, "shards") if each],
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
            "slow": "slow line",
            "busiest": "bytes of busiest",
            "busiest_law": "by the book",
            "total": "bytes of all",
            "total_law": "by the book",
            "seconds": "seconds",
            "seconds_law": "by the book",
            "times_law": "x book",
        },
    )
    if picture is not None:
        picture.write_text(drawn(rows), encoding="utf-8")
        show.note(f"drawn into {picture}")
