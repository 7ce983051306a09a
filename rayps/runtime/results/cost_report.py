"""Report what a step costs, by formula and as measured.

The costs by formula are computed from one small batch. The measured costs are computed from a phase's points. At the
end of the phase, one event reports both.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from statistics import fmean, median
from typing import TypeAlias, TypedDict, TypeVar

import torch
from torch import nn

from rayps.core.grid import Grid
from rayps.core.job.records import Event, Point
from rayps.core.job.user_code import user_code
from rayps.core.pipeline.schedule import make_table
from rayps.core.pipeline.simulate import simulate
from rayps.core.strategy.costs import Costs, estimate_costs, format_bytes
from rayps.core.strategy.replica import pipeline_of
from rayps.core.strategy.strategy import StrategyView
from rayps.core.strategy.strategy_families import learns_by_client
from rayps.core.strategy.topology import replica_of, replicas_in
from rayps.core.strategy.traffic import Sizes
from rayps.data.base import Batch
from rayps.data.batch_parts import cut_batch, sample_of
from rayps.tensors import optim
from rayps.tensors.division import Division
from rayps.tensors.flat import Layout
from rayps.tensors.learning_rate import recipe_of
from rayps.tensors.named_parameters import NamedParameters
from rayps.workload.base import Workload
from rayps.workload.blank_model import blank
from rayps.workload.division_face import find_division
from rayps.workload.model import apart, has_tables
from rayps.workload.stored_activations import measure_stored

_KEPT = 1_000  # the number of newest rounds of each worker that are used
_WARM = 1  # the number of first rounds of each worker that are not used: they allocate memory and form rings

Span: TypeAlias = tuple[str, float, float]  # an action of a stage, its start and its end in seconds
DrawnSpan: TypeAlias = list[str | float]  # a `Span` as the event's JSON holds it
_Cost = TypeVar("_Cost", float, Fraction)


class MeasuredCosts(TypedDict, total=False):
    """The measured costs of a step, with the fields that `measured` describes. A value that is not known is missing."""

    rounds: int
    bytes: float
    stage_bytes: float
    messages: float
    compute: list[float]
    imbalance: float
    slowest: int
    exposed: float
    idle: float
    idles: list[float]
    activations: list[int]
    hidden: float


class CostReport:
    """Collects the points of single workers in one phase. `event()` reports the costs of the phase's steps."""

    def __init__(self, strategy: StrategyView, workers: int, formula: Callable[[int], Costs]) -> None:
        """Prepare the report.

        `formula(workers)` returns the costs by formula; it is called at the end of the phase only.
        """
        self._strategy, self._workers, self._formula = strategy, workers, formula
        self._grid = strategy.grid(workers)
        self._turn = "round" if learns_by_client(strategy) else "step"
        self._replica = pipeline_of(replica_of(strategy))
        self._spans: dict[int, list[Span]] = {}  # from a rank to its timeline of one step of the pipeline
        self._points: dict[int, list[Point]] = defaultdict(list)  # from a rank to its newest points
        self._seen: dict[int, int] = defaultdict(int)  # from a rank to its number of points so far

    def change_workers(self, workers: int) -> None:
        """Report only steps of the new number of workers from now on."""
        if workers != self._workers:
            self._workers, self._grid = workers, self._strategy.grid(workers)
            self._points.clear()
            self._seen.clear()

    def add_points(self, points: list[Point]) -> list[Event]:
        """Add points of single ranks, which are not merged yet. Return the events that the journal must write."""
        for point in points:
            if point["kind"] == "round":
                if point.get("spans"):
                    self._spans[point["rank"]] = point.pop("spans")
                rank = point["rank"]
                self._seen[rank] += 1
                kept = self._points[rank]
                if self._seen[rank] == _WARM + 1:
                    kept.clear()
                kept.append({key: value for key, value in point.items() if isinstance(value, (int, float))})
                del kept[:-_KEPT]
        return self._make_schedule_event()

    def _make_schedule_event(self) -> list[Event]:
        """Return one event with the timeline of a step of the first replica, as measured and by the schedule's table.

        Return an empty list if no timeline was measured yet, or if the event was returned already.
        """
        grid, replica = self._grid, self._replica
        ranks = [grid.rank(0, stage) for stage in range(grid.stage)]
        if replica is None or not self._spans.keys() >= set(ranks):
            return []
        theory = simulate(make_table(replica.schedule, replica.stages, replica.micro_batches, replica.chunks))
        rows = align_stages([self._spans[rank] for rank in ranks])
        self._replica = None
        whole = max((float(span[2]) for row in rows for span in row), default=0.0)
        message = (
            f"a step under {replica.schedule} took {1000 * whole:.3g} ms; according to the schedule's table, stages "
            f"wait {float(theory.idle):.1%} of the time"
        )
        drawn = [[[str(action), start, end] for action, start, end in row] for row in theory.rows]
        return [{"kind": "schedule", "message": message, "theory": drawn, "measured": rows}]

    def event(self) -> Event | None:
        """Return an event with the phase's costs per step, measured and by formula, or None if no step was reported."""
        found = measured(self._points, self._grid)
        if not found:
            return None
        costs = self._formula(self._workers)
        return {
            "kind": "costs",
            "message": describe_costs(costs, found, self._turn),
            "strategy": self._strategy.name,
            "workers": self._workers,
            "measured": found,
            "formula": costs.to_dict(),
        }


def measured(points: dict[int, list[Point]], grid: Grid) -> MeasuredCosts:
    """Return the measured costs of a step, from the points of each rank. A value that is not known is left out.

    - bytes: the bytes that all workers send.
    - stage_bytes, messages: the bytes and the number of messages that are sent between stages.
    - idle, idles: the share of the stages' time that is spent waiting, for all stages together and for each stage.
    - activations: the largest number of activations that are held at once, one for each stage.
    - compute: the seconds that a worker computes, one for each worker.
    - imbalance, slowest: by what share the longest `compute` exceeds the mean, and the rank of that worker.
    - exposed: the share of the workers' time in which they communicate or wait and do not compute.
    - hidden: the share of the time for communication (including waiting) in which the worker also computes. It is not
      known for stages.
    """
    ranks = sorted(rank for rank in points if points[rank])
    if not ranks:
        return {}
    found: MeasuredCosts = {"rounds": max(len(points[rank]) for rank in ranks)}
    heard = [points[rank] for rank in ranks]
    if (sent := _add_up(heard, "bytes")) is not None:
        found["bytes"] = sent
    if (sent := _add_up(heard, "stage_bytes")) is not None:
        found["stage_bytes"] = sent
    if (sent := _add_up(heard, "messages")) is not None:
        found["messages"] = sent
    seconds = {
        key: [_find_median(points[rank], key) for rank in ranks] for key in ("seconds", "compute", "idle", "busy")
    }
    work = seconds["busy"] if None not in seconds["busy"] else seconds["compute"]
    known = [each for each in work if each is not None]
    if known and fmean(known) > 0:
        found |= {"compute": known, "imbalance": max(known) / fmean(known) - 1}
        found["slowest"] = ranks[known.index(max(known))]
    whole = sum(each for each in seconds["seconds"] if each is not None)
    if whole > 0 and known:
        found["exposed"] = max(0.0, 1 - sum(known) / whole)
    if None not in seconds["idle"] and None not in seconds["busy"]:
        stages: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for rank, idle, busy in zip(ranks, seconds["idle"], seconds["busy"], strict=True):
            stages[grid.at(rank).stage].append((idle or 0.0, busy or 0.0))
        found["idle"] = _find_share([pair for stage in stages.values() for pair in stage])
        found["idles"] = [_find_share(stages[stage]) for stage in sorted(stages)]
    held = [
        (grid.at(rank).stage, point["activations"])
        for rank in ranks
        for point in points[rank]
        if "activations" in point
    ]
    if held:
        found["activations"] = [max(n for at, n in held if at == s) for s in sorted({at for at, _ in held})]
    every = [point for rank in ranks for point in points[rank] if "talk" in point]
    communication = sum(point["talk"] for point in every)
    if communication > 0 and "idle" not in found:  # a stage waits for its predecessor, not for bytes
        found["hidden"] = max(0.0, 1 - sum(point["wait"] + point["move"] for point in every) / communication)
    return found


def align_stages(stages: list[list[Span]]) -> list[list[DrawnSpan]]:
    """Return each stage's actions in a step, (action, start, end) in seconds, on the clock of the first stage.

    The clocks of different hosts cannot be compared. A stage's first forward pass is therefore assumed to start when
    the first forward pass of the previous stage ended, because the stage waits only for that pass.
    """
    rows: list[list[DrawnSpan]] = []
    shift = 0.0
    for stage in stages:
        if rows and rows[-1] and stage:
            shift = float(rows[-1][0][2]) - stage[0][1]
        elif stage:
            shift = -stage[0][1]
        rows.append([])
        for action, start, end in stage:
            if rows[-1] and rows[-1][-1][0] == str(action):  # the loss belongs to the last forward pass
                rows[-1][-1][2] = round(end + shift, 6)
            else:
                rows[-1].append([str(action), round(start + shift, 6), round(end + shift, 6)])
    return rows


def describe_costs(costs: Costs, found: MeasuredCosts, turn: str = "step") -> str:
    """Return one sentence with each measured cost, followed by its value by formula in parentheses."""
    sentences = []
    if "bytes" in found:
        heads = " including message headers" if costs.grid.columns > 1 else ""
        sentences.append(
            f"a {turn} sends {format_bytes(found['bytes'])}{heads}{_add_formula(costs.bytes, format_bytes)}"
        )
    if "messages" in found and "stage_bytes" in found:
        between = next((cost for cost in costs.traffic if cost.axis == "stage"), None)
        sent = _add_formula(None if between is None else between.bytes, format_bytes)
        often = _add_formula(None if between is None else between.messages, "{:.4g}".format)
        sentences.append(
            f"stages exchange {format_bytes(found['stage_bytes'])}{sent} of this in {found['messages']:.4g} "
            f"messages{often}"
        )
    if "idle" in found:
        sentences.append(
            f"stages are idle {found['idle']:.1%} of the time{_add_formula(costs.idle, lambda x: f'{float(x):.1%}')}"
        )
    if "activations" in found:
        wanted = f" ({'/'.join(map(str, costs.peaks))} by formula)" if costs.peaks else ""
        sentences.append(f"stages hold at most {'/'.join(map(str, found['activations']))} activations{wanted}")
    if len(found.get("compute", ())) > 1:
        sentences.append(f"worker-{found['slowest']} computes {found['imbalance']:.0%} longer than the mean")
    if "hidden" in found:
        sentences.append(f"{found['hidden']:.0%} of the communication overlaps with compute")
    return "; ".join(sentences) or f"no {turn} was measured"


def _add_formula(formula: _Cost | None, write: Callable[[_Cost], str]) -> str:
    return "" if formula is None else f" ({write(formula)} by formula)"


def _add_up(heard: list[list[Point]], key: str) -> float | None:
    """Return the sum over ranks of each rank's mean of `key` per step, or None if a point lacks `key`."""
    if not all(key in point for points in heard for point in points):
        return None
    return sum(fmean(point[key] for point in points) for points in heard)


def _find_median(points: list[Point], key: str) -> float | None:
    values = [point[key] for point in points if key in point]
    return median(values) if values else None


def _find_share(pairs: list[tuple[float, float]]) -> float:
    whole = sum(idle + busy for idle, busy in pairs)
    return sum(idle for idle, _ in pairs) / whole if whole else 0.0


log = logging.getLogger(__name__)
_SMALL = 3  # the most elements along each dimension of the small tensors on which an optimizer is tried


def predict_costs(
    workload: Workload,
    strategy: StrategyView,
    workers: int,
    division: Division | None = None,
    batch: int | None = None,
    *,
    activations: bool = False,
) -> Costs:
    """Return the costs of a step by formula.

    `batch` is the number of rows of a replica's batch; None means the workload's batch size. `activations`: also count
    the activations of a model on one worker, which needs a forward pass. If the user's code fails on a few rows, the
    values that depend on this code are left out, and no error is raised.
    """
    found = measure_sizes(workload, strategy, workers, division, batch)
    if activations and division is None and not has_tables(blank(workload)):
        with suppress(Exception):  # as in sizes()
            found = measure_stored(workload, found, sample_of(read_first(workload, replicas_in(strategy, workers))))
    return estimate_costs(strategy, workers, found)


def cost_report_of(
    workload: Workload, strategy: StrategyView, workers: int, division: Division | None, layout: Layout
) -> CostReport:
    """Return the CostReport of a phase. The model is run once more for the formula, but only if it is divided."""

    def formula(workers: int) -> Costs:
        if division is not None:
            try:
                return predict_costs(workload, strategy, workers, division)
            except Exception:  # the user's model is run once more: a successful run must not fail here
                log.exception("the costs of a step by formula are only partly known")
        return estimate_costs(strategy, workers, Sizes(layout.size, layout.dtype.itemsize))

    return CostReport(strategy, workers, formula)


def time_chunks(workload: Workload, division: Division, replicas: int, micro_batches: int) -> list[float]:
    """Return, for each chunk, the seconds that its forward and backward pass of one micro-batch take in this process.

    Raises DataError or WorkloadError if the user's code fails.
    """
    micro = cut_batch(read_first(workload, replicas), micro_batches)[0]
    return find_division().time_chunks(workload, division, micro)


def measure_sizes(
    workload: Workload, strategy: StrategyView, workers: int, division: Division | None = None, batch: int | None = None
) -> Sizes:
    """Return the sizes of the model and of a replica's batch, on which costs depend. Arguments: see `predict_costs`.

    If the user's code fails, the sizes that depend on it are left out.
    """
    with apart():
        model = blank(workload)
        layout = Layout.of((name, p) for name, p in model.named_parameters() if p.requires_grad)
        found = Sizes(layout.size, layout.dtype.itemsize)
        try:
            found = Sizes(layout.size, layout.dtype.itemsize, states=count_states(workload, layout))
            sample = read_first(workload, replicas_in(strategy, workers))
            rows = sample.size if batch is None else batch
            found = Sizes(found.parameters, found.width, states=found.states, batch=rows)
            if division is not None:
                return find_division().probe(workload, division, found, sample_of(sample))
        except Exception as error:  # the user's code failed on a few rows, or there was too little memory
            log.info("the tensors between the parts of the model are not known: %s", error)
    return found if division is None else division.count_elements(found)


def read_first(workload: Workload, replicas: int) -> Batch:
    """Return the first batch of the first replica. Raises DataError or WorkloadError if the user's code fails."""
    with user_code("data"):
        return next(iter(workload.data().batches(rank=0, size=replicas, seed=0, epoch=0)))


def count_states(workload: Workload, layout: Layout) -> float:
    """Return how many numbers the workload's optimizer stores for each element of the parameters.

    They are counted after one step on small parameters.

    Raises:
        WorkloadError: the optimizer's step failed.
    """
    params = [nn.Parameter(torch.zeros([min(n, _SMALL) for n in entry.shape])) for entry in layout.entries]
    optimizer = optim.made(recipe_of(workload), NamedParameters(params, layout.names))
    for p in params:
        p.grad = torch.zeros_like(p)
    with user_code("optimizer.step"):
        optimizer.step()
    kept = sum(
        value.numel()
        for p in params
        for key, value in optimizer.state[p].items()
        if isinstance(value, torch.Tensor) and value.shape == p.shape and key != "step"
    )
    return kept / max(1, sum(p.numel() for p in params))
