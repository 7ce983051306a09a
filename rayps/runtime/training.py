"""`rayps.train`: train a workload with several Ray actors in one call."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

import pyarrow as pa
from rayps_client import parameters
from rayps_client.errors import CheckpointError, ConfigError, RaypsError, TrainingError
from rayps_client.machine.loading import without_collection
from rayps_client.values import Json, JsonObject
from torch import nn

from rayps.cluster.local import LOCAL_CPUS, Cluster
from rayps.cluster.reservation import torch_threads
from rayps.core import metrics
from rayps.core.job.job_status import Status
from rayps.core.job.records import Event, ProgressRecord
from rayps.core.refusals.table import refuse
from rayps.core.spelling import suggests_names
from rayps.core.strategy.strategy import Phase
from rayps.core.time.goodput import JobTime
from rayps.core.time.time_report import report_of
from rayps.core.urls import Location, is_url, location_of
from rayps.federated.client_states_backup import ClientStatesBackup
from rayps.federated.client_states_file import StoredStates
from rayps.federated.rules.client_scores import report_clients, report_rounds
from rayps.federated.strategy_interface import FederatedView
from rayps.privacy.claim import claim_of_run
from rayps.ps.client.table_face import find_tables
from rayps.runtime.checks.dry_run import rehearse
from rayps.runtime.driver.driver import Driver
from rayps.runtime.driver.workload_job import WorkloadJob
from rayps.runtime.records.display import Display
from rayps.runtime.records.journal import Journal
from rayps.runtime.records.state_folder import StateFolder
from rayps.runtime.records.status import Outcome
from rayps.runtime.records.trace_folder import TraceFolder
from rayps.runtime.results.callbacks import CallbackRunner, RunHandle, runner_of
from rayps.runtime.results.job_clients import ClientResult, JobClients
from rayps.runtime.results.saved_model import save_model
from rayps.strategies.catalogue import StrategySpec, parse, wire
from rayps.strategies.job import JobSpec, elastic_fields, gpus_of_servers
from rayps.strategies.job_features import features_of_phase
from rayps.tensors.checkpoints import checkpoint as checkpoints
from rayps.tensors.checkpoints.checkpoint_place import CheckpointPlace, ObjectStore
from rayps.tensors.snapshot import Snapshot
from rayps.tensors.weight_average import check_average
from rayps.workload.base import Workload, as_workload, check_fields, is_workload, workload_of
from rayps.workload.base import load as load_workload
from rayps.workload.callback import Callback
from rayps.workload.model import has_tables


@dataclass(slots=True, repr=False)
class Result:
    """The result of a run: final metrics, the history of its rounds, its events, its model.

    Example:
        result = rayps.train(work, workers=2)
        result.metrics["loss"]
        result.history.column("loss")  # one value for each round
        model = result.model()

    `best` is the checkpoint of the best evaluation, if a `rayps.BestCheckpoint` kept one.
    """

    metrics: dict[str, float]
    history: pa.Table
    events: list[Event]
    checkpoint: Location | None
    workload: Workload
    snapshot: Snapshot
    # from a sparse table's name to the states of its segments; empty if the checkpoint has them
    tables: dict[str, list[bytes]] = field(default_factory=dict)
    params: JsonObject = field(default_factory=dict)  # all parameters of the workload, those with default values too
    best: Location | None = None
    # the folder with the state that `snapshot` stands for, if the run had no folder for checkpoints; removed with it
    scratch: StateFolder | None = None
    time: JobTime = field(default_factory=JobTime)  # where the time of workers and servers went
    federated: JobClients | None = None  # the clients of a federated job
    # what a private job claims: epsilon, delta, against whom it holds, in numbers and words; None if it is not private
    privacy: JsonObject | None = None

    def __repr__(self) -> str:
        found = ", ".join(f"{name}={value:.4g}" for name, value in self.metrics.items())
        saved = f", checkpoint={str(self.checkpoint)!r}" if self.checkpoint else ""
        return f"Result({found or 'no metrics'}, {self.history.num_rows} rounds, {len(self.events)} events{saved})"

    @property
    def report(self) -> JsonObject:
        """Where the time went, what costs most of it, and what to change: see `time_report.report_of`."""
        return report_of(self.time)

    @property
    def client_rounds(self) -> pa.Table | None:
        """How single clients' updates differed in each round (`report=clients`): see `client_scores`; None if unknown.

        Columns: round, client, weight, norm, cosine, share, agreement, loss, and deviations of three of them.
        """
        return report_rounds(self.events)

    @property
    def client_report(self) -> pa.Table | None:
        """One row for each client: drift, and whether it is an outlier (`report=clients`); None if unknown.

        The columns are those of `rayps.federated.rules.client_scores.report_clients`.
        """
        rounds = self.client_rounds
        return None if rounds is None else report_clients(rounds)

    @property
    def costs(self) -> list[Event]:
        """The events with the costs of a step, one for each phase: see `rayps.runtime.results.cost_report.measured`."""
        return [event for event in self.events if event["kind"] == "costs"]

    def model(self, *, average: bool = False) -> nn.Module:
        """Return the trained model on the CPU, in evaluation mode, with its sparse tables in this process.

        In evaluation mode dropout is off, and BatchNorm uses its running statistics. Call `.train()` on the model to
        train it further. With `average` the dense parameters and floating-point buffers are the average of the weights
        (`Workload.average`), whose metrics are `metrics`. Other buffers and sparse tables are those at the end.

        Raises:
            ConfigError: `average` is True, and the workload has no average.
        """
        whole = snapshot = self.snapshot.loaded()
        if average:
            snapshot = whole.averaged(self.workload.average)
            if snapshot is whole:
                raise ConfigError(
                    "there is no average of the weights: give the workload one, such as average = rayps.EMA(0.999), "
                    "and as many steps as its start, or leave average out to take the last parameters",
                    field="average",
                )
        model = snapshot.fill(self.workload.model())
        if self.tables:
            model = find_tables().load_states(model, self.tables)
        elif self.checkpoint and has_tables(model):
            with checkpoints.tables_of(self.checkpoint) as tables:
                model = find_tables().load(model, tables)
        return model.eval()

    @property
    def clients(self) -> list[str]:
        """The names of a federated job's clients, by number; [] if the strategy has no simulated clients."""
        return [] if self.federated is None else self.federated.names

    def client(self, name: str) -> ClientResult:
        """Return a client of a federated job, with its personal model: see `docs/federated.md`.

        Raises:
            ConfigError: there is no client of this name, it has no personal model, or the job has no clients.

        Example:
            result = rayps.train(clients, strategy=rayps.Ditto(), workers=2)  # data with clients
            model = result.client(result.clients[0]).model()
        """
        if self.federated is None:
            raise ConfigError(
                "the job has no clients: only federated strategies have personal models, such as ditto, fedper, or "
                "fedavg with finetune=1",
                field="client",
            )
        return self.federated.client(name)

    def save(self, folder: str | Path, *, average: bool = False) -> Path:
        """Write the trained model into a new folder that needs no rayps, and return the folder.

        Parameters and buffers are in `model.safetensors`, each tied tensor once; `rayps.load_state(model, folder)` or
        `safetensors.torch.load_model` reads them. If the model has `save_pretrained` (Hugging Face), it writes the
        folder, so that `from_pretrained` reads it. The rows of sparse tables are in the folder `tables`. `average` is
        that of `model`: the parameters are the average of the weights.

        Raises:
            CheckpointError: the folder has files already, or cannot be written.
            ConfigError: `average` is True, and the workload has no average.

        Example:
            rayps.train(work, workers=2).save("digits")
            model = rayps.load_state(Digits().model(), "digits")
        """
        return save_model(self.model(average=average), folder)


@suggests_names
def train(
    workload: Workload | type[Workload] | str,
    *,
    strategy: StrategySpec = "all_reduce",
    workers: int | tuple[int, int] = 1,
    epochs: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    resume: bool | str | Path = False,
    start_from: str | Path | JsonObject | None = None,
    resources: dict[str, float] | None = None,
    address: str | None = None,
    max_failures: int = 3,
    timeout: float = 60.0,
    progress: bool | Callable[[ProgressRecord], None] = True,
    cluster: Cluster | None = None,
    server_group: str | None = None,
    branch: str | None = None,
    quota: dict[str, float] | None = None,
    name: str | None = None,
    profile: str | Path | None = None,
    dry_run: bool = False,
    params: Mapping[str, Json] | None = None,
    callbacks: Sequence[Callback] = (),
    evaluate_every: int | None = None,
    keep_checkpoints: int = 2,
    global_batch: int | None = None,
    elastic: Mapping[str, Json] | None = None,
    balance: bool = False,
    ledger: str | Path | None = None,
) -> Result:
    """Train a workload with `workers` Ray actors and return the result.

    `workload` is a Workload, its class or its name ("digits.py:Digits"). `strategy` is a Strategy or its text form, as
    "parameter_server:staleness=3,shards=2", or "easgd.py:EASGD:rho=0.1" for your own class in the current folder. A
    list of (epochs, strategy) changes the strategy during the run. If the strategy's `replica` is several workers,
    `workers` must be a multiple of their number. Each worker then holds a part of the model, and the initial parameters
    are drawn in this process. Without `epochs` or `steps` (batches per worker) the run trains one epoch.

    A worker or shard that dies is replaced, up to `max_failures` times. A peer that does not answer for `timeout`
    seconds counts as dead, and so does a worker in which one call of your code takes longer (three minutes for a
    method's first call). If your code exits or raises, the run ends with the method, the worker and the round.

    `checkpoint` is the folder for checkpoints, or a URL such as `s3://bucket/run`. A state is saved there after every
    epoch (every tenth with federated clients), or every `checkpoint_every` rounds (a round that ends while a state is
    being saved is skipped). `resume=True` continues from the newest checkpoint that is complete and finite. `resume`
    may also be the path or URL of a checkpoint.

    `start_from` names files with the first parameters and buffers: a safetensors file, the index of several, a folder
    of `Result.save` or of Hugging Face, or a checkpoint. The run starts at round 0 with a new optimizer, and names and
    shapes must be those of the model. A dict has further options: {"path": "base", "strict": False} uses what fits and
    draws the rest, and "remove_prefix" and "add_prefix" change the names in the file.

    `profile` is a new folder for traces of a few rounds, one file for each worker, which https://ui.perfetto.dev opens.

    `dry_run` trains only three rounds of each strategy in real workers, with evaluation, a checkpoint and a resume, and
    then reports the rounds, time, memory and traffic of the whole run as the last event. It leaves nothing behind:
    callbacks are checked, but not called.

    `address` is the Ray cluster to join: "host:port" of its head, or "auto" for the one that RAY_ADDRESS names or that
    runs on this machine. Without `address`, the run uses the Ray that the process has joined. If there is none, a
    private Ray is started on this machine, with as many logical CPUs as are needed, and ended without leaving files. A
    process can be in only one Ray. To join `address`, the process leaves a Ray that rayps started or joined, unless a
    run uses that Ray. If your own code called ray.init(), the process stays in that Ray, and `address` is refused.

    `resources` are those of one worker: {"cpu": 1, "gpu": 1}. Unless `cluster` is given, one batch is tried in a child
    process while workers start, so that a mistake in shapes, labels or dtypes is reported early. If `progress` is True,
    the progress is shown on stderr. If it is a function, it is called with the progress, at most twice a second; to be
    called at each round, evaluation or checkpoint, give `callbacks` (`rayps.Callback`), which are called in this
    process in addition to those of the workload.

    `workers=(2, 8)` is an elastic job: it starts with 2 workers, takes up to 8 where resources are free, and continues
    with fewer if some are lost, without a return to a checkpoint. `global_batch` is the number of rows of a round over
    all workers; without it each worker takes a batch, and the rows of a round grow with the workers. `elastic` has
    further options: {"lr_scaling": "linear", "cooldown": 30, "gain": 0.5} (`rayps.core.strategy.elastic`). With
    `balance=True`, workers that compute faster take more of a round's rows, by the speeds that are measured; the number
    of workers may be fixed.

    The model is evaluated after each epoch, or after every `evaluate_every` rounds, and at the end. The newest
    `keep_checkpoints` checkpoints are kept.

    `ledger` is a folder for the ledger of private releases that several runs share: each run with `privacy` is charged
    for the releases of all, and a run is refused if its budget allows no other release. Without it, the ledger is in
    the folder for checkpoints.

    `params` are values of the workload's parameters, the fields of its class (`rayps_client.parameters`), for a
    workload that is given by its class or name: `rayps.train(Digits, params={"lr": 0.3})`.

    `server_group` names a server group of the cluster at `address` (`rayps servers start`), on which the job has a
    space called `name`, within `quota`: {"bytes": ..., "operations": per second}. `branch` is the name of another space
    of the group, with whose parameters the job starts.

    Raises:
        UserError: invalid input (ConfigError, WorkloadError, DataError, CheckpointError).
        NoResources: the cluster lacks the resources for the workers.
        ClusterError: no Ray cluster answers at `address`, it refuses the token, or the process is in another Ray.
        KeyboardInterrupt: Ctrl-C was pressed, or SIGTERM came. With a `checkpoint` folder a state is saved first. The
            text says what was saved.
        TrainingError: the run failed more often than max_failures, or its loss, a gradient, a parameter, a table's row
            or an optimizer's moment is not finite: such values never enter a result or a checkpoint.

    Example:
        result = rayps.train(work, strategy="parameter_server:shards=2", workers=2, epochs=3)
        result.metrics["loss"], result.model()
    """
    phases = parse(strategy, Path.cwd())
    kind = workload if isinstance(workload, str) else _name(workload if isinstance(workload, type) else type(workload))
    size = elastic_fields(workers, _merge_elastic_options(elastic, global_batch, balance=balance))
    spec = JobSpec(
        kind,
        wire(phases),
        size["workers"],
        epochs,
        steps,
        seed,
        {"cpu": 1.0} | (resources or {}),
        str(Path.cwd()),
        checkpoint_every,
        max_failures,
        timeout,
        name=name,
        server_group=server_group,
        branch=branch,
        quota=quota,
        start_from=str(start_from) if isinstance(start_from, Path) else start_from,
        profile=wants_traces(profile),
        params=dict(params or {}),
        evaluate_every=evaluate_every,
        keep_checkpoints=keep_checkpoints,
        elastic=size["elastic"],
    ).check()
    arguments = _arguments(dry_run, start_from, server_group if cluster is None and address is None else None)
    for phase in phases:
        refuse(features_of_phase(phase) | arguments)
    workload = _make_workload(workload, spec.params)
    folder = location_of(checkpoint) if checkpoint is not None else None
    resumed, passed = folder_to_resume(resume, folder)
    if resumed is not None:
        refuse(arguments | {"resume": True})
    if folder is not None and not dry_run:
        must_take_checkpoints(folder, resumed)
    display = Display() if progress is True else None
    on_progress = display.progress if display else progress if callable(progress) else None
    handlers = (display.event, display.lines) if display else (None, None)
    journal = Journal(on_progress=on_progress, on_event=handlers[0], on_lines=handlers[1])
    if folder is not None and not dry_run and not is_url(folder):
        journal.time_folder, journal.time_anew = Path(folder), True
    journal.shared_ledger = None if ledger is None else Path(ledger)
    for warning in passed:
        journal.event("warning", warning)
    own = cluster is None
    if dry_run:
        try:
            run = RunHandle(spec.name or "dry run", spec, parameters.effective(workload), journal, folder)
            found = runner_of(callbacks, workload, run, spec.timeout)
            return _rehearse(workload, spec, phases, journal, found, cluster, address)
        finally:
            if display:
                display.close()
    driver = Driver(
        WorkloadJob(
            workload,
            spec,
            journal,
            checkpoints=folder,
            resume=resumed,
            phases=phases,
            capture=own,
            tries=own,
            profile=folder_for_traces(profile, journal),
            callbacks=callbacks,
        )
    )
    try:
        outcome = _run(driver, cluster, address)
    finally:
        if display:
            display.close()
    return _make_result(outcome, journal, workload, driver.job_time(), spec)


def _make_clients(outcome: Outcome, workload: Workload, spec: JobSpec) -> JobClients | None:
    """Return the clients of a run that has succeeded; None if its last strategy is not federated."""
    strategy, snapshot = outcome.strategy, outcome.snapshot
    if not isinstance(strategy, FederatedView) or snapshot is None:
        return None
    states: StoredStates = outcome.clients or ClientStatesBackup()
    threads = torch_threads(spec.resources["cpu"])
    return JobClients(workload, strategy, snapshot, states, seed=spec.seed, threads=threads)


def _make_result(outcome: Outcome, journal: Journal, workload: Workload, time: JobTime, spec: JobSpec) -> Result:
    """Return the result of a run that has succeeded. Raise the error of a run that has failed."""
    if outcome.status is not Status.SUCCEEDED or outcome.snapshot is None:
        raise outcome.error if isinstance(outcome.error, RaypsError) else TrainingError(outcome.message)
    return Result(
        outcome.metrics,
        metrics.make_history(
            metrics.cut_points(journal.points, outcome.snapshot.round), used := parameters.effective(workload)
        ),
        journal.events,
        outcome.checkpoint,
        workload,
        outcome.snapshot,
        outcome.tables,
        used,
        outcome.best,
        outcome.scratch,
        time,
        _make_clients(outcome, workload, spec),
        claim_of_run(journal.events, journal.points),
    )


def _arguments(dry_run: bool, start_from: object, group: str | None) -> dict[str, Json]:
    """Return the arguments that are given, as `rayps.core.refusals` names them. `group`: one without an address."""
    found: dict[str, Json] = {"dry_run": True} if dry_run else {}
    if start_from is not None:
        found["start_from"] = str(start_from)
    return found if group is None else found | {"server_group": group, "no address": True}


def wants_traces(profile: object) -> bool:
    """Return whether a folder for traces was given. Raises ConfigError if `profile` is something else."""
    if profile is not None and not isinstance(profile, (str, Path)):
        raise ConfigError(
            f"profile is {profile!r}: give a new folder for the traces, such as 'traces', or leave it out",
            field="profile",
        )
    return profile is not None


def folder_for_traces(profile: str | Path | None, journal: Journal) -> Path | None:
    """Create and return the folder for traces. Raises ConfigError if it has traces of an earlier run."""
    if profile is None:
        return None
    folder = Path(profile).absolute()
    TraceFolder(folder, journal).must_be_empty()
    return folder


def _rehearse(
    workload: Workload,
    spec: JobSpec,
    phases: list[Phase],
    journal: Journal,
    callbacks: CallbackRunner,
    cluster: Cluster | None,
    address: str | None,
) -> Result:
    """Do a dry run and return its result, which has no checkpoint. The report is the last event."""
    opened: list[Cluster] = []

    def open_cluster() -> Cluster:
        if cluster is not None:
            return cluster
        opened.append(open_ray(address, spec, journal))
        return opened[0]

    own = cluster is None
    try:
        with tempfile.TemporaryDirectory(prefix="rayps-dry-run-") as folder:
            path = Path(folder)
            found = rehearse(
                workload, spec, phases, journal, callbacks, open_cluster=open_cluster, folder=path, tries=own
            )
    finally:
        for each in opened:
            each.close()
    journal.event("dry_run", found.text, phases=[dict(each) for each in found.phases])
    assert found.outcome.snapshot is not None, "a dry run that ends has a state"
    history = metrics.make_history([])
    return Result(found.outcome.metrics, history, journal.events, None, workload, found.outcome.snapshot)


def _name(workload: type) -> str:
    return f"{workload.__module__}:{workload.__qualname__}"


def _make_workload(given: Workload | type[Workload] | str, params: JsonObject) -> Workload:
    if isinstance(given, str):
        given = load_workload(given, params=params)
    elif isinstance(given, type) and is_workload(given):
        given = workload_of(given, params)
    elif params and isinstance(given, Workload):
        first = next(iter(params))
        raise ConfigError(
            f"params was given with an object of {type(given).__name__}, whose __init__ has run already: set the "
            f"fields of the object (work.{first} = ...), or give the class: rayps.train({type(given).__name__}, "
            "params=...)",
            field="params",
        )
    given = as_workload(given)
    if not isinstance(given, Workload):
        what = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
        example = f"{given.__name__}()" if isinstance(given, type) else "Digits()"
        raise ConfigError(
            f"workload is {what}: give an instance of a class derived from rayps.Workload, such as {example}, "
            "or its name 'digits.py:Digits'"
        )
    check_fields(given)
    check_average(given.average)
    return given


def _run(driver: Driver, cluster: Cluster | None, address: str | None) -> Outcome:
    """Run the driver on `cluster`, or on a cluster that is opened and closed for this run.

    Raises KeyboardInterrupt after Ctrl-C or SIGTERM. Its text says what was saved.
    """
    opened = None
    try:
        driver.preflight()  # report invalid input before Ray starts, because that start takes seconds
        opened = cluster if cluster is not None else open_ray(address, driver.spec, driver.journal)
        with stops(driver, lambda text: driver.journal.event("stopping", text)) as interrupts:
            outcome = driver.run(opened)
    finally:
        driver.close()
        if opened is not None and opened is not cluster:
            opened.close()
    if interrupts and outcome.status is Status.STOPPED:
        raise KeyboardInterrupt(f"{outcome.message}\n{describe_resume(outcome)}")
    return outcome


def describe_resume(outcome: Outcome) -> str:
    """Return how to continue a run that was stopped."""
    if outcome.checkpoint:
        return "--resume (resume=True) continues from there"
    return "give a folder for checkpoints (--checkpoint DIR, checkpoint=DIR) to be able to continue"


def open_ray(address: str | None, spec: JobSpec, journal: Journal) -> Cluster:
    """Join the cluster at the address, or start a private Ray with the logical CPUs that the job needs."""
    with without_collection():
        from rayps.cluster.ray_cluster import RayCluster

    if address is not None:
        return RayCluster.join(address)
    workers = spec.most_workers  # room for an elastic job to grow
    cpus = math.ceil(workers * spec.resources["cpu"])
    cores = os.cpu_count() or 1
    if cpus > (most := max(LOCAL_CPUS, cores)):
        raise ConfigError(
            f"the job needs {cpus} CPUs ({workers} workers x {spec.resources['cpu']:g}), and a private Ray on "
            f"this machine has at most {most}:\nuse fewer workers, or less CPU for each (--cpus-per-worker, resources) "
            "if the memory suffices for so many processes, or join a cluster with address=",
            field="workers",
            code="too_large",
        )
    if cpus > cores:
        journal.event(
            "warning", f"{workers} workers share {cores} cores: enough to try the job, but too slow for real training"
        )
    gpus = math.ceil(workers * spec.resources.get("gpu", 0) + gpus_of_servers(spec)) or None
    return RayCluster.local(max(cpus, 1), None if gpus else 0)


def must_take_checkpoints(folder: Location, resumed: Location | None) -> None:
    """Check that new checkpoints can be written to `folder`, a folder or a URL.

    Raises CheckpointError if the folder has an earlier run's checkpoints and the run does not resume, or if the folder
    cannot be written.
    """
    try:
        if resumed is None and (held := checkpoints.newest(folder)) is not None:
            name = CheckpointPlace.of(held).name
            raise CheckpointError(
                f"{folder} holds the checkpoints of an earlier run ({name}), which a new run would replace:\n"
                "give resume=True (--resume) to continue from the newest, or another folder"
            )
        place = CheckpointPlace.of(folder)
        if isinstance(place, ObjectStore):
            place.probe()
            return
        folder = Path(folder)
        # the first save creates the folder, so that a run that fails before leaves none
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise CheckpointError(
            f"checkpoints cannot be written to {folder}: {error.strerror or error}\ngive a folder that can be written"
        ) from error


def folder_to_resume(resume: bool | str | Path, folder: Location | None) -> tuple[Location | None, list[str]]:
    """Return the checkpoint from which to resume (None if the run does not), and a list of warnings.

    There is a warning for each newer checkpoint that cannot be used: also the given one, if an earlier one can.
    """
    if resume is False:
        return None, []
    if resume is not True:
        return checkpoints.usable_at(location_of(resume))
    if folder is None:
        refuse({"resume of the newest checkpoint": True, "no folder for checkpoints": True})
    assert folder is not None, "the table of refusals has this pair"
    newest, passed = checkpoints.usable(folder)
    if newest is None:
        why = f" ({passed[0]})" if passed else ""
        raise CheckpointError(
            f"there is no complete checkpoint in {folder}{why}: start without resume, or give another folder"
        )
    return newest, passed


class Stoppable(Protocol):
    """A driver, as far as Ctrl-C is concerned."""

    @property
    def status(self) -> Status:
        """The status of the run."""

    @property
    def saves(self) -> bool:
        """Whether there is a folder for checkpoints."""

    def stop(self) -> None:
        """Request the end of the run."""


@contextlib.contextmanager
def stops(driver: Stoppable, notify: Callable[[str], None]) -> Iterator[list[int]]:
    """Handle Ctrl-C during a run: the first stops the run after a last checkpoint, the second ends the run at once.

    SIGTERM has the same effect. Yield the list of the signals received so far. In a thread other than the main thread,
    signals are not handled.
    """
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1 or driver.status not in (Status.RUNNING, Status.RECOVERING):
            raise KeyboardInterrupt
        driver.stop()
        if driver.saves:
            notify("a checkpoint is saved first; press Ctrl-C again to end the run at once")

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python


def _merge_elastic_options(elastic: Mapping[str, Json] | None, rows: int | None, *, balance: bool) -> JsonObject | None:
    own: JsonObject = {} if rows is None else {"global_batch": rows}
    own |= {"balance": balance} if balance else {}
    return dict(elastic or {}) | own if own or elastic is not None else None
