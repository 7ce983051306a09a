"""Compare the loss that each strategy reaches with that of a plain torch loop, for three workloads of `examples`.

The plain loop is one process without rayps's training: it draws the same parameters from the seed, and each of its
steps takes, as one batch, the rows that all replicas take in a round. A strategy in step must reach the same loss. The
others differ by what defines them: staleness, or the steps between two averages.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from rayps_client.errors import ConfigError, WorkloadError, first_line
from torch import Tensor, nn

import rayps
from rayps.bench.table import BenchRow, Opt, Workers
from rayps.cluster.local import Cluster
from rayps.data import Batch, Data
from rayps.ps.client.table_face import find_tables
from rayps.workload.base import Workload, load
from rayps.workload.loss_result import loss_result
from rayps.workload.model import has_tables

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_IN_STEP = "all_reduce"


@dataclass(frozen=True, slots=True)
class Task:
    """A workload of `examples`, and its strategies instead of those of `STRATEGIES`."""

    target: str
    steps: int  # of the whole table within ten minutes on two cores
    instead: dict[str, str]  # from a strategy to the one that this workload uses instead
    in_pipeline: str | None = None  # the workload that a pipeline trains, if it is another


STRATEGIES = (
    _IN_STEP,
    "parameter_server:staleness=0",
    "parameter_server:staleness=3",
    "parameter_server:staleness=none",
    "pipeline:stages=2,micro_batches=4",
    "local_sgd:period=4",
)
TASKS = {
    "convnet": Task("convnet.py:NormedDigits", 300, {}),
    "lm": Task("language_model.py:LanguageModel", 150, {}, "language_model.py:InPipeline"),
    "recommender": Task("recommender.py:LateDeparture", 300, {_IN_STEP: "hybrid:servers=1,staleness=0"}),
}


@dataclass(frozen=True, slots=True)
class TaskRow(BenchRow):
    """The losses on the evaluation data after `steps` steps; `loss` is None if the strategy refuses the workload."""

    columns: ClassVar[str] = "task | strategy | steps | first: loss at first | loss | plain: plain torch | difference"

    task: str
    strategy: str
    steps: int
    loss: float | None
    plain: float | None  # the plain loop on the same rows
    first: float | None  # before the first step
    refused: str = ""

    @property
    def difference(self) -> float | None:
        """The loss less that of the plain loop."""
        return None if self.loss is None or self.plain is None else self.loss - self.plain

    @property
    def note(self) -> str:
        """The row in a line."""
        return self.remark or f"{self.task}, {self.strategy}: loss {self.loss:.4f}, plain torch {self.plain:.4f}"

    @property
    def remark(self) -> str:
        """Why the strategy is refused; a table has no room for it."""
        return f"{self.task}, {self.strategy}: refused: {self.refused}" if self.refused else ""


def bench_tasks(
    cluster: Cluster,
    tasks: Annotated[Sequence[str], Opt("Tasks: convnet, lm, recommender.")] = ("convnet", "lm", "recommender"),
    strategies: Annotated[
        Sequence[str], Opt("Train under this strategy alone; repeat the option for more.", "--strategy", split="")
    ] = STRATEGIES,
    *,
    workers: Workers = 2,
    steps: Annotated[int | None, Opt("Steps of each run, instead of those of the task.", least=1)] = None,
    seed: Annotated[int, Opt("Seed of the parameters and of the order of rows.")] = 0,
    report: Callable[[TaskRow], None] = lambda row: None,
) -> list[TaskRow]:
    """Train each task under each strategy; `report` is called with each row as it is ready.

    `steps` replaces the tasks' own numbers of steps.

    Raises:
        ConfigError: there is no such task.
        RaypsError: a run failed for another reason than a refusal of its strategy.
    """
    for name in tasks:
        if name not in TASKS:
            raise ConfigError(f"no task {name!r}; use some of {', '.join(TASKS)}", task=name)
    rows = []
    for name in tasks:
        count = steps or TASKS[name].steps

        @cache
        def reached(size: int, pipeline: bool, task: str = name, steps: int = count) -> tuple[float, float]:
            return train_plain(_load_work(task, pipeline), steps, size, seed)

        for given in strategies:
            strategy = TASKS[name].instead.get(given, given)
            pipeline = strategy.startswith("pipeline")
            work = _load_work(name, pipeline)
            size = 1 if pipeline else workers  # in a pipeline all workers together are one replica
            if name == "convnet":
                work.sync_batchnorm = strategy == _IN_STEP
            try:
                result = rayps.train(
                    work, strategy=strategy, workers=workers, steps=count, seed=seed, cluster=cluster, progress=False
                )
            except (ConfigError, WorkloadError) as error:
                rows.append(TaskRow(name, strategy, count, None, None, None, first_line(error)))
            else:
                first, last = reached(size, pipeline)
                rows.append(TaskRow(name, strategy, count, result.metrics["loss"], last, first))
            report(rows[-1])
    return rows


def _load_work(task: str, pipeline: bool) -> Workload:
    asked = TASKS[task]
    return load(asked.in_pipeline if pipeline and asked.in_pipeline else asked.target, str(EXAMPLES))


def train_plain(work: Workload, steps: int, size: int, seed: int) -> tuple[float, float]:
    """Train in a plain torch loop on the batches of `size` replicas; return the losses before and after.

    A step has `work.accumulate` batches, each of which has the rows of all replicas.
    """
    torch.manual_seed(seed)
    model = work.model()
    named = "named_parameters" in inspect.signature(work.optimizer).parameters
    given: list[object] = list(model.named_parameters()) if named else list(model.parameters())
    optimizer = work.optimizer(given)  # type: ignore[arg-type]  # either is what the workload asks for
    make = getattr(work, "schedule", None)
    schedule = make(optimizer) if make is not None else None
    first = _evaluate(work, model)
    batches = _yield_batches(work.data(), size, seed)
    for _ in range(steps):
        micro = list(islice(batches, work.accumulate))
        model.train()
        optimizer.zero_grad()
        weights = (
            [_compute_loss(work, model, batch, count_only=True)[1] for batch in micro] if len(micro) > 1 else [1.0]
        )
        for batch, weight in zip(micro, weights, strict=True):
            mean, _ = _compute_loss(work, model, batch)
            (mean * (weight / sum(weights))).backward()  # type: ignore[no-untyped-call]
        if work.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), work.clip_norm)
        optimizer.step()
        if has_tables(model):
            find_tables().step(model)
        if schedule is not None:
            schedule.step()
    return first, _evaluate(work, model)


def _yield_batches(data: Data, size: int, seed: int) -> Iterator[Batch]:
    """Yield batches that each have the next rows of all `size` replicas, epoch after epoch."""
    epoch = 0
    while True:
        parts = [data.batches(rank=rank, size=size, seed=seed, epoch=epoch) for rank in range(size)]
        for batches in zip(*parts, strict=False):
            x, y = torch.cat([b.x for b in batches]), torch.cat([b.y for b in batches])
            yield Batch(x, y, len(x))
        epoch += 1


def _compute_loss(work: Workload, model: nn.Module, batch: Batch, *, count_only: bool = False) -> tuple[Tensor, float]:
    """Return the mean loss of a batch, and its weight."""
    dtype = DTYPES.get(work.precision or "")
    half = contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)
    with half, torch.set_grad_enabled(torch.is_grad_enabled() and not count_only):
        found = work.loss(model, batch)
    read = loss_result(found, batch.size, trains=False)
    weight = read.weight_of(batch.size)
    return (read.total if read.weight is None else read.total / weight), float(weight)


@torch.no_grad()
def _evaluate(work: Workload, model: nn.Module) -> float:
    model.eval()
    found = [
        _compute_loss(work, model, batch) for batch in work.evaluation_data().batches(rank=0, size=1, seed=0, epoch=0)
    ]
    return sum(float(mean) * weight for mean, weight in found) / sum(weight for _, weight in found)
