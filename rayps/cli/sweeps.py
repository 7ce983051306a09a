"""The commands for several jobs: sweep starts them, compare shows them beside each other."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer
from rayps_client.errors import ConfigError, NotFound
from rayps_client.values import Json

from rayps.cli import show
from rayps.cli.jobs import Format, Function, Upload, WorkingDir, note_packed, with_folder
from rayps.cli.show import Output
from rayps.cli.sparkline import draw_sparkline
from rayps.core.job.job_status import Status
from rayps.service.client import Client
from rayps.service.code.code_files import PackedCode
from rayps.service.job_file import load, of_function, read
from rayps.service.sweeps.comparison import BATCH_LOSS, ComparedRow, Comparison, TableColumn, read_cell, with_direction

_WIDTH = 60  # characters of a curve
_LEAST = 20  # the same on a narrow terminal
_VALUE = 30  # least width of a column of values in which the jobs differ; a longer value wraps
_BEST = ("lowest", "highest")  # headings of a metric's best values


class Mode(enum.StrEnum):
    """Whether the best value of a metric is its lowest or its highest."""

    min = "min"
    max = "max"


def sweep(
    over: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=V1,V2,...",
            help="Values of a parameter or of a field of the job, e.g. --over lr=0.1,0.3 --over seed=0,1,2. "
            "All combinations are submitted.",
        ),
    ],
    file: Annotated[
        Path | None, typer.Argument(metavar="SPEC.yaml", help="The job of which each value makes a variant.")
    ] = None,
    run: Function = None,
    name: Annotated[
        str | None, typer.Option(help="The sweep's name (default: the workload or function and a number).")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a field of the file, e.g. --set params.lr=0.3."),
    ] = None,
    working_dir: WorkingDir = None,
    upload: Upload = True,
    output: Format = Output.table,
) -> None:
    """Submit a job with several values of parameters or fields. If one job is refused, none is submitted."""
    if (file is None) == (run is None):
        raise ConfigError("give a job file, or --run FILE:FUNCTION", field="run")
    spec = read(file, changes or []) if file is not None else of_function(str(run), changes or [])
    packed: list[PackedCode] = []
    with Client(on_packed=packed.append) as client:
        found = client.sweep(with_folder(spec, working_dir), name=name, over=values_of(over), upload=upload)
    note_packed(packed, strategy=spec.get("strategy"))
    if output is Output.json:
        show.dump({"name": found.name, "jobs": [job.data for job in found.jobs]})
        return
    for job in found.jobs:
        show.print_line(f"{job.id}  {job.data['name']}")
    show.print_note(
        f"the sweep {found.name} has {len(found.jobs)} jobs; to compare them: `rayps compare {found.name}`; to stop "
        f"them: `rayps stop --sweep {found.name}`"
    )


def values_of(over: list[str]) -> dict[str, list[Json]]:
    """Return the values of each `NAME=V1,V2,...`. Each value is YAML; a value with a comma needs quotes.

    Raises:
        ConfigError: a text has no values, or a name occurs twice.
    """
    found: dict[str, list[Json]] = {}
    for text in over:
        name, equals, values = text.partition("=")
        if not equals or not name or not values.strip():
            raise ConfigError(f"--over {text!r} should be NAME=V1,V2,..., e.g. --over lr=0.1,0.3", field="over")
        if name in found:
            raise ConfigError(f"--over {name} was given twice: give all its values at once", field="over")
        found[name] = load(f"[{values}]", f"--over {name}")
    return found


def compare(
    names: Annotated[
        list[str], typer.Argument(metavar="SWEEP | JOB...", help="The name of a sweep, or the ids of jobs.")
    ],
    metric: Annotated[
        str | None, typer.Option(help="The metric of the curves (default: the first with several values).")
    ] = None,
    mode: Annotated[
        Mode | None,
        typer.Option(
            help="Whether the best value is the lowest or the highest: of --metric, or of the metrics whose names do "
            "not say it (default: by the name of each metric)."
        ),
    ] = None,
    output: Format = Output.table,
) -> None:
    """Compare jobs by values, metrics and curves. The values are those in which the jobs differ."""
    with Client() as client:
        found = _compare(client, names)
    if mode is not None:
        silent = [name for name in found["metrics"] if found["lowest"][name] is None]
        found = with_direction(found, silent if metric is None else [metric], mode.value)
    if output is Output.json:
        show.dump(found)
        return
    chosen = _choose_metric(found, metric)
    _print_table(found)
    _print_curves(found, chosen)


def _compare(client: Client, names: list[str]) -> Comparison:
    """Return the comparison of the jobs with these ids; one name is that of a sweep, or else the id of a single job."""
    query: dict[str, str | list[str]] = {"sweep": names[0]} if len(names) == 1 else {"job": names}
    try:
        found: Comparison = client.call("GET", "/api/v1/comparison", params=query)
        return found
    except NotFound:
        if len(names) != 1:
            raise
    try:
        job = client.job(names[0])
    except NotFound:
        raise NotFound(
            f"there is no sweep and no job {names[0]!r}: `rayps ls` lists the jobs, and `rayps get JOB` shows a "
            "job's sweep"
        ) from None
    others = "the ids of other jobs" + (f", or the name of its sweep, {job.data['sweep']}" if job.data["sweep"] else "")
    show.print_note(f"this is job {job.id} alone; to compare it with others, give {others}")
    found = client.call("GET", "/api/v1/comparison", params={"job": [job.id]})
    return found


def _choose_metric(found: Comparison, metric: str | None) -> str | None:
    """Return the metric of the curves, or None if there is none. Raises ConfigError if there is no such metric."""
    if metric is not None and metric not in found["metrics"]:
        known = ", ".join(found["metrics"]) or "none yet"
        raise ConfigError(f"metric is {metric!r}: the jobs' metrics are {known}", field="metric")
    several = [
        name
        for name in found["metrics"]
        if any(len(curves[name]["value"]) > 1 for curves in found["curves"].values() if name in curves)
    ]
    return metric or next(iter(several), None)


def _print_table(found: Comparison) -> None:
    metrics = [name for name in found["metrics"] if name != BATCH_LOSS] or found["metrics"]
    shown = [
        column
        for column in found["columns"]
        if column["name"] != "name"
        and (column["kind"] not in ("last", "best") or column["of"] in metrics)
        and (column["kind"] != "best" or found["lowest"][column["of"]] is not None)
    ]
    heads = [column for column in shown if column["kind"] in ("last", "best")]
    rows = [[_format_cell(row, column) for column in shown] for row in found["rows"]]
    columns = [_choose_heading(found, column) for column in shown]
    best = [at for at, head in enumerate(columns) if at >= len(columns) - len(heads) and head in _BEST]
    show.print_table(columns, rows, cut=dict.fromkeys(found["differing"], _VALUE), beside=best, wrap=True)
    for row in found["rows"]:
        if row["status"] == Status.FAILED and row["reason"]:
            show.print_line(f"{row['id']} failed: {row['reason']}")


def _choose_heading(found: Comparison, column: TableColumn) -> str:
    """Return the heading of a column; that of a metric's best values says which value is the best."""
    return column["name"] if column["kind"] != "best" else _BEST[0] if found["lowest"][column["of"]] else _BEST[1]


def _format_cell(row: ComparedRow, column: TableColumn) -> show.Cell:
    value = read_cell(row, column)
    return show.colour_status(row["status"]) if column["name"] == "status" else _format_value(value)


def _print_curves(found: Comparison, metric: str | None) -> None:
    if metric is None:
        return
    drawn = {row["id"]: found["curves"][row["id"]].get(metric) for row in found["rows"]}
    values = [value for curve in drawn.values() if curve for value in curve["value"] if value is not None]
    if not values:
        return
    low, high = min(values), max(values)
    show.print_line(
        f"\n{metric} over rounds, from {show.format_number(low)} (lowest block) to {show.format_number(high)} "
        "(highest block)"
    )
    labels = {row["id"]: _make_label(found, row) for row in found["rows"]}
    room = (show.find_width() or 10_000) - 2
    if max(map(len, labels.values())) > room - _LEAST:
        labels = {job: job for job in labels}
    width = max(len(label) for label in labels.values())
    for job, curve in drawn.items():
        line = draw_sparkline(curve["value"], max(_LEAST, min(_WIDTH, room - width)), low, high) if curve else ""
        show.print_line(f"{labels[job]:<{width}}  {line}")


def _make_label(found: Comparison, row: ComparedRow) -> str:
    text = " ".join(
        f"{name}={_format_value(row['values'][name])}" for name in found["differing"] if name in row["values"]
    )
    return text or row["id"]


def _format_value(value: Json) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return show.format_strategy(value) if isinstance(value, (dict, list)) else show.format_number(value)  # type: ignore[arg-type]


def add(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(sweep)
    app.command()(compare)
