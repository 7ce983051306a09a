"""The commands for jobs: submit, ls, get, logs, metrics, events, stop, delete, open."""

from __future__ import annotations

import itertools
import json
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rayps_client.errors import ConfigError
from rayps_client.values import Json, JsonObject, Keywords

from rayps.cli import show
from rayps.cli.show import Output
from rayps.core.job.job_status import Status
from rayps.core.job.records import Event, GroupFacts, ProgressRecord
from rayps.core.job.requirements import read_requirements
from rayps.core.job.warm_start import StartFrom
from rayps.core.strategy.elastic import workers_of_text
from rayps.service.client import CURRENT, Client, Job
from rayps.service.code.code_files import PackedCode
from rayps.service.job_file import apply_changes, of_function, read
from rayps.service.rest_answers import CodeAnswer, JobAnswer, RoundsAnswer
from rayps.service.sweeps.comparison import name_metric_columns
from rayps.strategies.catalogue import StrategySpec, has_real_clients, notes_of

Id = Annotated[str, typer.Argument(metavar="ID", help="The job's id, as `rayps ls` shows it, or its beginning.")]
Format = Annotated[Output, typer.Option("--output", "-o", help="table or json.")]
Function = Annotated[
    str | None,
    typer.Option("--run", metavar="FILE:FUNCTION", help="In place of SPEC.yaml: a function with a loop of its own."),
]
Upload = Annotated[
    bool, typer.Option(help="Pack the working directory and send it; --no-upload: a folder of the service's machine.")
]
WorkingDir = Annotated[
    Path | None,
    typer.Option(
        "--working-dir",
        metavar="DIR",
        help="The folder to pack (default: the job file's working_dir, or else the current folder).",
    ),
]
Variables = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        metavar="NAME[=VALUE]",
        help="An environment variable of the job's processes; NAME=@/path: from a file of the service's machine; "
        "NAME alone: the service's own. Values are not shown.",
    ),
]
FAILED = 1
DETACHED = 130
_PROGRESS_SECONDS = 5.0
_OMITTED = (
    "queued",
    "finished",
    "stopped",
    "failed",
)  # kinds of events that `submit --follow` does not print: its first and last line already show them


def submit(
    file: Annotated[
        Path | None, typer.Argument(metavar="SPEC.yaml", help="The job: workload or run, strategy, workers, ...")
    ] = None,
    run: Function = None,
    workers: Annotated[
        str | None, typer.Option(metavar="N|N..M", help="The number of workers, or the least and the most: 2..8.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show the job's progress until it has ended; Ctrl-C detaches.")
    ] = False,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a field of the file, e.g. --set workers=4."),
    ] = None,
    server_group: Annotated[
        str | None,
        typer.Option(
            "--server-group",
            metavar="NAME",
            help="Store the job's parameters on this server group (`rayps servers ls`).",
        ),
    ] = None,
    branch: Annotated[
        str | None,
        typer.Option(metavar="SPACE", help="Start with the parameters of the job with this id on the server group."),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="JOB",
            help="Resume from the newest checkpoint of the job with this id, or from a checkpoint's folder.",
        ),
    ] = None,
    clone: Annotated[
        str | None, typer.Option(metavar="JOB", help="Submit the job with this id again, with its code.")
    ] = None,
    requirements: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A requirements file, which pip installs for the job's processes."),
    ] = None,
    env: Variables = None,
    working_dir: WorkingDir = None,
    upload: Upload = True,
    output: Format = Output.table,
) -> None:
    """Submit a job to the service."""
    if sum(each is not None for each in (file, run, clone)) != 1:
        raise ConfigError("give one of a job file, --run FILE:FUNCTION, and --clone JOB", field="run")
    if clone is not None and working_dir is not None:
        raise ConfigError(
            "--clone runs the code of that job: leave out --working-dir, or give a job file", field="clone"
        )
    count = None if workers is None else workers_of_text(workers)
    given: Keywords = {"server_group": server_group, "branch": branch, "resume": resume, "workers": count}
    given = {key: value for key, value in given.items() if value is not None}
    if requirements is not None:
        given["requirements"] = read_requirements(requirements)
    spec: Keywords = {}
    variables = variables_of(env or [])
    if clone is not None and variables:
        given["env"] = variables
    if clone is None:
        spec = read(file, changes or []) if file is not None else of_function(str(run), changes or [])
        spec = with_folder(spec | given, working_dir)
        named = spec.get("env") or {}
        if variables and isinstance(named, dict):  # the service refuses anything else by name
            spec["env"] = named | variables
    packed: list[PackedCode] = []
    with Client(on_packed=packed.append) as client:
        if clone is not None:
            job = client.submit_again(clone, **make_cloned_fields(client.job(clone), changes or []) | given)
        else:
            place = spec.pop("working_dir", CURRENT)
            job = client.submit(spec.pop("workload", None), working_dir=place, upload=upload, **spec)
            note_packed(packed, strategy=spec.get("strategy"))
        if not follow:
            _print_submitted(job, output)
            return
        show.print_note(f"job {job.id} was submitted")
        raise typer.Exit(_follow(job, output))


def with_folder(spec: Keywords, given: Path | None) -> Keywords:
    """Return the fields of a job with the working directory `given`, or that they name, as an absolute path."""
    named = spec.get("working_dir") if given is None else str(given)
    return spec if named is None else {**spec, "working_dir": str(Path(named).expanduser().absolute())}


def variables_of(given: Sequence[str]) -> dict[str, str | None]:
    """Return the value of each `NAME=VALUE`; of a `NAME` alone None, the service's own variable.

    Raises:
        ConfigError: a name occurs twice. No value is in the text.
    """
    found: dict[str, str | None] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if name in found:
            raise ConfigError(f"--env {name} was given twice: give each variable once", field="env")
        found[name] = value if equals else None
    return found


def note_packed(sent: Iterable[PackedCode], *, strategy: StrategySpec | None) -> None:
    """Print how much code was sent with a job, and which files were left out because they hold a secret.

    If the clients of `strategy` are real, print also that files of data were sent.
    """
    for packed in sent:
        rows = packed.data_note() if strategy is not None and has_real_clients(strategy) else ""
        show.print_note("\n".join(filter(None, [packed.summary(), rows, packed.left_out()])))


def make_cloned_fields(job: Job, changes: Sequence[str]) -> Keywords:
    """Return the specification of a job as fields for the next one, with `key=value` changes."""
    fields: Keywords = {key: value for key, value in job.data["spec"].items() if value is not None and key != "env"}
    return apply_changes(fields, changes)


def clone(
    job_id: Id,
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="A new folder for the job's code (default: its name).")
    ] = None,
    run: Annotated[bool, typer.Option("--submit/--no-submit", help="Submit the job again.")] = True,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a field of the new job.")
    ] = None,
    env: Variables = None,
    output: Format = Output.table,
) -> None:
    """Write a job's code into a folder, and submit the job again."""
    with Client() as client:
        first = client.job(job_id)
        target = first.write_code(folder or Path(f"{first.data['name'].replace(' ', '-')}-{first.id[-6:].lower()}"))
        show.print_note(f"the code {str(first.data['spec']['code'])[:12]} of job {first.id} is in {target}")
        if run:
            fields = make_cloned_fields(first, changes or [])
            given = {"env": variables} if (variables := variables_of(env or [])) else {}
            _print_submitted(client.submit_again(first.id, **fields | given), output)
        elif output is Output.json:
            show.dump({"folder": str(target), "code": first.data["spec"]["code"], "spec": first.data["spec"]})


def _print_submitted(job: Job, output: Output) -> None:
    if output is Output.json:
        show.dump(job.data)
        return
    show.print_line(job.id)
    for note in notes_of(job.data["spec"]["strategy"]):
        show.print_note(note)
    show.print_note(f"to follow the job: `rayps logs {job.id} -f`; to stop it: `rayps stop {job.id}`")


def _follow(job: Job, output: Output) -> int:
    status_line = _StatusLine()
    try:
        for topic, data in job.follow():
            if topic == "events":
                for event in data["events"]:
                    if event["kind"] not in _OMITTED:
                        show.print_note(f"{event['kind']}: {event['message']}")
            elif topic == "logs" and output is Output.table:
                for line in data["lines"]:
                    show.print_note(f"{line['source']}: {line['text']}")
            elif topic == "job":
                status_line.update(data)
    except KeyboardInterrupt:
        show.print_note(f"detached: job {job.id} continues; to stop it: `rayps stop {job.id}`")
        return DETACHED
    if output is Output.json:
        show.dump(job.data)
    elif job.result:
        show.print_line(show.measures(job.result))
    show.print_note(f"job {job.id} is {job.data['status']}: {job.data['reason'] or ''}")
    return 0 if job.data["status"] == Status.SUCCEEDED else FAILED


class _StatusLine:
    """Prints the status for `submit --follow`: each change, and the progress every few seconds and in each epoch."""

    def __init__(self) -> None:
        self._last = ""
        self._epoch: tuple[str, int] | None = None
        self._at = 0.0
        self._evaluated: dict[str, float] = {}

    def update(self, data: JobAnswer) -> None:
        """Print what has changed in the newest data of the job."""
        progress = data.get("progress") or {}
        evaluated = {} if data.get("spec", {}).get("run") else progress.get("metrics") or {}
        if evaluated and evaluated != self._evaluated:
            self._evaluated = dict(evaluated)
            self._print(f"evaluation: {show.measures(evaluated)}")
        if data["status"] == Status.RUNNING and progress.get("epochs"):
            epoch = (data["status"], progress.get("epoch", 0))
            if progress.get("loss") is None or (
                epoch == self._epoch and time.monotonic() - self._at < _PROGRESS_SECONDS
            ):
                return
            self._epoch, self._at = epoch, time.monotonic()
            self._print(f"RUNNING epoch {epoch[1] + 1} of {progress['epochs']}  batch loss {progress['loss']:.3g}")
        elif data["status"] == Status.RUNNING and data["spec"].get("run") and progress.get("loss") is not None:
            if time.monotonic() - self._at >= _PROGRESS_SECONDS:
                self._at = time.monotonic()
                self._print(f"RUNNING step {progress.get('round', 0)}  loss {progress['loss']:.3g}")
        elif data.get("reason") and not Status(data["status"]).terminal:  # `_follow` prints how the job ended
            self._print(f"{data['status']}: {data['reason']}")

    def _print(self, line: str) -> None:
        if line != self._last:
            self._last = line
            show.print_note(line)


def ls(
    status: Annotated[Status | None, typer.Option(help="Only jobs with this status.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="The largest number of jobs to list.")] = 20,
    sweep: Annotated[str | None, typer.Option(metavar="NAME", help="Only jobs of this sweep.")] = None,
    text: Annotated[
        str | None,
        typer.Option(
            "--filter",
            metavar="TEXT",
            help="Only jobs with each word in the id, name, status, reason, strategy, workload, function or sweep.",
        ),
    ] = None,
    output: Format = Output.table,
) -> None:
    """List jobs, newest first."""
    with Client() as client:
        jobs = client.jobs(status=status, limit=limit, sweep=sweep, text=text)
        counts = client.count_jobs(sweep=sweep, text=text)
    if output is Output.json:
        show.dump([job.data for job in jobs])
        return
    rows: list[list[show.Cell]] = [
        [
            job.id,
            job.data["name"],
            show.colour_status(job.data["status"]),
            show.format_age(job.data["created_at"]),
            f"{show.workers_of(job.data)} x {show.strategy_of(job.data)}",
            ", ".join(filter(None, [show.format_result(job.data), _describe_throttling(job.data)]))
            or shorten_reason(job.data["reason"]),
        ]
        for job in jobs
    ]
    columns = ["id", "name", "status", "age", "workers", "result"]
    show.print_table(columns, rows, cut={"name": 10, "workers": 16}, omit=("workers",))
    every = sum(counts.values()) if status is None else counts[status]
    if len(jobs) < every:
        kinds = ", ".join(f"{number} {each}" for each, number in counts.items() if number)
        show.print_note(f"these are the newest {len(jobs)} of {every} jobs (--limit); in all: {kinds}")


def get(job_id: Id, output: Format = Output.table) -> None:
    """Show one job."""
    with Client() as client:
        job = client.job(job_id)
        data, claim = job.data, _claim(job)
        code: CodeAnswer | None = None
        if data["spec"].get("code") is not None:
            code = client.call("GET", f"/api/v1/jobs/{data['id']}/code")
    if output is Output.json:
        show.dump({**data, "code": code, "privacy": claim})
        return
    spec, progress = data["spec"], data["progress"] or {}
    start = spec.get("start_from")
    show.print_facts(
        [
            ("id", data["id"]),
            ("name", data["name"]),
            ("status", data["status"]),
            ("reason", data["reason"]),
            ("workload", spec["workload"]),
            ("run", spec.get("run")),
            ("strategy", show.strategy_of(data)),
            ("workers", show.workers_of(data)),
            ("allowed workers", _describe_allowed(data)),
            ("sweep", data["sweep"]),
            ("params", show.format_params(data["params"])),
            ("resumed from", spec.get("resume")),
            ("started from", None if start is None else StartFrom.parse(start).path),
            ("code", None if code is None else describe_code(code)),
            ("requirements", ", ".join(spec.get("requirements") or [])),
            ("env", ", ".join(spec.get("env") or [])),
            ("operations/s", _describe_operations(progress.get("server_group"))),
            ("submitted", data["created_at"]),
            ("started", data["started_at"]),
            ("finished", data["finished_at"]),
            ("attempt", data["attempt"]),
            ("failures", progress.get("failures")),
            ("round", _describe_round(progress)),
            ("batch loss", show.format_number(progress.get("loss"))),
            ("evaluation", None if data["metrics"] else show.measures(progress.get("metrics"))),
            ("metrics", show.measures(data["metrics"])),
            ("privacy", None if claim is None else describe_privacy(claim)),
            ("checkpoint", data["checkpoint"]),
            ("best checkpoint", progress.get("best")),
        ]
    )


def _describe_allowed(data: JobAnswer) -> str | None:
    """Return how many workers an elastic job may have now, and the most that were requested, as text."""
    counts = data["elastic"]
    if counts is None or data["finished_at"] is not None:
        return None
    requested = counts["requested"]
    return str(counts["allowed"]) + ("" if requested is None else f" (at most {requested} requested)")


def _claim(job: Job) -> JsonObject | None:
    """Return what a private job claims so far; None if it is not private, or its first round has not begun."""
    from rayps.privacy.claim import claim_of_run

    return claim_of_run(job.events(), job.metrics()) if is_private(job.data["spec"]["strategy"]) else None


def is_private(strategy: Json) -> bool:
    """Return whether a strategy, or one of several phases, has the option `privacy`."""
    if isinstance(strategy, Mapping):
        return bool(strategy.get("privacy")) or any(map(is_private, strategy.values()))
    return isinstance(strategy, list) and any(map(is_private, strategy))


def describe_privacy(claim: Keywords) -> str:
    """Return a job's claim of privacy as text on one line: epsilon, delta, and against whom it holds."""
    releases = claim["releases"]
    found = (
        f"epsilon {show.format_number(float(claim['epsilon']))} at delta {claim['delta']:g} for each {claim['unit']}, "
    )
    found += f"after {releases} release{'' if releases == 1 else 's'}; "
    if not claim["proves"]:
        return found + str(claim["claim"]).replace("This run proves", "it proves", 1)
    return found + f"holds against {'; '.join(claim['holds_against'])}"


def describe_code(code: CodeAnswer) -> str:
    """Return a job's code as text on one line: its archive, and the Git commit with what differs from it."""
    origin = code["origin"] or {}
    found = [str(code["code"])[:12]]
    if origin.get("files") is not None:
        found.append(f"{origin['files']} files")
    if origin.get("commit"):
        found.append(
            f"commit {str(origin['commit'])[:12]}" + (f" ({origin['branch']})" if origin.get("branch") else "")
        )
    if origin.get("dirty"):
        lines = str(origin.get("diff") or "").splitlines()
        changed_lines = sum(line[:1] in "+-" and line[:3] not in ("+++", "---") for line in lines)
        found.append(f"changed since: {changed_lines} lines, {origin.get('untracked') or 0} new files")
    return ", ".join(found)


def _describe_round(progress: ProgressRecord) -> str | None:
    if "round" not in progress:
        return None
    rounds = progress.get("rounds")
    return str(progress["round"]) + (f" of {rounds}" if rounds else "")


def logs(
    job_id: Id,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow until the job has ended; Ctrl-C detaches.")
    ] = False,
) -> None:
    """Show a job's log: what its processes printed."""
    with Client() as client:
        job = client.job(job_id)
        try:
            printed = False
            for line in job.logs(follow=follow):
                printed = True
                show.print_line(f"{line['time']} {line['source']} {line['text']}".strip())
            if not printed:
                show.print_note(
                    f"the log of job {job.id} ({job.data['status']}) is empty: it has what the workload prints. "
                    f"`rayps events {job.id}` lists the job's events"
                )
        except KeyboardInterrupt:
            raise typer.Exit(DETACHED) from None


def metrics(
    job_id: Id,
    points: Annotated[int, typer.Option(min=2, max=5000, help="The largest number of rows.")] = 20,
    output: Format = Output.table,
) -> None:
    """Show a job's loss and speed, in at most POINTS rows. With JSON, there is one line for every round."""
    with Client() as client:
        job = client.job(job_id)
        if output is Output.json:
            for point in job.metrics():
                show.print_line(json.dumps(point))
            return
        found = client.call("GET", f"/api/v1/jobs/{job.id}/metrics", params={"max_points": points})
    if not found["series"]:
        show.print_note(f"job {job.id} ({job.data['status']}) has no rounds")
    else:
        _print_rounds(found["series"])
        if all(bucket["loss"] is None for bucket in found["series"]) and is_private(job.data["spec"]["strategy"]):
            show.print_note(
                "training loss and speed are not reported under privacy, because they come from the data without noise"
            )
    for evaluation in found["evaluations"][-5:]:
        show.print_line(f"after round {evaluation['round']}: {show.measures(evaluation['metrics'])}")


def _print_rounds(series: Sequence[RoundsAnswer]) -> None:
    """Print the rounds of a job, without the columns that no round has."""
    names = list(dict.fromkeys(name for part in series for name in part["numbers"]))
    rows: list[list[show.Cell]] = [
        [
            f"{part['round']}-{part['round_end']}" if part["round_end"] > part["round"] else part["round"],
            *[show.format_number((part["loss"] or {}).get(key)) for key in ("mean", "min", "max")],
            show.format_number(part["samples_per_second"]),
            *[show.format_number(part["numbers"].get(name)) for name in names],
        ]
        for part in series
    ]
    fixed = ["round", "loss", "min", "max", "samples/s"]
    show.print_table(*show.drop_empty_columns([*fixed, *name_metric_columns(names, fixed).values()], rows))


def events(job_id: Id, output: Format = Output.table) -> None:
    """Show a job's events."""
    with Client() as client:
        # in the order of their times: events of servers are added to the job's events late
        found = sorted(client.job(job_id).events(), key=lambda event: float(event["time"]))
    if output is Output.json:
        show.dump(found)
        return
    show.print_table(
        ["when", "what", ""], [[show.format_clock(e["time"]), e["kind"], text] for e, text in _shorten(found)]
    )


def _shorten(events: list[Event]) -> list[tuple[Event, str]]:
    """Return events and their texts. Of consecutive checkpoint events, return only the first and the last.

    The text of the last one has the number of checkpoint events that are left out.
    """
    found: list[tuple[Event, str]] = []
    for kind, group in itertools.groupby(events, key=lambda event: str(event["kind"])):
        row = list(group)
        texts = [str(event["message"]) for event in row]
        if kind == "checkpoint" and len(row) > 2:
            texts[-1] += f" (and {len(row) - 2} checkpoint{'s'[: len(row) != 3]} before it; all: -o json)"
            row, texts = [row[0], row[-1]], [texts[0], texts[-1]]
        found += zip(row, texts, strict=True)
    return found


def stop(
    job_id: Annotated[
        str | None, typer.Argument(metavar="ID", help="The job's id, as `rayps ls` shows it, or its beginning.")
    ] = None,
    sweep: Annotated[str | None, typer.Option(metavar="NAME", help="Stop all jobs of this sweep.")] = None,
    output: Format = Output.table,
) -> None:
    """Request a job, or all jobs of a sweep, to stop."""
    if (job_id is None) == (sweep is None):
        raise ConfigError("give the id of a job, or --sweep NAME", field="job_id")
    with Client() as client:
        if sweep is not None:
            found = client.open_sweep(sweep).stop()
            if output is Output.json:
                show.dump([job.data for job in found.jobs])
            else:
                show.print_line(
                    f"{sweep}: stop requested for {sum(job.data['stop_requested'] for job in found.jobs)} jobs"
                )
            return
        assert job_id is not None
        job = client.job(job_id).stop()
    if output is Output.json:
        show.dump(job.data)
    else:
        show.print_line(f"{job.id}: stop requested")


def scale(
    job_id: Id,
    workers: Annotated[int, typer.Argument(min=1, help="The most workers that the job should have now.")],
    output: Format = Output.table,
) -> None:
    """Change the number of workers of an elastic job while it runs. It grows as resources are free."""
    with Client() as client:
        job = client.job(job_id).scale(workers)
    if output is Output.json:
        show.dump(job.data)
    else:
        show.print_line(f"{job.id}: {show.workers_of(job.data)} workers; at most {workers} requested")


def delete(
    job_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Ended jobs, by id or its beginning.")],
    output: Format = Output.table,
) -> None:
    """Delete ended jobs with their logs, metrics and checkpoints."""
    with Client() as client:
        jobs = [client.job(job_id) for job_id in job_ids]
        for job in jobs:
            job.delete()
            if output is Output.table:
                show.print_line(f"{job.id} is deleted")
    if output is Output.json:
        show.dump([job.data for job in jobs])


def open_page(to: show.To = None) -> None:
    """Print an address that opens the dashboard once. It is valid for five minutes."""
    show.refuse_secret(to)
    with Client() as client:
        show.print_secret(client.page_address(), to)


def _describe_operations(group: GroupFacts | None) -> str | None:
    """Return a job's operations per second on its server group, and its quota if there is one, as text."""
    if not group or group.get("operations_s") is None:
        return None
    most = (group.get("quota") or {}).get("operations")
    return show.format_number(float(group["operations_s"])) + ("" if most is None else f" (quota {most:g})")


def _describe_throttling(job: JobAnswer) -> str | None:
    return (
        ((job.get("progress") or {}).get("server_group") or {}).get("held_back")
        if (job["status"] == "RUNNING")
        else None
    )


def shorten_reason(text: str | None) -> str:
    """Return the first line of why a job has its status, cut to 60 characters, without the place in a file."""
    lines = (text or "").splitlines()
    return textwrap.shorten(lines[0].partition(": /")[0], 60, placeholder=" ...") if lines else ""


def add(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for name, command in (
        ("submit", submit),
        ("clone", clone),
        ("ls", ls),
        ("get", get),
        ("logs", logs),
        ("metrics", metrics),
        ("events", events),
        ("stop", stop),
        ("scale", scale),
        ("delete", delete),
        ("open", open_page),
    ):
        app.command(name)(command)
