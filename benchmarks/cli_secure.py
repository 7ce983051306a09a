"""`python -m benchmarks secure`: secure aggregation with client processes that die, and Flower's SecAgg+."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayps.cli.measure import Format, Json, show_rows
from rayps.cli.show import Output


def secure(
    contenders: Annotated[str, typer.Option(help="Contenders, one after another: own (rayps), flower.")] = "own,flower",
    runs: Annotated[
        str, typer.Option(help="Runs of rayps: none (no deaths), a stage in which clients die, all (in each).")
    ] = "none,advertise_keys,share_keys,masked_input,unmasking,all",
    clients: Annotated[int, typer.Option(help="Client processes.")] = 50,
    share: Annotated[float, typer.Option(help="Share of the clients that die in a stage.")] = 0.2,
    neighbours: Annotated[
        int | None, typer.Option(help="Neighbours of each client; by default all the others.")
    ] = None,
    deadline: Annotated[float, typer.Option(help="Deadline of a round of rayps, in seconds.")] = 30.0,
    folder: Annotated[
        Path | None,
        typer.Option(help="The folder of Flower's environment, which pip fills once. By default ~/.cache/rayps/bench."),
    ] = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Sum updates under masks while clients die: exact or void, bytes and seconds, beside the papers and Flower."""
    from benchmarks.secure import bench_flower, bench_own

    rows = []
    for contender in contenders.split(","):
        rows += (
            bench_own(runs.split(","), clients, share, neighbours, deadline)
            if contender == "own"
            else bench_flower(clients, share, neighbours, folder)
        )
    show_rows(
        Output.json if as_json else output,
        rows,
        {
            "contender": "contender",
            "dying": "dying before",
            "clients": "clients",
            "neighbours": "neighbours",
            "result": "sum",
            "survivors": "in it",
            "sent_kb": "sent kB",
            "received_kb": "received kB",
            "formula_kb": "formula kB",
            "plain_kb": "plain kB",
            "cpu_s": "cpu s a client",
            "round_s": "s a round",
        },
    )
