"""`rayps bench elastic`: measure how long a job makes no step while its workers change, beside Ray Train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rayps.cli import show
from rayps.cli.measure import Format, Json, show_rows
from rayps.cli.show import Output

if TYPE_CHECKING:
    from rayps.bench.changing_workers import ChangeRow


def elastic(
    contenders: Annotated[
        str, typer.Option(help="What to measure: all_reduce, servers, bounded, async, ray_train (its elastic trainer).")
    ] = "all_reduce,servers,bounded,async,ray_train",
    step_seconds: Annotated[float, typer.Option(help="The sleep in each step, in place of compute.")] = 0.05,
    megabytes: Annotated[float, typer.Option(help="10^6 bytes of parameters.")] = 4.0,
    deadline: Annotated[float, typer.Option(help="Seconds between the notice and the end of the second node.")] = 30.0,
    output: Format = Output.table,
    as_json: Json = False,
) -> None:
    """Measure the pause of a job when its workers grow from 2 to 4, and shrink to 2 because a node is drained.

    Each contender has a cluster of two nodes on this machine. Ray Train needs `pip install 'rayps[bench]'`.
    """
    from rayps.bench.changing_workers import bench_changes

    def report(row: ChangeRow) -> None:
        show.note(f"{row.contender} {row.change}: {row.pause:.2f} s without a step")

    rows = bench_changes(
        contenders.split(","), step_seconds=step_seconds, megabytes=megabytes, deadline=deadline, report=report
    )
    show_rows(
        Output.json if as_json else output,
        rows,
        {
            "contender": "contender",
            "change": "workers",
            "pause": "s without a step",
            "to_first_step": "s to the first step of the new group",
            "repeated": "steps computed again",
        },
    )
