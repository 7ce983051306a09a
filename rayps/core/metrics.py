"""Metric points: merge the points of a round, one of each rank, into one point of the group. Pure; no I/O."""

from __future__ import annotations

import json
import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import pyarrow as pa
from rayps_client.errors import WorkloadError
from rayps_client.values import JsonObject

from rayps.core.job.records import ROUND_FIELDS, Point
from rayps.core.job.returned_rounds import SeenRounds

# a merged point has the mean over ranks of these values, in seconds. data: time to get the batch, and data_share: the
# part of the round's seconds that this is. pull: time of pulls
# of the rows of sparse tables. pull_hidden: the part of pull during which the worker computed
SECONDS = ("seconds", "compute", "data", "wait", "move", "pull", "pull_hidden")
REDUCTIONS = ("mean", "sum", "max", "min")
KEPT_ROUNDS = 5_000  # most incomplete rounds; if there are more, the oldest is merged without the missing ranks


class Total(NamedTuple):
    """A metric over a part of the rows, from which `plus` and `result` compute the metric over all rows.

    `how` is one of `REDUCTIONS`. For a mean, `value` is the sum of the values times their weights, and `weight` is the
    sum of the weights, such as a number of samples. Otherwise `value` is the sum, maximum or minimum.
    """

    value: float
    weight: float
    how: str = "mean"

    def plus(self, other: Total) -> Total:
        """Return the metric over the rows of both."""
        weight = self.weight + other.weight
        if self.how in ("max", "min"):
            return Total((max if self.how == "max" else min)(self.value, other.value), weight, self.how)
        return Total(self.value + other.value, weight, self.how)

    @property
    def result(self) -> float | None:
        """The metric, or None if it is a mean without any weight."""
        if self.how != "mean":
            return self.value
        return self.value / self.weight if self.weight else None


Totals: TypeAlias = dict[str, Total]  # from a metric's name to its total


def add_totals(totals: Totals, more: Totals) -> None:
    """Add `more` to `totals`, in place."""
    for name, total in more.items():
        totals[name] = totals[name].plus(total) if name in totals else total


class Rounds:
    """Collects the points of single ranks by round, and merges a round's points when all ranks have reported it."""

    def __init__(self, size: int, generation: int, strategy: str) -> None:
        self.size, self.generation, self.strategy = size, generation, strategy
        self._rounds: dict[int, dict[int, Point]] = {}
        self._evaluations: dict[int, dict[int, Point]] = {}
        self._returned: SeenRounds | None = None  # the rounds that were returned, and all below the first; None: none
        self._reached: dict[int, int] = {}  # the newest round that each rank has reported

    def add(self, points: list[Point]) -> list[Point]:
        """Add points of single ranks. Return the merged points that are now complete, in order of rounds.

        Raises WorkloadError if a round has a metric of the user's loss and a number of the strategy of one name.
        """
        done = []
        for point in points:
            if point["kind"] == "round" and self._returned is not None and point["round"] in self._returned:
                continue  # returned already: a replacement worker repeats the rounds that its predecessor did not push
            held = self._evaluations if point["kind"] == "evaluation" else self._rounds
            held.setdefault(point["round"], {})[point["rank"]] = point
            if point["kind"] == "round":
                self._reached[point["rank"]] = max(point["round"], self._reached.get(point["rank"], -1))
        for number in sorted(self._rounds):
            if len(self._rounds[number]) == self.size or len(self._rounds) > KEPT_ROUNDS:
                if self._returned is None:
                    self._returned = SeenRounds(min(self._rounds))
                self._returned.add(number)
                done.append(self._merge(number, self._rounds.pop(number)))
        for number in sorted(self._evaluations):
            missing = [rank for rank in range(self.size) if rank not in self._evaluations[number]]
            # if a rank without a point has reported a later round, its worker was replaced before the point was polled:
            # the point will not arrive
            if all(self._reached.get(rank, -1) >= number for rank in missing):
                done.append(_make_evaluation(number, self._evaluations.pop(number), missing))
        return done

    def restart(self, generation: int, begin: int) -> None:
        """Restart from round `begin`: drop the points of this round and later rounds.

        Points of earlier rounds are still accepted.
        """
        self.generation = generation
        self._rounds = {number: held for number, held in self._rounds.items() if number < begin}
        self._evaluations = {number: held for number, held in self._evaluations.items() if number < begin}
        self._reached = {rank: min(number, begin - 1) for rank, number in self._reached.items()}

    def flush(self) -> list[Point]:
        """At the end of the run, return the merged points of the rounds that only some ranks have reported."""
        done = [self._merge(number, self._rounds[number]) for number in sorted(self._rounds)]
        self._rounds.clear()
        return done

    def _merge(self, number: int, ranks: dict[int, Point]) -> Point:
        points = list(ranks.values())
        samples = sum(p["samples"] for p in points)
        weights = [p["weight"] if "weight" in p else p["samples"] for p in points]
        losses = [(p["loss"], n) for p, n in zip(points, weights, strict=True) if p["loss"] is not None]
        with_loss = sum(n for _, n in losses)  # weight of the ranks that reported a loss
        leads = Counter(p["lead"] for p in points if p["lead"] is not None)  # empty without servers
        known = [key for key in SECONDS if all(key in p for p in points)]
        mean = {key: sum(p[key] for p in points) / len(points) for key in known}
        if mean.get("seconds") and "data" in mean:
            mean["data_share"] = mean["data"] / mean["seconds"]
        # metrics beside the losses, and numbers that the strategy added, which are equal on all ranks
        added: dict[str, float] = values_of(add_up_totals([p["metrics"] for p in points if "metrics" in p]))
        said: dict[str, float] = next((p["said"] for p in points if p.get("said")), {})
        twice = sorted(added.keys() & said.keys())
        if twice:
            raise WorkloadError(
                f"loss(model, batch) returned a metric {twice[0]!r}, and the strategy {self.strategy} adds a number of "
                "this name to its rounds: give the metric another name"
            )
        return (
            _collect_step_numbers([p.get("step", {}) for p in points], self.size)
            | added
            | said
            | {
                "kind": "round",
                "round": number,
                "epoch": points[0]["epoch"],
                "time": time.time(),
                "loss": sum(loss * n for loss, n in losses) / with_loss if with_loss else None,
                "samples": samples,
                **mean,
                "bytes": sum(p.get("bytes", 0) for p in points),  # torch's process groups do not count theirs
                "staleness": {str(lead): n for lead, n in sorted(leads.items())},
                "generation": self.generation,
                "strategy": self.strategy,
            }
        )


def _collect_step_numbers(steps: Sequence[Mapping[str, float]], size: int) -> dict[str, float]:
    """Return `lr`, `lr_0`, ... and `grad_norm` of a round from what the ranks report of their steps.

    Rates are those of the first rank that has some. The norm is the mean of the ranks' norms; if they have measured
    shares of one gradient (`grad_square`), it is known if all `size` ranks have reported theirs.
    """
    rates = next((step for step in steps if "lr" in step), {})
    found = {name: value for name, value in rates.items() if name.startswith("lr")}
    norms = [step["grad_norm"] for step in steps if "grad_norm" in step]
    shares = [step["grad_square"] for step in steps if "grad_square" in step]
    if norms:
        found["grad_norm"] = sum(norms) / len(norms)
    elif shares and len(shares) == size:
        found["grad_norm"] = math.sqrt(sum(shares))
    return found


class PushRounds(Rounds):
    """Collects the points of workers that are not in step, and join and leave: each point is one push.

    A round is `share` pushes, in the order in which they are reported, and an epoch is `blocks` pushes.
    """

    def __init__(self, share: int, blocks: int, done: int, end: int) -> None:
        """Continue after `done` of `end` pushes."""
        super().__init__(share, 0, "")
        self.rounds = -(-end // share)
        self._blocks, self.begun, self.pushes = blocks, done, done
        self._held: list[Point] = []
        self._done: list[Point] = []
        self._again = 0  # so many of the next points are of pushes that were counted before

    @property
    def reached(self) -> int:
        """The number of complete rounds."""
        return self.pushes // self.size

    def add(self, points: list[Point]) -> list[Point]:
        """Add points of single pushes: see `Rounds.add`."""
        for point in points:
            if point["kind"] != "round":
                continue
            if self._again:
                self._again -= 1
                continue
            self._held.append(point)
            self._count()
        done, self._done = self._done, []
        return done

    def settle(self, pushes: int) -> None:
        """Count pushes that were applied, and that no worker will report, because it has died.

        A negative number is of pushes that were reported, and whose rows will be pushed again.
        """
        self._again -= pushes
        while self._again < 0:
            self._again += 1
            self._count()

    def _count(self) -> None:
        self.pushes += 1
        if self.pushes % self.size == 0:
            self._done.append(self._merge_held(self.reached - 1))

    def _merge_held(self, number: int) -> Point:
        held, self._held = self._held or [UNREPORTED], []
        epoch = number * self.size // self._blocks
        return self._merge(number, {at: {**point, "epoch": epoch} for at, point in enumerate(held)})

    def flush(self) -> list[Point]:
        """Return the points that `add` would return, and that of a round that is not complete."""
        done = self.add([])
        return [*done, self._merge_held(self.reached)] if self._held else done


# of a round whose pushes were applied, and whose workers have died before they reported it
UNREPORTED: Point = {"loss": None, "samples": 0, "lead": None, **dict.fromkeys(SECONDS[:5], 0.0)}


def _make_evaluation(number: int, ranks: dict[int, Point], missing: list[int]) -> Point:
    point = make_evaluation_point(number, add_up_totals([point["sums"] for point in ranks.values()]))
    return point | {"missing": missing} if missing else point


def make_evaluation_point(number: int, totals: Totals) -> Point:
    """Return the point of an evaluation of the parameters after `number` rounds.

    Means without weight are no `metrics`; their names are in `no_value`, a list that the point has only if needed.
    """
    metrics = values_of(totals)
    point = {"kind": "evaluation", "round": number, "time": time.time(), "metrics": metrics}
    lacking = [name for name in totals if name not in metrics]
    return point | {"no_value": lacking} if lacking else point


def add_up_totals(parts: Sequence[Mapping[str, Sequence[float | str]]]) -> Totals:
    """Return each metric's total over all parts, which are a dict from metric to `Total` for each rank.

    A pair (sum, samples) counts as the total of a mean.
    """
    totals: Totals = {}
    for part in parts:
        add_totals(totals, {name: Total(*given) for name, given in part.items()})  # type: ignore[arg-type]
    return totals


def values_of(totals: Totals) -> dict[str, float]:
    """Return each metric's value. A mean without weight is left out."""
    return {name: result for name, total in totals.items() if (result := total.result) is not None}


class Throughput:
    """Samples per second over the last `window` seconds."""

    def __init__(self, window: float = 5.0) -> None:
        self._window = window
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, samples: int, now: float) -> None:
        """Record that `samples` samples were processed between the last call and `now`."""
        self._seen.append((now, samples))
        while len(self._seen) > 2 and self._seen[0][0] < now - self._window:
            self._seen.popleft()

    @property
    def rate(self) -> float | None:
        """Samples per second; None before the second call of `add`."""
        if len(self._seen) < 2:
            return None
        seconds = self._seen[-1][0] - self._seen[0][0]
        return sum(n for _, n in list(self._seen)[1:]) / seconds if seconds > 0 else None


def cut_points(points: list[Point], end: int) -> list[Point]:
    """Return the points of the first `end` rounds, without rounds that workers trained beyond the end of the run."""
    return [point for point in points if point["round"] < end + (point["kind"] == "evaluation")]


COLUMNS: list[tuple[str, pa.DataType]] = [
    ("round", pa.int64()),
    ("epoch", pa.int64()),
    ("time", pa.float64()),
    ("loss", pa.float64()),
    ("samples", pa.int64()),
    ("seconds", pa.float64()),
    ("compute", pa.float64()),
    ("data", pa.float64()),
    ("data_share", pa.float64()),
    ("wait", pa.float64()),
    ("move", pa.float64()),
    ("pull", pa.float64()),
    ("pull_hidden", pa.float64()),
    ("bytes", pa.int64()),
    ("staleness", pa.int64()),
    ("generation", pa.int64()),
    ("strategy", pa.string()),
]


def make_history(points: list[Point], params: JsonObject | None = None) -> pa.Table:
    """Return the rounds of a run as a table, one row per round. A repeated round has one row, with its last result.

    `params`, the workload's parameters, are in the schema's metadata as JSON, under the key "rayps.params".

    `staleness` is the largest number of rounds that a rank was ahead of the slowest rank. An evaluation is in the row
    of the last round before it, in columns named `evaluation_<metric>`. A number that a strategy or a loss added to
    its rounds is in a column of the same name.
    """
    rounds: dict[int, Point] = {}
    for point in points:
        if point["kind"] == "round":
            rounds[point["round"]] = {**point, "staleness": max((int(lead) for lead in point["staleness"]), default=0)}
    evaluated: dict[str, dict[int, float]] = {}
    for point in points:
        if point["kind"] == "evaluation":
            for name, value in point["metrics"].items():
                evaluated.setdefault(f"evaluation_{name}", {})[point["round"] - 1] = value
    order = sorted(rounds)
    found = {name: None for point in rounds.values() for name in point}
    columns = {
        name: pa.array([rounds[r].get(name) for r in order], kind)
        for name, kind in COLUMNS
        if name in found or not name.startswith(("pull", "data"))
    }
    for name in [name for name in found if name not in ROUND_FIELDS]:  # None in the rounds of other strategies
        values = [rounds[r].get(name) for r in order]
        columns[name] = pa.array(values, pa.int64() if all(_is_whole(v) for v in values) else pa.float64())
    columns |= {name: pa.array([by_round.get(r) for r in order], pa.float64()) for name, by_round in evaluated.items()}
    return pa.table(columns, metadata=None if params is None else {"rayps.params": json.dumps(params)})


def _is_whole(value: float | None) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))
