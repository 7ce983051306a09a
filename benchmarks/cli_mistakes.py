"""`python -m benchmarks mistakes`: how soon and with what error deliberate mistakes end, and what they leave."""

from __future__ import annotations

from typing import Annotated

import typer

from rayps.cli import show
from rayps.cli.measure import Format, Json, run, show_rows
from rayps.cli.show import Output


def mistakes(
    names: Annotated[str | None, typer.Option("--mistakes", help="Mistakes, separated by commas (all).")] = None,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Commit nine mistakes on a local Ray with two CPUs.

    The exit code is 1 if an error does not name the remedy, or if something is left.
    """
    from benchmarks.leftovers import temporary_folder
    from benchmarks.mistakes import MISTAKES, MistakeRow, bench_mistakes

    def report(row: MistakeRow) -> None:
        show.note(f"{row.mistake}: {row.seconds:.1f} s, {row.error}; left: {row.left or 'nothing'}")

    chosen = list(MISTAKES) if names is None else names.split(",")
    with temporary_folder():
        rows = run(None, 2, lambda cluster: bench_mistakes(cluster, chosen, report=report))
    show_rows(
        Output.json if as_json else output,
        rows,
        {
            "mistake": "mistake",
            "seconds": "s to the error",
            "error": "error",
            "lines": "lines",
            "remedy": "names the remedy",
            "left": "left",
        },
    )
    if not all(row.remedy and not row.left for row in rows):
        raise typer.Exit(1)
