"""Records that a run leaves behind: metric points, events, and what `progress.json` and `outcome.json` hold.

Points and events are open: which fields they have beside the common ones depends on their kind and on the strategy. All
other records are closed. The fields are the keys of the JSON data.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NotRequired, TypeAlias, TypedDict

Point: TypeAlias = dict[str, Any]  # `kind`, `round`, a `rank` if it is of one rank, and numbers by the names of metrics
Event: TypeAlias = dict[str, Any]  # `kind` and `message`; facts of its kind; in the journal `seq` and `time` too
RingTable: TypeAlias = dict[str, Any]  # a ring's choices, with which a resumed run gives the same bits
GroupFacts: TypeAlias = dict[str, Any]  # the state of a server group's manager or of a job's space


class ActorSite(TypedDict):
    """Where an actor runs."""

    host: str | None
    pid: int | None


class WorkerLine(ActorSite):
    """A worker, as progress shows it. The shares of its time are known after its first round."""

    rank: int
    status: str
    round: int
    compute: NotRequired[float]  # shares of the time
    wait: NotRequired[float]
    move: NotRequired[float]
    samples_per_second: NotRequired[float]
    part: NotRequired[str]  # the part of the model, if a replica is several workers


class ShardLine(ActorSite):
    """A shard of fixed servers, as progress shows it."""

    index: int
    lo: NotRequired[int]
    hi: NotRequired[int]
    version: NotRequired[int]
    bytes: NotRequired[int]
    ages: NotRequired[dict[str, int]]  # number of pushes, by the age of their parameters in versions


class ProgressRecord(TypedDict, total=False):
    """The state of a run, as `progress.json` holds it."""

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
    """The end of a run, as `outcome.json` holds it."""

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
    """Read a JSON object from a file that is replaced as a whole; None if there is no file or no JSON object in it.

    The caller declares the type of the record.
    """
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
