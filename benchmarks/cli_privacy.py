"""`python -m benchmarks privacy`: compare DP-SGD with Opacus, by the accuracy on digits and the time of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rayps_client.errors import ConfigError

from rayps.cli import show
from rayps.cli.measure import Format, Json, show_rows
from rayps.cli.show import Output

_EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "data"


def privacy(
    data: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER", help="A folder with digits.parquet and digits_test.parquet, or with MNIST's idx.gz files."
        ),
    ] = _EXAMPLES,
    epsilon: Annotated[str, typer.Option(help="Values of epsilon, e.g. 8,3,1.")] = "8,3,1",
    contenders: Annotated[str, typer.Option(help="rayps, opacus.")] = "rayps,opacus",
    epochs: Annotated[float, typer.Option(help="Epochs, for which the noise is found.")] = 10.0,
    steps: Annotated[int | None, typer.Option(help="Run only so many of their steps, to measure the time.")] = None,
    lot: Annotated[int, typer.Option(help="Rows that are drawn in a step on average.")] = 1200,
    physical: Annotated[int, typer.Option(help="Rows whose gradients are in memory at once.")] = 1200,
    clip: Annotated[float, typer.Option(help="The largest norm of a row's gradient.")] = 0.5,
    rate: Annotated[float, typer.Option(help="Learning rate of SGD.")] = 8.0,
    seed: Annotated[int, typer.Option(help="Seed of the parameters.")] = 0,
    threads: Annotated[int | None, typer.Option(help="Threads of torch; by default one for each processor.")] = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Compare DP-SGD of rayps and Opacus with the same parameters: accuracy, epsilon by both accountants, time."""
    try:
        wanted = [float(part) for part in epsilon.split(",")]
    except ValueError as error:
        raise ConfigError(f"epsilon is {epsilon!r}: give numbers such as 8,3,1", field="epsilon") from error
    from benchmarks.privacy import PrivacyRow, bench_privacy

    def report(row: PrivacyRow) -> None:
        show.note(
            f"{row.contender} at epsilon {row.epsilon:g}: accuracy {row.accuracy:.4f}, {row.step_ms:.1f} ms a step"
        )

    rows = bench_privacy(
        str(data),
        wanted,
        contenders.split(","),
        epochs=epochs,
        steps=steps,
        lot=lot,
        physical=physical,
        clip=clip,
        rate=rate,
        seed=seed,
        threads=threads,
        report=report,
    )
    show_rows(
        Output.json if as_json else output,
        rows,
        {
            "epsilon": "epsilon",
            "contender": "contender",
            "noise": "noise",
            "steps": "steps",
            "accuracy": "accuracy",
            "spent": "spent",
            "step_ms": "ms a step",
        },
    )
