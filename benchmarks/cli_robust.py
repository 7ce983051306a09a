"""`python -m benchmarks robust`: measure how attackers harm federated learning, and what robust rules cost."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from rayps.cli.measure import Address, Format, Json, run, show_rows
from rayps.cli.show import Output

_RULES = "mean,krum(f=4),multi_krum(f=4),trimmed_mean(f=4),median,geometric_median,bulyan(f=4),centered_clipping(tau=1)"


def robust(
    rules: Annotated[str, typer.Option(help="Aggregation rules to measure, with mean first.")] = _RULES,
    scenes: Annotated[str, typer.Option(help="Scenes to measure: iid, attack, shards.")] = "iid,attack,shards",
    attack: Annotated[
        str, typer.Option(help="The attack of the scene `attack`, with its number of attackers.")
    ] = "sign_flip(clients=4,scale=5)",
    clients: Annotated[int, typer.Option(help="Clients; each round trains all of them.")] = 20,
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 15,
    epochs: Annotated[int, typer.Option(help="Local epochs.")] = 1,
    batch: Annotated[int, typer.Option(help="Rows of a local batch.")] = 10,
    lr: Annotated[float, typer.Option(help="The clients' learning rate.")] = 0.1,
    rows: Annotated[int, typer.Option(help="Images to learn from.")] = 6000,
    seeds: Annotated[int, typer.Option(help="Runs of each rule and scene, with seeds 0, 1, ...")] = 1,
    workers: Annotated[int, typer.Option(help="Workers; their number changes only the time, not the accuracy.")] = 2,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A folder with MNIST's four files, or with digits.parquet and "
            "digits_test.parquet. By default examples/data."
        ),
    ] = None,
    address: Address = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Measure the accuracy of aggregation rules with and without attackers.

    The rows are divided at random, or by label.
    """
    from benchmarks.robust import bench_robust

    found = run(
        address,
        workers,
        lambda cluster: bench_robust(
            cluster,
            workers,
            re.split(r",(?![^(]*\))", rules),
            scenes.split(","),
            attack=attack,
            clients=clients,
            rounds=rounds,
            rows=rows,
            epochs=epochs,
            batch=batch,
            lr=lr,
            seeds=seeds,
            folder=data,
        ),
    )
    show_rows(
        Output.json if as_json else output,
        found,
        {
            "scene": "scene",
            "attack": "attack",
            "rule": "rule",
            "best": "best accuracy",
            "last": "at the end",
            "below": "points below",
            "rejected": "rejected a round",
            "warned": "warned",
            "seconds": "seconds",
        },
    )
