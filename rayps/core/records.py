"""Records that a run leaves behind: metric points, events, and what `progress.json` and `outcome.json` hold.

A point and an event are open: what they hold beside their common fields depends on their kind and on the strategy. All
others are closed. The fields are the keys of the JSON data.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NotRequired, TypeAlias, TypedDict

Point: TypeAlias = dict[str, Any]  # `kind`, `round`, `rank` or none of it, and numbers by the names of metrics
Event: TypeAlias = dict[str, Any]  # `kind` and `message`; `seq` and `time` once it is filed; and facts of its kind
RingTable: TypeAlias = dict[str, Any]  # what a ring chose, for the same bits again; of several rings by their labels
GroupFacts: TypeAlias = dict[str, Any]  # what a server group's manager, or a job's space on it, says of itself


class ActorSite(TypedDict):
    """Where an actor runs."""

    host: str | None
    pid: int | None


class WorkerLine(ActorSite):
    """A worker, as progress shows it. The shares of its time are known once it has made a round."""

    rank: int
    status: str
    round: int
    compute: NotRequired[float]  # shares of the time
    wait: NotRequired[float]
    move: NotRequired[float]
    samples_per_second: NotRequired[float]
    part: NotRequired[str]  # of the model, where a replica is several workers


class ShardLine(ActorSite):
    """A shard of fixed servers, as progress shows it."""

    index: int
    lo: NotRequired[int]
    hi: NotRequired[int]
    version: NotRequired[int]
    bytes: NotRequired[int]
    ages: NotRequired[dict[str, int]]  # pushes by how many versions old their parameters were


class ProgressRecord(TypedDict, total=False):
    """Where a run stands."""

    time: float
    status: str
    message: str
    generation: int
    failures: int
    strategy: str
    loss: float | None
    metrics: dict[str, float]  # of the newest evaluation
    staleness: dict[str, int]
    workers: list[WorkerLine]
    shards: list[ShardLine]
    server_group: GroupFacts
    round: int
    rounds: int
    epoch: int
    epochs: int
    samples_per_second: float | None
    eta_seconds: float | None


class OutcomeRecord(TypedDict, total=False):
    """How a run ended."""

    status: str
    message: str
    metrics: dict[str, float] | None
    finished_at: float
    checkpoint: str | None
    error: str | None  # the name of the error's class


class AttemptRecord(TypedDict, total=False):
    """The process that runs an attempt: what `launch.json` and `driver.json` hold."""

    attempt: int
    protocol: int
    pid: int
    started: int  # when the process began, as the system counts it
    crash: str | None


def read_json(path: Path) -> Any:
    """Read a JSON object from a file that is replaced as a whole; None if there is none, or it is no JSON object.

    The caller names the type of the record.
    """
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
