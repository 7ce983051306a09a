"""A replica, which is one copy of the model: one worker, or several workers that divide it. Plain data, no torch.

`Pipeline` distributes the model's layers, in order, over several workers and cuts a batch into micro-batches: Huang et
al., "GPipe", NeurIPS 2019 (`gpipe`: all m forwards, then all backwards); Narayanan et al., "Efficient Large-Scale
Language Model Training on GPU Clusters Using Megatron-LM", SC 2021 (`1f1b`, `interleaved` with v `chunks` of the model
on each of the p workers); Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024 (`zero_bubble`: ZB-H1). Workers idle
(p-1)/(m+p-1) of the time, and under interleaved (p-1)/(vm+p-1). A worker holds the activations of m micro-batches under
gpipe, and of min(m, p-rank) under 1f1b. The gradient is exactly the gradient of the whole batch.

`TensorParallel` divides every layer among `size` workers: Shoeybi et al., "Megatron-LM: Training Multi-Billion
Parameter Language Models Using Model Parallelism", 2019, part 3. A linear layer y = x W^T + b with W [out, in] is split
by its output (each worker computes a slice of y) or by its input (each worker takes a slice of x, and the partial sums
are added). No data is exchanged between an "out" layer and the "in" layer after it. Papers call the split of W's rows
row-wise; libraries that write y = x A call the same split column-wise. rayps names the side that is split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rayps_client.errors import ConfigError

from rayps.core.pipeline.schedule import SCHEDULES, check
from rayps.core.strategy import options

BALANCES = ("parameters", "time")
SPLITS = ("out", "in", "heads", "rows", "none")


class Replica:
    """How one copy of the model is divided among several workers: into stages, and each stage among tensor ranks."""

    name: ClassVar[str] = ""
    stages: int = 1  # parts of the model, in order
    tensor: int = 1  # workers that divide each layer


@dataclass(frozen=True)
class TensorParallel(Replica):
    """Divide each layer among `size` workers: for layers too wide for one worker, and fast connections.

    `plan` maps a layer's name to its split: out, in, heads (of an attention), rows (of an embedding) or none. A name
    may end in *. Layers that `plan` does not name are not divided. Without `plan` each split is chosen automatically.

    Example:
        rayps.train(work, strategy=rayps.TensorParallel(size=2), workers=2)
    """

    size: int = 2
    plan: dict[str, str] | None = None
    name: ClassVar[str] = "tensor_parallel"

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise ConfigError(
                f"size is {self.size!r}: give the number of workers that divide a layer, at least 1", field="size"
            )
        plan: object = self.plan
        if plan is not None and not (isinstance(plan, dict) and all(_is_split(each) for each in plan.values())):
            raise ConfigError(
                f"plan is {plan!r}: give a split for each layer's name, one of {', '.join(SPLITS)} (row means out, "
                "column means in; out*3:64 means three blocks, each cut at multiples of 64)",
                field="plan",
            )

    @property
    def tensor(self) -> int:  # type: ignore[override]
        """The number of workers that divide each layer."""
        return self.size


@dataclass(frozen=True)
class Pipeline(Replica):
    """Cut a model into `stages`, layer by layer: for deep models, and slow connections between machines.

    `boundaries` are the numbers of the layers at which a new part begins (stages * chunks - 1 of them). Without
    `boundaries`, layers are divided by `balance`: equal parameters, or equal measured time. With `stage`, a
    TensorParallel, several workers compute each stage; None means that one worker does.

    Example:
        rayps.train(work, strategy=rayps.Pipeline(stages=2, micro_batches=4), workers=2)
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
                "the model on each worker; the other schedules have 1",
                field="chunks",
            )
        check(self.schedule, self.stages, self.micro_batches, self.chunks)
        if self.boundaries is not None:
            given = self.boundaries
            listed = tuple(given) if isinstance(given, (list, tuple)) else given  # JSON gives a list
            _check_boundaries(listed, self.stages * self.chunks - 1)
            object.__setattr__(self, "boundaries", listed)
        if self.stage is not None and not isinstance(self.stage, TensorParallel):
            raise ConfigError(
                f"stage is {self.stage!r}: give none (a stage is one worker) or TensorParallel(...)", field="stage"
            )

    @property
    def tensor(self) -> int:  # type: ignore[override]
        """The number of workers that compute each stage."""
        return 1 if self.stage is None else self.stage.size


def pipeline_of(replica: Replica | None) -> Pipeline | None:
    """Return the replica if it is a pipeline of at least two stages, else None."""
    return replica if isinstance(replica, Pipeline) and replica.stages > 1 else None


def check_replica(replica: object) -> None:
    """Check the option `replica`. Raises ConfigError if it is neither None nor a Replica."""
    if replica is not None and not isinstance(replica, Replica):
        raise ConfigError(
            f"replica is {replica!r}: give Pipeline(...), TensorParallel(...), or none (a replica is one worker)",
            field="replica",
        )


def _check_boundaries(given: object, count: int) -> None:
    whole = isinstance(given, tuple) and all(type(each) is int and each > 0 for each in given)
    if not whole or not isinstance(given, tuple) or len(given) != count or list(given) != sorted(set(given)):
        shown = list(given) if isinstance(given, tuple) else given
        raise ConfigError(
            f"boundaries is {shown!r}: give {count} layer number(s) in rising order, each the first layer of a part",
            field="boundaries",
        )


def _is_split(given: object) -> bool:
    """Return whether `given` is a split: a name, `name:UNIT`, or `out*BLOCKS:UNIT`."""
    if not isinstance(given, str):
        return False
    whole, colon, unit = given.partition(":")
    name, star, blocks = whole.partition("*")
    if name in ("out", "row", "in", "column"):
        return unit.isdigit() == bool(colon) and blocks.isdigit() == bool(star) and not (star and name[0] in "ic")
    return given in SPLITS
