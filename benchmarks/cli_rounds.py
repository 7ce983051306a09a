"""`python -m benchmarks rounds`: how many rounds a second each strategy makes, beside plain torch."""

from __future__ import annotations

from typing import Annotated

import typer

from rayps.cli.measure import Address, Format, Json, run, show_rows
from rayps.cli.show import Output


def rounds(
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="A strategy; repeat the option for more. All others are compared with the first."),
    ] = None,
    workers: Annotated[int, typer.Option(help="Workers.")] = 2,
    hidden: Annotated[
        int, typer.Option(help="Width of the MLP: 64 makes 9 thousand parameters, 430 makes 218 thousand.")
    ] = 430,
    steps: Annotated[int, typer.Option(help="Rounds of each job, of which the later half counts.")] = 1500,
    turns: Annotated[int, typer.Option(help="Turns; each runs every contender once.")] = 5,
    address: Address = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Measure rounds a second of small jobs, where the exchange is most of a round."""
    from benchmarks.rounds import STRATEGIES, bench_rounds

    found = run(
        address,
        workers,
        lambda cluster: bench_rounds(cluster, workers, hidden, strategy or STRATEGIES, rounds=steps, turns=turns),
    )
    show_rows(
        Output.json if as_json else output,
        found,
        {
            "contender": "contender",
            "parameters": "parameters",
            "rate": "rounds/s",
            "lowest": "lowest",
            "highest": "highest",
            "share": "of the first",
        },
    )
