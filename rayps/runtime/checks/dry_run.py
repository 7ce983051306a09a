"""A dry run: a few rounds of each phase in real workers, and a report of what the whole run would do.

Each phase trains three rounds from new parameters, is evaluated on three batches per worker, saves a checkpoint, and a
second group of workers resumes from it for one more round. The checkpoints are in a temporary folder. Callbacks are
checked, and not called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TypedDict

from rayps_client.errors import RaypsError, TrainingError

from rayps.cluster.local import Cluster
from rayps.core.job.job_status import Status
from rayps.core.job.records import Event
from rayps.core.job.user_code import await_call
from rayps.core.job.warm_start import StartFrom
from rayps.core.rows.phase_rounds import Calendar, PhaseSpan
from rayps.core.strategy.costs import format_bytes
from rayps.core.strategy.strategy import Phase
from rayps.core.urls import Location
from rayps.runtime.checks.preflight import preflight
from rayps.runtime.driver.driver import Driver
from rayps.runtime.driver.workload_job import WorkloadJob
from rayps.runtime.records.journal import Journal
from rayps.runtime.records.status import Outcome
from rayps.runtime.results.callbacks import CallbackRunner
from rayps.runtime.results.cost_report import predict_costs
from rayps.strategies.catalogue import wire
from rayps.strategies.job import JobSpec
from rayps.tensors.division import Division
from rayps.workload.base import Workload

BATCHES = 3  # rounds of each phase, and batches of each worker's evaluation
_SHOWN = ("warning", "divided", "placed", "started_from")  # kinds of events of the rounds that the user sees


class PhaseReport(TypedDict):
    """What a dry run found for one phase. Bytes of memory are those of the largest worker, by formula."""

    strategy: str
    rounds: int
    epoch: int  # rounds of an epoch
    seconds: float  # the measured seconds of a round
    checkpoint: int  # bytes of a checkpoint
    memory: dict[str, float]
    traffic: float | None  # bytes of all workers in a step, by formula


@dataclass(frozen=True)
class Rehearsal:
    """The result of a dry run: the report as text and as data, and the outcome of the last round."""

    text: str
    phases: list[PhaseReport]
    outcome: Outcome


def rehearse(
    workload: Workload,
    spec: JobSpec,
    phases: list[Phase],
    journal: Journal,
    callbacks: CallbackRunner,
    *,
    open_cluster: Callable[[], Cluster],
    folder: Path,
    tries: bool,
) -> Rehearsal:
    """Run a few rounds of each phase, and return what the whole run would do.

    `folder` is a temporary folder. `tries` is as in `Driver`. Warnings of the rounds go to `journal`. The run's
    `callbacks` are checked as the run checks them, and none of their methods is called: loggers would write.

    Raises:
        UserError: the user's code or an option is wrong, or an evaluation lacks the metric that a callback watches.
        TrainingError, ClusterError, NoResources: as in `rayps.train`.
    """
    begin = None if spec.start_from is None else StartFrom.parse(spec.start_from)
    check = partial(preflight, workload, phases, spec, begin)
    found = await_call(check, spec.timeout, where="driver", stopped=lambda: False)
    assert found is not None, "nobody requests a stop"
    calendar = Calendar(phases, found.steps, spec.workers, epochs=spec.epochs, rounds=spec.steps)
    if (warning := callbacks.check_folder(spec, calendar)) is not None:
        journal.event("warning", warning)
    cluster, reports = open_cluster(), list[PhaseReport]()
    for number, phase in enumerate(phases):
        one = replace(
            spec,
            strategy=wire([Phase(None, phase.strategy)]),
            epochs=None,
            checkpoint_every=None,
            name=None,
            profile=False,
        )
        saved = folder / f"phase-{number}"
        outcome, seconds = _time_rounds(workload, one, saved, journal, cluster, tries=tries)
        callbacks.check_metrics(outcome.metrics)
        size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
        count = max(1, len(list(saved.glob("step-*"))))
        cost = _estimate_costs(workload, spec, phase, found.divisions[number])
        reports.append(_report(phase, calendar.spans[number], seconds, size // count, *cost))
    return Rehearsal(_write_text(reports, calendar, spec, callbacks.names), reports, outcome)


def _time_rounds(
    workload: Workload, spec: JobSpec, saved: Path, journal: Journal, cluster: Cluster, *, tries: bool
) -> tuple[Outcome, list[float]]:
    """Train `BATCHES` rounds, and one more after a resume. Return the outcome and the seconds of each round."""
    seconds: list[float] = []
    resume: Location | None = None
    for rounds in (BATCHES, BATCHES + 1):
        inner = Journal(on_event=partial(_pass_on, journal))
        driver = Driver(
            WorkloadJob(
                workload,
                replace(spec, steps=rounds),
                inner,
                checkpoints=saved,
                resume=resume,
                tries=tries and not resume,
                callbacks=None,
                evaluation_batches=BATCHES,
            )
        )
        outcome = driver.run(cluster)
        if outcome.status is not Status.SUCCEEDED or outcome.checkpoint is None:
            raise outcome.error if isinstance(outcome.error, RaypsError) else TrainingError(outcome.message)
        seconds += [float(point["seconds"]) for point in inner.points if point["kind"] == "round"]
        resume = outcome.checkpoint
    return outcome, seconds


def _pass_on(journal: Journal, event: Event) -> None:
    if event["kind"] in _SHOWN:
        journal.event(str(event["kind"]), str(event["message"]))


def _estimate_costs(
    workload: Workload, spec: JobSpec, phase: Phase, division: Division | None
) -> tuple[dict[str, float], float | None]:
    found = predict_costs(workload, phase.strategy, spec.workers, division, activations=True)
    largest = max(found.memory, key=lambda each: each.get("all", 0.0), default={})
    return dict(largest), None if found.bytes is None else float(found.bytes)


def _report(
    phase: Phase,
    span: PhaseSpan,
    seconds: list[float],
    checkpoint: int,
    memory: dict[str, float],
    traffic: float | None,
) -> PhaseReport:
    # the first round of a group of workers allocates memory and compiles code
    return {
        "strategy": phase.name,
        "rounds": span.end - span.begin,
        "epoch": span.steps,
        "seconds": fmean(seconds[1:BATCHES] or seconds),
        "checkpoint": checkpoint,
        "memory": memory,
        "traffic": traffic,
    }


def _write_text(reports: list[PhaseReport], calendar: Calendar, spec: JobSpec, callbacks: list[str]) -> str:
    lines = [
        f"dry run: data, loss, backward, optimizer, schedule, evaluation, checkpoint and resume work with "
        f"{spec.workers} worker{'s'[: spec.workers != 1]}; nothing was kept",
        f"the run has {calendar.rounds} rounds in {calendar.epochs} epoch{'s'[: calendar.epochs != 1]}",
    ]
    for each in reports:
        total = each["rounds"] * each["seconds"]
        lines.append(
            f"{each['strategy']}: {each['rounds']} rounds, {each['epoch']} in an epoch, about "
            f"{each['seconds']:.3g} s for each by {BATCHES} rounds here, {_format_duration(total)} in all"
        )
        parts = ", ".join(
            f"{key} {format_bytes(value)}" for key, value in each["memory"].items() if key != "all" and value
        )
        if parts:
            lines.append(
                f"  memory of the largest worker, by formula: {format_bytes(each['memory'].get('all', 0.0))} ({parts})"
            )
        if each["traffic"]:
            lines.append(f"  traffic of a step, all workers, by formula: {format_bytes(each['traffic'])}")
        lines.append(f"  a checkpoint: {format_bytes(each['checkpoint'])}")
    if callbacks:
        lines.append(f"callbacks were checked, and not called: {', '.join(callbacks)}")
    return "\n".join(lines)


def _format_duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
