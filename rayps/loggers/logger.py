"""The base class of loggers: what of a run is logged under which name, and what happens if the other side fails."""

from __future__ import annotations

import importlib
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from rayps_client.errors import ConfigError, first_line

from rayps.core.job.records import Event, OutcomeRecord, Point
from rayps.core.job.returned_rounds import RETURNED
from rayps.core.strategy.text import write_strategy
from rayps.workload.callback import Callback, RunView

# events that are not logged: what they say is logged in another way, or once in every run
_OMITTED = ("checkpoint", "phase", "placed", "choice", "finished", "costs", "divided")
_OF_RUN = ("kind", "round", "time", "generation")  # numbers of a round that are no metrics


def needed(module: str, extra: str) -> ModuleType:
    """Import an optional package. Raises ConfigError with the extra's name if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"this logger needs the package {module.partition('.')[0]!r} ({error}): pip install 'rayps[{extra}]'",
            field="callbacks",
        ) from error


class Logger(Callback):
    """Logs the parameters of a run, numbers of rounds and evaluations, and events, through three methods of a subclass.

    If a call of the other side fails after the start, the run gets one warning and continues, and what could not be
    sent is lost.
    """

    def __init__(self, every: int = 1) -> None:
        """Prepare to log every `every`-th round, and all evaluations. Raises ConfigError if `every` is refused."""
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(f"every is {every!r}: give a number of rounds of at least 1", field="every")
        self.every = every
        self._events = 0  # events of the run that were considered
        self._failed = False

    @abstractmethod
    def write_numbers(self, numbers: Mapping[str, float], round: int) -> None:
        """Log named numbers of a step `round`."""

    @abstractmethod
    def write_event(self, event: Event, round: int) -> None:
        """Log an event of the run."""

    @abstractmethod
    def close(self, outcome: OutcomeRecord) -> None:
        """End the log of the run."""

    def on_round(self, run: RunView, point: Point) -> None:
        """Log the numbers of a round under "train/<name>", at step `run.round`."""
        if (point["round"] + 1) % self.every == 0:
            numbers = {f"train/{name}": value for name, value in numbers_of(point).items()}
            self._attempt(run, lambda: self.write_numbers(numbers, point["round"] + 1))
        self._write_events(run)

    def on_return(self, run: RunView, round: int) -> None:
        """Log that the numbers of steps after `round` do not count: the run repeats these rounds."""
        self._attempt(run, lambda: self.write_return(round))

    def write_return(self, round: int) -> None:
        """Say that the numbers of steps after `round` do not count, before they are logged again."""
        message = f"returned to round {round}: the numbers of later rounds before this do not count"
        self.write_event({"kind": RETURNED, "message": message}, round)

    def on_evaluation(self, run: RunView, metrics: Mapping[str, float]) -> None:
        """Log the metrics of an evaluation under "evaluation/<name>", at step `run.round`."""
        numbers = {f"evaluation/{name}": value for name, value in numbers_of(metrics).items()}
        numbers["epoch"] = run.epoch
        self._attempt(run, lambda: self.write_numbers(numbers, run.round))
        self._write_events(run)

    def on_end(self, run: RunView, outcome: OutcomeRecord) -> None:
        """Log the last events, and end the log."""
        self._write_events(run)
        self._attempt(run, lambda: self.close(outcome))

    def _write_events(self, run: RunView) -> None:
        new = run.events[self._events :]
        self._events += len(new)
        for event in new:
            if event["kind"] not in _OMITTED:
                self._attempt(run, partial(self.write_event, event, run.round))

    def _attempt(self, run: RunView, call: Callable[[], Any]) -> None:
        """Call the other side. A failure becomes a warning, once for each outage."""
        try:
            call()
        except Exception as error:  # the packages raise errors of many classes, also for a lost connection
            if not self._failed:
                self._failed = True
                run.warn(f"{type(self).__name__} cannot log ({type(error).__name__}: {first_line(error)})")
                self._events += 1  # its own warning
        else:
            self._failed = False


def numbers_of(point: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a point that are metrics. `staleness` becomes its largest lead."""
    found = {}
    for name, value in point.items():
        if name == "staleness" and isinstance(value, dict):
            value = max((int(lead) for lead in value), default=0)
        if name not in _OF_RUN and isinstance(value, (int, float)) and math.isfinite(value):
            found[name] = float(value)
    return found


def params_of(run: RunView) -> dict[str, str | int | float]:
    """Return the parameters of a job: all of its workload, and `job/<name>` for its strategy, workers, seed, ..."""
    found: dict[str, str | int | float] = {}
    job = {f"job/{name}": value for name, value in run.job.items() if value is not None}
    for name, value in {**run.params, **job}.items():
        if name == "job/strategy" and isinstance(value, dict | list | str):
            value = write_strategy(value)
        found[name] = value if isinstance(value, (int, float)) else str(value)
    return found
