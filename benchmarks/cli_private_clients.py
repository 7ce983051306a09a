"""`python -m benchmarks private-clients`: measure what client-level privacy costs in accuracy, and in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayps.cli.measure import Address, Format, Json, run, show_rows
from rayps.cli.show import Output


def private_clients(
    epsilons: Annotated[str, typer.Option(help="Budgets.")] = "8,4,2,1",
    scales: Annotated[str, typer.Option(help="Factors by which the population is scaled.")] = "10,100",
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 40,
    fraction: Annotated[float, typer.Option(help="The probability with which a client is drawn.")] = 0.2,
    clip: Annotated[float, typer.Option(help="The largest norm of an update.")] = 1.0,
    lr: Annotated[float, typer.Option(help="The clients' learning rate.")] = 0.2,
    delta: Annotated[float, typer.Option(help="Delta; divided by the scale for larger populations.")] = 1e-4,
    workers: Annotated[int, typer.Option(help="Workers; their number changes only the time.")] = 2,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A folder with MNIST's four files, beside a folder mnist_writers with mnist_writer_ids.npz. By "
            "default examples/data, with 300 equal parts as clients."
        ),
    ] = None,
    address: Address = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Measure accuracy by epsilon: at the population that there is, and scaled to larger ones."""
    from benchmarks.private_clients import FOLDER, bench_private_clients

    found = run(
        address,
        workers,
        lambda cluster: bench_private_clients(
            cluster,
            data or FOLDER,
            epsilons=[float(each) for each in epsilons.split(",")],
            scales=[int(each) for each in scales.split(",") if each],
            rounds=rounds,
            fraction=fraction,
            clip=clip,
            lr=lr,
            delta=delta,
            workers=workers,
        ),
    )
    show_rows(
        Output.json if as_json else output,
        found,
        {
            "kind": "run",
            "epsilon": "epsilon",
            "population": "clients",
            "cohort": "a round",
            "noise": "noise multiplier",
            "accuracy": "accuracy",
            "seconds": "s a round",
        },
    )
