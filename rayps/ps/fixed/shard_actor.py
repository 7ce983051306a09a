"""The shell around `Shard`: one server's process, which a driver starts, orders, asks and ends."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field

import torch

from rayps.cluster.actor_host import ActorHost, enter
from rayps.cluster.local import host_address
from rayps.comm.link import Listener
from rayps.core.calendar import Boundary
from rayps.core.strategy import ServerHalf
from rayps.core.user_module import unpack
from rayps.ps.fixed.loop import ShardLoop
from rayps.ps.fixed.shard import Shard, ShardFacts, ShardPart
from rayps.tensors.flat import Layout
from rayps.tensors.learning_rate import Ticks, recipe_of
from rayps.tensors.optim import Factory
from rayps.tensors.snapshot import Snapshot
from rayps.tensors.subset_optimizer import of_some
from rayps.workload.base import Workload


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One generation's orders to one shard."""

    generation: int
    index: int
    lo: int
    hi: int
    strategy: ServerHalf
    boundary: Boundary
    whole: Layout | None = None  # of the whole model, where the snapshot is of one column of a replica
    ticks: Ticks = field(default_factory=Ticks)


class ShardActor:
    """One server's process: serves its slice of the parameters over links."""

    def __init__(
        self, index: int, secret: bytes, factory: bytes, *, working_dir: str | None = None, threads: int | None = None
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        enter(working_dir)
        self._packed = factory
        self._listener = Listener(f"shard-{index}", secret, host=host_address())
        self._loop: ShardLoop | None = None

    def place(self) -> ActorHost:
        """Where this shard runs and how workers reach it."""
        return ActorHost(socket.gethostname(), os.getpid(), self._listener.address)

    def begin(self, plan: ShardPlan, snapshot: Snapshot) -> None:
        """Serve this plan's slice of the snapshot from now on."""
        if self._loop is not None:
            self._loop.close()
        found = unpack(self._packed)
        factory: Factory = recipe_of(found) if isinstance(found, Workload) else found
        layout = snapshot.layout
        if plan.whole is not None:
            factory = of_some(factory, plan.whole, [entry.name for entry in layout.entries])
        shard = Shard(
            plan.index,
            layout,
            plan.lo,
            plan.hi,
            params=snapshot.params[plan.lo : plan.hi],
            factory=factory,
            strategy=plan.strategy,
            start=snapshot.ledger(plan.lo, plan.hi),
            boundary=plan.boundary,
            ticks=plan.ticks,
        )
        shard.load(snapshot.moments, layout)
        self._listener.generation = plan.generation
        self._loop = ShardLoop(shard, self._listener)

    def poll(self, wanted: int) -> ShardFacts | None:
        """What the shard is asked about while it runs; None before it began. The part of `wanted` is kept."""
        return None if self._loop is None else self._loop.facts(wanted)

    def part(self, rounds: int) -> ShardPart | None:
        """Return this shard's part of the checkpoint after `rounds`, or None if it is not retained."""
        return None if self._loop is None else self._loop.part(rounds)

    def saved(self, rounds: int) -> None:
        """Note that the snapshot after `rounds` is kept elsewhere: what it holds is durable."""
        if self._loop is not None:
            self._loop.saved(rounds)

    def close(self) -> None:
        """Stop serving."""
        if self._loop is not None:
            self._loop.close()
        self._listener.close()
