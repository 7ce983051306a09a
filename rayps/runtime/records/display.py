"""Show a run's progress: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar

from rayps.core.job.records import Event, ProgressRecord

LINE_SECONDS = 5.0  # seconds between two lines of progress, if there is no bar


class Display:
    """Shows progress and events on a stream. The default is stderr, so that stdout can be piped."""

    def __init__(self, stream: TextIO | None = None, *, bar: bool = True) -> None:
        """Prepare the display. `bar`: whether to show the progress as a bar if the stream is a terminal."""
        self._console = Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._line_at = 0.0
        if bar and self._console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[facts]}"),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task("starting", total=None, facts="")
            self._bar.start()

    def progress(self, progress: ProgressRecord) -> None:
        """Show the progress as a bar or as a line."""
        if self._bar is not None:
            self._bar.update(
                self._task,
                completed=progress.get("round", 0),
                total=progress.get("rounds"),
                description=_describe_place(progress),
                facts=_describe_facts(progress),
            )
        elif progress.get("round") and (_has_ended(progress) or time.monotonic() - self._line_at >= LINE_SECONDS):
            self._line_at = time.monotonic()
            of = f"/{progress['rounds']}" if progress.get("rounds") else ""
            self._console.print(
                f"{_describe_place(progress)}  round {progress['round']}{of}  {_describe_facts(progress)}"
            )

    def event(self, event: Event) -> None:
        """Show an event, unless the result or the error of the run shows it."""
        if event["kind"] in ("checkpoint", "finished", "failed", "stopped", "dry_run"):
            return
        style = "yellow" if event["kind"] in ("warning", "restarted", "replaced") else "dim"
        self._console.print(f"{event['kind']}: {event['message']}", style=style, markup=False)

    def lines(self, lines: list[tuple[float, str, str]]) -> None:
        """Show the lines that the workers printed or logged."""
        for _, who, text in lines:
            self._console.print(f"{who}: {text}", style="dim", markup=False, emoji=False)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _has_ended(progress: ProgressRecord) -> bool:
    return progress["status"] in ("SUCCEEDED", "FAILED", "STOPPED")


def _describe_place(progress: ProgressRecord) -> str:
    status = str(progress["status"]).lower()
    if status != "running" or "epochs" not in progress:
        return status
    of = f"/{progress['epochs']}" if progress["epochs"] else ""
    return f"epoch {progress['epoch'] + 1}{of}"


def _describe_facts(progress: ProgressRecord) -> str:
    found = []
    if progress.get("loss") is not None:
        found.append(f"batch loss {progress['loss']:.4f}")
    measured = [f"{name} {value:.4f}" for name, value in (progress.get("metrics") or {}).items()]
    if measured:
        found.append(f"evaluation: {' '.join(measured)}")
    if progress.get("samples_per_second"):
        found.append(f"{progress['samples_per_second']:,.0f} samples/s")
    if progress.get("eta_seconds") is not None and str(progress["status"]) == "RUNNING":
        found.append(f"{progress['eta_seconds']:.0f} s left")
    return "  ".join(found)
