"""Keep the checkpoint of the best evaluation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from rayps_client.errors import ConfigError
from rayps_client.values import JsonObject, Keywords

from rayps.core.urls import Location, location_of
from rayps.runtime.results.early_stopping import MetricWatch
from rayps.workload.callback import Callback, RunView

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


class BestCheckpoint(Callback):
    """Keeps the checkpoint of the best evaluation by one metric, beside the newest checkpoints.

    The checkpoint is kept in the subfolder `name` of the folder for checkpoints, until a better one replaces it. It is
    `result.best`, and `rayps.train(resume=...)` takes its path. If a run has several, each needs a name of its own;
    `result.best` is that of the first in the list (those given to `rayps.train` come before the workload's), and each
    has its checkpoint as `path`. `mode` and `min_delta` are those of `EarlyStopping`. With this callback a checkpoint
    of every evaluated state is saved, and workers that are more than one evaluation ahead wait until the driver has
    saved it. An evaluation without a value of the metric is never the best.

    Example:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            options = {"workers": 2, "checkpoint": folder}
            result = rayps.train(work, epochs=3, callbacks=[rayps.BestCheckpoint("loss")], **options)
            further = rayps.train(work, epochs=4, resume=result.best, **options)
    """

    checkpoint_each_evaluation: ClassVar[bool] = True

    def __init__(self, metric: str = "loss", mode: str = "auto", min_delta: float = 0.0, name: str = "best") -> None:
        """Prepare. Raises ConfigError if an argument is refused."""
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name.startswith("step-"):
            raise ConfigError(f"name is {name!r}: give the name of a folder, of letters, digits, - and _", field="name")
        self.watch, self.name = MetricWatch(metric, mode, min_delta, owner="BestCheckpoint"), name
        self.path: Location | None = None  # the best checkpoint
        self._due: int | None = None  # the round of the best evaluation, until its checkpoint is kept

    def on_start(self, run: RunView) -> None:
        """Keep the best checkpoint of the run that this one resumes. The driver refuses a run without a folder."""
        if self.watch.best is not None:
            self._keep(run, self.watch.round, self.path)

    def on_evaluation(self, run: RunView, metrics: Mapping[str, float]) -> None:
        """Keep the checkpoint of this evaluation if it is the best so far."""
        if self.watch.consider(run, metrics):
            self._due = run.round
            self._keep(run, run.round)

    def on_checkpoint(self, run: RunView, path: Location) -> None:
        """Keep this checkpoint if it is the first since the best evaluation: of its round if workers are in step."""
        if self._due is not None and run.round >= self._due:
            self._keep(run, run.round)

    def _keep(self, run: RunView, round: int, other: Location | None = None) -> None:
        found = run.keep(round, self.name, other)
        if found is not None:
            self.path, self._due = found, None

    def state_dict(self) -> JsonObject:
        """Return the best value, its round and its checkpoint."""
        path = None if self.path is None else str(self.path.absolute() if isinstance(self.path, Path) else self.path)
        return {"watch": self.watch.state(), "due": self._due, "path": path}

    def load_state_dict(self, state: Keywords) -> None:
        """Restore the best value, its round and its checkpoint."""
        self.watch.load(state["watch"])
        self._due = state["due"]
        self.path = None if state["path"] is None else location_of(state["path"])
