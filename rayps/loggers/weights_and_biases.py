"""Log a run to Weights & Biases, or to a folder from which `wandb sync` sends it later."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayps_client.errors import ConfigError
from rayps_client.values import JsonObject, Keywords

from rayps.core.job.records import Event, OutcomeRecord
from rayps.loggers.logger import Logger, needed, params_of
from rayps.workload.callback import RunView

MODES = ("offline", "online")


class WandB(Logger):
    """Logs to the project `project` of Weights & Biases.

    `mode` is "offline" (the default: files below `folder`, which `wandb sync` sends later) or "online" (needs an
    account). Parameters are the run's config, numbers have the step `round`, and the newest event of each kind is in
    the summary as "events/<kind>". A run that resumes from a checkpoint has the same id, and W&B continues the run.
    Needs `pip install 'rayps[wandb]'`.

    Example:
        rayps.train(work, callbacks=[rayps.loggers.WandB("digits", mode="offline")])
    """

    def __init__(
        self,
        project: str,
        mode: str = "offline",
        *,
        folder: str | Path | None = None,
        name: str | None = None,
        every: int = 1,
    ) -> None:
        """Prepare to log every `every`-th round. Raises ConfigError if the mode or the installation is wrong."""
        super().__init__(every)
        if mode not in MODES:
            raise ConfigError(f"mode is {mode!r}: give one of {', '.join(MODES)}", field="mode")
        self.project, self.mode, self.folder, self.name = project, mode, folder, name
        self.run_id: str | None = None
        self._wandb = needed("wandb", "wandb")
        self._run: Any = None

    def on_start(self, run: RunView) -> None:
        """Begin the W&B run, or continue that of the checkpoint. A failure is a warning."""
        if self.folder is not None:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
        self._attempt(run, lambda: self._begin(run))

    def _begin(self, run: RunView) -> None:
        self._run = self._wandb.init(
            project=self.project,
            mode=self.mode,
            dir=None if self.folder is None else str(self.folder),
            name=self.name or run.name,
            id=self.run_id,
            resume="allow" if self.mode == "online" else None,
            config=params_of(run),
            reinit="create_new",
            settings=self._wandb.Settings(silent=True, console="off"),
        )
        self.run_id = self._run.id
        self._run.define_metric("round")
        self._run.define_metric("*", step_metric="round")

    def write_numbers(self, numbers: Mapping[str, float], round: int) -> None:
        """Log numbers with their round."""
        if self._run is not None:
            self._run.log({**numbers, "round": round})

    def write_event(self, event: Event, round: int) -> None:
        """Set the summary's entry of the event's kind."""
        if self._run is not None:
            self._run.summary[f"events/{event['kind']}"] = f"round {round}: {event['message']}"

    def close(self, outcome: OutcomeRecord) -> None:
        """End the W&B run."""
        if self._run is not None:
            self._run.summary["outcome"] = f"{outcome['status']}: {outcome['message']}"
            self._run.finish(exit_code=0 if outcome["status"] == "SUCCEEDED" else 1)

    def state_dict(self) -> JsonObject:
        """Return the id of the W&B run."""
        return {"run_id": self.run_id}

    def load_state_dict(self, state: Keywords) -> None:
        """Continue the W&B run of the checkpoint."""
        self.run_id = state["run_id"]
