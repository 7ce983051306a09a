"""`rayps bench tables`: measure pulls and pushes of a sparse table's rows; compare them with a dense torch table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayps.cli.measure import Address, Format, Json, run, show_rows, whole_numbers
from rayps.cli.show import Output

if TYPE_CHECKING:
    from rayps.cluster.local import Cluster

_CALLS = {
    "optimizer": "optimizer",
    "workers": "workers",
    "servers": "servers",
    "ids": "ids",
    "own": "rows/s",
    "calls": "by calls",
    "times_calls": "times",
    "own_turn_s": "turn s",
    "calls_turn_s": "by calls",
    "own_cpu_s": "cpu s",
    "calls_cpu_s": "by calls",
}
_HOT = {
    "servers": "servers",
    "moves": "moves",
    "turns_before": "turns/s before",
    "turns_after": "after",
    "skew_before": "skew before",
    "skew_after": "after",
    "ids_skew_before": "of ids before",
    "ids_skew_after": "after",
    "busiest_before": "busiest s/1000 before",
    "busiest_after": "after",
    "bound_gain": "gain where servers have cores",
}


def tables(
    rows: Annotated[int, typer.Option(help="Rows of the table.")] = 1_000_000,
    ids: Annotated[int, typer.Option(help="Ids of a batch, all different; with --zipf, the number of draws.")] = 50_000,
    dim: Annotated[int, typer.Option(help="Elements of a row.")] = 16,
    segments: Annotated[str, typer.Option(help="Numbers of segments to measure.")] = "1,16",
    optimizers: Annotated[str, typer.Option(help="Optimizers to measure: sgd, adagrad, adam.")] = "sgd,adagrad,adam",
    zipf: Annotated[float | None, typer.Option(help="Draw the ids with this Zipf exponent, above 1.")] = None,
    files: Annotated[
        int, typer.Option(help="Instead: save --rows rows as Parquet and load them on this many segments.")
    ] = 0,
    folder: Annotated[Path | None, typer.Option(help="The folder in which --files writes.")] = None,
    repeats: Annotated[int, typer.Option(help="Number of batches measured for each optimizer.")] = 15,
    calls: Annotated[
        bool, typer.Option(help="Instead: compare pulls and pushes through servers with plain Ray actor calls.")
    ] = False,
    hot: Annotated[
        bool, typer.Option(help="Instead: measure the servers' load before and after the busiest segments migrate.")
    ] = False,
    workers: Annotated[int, typer.Option(help="Workers of --calls and --hot.")] = 4,
    servers: Annotated[int, typer.Option(help="Servers of --calls and --hot.")] = 2,
    address: Address = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Measure pulls and pushes of a sparse table's rows.

    They are compared with torch's index_select and index_add_ on the same ids.
    """
    counts = whole_numbers(segments, "segments")
    from rayps.bench.tables import bench_files, bench_tables

    form = Output.json if as_json else output
    if calls or hot:
        with_hot = (zipf or 1.2) if hot else None
        _on_ray(form, address, workers, servers, rows, ids, dim, counts[-1], optimizers.split(","), with_hot)
        return
    if files:
        saved = [bench_files(rows, dim, count, files, folder) for count in counts]
        show_rows(
            form,
            saved,
            {
                "rows": "rows",
                "segments": "segments",
                "loaded_on": "loaded on",
                "row_bytes": "bytes a row",
                "file_bytes": "on disk",
                "save": "save s",
                "load": "load s",
                "save_cpu": "cpu s",
                "load_cpu": "cpu s",
            },
        )
        return
    measured = bench_tables(rows, ids, dim, counts, optimizers.split(","), zipf=zipf, repeats=repeats)
    show_rows(
        form,
        measured,
        {
            "optimizer": "optimizer",
            "segments": "segments",
            "ids": "ids",
            "pull": "pulled/s",
            "push": "pushed/s",
            "torch_pull": "select/s",
            "torch_push": "add/s",
            "of_limit": "of limit",
            "torch_step": "step/s",
            "of_same": "of the same",
            "row_bytes": "bytes a row",
            "made": "made/s",
        },
    )


def _on_ray(
    form: Output,
    address: str | None,
    workers: int,
    servers: int,
    rows: int,
    ids: int,
    dim: int,
    segments: int,
    optimizers: list[str],
    zipf: float | None,
) -> None:
    """Run the benchmarks that need a Ray cluster."""
    from rayps.bench.calls import bench_calls
    from rayps.bench.hot_table import bench_hot

    def measure(cluster: Cluster) -> None:
        if zipf is not None:
            found = bench_hot(
                cluster, zipf=zipf, ids=ids, rows=rows, workers=workers, servers=servers, segments=segments
            )
            show_rows(form, [found], _HOT)
            return
        show_rows(
            form,
            [
                bench_calls(
                    cluster,
                    rows=rows,
                    ids=ids,
                    dim=dim,
                    workers=workers,
                    servers=servers,
                    segments=segments,
                    optimizer=name,
                )
                for name in optimizers
            ],
            _CALLS,
        )

    run(address, workers, measure)
