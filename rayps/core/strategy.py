"""Protocols between a strategy and what runs it: the worker and the shard as a strategy sees them, and the reverse.

Folders below `rayps.strategies` type what they are given by these; none of them imports a strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from rayps.core.families import Recovery, Rows
from rayps.core.grid import Grid
from rayps.core.topology import Topology
from rayps.core.traffic import Sizes, TrafficCost
from rayps.core.values import Json, JsonObject

if TYPE_CHECKING:  # the annotations need torch, the module does not
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from rayps.data.base import Batch
    from rayps.tensors.flat import Gradient

Vector: TypeAlias = "Tensor"  # parameters or a gradient as one vector [size], or a slice of it
RoundMemory: TypeAlias = dict[str, Any]  # what a strategy keeps between its rounds, in whatever types it chooses


class RingView(Protocol):
    """The ring as a strategy sees it: exchanges between all workers, which all of them make in the same order."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum over workers, in the memory of `x`."""

    def mean(self, x: Tensor | Gradient, *, in_place: bool = True) -> Tensor:
        """The mean over workers; of gradients weighted by their samples."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Every worker's `x` [...] as [size, ...], by rank."""

    def progress(self) -> ProgressView:
        """The rounds of all workers, in memory that they share."""


class ProgressView(Protocol):
    """How far each worker on one host is."""

    def reach(self, rounds: int) -> None:
        """Say that this worker has done so many rounds."""

    def meet(self, rounds: int) -> None:
        """Return once all workers have done so many rounds."""


class ServerView(Protocol):
    """The servers as a strategy sees them."""

    def pull(self) -> Tensor:
        """The parameters [size], as soon as the clock allows."""

    def push(self, value: Tensor | Gradient, weight: float = 1.0, lo: int = 0, rounds: int = 1) -> None:
        """Send a gradient; it counts as `rounds` steps."""

    def settle(self) -> None:
        """Return once every push is acknowledged."""

    def wait(self, rank: int, rounds: int) -> None:
        """Return once a rank's pushes stand for so many rounds."""


class RoundPlan(Protocol):
    """The plan as a strategy sees it."""

    @property
    def end(self) -> int:
        """The position at which this strategy ends."""

    @property
    def origin(self) -> tuple[int, int]:
        """The position and the epoch at which this strategy began."""

    @property
    def seed(self) -> int:
        """Of the job."""


class ClientRounds(Protocol):
    """The clients that live on this worker."""

    def round(self) -> None:
        """Train this worker's share of the cohort, and let the server step."""


class WorkerView(Protocol):
    """The worker as `round` sees it: one replica."""

    rank: int
    size: int
    position: int  # batches taken so far
    plan: RoundPlan
    ring: RingView
    server: ServerView
    clients: ClientRounds  # of the data, where the strategy is federated
    params: Vector
    memory: RoundMemory  # what a round leaves to the next; empty when a worker begins, or is replaced: but where
    # workers learn apart its tensors, and numbers as tensors, come back with the worker's own parameters and moments
    shared: dict[
        str, Tensor
    ]  # tensors that are the same on all workers; they come back as long as the strategy goes on
    done: bool  # set by all workers in the same round: the strategy has met its stop rule, and the phase ends here
    reason: str  # why, in words

    @property
    def optimizer(self) -> Optimizer:
        """The worker's own optimizer. None where only servers step: a strategy that steps has one."""

    @property
    def rows(self) -> int:
        """Rows of this worker's share of the data."""

    @property
    def all_rows(self) -> int:
        """Rows of the data, over all workers."""

    def batch(self) -> Batch:
        """The next batch of this worker's share of the data."""

    def grad(self, batch: Batch) -> Gradient:
        """The gradient of the loss on `batch`; it knows its number of samples."""

    def mean_grad(self, batch: Batch) -> Vector:
        """`ring.mean(grad(batch))`, sent in parts while the gradient is being made; to be read only."""

    def step(self, grad: Gradient | Vector) -> None:
        """Let this worker's own optimizer apply a gradient vector, shortened to the workload's `clip_norm`."""

    def clipped(self, vector: Vector) -> Vector:
        """Return the vector, or a scaled copy where its norm is above the workload's `clip_norm`.

        `grad` and `step` clip by themselves; use this for other vectors that are pushed where a worker `steps_locally`.
        """

    def say(self, **numbers: float) -> None:
        """Numbers for this round's point, the same on all workers: they stand in the history by these names."""

    def event(self, kind: str, message: str, **facts: Json) -> None:
        """File an event of the job; for one worker to call, such as rank 0."""

    def mean(self, vector: Vector, samples: float = 1.0, *, exact: bool = False) -> Vector:
        """Return the mean of a vector over workers, weighted by `samples`, as a new tensor.

        It is zero where no worker has samples. It is sent with `compression`, unless `exact`.
        """

    def mean_later(self, vector: Vector, samples: float = 1.0, *, slot: int = 0) -> Vector:
        """As `mean`, in the background: a tensor to be kept in `memory`, untouched, until `arrived` is asked for it.

        Vectors that are parts of one have slots of their own: compression remembers what it left out of each.
        """

    def arrived(self, parcel: Vector) -> Vector:
        """The mean that `mean_later` has sent for, of a half-precision vector in float32; waits for it."""

    def own_loss(self) -> float:
        """The loss of this worker's own model on all of the evaluation data."""

    def sync_optimizer_and_buffers(self, samples: float, *, momentum: str, buffers: str) -> None:
        """Keep, reset or average the optimizer's moments over the workers, and keep or average the buffers.

        `momentum` is keep, reset or average; `buffers` is keep or average; `samples` weighs this worker.
        """

    def together(self, samples: float, *, momentum: str, buffers: str) -> None:
        """The old name of `sync_optimizer_and_buffers`; it warns, and goes with the next release."""


class ShardView(Protocol):
    """The shard as `on_push` and `on_round` see it: one slice of the parameters."""

    size: int  # workers
    rounds: int  # of the worker, that the push under way stands for: 1, or more where the strategy's pushes are `spans`

    def step(self, grad: Vector, scale: float = 1.0, decays: float | None = None) -> None:
        """Let the shard's own optimizer apply `scale` times a gradient slice, which is only read.

        `decays`: how many whole steps this one counts for, by which weight decay is multiplied; None = |`scale`|.
        """

    def step_mean(self, values: Sequence[Vector], weights: Sequence[float]) -> None:
        """As `step` of sum(w_i v_i) / sum(w_i), in one go; not all weights may be zero."""


@runtime_checkable
class ServerHalf(Protocol):
    """What servers need of a strategy: its topology, and what it does with pushes."""

    @property
    def name(self) -> str:
        """By which it is known in events, files and messages."""

    @property
    def topology(self) -> Topology:
        """Who exchanges what with whom."""

    @property
    def server_half(self) -> ServerHalf:
        """What servers are given in place of it: itself, or a value that does the same on servers."""

    def on_push(self, shard: ShardView, value: Vector, weight: float) -> None:
        """The server's half, as each message arrives: under `PerPush`, and `PerRound(listens=True)`."""

    def on_round(self, shard: ShardView, values: list[Vector], weights: list[float]) -> None:
        """The server's half under `PerRound`, once everyone's values of the round are there, in the order of ranks."""


class StrategyView(ServerHalf, Protocol):
    """A strategy as the worker, the servers and the driver see it: what it declares, and the paper's halves."""

    @property
    def rows(self) -> Rows:
        """How rows are dealt to workers."""

    @property
    def recovery(self) -> Recovery:
        """What the death of one worker or server brings about."""

    @property
    def loop(self) -> str:
        """The worker's loop that runs it."""

    @property
    def evaluate_every(self) -> int:
        """Epochs between evaluations."""

    @property
    def tables(self) -> StrategyView | None:
        """The strategy that servers of sparse tables follow; None = a model with tables cannot be trained."""

    def to_wire(self) -> JsonObject:
        """Its name and options as JSON-ready data."""

    def grid(self, workers: int) -> Grid:
        """How `workers` are laid out. Raises ConfigError where they are no whole number of replicas."""

    def cost(self, grid: Grid, sizes: Sizes) -> list[TrafficCost]:
        """Traffic of a step between replicas and with servers, by formula."""

    def scale_warning(self, workers: int) -> str | None:
        """What to say where the optimizer takes steps of the same size whatever the gradient's; None = nothing."""

    def split(self, model: Module, ring: RingView | None) -> Module:
        """Which part of the model lives on this worker."""

    def round(self, w: WorkerView) -> None:
        """The worker's half of the paper: one round."""

    def begin(self, w: WorkerView) -> None:
        """What a worker does before its first round."""

    def finish(self, w: WorkerView) -> None:
        """What a worker does after its last round."""

    def consensus(self, w: WorkerView) -> Vector | None:
        """What all workers would agree on if training ended now, as a vector; None = `w.params`."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A strategy and for how many epochs it runs; None = until the job ends."""

    epochs: int | None
    strategy: StrategyView

    @property
    def name(self) -> str:
        """The name of its strategy."""
        return self.strategy.name

    def grid(self, workers: int) -> Grid:
        """How `workers` are laid out in it. Raises ConfigError where they are no whole number of replicas."""
        return self.strategy.grid(workers)
