"""`rayps bench staleness`: measure the adaptive staleness bound beside fixed ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayps.cli.measure import Address, Format, Json, run, show_rows
from rayps.cli.show import Output


def staleness(
    workers: Annotated[int, typer.Option(help="Workers.")] = 4,
    scenes: Annotated[
        str,
        typer.Option(
            help="come_and_go (each worker takes 5 times as long in a random tenth of its rounds), one_slow (worker 0 "
            "takes 3 times as long), momentum (one_slow, with momentum and a large learning rate)."
        ),
    ] = "come_and_go,one_slow,momentum",
    pace: Annotated[float, typer.Option(help="Seconds of an ordinary round, in which the worker sleeps.")] = 0.1,
    seeds: Annotated[int, typer.Option(help="Number of seeds with which each staleness is measured.")] = 5,
    first: Annotated[int, typer.Option(help="The first seed.")] = 0,
    target: Annotated[float, typer.Option(help="The loss on the test images that ends a run.")] = 0.45,
    limit: Annotated[float, typer.Option(help="The longest time of a run, in seconds.")] = 300.0,
    data: Annotated[Path | None, typer.Option(help="Folder with digits.parquet; default: examples/data.")] = None,
    virtual: Annotated[
        bool, typer.Option(help="In virtual time: the result depends on the seeds alone, and no cluster is needed.")
    ] = False,
    address: Address = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Measure the time to equal loss with slow workers.

    The workers train under staleness 0, 2, 8, none (asynchronous), and auto.
    """
    from rayps.bench.staleness import bench_staleness, simulate_staleness

    given, chosen = scenes.split(","), range(first, first + seeds)
    if virtual:
        rows = simulate_staleness(workers, given, pace=pace, target=target, seeds=chosen, folder=data, limit=limit)
    else:
        rows = run(
            address,
            workers,
            lambda cluster: bench_staleness(
                cluster, workers, given, pace=pace, target=target, seeds=chosen, folder=data, limit=limit
            ),
        )
    show_rows(
        Output.json if as_json else output,
        rows,
        {
            "scene": "scene",
            "staleness": "staleness",
            "seconds": "seconds",
            "times_best": "x best fixed",
            "rounds": "rounds",
            "moves": "moves",
            "last": "last bounds",
        },
    )
