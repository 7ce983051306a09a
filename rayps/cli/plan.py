"""`rayps plan`: how a strategy divides a model, when each worker waits, and what a step costs; nothing is started."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayps.cli import show
from rayps.cli.show import Output
from rayps.cli.sizes import size
from rayps.core.costs import Costs, amount, costs
from rayps.core.errors import ConfigError
from rayps.core.families import learns_by_client
from rayps.core.grid import Grid
from rayps.core.pipeline import gantt
from rayps.core.pipeline.schedule import Table, splits, table
from rayps.core.pipeline.simulate import Timeline, simulate
from rayps.core.pipeline.validate import read
from rayps.core.replica import Pipeline, pipeline_of
from rayps.core.strategy import Phase, StrategyView
from rayps.core.topology import replica_of, replicas_in
from rayps.core.traffic import Sizes
from rayps.strategies.catalogue import parse, wire

if TYPE_CHECKING:
    from rayps.parallel.division.division import Division

_WIDTH = 100
_MEMORY = ("parameters", "gradients", "optimizer", "activations", "all")


def plan(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[WORKLOAD]",
            help="file.py:Class or module:Class of a Workload; left out, only schedule and formulas.",
        ),
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(help="As of `rayps train`, e.g. pipeline:stages=4,micro_batches=8 or parameter_server:shards=2."),
    ] = "all_reduce",
    workers: Annotated[int | None, typer.Option(help="How many (as many as one replica has).")] = None,
    batch: Annotated[int | None, typer.Option(help="Rows of a replica's batch, instead of the workload's.")] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What a worker has, e.g. 2GB: says who needs more.")
    ] = None,
    parameters: Annotated[
        float | None, typer.Option(metavar="N", help="Without a workload: of the model, e.g. 7e9 (of 4 bytes).")
    ] = None,
    times: Annotated[bool, typer.Option("--times", help="Measure the layers here and draw their times.")] = False,
    schedule: Annotated[
        Path | None,
        typer.Option("--table", metavar="FILE", help="A schedule of your own, JSON or CSV, to check and draw."),
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the schedule as a picture.")] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="table or json.")] = Output.table,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --output json.")] = False,
) -> None:
    """Say how a strategy divides the model, when workers wait and what a step costs, before anything starts."""
    phases = parse(strategy, Path.cwd())
    _must_fit_together(target, batch, parameters, times)
    own = _own(schedule, phases)
    limit = None if memory is None else size(memory, "memory")
    found = []
    workload = None if target is None else _workload(target, batch)
    divisions = [None] * len(phases) if workload is None else _divisions(workload, target, phases, workers)
    for phase, division in zip(phases, divisions, strict=True):
        count = _workers(phase.strategy, workers)
        if workload is None:
            said = costs(phase.strategy, count, Sizes(int(parameters or 0), batch=batch or 0), own)
        else:
            from rayps.runtime.cost_report import expected

            said = expected(workload, phase.strategy, count, division, batch, activations=True)
        line = _timeline(phase.strategy, own, workload if times else None, division, count)
        found.append(_Plan(phase, said, division, line, limit, looked=workload is not None, timed=times))
    if svg is not None:
        _draw(found, svg)
    if as_json or output is Output.json:
        show.dump([each.to_dict() for each in found] if len(found) > 1 else found[0].to_dict())
        return
    for i, each in enumerate(found):
        if i:
            show.say("")
        each.say()


class _Plan:
    """One phase, planned."""

    def __init__(
        self,
        phase: Phase,
        said: Costs,
        division: Division | None,
        line: Timeline | None,
        limit: float | None,
        *,
        looked: bool,
        timed: bool,
    ) -> None:
        self.strategy, self.costs, self.division, self.line = phase.strategy, said, division, line
        self.limit, self.looked, self.timed = limit, looked, timed
        self.known = any(each["parameters"] for each in said.memory)
        self.name = show.strategy(wire([Phase(None, phase.strategy)]))

    @property
    def title(self) -> str:
        """The schedule in words."""
        replica = replica_of(self.strategy)
        assert isinstance(replica, Pipeline)
        of = f" of {replica.chunks} chunks" if replica.chunks > 1 else ""
        m = replica.micro_batches
        return f"{replica.schedule}: {replica.stages} stages{of}, {m} micro-batch{'es'[: 2 * (m != 1)]}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        grid = self.costs.grid
        found: dict[str, Any] = {
            "strategy": wire([Phase(None, self.strategy)]),
            "workers": grid.size,
            "grid": {"data": grid.data, "stage": grid.stage, "tensor": grid.tensor},
            "division": None if self.division is None else self.division.facts(),
            "costs": self.costs.to_dict(),
            "unfit": self.unfit(),
        }
        if self.line is not None:
            found["schedule"] = {
                "unit": "s" if self.timed else "a forward pass",
                "makespan": float(self.line.makespan),
                "idle": float(self.line.idle),
                "idles": [float(each) for each in self.line.idles],
                "activations": self.line.peaks,
                "rows": [[[str(a), float(start), float(end)] for a, start, end in row] for row in self.line.rows],
            }
        return found

    def say(self) -> None:
        """The whole plan, for a person."""
        grid = self.costs.grid
        show.say(f"{self.name}\n{_grid_words(grid)}")
        if self.division is not None:
            show.say("")
            self._say_division(self.division)
        if self.line is not None:
            show.say("")
            self._say_schedule(self.line)
        show.say("")
        self._say_traffic()
        if self.known:
            show.say("")
            self._say_memory()
        for note in self.unfit():
            show.say(f"\n{note}")

    def _say_division(self, division: Division) -> None:
        rows: list[list[str]] = []
        whole = division.layout.size
        for fact in division.facts():
            spans = ", ".join(f"{lo}-{hi - 1}" if hi - lo > 1 else f"{lo}" for lo, hi in fact["layers"])
            lent, share = fact["held"] - fact["owned"], fact["owned"] / whole
            rows.append(
                [
                    _who(self.costs.grid, len(rows)),
                    spans or "all, in parts",
                    f"{fact['owned']:,}",
                    f"{share:.1%}",
                    f"{lent:,}" if lent else "",
                    amount(fact["bytes"]),
                ]
            )
        show.table(["worker", "layers", "parameters", "of all", "borrowed", "bytes"], rows)

    def _say_schedule(self, line: Timeline) -> None:
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        show.say(f"{self.title}; {'as measured here' if self.timed else 'time in forward passes of a stage'}")
        show.say(gantt.text(line, _WIDTH, colour=colour, unit=" s" if self.timed else ""))
        p, found = len(line.rows), self.costs
        apart = f", by stage {', '.join(f'{float(each):.1%}' for each in line.idles)}" if self.timed else ""
        formula = f"{found.idle_formula} = {float(found.idle or 0):.1%}" if found.idle_formula else ""
        show.say(f"waiting      {float(line.idle):.1%} of the time{apart}; formula {formula}")
        held = ", ".join(map(str, line.peaks)) if p <= 16 else f"{min(line.peaks)} to {max(line.peaks)}"
        show.say(f"activations  {held} of a micro-batch held at most, by stage")

    def _say_traffic(self) -> None:
        rows = [
            [
                cost.what,
                _count(cost.messages),
                *([_bytes(cost.bytes), _bytes(cost.busiest)] if self.known else []),
                cost.hidden if cost.bytes != 0 else "",
                cost.formula,
            ]
            for cost in self.costs.traffic
        ]
        if len(rows) > 1:
            whole = [_bytes(self.costs.bytes), ""] if self.known else []
            rows.append(["all workers together", _count(self.costs.messages), *whole, "", ""])
        figures = ["bytes", "of one worker"] if self.known else []
        turn = "round" if learns_by_client(self.strategy) else "step"
        show.table([f"traffic of a {turn}", "messages", *figures, "hidden", "formula"], rows)

    def _say_memory(self) -> None:
        keys = [key for key in _MEMORY if self.looked or key in ("parameters", "gradients")]
        rows = [
            [_who(self.costs.grid, i), *[amount(each[key]) for key in keys]] for i, each in enumerate(self.costs.memory)
        ]
        show.table(["memory", *keys], rows)

    def unfit(self) -> list[str]:
        """What does not fit, or fits badly, and what to change."""
        found = []
        grid, cores = self.costs.grid, os.cpu_count() or 1
        for i, each in enumerate(self.costs.memory if self.limit is not None and self.known else []):
            if self.limit is not None and each["all"] > self.limit:
                most = max(_MEMORY[:-1], key=lambda key: each[key])
                found.append(
                    f"does not fit: {_who(grid, i)} needs {amount(each['all'])} and has {amount(self.limit)}; most of "
                    f"it ({amount(each[most])}) is for {most}: {_way_out(most, self.strategy)}"
                )
        if pipeline_of(replica_of(self.strategy)) and self.costs.idle and self.costs.idle > 0.3:
            p = grid.stage
            found.append(
                f"waits much: {float(self.costs.idle):.0%} of the time; with {4 * p} micro-batches (4 a stage) it "
                f"would be {(p - 1) / (5 * p - 1):.0%}"
            )
        if self.looked and grid.size > cores:
            found.append(f"this machine has {cores} cores for {grid.size} workers: right for trying out, not for speed")
        return found


def _way_out(most: str, strategy: StrategyView) -> str:
    if most == "activations":
        if isinstance(replica_of(strategy), Pipeline):
            return "give more micro-batches under 1f1b, or a smaller batch"
        return "give a smaller batch, or a pipeline, which holds some micro-batches' only"
    if replica_of(strategy) is None:
        return "divide the model: pipeline:stages=2, or tensor_parallel:size=2"
    return "give more stages, or a larger tensor size"


def _must_fit_together(target: str | None, batch: int | None, parameters: float | None, times: bool) -> None:
    if target is not None and parameters is not None:
        raise ConfigError("parameters are those of the workload: leave out --parameters", field="parameters")
    if times and target is None:
        raise ConfigError(
            "--times measures the layers of a workload: name one, such as digits.py:Digits", field="times"
        )
    if parameters is not None and not (1 <= parameters < 1e18 and parameters == int(parameters)):
        raise ConfigError(f"parameters is {parameters:g}: give a whole number of at least 1", field="parameters")
    if batch is not None and batch < 1:
        raise ConfigError(f"batch is {batch}: give a whole number of at least 1", field="batch")


def _own(path: Path | None, phases: list[Phase]) -> Table | None:
    """A schedule of the user's own, which must fit the strategy's pipeline."""
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
            f"says {given[0]}, {given[1]}, {given[2]}: make them alike",
            field="table",
        )
    return rows


def _workload(target: str, batch: int | None) -> Any:
    from rayps.workload.base import load

    workload = load(target)
    if batch is not None:
        whole = workload.data

        def data() -> Any:
            found = whole()
            found.batch_size = batch
            return found

        workload.data = data  # type: ignore[method-assign]
    return workload


def _divisions(workload: Any, target: str | None, phases: list[Phase], workers: int | None) -> list[Any]:
    """Of each phase. Raises what a run would, before anything starts."""
    from rayps.runtime.preflight import preflight
    from rayps.strategies.job import JobSpec

    found = []
    for phase in phases:  # one by one: phases may have replicas of different sizes where no workers are given
        alone = [Phase(None, phase.strategy)]
        spec = JobSpec(str(target), wire(alone), _workers(phase.strategy, workers)).check()
        checked = preflight(workload, alone, spec)
        for warning in checked.warnings:
            show.note(f"warning: {warning}")
        found += checked.divisions
    return found


def _workers(strategy: StrategyView, given: int | None) -> int:
    replica = replica_of(strategy)
    count = (1 if replica is None else replica.stages * replica.tensor) if given is None else given
    if count < 1:
        raise ConfigError(f"workers is {count}: give a whole number of at least 1", field="workers")
    return count


def _timeline(strategy: StrategyView, own: Table | None, workload: Any, division: Any, workers: int) -> Timeline | None:
    replica = pipeline_of(replica_of(strategy))
    if replica is None:
        return None
    rows = own
    if rows is None:
        rows = table(replica.schedule, replica.stages, replica.micro_batches, replica.chunks)
    if workload is None or division is None:
        return simulate(rows)
    from rayps.runtime.cost_report import seconds

    chunks = seconds(workload, division, replicas_in(strategy, workers), replica.micro_batches)
    share = {"F": 1 / 3, "B": 1 / 3, "W": 1 / 3} if splits(rows) else {"F": 1 / 3, "B": 2 / 3}
    return simulate(rows, lambda action: chunks[action.chunk] * share[action.kind])


def _draw(found: list[_Plan], path: Path) -> None:
    drawn = [each for each in found if each.line is not None]
    if not drawn:
        raise ConfigError(
            "--svg draws a pipeline's schedule, and this strategy has none: pipeline:stages=4", field="svg"
        )
    each = drawn[0]
    assert each.line is not None
    try:
        path.write_text(
            gantt.svg(
                each.line,
                f"{each.title}, {float(each.line.idle):.1%} of the time waiting",
                unit=" s" if each.timed else "",
            ),
            encoding="utf-8",
        )
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}", field="svg") from None
    show.note(f"drawn to {path}")


def _grid_words(grid: Grid) -> str:
    replicas = f"{grid.data} replica{'s'[: grid.data != 1]}"
    parts = [f"{grid.stage} stages"] * (grid.stage > 1) + [f"{grid.tensor} tensor ranks"] * (grid.tensor > 1)
    return f"{grid.size} worker{'s'[: grid.size != 1]}: {replicas}{' of ' if parts else ''}{' x '.join(parts)}"


def _who(grid: Grid, column: int) -> str:
    return Grid(1, grid.stage, grid.tensor).words(column) or "each worker"


def _bytes(count: float | None) -> str:
    return "" if count is None else amount(count)


def _count(count: float | None) -> str:
    return "" if count is None else f"{count:,.0f}" if count == int(count) else f"{count:.2g}"
