"""Log a run to an MLflow server."""

from __future__ import annotations

import os
import time
import uuid
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayps.core.records import Event, OutcomeRecord
from rayps.core.values import JsonObject, Keywords
from rayps.loggers.background import Background
from rayps.loggers.logger import Logger, needed, params_of
from rayps.workload.callback import RunView

CLOSE_SECONDS = 60.0  # the longest wait, in seconds, at the end of a run for what is still to be sent
_MOST_METRICS = 1000  # MLflow takes at most so many metrics in one request
_KEY = "rayps.key"
_ENDS = {"SUCCEEDED": "FINISHED", "STOPPED": "KILLED"}


class MLflow(Logger):
    """Logs to an MLflow server: parameters, metrics by round, events as tags "rayps.<kind>", checkpoints if asked.

    `tracking_uri` is as in `mlflow.set_tracking_uri`; None takes MLflow's own setting (MLFLOW_TRACKING_URI).
    `artifacts` sends each new checkpoint, which needs a server that stores artifacts. A run that resumes from a
    checkpoint continues the same MLflow run. Everything is sent in a thread: a slow or lost server delays no round,
    and becomes a warning event. Needs `pip install 'rayps[mlflow]'`.

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

    def on_start(self, run: RunView) -> None:
        """Start the thread, which creates the MLflow run or continues that of the checkpoint."""
        self._background = Background("rayps-mlflow")
        params, name = params_of(run), self.name or run.name
        self._attempt(run, lambda: self._send(lambda: self._begin(name, params)))

    def on_checkpoint(self, run: RunView, path: Path) -> None:
        """Send the checkpoint if this was asked for."""
        if self.artifacts:
            files = f"checkpoints/{path.name}"
            self._attempt(run, lambda: self._send(lambda: self._client.log_artifacts(self._id(), str(path), files)))

    def write_numbers(self, numbers: Mapping[str, float], round: int) -> None:
        """Send metrics of step `round`. What waits is sent in one request."""
        now = int(time.time() * 1000)
        self._metrics.extend(self._entities.Metric(name, value, now, round) for name, value in numbers.items())
        self._send(self._flush)

    def _flush(self) -> None:
        run_id = self._id()
        while self._metrics:
            several = [self._metrics.popleft() for _ in range(min(len(self._metrics), _MOST_METRICS))]
            self._client.log_batch(run_id, metrics=several)

    def write_event(self, event: Event, round: int) -> None:
        """Set the tag of the event's kind to the newest message of this kind."""
        message = f"round {round}: {event['message']}"[:5000]
        self._send(lambda: self._client.set_tag(self._id(), f"rayps.{event['kind']}", message))

    def close(self, outcome: OutcomeRecord) -> None:
        """Send the outcome, and wait until all is sent. Raises TimeoutError if this takes too long."""
        if self._background is None:
            return
        tags = {name: outcome.get(name) for name in ("message", "checkpoint", "best")}
        for name, value in tags.items():
            if value:
                self._send(lambda name=name, value=value: self._client.set_tag(self._id(), f"rayps.{name}", str(value)))
        status = _ENDS.get(str(outcome["status"]), "FAILED")
        self._send(lambda: self._client.set_terminated(self._id(), status))
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

    def _id(self) -> str:
        if self.run_id is None:
            raise ConnectionError("the MLflow run could not be created")
        return self.run_id

    def _begin(self, name: str, params: Mapping[str, str | int | float]) -> None:
        """Create the MLflow run, or continue it. Called in the thread."""
        self._client = self._tracking.MlflowClient(tracking_uri=self.tracking_uri)
        found = self._client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(self.experiment)
        runs = [] if found is None else self._client.search_runs([experiment], f"tags.`{_KEY}` = '{self.key}'")
        if runs:
            self._client.update_run(runs[0].info.run_id, status="RUNNING")
            self.run_id = runs[0].info.run_id
            return
        run_id = self._client.create_run(experiment, tags={_KEY: self.key}, run_name=name).info.run_id
        values = [self._entities.Param(key, str(value)[:6000]) for key, value in params.items()]
        self._client.log_batch(run_id, params=values)
        self.run_id = run_id
