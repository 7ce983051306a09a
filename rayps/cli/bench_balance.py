"""`rayps bench balance`: measure shares of rows by speed."""

from __future__ import annotations

from typing import Annotated

import typer

from rayps.cli.measure import Address, Format, Json, run, show_rows
from rayps.cli.show import Output


def balance(
    workers: Annotated[int, typer.Option(help="Workers, of which worker 0 is slower.")] = 4,
    row_seconds: Annotated[float, typer.Option(help="Seconds that a fast worker sleeps for a row.")] = 0.001,
    slower: Annotated[float, typer.Option(help="How many times as long worker 0 sleeps.")] = 2.0,
    rounds: Annotated[int, typer.Option(help="Rounds of each job, of which the second half is measured.")] = 80,
    address: Address = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Measure a round of unequal workers with equal shares of the rows and with shares by speed."""
    from rayps.bench.balance import bench_balance

    rows = run(
        address,
        workers,
        lambda cluster: bench_balance(cluster, workers, row_seconds=row_seconds, slower=slower, rounds=rounds),
    )
    show_rows(
        Output.json if as_json else output,
        rows,
        {
            "shares": "shares",
            "seconds": "seconds a round",
            "times_equal": "x equal",
            "bound_seconds": "bound",
            "of_bound": "of bound",
            "rows": "rows",
        },
    )
