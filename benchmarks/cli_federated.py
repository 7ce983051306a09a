"""`python -m benchmarks federated`: rounds of many clients beside Flower, pfl and a bare loop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayps.cli.measure import Format, Json, show_rows
from rayps.cli.show import Output


def federated(
    scenes: Annotated[
        str, typer.Option(help="Some of train, nothing, empty, many, states.")
    ] = "train,nothing,empty,many,states",
    contenders: Annotated[str, typer.Option(help="Some of own, flower, pfl, bare.")] = "own,flower,pfl,bare",
    workers: Annotated[int, typer.Option(help="Processes that train.")] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds after the first five.")] = 20,
    repeats: Annotated[int, typer.Option(help="Runs of each.")] = 3,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Where the peers' environments are; made there once, by pip. By default ~/.cache/rayps/bench."
        ),
    ] = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Federated rounds beside Flower's simulation engine, Apple's pfl and one core's bare loop, start included."""
    from benchmarks.federated import bench_federated

    rows = bench_federated(
        scenes.split(","), contenders.split(","), workers=workers, rounds=rounds, repeats=repeats, folder=folder
    )
    show_rows(
        Output.json if as_json else output,
        rows,
        {
            "scene": "scene",
            "contender": "contender",
            "clients": "clients",
            "round_s": "s a round",
            "updates_s": "updates/s",
            "first_s": "first 5 s",
            "of_bare": "of bare",
            "cpu_ms": "cpu ms an update",
            "cpu_of_bare": "of bare's",
            "times_flower": "x flower",
            "first_times_flower": "first 5 x flower",
            "times_pfl": "x pfl",
            "memory_mb": "MB",
            "memory_growth_mb": "grown MB",
            "disk_mb": "disk MB",
        },
    )
