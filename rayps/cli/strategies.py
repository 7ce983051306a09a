"""`rayps strategies`: list the strategies that a job can use, the user's own included."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayps.cli import show
from rayps.cli.show import Output
from rayps.core.errors import ConfigError
from rayps.core.text import nested
from rayps.service.strategy_check import strategies_in
from rayps.strategies.catalogue import StrategyDescription, catalogue


def strategies(
    working_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Also list the strategies that the Python files of this folder define (the current folder).",
        ),
    ] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="table or json.")] = Output.table,
) -> None:
    """List the strategies and their options, and those that files of the working directory define."""
    folder = Path.cwd() if working_dir is None else working_dir
    if not folder.is_dir():
        raise ConfigError(f"working_dir {str(folder)!r} is no directory", field="working_dir")
    own, broken = strategies_in(str(folder))
    for each in broken:
        show.note(f"{each['name']}: {each['message'].splitlines()[0]}")
    found = [*catalogue(), *own]
    if output is Output.json:
        show.dump(found)
        return
    show.table(
        ["strategy", "options", "what it is"], [[each["name"], _options(each), each["summary"]] for each in found]
    )


def _options(each: StrategyDescription) -> str:
    return " ".join(f"{option['name']}={nested(option['default'])}" for option in each["options"])
