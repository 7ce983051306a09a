"""One replica: batches in, gradients out, a step taken. What a strategy's `round` is given.

`Worker` knows one model and its own share of the data; it knows no actor, no retry and no file.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, nullcontext
from typing import Any

import torch
from torch import Tensor

from rayps.comm.ring import Ring
from rayps.comm.ring.compressed_mean import compressed
from rayps.core.errors import TrainingError, WorkloadError
from rayps.core.families import FEDERATED_ROUNDS, LOCAL_UPDATES, SERVER_STEPS, SHARED_VECTOR, SYNC_GRADIENTS
from rayps.core.topology import Peers, SharedVector, servers_of
from rayps.core.user_code import user_code
from rayps.data import Batch
from rayps.federated.engine import FederatedEngine
from rayps.parallel.division.agree import agreed
from rayps.parallel.division.model_slice import ModelSlice
from rayps.parallel.division.optimizer import of_some
from rayps.ps.client.client import GroupServer
from rayps.ps.client.session import Session
from rayps.ps.fixed import Server
from rayps.ps.fixed.compressed import compress
from rayps.ps.tables.embedding import bind
from rayps.tensors import optim
from rayps.tensors.finite import gradient_fault
from rayps.tensors.flat import FlatModel, Gradient, square_of
from rayps.tensors.learning_rate import Pace, Ticks, pace_of, recipe_of
from rayps.tensors.snapshot import Snapshot
from rayps.worker import state
from rayps.worker.buckets import Buckets
from rayps.worker.meter import Meter
from rayps.worker.optimizer_step import clip_factor, clip_sparse, clipped, steps_by_reading
from rayps.worker.plan import WorkerPart, WorkerPlan
from rayps.workload.base import Workload
from rayps.workload.model import model_of
from rayps.workload.part import ModelPart, Whole


class Worker:
    """One replica under a strategy, from `plan.start` to `plan.end`."""

    def __init__(
        self,
        workload: Workload,
        plan: WorkerPlan,
        snapshot: Snapshot,
        ring: Ring | None,
        server: Server | GroupServer | None,
        device: str = "cpu",
        talk: Session | None = None,
        rings: Mapping[str, Ring] | None = None,
    ) -> None:
        """`talk` is about the job's space on a server group, where it has one. `rings` are those within a replica of
        several workers, by axis; `ring` and `snapshot` are then of this worker's column.
        """
        self.workload, self.plan, self.device, self.strategy = workload, plan, device, plan.strategy
        grid = plan.strategy.grid(plan.size)
        self.place = grid.at(plan.rank)
        self.rank, self.size = self.place.data, grid.data
        self.ring: Any = ring
        self.rings: Mapping[str, Any] = rings or {}
        self._norm = workload.clip_norm, tuple(self.rings.values())
        self.server: Any = server
        self.tables: Any = None
        self.clients: Any = None  # those of a federated job
        self.memory: dict[str, Any] = {}  # what a strategy keeps between its rounds
        self.shared: dict[str, Any] = {}  # of this, what is the same on all workers
        self.stopped: Callable[[], bool] = lambda: False  # whether the plan was ended from outside
        self.done, self.reason = False, ""  # whether the strategy has met its stop rule, and why
        self.agreement: tuple[Tensor | None] | None = None  # of this round, once it was asked for
        self._said: dict[str, float] = {}  # by the strategy, of the round under way
        self._events: list[dict[str, Any]] = []
        with user_code("data"):
            rows = plan.strategy.rows
            self.data = rows.source(workload)
            self.steps_per_epoch = rows.rounds(self.data, self.size)
        self.held: ModelPart = self._whole_or_slice(grid.column(plan.rank))
        # gradients lie where the other ranks, or the shards, of this host can read them: no copy is needed
        loop, topology = plan.strategy.loop, plan.strategy.topology
        shared = None if loop == FEDERATED_ROUNDS else ring if ring is not None else server
        buffer, home = (None if shared is None else shared.buffer), None
        if loop == SHARED_VECTOR and ring is not None:
            buffer, home = None, ring.common
        self.flat = FlatModel(self.held.module, buffer, (self.held.layout, self.held.parameters), home)
        self.choices: list[dict[str, Any]] = []  # what was chosen here, as events
        self._buckets: Buckets | None = None
        self._choose(ring)
        self.optimizer, self.pace = self._own_optimizer()
        self._mean: Tensor | None = None  # of the gradients, where the ring's ranks share it
        self._used: list[bool] = []  # which parameters the latest gradient is of
        self._unused: Collection[int] = ()  # parameters that no rank used in this round
        self._only_reads: bool | None = None  # whether the optimizer may be given what others read too
        state.take_over(self, snapshot)
        if server is not None and device == "cpu":
            server.home = self.flat.vector  # a pull lands in the model at once
        if talk is not None and talk.space.tables:
            foretell = workload.lookups if isinstance(topology, SharedVector) or topology.prefetch else None
            self.tables = bind(self.flat.model, talk, talk.space, foretell)
            if isinstance(server, GroupServer):
                server.extras = self.tables.pieces
        if isinstance(server, Server) and topology.compression is not None:
            self.choices.append(compress(server, topology.compression))
        if server is not None and self.rings:
            server.step = agreed(server.step, self.rings.values(), exact=plan.start < 0 and topology.in_step)
        self.position = server.step if server is not None else plan.start
        self.wanted = 0  # the round whose part the driver waits for
        self.commit: Callable[[Worker], None] | None = None  # keeps what it has between two rounds
        self._batches: Iterator[Batch] = iter(())
        self._epoch = -1
        self._coming: Batch | None = None  # the batch after this one, where its rows are looked up ahead
        self._samples = 0  # of the batch under way
        self.meter = Meter(self.ring, self.server, self.tables, list(self.rings.values()))
        if loop == FEDERATED_ROUNDS:
            self.clients = FederatedEngine(self)

    def _choose(self, ring: Ring | None) -> None:
        """How gradients and means travel around the ring; the choices as events."""
        plan, loop, topology = self.plan, self.strategy.loop, self.strategy.topology
        if plan.division is not None:
            self.choices += self._ring_choices()
        elif ring is not None and plan.rank == 0 and plan.size > 1:
            self.choices.append({"kind": "choice", "message": ring.choice, "ring": ring.choices})
        sent: Any = ring
        if ring is not None and topology.compression is not None:
            sent, found = compressed(ring, topology.compression, Gradient(self.flat.packed, 0))
            self.choices += [found] if plan.rank == 0 else []
        self.means = state.BackgroundMeans(ring, sent)
        if loop != LOCAL_UPDATES:  # else gradients, where there are some, are of another kind than what is sent
            self.ring = sent
        each_step = loop in (SYNC_GRADIENTS, SERVER_STEPS)
        if isinstance(self.ring, Ring) and plan.division is None and each_step:
            self._buckets = Buckets(self.flat, self.ring, topology.bucket_mb if isinstance(topology, Peers) else None)
            self.choices += [self._buckets.choice] if plan.rank == 0 and plan.size > 1 else []

    def _own_optimizer(self) -> tuple[Any, Pace | None]:
        """What steps this worker's parameters, and its schedule, if it has one; None where only servers step."""
        strategy, division, factory = self.strategy, self.plan.division, recipe_of(self.workload)
        servers = servers_of(strategy)
        if servers is not None and not servers.own_copies:
            return None, None
        if division is not None:
            factory = of_some(factory, division.layout, [entry.name for entry in self.held.layout.entries])
        optimizer = optim.made(factory, self.flat.parameters)
        ticks = Ticks(self.plan.origin, self.steps_per_epoch)
        return optimizer, pace_of(factory, self.held.layout, optimizer, ticks)

    def _whole_or_slice(self, column: int) -> ModelPart:
        plan = self.plan
        if plan.division is None:
            model = model_of(self.workload).to(self.device)
            return Whole(self.workload, plan.strategy.split(model, self.ring))
        return ModelSlice(
            self.workload, plan.division, column, self.rings, seed=plan.seed, data=self.rank, device=self.device
        )

    # ---- what a strategy sees

    @property
    def params(self) -> Tensor:
        """The parameters as one vector; assigning copies into the model."""
        return self.flat.vector

    @params.setter
    def params(self, vector: Tensor) -> None:
        if vector.data_ptr() != self.flat.vector.data_ptr():
            self.flat.vector.copy_(vector)

    def batch(self) -> Batch:
        """The next batch of this worker's share of the data."""
        began = time.perf_counter()
        batch, self._coming = self._coming, None
        if batch is None:
            batch = self._next(self.position)
        self.position += 1
        if self.tables is not None and self.position < self.plan.end:
            self._coming = self._next(self.position)
        self._samples = batch.size
        self.meter.data += time.perf_counter() - began
        return batch.to(self.device) if self.device != "cpu" else batch

    @property
    def rows(self) -> int:
        """Rows of this worker's share of the data."""
        return self.data.share(self.rank, self.size)

    @property
    def all_rows(self) -> int:
        """Rows of the data, over all workers."""
        return self.data.rows()

    def _next(self, position: int) -> Batch:
        epoch, index = self.epoch_of(position)
        with user_code("data"):
            if epoch != self._epoch:
                self._epoch = epoch
                self._batches = self.data.batches(
                    rank=self.rank, size=self.size, seed=self.plan.seed, epoch=epoch, start=index
                )
            batch = next(self._batches)
        if self.tables is not None:
            self.tables.ahead(batch)
        return batch

    def _ring_choices(self) -> list[dict[str, Any]]:
        """Of the rings that this worker is the first of, as the data rings and tensor rings of its replica."""
        known = {"data": self.ring, "tensor": self.rings.get("tensor")}
        mine = {axis: ring for axis, ring in known.items() if ring is not None and ring.size > 1 and ring.rank == 0}
        tables = {self.place.line(axis): ring.choices for axis, ring in mine.items()}
        said = [{"kind": "choice", "message": f"{self.place.line(axis)}: {ring.choice}"} for axis, ring in mine.items()]
        return ([{"kind": "rings", "rings": tables}] if tables else []) + (said if self.plan.rank == 0 else [])

    def epoch_of(self, position: int) -> tuple[int, int]:
        """The epoch, and the number of the batch in it."""
        began, before = self.plan.origin
        epoch, index = divmod(position - began, self.steps_per_epoch)
        return before + epoch, index

    def grad(self, batch: Batch) -> Gradient:
        """The gradient of the loss on `batch`; an empty batch gives zeros with no samples.

        Raises:
            TrainingError: the loss or the gradient is not finite.
            WorkloadError: the user's loss failed or is not a scalar.
        """
        began, inside = time.perf_counter(), self.meter.inside
        self.flat.drop_grad()
        gradient = Gradient(self.flat.packed, batch.size)
        if batch.size:
            gradient.loss = self._backward(batch)
        self._used, self._unused = [p.grad is not None for p in self.flat.parameters], ()
        if self.strategy.loop in (
            SHARED_VECTOR,
            LOCAL_UPDATES,
        ):  # with zeros it would be a step, and undo others' meanwhile
            self._unused = [i for i, used in enumerate(self._used) if not used]
        self.flat.collect_grad()
        if batch.size:
            self._refuse(self.plan.rank, gradient_fault(self.flat))
        if self.server is not None and batch.size and self.optimizer is None:
            self._clip_push(gradient.vector)
        self.meter.compute += time.perf_counter() - began - (self.meter.inside - inside)
        return gradient

    def mean_grad(self, batch: Batch) -> Tensor:
        """`ring.mean(grad(batch))`, in buckets that leave while backward goes on; to be read only.

        A parameter that no rank used has no gradient in the next `step`. Raises as `grad`, and LinkError.
        """
        buckets = self._buckets
        if buckets is None:
            return self._mean_at_once(batch)
        began, talked = time.perf_counter(), buckets.seconds
        buckets.begin(batch.size)
        if batch.size:
            self._backward(batch)
        self._refuse(*(buckets.fault or (self.rank, None)))  # nobody else knows of it yet
        self._mean, self._unused = buckets.finish()
        if buckets.fault is not None:
            self._refuse(*buckets.fault)
        self.meter.compute += time.perf_counter() - began - (buckets.seconds - talked)
        return self._mean

    def _mean_at_once(self, batch: Batch) -> Tensor:
        mean: Tensor = self.ring.mean(self.grad(batch))
        used = self.ring.max(torch.tensor(self._used, dtype=torch.uint8))
        self._unused = [i for i, some in enumerate(used.tolist()) if not some]
        return mean

    def _backward(self, batch: Batch) -> float:
        value = self.held.backward(batch, self.position - 1, self._check)
        if value is not None and self.held.reports:
            self.meter.losses.append((value, batch.size))
        return math.nan if value is None else value

    def clipped(self, vector: Tensor) -> Tensor:
        """See `WorkerView.clipped`."""
        return clipped(vector, *self._norm)

    def _clip_push(self, vector: Tensor) -> None:
        """Shorten a push to `clip_norm`, in place: the dense vector, and with it the rows of the tables."""
        most, rings = self._norm
        if most is None:
            return
        square = square_of(vector)
        if self.tables is not None:
            square += self.tables.square()
        factor = clip_factor(square, most, rings)
        if factor < 1:
            vector.mul_(factor)
            if self.tables is not None:
                self.tables.scale(factor)

    def _refuse(self, rank: int, fault: str | None) -> None:
        """Raise TrainingError if worker `rank`'s gradient of a parameter, or this one's of a row, is not finite.

        Rank -1: the gradients are, but not their sum.
        """
        row = None if fault is not None or self.tables is None else self.tables.gradient_fault()
        if fault is None and row is None:
            return
        at, named = self.position - 1, dict[str, Any](parameter=fault, rank=rank)
        what, who = f"the gradient of parameter {fault!r}", f"on worker-{rank}"
        if row is not None:
            what = f"the gradient of table {row[0]!r}, id {row[1]},"
            named = {"parameter": row[0], "id": row[1], "rank": rank}
        if rank < 0:
            who = "once the workers' gradients, which are, are added up,"
            del named["rank"]
        raise TrainingError(
            f"{what} is not finite (NaN or infinite) {who} at round {at} "
            f"(epoch {self.epoch_of(at)[0] + 1}), although the loss is:\nlook for an operation without a finite "
            "derivative there (sqrt or a norm at 0, 0 * inf, a division by 0), or for bad values in the data; "
            "torch.autograd.set_detect_anomaly(True) names the operation",
            round=at,
            **named,
        )

    def step(self, grad: Gradient | Tensor) -> None:
        """Let this worker's own optimizer apply a gradient vector."""
        began = time.perf_counter()
        vector = grad.vector if isinstance(grad, Gradient) else grad
        if self.flat.sparse_grads and self._norm[0] is not None:
            vector = clip_sparse(self.flat.parameters, vector, self._norm[0])
        else:
            vector = clipped(vector, *self._norm)
        if vector is self._mean and self._only_reads is not False:
            self.flat.bind(vector if self._only_reads else vector.clone())
        else:
            self.flat.load_grad(vector)
        for i in self._unused:
            self.flat.parameters[i].grad = None
        if not self.flat.parameters:
            pass  # a part of a model that owns nothing
        elif self._only_reads is None:  # found out once, on a copy
            self._only_reads = steps_by_reading(self.optimizer, self.flat.parameters)
        else:
            with user_code("optimizer.step"):
                self.optimizer.step()
        self.meter.compute += time.perf_counter() - began

    def say(self, **numbers: float) -> None:
        """Numbers for this round's point, the same on all workers; what every point has cannot be said."""
        self._said |= {name: value if isinstance(value, int) else float(value) for name, value in numbers.items()}

    def event(self, kind: str, message: str, **facts: Any) -> None:
        """File an event of the job, once this round is over."""
        self._events.append({"kind": kind, "message": message, **facts})

    def mean(self, vector: Tensor, samples: float = 1.0, *, exact: bool = False) -> Tensor:
        """See `WorkerView.mean`. Raises LinkError."""
        return self.means.mean(vector, samples, exact=exact)

    def mean_later(self, vector: Tensor, samples: float = 1.0, *, slot: int = 0) -> Tensor:
        """See `WorkerView.mean_later`."""
        return self.means.mean_later(vector, samples, slot)

    def own_loss(self) -> float:
        """See `WorkerView.own_loss`."""
        total, count = state.evaluated(self, whole=True).get("loss", (math.nan, 1))
        return total / count

    def arrived(self, parcel: Tensor) -> Tensor:
        """See `WorkerView.arrived`. Raises LinkError."""
        return self.means.arrived(parcel)

    def sync_optimizer_and_buffers(self, samples: float, *, momentum: str, buffers: str) -> None:
        """See `state.together`."""
        state.together(self, samples, momentum=momentum, buffers=buffers)

    def together(self, samples: float, *, momentum: str, buffers: str) -> None:
        """The old name of `sync_optimizer_and_buffers`."""
        warnings.warn(
            "w.together is called w.sync_optimizer_and_buffers; the old name goes with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        self.sync_optimizer_and_buffers(samples, momentum=momentum, buffers=buffers)

    # ---- what runs it

    def run(
        self, report: Callable[[dict[str, Any]], None], keep: Callable[[WorkerPart], None], stopped: Callable[[], bool]
    ) -> None:
        """Rounds from the position to the plan's end; a point after each, an evaluation after each epoch."""
        with closing(self.tables) if self.tables is not None else nullcontext():
            self._run(report, keep, stopped)

    def _run(
        self, report: Callable[[dict[str, Any]], None], keep: Callable[[WorkerPart], None], stopped: Callable[[], bool]
    ) -> None:
        self.stopped = stopped
        self.flat.model.train()
        for choice in self.choices:
            report(choice)
        self.strategy.begin(self)
        if self.commit is not None:
            self.commit(self)
        state.evaluate_epoch(self, report)  # what a death before this generation has cut short
        while self.position < self.plan.end and not self.done and not stopped():
            self._round(report)
            at, over = self.position, self.done or self.position >= self.plan.end
            if (at in self.plan.boundary or at == self.wanted) and not (over and self.strategy.loop == LOCAL_UPDATES):
                keep(state.share(self, together=at in self.plan.boundary))
                if self.clients is not None:
                    self.clients.keep(at)
            state.evaluate_epoch(self, report)
        if not stopped():
            self.strategy.finish(self)
        if self.server is not None and not stopped():
            self.server.settle()
        self.agreement = None
        if self.server is None and not stopped() and (agreed := state.agreed(self)) is not None:
            self.params = agreed
        if not stopped():
            keep(state.share(self, together=True))  # also for one that replaced a worker at its very end

    def _round(self, report: Callable[[dict[str, Any]], None]) -> None:
        self.agreement = None
        self.meter.begin()
        step = self.position
        if self.tables is not None:
            self.tables.begin(step)
        if self.pace is not None:
            self.pace.at(step)
        self.strategy.round(self)
        if self.tables is not None and self.server is None:
            self.tables.push(step, float(self._samples))
        for event in self._events:
            report({"kind": "event", "event": event})
        self._events = []
        report(self._point())
        if self.commit is not None:
            self.commit(self)

    def evaluate(self, vector: Tensor | None = None) -> dict[str, tuple[float, int]]:
        """See `state.evaluated`."""
        return state.evaluated(self, vector)

    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers and frozen parameters by name, as copies."""
        return {name: value.detach().cpu().clone() for name, value in self.held.beside.items()}

    def _check(self, loss: Any) -> float:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise WorkloadError(
                f"loss(model, batch) gave {shape}: return one number as a tensor, the mean over the batch"
            )
        if not math.isfinite(loss.item()):
            raise TrainingError(
                f"the loss became {loss.item()} on worker-{self.plan.rank} at round {self.position - 1} "
                f"(epoch {self.epoch_of(self.position - 1)[0] + 1}):\n"
                "lower the learning rate, clip the gradient, or look for bad values in the data",
                rank=self.plan.rank,
                round=self.position - 1,
            )
        return float(loss.item())

    def _point(self) -> dict[str, Any]:
        done = self.position - 1
        point = {"kind": "round", "round": done, "epoch": self.epoch_of(done)[0], **self.meter.point()}
        if self._said:
            point, self._said = point | {"said": self._said}, {}
        return point | self.held.facts() | (self.tables.point() if self.tables is not None else {})
