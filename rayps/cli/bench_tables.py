"""`rayps bench tables`: a sparse table's segments in one process, beside what memory allows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from rayps.cli import show
from rayps.cli.show import Output
from rayps.errors import ConfigError

_CALLS = {"optimizer": "optimizer", "workers": "workers", "servers": "servers", "ids": "ids", "own": "rows/s",
          "calls": "by calls", "times_calls": "times", "own_turn_s": "turn s", "calls_turn_s": "by calls",
          "own_cpu_s": "cpu s", "calls_cpu_s": "by calls"}  # fmt: skip
_HOT = {"servers": "servers", "moves": "moves", "turns_before": "turns/s before", "turns_after": "after",
        "skew_before": "skew before", "skew_after": "after", "ids_skew_before": "of ids before",
        "ids_skew_after": "after", "busiest_before": "busiest s/1000 before", "busiest_after": "after",
        "bound_gain": "gain where servers have cores"}  # fmt: skip


def tables(
    rows: Annotated[int, typer.Option(help="Rows of the table.")] = 1_000_000,
    ids: Annotated[int, typer.Option(help="Ids of a batch, each once; with --zipf how many are drawn.")] = 50_000,
    dim: Annotated[int, typer.Option(help="Elements of a row.")] = 16,
    segments: Annotated[str, typer.Option(help="Numbers of segments.")] = "1,16",
    optimizers: Annotated[str, typer.Option(help="Some of sgd, adagrad, adam.")] = "sgd,adagrad,adam",
    zipf: Annotated[float | None, typer.Option(help="Ids by this Zipf exponent, above 1.")] = None,
    files: Annotated[int, typer.Option(help="Instead: save --rows rows as Parquet and load them on so many segments.")]
    = 0,
    folder: Annotated[Path | None, typer.Option(help="Where --files writes.")] = None,
    repeats: Annotated[int, typer.Option(help="Batches of each.")] = 15,
    calls: Annotated[bool, typer.Option(help="Instead: through servers, beside plain Ray actor calls.")] = False,
    hot: Annotated[bool, typer.Option(help="Instead: a hot table's load before and after its segments moved.")] = False,
    workers: Annotated[int, typer.Option(help="Workers of --calls and --hot.")] = 4,
    servers: Annotated[int, typer.Option(help="Servers of --calls and --hot.")] = 2,
    address: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Measure on this Ray cluster.")] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="table or json.")] = Output.table,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --output json.")] = False,
) -> None:
    """Rows of a sparse table pulled and pushed a second, beside torch's index_select and index_add_ on the same ids."""
    counts = _whole(segments)
    from rayps.bench.tables import bench_files, bench_tables

    form = Output.json if as_json else output
    if calls or hot:
        with_hot = (zipf or 1.2) if hot else None
        _on_ray(form, address, workers, servers, rows, ids, dim, counts[-1], optimizers.split(","), with_hot)
        return
    if files:
        saved = [bench_files(rows, dim, count, files, folder) for count in counts]
        _show(form, saved, {"rows": "rows", "segments": "segments", "loaded_on": "loaded on",
                            "row_bytes": "bytes a row", "file_bytes": "on disk", "save": "save s", "load": "load s",
                            "save_cpu": "cpu s", "load_cpu": "cpu s"})
        return
    measured = bench_tables(rows, ids, dim, counts, optimizers.split(","), zipf=zipf, repeats=repeats)
    _show(form, measured, {"optimizer": "optimizer", "segments": "segments", "ids": "ids", "pull": "pulled/s",
                           "push": "pushed/s", "torch_pull": "select/s", "torch_push": "add/s",
                           "of_limit": "of limit", "torch_step": "step/s", "of_same": "of the same",
                           "row_bytes": "bytes a row", "made": "made/s"})


def _on_ray(
    form: Output, address: str | None, workers: int, servers: int, rows: int, ids: int, dim: int, segments: int,
    optimizers: list[str], zipf: float | None,
) -> None:  # fmt: skip
    """What needs a cluster."""
    from rayps.bench.calls import bench_calls
    from rayps.bench.hot import bench_hot
    from rayps.ray_cluster import RayCluster

    cluster = RayCluster.join(address) if address else RayCluster.local(cpus=workers)
    try:
        if zipf is not None:
            _show(form, [bench_hot(cluster, zipf=zipf, ids=ids, rows=rows, workers=workers, servers=servers,
                                   segments=segments)], _HOT)  # fmt: skip
            return
        _show(form, [bench_calls(cluster, rows=rows, ids=ids, dim=dim, workers=workers, servers=servers,
                                 segments=segments, optimizer=name) for name in optimizers], _CALLS)  # fmt: skip
    finally:
        cluster.close()


def _whole(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"segments {text!r} cannot be read: write whole numbers such as 1,16",
                          field="segments") from None  # fmt: skip


def _show(output: Output, rows: list[Any], columns: dict[str, str]) -> None:
    if output is Output.json:
        show.dump([dataclasses.asdict(row) for row in rows])
        return
    show.table(list(columns.values()), [[show.number(getattr(row, name)) for name in columns] for row in rows])
