"""The main program of the command line: commands, exit codes, error output.

A command imports what it needs when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rayps_client.errors import RaypsError
from rayps_client.values import JsonObject

import rayps
from rayps.cli import backup as cli_backup
from rayps.cli import bench as cli_bench
from rayps.cli import client as cli_client
from rayps.cli import clients as cli_clients
from rayps.cli import export as cli_export
from rayps.cli import extras as cli_extras
from rayps.cli import jobs as cli_jobs
from rayps.cli import members as cli_members
from rayps.cli import personal as cli_personal
from rayps.cli import plan as cli_plan
from rayps.cli import report as cli_report
from rayps.cli import run as cli_run
from rayps.cli import servers as cli_servers
from rayps.cli import show
from rayps.cli import strategies as cli_strategies
from rayps.cli import sweeps as cli_sweeps
from rayps.cli.show import Output
from rayps.core.job.job_fields import BY_NAME
from rayps.core.strategy.elastic import workers_of_text
from rayps.service.job_file import load

_EPILOG = (
    "Exit codes: 0 ok, 1 the job or run failed, 2 bad input, 3 no such job, 4 service or cluster "
    "unreachable, 5 conflict with the job's state, 130 interrupted or detached."
)

_HELP = {name: declared.text for name, declared in BY_NAME.items()}

app = typer.Typer(
    name="rayps",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog=_EPILOG,
)


def _print_version(asked: bool) -> None:
    if asked:
        show.print_line(f"rayps {rayps.__version__}")
        raise typer.Exit


@app.callback(epilog=_EPILOG)
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Distributed training on Ray in which how the workers learn together is one argument."""


@app.command()
def train(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=_HELP["workload"])],
    strategy: Annotated[str, typer.Option(help=_HELP["strategy"])] = "all_reduce",
    workers: Annotated[str, typer.Option(metavar="N|N..M", help=_HELP["workers"])] = "1",
    epochs: Annotated[int | None, typer.Option(help=_HELP["epochs"])] = None,
    steps: Annotated[int | None, typer.Option(help=_HELP["steps"])] = None,
    seed: Annotated[int, typer.Option(help=_HELP["seed"])] = 0,
    checkpoint: Annotated[str | None, typer.Option(metavar="DIR", help=_HELP["checkpoint"])] = None,
    checkpoint_every: Annotated[int | None, typer.Option(metavar="ROUNDS", help=_HELP["checkpoint_every"])] = None,
    evaluate_every: Annotated[int | None, typer.Option(metavar="ROUNDS", help=_HELP["evaluate_every"])] = None,
    keep_checkpoints: Annotated[int, typer.Option(metavar="NUMBER", help=_HELP["keep_checkpoints"])] = 2,
    ledger: Annotated[Path | None, typer.Option(metavar="DIR", help=_HELP["ledger"])] = None,
    resume: Annotated[bool, typer.Option("--resume", help=_HELP["resume"])] = False,
    address: cli_run.Address = None,
    max_failures: Annotated[int, typer.Option(help=_HELP["max_failures"])] = 3,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help=_HELP["timeout"])] = 60.0,
    cpus_per_worker: Annotated[float, typer.Option(metavar="N", help="CPUs that each worker reserves.")] = 1.0,
    gpus_per_worker: Annotated[float, typer.Option(metavar="N", help="GPUs that each worker reserves.")] = 0.0,
    server_group: Annotated[str | None, typer.Option(metavar="NAME", help=_HELP["server_group"])] = None,
    branch: Annotated[str | None, typer.Option(metavar="SPACE", help=_HELP["branch"])] = None,
    start_from: Annotated[str | None, typer.Option(metavar="PATH", help=_HELP["start_from"])] = None,
    profile: Annotated[Path | None, typer.Option(metavar="DIR", help=_HELP["profile"])] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help=_HELP["dry_run"])] = False,
    global_batch: Annotated[int | None, typer.Option(metavar="ROWS", help=_HELP["global_batch"])] = None,
    elastic: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help=_HELP["elastic"])] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Set a parameter of the workload, e.g. --set lr=0.3."),
    ] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="table or json.")] = Output.table,
) -> None:
    """Train now, without a service; print the final metrics."""
    from rayps.service.job_file import parse_assignments

    params = parse_assignments(changes or [])
    resources = {"cpu": cpus_per_worker, **({"gpu": gpus_per_worker} if gpus_per_worker else {})}
    try:
        result = rayps.train(
            target,
            strategy=strategy,
            workers=workers_of_text(workers),
            global_batch=global_batch,
            elastic=parse_assignments(elastic, "--elastic", "cooldown=10") if elastic else None,
            epochs=epochs,
            steps=steps,
            seed=seed,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            evaluate_every=evaluate_every,
            keep_checkpoints=keep_checkpoints,
            ledger=ledger,
            resume=resume,
            resources=resources,
            address=address,
            max_failures=max_failures,
            timeout=timeout,
            server_group=server_group,
            branch=branch,
            params=params,
            progress=True,
            start_from=_start(start_from),
            profile=profile,
            dry_run=dry_run,
        )
    except KeyboardInterrupt as error:  # typer would drop this error's message
        raise typer.Exit(_print_failure("rayps", str(error) or "interrupted before training began", 130)) from None
    if dry_run:
        report = result.events[-1]
        if output is Output.json:
            show.dump({"phases": report["phases"], "metrics": result.metrics})
        else:
            show.print_line(str(report["message"]))
        return
    if output is Output.json:
        saved = None if result.checkpoint is None else str(result.checkpoint)
        best = None if result.best is None else str(result.best)
        rounds = result.history.num_rows
        found = {"metrics": result.metrics, "rounds": rounds, "checkpoint": saved, "best": best}
        show.dump({**found, "params": result.params})
        return
    for name, value in result.metrics.items():
        show.print_line(f"{name} {show.format_number(value)}")
    if result.checkpoint is not None:
        show.print_note(f"checkpoint {result.checkpoint}")
    if result.best is not None:
        show.print_note(f"best checkpoint {result.best}")


def _start(given: str | None) -> str | JsonObject | None:
    """Return the option --start-from: a path, or a YAML mapping in braces."""
    if given is None or not given.startswith("{"):
        return given
    found: JsonObject = load(given, "--start-from")
    return found


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="The address to listen on (127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="The port to listen on (8420; 0 = any free one).")] = None,
    address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Join this Ray cluster instead of starting one.")
    ] = None,
    cpus: Annotated[
        int | None,
        typer.Option(
            help="CPUs that jobs may reserve together in the Ray that rayps starts; they may be more than the cores. "
            "By default jobs run side by side while their workers fit into the machine's cores, and a job that runs "
            "alone may have up to 16 workers, or as many as there are cores if that is more."
        ),
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder of jobs and store (~/.rayps).")
    ] = None,
    idle: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="Stop the Ray that rayps started after this time without service and jobs (600)."
        ),
    ] = None,
    warm: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Keep N processes ready, so that a job's driver and workers start in less than a second (0). Each "
            "takes about 350 MB of memory.",
        ),
    ] = None,
    shared_state: Annotated[
        bool | None,
        typer.Option(
            "--shared-state",
            help="Every host of the cluster has the state directory at the same path: a driver may then move to "
            "another host when its host ends.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name to accept in a request's Host header, besides the loopback names."),
    ] = None,
    members_ca: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Admit clients with a certificate that this authority (PEM) has issued."),
    ] = None,
    members_revoked: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The revoked certificates: the authority's list (PEM), or a serial number a line. It is read again "
            "when it changes.",
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave jobs running when the service stops.")] = False,
) -> None:
    """Run the job service with its dashboard. By default only this machine can reach it."""
    from rayps.cli.serve import run
    from rayps.service.settings import Settings

    allowed = ",".join(allow_host) if allow_host else None
    run(
        Settings.read(
            host=host,
            port=port,
            address=address,
            cpus=cpus,
            state_dir=state_dir,
            idle=idle,
            warm=warm,
            shared_state=shared_state,
            members_ca=members_ca,
            members_revoked=members_revoked,
            allowed_hosts=allowed,
        ),
        keep=keep,
    )


@app.command()
def doctor(output: Annotated[Output, typer.Option("--output", "-o", help="table or json.")] = Output.table) -> None:
    """Show what this machine lacks for rayps, and how to get it. The exit code is 1 if a requirement is missing."""
    from rayps.cli.doctor import list_findings

    found = list_findings()
    if output is Output.json:
        show.dump(
            [
                {
                    "name": f.name,
                    "found": f.found,
                    "required": f.required,
                    "needed_for": f.needed_for,
                    "remedy": f.remedy,
                }
                for f in found
            ]
        )
    else:
        rows = [
            [f.name, f.found or ("MISSING" if f.required else "not found"), f.needed_for, "" if f.found else f.remedy]
            for f in found
        ]
        show.print_table(["", "found", "needed for", "how to get it"], rows)
    if any(f.failed for f in found):
        raise typer.Exit(1)


cli_jobs.add(app)
cli_export.add(app)
cli_personal.add(app)
cli_sweeps.add(app)
cli_client.add(app)
cli_members.add(app)
app.command()(cli_backup.backup)
cli_extras.add(app)
app.command()(cli_plan.plan)
app.command()(cli_report.report)
app.command()(cli_run.run)
app.command()(cli_strategies.strategies)
app.command()(cli_clients.clients)
app.add_typer(cli_servers.app, name="servers")
app.add_typer(cli_bench.app, name="bench")


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return the exit code. Errors are at most three lines on stderr."""
    return run_app(app, "rayps", arguments)


def run_app(commands: typer.Typer, program: str, arguments: list[str] | None = None) -> int:
    """Run one of `commands`; return the exit code. Errors are at most three lines on stderr, after `program`."""
    if arguments is None:
        arguments = sys.argv[1:]
        del sys.argv[1:]  # they are not those of the user's code, which may parse its own
    try:
        code = commands(arguments, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except RaypsError as error:
        return _print_failure(program, str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort) as error:
        return _print_failure(program, str(error) or "interrupted", 130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the pipe has ended: exit without a message, like other tools
        return 141
    except Exception as error:
        usage: Callable[[], str] | None = getattr(error, "format_message", None)  # only typer's errors have it
        if usage is None:
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command: its message is the whole help
            show.print_note(usage())
            return 2
        message = " ".join(line.strip() for line in usage().strip().splitlines())
        return _print_failure(program, message, 2, hint=f"`{program} COMMAND --help` lists the options")


def _print_failure(program: str, message: str, code: int, hint: str = "") -> int:
    lines = [line for line in message.strip().splitlines() if line.strip()][:3]
    if hint and len(lines) < 3:
        lines.append(hint)
    show.print_note(f"{program}: " + ("\n".join(lines) or "failed"))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
