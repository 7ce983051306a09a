"""Log a run as TensorBoard event files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayps.core.job.records import Event, OutcomeRecord
from rayps.loggers.logger import Logger, needed, params_of
from rayps.workload.callback import RunView


class TensorBoard(Logger):
    """Writes event files for TensorBoard below `folder`, in a subfolder with the name of the run.

    Numbers of rounds are scalars "train/<name>", evaluations "evaluation/<name>", both by round; parameters and events
    are texts. A run that resumes continues its subfolder: TensorBoard hides what was written for later rounds. The
    subfolder is `name` if that is given; without it, the name of the job, which is new in each `rayps.train` without
    `name`. Needs `pip install 'rayps[tensorboard]'`.

    Example:
        rayps.train(work, epochs=10, callbacks=[rayps.loggers.TensorBoard("runs", name="first")])
    """

    def __init__(self, folder: str | Path, *, name: str | None = None, every: int = 1) -> None:
        """Prepare to log every `every`-th round. Raises ConfigError if the extra is not installed."""
        super().__init__(every)
        self.folder, self.name = Path(folder), name
        self._make = needed("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._records: Any = needed("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._writer: Any = None

    def on_start(self, run: RunView) -> None:
        """Open the event file."""
        purge = run.round + 1 if run.round else None
        self._writer = self._make(str(self.folder / (self.name or run.name)), purge_step=purge)
        for name, value in params_of(run).items():
            self._writer.add_text(f"params/{name}", str(value), run.round)

    def write_return(self, round: int) -> None:
        """Let TensorBoard hide what was written for later steps, and say why."""
        session = self._records.SessionLog(status=self._records.SessionLog.START)
        self._writer.file_writer.add_event(self._records.Event(step=round + 1, session_log=session))
        super().write_return(round)

    def write_numbers(self, numbers: Mapping[str, float], round: int) -> None:
        """Write scalars at step `round`."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, round)

    def write_event(self, event: Event, round: int) -> None:
        """Write an event as a text."""
        self._writer.add_text(f"events/{event['kind']}", event["message"], round)

    def close(self, outcome: OutcomeRecord) -> None:
        """Write the outcome as a text, and close the file."""
        self._writer.add_text("outcome", f"{outcome['status']}: {outcome['message']}")
        self._writer.close()
