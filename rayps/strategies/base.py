"""What a strategy is: what it declares, and the paper's halves. No torch, no message, no retry.

A strategy declares values of `rayps.core`: its `topology` (who exchanges what with whom), `rows` (how rows are dealt),
`recovery` (what a death brings about) and `loop` (which of the worker's loops runs it); those that it does not declare
follow from the topology. The paper's halves are methods: `round` on each worker, `on_push` and `on_round` on servers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, SupportsIndex

from rayps.core.families import Recovery, Reshuffled, Rows, loop_of, recovery_of
from rayps.core.grid import Grid
from rayps.core.nested_options import wire_of
from rayps.core.strategy import RingView, ServerHalf, ShardView, Vector, WorkerView
from rayps.core.topology import Peers, Topology, servers_of
from rayps.core.traffic import Sizes, TrafficCost
from rayps.core.user_module import by_value
from rayps.core.values import Json, JsonObject
from rayps.strategies import old_flags

if TYPE_CHECKING:  # the annotations need torch, the module does not
    from torch.nn import Module


class Strategy:
    """How to learn together: the worker half and the server half of one paper.

    Example:
        class Mean(rayps.Strategy):  # the mean gradient, as all_reduce
            def round(self, w):
                w.step(w.ring.mean(w.grad(w.batch())))
    """

    name: ClassVar[str] = ""  # a class that declares none is known by its own name
    evaluate_every: int = 1  # epochs between evaluations

    def __init_subclass__(cls, **more: Json) -> None:
        super().__init_subclass__(**more)
        if not cls.name:
            cls.name = cls.__name__
        old_flags.adopt(cls)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """A class of the user's own travels by value: no other process needs its file, servers of a group neither."""
        if type(self).__module__.partition(".")[0] == "rayps":
            return super().__reduce_ex__(protocol)
        return by_value(self, int(protocol))

    @property
    def topology(self) -> Topology:
        """Who exchanges what with whom: `Peers`, `Servers` or `SharedVector`."""
        return Peers()

    @property
    def rows(self) -> Rows:
        """How rows are dealt to workers: `Reshuffled`, `Fixed` or `ByClient`."""
        return Reshuffled()

    @property
    def recovery(self) -> Recovery:
        """What the death of one worker or server brings about: `RestartAll`, `ReplaceOne` or `Rebuild`."""
        return recovery_of(self.topology)

    @property
    def loop(self) -> str:
        """Which of the worker's loops runs it: a key of `rayps.worker.families`, or "module:Class" of your own."""
        return loop_of(self.topology)

    @property
    def tables(self) -> Strategy | None:
        """The strategy that servers of sparse tables follow; None = a model with tables cannot be trained."""
        servers = servers_of(self)
        return self if servers is not None and servers.tables else None

    @property
    def server_half(self) -> ServerHalf:
        """What servers are given in place of it: itself, unless said otherwise."""
        return self

    def to_wire(self) -> JsonObject:
        """Its name and options as JSON-ready data; `rayps.strategies.catalogue.parse` reads them again."""
        return wire_of(self)

    def grid(self, workers: int) -> Grid:
        """How `workers` are laid out. Raises ConfigError where they are no whole number of replicas."""
        return self.topology.grid(workers)

    def cost(self, grid: Grid, sizes: Sizes) -> list[TrafficCost]:
        """Traffic of a step between replicas and with servers, by formula."""
        return self.topology.cost(grid, sizes)

    def scale_warning(self, workers: int) -> str | None:
        """What to say where the optimizer takes steps of the same size whatever the gradient's; None = nothing."""
        servers = servers_of(self)
        return None if servers is None else servers.scale_warning(workers)

    def split(self, model: Module, ring: RingView | None) -> Module:
        """Which part of the model lives on this worker; the whole of it unless said otherwise."""
        return model

    def round(self, w: WorkerView) -> None:
        """The worker's half of the paper: one round."""
        raise TypeError(f"{type(self).__name__} does not say what a worker does: define round(self, w)")

    def begin(self, w: WorkerView) -> None:
        """What a worker does before its first round."""

    def finish(self, w: WorkerView) -> None:
        """What a worker does after its last round."""

    def consensus(self, w: WorkerView) -> Vector | None:
        """What all workers would agree on if training ended now, as a vector; None = `w.params`.

        All call it together: for checkpoints, for evaluations, and after `finish`, when everyone takes it over. It
        leaves what is being learnt as it is.
        """
        return None

    def on_push(self, shard: ShardView, value: Vector, weight: float) -> None:
        """The server's half, as each message arrives: under `PerPush`, and `PerRound(listens=True)`."""

    def on_round(self, shard: ShardView, values: list[Vector], weights: list[float]) -> None:
        """The server's half under `PerRound`, once everyone has spoken: values and weights in the order of ranks."""
