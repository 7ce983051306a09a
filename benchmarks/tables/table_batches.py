"""`python -m benchmarks tables`: a table's rows in one process, through servers, on disk, or with hot segments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from benchmarks.tables.calls import bench_calls
from benchmarks.tables.hot_table import bench_hot
from benchmarks.tables.tables import bench_files, bench_tables
from rayps.bench.table import BenchRow, Opt
from rayps.cluster.local import Cluster


def bench_table_batches(
    cluster: Cluster | None,
    rows: Annotated[int, Opt("Rows of the table.")] = 1_000_000,
    ids: Annotated[int, Opt("Ids of a batch, all different; with --zipf, the number of draws.")] = 50_000,
    dim: Annotated[int, Opt("Elements of a row.")] = 16,
    segments: Annotated[Sequence[int], Opt("Numbers of segments to measure.")] = (1, 16),
    optimizers: Annotated[Sequence[str], Opt("Optimizers to measure: sgd, adagrad, adam.")] = (
        "sgd",
        "adagrad",
        "adam",
    ),
    zipf: Annotated[float | None, Opt("Draw the ids with this Zipf exponent, above 1.")] = None,
    files: Annotated[int, Opt("Instead: save --rows rows as Parquet and load them on this many segments.")] = 0,
    folder: Annotated[Path | None, Opt("The folder in which --files writes.")] = None,
    repeats: Annotated[int, Opt("Number of batches measured for each optimizer.")] = 15,
    calls: Annotated[
        bool, Opt("Instead: compare pulls and pushes through servers with plain Ray actor calls.")
    ] = False,
    hot: Annotated[
        bool, Opt("Instead: measure the servers' load before and after the busiest segments migrate.")
    ] = False,
    workers: Annotated[int, Opt("Workers of --calls and --hot.")] = 4,
    servers: Annotated[int, Opt("Servers of --calls and --hot.")] = 2,
) -> Sequence[BenchRow]:
    """Measure one of the four. Raises the errors of the measurement."""
    last = segments[-1]
    if cluster is not None and hot:
        skew = zipf or 1.2
        return [bench_hot(cluster, zipf=skew, ids=ids, rows=rows, workers=workers, servers=servers, segments=last)]
    if cluster is not None:
        return [
            bench_calls(
                cluster, rows=rows, ids=ids, dim=dim, workers=workers, servers=servers, segments=last, optimizer=name
            )
            for name in optimizers
        ]
    if files:
        return [bench_files(rows, dim, count, files, folder) for count in segments]
    return bench_tables(rows, ids, dim, segments, optimizers, zipf=zipf, repeats=repeats)
