"""`python -m benchmarks admm`: compare ADMM on rows sorted by label with parallel SGD, with and without a shuffle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayps.cli.measure import Format, Json, show_rows
from rayps.cli.show import Output


def admm(
    workers: Annotated[int, typer.Option(help="Workers.")] = 4,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            help="A strategy as text; repeat the option for more. By default all_reduce, parallel_sgd with and without "
            "a shuffle, and admm."
        ),
    ] = None,
    epochs: Annotated[int, typer.Option(help="Epochs.")] = 20,
    rows: Annotated[int, typer.Option(help="Images to learn from.")] = 6000,
    batch: Annotated[int, typer.Option(help="Rows of a worker's batch.")] = 32,
    lr: Annotated[float, typer.Option(help="The learning rate.")] = 0.1,
    hidden: Annotated[int, typer.Option(help="Width of the hidden layer; 0 = none, a convex model.")] = 64,
    penalty: Annotated[float, typer.Option(help="ADMM's penalty.")] = 1.0,
    seeds: Annotated[int, typer.Option(help="Runs of each strategy, with seeds 0, 1, ...")] = 1,
    rate: Annotated[
        float,
        typer.Option(help="Rate of each worker's link in bits per second, for the time to send a shuffle's rows."),
    ] = 1e9,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A folder with MNIST's four files, or with digits.parquet and "
            "digits_test.parquet. By default examples/data."
        ),
    ] = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Compare ADMM and parallel SGD if a worker's rows have few labels.

    The table has accuracy, bytes, and the cost of a shuffle.
    """
    from benchmarks.admm import bench_admm

    found = bench_admm(
        workers,
        strategy or (),
        epochs=epochs,
        rows=rows,
        batch=batch,
        lr=lr,
        hidden=hidden,
        penalty=penalty,
        seeds=seeds,
        rate=rate,
        folder=data,
    )
    show_rows(
        Output.json if as_json else output,
        found,
        {
            "strategy": "strategy",
            "rows": "a worker's rows",
            "meetings": "synchronizations",
            "best": "best accuracy",
            "last": "at the end",
            "least": "worst seed",
            "bytes": "MB sent",
            "data": "s for batches",
            "moved": "MB of rows",
            "line": "s on the link",
            "seconds": "seconds",
            "primal": "primal residual",
        },
    )
