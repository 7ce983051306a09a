"""Check a workload's data, model, optimizer and strategy before any worker trains, in the driver's process.

While the workers start, a batch is tried in a child process: `rayps.runtime.checks.trial`.
"""

from __future__ import annotations

from typing import NamedTuple

from rayps_client.errors import ConfigError
from rayps_client.trainers.local_work import counted, no_whole_batch
from rayps_client.values import Json
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rayps.core.grid import Grid
from rayps.core.job.user_code import user_code
from rayps.core.job.warm_start import StartFrom
from rayps.core.refusals.table import refuse
from rayps.core.rows.phase_rounds import OPEN, Calendar
from rayps.core.strategy.elastic import ElasticWorkers
from rayps.core.strategy.elastic_support import check_phases, takes_leases
from rayps.core.strategy.replica import Pipeline
from rayps.core.strategy.strategy import Phase, StrategyView
from rayps.core.strategy.strategy_families import SHARED_VECTOR, ends_together, has_remote_clients, learns_by_client
from rayps.core.strategy.topology import JobFacts, backup_in, replica_of, servers_of, shard_of
from rayps.data.base import Data, Nested, map_tensors
from rayps.data.batch_parts import sample_of
from rayps.data.dealt_rows import must_have_row_numbers
from rayps.data.unsupported import is_ray_data, ray_data_way
from rayps.federated.check import ClientPrivacy, federated
from rayps.federated.strategy_interface import FederatedView
from rayps.privacy.options import privacy_in
from rayps.privacy.row_level import RowPrivacy
from rayps.ps.client.table_face import find_tables
from rayps.ps.protocol.space import SparseTable
from rayps.ps.server.dense_segment import make_optimizer_factory
from rayps.runtime.checks.last_batches import check_last_batches
from rayps.runtime.checks.row_privacy import private_phases
from rayps.runtime.driver.model_memory import limit_model
from rayps.runtime.size.membership import Membership
from rayps.strategies.job import JobSpec
from rayps.strategies.job_features import features_of_phase
from rayps.tensors import optim
from rayps.tensors.division import Division
from rayps.tensors.flat import Layout
from rayps.tensors.learning_rate import Recipe, rates_of, recipe_of
from rayps.tensors.named_tensors import ModelNames, StartPoint, start_point, usable_start
from rayps.worker.loops.divisible_parameters import check_divisible
from rayps.worker.loops.loop_of_family import loop_class
from rayps.worker.rows.evaluation_batches import FEWEST
from rayps.workload.adapters import check_adapters
from rayps.workload.base import Workload, check_fields, evaluates_training_data, misspelt, plan_steps
from rayps.workload.blank_model import blank
from rayps.workload.checkpoint_activations import FIELD, checkpointed_blocks
from rayps.workload.compile_model import options_of
from rayps.workload.division_face import find_division
from rayps.workload.max_norm import check_max_norm
from rayps.workload.model import apart, has_tables, model_of
from rayps.workload.model_part import WeightCheck

EVALUATED_WHILE_READ = (
    "the data has no length and is also evaluated: until a worker has read it to its end once, an evaluation reads as "
    f"many batches as were trained, at least {FEWEST}; set evaluation_batches, or define evaluation_data()"
)


class PreflightFindings(NamedTuple):
    """The result of `preflight`."""

    steps: list[int]  # one for each phase: the rounds of an epoch
    warnings: list[str]  # for the user
    tables: tuple[SparseTable, ...]  # the model's sparse tables
    divisions: list[Division | None]  # one for each phase: how the model is divided; None if a replica is one worker
    start: StartPoint | None  # the first parameters, if a file has them
    sizes: tuple[int, int]  # bytes of the model's parameters and buffers, bytes of the data's tensors
    # of an elastic job: the rows of an epoch, and those of one worker in a round; None if the workers do not change
    rows: tuple[int, int] | None = None
    drop_last: bool = False  # of an elastic job: whether an epoch's last round is left out if it has fewer rows
    blocks: int | None = None  # of an elastic job whose rows are leased: the blocks of an epoch
    private: tuple[RowPrivacy, ...] = ()  # one for each phase whose rows are private
    private_clients: tuple[ClientPrivacy, ...] = ()  # one for each phase whose clients are private


def preflight(
    workload: Workload, phases: list[Phase], spec: JobSpec, begin: StartFrom | None = None
) -> PreflightFindings:
    """Check a workload's data, model, optimizer and schedule with the job's strategies, without training.

    `begin` names the files with the first parameters; None if the parameters are drawn or a checkpoint has them.

    Raises:
        DataError, WorkloadError, ConfigError: the user's code or an option is wrong. The text says how to fix it.
        CheckpointError: the files with the first parameters are not of this model.
    """
    check_fields(workload)
    data = _load_data(workload, all(has_remote_clients(phase.strategy) for phase in phases))
    grids = [phase.grid(spec.workers) for phase in phases]
    sharded = all(shard_of(phase.strategy) is not None for phase in phases)
    with apart(), limit_model(workload):  # restores the user's random state
        # a model whose state workers divide may be larger than the memory of this process
        model = blank(workload) if sharded else model_of(workload)
        check_adapters(model)
        for phase, grid in zip(phases, grids, strict=True):
            check_max_norm(model, phase.strategy, grid.data)
    with apart():
        tables = find_tables().tables_of(model) if has_tables(model) else ()
        if tables:
            find_tables().try_out(workload, model)
    given = _collect_features(workload, model, data) | ({"profile": True} if spec.profile else {})
    given |= JobFacts(tables=tuple(table.name for table in tables)).features()
    for at, phase in enumerate(phases):
        refuse(features_of_phase(phase) | given)
        _check_topology(phase, spec, tables, workload.clip_norm, first=not at)
    _refuse_idle_group(phases, spec, tables)
    _check_batchnorm(workload, phases, model, replicas=max(grid.data for grid in grids))
    if any(shard_of(phase.strategy) == "parameters" for phase in phases):
        check_divisible(model)
    layout = Layout.of((name, p) for name, p in model.named_parameters() if p.requires_grad)
    begin, warnings = (None, []) if begin is None else usable_start(begin, spec.working_dir)
    start = None if begin is None else start_point(begin, ModelNames.of(model), spec.working_dir)
    both = list(zip([phase.strategy for phase in phases], grids, strict=True))
    steps, rows, blocks = _count_rounds(workload, phases, spec, data, tables=bool(tables))
    if blocks is None:
        calendar = Calendar(phases, steps, spec.workers, epochs=spec.epochs, rounds=spec.steps)
        plan_steps(workload, calendar.known_rounds)
    keeps_sparse = all(phase.strategy.loop == SHARED_VECTOR for phase in phases)
    optim.check_step(optim.build(recipe_of(workload), layout), keeps_sparse=keeps_sparse)
    _try_schedule(workload, phases, layout, tables)
    divisions = [_divide(workload, strategy, grid, model, data) for strategy, grid in both]
    federated_strategies = [strategy for strategy, _ in both if isinstance(strategy, FederatedView)]
    warnings += misspelt(workload)
    checked = [federated(strategy, workload, data, spec.seed) for strategy in federated_strategies]
    warnings += [warning for found in checked for warning in found.warnings]
    shares = None if spec.elastic is None or rows is None else _make_membership(spec, spec.elastic, rows, data).current
    size = spec.workers if blocks is None else 1
    most = None if spec.steps is None else spec.steps * workload.accumulate
    check_last_batches(workload, phases, size, data, model, shares=shares, most=most)
    clients = tuple(found.private for found in checked if found.private is not None)
    slices = any(servers_of(strategy) or shard_of(strategy) in ("optimizer", "gradients") for strategy, _ in both)
    if slices or any(grid.tensor > 1 for grid in grids):
        optim.check_elementwise(recipe_of(workload), layout)
        scale_warnings = dict.fromkeys(strategy.scale_warning(grid.data) for strategy, grid in both)
        if any(scale_warnings) and optim.ignores_scale(recipe_of(workload), layout):
            warnings += [each for each in scale_warnings if each]
    warnings += _warn_of_one_worker(phases, spec.workers)
    if max(steps) >= OPEN and blocks is None:
        if _counts_epochs(workload):
            refuse({"a schedule by epoch": True, "data without a length": True})
        if spec.steps is not None and workload.evaluation_batches is None and evaluates_training_data(workload):
            warnings.append(EVALUATED_WHILE_READ)
        for phase in phases:
            check_open_data(phase.name, phase.strategy, by_rounds=spec.steps is not None, tables=bool(tables))
    sizes, private = (bytes_of(model), bytes_of(data)), private_phases(both, workload, data, model)
    return PreflightFindings(
        steps, warnings, tables, divisions, start, sizes, rows, data.drop_last, blocks, private, clients
    )


def _count_rounds(
    workload: Workload, phases: list[Phase], spec: JobSpec, data: Data, *, tables: bool
) -> tuple[list[int], tuple[int, int] | None, int | None]:
    """Return the rounds of an epoch of each phase, and `rows` and `blocks` of `PreflightFindings`.

    Raises DataError or ConfigError if workers cannot be given their rows.
    """
    grids, accumulate = [phase.grid(spec.workers) for phase in phases], workload.accumulate
    steps = [_count_steps(data, phase.strategy, grid, accumulate) for phase, grid in zip(phases, grids, strict=True)]
    if spec.elastic is None:
        return steps, None, None
    check_phases(phases, spec.elastic, tables=tables, by_epoch=_counts_epochs(workload))
    if takes_leases(phases):
        must_have_row_numbers(data)
        return [OPEN], None, _count_steps(data, phases[0].strategy, Grid(1), accumulate)
    rows = _count_rows_of_workers(data, phases, workload, spec)
    members = _make_membership(spec, spec.elastic, rows, data)
    most = sum(members.shares(spec.elastic.most))
    if data.drop_last and most > rows[0] and not learns_by_client(phases[0].strategy):
        raise no_whole_batch(
            f"a round of {spec.elastic.most} workers takes {most} of {counted(rows[0])}", data.batch_size
        )
    return [members.current.rounds(rows[0])] * len(phases), rows, None


def _make_membership(spec: JobSpec, elastic: ElasticWorkers, rows: tuple[int, int], data: Data) -> Membership:
    """Return the first members of an elastic job with these rows of an epoch, and of one worker in a round."""
    return Membership(elastic, *rows, spec.workers, drop_last=data.drop_last)


def _count_rows_of_workers(data: Data, phases: list[Phase], workload: Workload, spec: JobSpec) -> tuple[int, int]:
    """Return the rows of an epoch of an elastic job, and those of one worker in a round.

    Both are 1 if rows belong to clients, because an epoch is one round.

    Raises:
        ConfigError: the rows cannot be taken by number.
    """
    elastic, least = spec.elastic, spec.workers
    assert elastic is not None, "the job is elastic"
    if learns_by_client(phases[0].strategy):
        return 1, 1
    must_have_row_numbers(data)
    most = None if elastic.global_batch is None else -(-elastic.global_batch // least)
    if workload.sync_batchnorm and most is not None and most > data.batch_size:
        raise ConfigError(
            f"sync_batchnorm is True, and with {least} workers each has {most} rows of global_batch in a round, in "
            f"several micro-batches of batch_size={data.batch_size}: raise batch_size to {most}, or the least number "
            "of workers",
            field="global_batch",
        )
    return data.rows(), data.batch_size * workload.accumulate


def _counts_epochs(workload: Workload) -> bool:
    """Return whether the learning rate has a schedule by epoch."""
    recipe = recipe_of(workload)
    return isinstance(recipe, Recipe) and recipe.every == "epoch"


def _count_steps(data: Data, strategy: StrategyView, grid: Grid, accumulate: int) -> int:
    """Return the rounds of an epoch. Raises DataError or ConfigError if workers cannot be given their rows."""
    rows = strategy.rows
    return rows.rounds(data, grid.data - backup_in(strategy), accumulate)


def check_open_data(name: str, strategy: StrategyView, *, by_rounds: bool, tables: bool) -> None:
    """Check that a strategy can train on data whose length is not known.

    `by_rounds`: whether the job ends with a number of rounds. `tables`: whether the model has sparse tables.

    Raises:
        ConfigError: the strategy needs the rounds of the run before they start, or cannot restart from a snapshot.
    """
    together = ends_together(strategy.topology)
    found: dict[str, Json] = {
        "tables beside a ring": tables and together,
        "epochs of data without a length": not by_rounds,
        "a division of the run": strategy.needs_end,
        "workers that end alone": not together,
    }
    given = {name: value for name, value in found.items() if value}
    refuse(given | {"data without a length": True, "strategy": name})


def _divide(workload: Workload, strategy: StrategyView, grid: Grid, model: nn.Module, data: Data) -> Division | None:
    """Return how the model is divided under a strategy, or None if a replica is one worker.

    Raises:
        ConfigError: a batch has fewer samples than micro-batches.
        ConfigError, WorkloadError: the model cannot be divided.
    """
    replica = replica_of(strategy)
    if replica is None or grid.columns == 1:
        return None
    if isinstance(replica, Pipeline) and replica.micro_batches > data.batch_size:
        raise ConfigError(
            f"micro_batches is {replica.micro_batches} and batch_size is {data.batch_size}: a batch cannot be cut into "
            "more micro-batches than it has samples; raise batch_size, or give fewer micro_batches",
            field="micro_batches",
        )
    with user_code("data"):
        sample = next(data.batches(rank=0, size=grid.data, seed=0, epoch=0), None)
    few = None if sample is None else sample_of(sample)
    with apart():
        found = find_division().divide(workload, replica, model, few)
        if few is not None and few.size:
            WeightCheck(workload, model).of(few)
        return found


def _collect_features(workload: Workload, model: nn.Module, data: Data) -> dict[str, Json]:
    """Return the features of a workload, its model and its data, as `rayps.core.refusals` names them."""
    found: dict[str, Json] = {
        "average": None if workload.average is None else str(workload.average),
        "compile": None if options_of(workload.compile) is None else workload.compile,
        "sync_batchnorm": workload.sync_batchnorm,
        "accumulate": workload.accumulate if workload.accumulate > 1 else None,
        "precision": workload.precision,
        "fp16": workload.precision == "fp16",
        FIELD: workload.checkpoint_activations if checkpointed_blocks(model, workload.checkpoint_activations) else None,
        "data without a length": not data.has_length,
        "loaded_by": data.ahead is not None,
    }
    return {name: value for name, value in found.items() if value}


def _check_topology(
    phase: Phase, spec: JobSpec, tables: tuple[SparseTable, ...], clip_norm: float | None, *, first: bool
) -> None:
    """Refuse what a strategy cannot be combined with. The branch concerns the first phase: the job starts from it."""
    names, branch = tuple(table.name for table in tables), spec.branch if first else None
    phase.strategy.topology.check(phase.name, JobFacts(branch, names, clip_norm, spec.server_group))


def _refuse_idle_group(phases: list[Phase], spec: JobSpec, tables: tuple[SparseTable, ...]) -> None:
    """Raise ConfigError if the job names a server group, and nothing of it is on servers."""
    if spec.server_group is not None and not tables and not any(servers_of(phase.strategy) for phase in phases):
        refuse({"server_group": spec.server_group, "nothing on servers": True, "strategy": phases[0].name})


def _check_batchnorm(workload: Workload, phases: list[Phase], model: nn.Module, replicas: int) -> None:
    """Raise ConfigError if `sync_batchnorm` is not valid, or BatchNorm layers would not be synchronized as they say."""
    given = workload.sync_batchnorm
    if not isinstance(given, bool):
        raise ConfigError(f"sync_batchnorm is {given!r}: give True or False", field="sync_batchnorm")
    private = next((phase.name for phase in phases if privacy_in(phase.strategy) is not None), None)
    if not given and replicas > 1 and private is None:  # privacy names the layer, and what takes its place
        name = next((name for name, each in model.named_modules() if isinstance(each, nn.SyncBatchNorm)), None)
        if name is not None:
            raise ConfigError(
                f"layer {name!r} is a torch.nn.SyncBatchNorm, and there is no process group of torch:\n"
                "set sync_batchnorm = True (all_reduce and hybrid) to synchronize BatchNorm layers over the workers, "
                "or use BatchNorm layers, whose statistics are each worker's own",
                field="sync_batchnorm",
            )
    if given and replicas > 1 and isinstance(model, _BatchNorm):
        raise ConfigError(
            f"sync_batchnorm is True, and model() returned a {type(model).__name__} that no module contains, so that "
            "it cannot be replaced: return torch.nn.Sequential(layer)",
            field="sync_batchnorm",
        )
    for phase in phases if given else ():
        able = loop_class(phase.strategy).view.synchronizes_batchnorm
        if not able or replica_of(phase.strategy) is not None:
            refuse({"sync_batchnorm": True, "no ring of whole models": True, "strategy": phase.name})


def _warn_of_one_worker(phases: list[Phase], workers: int) -> list[str]:
    return [
        f"shard={shard_of(phase.strategy)!r} has no effect with one worker, which holds the whole state: give more "
        "workers, or leave out shard and slice_backup"
        for phase in phases
        if workers == 1 and shard_of(phase.strategy) is not None
    ]


def _load_data(workload: Workload, remote: bool) -> Data:
    with user_code("data"):
        data = (workload.evaluation_data if remote else workload.data)()  # real clients have the training data
    with user_code("evaluation_data"):
        evaluation = workload.evaluation_data()
    for given, method in ((data, "data"), (evaluation, "evaluation_data")):
        if is_ray_data(given):
            raise ConfigError(f"{method}() returned a Ray Data {type(given).__name__}: {ray_data_way()}")
        if not isinstance(given, Data):
            raise ConfigError(
                f"{method}() returned {type(given).__name__}: return rayps.data.parquet(...), "
                "rayps.data.tensors(...), rayps.data.dataset(...) or rayps.data.iterable(...)"
            )
        given.check()
    return data


def _try_schedule(workload: Workload, phases: list[Phase], layout: Layout, tables: tuple[SparseTable, ...]) -> None:
    """Evaluate the schedule of every optimizer of the job at its first steps. Raises WorkloadError if that fails."""
    recipe = recipe_of(workload)
    if not isinstance(recipe, Recipe):
        return
    for adagrad in dict.fromkeys(
        None if servers is None else servers.adagrad for servers in (servers_of(phase.strategy) for phase in phases)
    ):
        rates = rates_of(make_optimizer_factory(recipe, adagrad), layout)
        if rates is not None:
            rates.at(1)
    for table in tables:
        find_tables().try_schedule(table, recipe)


def bytes_of(value: nn.Module | Data | Nested) -> int:
    """Return the number of bytes of all tensors in a module, a data set or nested values."""
    if isinstance(value, nn.Module):
        return sum(tensor.nbytes for tensor in [*value.parameters(), *value.buffers()])
    found: list[int] = []

    def add(tensor: Tensor) -> Tensor:
        found.append(tensor.nbytes)
        return tensor

    map_tensors(dict(vars(value)) if isinstance(value, Data) else value, add)
    return sum(found)
