"""`rayps bench sharded`: measure the memory of sharded state, and checkpoints that are written in the background."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rayps_client.errors import ConfigError

from rayps.cli.measure import Format, Json, show_rows, sizes_of
from rayps.cli.show import Output
from rayps.cli.sizes import size as size_of

_WHAT = ("memory", "driver", "write")


def sharded(
    what: Annotated[
        str,
        typer.Argument(
            help="memory (of a worker, beside the formula), driver (its peak, by the size of the model), or write "
            "(steps while a checkpoint is written)."
        ),
    ] = "memory",
    workers: Annotated[int, typer.Option(help="Workers.")] = 2,
    strategies: Annotated[
        str | None, typer.Option(help="Strategies, separated by spaces. By default all_reduce and its shards.")
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            help="Bytes of parameters, e.g. 100MB; several for driver, e.g. 10MB,1GB. For write: of a checkpoint."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of a run.")] = None,
    every: Annotated[int, typer.Option(help="write: rounds from a checkpoint to the next.")] = 25,
    batch: Annotated[int, typer.Option(help="write: rows of a worker's step.")] = 64,
    folder: Annotated[Path | None, typer.Option(help="write: where checkpoints are written.")] = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Measure memory and checkpoints of sharded state.

    Workers hold slices of the state (shard=optimizer, shard=gradients) under Adam.

    Each run has a Ray and a process of its own.
    """
    if what not in _WHAT:
        raise ConfigError(f"there is no measurement {what!r}: use one of {', '.join(_WHAT)}", field="what")
    from rayps.bench import sharded as bench

    form = Output.json if as_json else output
    names = bench.STRATEGIES if strategies is None else tuple(strategies.split())
    if what == "memory":
        size = 100_000_000 if sizes is None else int(size_of(sizes, "sizes"))
        memory = bench.bench_memory_of_workers(workers, size, names, 12 if steps is None else steps)
        show_rows(
            form,
            memory,
            {
                "strategy": "strategy",
                "model": "bytes",
                "formula": "formula",
                "steady": "steady",
                "peak": "peak",
                "of_formula": "steady of formula",
            },
        )
        return
    name = "all_reduce:shard=gradients" if strategies is None else names[0]
    if what == "driver":
        peaks = bench.bench_memory_of_driver(workers, sizes_of(sizes or "10MB,100MB,1GB"), name)
        show_rows(form, peaks, {"strategy": "strategy", "model": "bytes", "peak": "driver's peak", "grown": "grown"})
        return
    rows = bench.bench_background_write(
        workers,
        int(size_of(sizes or "1GB", "sizes")),
        name,
        steps=100 if steps is None else steps,
        every=every,
        batch=batch,
        folder=folder,
    )
    show_rows(
        form,
        rows,
        {
            "strategy": "strategy",
            "checkpoint": "bytes",
            "writes": "writes",
            "seconds": "seconds",
            "otherwise": "s of a step",
            "writing": "while written",
            "ratio": "ratio",
            "begin": "at the begin",
        },
    )
