"""`python -m benchmarks federated`: compare federated rounds with Flower, pfl and a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayps.cli.measure import Format, Json, show_rows
from rayps.cli.show import Output


def federated(
    scenes: Annotated[
        str, typer.Option(help="Scenes to measure: train, nothing, empty, many, private, states.")
    ] = "train,nothing,empty,many,private,states",
    contenders: Annotated[
        str, typer.Option(help="Contenders: own (rayps), flower, pfl, bare (a plain loop on one core).")
    ] = "own,flower,pfl,bare",
    workers: Annotated[int, typer.Option(help="Processes that train.")] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds after the first five.")] = 20,
    repeats: Annotated[int, typer.Option(help="Number of runs of each contender and scene.")] = 3,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="The folder of the virtual environments of flower and pfl, which pip fills once. By default "
            "~/.cache/rayps/bench."
        ),
    ] = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Compare federated rounds with Flower's simulation engine, Apple's pfl and a plain loop on one core."""
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
