"""The answers of the REST interface, one class for each JSON object. Times are text in ISO 8601."""

from __future__ import annotations

from typing import TypedDict

from rayps_client.values import Json, JsonObject, Keywords

from rayps.core.job.records import Event, ProgressRecord
from rayps.service.code.code_origin import CodeOrigin


class WorkersAnswer(TypedDict):
    """The numbers of workers of an elastic job.

    `now` also counts workers that start or leave. `allowed` is the number that the job may have now, `requested` the
    most that the user wants; None means as many as the job may have.
    """

    least: int
    most: int
    now: int
    allowed: int
    requested: int | None


class RoundsAnswer(TypedDict, total=False):
    """Consecutive rounds of a job, `round` to `round_end`: the job's `metrics` with `max_points` have a list of these.

    `loss` has min, mean and max; null if no round has a finite loss. `numbers` are of the user and the strategy.
    """

    round: int
    round_end: int
    loss: dict[str, float] | None
    samples_per_second: float | None
    numbers: dict[str, float]


class JobAnswer(TypedDict):
    """The service's answer about one job.

    `lowest`: for each metric of the newest evaluation, whether its lowest value is the best; None if its name does not
    say it. `params` has all parameters of the workload after the job has started; before, only those that were given.
    """

    id: str
    name: str
    status: str
    reason: str | None
    spec: Keywords  # the fields of `rayps.core.job.job_fields`; one of `workload` and `run` is null
    attempt: int
    created_at: str
    started_at: str | None
    finished_at: str | None
    progress: ProgressRecord | None
    metrics: dict[str, float] | None
    lowest: dict[str, bool | None]
    checkpoint: str | None
    stop_requested: bool
    params: JsonObject
    sweep: str | None
    strategies: list[Json]  # the job's strategy; of a loop of the user's own the different ones given to `rayps.wrap`
    elastic: WorkersAnswer | None  # None if the number of workers is fixed


class JobsAnswer(TypedDict):
    """A page of jobs, and the number of jobs by status on all pages, whatever the status that was asked for."""

    jobs: list[JobAnswer]
    next_cursor: str | None
    counts: dict[str, int]


class SweepAnswer(TypedDict):
    """The answer about one sweep."""

    name: str
    jobs: list[JobAnswer]


class CodeAnswer(TypedDict):
    """A job's code: the SHA-256 of its archive, and where it comes from."""

    code: str | None
    origin: CodeOrigin | None


class WarmAnswer(TypedDict):
    """The processes of `rayps serve --warm`: their numbers, and the bytes of memory of those that are ready."""

    wanted: int
    ready: int
    starting: int
    memory: int


class ClusterAnswer(TypedDict):
    """The state of the Ray cluster that runs the jobs."""

    ready: bool
    address: str | None
    owned: bool
    cores: int | None
    together: float | None
    total: dict[str, float]
    free: dict[str, float]
    reason: str | None
    warm: WarmAnswer | None


class GroupRow(TypedDict):
    """The summary of a server group in the answer that lists all groups."""

    name: str
    status: str
    reason: str | None
    wanted: int
    replicas: int
    created_at: str
    settled: bool
    range: list[int] | None
    pinned: bool
    alive: int
    bytes: float
    operations_s: float
    spaces: int
    moves: int
    jobs: int


class GroupJobAnswer(TypedDict):
    """One job in the answer about the group that it uses."""

    id: str
    name: str
    status: str
    workers: int


class ServerLine(TypedDict, total=False):
    """One server in the answer about its group."""

    name: str
    state: str
    host: str | None
    pid: int | None
    primaries: int | None
    copies: int | None
    bytes: int | None
    operations_s: float | None
    cpu: float | None
    busy: float | None


class SegmentLine(TypedDict, total=False):
    """One segment in the answer about its space."""

    state: str


class SpaceAnswer(TypedDict, total=False):
    """One space in the answer about its group: the parameters and tables of one job or branch."""

    name: str
    workers: int | None
    segments: list[SegmentLine]
    tables: list[str] | None
    bytes: int | None
    rows: int | None
    evicted: int | None
    operations_s: float | None
    throttled: int | None
    rejected: int | None
    quota: dict[str, float | None] | None


# one migration of a segment between servers; made by a call, because the field name `from` is a keyword of Python
MoveLine = TypedDict(
    "MoveLine",
    {"space": str, "segment": int, "from": str | None, "to": str, "phase": str, "seconds": float, "bytes": int},
    total=False,
)


class GroupAnswer(TypedDict, total=False):
    """The answer about one server group. Only `name` is set until `RemoteGroup.refresh` has read the rest."""

    name: str
    status: str
    reason: str | None
    wanted: int
    replicas: int
    created_at: str
    settled: bool
    range: list[int] | None
    pinned: bool
    servers: list[ServerLine]
    spaces: list[SpaceAnswer]
    moves: list[MoveLine]
    counts: dict[str, float]
    events: list[Event]
    jobs: list[GroupJobAnswer]


class TokenAnswer(TypedDict, total=False):
    """The record of a client's token. Only the answer to the token's creation has `token`, the secret text."""

    id: str
    job: str | None
    name: str | None
    created_at: str
    expires_at: str | None
    revoked_at: str | None
    token: str
