"""Check a workload before any worker trains.

`preflight` checks data, model, optimizer and strategy in the driver's process. `Trial` trains and evaluates one small
batch in a child process while the workers start, so that a mistake in shapes, labels or dtypes is reported early. The
child has its own random numbers, and its results are dropped. Therefore the job's results are the same with and without
a child. A failure of the child alone (it exits, hangs, lacks memory or a file) does not end the job.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import torch
from rayps_client.errors import ConfigError, RaypsError, WorkloadError
from rayps_client.trainers.local_work import counted, no_whole_batch
from rayps_client.trainers.module_modes import evaluating
from rayps_client.values import Json
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rayps.core.grid import Grid
from rayps.core.job.user_code import user_code
from rayps.core.job.user_module import unpack
from rayps.core.job.warm_start import StartFrom
from rayps.core.refusals.table import refuse
from rayps.core.rows.phase_rounds import OPEN, Calendar
from rayps.core.strategy.elastic import ElasticWorkers
from rayps.core.strategy.elastic_support import check_phases, takes_leases
from rayps.core.strategy.replica import Pipeline
from rayps.core.strategy.strategy import Phase, StrategyView
from rayps.core.strategy.strategy_families import SHARED_VECTOR, ends_together, has_remote_clients, learns_by_client
from rayps.core.strategy.topology import JobFacts, backup_in, replica_of, servers_of, shard_of
from rayps.data.base import Batch, Data, Nested, map_tensors
from rayps.data.batch_parts import cut_batch, sample_of
from rayps.data.dealt_rows import must_have_row_numbers
from rayps.data.single_rows import stacks_of
from rayps.data.unsupported import is_ray_data, ray_data_way
from rayps.federated.check import ClientPrivacy, federated
from rayps.federated.strategy_interface import FederatedView
from rayps.privacy.options import privacy_in
from rayps.privacy.row_level import RowPrivacy
from rayps.ps.client.table_face import find_tables
from rayps.ps.protocol.space import SparseTable
from rayps.ps.server.dense_segment import optimizer_factory
from rayps.runtime.checks.last_batches import check_last_batches
from rayps.runtime.checks.row_privacy import private_phases
from rayps.runtime.driver.model_memory import limited
from rayps.runtime.records.journal import Journal
from rayps.runtime.results.early_stopping import MetricWatch
from rayps.runtime.size.membership import Membership
from rayps.strategies.job import JobSpec
from rayps.strategies.job_features import features_of_phase
from rayps.tensors import optim
from rayps.tensors.division import Division
from rayps.tensors.flat import Layout
from rayps.tensors.learning_rate import Recipe, rates_of, recipe_of
from rayps.tensors.named_parameters import NamedParameters
from rayps.tensors.named_tensors import ModelNames, StartPoint, start_point, usable_start
from rayps.tensors.optim import made
from rayps.tensors.user_loss import checked_loss
from rayps.worker.loops.divisible_parameters import check_divisible
from rayps.worker.loops.loop_of_family import loop_class
from rayps.worker.rows.evaluation_batches import FEWEST
from rayps.workload.adapters import check_adapters
from rayps.workload.base import Workload, check_fields, evaluates_training_data, misspelt, plan_steps
from rayps.workload.blank_model import blank
from rayps.workload.checkpoint_activations import FIELD, checkpoint_activations, checkpointed_blocks
from rayps.workload.compile_model import options_of
from rayps.workload.division_face import find_division
from rayps.workload.max_norm import check_max_norm
from rayps.workload.model import apart, has_tables, model_of
from rayps.workload.model_part import WeightCheck, Whole
from rayps.workload.single_row_loss import check_single_rows

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
    data = _data(workload, all(has_remote_clients(phase.strategy) for phase in phases))
    grids = [phase.grid(spec.workers) for phase in phases]
    sharded = all(shard_of(phase.strategy) is not None for phase in phases)
    with apart(), limited(workload):  # restores the user's random state
        # a model whose state workers divide may be larger than the memory of this process
        model = blank(workload) if sharded else model_of(workload)
        check_adapters(model)
        for phase, grid in zip(phases, grids, strict=True):
            check_max_norm(model, phase.strategy, grid.data)
    with apart():
        tables = find_tables().tables_of(model) if has_tables(model) else ()
        if tables:
            find_tables().try_out(workload, model)
    given = _features(workload, model, data) | ({"profile": True} if spec.profile else {})
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
    steps, rows, blocks = _lengths(workload, phases, spec, data, tables=bool(tables))
    if blocks is None:
        calendar = Calendar(phases, steps, spec.workers, epochs=spec.epochs, rounds=spec.steps)
        plan_steps(workload, calendar.known_rounds)
    keeps_sparse = all(phase.strategy.loop == SHARED_VECTOR for phase in phases)
    optim.check_step(optim.build(recipe_of(workload), layout), keeps_sparse=keeps_sparse)
    _try_schedule(workload, phases, layout, tables)
    divisions = [_division(workload, strategy, grid, model, data) for strategy, grid in both]
    federated_strategies = [strategy for strategy, _ in both if isinstance(strategy, FederatedView)]
    warnings += misspelt(workload)
    checked = [federated(strategy, workload, data, spec.seed) for strategy in federated_strategies]
    warnings += [warning for found in checked for warning in found.warnings]
    shares = None if spec.elastic is None or rows is None else _membership(spec, spec.elastic, rows, data).current
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


def _lengths(
    workload: Workload, phases: list[Phase], spec: JobSpec, data: Data, *, tables: bool
) -> tuple[list[int], tuple[int, int] | None, int | None]:
    """Return the rounds of an epoch of each phase, and `rows` and `blocks` of `PreflightFindings`.

    Raises DataError or ConfigError if workers cannot be given their rows.
    """
    grids, accumulate = [phase.grid(spec.workers) for phase in phases], workload.accumulate
    steps = [_steps(data, phase.strategy, grid, accumulate) for phase, grid in zip(phases, grids, strict=True)]
    if spec.elastic is None:
        return steps, None, None
    check_phases(phases, spec.elastic, tables=tables, by_epoch=_counts_epochs(workload))
    if takes_leases(phases):
        must_have_row_numbers(data)
        return [OPEN], None, _steps(data, phases[0].strategy, Grid(1), accumulate)
    rows = _rows_of_workers(data, phases, workload, spec)
    members = _membership(spec, spec.elastic, rows, data)
    most = sum(members.shares(spec.elastic.most))
    if data.drop_last and most > rows[0] and not learns_by_client(phases[0].strategy):
        raise no_whole_batch(
            f"a round of {spec.elastic.most} workers takes {most} of {counted(rows[0])}", data.batch_size
        )
    return [members.current.rounds(rows[0])] * len(phases), rows, None


def _membership(spec: JobSpec, elastic: ElasticWorkers, rows: tuple[int, int], data: Data) -> Membership:
    """Return the first members of an elastic job with these rows of an epoch, and of one worker in a round."""
    return Membership(elastic, *rows, spec.workers, drop_last=data.drop_last)


def _rows_of_workers(data: Data, phases: list[Phase], workload: Workload, spec: JobSpec) -> tuple[int, int]:
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


def _steps(data: Data, strategy: StrategyView, grid: Grid, accumulate: int) -> int:
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


def _division(workload: Workload, strategy: StrategyView, grid: Grid, model: nn.Module, data: Data) -> Division | None:
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


def _features(workload: Workload, model: nn.Module, data: Data) -> dict[str, Json]:
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


def _data(workload: Workload, remote: bool) -> Data:
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
        rates = rates_of(optimizer_factory(recipe, adagrad), layout)
        if rates is not None:
            rates.at(1)
    for table in tables:
        find_tables().try_schedule(table, recipe)


FEW_ROWS = 8  # the number of rows with which a batch is tried first
PRIVATE_SECONDS = 60.0  # for which workers wait until the loss of private rows was tried
WATCHED_SECONDS = 10.0  # for which workers wait until it is known whether evaluations have a metric
SINGLE_ROWS = 32  # the number of private rows whose losses are compared with that of their batch
# causes of errors in the child process that need not occur in a worker
_NOT_OF_THE_JOB = (OSError, ImportError, MemoryError, KeyboardInterrupt)
_DEVICES = ("CUDA", "NVIDIA", "cuda")  # words in the messages of device errors


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """The input of the child process: the packed workload, and the values that select the first batch of worker 0."""

    packed: bytes
    workers: int
    seed: int
    federated: bool = False
    private: bool = False  # whether the gradients of single rows are learned
    watched: bool = False  # whether a callback watches a metric other than the loss
    working_dir: str | None = None
    path: tuple[str, ...] = ()
    argv: tuple[str, ...] = ("",)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the child process: the `error` with which the job fails, or why the trial says nothing (`skipped`).

    Both are None if the batch was tried without an error. `warning` is for the user; None if there is none. `metrics`
    are the names that evaluations have; empty if the request asks for none, or two batches have other names.
    """

    error: RaypsError | None = None
    skipped: str | None = None
    warning: str | None = None
    metrics: tuple[str, ...] = ()


def main() -> None:
    """Read a TrialRequest from stdin, write a Verdict to stdout, and exit."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # drop what the user's code prints, because the workers print it too
    request: TrialRequest = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with contextlib.suppress(OSError):  # if memory runs out, the kernel should end this process
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    sys.path[:], sys.argv[:] = request.path, request.argv
    torch.set_num_threads(1)
    verdict = try_batch(request)
    try:
        text = pickle.dumps(verdict)
    except Exception as error:  # an error's data may have objects of the user, which may raise any exception
        text = pickle.dumps(Verdict(skipped=f"its result cannot be sent: {type(error).__name__}: {error}"))
    answers.write(text)
    answers.flush()
    os._exit(0)  # do not wait for the user's threads


def _exit_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def try_batch(request: TrialRequest) -> Verdict:
    """Try the first batch that the request selects, and return the verdict. No exception is raised."""
    try:
        return _train_and_evaluate(unpack(request.packed, shared=True), request)
    except RaypsError as error:
        cause = error.__cause__
        first_line = error.message.splitlines()[0]
        if isinstance(cause, _NOT_OF_THE_JOB) or _of_ray(cause):
            return Verdict(skipped=first_line)
        if error.data.get("memory") or any(word in first_line for word in _DEVICES):
            return Verdict(skipped=first_line)
        return Verdict(error=error)
    except BaseException as error:  # such an error says nothing about the job
        return Verdict(skipped=f"{type(error).__name__}: {error}")


def _of_ray(error: BaseException | None) -> bool:
    """Return whether an error was raised inside Ray. The user's code may call Ray, which only workers have joined."""
    file = getattr(sys.modules.get("ray"), "__file__", None)
    if error is None or file is None:
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(Path(file).parent)


def _train_and_evaluate(workload: Workload, request: TrialRequest) -> Verdict:
    """Call the user's methods with one batch, in the order in which a worker calls them.

    Raises WorkloadError or DataError if the user's code fails, or its loss does not suit private rows.
    """
    try:
        with user_code("data"):
            data = workload.data()
        torch.manual_seed(request.seed)
        held = Whole(workload, model_of(workload))
        checkpoint_activations(held.module, workload.checkpoint_activations)
        made(recipe_of(workload), NamedParameters(held.parameters, held.layout.names))
        with user_code("evaluation_data"):
            evaluation = workload.evaluation_data()
    except RaypsError as error:  # not an error of the job, because the driver's process could call these methods
        return Verdict(skipped=error.message.splitlines()[0])
    batch = _first(data, request)
    if batch is None:
        return Verdict(skipped="worker-0 has no row")
    held.check_weight.is_checked = True  # the whole batch says more than a few rows
    _with_few(batch, lambda some: _train(held, some))
    held.check_weight.of_pairs(batch)
    with user_code("evaluation_data"):
        evaluation_batch = next(
            iter(evaluation.batches(rank=0, size=request.workers, seed=request.seed, epoch=0)), None
        )
    names: list[tuple[str, ...]] = []
    if evaluation_batch is not None and evaluation_batch.size:
        _with_few(evaluation_batch, lambda some: names.append(_evaluate(held, some)))
        if request.watched:
            names.append(_evaluate(held, evaluation_batch))
    warning = _warn_of_rows(workload, held, data, request.seed) if request.private else None
    return Verdict(warning=warning, metrics=names[0] if request.watched and len(set(names)) == 1 else ())


def _warn_of_rows(workload: Workload, held: Whole, data: Data, seed: int) -> str | None:
    """Return what `check_single_rows` says of some rows of the data. Raises the errors of this function."""
    with user_code("data"):
        stacks = stacks_of(data, data.order(seed, 0)[:SINGLE_ROWS], SINGLE_ROWS)
    return check_single_rows(workload, held, stacks)


def _first(data: Data, request: TrialRequest) -> Batch | None:
    """Return the first batch of worker 0, or of the first client that has rows; None if there are no rows."""
    with user_code("data"):
        if request.federated:
            clients = data.clients
            first = next((k for k in range(clients.count) if len(clients.rows(k))), None)
            return None if first is None else clients.batch(clients.rows(first)[: data.batch_size])
        found = next(iter(data.batches(rank=0, size=request.workers, seed=request.seed, epoch=0)), None)
    return found if found is not None and found.size else None


def _with_few(batch: Batch, run: Callable[[Batch], None]) -> None:
    """Call `run` with a few rows of the batch. If that fails, call it with the whole batch."""
    few = batch
    if batch.size > FEW_ROWS:
        with contextlib.suppress(WorkloadError):  # the batch cannot be cut
            few = cut_batch(batch, batch.size // FEW_ROWS)[0]
    try:
        run(few)
    except RaypsError:
        if few is batch:
            raise
        run(batch)


def _train(held: Whole, batch: Batch) -> None:
    with _batch_in_errors(batch):
        held.backward(batch, 0, scalar)


def _evaluate(held: Whole, batch: Batch) -> tuple[str, ...]:
    """Evaluate a batch, and return the names of its metrics."""
    with _batch_in_errors(batch), evaluating(held.module), torch.no_grad(), user_code("evaluate"):
        return tuple(held.evaluate(batch))


def scalar(loss: Nested) -> float:
    """Return a training loss as a number. Raises WorkloadError if `checked_loss` refuses it."""
    return float(checked_loss(loss).item())


@contextlib.contextmanager
def _batch_in_errors(batch: Batch) -> Iterator[None]:
    """Add a description of the batch to errors that are raised inside the block."""
    try:
        yield
    except WorkloadError as error:
        described = WorkloadError(f"{error.message}\ngiven a batch with {words(batch)}", **error.data)
        raise described from error.__cause__


def words(batch: Batch) -> str:
    """Describe a batch: `x float32[8, 5], y int64[8]`."""
    return f"x {_words(batch.x)}, y {_words(batch.y)}"


def _words(value: Nested) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_words(item)}" for key, item in list(value.items())[:8]) + "}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(_words(item) for item in value[:4]) + ")"
    return type(value).__name__


# the most bytes of parameters, of a packed workload, or of data in memory, because the child has a copy of each
MOST_BYTES = 256 << 20
# the collector is off while modules are loaded, as in `rayps_client.machine.loading`
_MAIN = "import gc; gc.disable(); from rayps.runtime.checks.preflight import main; gc.enable(); main()"
_NICENESS = 5  # of the child: it has a third of a worker's share of a core, since workers and Ray start meanwhile


class TrialFacts(NamedTuple):
    """The facts that decide whether a batch can be tried."""

    remote: bool = False  # clients are real processes
    divided: bool = False
    gpus: float = 0.0  # GPUs of a worker
    model: int = 0  # bytes of the model's parameters and buffers
    packed: int = 0  # bytes of the packed workload
    data: int = 0  # bytes of the data's tensors


def reason_not_to_try(facts: TrialFacts) -> str | None:
    """Return why no batch is tried before the workers start, or None if a batch is tried."""
    if facts.remote:
        return "real clients have the data, and the driver has none"
    if facts.divided:
        return "the model is divided among workers"
    if facts.gpus:
        return "the workers have GPUs, and the driver has none"
    sizes = {"model": facts.model, "workload": facts.packed, "data in memory": facts.data}
    for what, size in sizes.items():
        if size > MOST_BYTES:
            return f"the {what} takes {size / 2**20:.0f} MiB, and the limit for a trial is {MOST_BYTES >> 20} MiB"
    return None


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


class Trial:
    """The driver's handle of the child process that tries a batch. `begin` starts the process."""

    def __init__(self) -> None:
        self.verdict: Verdict | None = None  # None until it is known
        self._patience = 0.0  # seconds for which `end` waits for the verdict
        self._watches: Sequence[MetricWatch] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def begin(self, facts: TrialFacts, request: TrialRequest, watches: Sequence[MetricWatch] = ()) -> None:
        """Start the process if a batch can be tried, and return at once. `watches`: what the callbacks watch."""
        reason, self._watches = reason_not_to_try(facts), watches
        self._patience = PRIVATE_SECONDS if request.private else WATCHED_SECONDS if request.watched else 0.0
        if reason is not None:
            self.verdict = Verdict(skipped=reason)
            return
        more = {
            "PYTHONPATH": os.pathsep.join(request.path),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "RAY_ENABLE_AUTO_CONNECT": "0",
        }  # the process has not joined Ray, and the user's code must not start one
        cwd = request.working_dir if request.working_dir and Path(request.working_dir).is_dir() else None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | more,
                cwd=cwd,
                start_new_session=True,
            )
        except OSError as error:
            self.verdict = Verdict(skipped=f"no process could be started: {error}")
            return
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICENESS)
        self._thread = threading.Thread(
            target=self._exchange, args=(self._process, request), daemon=True, name="rayps-trial"
        )
        self._thread.start()

    def check(self) -> None:
        """Raise the WorkloadError or DataError that the process has found, if any so far.

        Raises ConfigError if the name of a metric that a callback watches is misspelt.
        """
        if self.verdict is not None and self.verdict.error is not None:
            raise self.verdict.error
        self._missing()

    def _missing(self) -> list[str]:
        """Return a warning for each watched metric that the tried batch does not have."""
        names = () if self.verdict is None else self.verdict.metrics
        found = [watch.check_soon(names) for watch in self._watches if names]
        return [each for each in found if each is not None]

    def wait(self, seconds: float) -> None:
        """Wait until there is a verdict, but at most `seconds`."""
        if self._thread is not None:
            self._thread.join(seconds)

    def end(self, journal: Journal) -> None:
        """End the child process, because the workers have started. If no batch was tried, write the reason as an event.

        If rows are private, first wait for the verdict: a loss that does not suit them would learn only noise. Also
        wait, for a shorter time, if a callback watches a metric: the first evaluation may be hours away.

        Raises the WorkloadError or DataError that the process has found, and ConfigError as `check` does.
        """
        self.wait(self._patience)
        self.check()
        verdict, begun = self.verdict, self._process is not None
        self.close()
        if verdict is None and begun:
            verdict = Verdict(skipped="the workers started first")
        if verdict is not None and verdict.skipped is not None:
            journal.event("choice", f"no batch was tried before the workers started: {verdict.skipped}")
        if verdict is not None and verdict.warning is not None:
            journal.event("warning", verdict.warning)
        for warning in self._missing():
            journal.event("warning", warning)

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None and self._thread is not None:
            if process.returncode is None:  # also end the processes that the user's code started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            self._thread.join()
            process.wait()

    def _exchange(self, process: subprocess.Popen[bytes], request: TrialRequest) -> None:
        given, taken = process.stdin, process.stdout
        assert given is not None
        assert taken is not None
        self.verdict = _answer(process, given, taken, request)


def _answer(process: subprocess.Popen[bytes], given: IO[bytes], taken: IO[bytes], request: TrialRequest) -> Verdict:
    """Send the request to the child process, and return the verdict that it sends.

    The child's stdin stays open until then, because the child ends itself when its stdin is closed.
    """
    with contextlib.suppress(OSError), given, taken:
        try:
            pickle.dump(request, given)
            given.flush()
            found: Verdict = pickle.load(taken)
            return found
        except (OSError, EOFError, pickle.UnpicklingError):
            pass
    return Verdict(skipped=f"the child process ended with exit code {process.wait()}")
