"""`rayps backup`: copy the service's state while it runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rayps_client.errors import ServiceError

from rayps.cli import show
from rayps.cli.servers import format_size
from rayps.cli.show import Output
from rayps.service.settings import Settings


def backup(
    target: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the copy.")],
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The state directory to copy (~/.rayps).")
    ] = None,
    checkpoints: Annotated[bool, typer.Option(help="Copy the jobs' checkpoints too.")] = True,
    output: Annotated[Output, typer.Option("--output", "-o", help="table or json.")] = Output.table,
) -> None:
    """Copy the service's state to a new folder. The service may run during the copy.

    The state consists of the jobs, tokens, server groups and job folders.

    To restore: stop the service, move its state directory away, run `cp -a DIR STATE_DIR`, then `rayps serve`. Jobs
    that had not ended resume from their newest checkpoint. The copy contains the service's tokens: keep the copy as
    safe as the original.
    """
    from rayps.service.backup import backup as copy

    try:
        made = copy(Settings.read(state_dir=state_dir), target, checkpoints=checkpoints)
    except OSError as error:
        raise ServiceError(f"the backup {target} cannot be written: {error.strerror or error}") from error
    if output is Output.json:
        show.dump(asdict(made))
        return
    show.print_line(f"{target}: {made.jobs} jobs, {made.files} files, {format_size(made.bytes)}")
    show.print_note(
        f"the copy contains the service's tokens. To restore: stop the service, move {made.state_dir} away, then run "
        f"`cp -a {target} {made.state_dir}`"
    )
