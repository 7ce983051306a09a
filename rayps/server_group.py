"""A parameter server of one's own: shards as actors, shared by any actors of the user's.

group = rayps.ServerGroup(params, shards=2, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), workers=4)
server = group.join(rank)            # in each actor, which was given `group` as an argument
server.push(grad); params = server.pull()
"""

from __future__ import annotations

import logging
import secrets
from typing import Any

import torch
from torch import Tensor

from rayps import optim
from rayps.actors import ShardPlan
from rayps.cluster import Cluster, Handle, surrounding
from rayps.errors import ConfigError
from rayps.flat import Gradient, Layout
from rayps.link import connect
from rayps.server import Server
from rayps.server.compressed import compress
from rayps.server.rows import cuts
from rayps.server.shard import Boundary
from rayps.snapshot import Snapshot
from rayps.strategies.parameter_server import ParameterServer
from rayps.workload import pack

log = logging.getLogger(__name__)

START_SECONDS = 180.0


class ServerGroup:
    """Shared parameters on `shards` servers. Pass it to your actors; whoever made it ends it with `close()`.

    `params` is a tensor or a state dict of floating tensors. `optimizer` builds a torch optimizer over a list of
    parameters (default: SGD with lr=1, which subtracts what is pushed). `staleness` is 0 (each round waits for all
    `workers`), a number of rounds, or None (asynchronous). `compression` says how pushes travel, as a strategy's does.
    `timeout` is in seconds.

    Raises:
        ConfigError, WorkloadError: the arguments cannot work.
    """

    def __init__(
        self,
        params: Tensor | dict[str, Tensor],
        *,
        shards: int = 1,
        optimizer: optim.Factory | None = None,
        staleness: int | None = 0,
        workers: int = 1,
        compression: str | None = None,
        timeout: float = 60.0,
        cluster: Cluster | None = None,
    ) -> None:
        strategy = ParameterServer(shards=shards, staleness=staleness, compression=compression)
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise ConfigError(
                f"workers is {workers!r}: give the number of actors that will join, at least 1", field="workers"
            )
        named = _named(params)
        self.layout = Layout.of(named.items())
        self.workers, self.timeout, self.generation = workers, timeout, 1
        self._as_dict = not isinstance(params, Tensor)
        self._consistent, self._independent = staleness is not None, not strategy.lockstep
        self._compression = compression
        self._secret = secrets.token_bytes(32)
        self._ranges = cuts(self.layout, shards)
        factory = optimizer or _sgd
        optim.check_elementwise(factory, self.layout)
        vector = torch.cat([value.detach().reshape(-1).cpu() for value in named.values()])
        snapshot = Snapshot(self.layout, vector, positions=[0] * workers)
        self._cluster: Cluster | None = cluster or surrounding()
        self._handles: list[Handle] = []
        self._addresses = self._start(factory, strategy, snapshot)

    def _start(self, factory: optim.Factory, strategy: ParameterServer, snapshot: Snapshot) -> list[str]:
        assert self._cluster is not None
        packed, shared = pack(factory), self._cluster.share(snapshot)
        for index in range(len(self._ranges)):
            self._handles.append(self._cluster.spawn("rayps.actors:ShardActor", index, self._secret, packed, threads=1))
        try:
            plans = [
                ShardPlan(self.generation, i, lo, hi, strategy, Boundary(0, -1))
                for i, (lo, hi) in enumerate(self._ranges)
            ]
            for begun in [h.call("begin", plan, shared) for h, plan in zip(self._handles, plans, strict=True)]:
                begun.result(START_SECONDS)
            return [place.result(START_SECONDS).address for place in [h.call("place") for h in self._handles]]
        except BaseException:
            self.close()
            raise

    def join(self, rank: int, *, resident: bool = True) -> SharedParameters:
        """Become worker `rank`; a former holder of the rank is fenced, and the steps it has pushed stay counted.

        `resident=False` sends messages also to shards of this host, whose memory would else be shared.

        Raises:
            ConfigError: there is no such rank.
            PeerTimeout, PeerLost: a shard does not answer.
        """
        return SharedParameters(self.server(rank, resident=resident), self.layout, self._as_dict)

    def server(self, rank: int, *, resident: bool = True) -> Server:
        """As `join`, with the parameters as one flat vector."""
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.workers:
            raise ConfigError(
                f"rank {rank} is not one of {self.workers} workers (0 to {self.workers - 1})", field="rank"
            )
        links = [
            connect(
                address, name=f"worker-{rank}", secret=self._secret, generation=self.generation, timeout=self.timeout
            )
            for address in self._addresses
        ]
        server = Server(
            rank,
            self.layout.dtype,
            self._ranges,
            links,
            timeout=self.timeout,
            defer=True,
            consistent=self._consistent,
            resident=resident,
            independent=self._independent,
            layout=self.layout,
        )
        if self._compression is not None:
            log.info(compress(server, self._compression)["message"])
        return server

    def close(self) -> None:
        """End the shards. Only where the group was made; elsewhere it does nothing."""
        if self._cluster is not None:
            for handle in self._handles:
                self._cluster.kill(handle)
            self._handles = []

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cluster": None, "_handles": []}  # whoever made the group keeps the right to end it

    def __enter__(self) -> ServerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SharedParameters:
    """One worker's view: pull and push, as a tensor or a state dict as it was given, whole, by range or by row."""

    def __init__(self, server: Server, layout: Layout, as_dict: bool) -> None:
        self._server, self._layout, self._as_dict = server, layout, as_dict
        self._as_vector = not as_dict and len(layout.entries[0].shape) == 1

    @property
    def step(self) -> int:
        """The number of this worker's next push."""
        return self._server.step

    def pull(
        self,
        lo: int | Tensor | None = None,
        hi: int | None = None,
        *,
        table: str | None = None,
        out: Tensor | None = None,
        consistent: bool | None = None,
    ) -> Any:
        """The parameters as they were given; with `lo` and `hi`, those elements of the flat vector.

        `pull(ids)`, with a tensor of whole numbers, gives those rows of a table, [len(ids), width]: a table is a
        parameter of two or more dimensions, `table` its name where there are several. What is pulled lands in `out`, a
        contiguous CPU tensor of as many elements, else in new memory. `consistent` reads all servers as of one moment,
        which is the default unless the group is asynchronous (`staleness=None`).
        """
        if isinstance(lo, Tensor):
            return self._server.pull_rows(lo, table, out=out, consistent=consistent)
        if lo is not None or hi is not None:
            return self._server.pull(lo or 0, hi, out=out, consistent=consistent)
        return self._shaped(self._server.pull(out=out, consistent=consistent))

    def push(
        self,
        value: Any,
        rows: Tensor | None = None,
        *,
        weight: float = 1.0,
        lo: int | None = None,
        table: str | None = None,
    ) -> None:
        """Push a gradient of the parameters' shape, or a flat range of it that begins at element `lo`.

        `push(ids, rows)` pushes the gradient of those rows of a table, [len(ids), width], those of the same id added
        up: the optimizer steps these rows alone. `weight` is its number of samples: the synchronous mean is weighted
        by it. Each call is one step.
        """
        self._post(value, rows, weight, lo, table)
        self._server.settle()

    def push_pull(
        self,
        value: Any,
        rows: Tensor | None = None,
        *,
        weight: float = 1.0,
        table: str | None = None,
        out: Tensor | None = None,
    ) -> Any:
        """Push, then pull the same, all parameters in one turn."""
        self._post(value, rows, weight, None, table)
        return self._shaped(self._server.pull(out=out)) if rows is None else self.pull(value, table=table, out=out)

    def _post(self, value: Any, rows: Tensor | None, weight: float, lo: int | None, table: str | None) -> None:
        if rows is not None:
            self._server.push_rows(value, rows, weight, table)
        else:
            self._server.push(self._checked(value) if lo is None else value, weight, lo or 0)

    def buffer(self) -> Tensor:
        """A flat tensor, all zero, as long as the parameters: a gradient written into it is pushed without a copy.

        The shards read it where it lies: it may change again when `push` or `push_pull` has returned.
        """
        return self._server.buffer(self._layout.size, self._layout.dtype)

    def read(self) -> Any:
        """The parameters as they are now, outside the clock."""
        return self._shaped(self._server.read())

    def close(self) -> None:
        """Leave."""
        self._server.close()

    def _checked(self, value: Any) -> Tensor | Gradient:
        if isinstance(value, dict):
            value = self._one_vector(value)
        if not isinstance(value, Gradient) and value.numel() != self._layout.size:
            raise ConfigError(
                f"a push has {value.numel()} elements and there are {self._layout.size} parameters: "
                "push all of them, or a range with lo="
            )
        found: Tensor | Gradient = value
        return found

    def _one_vector(self, named: dict[str, Tensor]) -> Tensor:
        shapes = {entry.name: entry.shape for entry in self._layout.entries}
        for name in sorted(shapes.keys() | named.keys()):
            found = tuple(named[name].shape) if name in named else None
            if found != shapes.get(name):
                raise ConfigError(f"a push has {name!r} of shape {found}; in the parameters it is {shapes.get(name)}")
        return torch.cat([named[name].detach().reshape(-1).cpu() for name in shapes])

    def _shaped(self, vector: Tensor) -> Any:
        if self._as_vector:
            return vector
        named = {e.name: vector[e.lo : e.hi].view(e.shape) for e in self._layout.entries}
        return named if self._as_dict else named[""]


def _named(params: Any) -> dict[str, Tensor]:
    named = {"": params} if isinstance(params, Tensor) else params
    if not isinstance(named, dict) or not all(isinstance(value, Tensor) for value in named.values()):
        raise ConfigError(
            f"params is {type(params).__name__}: give a tensor, or a dict of tensors such as model.state_dict()",
            field="params",
        )
    kinds = sorted({str(value.dtype).removeprefix("torch.") for value in named.values()})
    if len(kinds) != 1 or not next(iter(named.values())).is_floating_point():
        found = ", ".join(kinds) or "nothing"
        raise ConfigError(f"params are of {found}: give tensors of one float dtype, e.g. float32", field="params")
    if not any(value.numel() for value in named.values()):
        raise ConfigError("params have no elements: there is nothing to share", field="params")
    return dict(named)


def _sgd(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


__all__ = ["ServerGroup", "SharedParameters"]
