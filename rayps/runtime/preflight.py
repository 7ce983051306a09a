"""What is wrong with a workload is found before any worker starts."""

from __future__ import annotations

import inspect
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from rayps.core.errors import ConfigError, WorkloadError
from rayps.core.grid import Grid
from rayps.core.user_code import user_code
from rayps.data import Data
from rayps.data.unsupported import is_ray_data, ray_data_way
from rayps.federated.check import federated
from rayps.parallel.division.divide import divide, sample_of
from rayps.parallel.division.division import Division
from rayps.ps.fixed.shard_optimizer import chosen
from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables.embedding import tables_of, try_out
from rayps.ps.tables.row_optimizers import Scheduled
from rayps.ps.tables.row_optimizers import rule_of as table_rule
from rayps.runtime.trial import bytes_of
from rayps.strategies.catalogue import Phase, Strategy
from rayps.strategies.job import JobSpec
from rayps.strategies.pipeline import Pipeline
from rayps.tensors import optim
from rayps.tensors.flat import Layout
from rayps.tensors.learning_rate import Recipe, Ticks, rates_of, recipe_of
from rayps.workload.base import Workload, check_clip_norm, misspelt
from rayps.workload.model import apart, model_of


class PreflightFindings(NamedTuple):
    """Rounds of an epoch in each phase, warnings for the user, the model's sparse tables, and how it is divided in each
    phase (None = a replica is one worker).
    """

    steps: list[int]
    warnings: list[str]
    tables: tuple[SparseTable, ...]
    divisions: list[Division | None]
    sizes: tuple[int, int]  # bytes of the model's parameters and buffers, and of the data's tensors


def preflight(workload: Workload, phases: list[Phase], spec: JobSpec) -> PreflightFindings:
    """Try data, model and optimizer.

    Raises:
        DataError, WorkloadError, ConfigError: what is wrong and the way out.
    """
    check_clip_norm(workload)
    data = _data(workload, all(phase.strategy.remote for phase in phases))
    grids = [phase.strategy.grid(spec.workers) for phase in phases]
    with apart():  # the user's own random numbers stay as they were
        model = model_of(workload)
        tables = tables_of(model)
        if tables:
            try_out(workload, model)
    group = spec.server_group is not None or any(phase.strategy.servers for phase in phases)
    for phase in phases:
        _check_servers(phase.strategy, spec, tables)
        _check_clipping(phase.strategy, workload, tables)
        if group and phase.strategy.fixed_servers:
            raise ConfigError(
                f"{_name(phase.strategy)} needs servers of its own: leave out server_group, and other phases' replicas",
                field="strategy",
            )
    if spec.server_group is not None and not tables and not any(phase.strategy.shards for phase in phases):
        raise ConfigError(
            f"server_group is {spec.server_group!r}, and {_name(phases[0].strategy)} without sparse tables needs no "
            "servers: leave it out, or use parameter_server",
            field="server_group",
        )
    if spec.branch is not None and phases[0].strategy.shards == 0:
        raise ConfigError(
            f"branch is {spec.branch!r}, and {_name(phases[0].strategy)} keeps no parameters on servers: begin with "
            "parameter_server, or leave it out",
            field="branch",
        )
    layout = Layout.of((name, p) for name, p in model.named_parameters() if p.requires_grad)
    _refuse_closure(optim.build(workload.optimizer, layout))
    _try_schedule(workload, phases, layout, tables)
    both = list(zip([phase.strategy for phase in phases], grids, strict=True))
    divisions = [_division(workload, strategy, grid, model, data) for strategy, grid in both]
    asked = [strategy for strategy, _ in both if strategy.federated]
    warnings = misspelt(workload)
    warnings += [said for strategy in asked for said in federated(strategy, workload, data, spec)]
    if any(phase.strategy.shards for phase in phases) or any(grid.tensor > 1 for grid in grids):
        optim.check_elementwise(workload.optimizer, layout)
        said = dict.fromkeys(strategy.scale_warning(grid.data) for strategy, grid in both)
        if any(said) and optim.ignores_scale(workload.optimizer, layout):
            warnings += [each for each in said if each]
    steps = [_steps(data, strategy, grid) for strategy, grid in both]
    return PreflightFindings(steps, warnings, tables, divisions, (bytes_of(model), bytes_of(data)))


def _steps(data: Data, strategy: Strategy, grid: Grid) -> int:
    """Rounds of an epoch. Raises DataError, ConfigError: no worker could keep its rows."""
    data.keeps_rows = strategy.keeps_rows
    return 1 if strategy.federated else data.steps(grid.data)


def _division(workload: Workload, strategy: Strategy, grid: Grid, model: nn.Module, data: Data) -> Division | None:
    """How the model is divided under a strategy. Raises ConfigError, WorkloadError."""
    replica = strategy.replica
    if replica is None or grid.columns == 1:
        return None
    if isinstance(replica, Pipeline) and replica.micro_batches > data.batch_size:
        raise ConfigError(
            f"micro_batches is {replica.micro_batches} and batch_size is {data.batch_size}: a batch cannot be cut into "
            "more micro-batches than it has samples; raise batch_size, or give fewer",
            field="micro_batches",
        )
    with user_code("data"):
        sample = next(data.batches(rank=0, size=grid.data, seed=0, epoch=0), None)
    with apart():
        return divide(workload, replica, model, None if sample is None else sample_of(sample))


def _check_servers(strategy: Strategy, spec: JobSpec, tables: tuple[SparseTable, ...]) -> None:
    if tables and strategy.tables is None:
        known = ", ".join(repr(table.name) for table in tables)
        raise ConfigError(
            f"the model has sparse tables ({known}), and {_name(strategy)} has no servers for them: use "
            "the strategy hybrid, or parameter_server",
            field="strategy",
        )
    elastic = spec.server_group is not None or strategy.servers > 0 or bool(tables)
    if elastic and strategy.replica is not None:
        what = "the model has sparse tables" if tables else "its servers are an elastic group"
        raise ConfigError(
            f"replica is a {strategy.replica.name} of several workers, and {what}: the two do not go together; leave "
            f"out replica, or {'the tables' if tables else 'server_group and replicas'}",
            field="replica",
        )
    if elastic and strategy.shards > 0 and strategy.compression is not None:
        raise ConfigError(
            f"compression is {strategy.compression!r}: pushes to an elastic server group travel as they are; leave it "
            "out, or use fixed servers (no server_group, no replicas, no tables)",
            field="compression",
        )


def _check_clipping(strategy: Strategy, workload: Workload, tables: tuple[SparseTable, ...]) -> None:
    """Refuse `clip_norm` where the norm would lack the rows of tables, whose mean only the servers know."""
    if workload.clip_norm is not None and tables and strategy.shards == 0:
        raise ConfigError(
            f"clip_norm is {workload.clip_norm!r} and {_name(strategy)} learns sparse tables: no worker knows the mean "
            "gradient of their rows, so that the whole norm is not known; use parameter_server, which clips each "
            "worker's push (dense part and rows together), or clip_norm = None",
            field="clip_norm",
        )


def _data(workload: Workload, remote: bool) -> Data:
    with user_code("data"):
        data = (workload.evaluation_data if remote else workload.data)()  # real clients have the data
    with user_code("evaluation_data"):
        evaluation = workload.evaluation_data()
    for given, method in ((data, "data"), (evaluation, "evaluation_data")):
        if is_ray_data(given):
            raise ConfigError(f"{method}() gave a Ray Data {type(given).__name__}: {ray_data_way()}")
        if not isinstance(given, Data):
            raise ConfigError(
                f"{method}() gave {type(given).__name__}: return rayps.data.parquet(...), "
                "rayps.data.tensors(...) or rayps.data.dataset(...)"
            )
        given.check()
    return data


def _refuse_closure(optimizer: Optimizer) -> None:
    # a step may evaluate a closure as often as it likes; a round of several workers gives it one gradient
    needed = [
        p.name
        for p in inspect.signature(optimizer.step).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if needed:
        name = type(optimizer).__name__
        raise WorkloadError(
            f"optimizer(params) gave {name}, whose step() needs {', '.join(needed)}: a round has one gradient to give "
            "it, under every strategy\nuse an optimizer whose step() needs no closure, such as SGD, Adam or Adagrad"
        )


def _try_schedule(workload: Workload, phases: list[Phase], layout: Layout, tables: tuple[SparseTable, ...]) -> None:
    """Evaluate the schedule of every optimizer of the job at its first two ticks. Raises WorkloadError."""
    recipe = recipe_of(workload)
    if not isinstance(recipe, Recipe):
        return
    for adagrad in dict.fromkeys(phase.strategy.adagrad for phase in phases):
        rates = rates_of(chosen(recipe, adagrad), layout)
        if rates is not None:
            rates.at(1)
    for table in tables:
        Scheduled(recipe, Ticks()).pace(table, table_rule(table)).at(1)


def _name(strategy: Strategy) -> str:
    return strategy.name or type(strategy).__name__
