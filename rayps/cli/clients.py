"""`rayps clients`: show how a workload's data is divided among clients. Nothing is trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rayps_client.errors import ConfigError

from rayps.cli import show
from rayps.cli.show import Output
from rayps.service.job_file import parse_assignments

if TYPE_CHECKING:
    from rayps.data.clients import Clients

_SHADES = " ░▒▓█"
_FIGURES = 32  # characters of the columns between a client's name and the strip of its labels


def clients(
    target: Annotated[str, typer.Argument(metavar="WORKLOAD", help="file.py:Class or module:Class of a Workload.")],
    client: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="Divide the data by this column or rule instead of the workload's, such "
            "as shards(per_client=2,clients=20), dirichlet(alpha=0.5,clients=20), "
            "iid(clients=20), by_quantity(clients=20).",
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Set a parameter of the workload, e.g. --set clients=20."),
    ] = None,
    evaluation: Annotated[bool, typer.Option("--evaluation", help="Show the evaluation data.")] = False,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw each client's labels into this SVG file.")
    ] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="table or json.")] = Output.table,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --output json.")] = False,
) -> None:
    """Show each client's rows and labels. The entropy of the labels is in bits."""
    from rayps.data import rule
    from rayps.workload.base import load

    workload = load(target, str(Path.cwd()), parse_assignments(changes or []))
    data = workload.evaluation_data() if evaluation else workload.data()
    if client is not None:
        data = data.with_clients(rule(client) if "(" in client or ":" in client else client)
    data.check()
    found = data.clients
    if picture is not None:
        try:
            picture.write_text(found.svg(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{picture} cannot be written: {error.strerror or error}", field="picture") from None
        show.print_note(f"written to {picture}")
    if as_json or output is Output.json:
        show.dump({**found.summary(), "statistics": found.statistics().to_pylist()})
        return
    _print_table(found)


def _print_table(found: Clients) -> None:
    table, summary = found.statistics(), found.summary()
    rows, columns = [], ["client", "rows"]
    if "labels" in table.column_names:
        columns += ["labels", "entropy"]
    names = [name for name in table.column_names if name.startswith("label ")]
    strip = len(names) if len(names) <= 30 else 0
    room, taken = show.find_width(), max(map(len, found.names), default=0) + _FIGURES
    apart = " " if room is None or taken + 2 * strip <= room else ""
    if strip:
        columns.append(apart.join(name.removeprefix("label ")[:1] for name in names))
    for record in table.to_pylist():
        row = [record["client"], record["rows"]]
        if "labels" in record:
            row += [record["labels"], f"{record['entropy']:.2f}"]
        if strip:
            most = max(record[name] for name in names)
            row.append(apart.join(_shade(record[name], most) for name in names))
        rows.append(row)
    show.print_table(columns, rows)
    show.print_note(
        f"{summary['rows']} rows are divided among {summary['clients']} clients by {summary['rule']}: a client has "
        f"{summary['smallest']} to {summary['largest']} rows, median {summary['median']:g}"
    )


def _shade(count: int, most: int) -> str:
    return _SHADES[0 if not count else 1 + min(3, 4 * count // max(most, 1))]
