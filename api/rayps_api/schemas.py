"""The JSON schemas of the REST interface. Inside the service, a job is a `rayps.strategies.job.JobSpec`."""

from __future__ import annotations

import http
import math
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, create_model
from rayps_client.values import Keywords

from rayps.cluster.notices import Notice
from rayps.core.job.job_fields import GROUP_NAME, JOB_FIELDS, JobField, Kind
from rayps.core.job.job_status import Status
from rayps.core.job.records import ProgressRecord
from rayps.core.job.requirements import LONGEST_LINE
from rayps.core.metric_direction import lowest_is_best
from rayps.core.strategy.elastic import LR_RULES
from rayps.service.code.code_origin import MOST_DIFF
from rayps.service.elastic_jobs import count_workers
from rayps.service.groups import LEAST_SILENCE, MOST_REPLICAS, MOST_SERVERS, MOST_SILENCE, SILENCE
from rayps.service.store import JobRecord
from rayps.service.sweeps.sweep import MOST_JOBS
from rayps.service.sweeps.sweep import NAME as SWEEP_NAME
from rayps.strategies.job import JobSpec
from rayps_api.problems import A_RANGE, ONE_NUMBER


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("give printable text on one line")
    return text


Line = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_printable)]
Count = Annotated[int, Field(ge=1, le=100_000)]
Amount = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]


class StartIn(BaseModel):
    """Files with a job's first parameters: see `rayps.core.job.warm_start.StartFrom`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    path: Line
    strict: bool = True
    remove_prefix: str = Field("", max_length=1000)
    add_prefix: str = Field("", max_length=1000)


ParameterName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,99}$")]
Scalar: TypeAlias = bool | int | Annotated[float, Field(allow_inf_nan=False)] | str | None
Scalars: TypeAlias = Scalar | list[Scalar | list[Scalar]]
ParameterValue: TypeAlias = Scalars | dict[Line, Scalars | dict[Line, Scalars]]
Requirement = Annotated[str, Field(min_length=1, max_length=LONGEST_LINE), AfterValidator(_printable)]


class OriginIn(BaseModel):
    """Where a job's code comes from, as the client that packed it found out. It is shown and not interpreted."""

    model_config = ConfigDict(extra="forbid", strict=True)

    files: int | None = Field(None, ge=0, lt=2**53)
    bytes: int | None = Field(None, ge=0, lt=2**53)
    folder: Line | None = None
    commit: str | None = Field(None, pattern=r"^[0-9a-f]{40,64}$")
    branch: Line | None = None
    dirty: bool | None = None
    untracked: int | None = Field(None, ge=0, lt=2**53)
    diff: str | None = Field(None, max_length=MOST_DIFF)
    diff_cut: bool | None = None


Workers: TypeAlias = Annotated[
    Annotated[Count, Tag(ONE_NUMBER)] | Annotated[list[Count], Field(min_length=2, max_length=2), Tag(A_RANGE)],
    Discriminator(lambda given: A_RANGE if isinstance(given, list) else ONE_NUMBER),
]


class ElasticIn(BaseModel):
    """What an elastic job states beside its range of workers: see `rayps.core.strategy.elastic.ElasticWorkers`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    most: Count | None = Field(None, description="The largest number of workers; may be left out with a range.")
    global_batch: int | None = Field(None, ge=1, le=10**12)
    lr_scaling: str | None = Field(None, max_length=20, examples=list(LR_RULES))
    cooldown: float | None = Field(None, ge=0, le=86400.0, allow_inf_nan=False)
    gain: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    balance: bool | None = Field(None, description="Whether faster workers take more of a round's rows.")
    replay: list[Annotated[list[int], Field(min_length=2, max_length=2)]] | None = Field(None, max_length=100_000)


_KINDS: dict[Kind, Any] = {
    Kind.LINE: Line,
    Kind.TEXT: str,
    Kind.WHOLE: int,
    Kind.NUMBER: float,
    Kind.FLAG: bool,
    Kind.STRATEGY: Any,
    Kind.WORKERS: Workers,
    Kind.ELASTIC: ElasticIn,
    Kind.AMOUNTS: dict[Line, Amount],
    Kind.START: Line | StartIn,
    Kind.VALUES: dict[ParameterName, ParameterValue],
    Kind.LINES: list[Requirement],
    Kind.VARIABLES: object,
}


def _of_request(declared: JobField) -> tuple[object, object]:
    """Return the type and the pydantic field of a job's field."""
    kind, default = _KINDS[declared.kind], declared.default
    given: Keywords = dict(declared.limits)
    if declared.kind is Kind.NUMBER:
        given["allow_inf_nan"] = False
    if declared.examples:
        given["examples"] = list(declared.examples)
    if declared.note:
        given["description"] = declared.note
    if isinstance(default, dict):
        given["default_factory"] = lambda: dict(default)
    else:
        given["default"] = default
    is_optional = default is None and declared.kind is not Kind.VARIABLES
    return (kind | None if is_optional else kind), Field(**given)


if TYPE_CHECKING:
    _JobFields = BaseModel
else:
    _JobFields = create_model("_JobFields", **{each.name: _of_request(each) for each in JOB_FIELDS})


class JobIn(_JobFields):
    """A job to run: a `workload`, or `run`, a function with a loop of its own.

    `strategy` is a name, a name with options, or a list of phases.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    origin: OriginIn | None = None


class ScaleIn(BaseModel):
    """The most workers that an elastic job should have now."""

    model_config = ConfigDict(extra="forbid", strict=True)

    workers: Count


FIELDS = sorted(JobIn.model_fields)


class NoticeIn(BaseModel):
    """A notice that a host will end: its Ray node id, or its name or IP address; one of the two is enough."""

    model_config = ConfigDict(extra="forbid", strict=True)

    node: str = Field("", pattern=r"^([0-9a-f]{20,100})?$", description="A Ray node id.")
    host: str = Field("", pattern=r"^[A-Za-z0-9._:-]{0,253}$", description="A host's name or IP address.")
    seconds: float | None = Field(
        None, ge=0, le=86400.0, allow_inf_nan=False, examples=[30], description="Until the end; null: not known."
    )
    reason: str = Field("announced to the service", min_length=1, max_length=200)


NOTICE_FIELDS = sorted(NoticeIn.model_fields)


class NoticeOut(BaseModel):
    """A notice that a host, or one process of it, will end."""

    node: str
    host: str
    seconds: float | None = Field(description="Seconds until the end; null: no deadline is known.")
    reason: str
    pid: int | None = Field(description="The process that will end; null: the whole host.")


class NoticesOut(BaseModel):
    """All notices that the service knows: its own, those of Ray's draining nodes, and those of ending processes."""

    notices: list[NoticeOut]


class WorkersOut(BaseModel):
    """The numbers of workers of an elastic job."""

    least: int
    most: int
    now: int = Field(description="Its workers now, also those that start or leave.")
    allowed: int = Field(description="The number that it may have now.")
    requested: int | None = Field(description="The most workers that the user wants now; null: as many as it may have.")


class StoredCode(BaseModel):
    """An archive that the service has."""

    code: str


class CodeOut(BaseModel):
    """A job's code: the SHA-256 of its archive (null: a folder of the service's machine), and its origin."""

    code: str | None
    origin: OriginIn | None


class JobOut(BaseModel):
    """A job, as every answer shows it."""

    id: str
    name: str
    status: Status
    reason: str | None
    spec: dict[str, Any]
    attempt: int
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    progress: dict[str, Any] | None
    metrics: dict[str, float | None] | None
    lowest: dict[str, bool | None] = Field(
        description="For each metric of the newest evaluation, whether its lowest value is the best; null if its name "
        "does not say it."
    )
    checkpoint: str | None
    stop_requested: bool
    params: dict[str, Any] = Field(
        description="All parameters of the workload after the job has started; before, only those that were given."
    )
    sweep: str | None = Field(description="The name of the sweep to which the job belongs.")
    strategies: list[object] = Field(
        description="The strategy of the job; for a function the different ones that it has given to `rayps.wrap`, or "
        "the default of `rayps.wrap` before that."
    )
    elastic: WorkersOut | None = Field(description="null if the job has a fixed number of workers.")


class SweepIn(BaseModel):
    """A sweep to start: `job` once for each combination of the values in `over`.

    A name of `over` is a field of the job, or else a parameter of its workload or function; "job.NAME" and
    "params.NAME" are never ambiguous.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(pattern=SWEEP_NAME, examples=["digits-lr"])
    job: JobIn
    over: dict[Line, Annotated[list[Any], Field(min_length=1, max_length=MOST_JOBS)]] = Field(
        min_length=1, max_length=20, examples=[{"lr": [0.1, 0.3], "seed": [0, 1, 2]}]
    )


class SweepOut(BaseModel):
    """A sweep and its jobs, in the order of their values."""

    name: str
    jobs: list[JobOut]


class ComparisonOut(BaseModel):
    """Jobs beside each other; the fields of `rayps.service.sweeps.comparison.Comparison`."""

    differing: list[str]
    metrics: list[str]
    columns: list[dict[str, str]]
    lowest: dict[str, bool | None]
    rows: list[dict[str, Any]]
    curves: dict[str, dict[str, dict[str, Any]]]


SWEEP_FIELDS = sorted({*SweepIn.model_fields, *JobIn.model_fields})


class JobsOut(BaseModel):
    """A page of jobs, newest first."""

    jobs: list[JobOut]
    next_cursor: str | None
    counts: dict[str, int] = Field(
        description="The number of jobs by status, of those that the filters other than `status` choose, on all pages."
    )


class Points(BaseModel):
    """Metric points as the driver wrote them, and `cursor`, the byte offset after the last one."""

    points: list[dict[str, Any]]
    cursor: int


class Series(BaseModel):
    """A run's metrics in buckets of consecutive rounds, and all its evaluations."""

    series: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    summaries: dict[str, dict[str, float | None]] = Field(
        description="For each metric of the rounds, the last value, the least and the largest one, of single rounds."
    )


class Lines(BaseModel):
    """Log lines, and the byte offset after the last one."""

    lines: list[dict[str, str]]
    cursor: int


class Events(BaseModel):
    """Events of a job, and the cursor after the last one."""

    events: list[dict[str, Any]]
    cursor: int


class TimeReport(BaseModel):
    """Where the time of a job's workers and servers went: see `rayps.core.time.time_report`."""

    name: str
    parts: list[str]  # all parts of an account, in the order in which pictures show them
    goodput: float | None  # the useful share of the workers' time
    seconds: float  # from the start of the first process until the last report
    shares: dict[str, float]  # of each part in the time of all workers
    members: list[dict[str, Any]]
    timeline: dict[str, list[dict[str, Any]]]
    events: list[dict[str, Any]]
    verdict: dict[str, Any]


class FileOut(BaseModel):
    """A file of a job: its path in the job's folder, and its bytes."""

    path: str
    size: int


class FilesOut(BaseModel):
    """The files of a job that can be downloaded."""

    files: list[FileOut]


class WarmOut(BaseModel):
    """The processes of `rayps serve --warm` on the service's host."""

    wanted: int
    ready: int = Field(description="Processes that wait for a job.")
    starting: int = Field(description="Processes that are importing.")
    memory: int = Field(description="Bytes that the ready processes occupy.")


class ClusterOut(BaseModel):
    """The state of the Ray cluster that runs the jobs."""

    ready: bool
    address: str | None
    owned: bool
    cores: int | None = Field(
        description="CPUs of the machine, if the service owns the Ray; `total` counts logical CPUs."
    )
    together: float | None = Field(
        description="CPUs that jobs may reserve that run side by side, if these are fewer than `total`: a job of more "
        "runs alone."
    )
    total: dict[str, float]
    free: dict[str, float]
    reason: str | None
    warm: WarmOut | None = Field(description="None if the service keeps no warm processes.")


_MOST = "If given, the load chooses the number of servers, from `servers` to `most`. Without it, the number stays."


class GroupIn(BaseModel):
    """A server group to start: `servers` processes; each segment has a primary and `replicas` backups."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(pattern=GROUP_NAME, examples=["shared"])
    servers: int = Field(2, ge=1, le=MOST_SERVERS)
    most: int | None = Field(None, ge=1, le=MOST_SERVERS, description=_MOST)
    replicas: int = Field(1, ge=0, le=MOST_REPLICAS)
    cpus: float | None = Field(
        None,
        ge=0,
        le=1024,
        allow_inf_nan=False,
        description="CPUs that each server reserves. null: 1 in a joined cluster, 0 in the service's own Ray.",
    )
    silence: float = Field(
        SILENCE,
        ge=LEAST_SILENCE,
        le=MOST_SILENCE,
        allow_inf_nan=False,
        description="Seconds after which a silent server counts as dead. The end of a process is detected at once.",
    )


class ResizeIn(BaseModel):
    """The new number of servers of a group, or with `most` the range from which load chooses it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    servers: int = Field(ge=1, le=MOST_SERVERS)
    most: int | None = Field(None, ge=1, le=MOST_SERVERS, description=_MOST)


class DrainIn(BaseModel):
    """The request to drain one server: to migrate its segments to the others, and then stop the server."""

    model_config = ConfigDict(extra="forbid", strict=True)

    server: Line


class QuotaIn(BaseModel):
    """The quota of a space: bytes in total, and operations per second over all servers. null means no limit."""

    model_config = ConfigDict(extra="forbid", strict=True)

    bytes: int | None = Field(None, ge=1, lt=2**63)
    operations: float | None = Field(None, gt=0, le=1e12, allow_inf_nan=False)


GROUP_FIELDS = sorted({*GroupIn.model_fields, *DrainIn.model_fields, *QuotaIn.model_fields})


class GroupJob(BaseModel):
    """A job that uses a group."""

    id: str
    name: str
    status: Status
    workers: int


class GroupHead(BaseModel):
    """The common fields of a server group. `settled`: all servers and backups are ready and no segment migrates."""

    name: str
    status: str
    reason: str | None
    wanted: int
    replicas: int
    created_at: datetime
    settled: bool
    range: list[int] | None = Field(description="The least and the most servers, if load chooses the number.")
    pinned: bool = Field(description="Whether a call has set the number, so that load does not change it.")


class GroupOut(GroupHead):
    """A server group with its servers, spaces, segment migrations (`moves`), events and jobs."""

    servers: list[dict[str, Any]]
    spaces: list[dict[str, Any]]
    moves: list[dict[str, Any]]
    counts: dict[str, Any]
    events: list[dict[str, Any]]
    jobs: list[GroupJob]


class GroupRow(GroupHead):
    """The summary of a server group in the list of all groups."""

    alive: int
    bytes: float
    operations_s: float
    spaces: int
    moves: int
    jobs: int


class GroupsOut(BaseModel):
    """All server groups."""

    groups: list[GroupRow]


class Option(BaseModel):
    """An option of a strategy."""

    name: str
    type: str
    default: Any
    of: list[str] | None = None  # the names of the objects that can be the option's value


class StrategyOut(BaseModel):
    """A strategy, or a model division such as `pipeline`. A division alone means all_reduce with this division."""

    name: str
    summary: str
    options: list[Option]


class Login(BaseModel):
    """A one-time code or a token, which the service exchanges for a session cookie."""

    model_config = ConfigDict(extra="forbid", strict=True)

    code: str | None = Field(None, max_length=200)
    token: str | None = Field(None, max_length=200)


class Ready(BaseModel):
    """Whether jobs can be submitted and can start; if not, `reason` says why."""

    ready: bool
    reason: str | None


class ProblemOut(BaseModel):
    """An error answer: RFC 9457 problem details."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    errors: list[dict[str, str]]
    request_id: str
    ended: dict[str, str] | None = Field(None, description="The status and reason of a job that has ended.")


BINARY_BODY: dict[str, Any] = {  # of a route whose request is read as bytes
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return OpenAPI's description of the error answers with these status codes."""
    content = {"application/problem+json": {"schema": ProblemOut.model_json_schema()}}
    return {status: {"description": http.HTTPStatus(status).phrase, "content": content} for status in statuses}


def job_out(record: JobRecord, progress: dict[str, Any] | None) -> dict[str, Any]:
    """Return a job as JSON data."""
    known = {**((progress or {}).get("metrics") or {}), **(record.metrics or {})}
    counts = count_workers(record, cast("ProgressRecord | None", progress))
    return {
        "id": record.id,
        "name": record.name,
        "status": record.status.value,
        "reason": record.reason,
        "spec": spec_out(record.spec),
        "attempt": record.attempt,
        "created_at": timestamp(record.created_at),
        "started_at": timestamp(record.started_at),
        "finished_at": timestamp(record.finished_at),
        "progress": progress,
        "metrics": finite(record.metrics),
        "lowest": {name: lowest_is_best(name) for name in known},
        "checkpoint": record.checkpoint,
        "stop_requested": record.stop_requested_at is not None,
        "params": (progress or {}).get("params") or record.spec.params,
        "sweep": record.sweep,
        "strategies": strategies_of(record, progress),
        "elastic": None if counts is None else asdict(counts),
    }


def strategies_of(record: JobRecord, progress: dict[str, Any] | None) -> list[object]:
    """Return the strategy of a job, in wire form; for a loop of the user's own those that it has given to `wrap`."""
    wrapped = (progress or {}).get("wrapped") if record.spec.run is not None else None
    found: list[object] = []
    for each in wrapped or [record.spec.strategy]:
        if each not in found:
            found.append(each)
    return found


def spec_out(spec: JobSpec) -> dict[str, Any]:
    """Return a job's specification as JSON data, without the values of `env`.

    `workload` is null if the job runs a function.
    """
    return spec.to_dict() | {"workload": spec.workload or None, "env": spec.environment.shown() or None}


def group_out(group: dict[str, Any], live: list[JobRecord]) -> dict[str, Any]:
    """Return a group from `Groups.get`, with the jobs of `live` that use it, as JSON data."""
    jobs = [
        {"id": job.id, "name": job.name, "status": job.status.value, "workers": job.spec.workers}
        for job in live
        if job.spec.server_group == group["name"]
    ]
    return {**group, "created_at": timestamp(group["created_at"]), "jobs": jobs}


def notice_out(notice: Notice) -> dict[str, Any]:
    """Return a notice as JSON data."""
    return asdict(notice)


def group_row(group: dict[str, Any]) -> dict[str, Any]:
    """Return the summary of a group from `group_out`, for the list of all groups."""
    servers = group["servers"]
    short = {key: group[key] for key in ("name", "status", "reason", "wanted", "replicas", "created_at", "settled")}
    short |= {"range": group["range"], "pinned": group["pinned"]}
    return short | {
        "alive": sum(each.get("state") == "alive" for each in servers),
        "bytes": sum(each.get("bytes") or 0 for each in servers),
        "operations_s": sum(each.get("operations_s") or 0 for each in servers),
        "spaces": len(group["spaces"]),
        "moves": len(group["moves"]),
        "jobs": len(group["jobs"]),
    }


def finite(value: Any) -> Any:
    """Return a value with NaN and infinities, which JSON cannot express, replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value


def timestamp(at: float | None) -> str | None:
    """Return a time (seconds since 1970) as text in UTC with milliseconds, such as 2026-01-31T12:00:00.000Z.

    Return None for None.
    """
    return (
        None
        if at is None
        else datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )
