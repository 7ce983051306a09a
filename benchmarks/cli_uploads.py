"""`python -m benchmarks uploads`: bytes, accuracy and seconds of real clients whose updates are coded."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from rayps.cli.measure import Format, Json, show_rows
from rayps.cli.show import Output


def uploads(
    codings: Annotated[
        str | None, typer.Option(help="Codings, separated by commas: plain, int8, top_k 5%, mask 10% (default: all).")
    ] = None,
    clients: Annotated[int, typer.Option(min=1, help="Clients, each with an equal part of the digits.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of a run.")] = 20,
    line: Annotated[
        str | None, typer.Option(help="Measure the seconds of a round of one client whose link has this rate (1mbit).")
    ] = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Code what real clients receive and send: bytes a round and accuracy, or seconds a round on a slow line."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # read when numpy is imported: the clients are threads of this process
    from benchmarks.uploads import CODINGS, bench_line, bench_uploads

    chosen = [name.strip() for name in codings.split(",")] if codings else list(CODINGS)
    shown = Output.json if as_json else output
    if line is None:
        titles = {
            "coding": "coding",
            "clients": "clients",
            "rounds": "rounds",
            "received_kb": "received kB a round",
            "sent_kb": "sent kB a round",
            "accuracy": "accuracy",
        }
        show_rows(shown, bench_uploads(chosen, clients, rounds), titles)
        return
    titles = {
        "coding": "coding",
        "rate": "line",
        "bytes_kb": "kB a round",
        "formula_s": "formula s",
        "round_s": "s a round",
    }
    show_rows(shown, bench_line(chosen, rounds, line), titles)
