"""The base class of strategies: a strategy declares how it communicates, and contains the paper's algorithm.

A strategy declares values of `rayps.core`: `topology` (which processes communicate, and what they exchange), `rows`
(how rows are distributed), `recovery` (what follows a failure) and `loop` (which of the worker's loops runs the
strategy). `recovery` and `loop` follow from the topology if they are not declared. The algorithm is in methods: `round`
on each worker, `on_push` and `on_round` on servers. A strategy sends no messages and handles no failures itself. The
module does not import torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, SupportsIndex

from rayps_client.values import Json, JsonObject

from rayps.core.grid import Grid
from rayps.core.job.user_module import reduce_by_value
from rayps.core.strategy.nested_options import wire_of
from rayps.core.strategy.strategy import RingView, ServerHalf, ShardView, Vector, WorkerView
from rayps.core.strategy.strategy_families import (
    SERVER_STEPS,
    SHARDED_PARAMETERS,
    SHARDED_STATE,
    SHARED_VECTOR,
    SYNC_GRADIENTS,
    Recovery,
    Reshuffled,
    Rows,
    loop_of,
    recovery_of,
)
from rayps.core.strategy.topology import Peers, Topology, servers_of
from rayps.core.strategy.traffic import Sizes, TrafficCost, undeclared

if TYPE_CHECKING:  # the annotations need torch, the module does not
    from torch.nn import Module

_EACH_STEP = (  # the loops that exchange gradients in each step
    SYNC_GRADIENTS,
    SERVER_STEPS,
    SHARED_VECTOR,
    SHARDED_STATE,
    SHARDED_PARAMETERS,
)


class Strategy:
    """How workers learn together: what each worker does in a round, and what the servers do with its pushes.

    Example:
        class Mean(rayps.Strategy):  # the mean gradient, as all_reduce
            def round(self, w):
                w.step(w.ring.mean(w.grad(w.batch())))
    """

    name: ClassVar[str] = ""  # the strategy's name; "" means the name of the class
    evaluate_every: int = 1  # epochs between evaluations

    def __init_subclass__(cls, **more: Json) -> None:
        super().__init_subclass__(**more)
        if not cls.name:
            cls.name = cls.__name__

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Pickle a user's class together with the object, so that other processes do not need the class's file."""
        if type(self).__module__.partition(".")[0] == "rayps":
            return super().__reduce_ex__(protocol)
        return reduce_by_value(self, int(protocol))

    @property
    def topology(self) -> Topology:
        """Which processes communicate, and what they exchange: `Peers`, `Servers` or `SharedVector`."""
        return Peers()

    @property
    def rows(self) -> Rows:
        """How rows are distributed to workers: `Reshuffled`, `Fixed` or `ByClient`."""
        return Reshuffled()

    @property
    def recovery(self) -> Recovery:
        """What follows the death of one worker or server: `RestartAll`, `ReplaceOne` or `Rebuild`."""
        return recovery_of(self.topology)

    @property
    def loop(self) -> str:
        """The loop that runs the rounds on a worker: a key of `loops.loop_of_family`, or your "module:Class"."""
        return loop_of(self.topology)

    @property
    def needs_end(self) -> bool:
        """Whether the rounds depend on the number of rounds of the phase, which must be known before they start."""
        return False

    @property
    def mean_rounds(self) -> float:
        """The number of rounds, from the first, that step by `w.mean_grad`: inf if all do.

        In a loop of a user's own, the mean is in `.grad` when the backward of such a round has ended, so that the loop
        can clip it. By default it is inf if the code of `round` calls `w.mean_grad` and not `w.grad`, else 0.
        """
        names = getattr(getattr(type(self).round, "__code__", None), "co_names", ())
        return math.inf if "mean_grad" in names and "grad" not in names else 0

    @property
    def tables(self) -> Strategy | None:
        """The strategy whose servers hold the model's sparse tables; None if a model with tables cannot be trained."""
        servers = servers_of(self)
        return self if servers is not None and servers.tables else None

    @property
    def server_half(self) -> ServerHalf:
        """The object whose `on_push` and `on_round` the servers call: by default the strategy itself."""
        return self

    def to_wire(self) -> JsonObject:
        """Return the strategy's name and options as JSON-ready data, which `rayps.strategies.catalogue.parse` reads."""
        return wire_of(self)

    def grid(self, workers: int) -> Grid:
        """Return how `workers` workers are arranged in replicas.

        Raises ConfigError if `workers` is not a multiple of a replica's number of workers.
        """
        return self.topology.grid(workers)

    def cost(self, grid: Grid, sizes: Sizes) -> list[TrafficCost]:
        """Return the traffic of a step between replicas and with servers, by formula.

        By default, this is the topology's formula if gradients are exchanged in each step; otherwise the traffic is
        reported as unknown.
        """
        return self.topology.cost(grid, sizes) if self.loop in _EACH_STEP else [undeclared(grid)]

    def scale_warning(self, workers: int) -> str | None:
        """Return the warning for an optimizer whose step size does not depend on the gradient's scale, such as AdamW.

        Return None if the strategy works with such an optimizer.
        """
        servers = servers_of(self)
        return None if servers is None else servers.scale_warning(workers)

    def split(self, model: Module, ring: RingView | None) -> Module:
        """Return the part of `model` that this worker trains; by default the whole model."""
        return model

    def round(self, w: WorkerView) -> None:
        """Run one round on the worker."""
        raise TypeError(f"strategy {type(self).__name__} does not define what a worker does: define round(self, w)")

    def begin(self, w: WorkerView) -> None:
        """Prepare the worker before its first round."""

    def finish(self, w: WorkerView) -> None:
        """Run on the worker after its last round."""

    def consensus(self, w: WorkerView) -> Vector | None:
        """Return the parameters that would be the result if training ended now; None means `w.params`.

        All workers call this method together, for checkpoints, for evaluations, and after `finish`, when the returned
        vector becomes the parameters of all workers. It must not change the state of the training.
        """
        return None

    def on_push(self, shard: ShardView, value: Vector, weight: float) -> None:
        """Handle one push on a server when it arrives, if `update` is `PerPush` or `PerRound(listens=True)`."""

    def on_round(self, shard: ShardView, values: list[Vector], weights: list[float]) -> None:
        """Handle the pushes of one round on a server when all have arrived, if `update` is `PerRound`.

        `values` and `weights` have one entry for each worker, in the order of ranks.
        """
