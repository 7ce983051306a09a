"""`rayps bench causes`: slow one worker of a job in known ways, and compare the verdict of the job's report."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from rayps.cli import show
from rayps.cli.measure import Format, Json
from rayps.cli.report_page import page
from rayps.cli.show import Output
from rayps.core.time_report import report_of


def causes(
    scenes: Annotated[
        str, typer.Option(help="What is slowed, separated by commas: none, cpu, blocked, disk, line.")
    ] = "none,cpu,blocked,disk,line",
    strategies: Annotated[str, typer.Option(help="Strategies, separated by spaces.")] = "all_reduce",
    workers: Annotated[int, typer.Option(help="Workers, each on a simulated host of its own.")] = 3,
    rounds: Annotated[int, typer.Option(help="Rounds of each job.")] = 150,
    html: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the report of each job into this folder.")
    ] = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Check that reports name a worker slowed in known ways.

    It needs root, for network namespaces and for a cgroup that limits a disk.
    """
    from rayps.bench.causes import bench_causes

    found = bench_causes(scenes.split(","), strategies.split(), workers=workers, rounds=rounds)
    if html is not None:
        html.mkdir(parents=True, exist_ok=True)
        for row, time in found:
            name = f"{row.scene}-{row.strategy.partition(':')[0]}"
            (html / f"{name}.html").write_text(page(report_of(time, name)), encoding="utf-8")
    if as_json or output is Output.json:
        show.dump([dataclasses.asdict(row) for row, _ in found])
        return
    show.table(
        ["scene", "strategy", "found", "cause", "worker", "cost", "goodput", "parts / wall"],
        [
            [
                row.scene,
                row.strategy,
                "yes" if row.found else "NO",
                row.cause,
                " ".join(row.guilty),
                f"{row.cost:.0%}",
                f"{row.goodput:.0%}",
                f"{row.off:.2%} off",
            ]
            for row, _ in found
        ],
    )
