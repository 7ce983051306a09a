"""Compare jobs: the values in which they differ, the last and best value of each metric, and their curves. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypedDict

from rayps_client.values import Json, JsonObject

from rayps.core.job.job_status import Status
from rayps.core.metric_direction import Direction, choose_direction, direction_of, lowest_is_best
from rayps.privacy.options import privacy_of
from rayps.service.rest_answers import JobAnswer

BATCH_LOSS = "batch loss"  # the mean loss of the training batches of a round; other metrics of rounds are named alike
_EPSILON, _DELTA = "epsilon", "delta"  # what a private job has spent; a number of its rounds, and of its strategy
_NOT_COMPARED = ("name", "params", "resume")
FACTS = ("id", "name", "status", "rounds", "seconds")  # of a job, in each table
MOST_JOBS = 200


class MetricSummary(TypedDict):
    """The last, best, least and largest value of a metric, of single rounds; null if no value was finite.

    The best value is also null if the metric's name does not say whether the lowest or the highest is the best.
    """

    last: float | None
    best: float | None
    least: float | None
    most: float | None


NO_SUMMARY: MetricSummary = {"last": None, "best": None, "least": None, "most": None}


class TableColumn(TypedDict):
    """A column of the table of a comparison; the columns' names differ.

    `kind` says where a row has the value of the name `of`: "fact" in the row, "value" in its `values`, "last" and
    "best" in its `metrics`. Facts and the fields of a job keep their names, and then the parameters: one with the name
    of a fact or a field is "params.NAME". A metric with a name that is taken is "metrics.NAME".
    """

    name: str
    kind: str
    of: str


class ComparedRow(TypedDict):
    """One job of a comparison. `values` has the values in which the jobs differ; `seconds` is the time since its start.

    A name is missing in `values` if the job has no such value, or has not started and uses the default. `result`:
    whether the job has succeeded, or was stopped and has a result. `reason`: the first line of why it has its status.
    """

    id: str
    name: str
    status: str
    reason: str | None
    result: bool
    values: JsonObject
    rounds: int | None
    seconds: float | None
    metrics: dict[str, MetricSummary]


class Curve(TypedDict):
    """A metric of one job over the run. `epoch` is null if the job's length is not in epochs.

    `seconds` counts the time of the rounds, without the start and the evaluations.
    """

    value: list[float | None]
    round: list[int]
    epoch: list[float] | None
    seconds: list[float]


_NO_CURVE: Curve = {"value": [], "round": [], "epoch": None, "seconds": []}


class Comparison(TypedDict):
    """The answer to a comparison. `lowest`: for each metric, whether the best value is the lowest; null if unknown."""

    differing: list[str]
    metrics: list[str]
    columns: list[TableColumn]
    lowest: dict[str, bool | None]
    rows: list[ComparedRow]
    curves: dict[str, dict[str, Curve]]  # by job id and metric


class SeriesAnswer(TypedDict):
    """A job's rounds in buckets, and its evaluations, as the service returns them.

    `summaries`: "last", "least" and "most" of each metric of the rounds, of single rounds.
    """

    series: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    summaries: dict[str, dict[str, float | None]]


@dataclass(frozen=True, slots=True)
class _Clock:
    """Converts a number of finished rounds to epochs and seconds."""

    ends: list[int]  # finished rounds at the end of each bucket
    seconds: list[float]  # seconds of training until then
    per_epoch: float | None  # rounds in an epoch

    def epoch(self, rounds: int) -> float | None:
        return None if self.per_epoch is None else rounds / self.per_epoch

    def at(self, rounds: int) -> float:
        """Return the seconds of training until the end of a round, linear within a bucket."""
        before, since = 0, 0.0
        for end, seconds in zip(self.ends, self.seconds, strict=True):
            if end >= rounds:
                return since + (seconds - since) * (rounds - before) / max(1, end - before)
            before, since = end, seconds
        return since


def compare_jobs(jobs: Sequence[JobAnswer], series: Mapping[str, SeriesAnswer], now: float) -> Comparison:
    """Compare jobs, given each job's series by its id. `now`: seconds since the epoch, for jobs that have not ended."""
    curves = {job["id"]: _make_curves(job, series[job["id"]]) for job in jobs}
    metrics = list(dict.fromkeys(name for found in curves.values() for name in found if name != BATCH_LOSS))
    if any(value is not None for found in curves.values() for value in found.get(BATCH_LOSS, _NO_CURVE)["value"]):
        metrics.append(BATCH_LOSS)  # a private job has none
    values = [_collect_values(job) for job in jobs]
    names = _find_differing(values, [set(job["spec"].get("params") or {}) for job in jobs])
    rows: list[ComparedRow] = []
    for job, known in zip(jobs, values, strict=True):
        rows.append(
            {
                "id": job["id"],
                "name": job["name"],
                "status": job["status"],
                "reason": (job["reason"] or "").partition("\n")[0] or None,
                "result": _has_result(job),
                "values": {name: known[name] for name in names if name in known},
                "rounds": (job["progress"] or {}).get("round"),
                "seconds": _find_seconds(job, now),
                "metrics": {
                    name: _summarize(name, curve, series[job["id"]], loop=bool(job["spec"].get("run")))
                    for name, curve in curves[job["id"]].items()
                },
            }
        )
    return {
        "differing": names,
        "metrics": metrics,
        "columns": _make_columns(names, metrics, {name for job in jobs for name in job["spec"]}),
        "lowest": {name: lowest_is_best(name) for name in metrics},
        "rows": rows,
        "curves": curves,
    }


def name_metric_columns(metrics: Sequence[str], taken: Collection[str]) -> dict[str, str]:
    """Return a column's name for each metric: the metric's own, or "metrics.NAME" if a column of `taken` has it."""
    return {name: f"metrics.{name}" if name in taken else name for name in metrics}


def _make_columns(differing: Sequence[str], metrics: Sequence[str], fields: Collection[str]) -> list[TableColumn]:
    best = {name: f"best {name}" for name in metrics}
    heads = name_metric_columns(metrics, {*FACTS, *fields, *differing, *best.values()})
    return [
        *(TableColumn(name=name, kind="fact", of=name) for name in FACTS[:3]),
        *(TableColumn(name=name, kind="value", of=name) for name in differing),
        *(TableColumn(name=name, kind="fact", of=name) for name in FACTS[3:]),
        *(
            column
            for name in metrics
            for column in (
                TableColumn(name=heads[name], kind="last", of=name),
                TableColumn(name=best[name], kind="best", of=name),
            )
        ),
    ]


def read_cell(row: ComparedRow, column: TableColumn) -> Json:
    """Return the value of a row in a column; None if it has none."""
    of = column["of"]
    match column["kind"]:
        case "value":
            return row["values"].get(of)
        case "last":
            return row["metrics"].get(of, NO_SUMMARY)["last"]
        case "best":
            return row["metrics"].get(of, NO_SUMMARY)["best"]
    facts: JsonObject = {
        "id": row["id"],
        "name": row["name"],
        "status": row["status"],
        "rounds": row["rounds"],
        "seconds": row["seconds"],
    }
    return facts[of]


def with_direction(found: Comparison, metrics: Sequence[str], direction: Direction) -> Comparison:
    """Return a comparison in which the best value of these metrics is the lowest ("min") or the highest ("max")."""
    rows = []
    for row in found["rows"]:
        chosen = {name: known for name, known in row["metrics"].items() if name in metrics}
        summaries = {name: known | {"best": _find_best(known, direction)} for name, known in chosen.items()}
        rows.append(row | {"metrics": row["metrics"] | summaries})
    lowest = {name: direction == "min" if name in metrics else known for name, known in found["lowest"].items()}
    return found | {"rows": rows, "lowest": lowest}


def find_best_row(found: Comparison, metric: str, mode: str = "auto") -> ComparedRow | None:
    """Return the row of the job that ended with the best value of a metric. Ties: the first.

    Only jobs that succeeded count, and those that were stopped and have a result. Return None if none of these has a
    value of the metric. `mode` is that of `choose_direction`.

    Raises:
        ConfigError: `mode` is invalid, or "auto" and the metric's name does not say which value is the best.
    """
    ended: list[tuple[float, ComparedRow]] = []
    for row in found["rows"]:
        value = row["metrics"].get(metric, NO_SUMMARY)["last"]
        if value is not None and row["result"]:
            ended.append((value, row))
    if not ended:
        return None
    choose = min if choose_direction(metric, mode) == "min" else max
    return choose(ended, key=lambda each: each[0])[1]


def _has_result(job: JobAnswer) -> bool:
    return job["status"] == Status.SUCCEEDED or (job["status"] == Status.STOPPED and bool(job["metrics"]))


def _collect_values(job: JobAnswer) -> JsonObject:
    spec: JsonObject = {name: value for name, value in job["spec"].items() if name not in _NOT_COMPARED}
    taken = {*FACTS, *job["spec"]}
    return {(f"params.{name}" if name in taken else name): value for name, value in job["params"].items()} | spec


def _find_differing(values: Sequence[JsonObject], given: Sequence[set[str]]) -> list[str]:
    """Return the names whose known values differ, or which only some jobs have and were given for one; params first."""
    found = []
    for name in dict.fromkeys(name for each in values for name in each):
        texts = {json.dumps(each[name], sort_keys=True) for each in values if name in each}
        own = name.removeprefix("params.")
        lacking = any(name not in each for each in values) and any(own in each for each in given)
        if len(texts) > 1 or lacking:
            found.append(name)
    return found


def _make_curves(job: JobAnswer, found: SeriesAnswer) -> dict[str, Curve]:
    progress = job["progress"] or {}
    rounds, epochs = progress.get("rounds"), progress.get("epochs")
    ends, seconds, passed = [], [], 0.0
    for bucket in found["series"]:
        passed += float(bucket.get("seconds") or 0.0)
        ends.append(int(bucket["round_end"]) + 1)
        seconds.append(passed)
    clock = _Clock(ends, seconds, rounds / epochs if rounds and epochs else None)
    points: dict[str, dict[int, float | None]] = {}
    logged = "loss" if job["spec"].get("run") else BATCH_LOSS  # a loop of the user's own has no evaluations
    for evaluation in found["evaluations"]:
        for name, value in evaluation["metrics"].items():
            points.setdefault(name, {})[int(evaluation["round"])] = _keep_finite(value)
    evaluated = set(points)
    for bucket, end in zip(found["series"], ends, strict=True):
        loss = bucket["loss"]
        for name, value in bucket.get("numbers", {}).items():
            points.setdefault(f"batch {name}" if name in evaluated else name, {})[end] = _keep_finite(value)
        points.setdefault(logged, {})[end] = None if loss is None else _keep_finite(loss["mean"])
    delta = _find_delta(job["spec"].get("strategy")) if _EPSILON in points else None
    if delta is not None:  # epsilon says nothing without it
        name = f"privacy {_DELTA}" if _DELTA in points else _DELTA
        points[name] = dict.fromkeys(points[_EPSILON], delta)
    if not found["evaluations"]:
        for name, value in (job["metrics"] or {}).items():
            points.setdefault(name, {int(progress.get("round") or 0): _keep_finite(value)})
    return {name: _make_curve(held, clock) for name, held in points.items()}


def _find_delta(strategy: Json) -> float | None:
    """Return delta of a private strategy in wire form, or of the last private one of several phases."""
    if isinstance(strategy, list):
        return next((found for each in reversed(strategy) if (found := _find_delta(each)) is not None), None)
    if not isinstance(strategy, dict):
        return None
    if "strategy" in strategy:  # a phase
        return _find_delta(strategy["strategy"])
    spec = privacy_of(strategy.get("privacy"))
    return None if spec is None else spec.delta


def _make_curve(points: Mapping[int, float | None], clock: _Clock) -> Curve:
    rounds = sorted(points)
    epochs = [clock.epoch(at) for at in rounds]
    return {
        "value": [points[at] for at in rounds],
        "round": rounds,
        "epoch": None if None in epochs else [each for each in epochs if each is not None],
        "seconds": [clock.at(at) for at in rounds],
    }


def _summarize(name: str, curve: Curve, found: SeriesAnswer, *, loop: bool) -> MetricSummary:
    """Return the summary of a curve. One of rounds is that of all rounds: its curve has the means of buckets."""
    evaluated = {each for evaluation in found["evaluations"] for each in evaluation["metrics"]}
    logged = "loss" if loop else BATCH_LOSS
    own = "loss" if name == logged else name.removeprefix("batch ")
    rounds = found["summaries"].get(own) if name not in evaluated and (own != "loss" or name == logged) else None
    if rounds is not None:
        known: MetricSummary = {**NO_SUMMARY, **rounds}  # type: ignore[typeddict-item]
    else:
        values = [value for value in curve["value"] if value is not None]
        known = NO_SUMMARY | {
            "last": curve["value"][-1] if curve["value"] else None,
            "least": min(values, default=None),
            "most": max(values, default=None),
        }
    return known | {"best": _find_best(known, direction_of(name))}


def _find_best(known: MetricSummary, direction: Direction | None) -> float | None:
    return None if direction is None else known["least"] if direction == "min" else known["most"]


def _find_seconds(job: JobAnswer, now: float) -> float | None:
    if job["started_at"] is None:
        return None
    begin = datetime.fromisoformat(job["started_at"]).timestamp()
    end = now if job["finished_at"] is None else datetime.fromisoformat(job["finished_at"]).timestamp()
    return max(0.0, end - begin)


def _keep_finite(value: Json) -> float | None:
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None
