"""`python -m benchmarks averaging`: compare infrequent synchronization with all-reduce in every step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayps.cli.measure import Address, Format, Json, run, show_rows
from rayps.cli.show import Output


def averaging(
    text: Annotated[Path, typer.Argument(help="A text to learn, such as examples/data/hamlet.txt.")],
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="A strategy; repeat the option for more. All others are compared with the first."),
    ] = None,
    workers: Annotated[int, typer.Option(help="Workers.")] = 2,
    epochs: Annotated[int, typer.Option(help="Epochs of each strategy.")] = 6,
    blocks: Annotated[int, typer.Option(help="Layers of the transformer.")] = 2,
    rate: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 3e-3,
    batch: Annotated[int, typer.Option(help="Rows of a worker's batch.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the parameters and of the order of rows.")] = 0,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the loss as a function of the bytes into this SVG file.")
    ] = None,
    address: Address = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Compare all-reduce, local SGD and DiLoCo on a character model.

    The table has the loss and the bytes sent, for the same number of samples.
    """
    from benchmarks.averaging import STRATEGIES, bench_averaging
    from benchmarks.averaging import picture as drawn

    rows = run(
        address,
        workers,
        lambda cluster: bench_averaging(
            cluster,
            text,
            workers,
            strategy or STRATEGIES,
            epochs=epochs,
            blocks=blocks,
            rate=rate,
            batch=batch,
            seed=seed,
        ),
    )
    if picture is not None:
        picture.write_text(drawn(rows), encoding="utf-8")
    show_rows(
        Output.json if as_json else output,
        rows,
        {
            "strategy": "strategy",
            "steps": "steps",
            "samples": "samples",
            "bytes": "bytes moved",
            "fewer": "times fewer",
            "loss": "loss",
            "worse": "worse",
        },
    )
