"""Records that a run leaves behind: metric points, events, and what `progress.json` and `outcome.json` hold.

A point or an event has the common fields, and fields that depend on its kind and on the strategy. All other records
have a fixed set of fields. The fields are the keys of the JSON data.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NotRequired, TypeAlias, TypedDict

from rayps_client.values import JsonObject

Point: TypeAlias = dict[str, Any]  # `kind`, `round`, metrics by name; `rank` if the point belongs to one rank
Event: TypeAlias = dict[str, Any]  # `kind`, `message` and the facts of this kind; in the journal also `seq` and `time`
RingTable: TypeAlias = dict[str, Any]  # the algorithms that a ring chose, so that a resumed run computes the same bits
GroupFacts: TypeAlias = dict[str, Any]  # the state of a server group's manager or of a job's space


# the fields of each round's point; all other numbers of a point were added by the user's loss, a loop or the strategy
_SECONDS = ("seconds", "compute", "data", "data_share", "wait", "move", "pull", "pull_hidden")
GROWING_FIELDS = frozenset(["epsilon", "releases"])  # a private job's, which never fall from round to round
ROUND_FIELDS = frozenset(
    ["kind", "round", "epoch", "time", "generation", "strategy", "loss", "samples", "bytes", "staleness", *_SECONDS]
)


class ActorSite(TypedDict):
    """Where an actor runs."""

    host: str | None
    pid: int | None


class WorkerLine(ActorSite):
    """A worker's entry in `progress.json`. The shares of the worker's time are known after its first round."""

    rank: int
    status: str
    round: int
    compute: NotRequired[float]  # shares of the time: computing, waiting for peers, sending and receiving
    wait: NotRequired[float]
    move: NotRequired[float]
    data: NotRequired[float]  # waiting for batches
    samples_per_second: NotRequired[float]
    part: NotRequired[str]  # the worker's coordinates on the grid as text, if a replica is several workers


class ShardLine(ActorSite):
    """A shard's entry in `progress.json`, if the job has its own servers."""

    index: int
    lo: NotRequired[int]
    hi: NotRequired[int]
    version: NotRequired[int]
    bytes: NotRequired[int]
    ages: NotRequired[dict[str, int]]  # number of pushes by age: versions since the parameters they were computed from


class ProgressRecord(TypedDict, total=False):
    """The content of `progress.json`: the current state of a run."""

    time: float
    status: str
    message: str
    generation: int
    failures: int
    strategy: str
    wrapped: list[JsonObject]  # of a loop of the user's own: the strategy of each `rayps.wrap`, in wire form
    params: JsonObject  # all parameters of the workload, by name, those with default values too
    loss: float | None
    metrics: dict[str, float]  # metrics of the newest evaluation
    staleness: dict[str, int]
    bound: int | None  # the staleness bound now, if it moves; None is no bound
    workers: list[WorkerLine]
    allowed: int  # of an elastic job: the number of workers that it was told that it may have
    wanted: int  # of an elastic job: the most workers that it wants, because more would not pay
    shards: list[ShardLine]
    server_group: GroupFacts
    round: int
    rounds: int | None  # None if the data has no length
    epoch: int
    epochs: int | None  # None if the data has no length and the run ends with a number of rounds
    samples_per_second: float | None
    eta_seconds: float | None
    best: str  # the checkpoint of the best evaluation, if a callback keeps one
    account: AccountRecord


class AccountRecord(TypedDict):
    """Where the time of a job's workers and servers went so far: see `rayps.core.time.time_account`."""

    goodput: float | None  # the useful share of the workers' time; None before their first report
    seconds: dict[str, float]  # of all workers, by part
    members: dict[str, dict[str, float]]  # seconds by part of each worker and server
    verdict: str  # what costs most of the time, in one sentence: see `rayps.core.time.time_verdict`
    guilty: list[str]  # the members that cause it


class OutcomeRecord(TypedDict, total=False):
    """The content of `outcome.json`: how a run ended."""

    status: str
    message: str
    metrics: dict[str, float] | None
    finished_at: float
    checkpoint: str | None
    best: str | None  # the checkpoint of the best evaluation, if a callback kept one
    error: str | None  # the name of the error's class


class AttemptRecord(TypedDict, total=False):
    """The content of `launch.json` and `driver.json`: the process that runs an attempt of a job."""

    attempt: int
    protocol: int
    pid: int
    started: int  # start time of the process, as the operating system counts it
    crash: str | None
    moved: str  # why the process ends on purpose, if a notice announced it


def read_json(path: Path) -> Any:
    """Read a JSON object from a file that its writer replaces atomically.

    Return None if there is no file, or if it holds no JSON object. The caller declares the type of the record.
    """
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
