"""The base class of callbacks, which a job calls at its start, rounds, evaluations and checkpoints, and at its end.

Callbacks run in the process of the driver, never in a worker: see `rayps.runtime.results.callbacks`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Protocol

from rayps_client.values import JsonObject, Keywords

from rayps.core.job.records import Event, OutcomeRecord, Point
from rayps.core.urls import Location


class RunView(Protocol):
    """A run as a callback uses it."""

    @property
    def name(self) -> str:
        """The name of the job."""

    @property
    def round(self) -> int:
        """The number of rounds that were complete at the moment of which the callback is told."""

    @property
    def epoch(self) -> int:
        """The epoch of that moment, counted from 0."""

    @property
    def no_value(self) -> Collection[str]:
        """The metrics of the evaluation of which the callback is told that have no value: their weights sum to 0."""

    @property
    def params(self) -> Mapping[str, object]:
        """All parameters of the workload by name, those with default values too, as JSON data."""

    @property
    def job(self) -> Mapping[str, object]:
        """The job's workload, strategy, number of workers, epochs, steps and seed, by name."""

    @property
    def events(self) -> Sequence[Event]:
        """The events of the run so far."""

    @property
    def folder(self) -> Location | None:
        """The folder for checkpoints, or its URL as text; None if the run saves none."""

    def stop(self, reason: str) -> None:
        """End the run soon, with status SUCCEEDED, a last evaluation, a result and, with a folder, a checkpoint."""

    def log(self, **numbers: float) -> None:
        """Add named numbers to the round or the evaluation of which the callback is told, else to the next round.

        They stand in the history and on the page. Raises ConfigError if a name is that of a standard metric.
        """

    def warn(self, message: str) -> None:
        """Add a warning to the job's events."""

    def keep(self, round: int, name: str, other: Location | None = None) -> Location | None:
        """Keep the checkpoint of `round` in the subfolder `name`, in place of what was kept there before.

        If the run's folder has no checkpoint of this round, that at the path `other` is copied. Return the path of what
        is kept, or None if there is no checkpoint of this round any more. The job shows the path as its best
        checkpoint. Raises CheckpointError if the checkpoint cannot be linked or copied.
        """


class Callback:
    """Something that a job calls as it goes on; the base class of your own callbacks, whose methods do nothing.

    Give callbacks to `rayps.train(callbacks=[...])`, or return them from `Workload.callbacks()`, so that jobs of the
    service have them. All methods run in the driver's process, one at a time, each under the time limit of user code.
    Training continues while they run. An exception ends the run with a WorkloadError that names the class and the
    method. Each round and each evaluation is reported once, also if a recovery repeats them.

    `state_dict` and `load_state_dict` save and restore a callback with each checkpoint.

    Example:
        class StopAt(rayps.Callback):
            def on_round(self, run, point):
                if point["loss"] is not None and point["loss"] < 0.01:
                    run.stop("the loss is below 0.01")

        rayps.train(work, workers=2, epochs=50, callbacks=[StopAt()])
    """

    # whether a checkpoint of every evaluated state is saved; workers then wait until the driver has taken it
    checkpoint_each_evaluation: ClassVar[bool] = False

    def on_start(self, run: RunView) -> None:
        """Receive the run before its first round, after `load_state_dict` if the run resumes."""

    def on_round(self, run: RunView, point: Point) -> None:
        """Receive the metrics of a round that all workers have completed: `loss`, `samples`, `seconds`, ..."""

    def on_return(self, run: RunView, round: int) -> None:
        """Receive that the run has returned to the state after `round` rounds, and repeats the rounds from there.

        A callback that has this method then receives the repeated rounds again, in their last form; others do not.
        """

    def on_evaluation(self, run: RunView, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of an evaluation of the parameters after `run.round` rounds."""

    def on_checkpoint(self, run: RunView, path: Location) -> None:
        """Receive the path or URL of a new checkpoint, of the parameters after `run.round` rounds."""

    def on_end(self, run: RunView, outcome: OutcomeRecord) -> None:
        """Receive the outcome of the run, however it ended: `status`, `message`, `metrics`, `checkpoint`, `best`."""

    def state_dict(self) -> JsonObject:
        """Return the state of this callback as JSON-ready data, for a checkpoint."""
        return {}

    def load_state_dict(self, state: Keywords) -> None:
        """Restore the state that `state_dict` returned, in a run that resumes."""
