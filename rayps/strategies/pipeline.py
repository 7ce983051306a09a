"""Pipeline parallelism: the model's layers one behind another on several workers, a batch in micro-batches.

Huang et al., "GPipe", NeurIPS 2019 (`gpipe`: all m forwards, then all backwards); Narayanan et al., "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021 (`1f1b`, `interleaved` with v `chunks`
of the model on each of the p workers); Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024 (`zero_bubble`: ZB-H1).
Idle is (p-1)/(m+p-1) of the time, interleaved (p-1)/(vm+p-1); a worker holds m micro-batches under gpipe,
min(m, p-rank) under 1f1b. The gradient is that of the whole batch, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from rayps.core import options
from rayps.core.errors import ConfigError
from rayps.strategies.base import Replica
from rayps.strategies.tensor_parallel import TensorParallel

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
BALANCES = ("parameters", "time")


@dataclass(frozen=True)
class Pipeline(Replica):
    """A model cut into `stages`, layer after layer: for deep models, and machines with slow lines between them.

    `boundaries` are the numbers of the layers at which a new part begins (stages * chunks - 1 of them); left out, the
    layers are shared out by `balance`: equal parameters, or equal measured time. `stage` says of what a stage is made:
    none = one worker, or a TensorParallel.
    """

    stages: int = 2
    micro_batches: int = 4
    schedule: str = "1f1b"
    chunks: int = 1
    boundaries: tuple[int, ...] | None = None
    balance: str = "parameters"
    stage: TensorParallel | None = None
    name: ClassVar[str] = "pipeline"

    def __post_init__(self) -> None:
        for field in ("stages", "micro_batches", "chunks"):
            options.whole(self, field)
        options.choice(self, "schedule", SCHEDULES)
        options.choice(self, "balance", BALANCES)
        if (self.chunks > 1) != (self.schedule == "interleaved"):
            raise ConfigError(
                f"chunks is {self.chunks} under the schedule {self.schedule!r}: interleaved needs at least 2 chunks of "
                "the model on each worker, the others have 1",
                field="chunks",
            )
        if self.schedule == "interleaved" and self.micro_batches % self.stages:
            raise ConfigError(
                f"micro_batches is {self.micro_batches}, and interleaved needs a multiple of its {self.stages} stages: "
                f"give {-(-self.micro_batches // self.stages) * self.stages}, or use 1f1b",
                field="micro_batches",
            )
        if self.boundaries is not None:
            given = self.boundaries
            listed = tuple(given) if isinstance(given, (list, tuple)) else given  # a list, as JSON has it
            _must_rise(listed, self.stages * self.chunks - 1)
            object.__setattr__(self, "boundaries", listed)
        if self.stage is not None and not isinstance(self.stage, TensorParallel):
            raise ConfigError(
                f"stage is {self.stage!r}: give none (a stage is one worker) or TensorParallel(...)", field="stage"
            )

    @property
    def tensor(self) -> int:  # type: ignore[override]
        """See Replica."""
        return 1 if self.stage is None else self.stage.size


def _must_rise(given: Any, count: int) -> None:
    whole = isinstance(given, tuple) and all(type(each) is int and each > 0 for each in given)
    if not whole or len(given) != count or list(given) != sorted(set(given)):
        shown = list(given) if isinstance(given, tuple) else given
        raise ConfigError(
            f"boundaries is {shown!r}: give {count} rising layer number(s), each where a new part begins",
            field="boundaries",
        )
