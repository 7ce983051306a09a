"""`rayps.run`: call a function on several workers, and start them again after a death."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rayps_client.errors import ConfigError, RaypsError, TrainingError
from rayps_client.values import Json

from rayps.cluster.local import Cluster
from rayps.core.job.job_status import Status
from rayps.core.job.records import ProgressRecord
from rayps.core.spelling import suggests_names
from rayps.core.strategy.strategy import Phase
from rayps.core.urls import is_url, location_of
from rayps.runtime.driver.driver import Driver
from rayps.runtime.own_loop.loop_job import LoopJob
from rayps.runtime.own_loop.named import load
from rayps.runtime.records.display import Display
from rayps.runtime.records.journal import Journal
from rayps.runtime.training import (
    describe_resume,
    folder_for_traces,
    folder_to_resume,
    must_take_checkpoints,
    open_ray,
    stops,
    wants_traces,
)
from rayps.strategies.catalogue import StrategySpec, parse_for_loop, wire
from rayps.strategies.job import LOOP_TIMEOUT, JobSpec

_Result = TypeVar("_Result")
FAILURES = 3  # max_failures of a run with a folder for saved states


@suggests_names
def run(
    train_fn: Callable[..., _Result] | str,
    *,
    workers: int,
    strategy: StrategySpec = "all_reduce",
    params: dict[str, Json] | None = None,
    checkpoint: str | Path | None = None,
    resume: bool | str | Path = False,
    max_failures: int | None = None,
    seed: int = 0,
    resources: dict[str, float] | None = None,
    profile: str | Path | None = None,
    address: str | None = None,
    timeout: float = LOOP_TIMEOUT,
    progress: bool | Callable[[ProgressRecord], None] = True,
    cluster: Cluster | None = None,
) -> list[_Result]:
    """Call `train_fn()` on `workers` Ray actors in parallel, and return a list of their results, one for each rank.

    `train_fn` is a function, or its name "file.py:train_fn". Inside it, `rayps.world()` returns rank and size,
    `rayps.wrap` gives model and optimizer a strategy, `rayps.log` logs numbers, `rayps.save` saves a state, and
    `rayps.restore` returns the newest one. `strategy` is the default of `rayps.wrap`. `params` are the function's
    keyword arguments; a function without arguments reads them by `rayps.params()`.

    If a worker dies, all workers are started again, at most `max_failures` times, and the function continues from the
    newest saved state, or anew if there is none. The default of `max_failures` is 3 with a folder `checkpoint`, into
    which states are saved, and otherwise 0: the run then ends with the first death. `resume=True` continues from the
    newest state in the folder; it may also be the path of a checkpoint.

    `seed` sets torch's random numbers, which differ between ranks: runs with the same seed draw the same numbers.

    `profile` is a new folder for traces of a few steps, one file for each worker, which https://ui.perfetto.dev opens.
    A step is one of a wrapped optimizer; in a loop that wraps none, a call of `rayps.log`.

    Lines that workers print are shown on stderr at once, each after the worker's name. `address` is the Ray cluster to
    join, as for `rayps.train`. `timeout`: the seconds for which a worker waits for another one in a step, such as for
    rank 0 while it validates alone. `progress` is as for `rayps.train`, without a bar.

    Raises:
        ConfigError, CheckpointError, ClusterError, NoResources: the workers cannot be started.
        ActorDied: a worker's process died; names the worker, its number of optimizer steps and the reason.
        TrainingError: workers died more often than `max_failures`.
        WorkloadError: `train_fn` raised an exception, or it returned on one worker while another takes more steps.
        KeyboardInterrupt: Ctrl-C was pressed. The text says what was saved.
        RaypsError: the error that the first failing worker raised.

    Example:
        def train_fn():
            return rayps.world().rank

        rayps.run(train_fn, workers=2)  # [0, 1]
    """
    if not isinstance(train_fn, str) and not callable(train_fn):
        raise ConfigError(
            f"train_fn is an object of {type(train_fn).__name__}, which cannot be called: give a function, or its path "
            "as 'module:function'; for a workload, call rayps.train",
            field="train_fn",
        )
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ConfigError(f"workers is {workers!r}: give a whole number of at least 1", field="workers")
    function: Callable[..., _Result] = load(train_fn, str(Path.cwd())) if isinstance(train_fn, str) else train_fn
    folder = None if checkpoint is None else location_of(checkpoint)
    spec = JobSpec(
        run=train_fn if isinstance(train_fn, str) else _name_of(train_fn),
        strategy=_encode_strategy(strategy),
        workers=workers,
        resources={"cpu": 1.0} | (resources or {}),
        working_dir=str(Path.cwd()),
        max_failures=(0 if folder is None else FAILURES) if max_failures is None else max_failures,
        timeout=timeout,
        params=dict(params or {}),
        seed=seed,
        profile=wants_traces(profile),
    ).check()
    resumed, passed = folder_to_resume(resume, folder)
    if folder is not None:
        must_take_checkpoints(folder, resumed)
    display = Display(bar=False) if progress is True else None
    journal = Journal(
        on_progress=progress if callable(progress) else None,
        on_event=display.event if display else None,
        on_lines=display.lines if display else None,
    )
    if folder is not None and not is_url(folder):
        journal.time_folder, journal.time_anew = Path(folder), True
    for warning in passed:
        journal.event("warning", warning)
    traces = folder_for_traces(profile, journal)
    job = LoopJob(function, spec, journal, checkpoints=folder, resume=resumed, profile=traces)
    driver = Driver(job)
    driver.preflight()
    opened = cluster if cluster is not None else open_ray(address, spec, journal)
    try:
        with stops(driver, lambda text: journal.event("stopping", text)) as interrupts:
            outcome = driver.run(opened)
    finally:
        if opened is not cluster:
            opened.close()
    if interrupts and outcome.status is Status.STOPPED:
        raise KeyboardInterrupt(f"{outcome.message}\n{describe_resume(outcome)}")
    if outcome.status is not Status.SUCCEEDED:
        raise outcome.error if isinstance(outcome.error, RaypsError) else TrainingError(outcome.message)
    return job.results


def _encode_strategy(strategy: StrategySpec) -> Json:
    return wire([Phase(None, parse_for_loop(strategy))])


def _name_of(function: Callable[..., object]) -> str:
    """Return a name for the record of the run, of the form of `JobSpec.run`."""
    name = getattr(function, "__name__", type(function).__name__)
    return f"{getattr(function, '__module__', None) or '__main__'}:{name if name.isidentifier() else 'train_fn'}"


__all__ = ["run"]
