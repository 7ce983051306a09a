"""`python -m benchmarks learning`: compare federated learning with training in one place, and with clients alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayps.cli import show
from rayps.cli.measure import Format, Json, show_rows, whole_numbers
from rayps.cli.show import Output


def learning(
    scenes: Annotated[
        str, typer.Option(help="Scenes to measure: shards, iid, one_label, writers.")
    ] = "shards,iid,one_label",
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="A folder with digits.parquet and digits_test.parquet, or with MNIST's idx.gz files (examples/data).",
        ),
    ] = None,
    writers: Annotated[
        Path | None, typer.Option(metavar="FILE", help="An npz file with the writer of each image of MNIST.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, e.g. 0,1,2.")] = "0",
    hidden: Annotated[int, typer.Option(help="Width of the network's hidden layer.")] = 64,
    lr: Annotated[float, typer.Option(help="The clients' learning rate.")] = 0.1,
    rounds: Annotated[int | None, typer.Option(help="Rounds of each strategy, instead of those of the scene.")] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="Measure only this strategy, instead of those of the scene; repeat the option for more."),
    ] = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Compare federated learning with training in one place and with each client alone, by the accuracy on digits."""
    given = whole_numbers(seeds, "seeds")
    from benchmarks.learning import LearningRow, bench_learning

    def report(row: LearningRow) -> None:
        show.note(
            f"{row.scene}, seed {row.seed}, {row.way}: best accuracy {row.best:.3f}, 90% reached in round "
            f"{row.reached}, last accuracy {row.last:.3f}, on images of other writers {show.number(row.others)}, of "
            f"personal models {show.number(row.personal)} ({row.seconds:.0f} s)"
        )

    rows = bench_learning(
        scenes.split(","),
        folder=data,
        writers=writers,
        seeds=given,
        hidden=hidden,
        lr=lr,
        rounds=rounds,
        strategies=strategy or (),
        report=report,
    )
    show_rows(
        Output.json if as_json else output,
        rows,
        {
            "scene": "scene",
            "seed": "seed",
            "rounds": "rounds",
            "best": "best",
            "reached": "90% in round",
            "last": "last (alone: best client)",
            "others": "other writers",
            "personal": "personal",
            "seconds": "seconds",
            "way": "way",
        },
    )
