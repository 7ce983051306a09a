"""`rayps report`: where the time of a job went, what costs most of it, and what to change.

With `--clients`: how single clients of a federated job differ from the others, and which are outliers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rayps_client.errors import ConfigError, NotFound
from rayps_client.values import JsonObject

from rayps.cli import show
from rayps.cli.report_page import write_page
from rayps.core.time.goodput import FILE, read_job_time
from rayps.core.time.time_report import report_of
from rayps.service.client import Client

_LETTERS = {  # one for each part of the account, in a bar of text
    "compute": "#",
    "data": "d",
    "communication": "c",
    "waiting": "w",
    "evaluation": "e",
    "checkpoint": "k",
    "start": "s",
    "recovery": "r",
    "again": "a",
    "idle": ".",
}
_WIDTH = 40  # of a bar, in letters


def report(
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="The job's id or its beginning; or the folder of a run (checkpoint).")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report with pictures as one HTML page.")
    ] = None,
    clients: Annotated[
        bool, typer.Option("--clients", help="Show how single federated clients differ (strategy option report).")
    ] = False,
) -> None:
    """Show where the time of a job went, and what to change."""
    if clients:
        _show_clients(job, as_json=json)
        return
    found = _read(job)
    if html is not None:
        try:
            html.write_text(write_page(found), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{html} cannot be written: {error.strerror or error}", field="html") from error
        show.print_note(f"wrote {html}")
    if json:
        show.dump(found)
    elif html is None:
        for text in write_lines(found):
            show.print_line(text)


def _read(job: str) -> JsonObject:
    """Return the report of a job of the service, or of a run's folder.

    Raises ConfigError if the folder has no record of time.
    """
    path = Path(job).expanduser()
    if path.is_dir() or path.is_file():
        file = path / FILE if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(
                f"{path} has no {FILE}: give the folder that rayps.train(checkpoint=...) wrote, or a job's folder",
                field="job",
            )
        return report_of(read_job_time(file), path.resolve().name)
    if "/" in job:
        raise NotFound(f"there is no folder {job}, and no job has such an id")
    with Client() as client:
        found: JsonObject = client.job(job).report()
        return found


def _show_clients(job: str, *, as_json: bool) -> None:
    """Print one row for each client of a federated job.

    Raises ConfigError if the job has no report of its clients.
    """
    from rayps.federated.rules.client_scores import THRESHOLD, report_clients, report_rounds
    from rayps.strategies.catalogue import has_secure_sums

    with Client() as client:
        asked = client.job(job)
        rounds = report_rounds(asked.events())
    if rounds is None and has_secure_sums(asked.data["spec"]["strategy"]):
        raise ConfigError(
            f"job {job} has no report of its clients: its updates are summed under masks (secure=secagg(...)), so that "
            "nobody sees single updates.\nA job without secure can have one, with the strategy option report=clients",
            field="job",
        )
    if rounds is None:
        raise ConfigError(
            f"job {job} has no report of its clients: submit it with the strategy option report=clients, such as "
            "fedavg:report=clients",
            field="job",
        )
    found = report_clients(rounds).to_pylist()
    if as_json:
        show.dump(found)
        return
    numbers = ("norm", "cosine", "cosine_trend", "share", "loss", "loss_trend")
    columns = ["client", "rounds", *(name.replace("_", " ") for name in numbers), "score", ""]
    rows = []
    for row in found:
        values = [f"{row[name]:.3g}" for name in numbers]
        why = f"OUTLIER: {row['why']}" if row["outlier"] else ""
        rows.append([row["client"], row["rounds"], *values, f"{row['score']:.1f}", why])
    show.print_table(columns, rows)
    names = ", ".join(row["client"] for row in found if row["outlier"]) or "none"
    show.print_note(f"outliers (score of at least {THRESHOLD:g}): {names}")


def write_lines(report: JsonObject) -> list[str]:
    """Return a report as lines of text: the goodput, the verdict, a bar for each member, and who waited for whom."""
    found: Any = report
    goodput = found["goodput"]
    text = [
        "goodput: no worker has reported yet"
        if goodput is None
        else f"goodput: {goodput:.1%} of the workers' time was useful"
    ]
    text.append("")
    text += _write_findings(found["verdict"])
    text.append("")
    width = max((len(each["name"]) for each in found["members"]), default=0)
    for member in found["members"]:
        whole = sum(member["parts"].values()) or 1.0
        shares = {part: member["parts"].get(part, 0.0) / whole for part in found["parts"]}
        words = ", ".join(f"{part} {share:.0%}" for part, share in _find_largest(shares))
        text.append(f"{member['name']:<{width}} {draw_bar(shares)} {member['wall']:8.1f} s  {words}")
    known = {part for part in found["parts"] if any(each["parts"].get(part) for each in found["members"])}
    text.append(f"{'':<{width}} " + " ".join(f"{_LETTERS[part]}={part}" for part in found["parts"] if part in known))
    waits = _waits(found["members"])
    return [*text, "", *waits] if waits else text


def draw_bar(shares: dict[str, float], width: int = _WIDTH) -> str:
    """Return shares that add up to 1 as `width` letters, one kind for each part, rounded so that all are used."""
    text, done = "", 0.0
    for part, share in shares.items():
        done += share
        text += _LETTERS[part] * (round(width * done) - len(text))
    return text.ljust(width)[:width]


def _find_largest(shares: dict[str, float]) -> list[tuple[str, float]]:
    found = sorted(shares.items(), key=lambda each: -each[1])[:3]
    return [each for each in found if each[1] >= 0.005]


def _write_findings(verdict: Any) -> list[str]:
    text = [f"verdict: {verdict['summary']}"]
    for at, finding in enumerate(verdict["findings"]):
        if at:
            text.append(f"also ({finding['cost']:.0%}): {finding['summary']}")
        else:
            text.append(f"  cost: {finding['cost']:.0%} of the workers' time")
        if at < 2:
            text += [f"  - {each}" for each in finding["evidence"]]
            text.append(f"  change: {finding['advice']}")
    return text


def _waits(members: Any) -> list[str]:
    found = []
    for member in members:
        waits = sorted(member["waits"].items(), key=lambda each: -each[1])[:3]
        words = ", ".join(f"{peer or 'not known'} {seconds:.1f} s" for peer, seconds in waits if seconds >= 0.05)
        if words:
            found.append(f"{member['name']} waited for {words}")
    return found
