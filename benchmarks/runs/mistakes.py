"""Nine mistakes in a workload or in its call: each must end in a short error with a remedy, and leave nothing.

The tests of `tests/runtime/test_mistakes.py` commit these and more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import pyarrow as pa
import torch
import torch.nn.functional as F
from rayps_client.errors import (
    ConfigError,
    DataError,
    NoResources,
    RaypsError,
    TrainingError,
    WorkloadError,
    first_line,
)
from rayps_client.values import Keywords
from torch import Tensor, nn

import rayps
from benchmarks.runs.leftovers import Leftovers, use_temporary_folder
from rayps.bench.table import BenchRow, Opt
from rayps.cluster.local import Cluster
from rayps.cluster.ray_cluster import RayCluster
from rayps.data import Batch, Data

_ROWS, _BATCH = 600, 4


class Base(rayps.Workload):
    """Three classes of rows with four features, without a mistake."""

    lr: float = 0.1

    def model(self) -> nn.Module:
        """Return a linear model."""
        return nn.Linear(4, 3)

    def data(self) -> Data:
        """Return 600 rows in batches of 4."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(_ROWS, 4, generator=generator)
        return rayps.data.tensors(x, torch.randint(0, 3, (_ROWS,), generator=generator), batch_size=_BATCH)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the cross entropy."""
        return F.cross_entropy(model(batch.x), batch.y)

    def optimizer(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(params, lr=self.lr)


class Shapes(Base):
    """The model expects five features."""

    def model(self) -> nn.Module:
        """Return a model of another width."""
        return nn.Linear(5, 3)


class Labels(Base):
    """The model has two classes."""

    def model(self) -> nn.Module:
        """Return a model with too few classes."""
        return nn.Linear(4, 2)


class MissingColumn(Base):
    """The data names a column that the table lacks."""

    def data(self) -> Data:
        """Return rows of a table without the column `price`."""
        table = pa.table({"width": [0.5] * _ROWS, "height": [1.5] * _ROWS, "label": [0] * _ROWS})
        return rayps.data.arrow(table, features=["width", "price"], label="label", batch_size=_BATCH)


class NanAt50(Base):
    """The loss is NaN from round 50 on."""

    steps = 0

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return NaN after 50 calls."""
        self.steps += 1
        return super().loss(model, batch) * (float("nan") if self.steps > 50 else 1.0)


class Import(Base):
    """The loss imports a package that is not installed."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Import the package."""
        import not_there_at_all  # type: ignore[import-not-found]  # noqa: F401

        return super().loss(model, batch)


class Huge(Base):
    """The model has 400 GB of parameters."""

    def model(self) -> nn.Module:
        """Return a model larger than the memory."""
        return nn.Linear(100_000_000, 1000)


class OnePass(torch.utils.data.IterableDataset[tuple[Tensor, int]]):
    """A generator that ends: its second pass yields nothing."""

    def __init__(self) -> None:
        self._items = ((torch.zeros(4), number % 3) for number in range(80))

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return self._items


class EndsEarly(Base):
    """The data set is a generator that ends before the training."""

    def data(self) -> Data:
        """Return the generator's items."""
        return rayps.data.iterable(OnePass(), batch_size=_BATCH)


@dataclass(frozen=True, slots=True)
class Mistake:
    """A workload, or a name of one, with a mistake; the error that it must end in; and words of its text."""

    work: Callable[[], rayps.Workload] | str
    error: type[RaypsError]
    words: tuple[str, ...]
    options: Keywords = field(default_factory=dict)  # of `rayps.train`, instead of two workers and one epoch

    def commit(self, cluster: Cluster) -> RaypsError | None:
        """Train; return the error, or None if there was none."""
        work: Any = self.work if isinstance(self.work, str) else self.work()
        try:
            rayps.train(work, cluster=cluster, progress=False, **{"workers": 2, "epochs": 1, **self.options})
        except RaypsError as error:
            return error
        return None


MISTAKES: dict[str, Mistake] = {
    "wrong shapes": Mistake(Shapes, WorkloadError, ("expects 5 input features and gets 4", "mistakes.py")),
    "labels out of range": Mistake(Labels, WorkloadError, ("labels of the batch are 0 to 2", "has 2 classes, 0 to 1")),
    "missing column": Mistake(MissingColumn, DataError, ("'price'", "width, height, label")),
    "NaN at step 50": Mistake(NanAt50, TrainingError, ("the loss became nan", "round 50", "lower the learning rate")),
    "import error": Mistake(Import, WorkloadError, ("install the package not_there_at_all",)),
    "more memory than there is": Mistake(Huge, WorkloadError, ("ran out of memory", "divide it among several")),
    "100 workers": Mistake(Base, NoResources, ("needs 100 CPUs", "use fewer workers"), {"workers": 100}),
    "generator ends early": Mistake(EndsEarly, DataError, ("no batch for worker-", "a new pass"), {"epochs": 3}),
    "parameter of a wrong type": Mistake(
        f"{__name__}:Base", ConfigError, ("params.lr is 'fast'", "give a number"), {"params": {"lr": "fast"}}
    ),
}


@dataclass(frozen=True, slots=True)
class MistakeRow(BenchRow):
    """What one mistake ended in."""

    columns: ClassVar[str] = "mistake | seconds: s to the error | error | lines | remedy: names the remedy | left"

    mistake: str
    seconds: float  # from the call until the error
    error: str  # the first line of its text
    lines: int  # of its text
    remedy: bool  # whether it is the expected error, with all expected words
    left: str  # what the run left behind

    @property
    def note(self) -> str:
        """The row in a line."""
        return f"{self.mistake}: {self.seconds:.1f} s, {self.error}; left: {self.left or 'nothing'}"

    @property
    def failed(self) -> bool:
        """Whether the error does not name the remedy, or something was left."""
        return not self.remedy or bool(self.left)


def bench_mistakes(
    cluster: Cluster, names: Sequence[str] = tuple(MISTAKES), *, report: Callable[[MistakeRow], None] = lambda row: None
) -> list[MistakeRow]:
    """Commit each of the mistakes `names`; `report` is called with each row as it is ready.

    Raises:
        ConfigError: there is no such mistake.
    """
    for name in names:
        if name not in MISTAKES:
            raise ConfigError(f"no mistake {name!r}; use some of {', '.join(MISTAKES)}", mistake=name)
    rows = []
    for name in names:
        mistake, leftovers, began = MISTAKES[name], Leftovers(), time.monotonic()
        error = mistake.commit(cluster)
        seconds = time.monotonic() - began
        text = "no error" if error is None else str(error)
        told = isinstance(error, mistake.error) and all(word in text for word in mistake.words)
        del error  # its traceback refers to the run
        left = ", ".join(leftovers.left())
        rows.append(MistakeRow(name, seconds, first_line(Exception(text)), len(text.splitlines()), told, left))
        report(rows[-1])
    return rows


def bench_on_two_cpus(
    names: Annotated[Sequence[str], Opt("Mistakes, separated by commas (all).", "--mistakes")] = tuple(MISTAKES),
    *,
    report: Callable[[MistakeRow], None] = lambda row: None,
) -> list[MistakeRow]:
    """Commit the mistakes on a local Ray with two CPUs. Raises ConfigError if there is no such mistake."""
    with use_temporary_folder():
        cluster = RayCluster.local(cpus=2)
        try:
            return bench_mistakes(cluster, names, report=report)
        finally:
            cluster.close()
