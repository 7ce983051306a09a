"""The shells around `Worker` and `Shard`: what a driver starts, orders, asks and ends.

An actor answers at once; training goes on in a thread of its own. A new generation's `begin` ends the
thread of the one before.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayps.addresses import Addresses
from rayps.cluster import host_address
from rayps.errors import LinkError, PeerLost, RaypsError, StaleGeneration
from rayps.flat import FlatModel, beside
from rayps.link import Link, Listener, connect
from rayps.logs import LogBuffer
from rayps.optim import Factory
from rayps.ring import Ring
from rayps.server import Server
from rayps.server.loop import ShardLoop
from rayps.server.parts import Parts
from rayps.server.shard import Boundary, Shard, ShardFacts, ShardPart
from rayps.snapshot import Snapshot
from rayps.strategy import Strategy
from rayps.worker import Worker, WorkerPart, WorkerPlan, model_of
from rayps.workload import Workload, unpack

log = logging.getLogger(__name__)

TRY_SECONDS = 1.0  # to reach a shard that has just been replaced, before its address is looked up again
JOIN_SECONDS = 5.0  # for a thread to notice that its plan has ended


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor runs."""

    host: str
    pid: int
    address: str


@dataclass(slots=True)
class WorkerFacts:
    """What a worker is asked about while it runs."""

    rank: int
    generation: int
    status: str  # idle, running, finished, failed
    position: int = 0
    error: Exception | None = None
    points: list[dict[str, Any]] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    lines: list[tuple[float, str]] = field(default_factory=list)


class WorkerActor:
    """One worker's process: holds the workload, and runs one generation's plan after another."""

    def __init__(
        self,
        rank: int,
        secret: bytes,
        workload: bytes,
        *,
        working_dir: str | None = None,
        threads: int | None = None,
        device: str = "cpu",
        capture: bool = False,
    ) -> None:
        self.logs = LogBuffer()
        if capture:
            self.logs.capture()
            logging.getLogger("rayps").setLevel(logging.INFO)
        if threads is not None:
            torch.set_num_threads(threads)
        _enter(working_dir)
        self._device = device
        self._packed = workload
        self._workload: Workload | None = None
        self._listener = Listener(f"worker-{rank}", secret, host=host_address())
        self._secret = secret
        self._facts = WorkerFacts(rank, 0, "idle")
        self._parts: Parts[WorkerPart] = Parts()
        self._lock = threading.Lock()
        self._link: Callable[[int], Link] | None = None
        self._shards = Addresses()
        self._thread: threading.Thread | None = None
        self._ending, self._closed = threading.RLock(), False
        self._stop = threading.Event()
        self._ties = _Ties()
        self._worker: Worker | None = None

    def place(self) -> Place:
        """Where this worker runs and how peers reach it."""
        return Place(socket.gethostname(), os.getpid(), self._listener.address)

    def initial(self, seed: int) -> Snapshot:
        """The state before the first round: parameters drawn from the seed alone, whatever the strategy or size."""
        workload = self._load()
        torch.manual_seed(seed)
        model = model_of(workload)
        buffers = {name: value.clone() for name, value in beside(model).items()}
        flat = FlatModel(model)
        return Snapshot(flat.layout, flat.vector.clone(), buffers=buffers)

    def begin(self, plan: WorkerPlan, snapshot: Snapshot) -> None:
        """End what runs, and start this plan; returns at once. Raises PeerLost when this worker has been closed."""
        with self._ending:
            self.abort()
            if self._closed:
                raise PeerLost(f"worker-{plan.rank} has been closed", peer=f"worker-{plan.rank}")
            with self._lock:
                self._facts = WorkerFacts(plan.rank, plan.generation, "running", max(plan.start, 0))
                self._parts = Parts()
            self._stop, self._ties = threading.Event(), _Ties()
            self._shards = Addresses([address for address, _, _ in plan.shards])
            self._listener.generation = plan.generation
            orders = (plan, [snapshot], self._stop, self._ties)
            self._thread = threading.Thread(target=self._run, args=orders, daemon=True, name=f"worker-{plan.rank}")
            self._thread.start()

    def poll(self, wanted: int) -> WorkerFacts:
        """What happened since the last poll; points and lines are handed over once. The part of `wanted` is kept."""
        with self._lock:
            facts = self._facts
            self._parts.wanted = wanted
            if self._worker is not None:
                self._worker.wanted = wanted
            answer = WorkerFacts(
                facts.rank,
                facts.generation,
                facts.status,
                facts.position,
                facts.error,
                facts.points,
                sorted(self._parts),
                self.logs.drain(),
            )
            facts.points = []
        return answer

    def part(self, rounds: int | None) -> WorkerPart | None:
        """This worker's share of the checkpoint after `rounds`, or its newest one, if it is still kept."""
        with self._lock:
            return self._parts.get(max(self._parts, default=0) if rounds is None else rounds)

    def rewire(self, shard: int, address: str) -> None:
        """Tell that a shard has been replaced and where it is now; what it lacks of this worker is said again."""
        self._shards.change(shard, address)
        server, link = self._ties.server, self._link
        if server is not None and link is not None:
            try:
                # at once: the plan's thread may wait for another shard, or have ended, and others wait for its pushes
                server.replay(shard, lambda: link(shard), lambda: shard in self._shards.unseen())
            except LinkError as error:  # it died again, and its next replacement will be told
                log.info("%s", str(error))

    def evaluate(self, vector: Tensor | None, buffers: dict[str, Tensor]) -> dict[str, tuple[float, int]]:
        """Sums and sample counts of every metric over this worker's share, at the given parameters."""
        assert self._worker is not None, "evaluate comes after a plan has run"
        with torch.no_grad():
            for name, value in beside(self._worker.flat.model).items():
                if name in buffers:
                    value.copy_(buffers[name])
        return self._worker.evaluate(vector)

    def abort(self) -> None:
        """End the running plan; its peers see this worker leave."""
        with self._ending:
            self._stop.set()
            self._shards.close()
            self._ties.part()
            if self._thread is not None:
                # a long step of the user's cannot be cut short: it ends at its next exchange
                self._thread.join(JOIN_SECONDS)
                if not self._thread.is_alive():
                    self._ties.close()

    def close(self) -> None:
        """End the plan and stop listening."""
        with self._ending:
            self._closed = True
            self.abort()
            self._listener.close()

    def _load(self) -> Workload:
        if self._workload is None:
            self._workload = unpack(self._packed)
        return self._workload

    def _run(self, plan: WorkerPlan, given: list[Snapshot], stop: threading.Event, ties: _Ties) -> None:
        status, error = "finished", None
        try:
            worker = self._prepare(plan, given.pop(), stop, ties)  # it is as large as the model: not kept meanwhile
            worker.run(lambda point: self._report(point, stop), lambda part: self._keep(part, stop), stop.is_set)
        except RaypsError as raised:
            status, error = "failed", raised
        except Exception as raised:  # a fault of ours or of a library: the driver must see it, not a hung worker
            log.exception("worker-%d failed", plan.rank)
            status, error = "failed", RaypsError(f"worker-{plan.rank} failed: {type(raised).__name__}: {raised}")
        with self._lock:
            if not stop.is_set():  # before the peers can notice that this worker has gone
                self._facts.status, self._facts.error = status, error
        if error is not None:
            ties.part()
            ties.close()

    def _prepare(self, plan: WorkerPlan, snapshot: Snapshot, stop: threading.Event, ties: _Ties) -> Worker:
        workload = self._load()
        if plan.strategy.shards == 0:
            ties.ring = Ring.form(
                plan.rank,
                plan.ring,
                self._listener,
                secret=plan.secret,
                generation=plan.generation,
                timeout=plan.timeout,
                label="worker",
                table=snapshot.ring,
            )
        else:
            ties.server = self._join(plan, snapshot)
        if stop.is_set():
            raise StaleGeneration(f"generation {plan.generation} was ended before it began", peer="driver")
        self._worker = Worker(workload, plan, snapshot, ties.ring, ties.server, self._device)
        return self._worker

    def _join(self, plan: WorkerPlan, snapshot: Snapshot) -> Server:
        def link(shard: int, timeout: float = TRY_SECONDS) -> Link:
            return connect(
                self._shards.current(shard),
                name=f"worker-{plan.rank}",
                secret=plan.secret,
                generation=plan.generation,
                timeout=timeout,
            )

        self._link = link
        ranges = [(lo, hi) for _, lo, hi in plan.shards]
        links = [link(i, plan.timeout) for i in range(len(ranges))]
        relink = None if plan.strategy.lockstep else lambda shard: self._relink(shard, link, plan.timeout)
        return Server(
            plan.rank,
            snapshot.layout.dtype,
            ranges,
            links,
            timeout=plan.timeout,
            step=plan.start,
            relink=relink,
            defer=True,
            consistent=plan.strategy.staleness is not None,
            independent=not plan.strategy.lockstep,
            keep=plan.strategy.kept_bytes,
            layout=snapshot.layout,
        )

    def _relink(self, shard: int, link: Callable[[int], Link], timeout: float) -> Link:
        log.info("%s lost shard-%d and waits for its replacement", self._listener.name, shard)
        deadline = time.monotonic() + timeout
        self._shards.changed(shard, timeout)
        while True:
            try:
                return link(shard)
            except PeerLost:  # perhaps the replacement has died too, and there is another one by now
                if time.monotonic() > deadline:
                    raise
                if shard in self._shards.unseen():
                    self._shards.changed(shard, timeout)

    def _report(self, point: dict[str, Any], stop: threading.Event) -> None:
        with self._lock:
            if stop.is_set():
                return  # the facts are another generation's by now
            self._facts.points.append(point)
            if point["kind"] == "round":
                self._facts.position = point["round"] + 1

    def _keep(self, part: WorkerPart, stop: threading.Event) -> None:
        with self._lock:
            if stop.is_set():
                return
            self._parts.keep(part.round, part)


@dataclass(slots=True)
class _Ties:
    """What binds one generation's thread to its peers; a thread that ends late must not part those of the next."""

    ring: Ring | None = None
    server: Server | None = None

    def part(self) -> None:
        """From any thread: whoever waits for this worker sees it leave."""
        if self.ring is not None:
            self.ring.abort()
        if self.server is not None:
            self.server.hang_up()

    def close(self) -> None:
        """Once the thread has ended."""
        if self.ring is not None:
            self.ring.close()
        if self.server is not None:
            self.server.close()


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One generation's orders to one shard."""

    generation: int
    index: int
    lo: int
    hi: int
    strategy: Strategy
    boundary: Boundary


class ShardActor:
    """One server's process: serves its slice of the parameters over links."""

    def __init__(
        self, index: int, secret: bytes, factory: bytes, *, working_dir: str | None = None, threads: int | None = None
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        _enter(working_dir)
        self._packed = factory
        self._listener = Listener(f"shard-{index}", secret, host=host_address())
        self._loop: ShardLoop | None = None

    def place(self) -> Place:
        """Where this shard runs and how workers reach it."""
        return Place(socket.gethostname(), os.getpid(), self._listener.address)

    def begin(self, plan: ShardPlan, snapshot: Snapshot) -> None:
        """Serve this plan's slice of the snapshot from now on."""
        if self._loop is not None:
            self._loop.close()
        found = unpack(self._packed)
        factory: Factory = found.optimizer if isinstance(found, Workload) else found
        layout = snapshot.layout
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
        )
        shard.load(snapshot.moments, layout)
        self._listener.generation = plan.generation
        self._loop = ShardLoop(shard, self._listener)

    def poll(self, wanted: int) -> ShardFacts | None:
        """What the shard is asked about while it runs; None before it began. The part of `wanted` is kept."""
        return None if self._loop is None else self._loop.facts(wanted)

    def part(self, rounds: int) -> ShardPart | None:
        """This shard's share of the checkpoint after `rounds`, if it is still kept."""
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


def _enter(working_dir: str | None) -> None:
    """Work where the user does, if that folder is here, so that relative paths and imports mean the same."""
    if working_dir and Path(working_dir).is_dir() and Path.cwd() != Path(working_dir):
        os.chdir(working_dir)
        sys.path.insert(0, working_dir)


__all__ = ["Place", "ShardActor", "ShardPlan", "WorkerActor", "WorkerFacts"]
