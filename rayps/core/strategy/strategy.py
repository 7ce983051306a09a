"""Protocols of a strategy, and of the objects that a strategy uses: a worker, its ring, the servers, a shard.

Folders below `rayps.strategies` use these types; none of them imports a strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from rayps_client.values import Json, JsonObject

from rayps.core.grid import Grid
from rayps.core.strategy.strategy_families import Recovery, Rows
from rayps.core.strategy.topology import Topology
from rayps.core.strategy.traffic import Sizes, TrafficCost

if TYPE_CHECKING:  # the annotations need torch, the module does not
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from rayps.data.base import Batch
    from rayps.tensors.flat import Gradient

Vector: TypeAlias = "Tensor"  # parameters or a gradient as one vector [size], or a slice of it
RoundMemory: TypeAlias = dict[str, Any]  # a strategy's state between rounds; the strategy chooses the types


class RingView(Protocol):
    """The ring as a strategy uses it: collectives of all workers, which call them in the same order."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over workers, in the memory of `x`."""

    def mean(self, x: Tensor | Gradient, *, in_place: bool = True) -> Tensor:
        """Return the mean of `x` over workers; the mean of gradients is weighted by their samples.

        With `in_place` the result may be in the memory of `x`.
        """

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every worker's `x` [...] as one tensor [size, ...], in the order of ranks."""

    def progress(self) -> ProgressView:
        """Return a table, in memory that the workers share, of each worker's number of completed rounds."""


class ProgressView(Protocol):
    """Each worker's number of completed rounds, for workers of one host."""

    def reach(self, rounds: int) -> None:
        """Set this worker's number of completed rounds."""

    def meet(self, rounds: int) -> None:
        """Wait until all workers have completed `rounds` rounds."""


class ServerView(Protocol):
    """The servers, as a strategy uses them."""

    def pull(self) -> Tensor:
        """Wait until the staleness bound allows the pull, then return the parameters [size]."""

    def push(self, value: Tensor | Gradient, weight: float = 1.0, lo: int = 0, rounds: int = 1) -> None:
        """Push a gradient, or a range of a gradient that begins at element `lo`. The push counts as `rounds` steps."""

    def settle(self) -> None:
        """Wait until the servers have acknowledged every push."""

    def wait(self, rank: int, rounds: int) -> None:
        """Wait until the servers have pushes of worker `rank` that together count as `rounds` steps.

        A worker pushes no more than `plan.end` steps: a larger number is never reached, and ends in a timeout.
        """


class RoundPlan(Protocol):
    """The plan of a run, as a strategy uses it."""

    @property
    def end(self) -> int:
        """The position (number of batches taken) at which this strategy's phase ends."""

    @property
    def origin(self) -> tuple[int, int]:
        """The position and the epoch at which this strategy's phase began."""

    @property
    def seed(self) -> int:
        """The job's seed."""


class ClientRounds(Protocol):
    """The federated clients that this worker trains."""

    def round(self) -> None:
        """Train this worker's clients of the round's cohort, then apply the server's step."""


class WorkerView(Protocol):
    """One replica, as a strategy's `round` uses it."""

    rank: int
    size: int
    position: int  # batches taken so far
    plan: RoundPlan
    ring: RingView
    server: ServerView
    clients: ClientRounds  # clients of the data, for federated strategies
    params: Vector
    memory: RoundMemory  # the strategy's state between rounds; empty when the worker starts or is replaced. If workers
    # train separately, a checkpoint restores the tensors in `memory`, and restores numbers as tensors
    shared: dict[str, Tensor]  # tensors that are equal on all workers; they are restored under the same strategy
    done: bool  # whether the stop rule is met; then the phase ends. All workers set `done` in the same round
    reason: str  # why the phase ends, as text

    @property
    def optimizer(self) -> Optimizer:
        """The worker's own optimizer; None if only servers step."""

    @property
    def rows(self) -> int:
        """The number of rows of this worker's share of the data."""

    @property
    def all_rows(self) -> int:
        """The number of rows of the data, over all workers."""

    def batch(self) -> Batch:
        """Return the next batch of this worker's share of the data."""

    def grad(self, batch: Batch) -> Gradient:
        """Return the gradient of the loss on `batch`, with the number of samples of `batch`."""

    def mean_grad(self, batch: Batch) -> Vector:
        """Return `ring.mean(grad(batch))`, read-only. Parts of the gradient are sent while the rest is computed."""

    def push_grad(self, batch: Batch) -> None:
        """Call `server.push(grad(batch))`. On a device, parts of the gradient are sent while the rest is computed."""

    def step(self, grad: Gradient | Vector) -> None:
        """Apply a gradient vector with this worker's optimizer, clipped to the workload's `clip_norm`."""

    def clipped(self, vector: Vector) -> Vector:
        """Return the vector, or a scaled copy if its norm is above the workload's `clip_norm`.

        `grad` and `step` clip by themselves. Use this for another vector that a worker pushes, such as the sum of its
        gradients under `Servers(own_copies=True)`.
        """

    def say(self, **numbers: float) -> None:
        """Add numbers, equal on all workers, to this round's point. The history has a column for each name."""

    def event(self, kind: str, message: str, **facts: Json) -> None:
        """Add an event to the job's journal. Call this on one worker only, such as rank 0."""

    def mean(self, vector: Vector, samples: float = 1.0, *, exact: bool = False) -> Vector:
        """Return the mean of a vector over workers, weighted by `samples`, as a new tensor.

        If no worker has samples, all vectors have the same weight. The vector is sent with the strategy's
        `compression`, unless `exact`. A compressed mean is zero if no worker has samples.
        """

    def mean_later(self, vector: Vector, samples: float = 1.0, *, slot: int = 0) -> Vector:
        """Start a `mean` in the background. Keep the returned tensor in `memory`, unchanged, and pass it to `arrived`.

        If the parts of one vector are averaged separately, each part needs a `slot` of its own, because compression
        stores one error feedback for each slot.
        """

    def arrived(self, parcel: Vector) -> Vector:
        """Wait for the mean that `mean_later` started, and return it. For a half-precision vector it is float32."""

    def own_loss(self) -> float:
        """Return the loss of this worker's model on all of the evaluation data."""

    def sync_optimizer_and_buffers(self, samples: float, *, momentum: str, buffers: str) -> None:
        """Keep, reset or average the optimizer's moments over the workers, and keep or average the model's buffers.

        `momentum` is keep, reset or average; `buffers` is keep or average; `samples` is this worker's weight in an
        average.
        """


class ShardView(Protocol):
    """One slice of the parameters, as `on_push` and `on_round` use it."""

    rounds: int  # the worker's steps that the current push contains; above 1 only with `PerPush(spans=True)`

    @property
    def size(self) -> int:
        """The number of workers that take part now."""

    def step(self, grad: Vector, scale: float = 1.0, decays: float | None = None) -> None:
        """Take a step of the shard's optimizer with `scale` times the gradient slice `grad`, which is not changed.

        `decays` is the number of whole steps for which this step counts. Weight decay is multiplied by `decays`. None
        means |`scale`|.
        """

    def step_mean(self, values: Sequence[Vector], weights: Sequence[float]) -> None:
        """Apply sum(w_i v_i) / sum(w_i) as `step` does, in one operation. The sum of weights must not be zero."""


@runtime_checkable
class ServerHalf(Protocol):
    """The part of a strategy that servers use: its topology, and how it applies pushes."""

    @property
    def name(self) -> str:
        """The strategy's name in events, files and messages."""

    @property
    def topology(self) -> Topology:
        """Which processes communicate, and what they exchange."""

    @property
    def server_half(self) -> ServerHalf:
        """The value that servers receive in place of the strategy; it applies pushes as the strategy does."""

    def on_push(self, shard: ShardView, value: Vector, weight: float) -> None:
        """Called for each push on arrival, under `PerPush` and `PerRound(listens=True)`."""

    def on_round(self, shard: ShardView, values: list[Vector], weights: list[float]) -> None:
        """Called once for each round under `PerRound`, when all its pushes have arrived.

        `values` and `weights` are in the order of ranks.
        """


class StrategyView(ServerHalf, Protocol):
    """A strategy as the worker, the servers and the driver use it: what it declares, and the paper's algorithm."""

    @property
    def rows(self) -> Rows:
        """How rows are distributed to workers."""

    @property
    def recovery(self) -> Recovery:
        """How a run recovers from the death of one worker or server."""

    @property
    def loop(self) -> str:
        """The worker's loop that runs this strategy: the name of a family, or "module:Class" of a user's own loop."""

    @property
    def evaluate_every(self) -> int:
        """Epochs between evaluations."""

    @property
    def needs_end(self) -> bool:
        """Whether the rounds depend on the number of rounds of the phase."""

    @property
    def mean_rounds(self) -> float:
        """The number of rounds, from the first, that step by the mean gradient over the workers."""

    @property
    def tables(self) -> StrategyView | None:
        """The strategy of the servers that hold sparse tables; None if a model with tables cannot be trained."""

    def to_wire(self) -> JsonObject:
        """Return the strategy's name and options as JSON-ready data."""

    def grid(self, workers: int) -> Grid:
        """Return the layout of `workers`. Raises ConfigError if they are not a whole number of replicas."""

    def cost(self, grid: Grid, sizes: Sizes) -> list[TrafficCost]:
        """Return the traffic of a step between replicas and with servers, by formula."""

    def scale_warning(self, workers: int) -> str | None:
        """Return a warning if the optimizer's step size ignores the gradient's scale, or None if no warning applies."""

    def split(self, model: Module, ring: RingView | None) -> Module:
        """Return the part of `model` that this worker holds."""

    def round(self, w: WorkerView) -> None:
        """Run one round of the strategy on worker `w`."""

    def begin(self, w: WorkerView) -> None:
        """Prepare worker `w` before its first round."""

    def finish(self, w: WorkerView) -> None:
        """Complete the strategy's work on worker `w` after its last round."""

    def consensus(self, w: WorkerView) -> Vector | None:
        """Return the vector on which all workers would agree if training ended now; None means `w.params`."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A strategy and the number of epochs that it runs."""

    epochs: int | None  # None means until the job ends
    strategy: StrategyView

    @property
    def name(self) -> str:
        """The name of the phase's strategy."""
        return self.strategy.name

    def grid(self, workers: int) -> Grid:
        """Return the layout of `workers` in this phase.

        Raises ConfigError if they are not a whole number of replicas.
        """
        return self.strategy.grid(workers)
