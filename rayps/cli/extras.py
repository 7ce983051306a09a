"""Commands of `rayps` that other packages bring, each as an entry point of the group `rayps.commands`."""

from __future__ import annotations

from importlib.metadata import entry_points

import typer
from rayps_client.errors import ConfigError

GROUP = "rayps.commands"
_ALL_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def add(app: typer.Typer) -> None:
    """Add the commands. The package of a command is looked for when the command runs."""
    app.command(context_settings=_ALL_ARGUMENTS)(chaos)


def chaos(context: typer.Context) -> None:
    """Inject faults into a job (`pip install rayps-chaos`)."""
    run_extra("chaos", "rayps-chaos", context.args)


def run_extra(command: str, package: str, arguments: list[str]) -> None:
    """Run a command of another package with the arguments that follow its name.

    Raises:
        ConfigError: the package is not installed.
        typer.Exit: the command has ended; with its exit code.
    """
    for entry in entry_points(group=GROUP, name=command):
        raise typer.Exit(entry.load()(arguments))
    raise ConfigError(
        f"`rayps {command}` is in the package {package}, which is not installed here: pip install {package}",
        field="command",
    )
