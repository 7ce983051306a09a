"""`rayps plan`: show how a strategy divides a model, when workers are idle, and what a step costs.

Nothing is started.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NotRequired, TypedDict

import typer
from rayps_client.errors import ConfigError
from rayps_client.values import Json, JsonObject

from rayps.cli import show
from rayps.cli.show import Output
from rayps.core.grid import Grid
from rayps.core.pipeline import gantt
from rayps.core.pipeline.schedule import Table, make_table, splits
from rayps.core.pipeline.simulate import Timeline, simulate
from rayps.core.pipeline.validate import read
from rayps.core.sizes import parse_size
from rayps.core.strategy.costs import Costs, estimate_costs, format_bytes
from rayps.core.strategy.replica import Pipeline, pipeline_of
from rayps.core.strategy.strategy import Phase, StrategyView
from rayps.core.strategy.strategy_families import learns_by_client
from rayps.core.strategy.topology import Peers, replica_of, replicas_in, shard_of
from rayps.core.strategy.traffic import Sizes
from rayps.service.job_file import parse_assignments
from rayps.strategies.catalogue import parse, wire

if TYPE_CHECKING:
    from rayps.data.base import Data
    from rayps.tensors.division import ColumnFacts, Division
    from rayps.workload.base import Workload

_WIDTH = 100
_MEMORY = ("parameters", "gradients", "optimizer", "copies", "activations", "all")


def plan(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[WORKLOAD]",
            help="file.py:Class or module:Class of a Workload. Without it, only schedule and formulas are shown.",
        ),
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(
            help="A strategy as for `rayps train`, e.g. pipeline:stages=4,micro_batches=8 or parameter_server:shards=2."
        ),
    ] = "all_reduce",
    workers: Annotated[int | None, typer.Option(help="The number of workers (default: those of one replica).")] = None,
    batch: Annotated[int | None, typer.Option(help="Rows of a replica's batch (default: the workload's).")] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory of each worker, e.g. 2GB. The plan then names the workers that need more."
        ),
    ] = None,
    parameters: Annotated[
        float | None,
        typer.Option(
            metavar="N", help="Without a workload: the number of the model's parameters, e.g. 7e9 (4 bytes each)."
        ),
    ] = None,
    times: Annotated[
        bool, typer.Option("--times", help="Measure the layers on this machine and draw their times.")
    ] = False,
    schedule: Annotated[
        Path | None, typer.Option("--table", metavar="FILE", help="Check and draw your own schedule, JSON or CSV.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the schedule as a picture.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Set a parameter of the workload, e.g. --set width=8."),
    ] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="table or json.")] = Output.table,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --output json.")] = False,
) -> None:
    """Show how a strategy divides the model.

    The plan also shows when workers are idle and what a step costs. Nothing is started.
    """
    phases = parse(strategy, Path.cwd())
    params = parse_assignments(changes or [])
    _check_options(target, batch, parameters, times, params)
    own = _read_user_table(schedule, phases)
    limit = None if memory is None else parse_size(memory, "memory")
    found = []
    workload = None if target is None else _load_workload(target, batch, params)
    divisions = [None] * len(phases) if workload is None else _divide_for_phases(workload, target, phases, workers)
    recomputed = [] if workload is None else _list_recomputed(workload)
    for phase, division in zip(phases, divisions, strict=True):
        count = _count_workers(phase.strategy, workers)
        if workload is None:
            cost = estimate_costs(phase.strategy, count, Sizes(int(parameters or 0), batch=batch or 0), own)
        else:
            from rayps.runtime.results.cost_report import predict_costs

            cost = predict_costs(workload, phase.strategy, count, division, batch, activations=True)
        timeline = _make_timeline(phase.strategy, own, workload if times else None, division, count)
        drawn = _Plan(phase, cost, division, timeline, limit, has_workload=workload is not None, timed=times)
        drawn.recomputed = recomputed
        found.append(drawn)
    if svg is not None:
        _draw(found, svg)
    if as_json or output is Output.json:
        show.dump([each.to_dict() for each in found] if len(found) > 1 else found[0].to_dict())
        return
    for i, each in enumerate(found):
        if i:
            show.print_line("")
        each.show()


class DrawnSchedule(TypedDict):
    """A pipeline's schedule as JSON data: the share of idle time, and the actions of each stage with their times."""

    unit: str
    makespan: float
    idle: float
    idles: list[float]
    activations: list[int]
    rows: list[list[list[str | float]]]


class PlanRecord(TypedDict):
    """The plan of one phase as JSON data."""

    strategy: Json
    workers: int
    grid: dict[str, int]
    division: list[ColumnFacts] | None
    costs: JsonObject
    recomputed: list[str]
    unfit: list[str]
    schedule: NotRequired[DrawnSchedule]


class _Plan:
    """The plan of one phase of a job: its costs, the division of the model, and the schedule."""

    def __init__(
        self,
        phase: Phase,
        cost: Costs,
        division: Division | None,
        timeline: Timeline | None,
        limit: float | None,
        *,
        has_workload: bool,
        timed: bool,
    ) -> None:
        self.strategy, self.costs, self.division, self.timeline = phase.strategy, cost, division, timeline
        self.limit, self.has_workload, self.timed = limit, has_workload, timed
        self.known = any(each["parameters"] for each in cost.memory)
        self.recomputed: list[str] = []  # the modules whose activations are computed again
        self.name = show.format_strategy(wire([Phase(None, phase.strategy)]))

    @property
    def title(self) -> str:
        """The schedule's title."""
        replica = replica_of(self.strategy)
        assert isinstance(replica, Pipeline)
        of = f" of {replica.chunks} chunks" if replica.chunks > 1 else ""
        m = replica.micro_batches
        return f"{replica.schedule}: {replica.stages} stages{of}, {m} micro-batch{'es'[: 2 * (m != 1)]}"

    def to_dict(self) -> PlanRecord:
        """Return the plan as JSON data."""
        grid = self.costs.grid
        found: PlanRecord = {
            "strategy": wire([Phase(None, self.strategy)]),
            "workers": grid.size,
            "grid": {"data": grid.data, "stage": grid.stage, "tensor": grid.tensor},
            "division": None if self.division is None else self.division.facts(),
            "costs": self.costs.to_dict(),
            "recomputed": self.recomputed,
            "unfit": self.unfit(),
        }
        if self.timeline is not None:
            found["schedule"] = {
                "unit": "s" if self.timed else "a forward pass",
                "makespan": float(self.timeline.makespan),
                "idle": float(self.timeline.idle),
                "idles": [float(each) for each in self.timeline.idles],
                "activations": self.timeline.peaks,
                "rows": [[[str(a), float(start), float(end)] for a, start, end in row] for row in self.timeline.rows],
            }
        return found

    def show(self) -> None:
        """Print the plan."""
        grid = self.costs.grid
        show.print_line(f"{self.name}\n{_describe_grid(grid)}")
        if self.division is not None:
            show.print_line("")
            self._show_division(self.division)
        if self.timeline is not None:
            show.print_line("")
            self._show_schedule(self.timeline)
        show.print_line("")
        self._show_traffic()
        if self.known:
            show.print_line("")
            self._show_memory()
        for note in self.unfit():
            show.print_line(f"\n{note}")

    def _show_division(self, division: Division) -> None:
        rows: list[list[str]] = []
        whole = division.layout.size
        for fact in division.facts():
            spans = ", ".join(f"{lo}-{hi - 1}" if hi - lo > 1 else f"{lo}" for lo, hi in fact["layers"])
            borrowed, share = fact["held"] - fact["owned"], fact["owned"] / whole
            rows.append(
                [
                    _name_worker(self.costs.grid, len(rows)),
                    spans or "parts of all",
                    f"{fact['owned']:,}",
                    f"{share:.1%}",
                    f"{borrowed:,}" if borrowed else "",
                    format_bytes(fact["bytes"]),
                ]
            )
        show.print_table(["worker", "layers", "parameters", "of all", "borrowed", "bytes"], rows)

    def _show_schedule(self, timeline: Timeline) -> None:
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        show.print_line(f"{self.title}; {'as measured here' if self.timed else 'time in forward passes of a stage'}")
        show.print_line(gantt.draw_text(timeline, _WIDTH, colour=colour, unit=" s" if self.timed else ""))
        p, found = len(timeline.rows), self.costs
        apart = (
            f"; of stages 0, 1, ...: {', '.join(f'{float(each):.1%}' for each in timeline.idles)}" if self.timed else ""
        )
        formula = f"; formula {found.idle_formula} = {float(found.idle or 0):.1%}" if found.idle_formula else ""
        show.print_line(f"idle         {float(timeline.idle):.1%} of the time{apart}{formula}")
        held = ", ".join(map(str, timeline.peaks)) if p <= 16 else f"{min(timeline.peaks)} to {max(timeline.peaks)}"
        where = "in stages 0, 1, ..." if p <= 16 else "in a stage"
        show.print_line(f"activations  of at most {held} micro-batches at a time {where}")

    def _show_traffic(self) -> None:
        rows = [
            [
                cost.what,
                _count(cost.messages),
                *([_format_bytes(cost.bytes), _format_bytes(cost.busiest)] if self.known else []),
                cost.hidden if cost.bytes != 0 else "",
                cost.formula,
            ]
            for cost in self.costs.traffic
        ]
        if len(rows) > 1:
            whole = [_format_bytes(self.costs.bytes), ""] if self.known else []
            rows.append(["all workers", _count(self.costs.messages), *whole, "", ""])
        figures = ["bytes", "of one worker"] if self.known else []
        turn = "round" if learns_by_client(self.strategy) else "step"
        show.print_table([f"traffic of a {turn}", "messages", *figures, "hidden", "formula"], rows)

    def _show_memory(self) -> None:
        known = [key for key in _MEMORY if any(key in each for each in self.costs.memory)]
        keys = [key for key in known if self.has_workload or key in ("parameters", "gradients")]
        rows = [
            [_name_worker(self.costs.grid, i), *[format_bytes(each[key]) for key in keys]]
            for i, each in enumerate(self.costs.memory)
        ]
        show.print_table(["memory", *keys], rows)
        if self.costs.memory_formula:
            show.print_line(self.costs.memory_formula)
        if self.recomputed:
            from rayps.workload.model_blocks import named_briefly

            names = named_briefly(self.recomputed)
            show.print_line(
                f"activations  of {len(self.recomputed)} modules ({names}) are computed again; the memory is that of "
                "their inputs, and of all of the largest one"
            )

    def unfit(self) -> list[str]:
        """Return a sentence, with a remedy, for each part of the plan that exceeds the memory or is inefficient."""
        found = []
        grid, cores = self.costs.grid, os.cpu_count() or 1
        for i, each in enumerate(self.costs.memory if self.limit is not None and self.known else []):
            if self.limit is not None and each["all"] > self.limit:
                most = max(_MEMORY[:-1], key=lambda key: each.get(key, 0.0))
                found.append(
                    f"does not fit: {_name_worker(grid, i)} needs {format_bytes(each['all'])} but has "
                    f"{format_bytes(self.limit)}; "
                    f"most of it ({format_bytes(each[most])}) is for {most}: {_suggest_remedy(most, self.strategy)}"
                )
        if pipeline_of(replica_of(self.strategy)) and self.costs.idle and self.costs.idle > 0.3:
            p = grid.stage
            found.append(
                f"idle {float(self.costs.idle):.0%} of the time; with {4 * p} micro-batches (4 per stage) it would be "
                f"{(p - 1) / (5 * p - 1):.0%}"
            )
        if self.has_workload and grid.size > cores:
            found.append(f"this machine has {cores} cores for {grid.size} workers: suitable for tests, not for speed")
        return found


def _suggest_remedy(most: str, strategy: StrategyView) -> str:
    if most == "activations":
        if isinstance(replica_of(strategy), Pipeline):
            return "raise micro_batches with schedule 1f1b, or use a smaller batch"
        return (
            "use a smaller batch, checkpoint_activations=true, or a pipeline, which stores the activations of some "
            "micro-batches only"
        )
    if most == "optimizer" and isinstance(strategy.topology, Peers) and shard_of(strategy) is None:
        return "use all_reduce:shard=optimizer, by which each worker holds a slice of it"
    if most == "gradients" and shard_of(strategy) == "optimizer":
        return "use all_reduce:shard=gradients, by which each worker holds a slice of them"
    if replica_of(strategy) is None:
        return "divide the model: pipeline:stages=2, or tensor_parallel:size=2"
    return "raise stages, or the size of tensor_parallel"


def _check_options(
    target: str | None, batch: int | None, parameters: float | None, times: bool, params: JsonObject
) -> None:
    if target is not None and parameters is not None:
        raise ConfigError(
            "--parameters is for a plan without a workload. Here the workload's model defines the number of "
            "parameters: omit --parameters",
            field="parameters",
        )
    if times and target is None:
        raise ConfigError(
            "--times measures the layers of a workload: give a workload, e.g. digits.py:Digits", field="times"
        )
    if params and target is None:
        raise ConfigError(
            f"--set {next(iter(params))} sets a parameter of a workload: give a workload, e.g. digits.py:Digits",
            field="set",
        )
    if parameters is not None and not (1 <= parameters < 1e18 and parameters == int(parameters)):
        raise ConfigError(f"parameters is {parameters:g}: give a whole number of at least 1", field="parameters")
    if batch is not None and batch < 1:
        raise ConfigError(f"batch is {batch}: give a whole number of at least 1", field="batch")


def _read_user_table(path: Path | None, phases: list[Phase]) -> Table | None:
    """Read the user's schedule table; return None without `path`.

    Raises:
        ConfigError: the file cannot be read, or the table does not match the strategy's pipeline.
    """
    if path is None:
        return None
    replicas = [replica_of(phase.strategy) for phase in phases]
    if len(replicas) != 1 or not isinstance(replicas[0], Pipeline):
        raise ConfigError("--table needs one strategy with a pipeline, e.g. pipeline:stages=4", field="table")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}", field="table"
        ) from None
    rows, *found = read(text)
    given = [replicas[0].stages, replicas[0].micro_batches, replicas[0].chunks]
    if found != given:
        raise ConfigError(
            f"{path} is a table for stages={found[0]}, micro_batches={found[1]}, chunks={found[2]}, and the strategy "
            f"has stages={given[0]}, micro_batches={given[1]}, chunks={given[2]}: change the table or the strategy",
            field="table",
        )
    return rows


def _load_workload(target: str, batch: int | None, params: JsonObject) -> Workload:
    from rayps.workload.base import load

    workload = load(target, params=params)
    if batch is not None:
        whole = workload.data

        def data() -> Data:
            found = whole()
            found.batch_size = batch
            return found

        object.__setattr__(workload, "data", data)  # a workload may be a frozen dataclass
    return workload


def _divide_for_phases(
    workload: Workload, target: str | None, phases: list[Phase], workers: int | None
) -> list[Division | None]:
    """Divide the model for each phase; return None for a phase without a division.

    Raises the errors that a run would raise before it starts.
    """
    from rayps.runtime.checks.preflight import preflight
    from rayps.strategies.job import JobSpec

    found: list[Division | None] = []
    for phase in phases:  # one phase at a time: without --workers, phases may have replicas of different sizes
        alone = [Phase(None, phase.strategy)]
        spec = JobSpec(str(target), wire(alone), _count_workers(phase.strategy, workers)).check()
        checked = preflight(workload, alone, spec)
        for warning in checked.warnings:
            show.print_note(f"warning: {warning}")
        found += checked.divisions
    return found


def _list_recomputed(workload: Workload) -> list[str]:
    """Return the names of the modules whose activations are computed again for backward."""
    from rayps.workload.blank_model import blank
    from rayps.workload.checkpoint_activations import checkpointed_blocks

    if not workload.checkpoint_activations:
        return []
    return list(checkpointed_blocks(blank(workload), workload.checkpoint_activations))


def _count_workers(strategy: StrategyView, given: int | None) -> int:
    replica = replica_of(strategy)
    count = (1 if replica is None else replica.stages * replica.tensor) if given is None else given
    if count < 1:
        raise ConfigError(f"workers is {count}: give a whole number of at least 1", field="workers")
    return count


def _make_timeline(
    strategy: StrategyView, own: Table | None, workload: Workload | None, division: Division | None, workers: int
) -> Timeline | None:
    replica = pipeline_of(replica_of(strategy))
    if replica is None:
        return None
    rows = own
    if rows is None:
        rows = make_table(replica.schedule, replica.stages, replica.micro_batches, replica.chunks)
    if workload is None or division is None:
        return simulate(rows)
    from rayps.runtime.results.cost_report import time_chunks

    chunks = time_chunks(workload, division, replicas_in(strategy, workers), replica.micro_batches)
    share = {"F": 1 / 3, "B": 1 / 3, "W": 1 / 3} if splits(rows) else {"F": 1 / 3, "B": 2 / 3}
    return simulate(rows, lambda action: chunks[action.chunk] * share[action.kind])


def _draw(found: list[_Plan], path: Path) -> None:
    drawn = [each for each in found if each.timeline is not None]
    if not drawn:
        raise ConfigError(
            "--svg draws a pipeline's schedule, but this strategy has no pipeline: give e.g. pipeline:stages=4",
            field="svg",
        )
    each = drawn[0]
    assert each.timeline is not None
    try:
        path.write_text(
            gantt.draw_svg(
                each.timeline,
                f"{each.title}, idle {float(each.timeline.idle):.1%} of the time",
                unit=" s" if each.timed else "",
            ),
            encoding="utf-8",
        )
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}", field="svg") from None
    show.print_note(f"written to {path}")


def _describe_grid(grid: Grid) -> str:
    replicas = f"{grid.data} replica{'s'[: grid.data != 1]}"
    parts = [f"{grid.stage} stages"] * (grid.stage > 1) + [f"{grid.tensor} tensor ranks"] * (grid.tensor > 1)
    return f"{grid.size} worker{'s'[: grid.size != 1]}: {replicas}{' of ' if parts else ''}{' x '.join(parts)}"


def _name_worker(grid: Grid, column: int) -> str:
    return Grid(1, grid.stage, grid.tensor).words(column) or "each worker"


def _format_bytes(count: float | None) -> str:
    return "" if count is None else format_bytes(count)


def _count(count: float | None) -> str:
    return "" if count is None else f"{count:,.0f}" if count == int(count) else f"{count:.2g}"
