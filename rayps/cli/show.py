"""How the command line shows things: data on stdout, notes on stderr, as tables or as JSON."""

from __future__ import annotations

import enum
import json
import os
import sys
import time
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rayps.core.errors import ConfigError
from rayps.core.text import written
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
_LAST = 14  # letters that the last column of a table keeps before others are cut
_UNKNOWN = object()
_CUT = 6  # letters that are left of one that is cut


class Output(enum.StrEnum):
    """For a person or for a program."""

    table = "table"
    json = "json"


To = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="FILE",
        help="Write the secret there, for its owner only; - = print it even where the output is no terminal.",
    ),
]


_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"} | {
    code: f"\\u{code:04x}" for code in (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}


def plain(text: str) -> str:
    """Text with control characters spelled out (ESC as \\x1b), so that what a job printed cannot move the cursor, set
    the title, write to the clipboard or turn the reading order of a terminal. Tabs and line ends stay."""
    return text.translate(_CONTROLS)


def note(text: str) -> None:
    """Something for the person, not for the pipe."""
    sys.stderr.write(f"{plain(text) if sys.stderr.isatty() else text}\n")
    sys.stderr.flush()


def say(text: str) -> None:
    """A line of data; on a terminal without what would control it."""
    sys.stdout.write(f"{plain(text) if sys.stdout.isatty() else text}\n")
    sys.stdout.flush()


def refuse_secret(to: str | None) -> None:
    """Raises ConfigError: a secret would go to a file or a program though nothing said so."""
    if to is None and not sys.stdout.isatty():
        raise ConfigError(
            "this is a secret, and the output is no terminal: give --to FILE, which only you can read,\n"
            "or --to - to print it nevertheless",
            field="to",
        )


def refuse_existing(to: str | None) -> None:
    """Raises ConfigError: the file exists, and may hold a token that nothing shows a second time, or cannot be made."""
    if to in (None, "-"):
        return
    path = Path(to).expanduser()
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{to} cannot be written: there is no folder {path.parent}, or it is not yours", field="to")
    if path.exists():
        raise ConfigError(
            f"{to} exists, and is not overwritten: give --to another file, or remove it first", field="to"
        )


def secret(text: str, to: str | None) -> None:
    """A secret, where it was asked for: on the terminal, or in a file of mode 0600."""
    refuse_secret(to)
    if to in (None, "-"):
        say(text)
        return
    try:
        private_write(Path(to).expanduser(), f"{text}\n")
    except OSError as error:
        raise ConfigError(f"{to} cannot be written: {error.strerror or error}", field="to") from error
    note(f"written to {to}")


def dump(data: Any) -> None:
    """Data as JSON."""
    say(json.dumps(data, indent=2, ensure_ascii=False))


def table(columns: list[str], rows: list[list[Any]], cut: tuple[str, ...] = ()) -> None:
    """Rows under headings. On a terminal that is too narrow the columns named in `cut` are cut, and the last wraps.

    Never changed when it is not a terminal that reads.
    """
    terminal = sys.stdout.isatty()
    console = Console(soft_wrap=not terminal, highlight=False)
    if not terminal:
        console.width = 10_000
    widths = [max([len(column), *(len(str(row[i])) for row in rows)]) for i, column in enumerate(columns)]
    room = console.width - 2 * (len(columns) - 1) - min(widths[-1], _LAST)
    room -= sum(width for column, width in zip(columns[:-1], widths[:-1], strict=True) if column not in cut)
    found = Table(box=None, header_style="bold", pad_edge=False)
    left = len(cut)
    for column, width in zip(columns[:-1], widths[:-1], strict=True):
        if column in cut:
            width = max(min(width, room // left), min(width, _CUT))
            room, left = room - width, left - 1
        found.add_column(column, no_wrap=True, overflow="ellipsis", width=width)
    found.add_column(columns[-1], no_wrap=not terminal, overflow="fold")
    for row in rows:
        found.add_row(
            *[cell if isinstance(cell, Text) else Text(plain(str(cell)) if terminal else str(cell)) for cell in row]
        )
    console.print(found)


def status(word: str) -> Text:
    """A status in its colour."""
    return Text(word, style=_COLOURS.get(word, ""))


def facts(pairs: list[tuple[str, Any]]) -> None:
    """Names and values, one pair on each line; those without a value are left out."""
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        if value not in (None, "", {}, []):
            say(f"{name:<{width}}  {value}")


def age(stamp: str | None) -> str:
    """How long ago, in one unit."""
    if not stamp:
        return ""
    seconds = max(0.0, time.time() - datetime.fromisoformat(stamp).astimezone(UTC).timestamp())
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def clock(at: float) -> str:
    """A time of day, here."""
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")


def number(value: Any) -> str:
    """A figure, short."""
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def measures(found: dict[str, Any] | None) -> str:
    """Metrics on one line."""
    return "  ".join(f"{name} {number(value)}" for name, value in (found or {}).items())


def strategy(spec: Any) -> str:
    """A strategy in its text form, without the options that are as they are by themselves."""
    return written(_brief(spec))


@cache
def _defaults() -> dict[str, dict[str, Any]]:
    """Each strategy's options as they are by themselves; looked up by the first command that shows one."""
    return {each["name"]: {option["name"]: option["default"] for option in each["options"]} for each in catalogue()}


def _brief(spec: Any) -> Any:
    if isinstance(spec, list):
        return [{**phase, "strategy": _brief(phase["strategy"])} for phase in spec]
    if not isinstance(spec, dict):
        return spec
    usual = _defaults().get(str(spec.get("name")), {})
    return {key: _brief(value) for key, value in spec.items() if key == "name" or usual.get(key, _UNKNOWN) != value}


def learns(job: dict[str, Any]) -> str:
    """How a job learns together: its strategy, and the server group that it is on, as far as it is known."""
    spec, group = job["spec"], (job.get("progress") or {}).get("server_group") or {}
    name = spec.get("server_group")
    if name is None:
        return strategy(spec["strategy"])
    said = strategy(_without_servers(spec["strategy"]))  # how many there are is the group's to say
    if not group.get("servers"):
        return f"{said} on {name}"
    alive = sum(server.get("state") != "dead" for server in group["servers"])
    copies = group.get("replicas") or 0
    return (
        f"{said} on {name} ({alive} {'server' if alive == 1 else 'servers'}, "
        f"{copies} {'copy' if copies == 1 else 'copies'})"
    )


def _without_servers(spec: Any) -> Any:
    if isinstance(spec, list):
        return [{**phase, "strategy": _without_servers(phase["strategy"])} for phase in spec]
    return (
        {key: value for key, value in spec.items() if key not in ("shards", "servers", "replicas")}
        if (isinstance(spec, dict))
        else spec
    )


def result(job: dict[str, Any]) -> str:
    """What is known of how well a job learns: its metrics; while it runs, the last evaluation or the last batch."""
    if job.get("metrics"):
        return measures(job["metrics"])
    progress = job.get("progress") or {}
    if job["status"] != "RUNNING":
        return ""
    if progress.get("metrics"):
        return f"evaluation: {measures(progress['metrics'])}"
    return f"batch loss {number(progress['loss'])}" if progress.get("loss") is not None else ""
