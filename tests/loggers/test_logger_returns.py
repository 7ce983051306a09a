"""Loggers cannot take a point back: they are told of a return, and show each round once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_returned_rounds import RUNS, points_of, told, truth

import rayps
from rayps.core.job.records import Point
from rayps.core.job.returned_rounds import RETURNED
from rayps.loggers.logger import Logger
from rayps.runtime.results.callbacks import CallbackRunner


class Kept(Logger):
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[Point] = []

    def write_numbers(self, numbers: Any, round: int) -> None:
        if "train/loss" in numbers:
            self.points.append({"kind": "round", "round": round - 1, "loss": numbers["train/loss"]})
        else:
            self.points.append(
                {"kind": "evaluation", "round": round, "metrics": {"error": numbers["evaluation/error"]}}
            )

    def write_event(self, event: Any, round: int) -> None:
        if event["kind"] == RETURNED:
            assert f"returned to round {round}" in event["message"]
            self.points.append({"kind": RETURNED, "round": round})

    def close(self, outcome: Any) -> None:
        pass


class OnceOnly(rayps.Callback):
    """A callback without `on_return`: it gets each round once, as it came first."""

    def __init__(self) -> None:
        self.rounds: list[int] = []

    def on_round(self, run: Any, point: Point) -> None:
        self.rounds.append(point["round"])


class View:
    """What callbacks see of a run here."""

    stop_reason, round, epoch, events, no_value = None, 0, 0, (), ()

    def about(self, target: Any) -> None:
        pass

    def warn(self, message: str) -> None:
        raise AssertionError(message)


IN_ONE_PROCESS = [name for name, parts in RUNS.items() if all(attempt == 1 for attempt, *_ in parts)]


@pytest.mark.parametrize("name", IN_ONE_PROCESS)
def test_a_logger_is_told_of_a_return_before_it_gets_rounds_again(name: str) -> None:
    kept, plain = Kept(), OnceOnly()
    runner = CallbackRunner([kept, plain], View(), 60.0)  # type: ignore[arg-type]
    for _, points in points_of(RUNS[name]):
        runner.deliver(points)
    assert told(kept.points)[0] == truth(RUNS[name])[0]
    assert len(set(plain.rounds)) == len(plain.rounds)


@pytest.mark.parametrize("name", IN_ONE_PROCESS)
def test_tensorboard_shows_each_round_once_the_later_one(tmp_path: Path, name: str) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = rayps.loggers.TensorBoard(tmp_path, name="run")
    view = View()
    view.name, view.params, view.job = "run", {}, {}  # type: ignore[attr-defined]
    runner = CallbackRunner([logger], view, 60.0)  # type: ignore[arg-type]
    runner.start(0, 0)
    for _, points in points_of(RUNS[name]):
        runner.deliver(points)
    runner.end({"status": "SUCCEEDED", "message": ""})
    found = EventAccumulator(str(tmp_path / "run"))
    found.Reload()
    scalars = [(each.step - 1, each.value) for each in found.Scalars("train/loss")]
    assert len(dict(scalars)) == len(scalars) and dict(scalars) == truth(RUNS[name])[0]
