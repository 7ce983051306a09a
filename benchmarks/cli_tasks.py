"""`python -m benchmarks tasks`: the loss of each strategy beside that of a plain torch loop, for three examples."""

from __future__ import annotations

from typing import Annotated

import typer

from rayps.cli import show
from rayps.cli.measure import Address, Format, Json, run, show_rows
from rayps.cli.show import Output


def tasks(
    names: Annotated[str, typer.Option("--tasks", help="Tasks: convnet, lm, recommender.")] = "convnet,lm,recommender",
    strategy: Annotated[
        list[str] | None, typer.Option(help="Train under this strategy alone; repeat the option for more.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Workers.")] = 2,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each run, instead of those of the task.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the parameters and of the order of rows.")] = 0,
    address: Address = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Compare the final loss of each strategy with that of a plain torch loop with the same seed."""
    from benchmarks.tasks import STRATEGIES, TaskRow, bench_tasks

    def report(row: TaskRow) -> None:
        show.note(
            f"{row.task}, {row.strategy}: " + (row.refused or f"loss {row.loss:.4f}, plain torch {row.plain:.4f}")
        )

    rows = run(
        address,
        workers + 2,  # servers too
        lambda cluster: bench_tasks(
            cluster, names.split(","), strategy or STRATEGIES, workers=workers, steps=steps, seed=seed, report=report
        ),
    )
    show_rows(
        Output.json if as_json else output,
        rows,
        {
            "task": "task",
            "strategy": "strategy",
            "steps": "steps",
            "first": "loss at first",
            "loss": "loss",
            "plain": "plain torch",
            "difference": "difference",
        },
    )
    for row in rows:
        if row.refused and output is Output.table and not as_json:
            show.line(f"{row.task}, {row.strategy}: refused: {row.refused}")
