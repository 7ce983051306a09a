"""`rayps run`: run a function with a loop of its own now, without a service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import rayps
from rayps.cli import show
from rayps.cli.show import Output
from rayps.core.job.job_fields import BY_NAME
from rayps.service.job_file import parse_assignments
from rayps.strategies.job import LOOP_TIMEOUT

Address = Annotated[str | None, typer.Option(metavar="HOST:PORT", help=BY_NAME["address"].text)]


def run(
    target: Annotated[str, typer.Argument(metavar="FILE:FUNCTION", help="file.py:train_fn or module:train_fn.")],
    workers: Annotated[int, typer.Option(help="The number of workers.")] = 1,
    strategy: Annotated[
        str, typer.Option(help="The strategy of rayps.wrap, unless the loop names one.")
    ] = "all_reduce",
    params: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="An argument of the function, e.g. --set lr=0.3."),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="DIR", help="Save states in this folder, or at this URL (s3://...).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest state in DIR.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of torch's random numbers, which differ between ranks.")] = 0,
    max_failures: Annotated[
        int | None, typer.Option(help="How many deaths of workers the run survives (3 with --checkpoint, else 0).")
    ] = None,
    profile: Annotated[Path | None, typer.Option(metavar="DIR", help=BY_NAME["profile"].text)] = None,
    address: Address = None,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="A worker waits for another one so long in a step, such as for rank 0 while it validates alone.",
        ),
    ] = LOOP_TIMEOUT,
    cpus_per_worker: Annotated[float, typer.Option(metavar="N", help="CPUs that each worker reserves.")] = 1.0,
    gpus_per_worker: Annotated[float, typer.Option(metavar="N", help="GPUs that each worker reserves.")] = 0.0,
    output: Annotated[Output, typer.Option("--output", "-o", help="table or json.")] = Output.table,
) -> None:
    """Run a loop of your own now, without a service. Print its results by rank."""
    try:
        results: list[object] = rayps.run(
            target,
            workers=workers,
            strategy=strategy,
            params=parse_assignments(params or []),
            checkpoint=checkpoint,
            resume=resume,
            seed=seed,
            max_failures=max_failures,
            resources={"cpu": cpus_per_worker, **({"gpu": gpus_per_worker} if gpus_per_worker else {})},
            profile=profile,
            address=address,
            timeout=timeout,
        )
    except KeyboardInterrupt as error:  # typer would drop this error's message
        show.print_note(f"rayps: {str(error) or 'interrupted before the function began'}")
        raise typer.Exit(130) from None
    shown = [result if isinstance(result, (bool, int, float, str, type(None))) else repr(result) for result in results]
    if output is Output.json:
        show.dump({"results": shown})
        return
    for rank, result in enumerate(shown):
        if result is not None:
            show.print_line(f"worker-{rank}: {result}")
