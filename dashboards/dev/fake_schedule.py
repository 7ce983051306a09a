"""A pipeline's step as the stand-in service tells of it: the schedule's table, and the same with made-up jitter."""

from __future__ import annotations

import random
from typing import Any

from rayps.core.strategy.traffic import Crossing, Sizes
from rayps.core.strategy.costs import estimate_costs
from rayps.core.pipeline.schedule import Action, make_table
from rayps.core.pipeline.simulate import Timeline, simulate
from rayps.strategies.catalogue import parse


def facts(spec: dict[str, Any], workers: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the events "schedule" and "costs" of a job with this strategy say."""
    strategy = parse(spec)[0].strategy
    pipeline: Any = strategy.replica
    rows = make_table(pipeline.schedule, pipeline.stages, pipeline.micro_batches, pipeline.chunks)
    chance = random.Random(11)

    def seconds(action: Action) -> float:
        slow = 1.35 if action.chunk == 2 else 1.0
        return 0.0012 * slow * (1 if action.kind == "F" else 1.9) * chance.lognormvariate(0, 0.08)

    went = simulate(rows, seconds, transfer=0.0002)
    cuts = tuple(Crossing(c, c + 1, 4096.0, 4096.0) for c in range(pipeline.stages * pipeline.chunks - 1))
    formula = estimate_costs(strategy, workers, Sizes(3_200_000, batch=64, crossings=cuts)).to_dict()
    stage = next(each for each in formula["traffic"] if each["axis"] == "stage")
    measured = {
        "rounds": 900, "bytes": formula["bytes"] * 1.0008, "stage_bytes": stage["bytes"], "messages": stage["messages"],
        "idle": float(went.idle), "activations": went.peaks, "imbalance": 0.21,
    }
    return {"theory": _rows(simulate(rows)), "measured": _rows(went)}, {"measured": measured, "formula": formula}


def _rows(line: Timeline) -> list[list[list[Any]]]:
    return [[[str(action), float(start), float(end)] for action, start, end in row] for row in line.rows]
