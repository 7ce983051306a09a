"""Log a run to an MLflow server."""

from __future__ import annotations

import os
import time
import uuid
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayps_client.values import JsonObject, Keywords

from rayps.core.job.records import Event, OutcomeRecord
from rayps.core.urls import Location
from rayps.loggers.background import Background
from rayps.loggers.logger import Logger, needed, params_of
from rayps.workload.callback import RunView

CLOSE_SECONDS = 60.0  # the longest wait, in seconds, at the end of a run for what is still to be sent
FIRST_RETRY_SECONDS = 1.0  # the wait before the MLflow run is created again; it doubles with each failure
MOST_RETRY_SECONDS = 60.0  # the longest such wait
_MOST_METRICS = 1000  # MLflow takes at most so many metrics in one request
_MOST_PARAMS = 100  # and so many parameters
_KEY = "rayps.key"
_ENDS = {"SUCCEEDED": "FINISHED", "STOPPED": "KILLED"}


class MLflow(Logger):
    """Logs to an MLflow server: parameters, metrics by round, events as tags "rayps.<kind>", checkpoints if asked.

    `tracking_uri` is as in `mlflow.set_tracking_uri`; None takes MLflow's own setting (MLFLOW_TRACKING_URI).
    `artifacts` sends each new checkpoint, which needs a server that stores artifacts. A run that resumes from a
    checkpoint continues the same MLflow run. Everything is sent in a thread: a slow or lost server delays no round,
    and becomes a warning event. If the MLflow run cannot be created, this is tried again with later entries, after 1 s
    and then at growing intervals of up to a minute; metrics and tags wait until it succeeds.
    Needs `pip install 'rayps[mlflow]'`.

    Example:
        rayps.train(work, callbacks=[rayps.loggers.MLflow("http://127.0.0.1:5000", "digits")])
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str = "rayps",
        *,
        name: str | None = None,
        artifacts: bool = False,
        every: int = 1,
    ) -> None:
        """Prepare to log every `every`-th round. Raises ConfigError if the extra is not installed."""
        super().__init__(every)
        self.tracking_uri, self.experiment, self.name, self.artifacts = tracking_uri, experiment, name, artifacts
        self.run_id: str | None = None  # of the MLflow run, when it is known
        self.key = uuid.uuid4().hex  # a tag of the MLflow run, by which a run that resumes finds it
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # 7 retries take minutes
        self._tracking, self._entities = needed("mlflow.tracking", "mlflow"), needed("mlflow.entities", "mlflow")
        self._errors = needed("mlflow.exceptions", "mlflow")
        self._background: Background | None = None
        self._client: Any = None
        self._metrics: deque[Any] = deque(maxlen=100 * _MOST_METRICS)  # to be sent
        self._tags: dict[str, str] = {}  # to be sent
        self._params: dict[str, str | int | float] = {}
        self._run_name = ""
        self._failures, self._retry_at = 0, 0.0  # failures to create the MLflow run; when to try again

    def on_start(self, run: RunView) -> None:
        """Start the thread, which creates the MLflow run or continues that of the checkpoint."""
        self._background = Background("rayps-mlflow")
        self._params, self._run_name = params_of(run), self.name or run.name
        self.run_id, self._failures, self._retry_at = None, 0, 0.0
        self._attempt(run, lambda: self._send(self._flush))
        if self.artifacts and run.folder is not None and not isinstance(run.folder, Path):
            run.warn(f"checkpoints in {run.folder} are not sent to MLflow: artifacts are sent from local folders only")

    def on_checkpoint(self, run: RunView, path: Location) -> None:
        """Send the checkpoint if this was asked for, and if it is in a local folder."""
        if self.artifacts and isinstance(path, Path):
            self._attempt(run, lambda: self._send(lambda: self._send_checkpoint(path)))

    def write_numbers(self, numbers: Mapping[str, float], round: int) -> None:
        """Send metrics of step `round`. What waits is sent in one request."""
        now = int(time.time() * 1000)
        self._metrics.extend(self._entities.Metric(name, value, now, round) for name, value in numbers.items())
        self._send(self._flush)

    def write_event(self, event: Event, round: int) -> None:
        """Set the tag of the event's kind to the newest message of this kind."""
        self._tags[f"rayps.{event['kind']}"] = f"round {round}: {event['message']}"[:5000]
        self._send(self._flush)

    def close(self, outcome: OutcomeRecord) -> None:
        """Send the outcome, and wait until all is sent. Raises TimeoutError if this takes too long."""
        if self._background is None:
            return
        tags = {name: outcome.get(name) for name in ("message", "checkpoint", "best")}
        self._tags |= {f"rayps.{name}": str(value) for name, value in tags.items() if value}
        status = _ENDS.get(str(outcome["status"]), "FAILED")
        self._send(lambda: self._finish(status))
        self._background.close(CLOSE_SECONDS)

    def state_dict(self) -> JsonObject:
        """Return what names the MLflow run."""
        return {"key": self.key}

    def load_state_dict(self, state: Keywords) -> None:
        """Continue the MLflow run of the checkpoint."""
        self.key = state["key"]

    def _send(self, send: Any) -> None:
        assert self._background is not None, "on_start comes first"
        self._background.add(send)

    # ---- called in the thread

    def _flush(self) -> None:
        """Send the metrics and tags that wait, if there is an MLflow run."""
        run_id = self._created()
        if run_id is None:
            return
        while self._metrics:
            several = [self._metrics.popleft() for _ in range(min(len(self._metrics), _MOST_METRICS))]
            self._client.log_batch(run_id, metrics=several)
        while self._tags:
            self._client.set_tag(run_id, *self._tags.popitem())

    def _send_checkpoint(self, path: Path) -> None:
        run_id = self._created()
        if run_id is not None:
            self._client.log_artifacts(run_id, str(path), f"checkpoints/{path.name}")

    def _finish(self, status: str) -> None:
        self._retry_at = 0.0  # the last attempt
        self._flush()
        if self.run_id is not None:
            self._client.set_terminated(self.run_id, status)

    def _created(self) -> str | None:
        """Return the id of the MLflow run, which is created first. Return None if this fails again, or is not due yet.

        Raises the error of the first failure.
        """
        if self.run_id is None and time.monotonic() >= self._retry_at:
            try:
                self.run_id = self._begin()
            except Exception:
                self._retry_at = time.monotonic() + retry_seconds(self._failures)
                self._failures += 1
                if self._failures == 1:  # one warning for all attempts
                    raise
        return self.run_id

    def _begin(self) -> str:
        """Create the MLflow run, or continue it. Return its id."""
        self._client = self._tracking.MlflowClient(tracking_uri=self.tracking_uri)
        found = self._client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(self.experiment)
        runs = [] if found is None else self._client.search_runs([experiment], f"tags.`{_KEY}` = '{self.key}'")
        if runs:
            run = runs[0]
            self._client.update_run(run.info.run_id, status="RUNNING")
        else:
            run = self._client.create_run(experiment, tags={_KEY: self.key}, run_name=self._run_name)
        run_id: str = run.info.run_id
        if not run.data.params:  # an attempt may have failed after it had created the run
            values = [self._entities.Param(key, str(value)[:6000]) for key, value in self._params.items()]
            for at in range(0, len(values), _MOST_PARAMS):
                self._client.log_batch(run_id, params=values[at : at + _MOST_PARAMS])
        return run_id


def retry_seconds(failures: int) -> float:
    """Return the seconds to wait before the next attempt, after `failures` earlier failures and one more."""
    return min(FIRST_RETRY_SECONDS * 2.0 ** min(failures, 30), MOST_RETRY_SECONDS)
