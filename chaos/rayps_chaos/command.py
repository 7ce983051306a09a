"""`rayps chaos`: inject faults into a job and check what it then leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rayps_client.errors import ConfigError

from rayps.cli import show
from rayps.cli.show import Output
from rayps.service.client import Client
from rayps.service.job_file import read
from rayps.service.settings import Settings
from rayps_chaos.faults import KINDS, parse_faults, parse_scopes
from rayps_chaos.measure_recovery import FaultCost, KindCost
from rayps_chaos.plan import ChaosPlan
from rayps_chaos.report import ChaosReport

if TYPE_CHECKING:
    from rayps_chaos.curves import CurveVerdict
    from rayps_chaos.soak import SoakReport

FAILED = 1

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def chaos(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB",
            help="The id of a job that runs on this machine's service, or a job file SPEC.yaml: then a service is "
            "started for it, and the job runs once without and once with faults.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed draws the same plan.")] = 0,
    faults: Annotated[
        str, typer.Option(help=f"all, or some of {', '.join(KINDS)}; kill:worker names one role; newborn alone.")
    ] = "all",
    allow: Annotated[
        str,
        typer.Option(
            help="What may be disturbed beside the job: some of group (servers that jobs share), service, ray, machine."
        ),
    ] = "",
    every: Annotated[float, typer.Option(metavar="SECONDS", help="Mean time between two faults.")] = 15.0,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--for",
            metavar="SECONDS",
            help="How long faults are injected (default: 20 faults; of a job file, 0.8 of the time that the job "
            "without faults took).",
        ),
    ] = None,
    deadline: Annotated[
        float, typer.Option(metavar="SECONDS", help="The job must end within this time after the last fault.")
    ] = 1800.0,
    longest_gap: Annotated[
        float, typer.Option(metavar="SECONDS", help="The longest time in which the job may complete no round.")
    ] = 300.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the plan; start nothing.")] = False,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a field of the job file.")
    ] = None,
    soak: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="In place of JOB: run jobs on a service of its own for this time (8h, 30m, 90s), several at once, "
            "under faults; check each, and record what the service and Ray use.",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="With --soak: how many jobs run at once.")] = 4,
    every_service: Annotated[
        float, typer.Option(metavar="SECONDS", help="With --soak: mean time between two faults of service and Ray.")
    ] = 3600.0,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="With --soak: a new folder for curves.csv and curves.svg.")
    ] = Path("soak"),
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The state directory of the running service (~/.rayps).")
    ] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="table or json.")] = Output.table,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --output json.")] = False,
) -> None:
    """Inject faults into a job, and check what it left.

    The faults are random by a seed. Nothing may be lost, done twice, or hang.

    Only processes of this job on this machine are touched, unless --allow names more. Each fault is announced before it
    is injected. The exit code is 1 if a check fails.
    """
    form = Output.json if as_json else output
    if soak is not None:
        from rayps_chaos.soak import SoakOptions
        from rayps_chaos.soak import soak as run_soak

        wanted = SoakOptions(seconds_of(soak), seed, parse_faults(faults), jobs, every=every, out=out)
        with _ends_orderly():
            report = run_soak(dataclasses.replace(wanted, every_service=every_service), show.print_note)
        _show_soak(report, form, out)
        if not report.good:
            raise typer.Exit(FAILED)
        return
    if job is None:
        raise ConfigError("give the id of a running job, a job file, or --soak TIME", field="job")
    from rayps_chaos.run import ChaosOptions, chaos_on_file, chaos_on_job

    options = ChaosOptions(
        seed,
        parse_faults(faults),
        parse_scopes(allow),
        every,
        seconds,
        deadline=deadline,
        longest_gap=longest_gap,
        dry_run=dry_run,
    )
    with _ends_orderly():
        if job.endswith((".yaml", ".yml")):
            found = chaos_on_file(read(Path(job), changes or ()), options, show.print_note)
        else:
            settings = Settings.read(state_dir=state_dir)
            with Client() as client:
                found = chaos_on_job(client, job, settings.state_dir, options, show.print_note)
    if isinstance(found, ChaosPlan):
        _show_plan(found, form)
        return
    _show_report(found, form)
    if not found.good:
        raise typer.Exit(FAILED)


def main(arguments: list[str]) -> int:
    """Run `rayps chaos` with these arguments; return the exit code. Errors are raised: `rayps` prints them."""
    code = app(arguments, prog_name="rayps chaos", standalone_mode=False)
    return code if isinstance(code, int) else 0


@contextlib.contextmanager
def _ends_orderly() -> Iterator[None]:
    """Let SIGTERM end the block as an error does, so that faults are taken back: a stopped process is continued."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise typer.Exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def seconds_of(text: str) -> float:
    """Return the seconds of a time such as 8h, 30m or 90s. Raises ConfigError if the text is not a time above 0."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"--soak {text!r} cannot be read: write a time such as 8h, 30m or 90s", field="soak")
    return float(match[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0}[match[2]]


def _show_soak(report: SoakReport, output: Output, out: Path) -> None:
    if output is Output.json:
        show.dump(report.to_dict())
        return
    _show_kinds(report.kinds)
    rows = [
        [
            c.name,
            c.quantity,
            show.format_number(c.first),
            show.format_number(c.last),
            f"{c.slope:.1f}",
            f"{c.limit:g}",
            _verdict(c),
        ]
        for c in report.curves
        if c.judged
    ]
    show.print_table(["what", "quantity", "first", "last", "growth an hour", "at most", ""], rows)
    for text in report.failed:
        show.print_line(text)
    ended = ", ".join(f"{count} {status}" for status, count in sorted(report.ended.items()))
    show.print_line(
        f"{report.seconds / 60:.0f} minutes, jobs: {ended}; {len(report.faults)} faults; curves in {out}: "
        + ("all checks hold" if report.good else "SOMETHING WAS LOST OR GREW")
    )


def _verdict(curve: CurveVerdict) -> str:
    return "flat" if curve.good else "GROWS"


def _recovery(cost: FaultCost) -> str:
    if cost.recovery is not None:
        return f"{cost.recovery:.2f}"
    return "never" if cost.trained_again is None else f"{cost.trained_again:.2f}, repeated rounds only"


def _show_kinds(found: Sequence[KindCost]) -> None:
    kinds = [[k.kind, str(k.count), f"{k.median:.2f}", f"{k.p95:.2f}", f"{k.worst:.2f}"] for k in found]
    show.print_table(["fault", "times", "median s", "p95 s", "worst s"], kinds)
    show.print_line("")


def _show_plan(plan: ChaosPlan, output: Output) -> None:
    if output is Output.json:
        rows = [
            {"at": each.at, "fault": str(each.fault), "target": each.target, "seconds": each.seconds}
            for each in plan.faults
        ]
        show.dump({"seed": plan.seed, "faults": rows, "left_out": {str(k): v for k, v in plan.left_out.items()}})
        return
    show.print_table(
        ["at s", "fault", "what happens"], [[show.format_number(p.at), str(p.fault), p.words] for p in plan.faults]
    )


def _show_report(report: ChaosReport, output: Output) -> None:
    if output is Output.json:
        show.dump(report.to_dict())
        return
    rows = [
        [
            str(cost.fault.planned.fault),
            cost.fault.words,
            ", ".join(cost.followed),
            show.format_number(cost.repeated),
            _recovery(cost),
        ]
        for cost in report.faults
    ]
    show.print_table(["fault", "what was done", "what followed", "rounds repeated", "recovery s"], rows)
    show.print_line("")
    _show_kinds(report.kinds)
    show.print_table(["check", "", ""], [[c.name, "ok" if c.good else "FAILED", c.words] for c in report.checks])
    share = "" if report.goodput is None else f"; rounds/s {report.goodput:.1%} of the run without faults"
    wrong = ", ".join(check.name for check in report.checks if not check.good)
    show.print_line(
        f"job {report.job}, seed {report.seed}: {len(report.faults)} faults in {report.seconds:.0f} s{share}: "
        + (f"these checks FAILED: {wrong}" if wrong else "all checks hold")
    )
