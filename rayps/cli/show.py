"""Print for the command line: data on stdout as tables or JSON, notes on stderr."""

from __future__ import annotations

import enum
import json
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rayps_client.errors import ConfigError
from rayps_client.machine.terminal_text import plain
from rayps_client.values import Json, JsonObject
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rayps.cli.fit_columns import fit_columns
from rayps.core.strategy.text import write_strategy
from rayps.federated.remote.secure_options import SECAGG, SecureOptions
from rayps.privacy.options import PrivacySpec
from rayps.service.rest_answers import JobAnswer
from rayps.service.settings import private_write
from rayps.strategies.catalogue import catalogue

_COLOURS = {
    "SUCCEEDED": "green",
    "FAILED": "red",
    "STOPPED": "yellow",
    "RUNNING": "cyan",
    "RECOVERING": "yellow",
    "UNKNOWN": "yellow",
}
_UNKNOWN = object()

Cell: TypeAlias = str | float | Text | None  # of a table


class Output(enum.StrEnum):
    """The format of a command's output: a table for a person, or JSON for a program."""

    table = "table"
    json = "json"


To = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="FILE",
        help="Write the secret to this file, readable by its owner only; - prints it, even if not to a terminal.",
    ),
]


def print_note(text: str) -> None:
    """Print a note for the user, to stderr."""
    sys.stderr.write(f"{plain(text) if sys.stderr.isatty() else text}\n")
    sys.stderr.flush()


def print_line(text: str) -> None:
    """Print a line of data to stdout. On a terminal, control characters are replaced (see `plain`)."""
    sys.stdout.write(f"{plain(text) if sys.stdout.isatty() else text}\n")
    sys.stdout.flush()


def refuse_secret(to: str | None) -> None:
    """Check that a secret may be printed. Raises ConfigError if stdout is no terminal and `--to` is not given."""
    if to is None and not sys.stdout.isatty():
        raise ConfigError(
            "this is a secret, and the output is not a terminal: give --to FILE (only you can read that file),\n"
            "or --to - to print it anyway",
            field="to",
        )


def refuse_existing(to: str | None) -> None:
    """Check that a file for a secret can be created. Raises ConfigError if it exists or its folder is not writable.

    An existing file is not overwritten, because it may contain a token that cannot be shown again.
    """
    if to in (None, "-"):
        return
    path = Path(to).expanduser()
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(
            f"{to} cannot be written: the folder {path.parent} does not exist or is not writable", field="to"
        )
    if path.exists():
        raise ConfigError(f"{to} exists and is not overwritten: give another file with --to, or remove it", field="to")


def print_secret(text: str, to: str | None) -> None:
    """Print a secret to the terminal, or write it to the file `to` with mode 0600."""
    refuse_secret(to)
    if to in (None, "-"):
        print_line(text)
        return
    try:
        private_write(Path(to).expanduser(), f"{text}\n")
    except OSError as error:
        raise ConfigError(f"{to} cannot be written: {error.strerror or error}", field="to") from error
    print_note(f"written to {to}")


def dump(data: Any) -> None:
    """Print data as JSON."""
    print_line(json.dumps(data, indent=2, ensure_ascii=False))


def find_width() -> int | None:
    """Return the columns of the terminal, or None if stdout is not a terminal."""
    return Console().width if sys.stdout.isatty() else None


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    cut: Mapping[str, int] | None = None,
    omit: Sequence[str] = (),
    beside: Collection[int] = (),
    wrap: bool = False,
) -> None:
    """Print rows under headings. The last column wraps on a terminal; on a narrow one see `rayps.cli.fit_columns`.

    `cut`: from columns that may be made narrower to their least width; their texts are shortened, or with `wrap`
    continue on the next line. `omit`: columns that may be left out, with a note. `beside`: the numbers of columns that
    stay beside the one before. Nothing is changed if stdout is not a terminal.
    """
    room = find_width()
    if room is None:
        with (console := Console(soft_wrap=True, highlight=False, width=10_000)).capture() as captured:
            console.print(_make_grid(columns, rows))
        for text in captured.get().rstrip("\n").split("\n"):
            print_line(text.rstrip())
        return
    cells = [[cell if isinstance(cell, Text) else Text(plain(str(cell))) for cell in row] for row in rows]
    widths = [max([len(column), *(len(row[at]) for row in cells)]) for at, column in enumerate(columns)]
    numbers = {name: at for at, name in enumerate(columns)}
    least = {numbers[name]: width for name, width in (cut or {}).items()}
    blocks = fit_columns(widths, room, least, [numbers[name] for name in omit], beside)
    for number, block in enumerate(blocks):
        if number:
            print_line("")
        chosen = [[row[at] for at in block.columns] for row in cells]
        Console(highlight=False).print(
            _make_grid([columns[at] for at in block.columns], chosen, block.widths, wrap=wrap)
        )
    shown = {at for block in blocks for at in block.columns}
    if missing := [name for at, name in enumerate(columns) if at not in shown]:
        print_note(
            f"not shown on a terminal of {room} columns: {', '.join(missing)}; all: -o json, or a wider terminal"
        )


def _make_grid(
    columns: Sequence[str], rows: Sequence[Sequence[Cell]], widths: Sequence[int] | None = None, *, wrap: bool = False
) -> Table:
    """Return a table without lines. Texts wider than `widths` wrap in the last column and, with `wrap`, in all."""
    found = Table(box=None, header_style="bold", pad_edge=False)
    for at, column in enumerate(columns):
        wraps = widths is not None and (wrap or at == len(columns) - 1)
        width = None if widths is None else widths[at]
        found.add_column(column, no_wrap=not wraps, overflow="fold" if wraps else "ellipsis", width=width)
    for row in rows:
        found.add_row(*[cell if isinstance(cell, Text) else Text(str(cell)) for cell in row])
    return found


def drop_empty_columns(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> tuple[list[str], list[list[Cell]]]:
    """Return a table without the columns in which no row has a value; the first column stays."""
    kept = [at for at in range(len(columns)) if at == 0 or any(row[at] not in ("", None) for row in rows)]
    return [columns[at] for at in kept], [[row[at] for at in kept] for row in rows]


def colour_status(word: str) -> Text:
    """Return a status in its colour."""
    return Text(word, style=_COLOURS.get(word, ""))


def print_facts(pairs: Sequence[tuple[str, Cell | Mapping[str, float]]]) -> None:
    """Print names and values, one pair per line, without empty values."""
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        if value not in (None, "", {}, []):
            print_line(f"{name:<{width}}  {value}")


def format_age(stamp: str | None) -> str:
    """Return how long ago a time (ISO 8601) was, as text such as "3 h"; "" if there is no time."""
    if not stamp:
        return ""
    seconds = max(0.0, time.time() - datetime.fromisoformat(stamp).astimezone(UTC).timestamp())
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def format_clock(at: float) -> str:
    """Return seconds since the epoch as local time."""
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")


def format_number(value: float | str | None) -> str:
    """Return a number as text with four significant digits, or "" for None."""
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def measures(found: Mapping[str, float] | None) -> str:
    """Return metrics as text on one line."""
    return "  ".join(f"{name} {format_number(value)}" for name, value in (found or {}).items())


def format_params(found: Mapping[str, Json]) -> str:
    """Return a workload's parameters as text on one line."""
    return "  ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in found.items()
    )


def format_strategy(spec: Json) -> str:
    """Return a strategy in its text form, without the options whose value is the default."""
    return write_strategy(_drop_defaults(spec))


# the default options of the parts of strategies that have many: privacy=dp(...), secure=secagg(...)
_PARTS: dict[str, JsonObject] = {
    name: {field.name: field.default for field in fields(part) if field.default is not MISSING}
    for name, part in ((PrivacySpec.name, PrivacySpec), (SECAGG, SecureOptions))
}


@cache
def _collect_defaults() -> dict[str, JsonObject]:
    """Return each strategy's default options."""
    return {each["name"]: {option["name"]: option["default"] for option in each["options"]} for each in catalogue()}


def _drop_defaults(spec: Json) -> Json:
    if isinstance(spec, list):  # phases, or the values of an option
        return [
            {**each, "strategy": _drop_defaults(each["strategy"])}
            if isinstance(each, dict) and "strategy" in each
            else each
            for each in spec
        ]
    if not isinstance(spec, dict):
        return spec
    name = str(spec.get("name"))
    defaults = _PARTS.get(name) or _collect_defaults().get(name, {})
    return {
        key: _drop_defaults(value)
        for key, value in spec.items()
        if key == "name" or defaults.get(key, _UNKNOWN) != value
    }


def strategy_of(job: JobAnswer) -> str:
    """Return a job's strategy as text, with its server group if it has one; of a loop what it gave to `rayps.wrap`."""
    if job["spec"].get("run"):
        return " + ".join(format_strategy(each) for each in job["strategies"])
    spec, group = job["spec"], (job.get("progress") or {}).get("server_group") or {}
    name = spec.get("server_group")
    if name is None:
        return format_strategy(spec["strategy"])
    text = format_strategy(_drop_servers(spec["strategy"]))  # the number of servers is the group's
    if not group.get("servers"):
        return f"{text} on {name}"
    alive = sum(server.get("state") != "dead" for server in group["servers"])
    replicas = group.get("replicas") or 0
    return (
        f"{text} on {name} ({alive} {'server' if alive == 1 else 'servers'}, "
        f"{replicas} {'replica' if replicas == 1 else 'replicas'})"
    )


def workers_of(job: JobAnswer) -> str:
    """Return a job's number of workers as text, such as "4"; of an elastic job such as "4 of 2 to 8"."""
    counts = job.get("elastic")
    if counts is None:
        return str(job["spec"]["workers"])
    return f"{counts['now']} of {counts['least']} to {counts['most']}"


def _drop_servers(spec: Json) -> Json:
    if isinstance(spec, list):
        return [{**phase, "strategy": _drop_servers(phase["strategy"])} for phase in spec]
    return (
        {key: value for key, value in spec.items() if key not in ("shards", "servers", "replicas")}
        if (isinstance(spec, dict))
        else spec
    )


def format_result(job: JobAnswer) -> str:
    """Return a job's final metrics as text or, while it runs, its last evaluation or its last batch's loss."""
    if job.get("metrics"):
        return measures(job["metrics"])
    progress = job.get("progress") or {}
    if job["status"] != "RUNNING":
        return ""
    if progress.get("metrics"):
        return f"evaluation: {measures(progress['metrics'])}"
    return f"batch loss {format_number(progress['loss'])}" if progress.get("loss") is not None else ""
