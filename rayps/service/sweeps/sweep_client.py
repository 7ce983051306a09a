"""A sweep as `Client.sweep` returns it: its jobs, the table that compares them, and the best of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, Self, TypeVar

from rayps_client.errors import ConfigError, NotFound
from rayps_client.values import Json, JsonObject

from rayps.service.rest_answers import JobAnswer, SweepAnswer
from rayps.service.sweeps.comparison import NO_SUMMARY, Comparison, find_best_row, read_cell


class SweepMember(Protocol):
    """A job of a sweep, as `rayps.service.client.Job` is."""

    data: JobAnswer

    @property
    def id(self) -> str:
        """The job's id."""
        ...

    def wait(self, timeout: float | None = None, pause: float = 0.5) -> object:
        """Wait until the job has ended."""
        ...

    def refresh(self) -> Self:
        """Read the service's newest answer about the job."""
        ...


JobT = TypeVar("JobT", bound=SweepMember)


class Sweep(Generic[JobT]):
    """A named group of jobs. `jobs` are in the order of their values, those of the last name varying fastest.

    Example:
        sweep = client.sweep({"workload": "digits.py:Digits", "epochs": 3}, lr=[0.1, 0.3], seed=range(3))
        sweep.wait().best("loss")
    """

    def __init__(self, call: Callable[..., Any], name: str, jobs: Sequence[JobT]) -> None:
        self._call, self.name, self.jobs = call, name, list(jobs)

    def __repr__(self) -> str:
        return f"Sweep({self.name!r}, {len(self.jobs)} jobs)"

    def wait(self, timeout: float | None = None) -> Self:
        """Wait until all jobs have ended, successfully or not.

        Raises:
            TimeoutError: a job had not ended within `timeout` seconds.
            Unreachable: the service did not answer for a minute.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for job in self.jobs:
            job.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return self

    def stop(self) -> Self:
        """Request all jobs that have not ended to stop. Raises Conflict if all have ended."""
        self._take(self._call("POST", f"/api/v1/sweeps/{self.name}/stop"))
        return self

    def _take(self, found: SweepAnswer) -> None:
        """Take the newest data of the jobs from an answer about the sweep. A job that was deleted keeps its own."""
        newest = {data["id"]: data for data in found["jobs"]}
        for job in self.jobs:
            job.data = newest.get(job.id, job.data)

    def compare(self, points: int = 200) -> Comparison:
        """Return the comparison of the jobs, with curves of at most `points` points."""
        found: Comparison = self._call("GET", "/api/v1/comparison", params={"sweep": self.name, "max_points": points})
        return found

    def table(self) -> list[JsonObject]:
        """Return one dict for each job: id, name, status, the values that differ, rounds, seconds, metrics.

        A metric has its last value under its name, and its best value under "best NAME" (None if the name does not say
        whether that is the lowest or the highest). `rayps.service.sweeps.comparison.TableColumn` says how equal names
        are told apart. Give the list to `pyarrow.Table.from_pylist` or `pandas.DataFrame`.
        """
        return table_of(self.compare(2))

    def best(self, metric: str, mode: str = "auto") -> JobT:
        """Return the job that ended with the best value of a metric.

        Only jobs that succeeded count, and those that were stopped and have a result. `mode` is "min" if the lowest
        value is the best, "max" if it is the highest, or "auto": the lowest of a metric whose name has a word of a loss
        or an error (loss, error, nll, mse, ...), else the highest of one with a word such as accuracy, f1 or score.

        Raises:
            NotFound: no job has a value of this metric, or none that has one has ended with a result.
            ConfigError: `mode` is invalid, or "auto" and the metric's name does not say which value is the best.
        """
        found = self.compare(2)
        if not any(row["metrics"].get(metric, NO_SUMMARY)["last"] is not None for row in found["rows"]):
            known = ", ".join(found["metrics"]) or "none yet"
            raise NotFound(
                f"no job of the sweep {self.name!r} has the metric {metric!r}: there are {known}", status=404
            )
        row = find_best_row(found, metric, mode)
        if row is None:
            raise NotFound(
                f"no job of the sweep {self.name!r} has ended with a result that has the metric {metric!r}: wait for "
                "the jobs (sweep.wait()), or see why they ended (sweep.table())",
                status=404,
            )
        return next(job for job in self.jobs if job.id == row["id"]).refresh()


def table_of(found: Comparison) -> list[JsonObject]:
    """Return the rows of a comparison as flat dicts, all with the same keys."""
    return [{column["name"]: read_cell(row, column) for column in found["columns"]} for row in found["rows"]]


def listed(over: Mapping[str, Iterable[Json]]) -> dict[str, list[Json]]:
    """Return the values of each name as a list. Raises ConfigError if they are text or no collection."""
    found: dict[str, list[Json]] = {}
    for name, values in over.items():
        if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
            raise ConfigError(
                f"{name} is {values!r}: a sweep needs several values, e.g. {name}=[{values!r}, ...]", field="over"
            )
        found[name] = list(values)
    return found
