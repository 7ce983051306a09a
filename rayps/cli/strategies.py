"""`rayps strategies`: list the strategies that a job can use, including the user's own."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path
from typing import Annotated

import typer
from rayps_client.errors import ConfigError

from rayps.cli import show
from rayps.cli.show import Output
from rayps.core.spelling import near
from rayps.core.strategy.text import write_nested
from rayps.service.strategy_check import find_strategies
from rayps.strategies.catalogue import StrategyDescription, catalogue

_MANY = 8  # a later strategy that has all options of a strategy with more than this lists only that strategy's name


def strategies(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Only these strategies, with all their options.")
    ] = None,
    working_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Also list the strategies that Python files in this folder define (default: the current folder).",
        ),
    ] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="table or json.")] = Output.table,
) -> None:
    """List the strategies and their options. The last ones are those that files of the working directory define."""
    folder = Path.cwd() if working_dir is None else working_dir
    if not folder.is_dir():
        raise ConfigError(f"working_dir is {str(folder)!r}: give a directory that exists", field="working_dir")
    own, broken = find_strategies(str(folder))
    for file in broken:
        show.print_note(f"{file['name']}: {file['message'].splitlines()[0]}")
    found = _select_named([*catalogue(), *own], names or [])
    if output is Output.json:
        show.dump(found)
        return
    width = shutil.get_terminal_size((120, 24)).columns
    for at, each in enumerate(found):
        lines = textwrap.wrap(f"{each['name']}: {each['summary']}", width, break_long_words=False)
        options = _write_options(each, [] if names else found[:at])
        lines += textwrap.wrap(options, width, initial_indent="    ", subsequent_indent="    ", break_long_words=False)
        for text in lines:
            show.print_line(text)


def _select_named(found: list[StrategyDescription], names: list[str]) -> list[StrategyDescription]:
    """Return the strategies with these names, or all if there are none. Raises ConfigError if one is not known."""
    known = {each["name"]: each for each in found}
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no strategy {name!r}{near(name, known)}", field="name")
    return [known[name] for name in names] if names else found


def _write_options(each: StrategyDescription, before: list[StrategyDescription]) -> str:
    """Return a strategy's options with their defaults, as text.

    If an earlier strategy with many options has a subset of them, the text has its name instead of these options.
    """
    own = _write_each(each)
    many = [other for other in before if len(other["options"]) > _MANY]
    like = next((other for other in many if _write_each(other).items() <= own.items()), None)
    if like is not None:
        own = {name: text for name, text in own.items() if name not in _write_each(like)}
    return ", ".join([*([] if like is None else [f"the options of {like['name']}"]), *own.values()])


def _write_each(each: StrategyDescription) -> dict[str, str]:
    return {option["name"]: f"{option['name']}={write_nested(option['default'])}" for option in each["options"]}
