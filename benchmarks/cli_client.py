"""`python -m benchmarks client`: the start and the memory of a real federated client, beside Flower's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayps.cli import show
from rayps.cli.measure import Format, Json, show_rows
from rayps.cli.show import Output


def client(
    contenders: Annotated[str | None, typer.Option(help="Contenders, separated by semicolons (default: all).")] = None,
    parameters: Annotated[int, typer.Option(min=2, help="Parameters of the linear model.")] = 10_001,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each contender; the rows show medians.")] = 3,
    peers: Annotated[Path, typer.Option(help="The folder of the peers' environments.")] = Path("build/peers"),
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Measure seconds and memory of a client from its start until its first update has arrived."""
    from benchmarks.client import CONTENDERS, ClientRow, bench_clients

    def report(row: ClientRow) -> None:
        show.note(f"{row.contender}: order after {row.order:.2f} s, {row.memory_mb:.0f} MB")

    chosen = [name.strip() for name in contenders.split(";")] if contenders else list(CONTENDERS)
    rows = bench_clients(chosen, parameters, runs, peers, report)
    show_rows(
        Output.json if as_json else output,
        rows,
        {
            "contender": "client",
            "joined": "joined (s)",
            "order": "first order (s)",
            "update": "update sent (s)",
            "memory_mb": "memory (MB)",
            "private_mb": "private (MB)",
            "processes": "processes",
        },
    )
