"""What is wrong with a workload is found before any worker starts."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from rayps.core.errors import ConfigError, WorkloadError
from rayps.core.grid import Grid
from rayps.core.replica import Pipeline
from rayps.core.strategy import Phase, StrategyView
from rayps.core.topology import JobFacts, servers_of
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
from rayps.strategies.job import JobSpec
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
    data = _data(workload, all(phase.strategy.rows.remote for phase in phases))
    grids = [phase.strategy.grid(spec.workers) for phase in phases]
    with apart():  # the user's own random numbers stay as they were
        model = model_of(workload)
        tables = tables_of(model)
        if tables:
            try_out(workload, model)
    _check_topologies(phases, spec, tables, workload.clip_norm)
    layout = Layout.of((name, p) for name, p in model.named_parameters() if p.requires_grad)
    _refuse_closure(optim.build(workload.optimizer, layout))
    _try_schedule(workload, phases, layout, tables)
    both = list(zip([phase.strategy for phase in phases], grids, strict=True))
    divisions = [_division(workload, strategy, grid, model, data) for strategy, grid in both]
    asked = [strategy for strategy, _ in both if strategy.rows.by_client]
    warnings = misspelt(workload)
    warnings += [said for strategy in asked for said in federated(strategy, workload, data, spec)]
    if any(servers_of(strategy) for strategy, _ in both) or any(grid.tensor > 1 for grid in grids):
        optim.check_elementwise(workload.optimizer, layout)
        said = dict.fromkeys(strategy.scale_warning(grid.data) for strategy, grid in both)
        if any(said) and optim.ignores_scale(workload.optimizer, layout):
            warnings += [each for each in said if each]
    steps = [_steps(data, strategy, grid) for strategy, grid in both]
    return PreflightFindings(steps, warnings, tables, divisions, (bytes_of(model), bytes_of(data)))


def _steps(data: Data, strategy: StrategyView, grid: Grid) -> int:
    """Rounds of an epoch. Raises DataError, ConfigError: no worker could keep its rows."""
    return strategy.rows.rounds(data, grid.data)


def _division(workload: Workload, strategy: StrategyView, grid: Grid, model: nn.Module, data: Data) -> Division | None:
    """How the model is divided under a strategy. Raises ConfigError, WorkloadError."""
    replica = strategy.topology.replica
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


def _check_topologies(
    phases: list[Phase], spec: JobSpec, tables: tuple[SparseTable, ...], clip_norm: float | None
) -> None:
    """Refuse what cannot be combined. Raises ConfigError."""
    facts = JobFacts(
        spec.server_group,
        None,
        any(phase.strategy.topology.group_size for phase in phases),
        tuple(table.name for table in tables),
        clip_norm,
    )
    for number, phase in enumerate(phases):
        # a branch is where the job begins: later phases need not know of it
        phase.strategy.topology.check(phase.strategy.name, facts if number else replace(facts, branch=spec.branch))
    if spec.server_group is not None and not tables and not any(servers_of(phase.strategy) for phase in phases):
        raise ConfigError(
            f"server_group is {spec.server_group!r}, and {phases[0].strategy.name} without sparse tables needs no "
            "servers: leave it out, or use parameter_server",
            field="server_group",
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
    for adagrad in dict.fromkeys(
        None if servers is None else servers.adagrad for servers in (servers_of(phase.strategy) for phase in phases)
    ):
        rates = rates_of(chosen(recipe, adagrad), layout)
        if rates is not None:
            rates.at(1)
    for table in tables:
        Scheduled(recipe, Ticks()).pace(table, table_rule(table)).at(1)
