"""One replica: batches in, gradients out, a step taken. What a strategy's `round` is given.

`Worker` knows one model and its own share of the data; it knows no actor, no retry and no file.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks as _GLOBAL_HOOKS

from rayps import optim
from rayps.buckets import Buckets
from rayps.data import Batch
from rayps.elastic.client.client import ElasticServer
from rayps.elastic.client.talk import Talk
from rayps.embedding import bind
from rayps.errors import TrainingError, WorkloadError
from rayps.flat import FlatModel, Gradient, beside
from rayps.ring import Ring
from rayps.ring.compressed import compressed
from rayps.runtime.plans import WorkerPart, WorkerPlan
from rayps.server import Server
from rayps.server.compressed import compress
from rayps.snapshot import Snapshot
from rayps.user_code import user_code
from rayps.workload import Workload


@dataclass(slots=True)
class Timer:
    """Seconds and bytes of the round under way."""

    compute: float = 0.0
    losses: list[tuple[float, int]] = field(default_factory=list)
    began: float = 0.0
    waiting: float = 0.0
    moving: float = 0.0
    bytes: int = 0


class Worker:
    """One replica under a strategy, from `plan.start` to `plan.end`."""

    def __init__(
        self,
        workload: Workload,
        plan: WorkerPlan,
        snapshot: Snapshot,
        ring: Ring | None,
        server: Server | ElasticServer | None,
        device: str = "cpu",
        talk: Talk | None = None,
    ) -> None:
        """`talk` is about the job's space on a server group, where it has one."""
        self.workload, self.plan, self.device = workload, plan, device
        self.rank, self.size, self.strategy = plan.rank, plan.size, plan.strategy
        self.ring: Any = ring
        self.server: Any = server
        self.tables: Any = None
        with user_code("data"):
            self.data = workload.data()
            self.steps_per_epoch = self.data.steps(plan.size)
        model = model_of(workload).to(device)
        # gradients lie where the other ranks, or the shards, of this host can read them: no copy is needed
        shared = ring if ring is not None else server
        self.flat = FlatModel(plan.strategy.split(model, ring), shared.buffer if shared is not None else None)
        self.choices: list[dict[str, Any]] = []  # what was chosen here, as events
        if ring is not None and plan.rank == 0 and plan.size > 1:
            self.choices.append({"kind": "choice", "message": ring.choice, "ring": ring.choices})
        if ring is not None and plan.strategy.compression is not None:
            self.ring, found = compressed(ring, plan.strategy.compression, Gradient(self.flat.packed, 0))
            self.choices += [found] if plan.rank == 0 else []
        self._buckets: Buckets | None = None
        if isinstance(self.ring, Ring):
            self._buckets = Buckets(self.flat, self.ring, getattr(plan.strategy, "bucket_mb", None))
            self.choices += [self._buckets.choice] if plan.rank == 0 and plan.size > 1 else []
        self.optimizer: Any = None
        if plan.strategy.shards == 0:
            self.optimizer = optim.made(workload.optimizer, self.flat.parameters)
        self._mean: Tensor | None = None  # of the gradients, where the ring's ranks share it
        self._used: list[bool] = []  # which parameters the latest gradient is of
        self._unused: Collection[int] = ()  # parameters that no rank used in this round
        self._only_reads: bool | None = None  # whether the optimizer may be given what others read too
        self.load(snapshot)
        if server is not None and device == "cpu":
            server.home = self.flat.vector  # a pull lands in the model at once
        if talk is not None and talk.space.tables:
            foretell = workload.lookups if getattr(plan.strategy, "prefetch", True) else None
            self.tables = bind(self.flat.model, talk, talk.space, foretell)
            if isinstance(server, ElasticServer):
                server.extras = self.tables.pieces
        if isinstance(server, Server) and plan.strategy.compression is not None:
            self.choices.append(compress(server, plan.strategy.compression))
        self.position = server.step if server is not None else plan.start
        self.wanted = 0  # the round whose part the driver waits for
        self._batches: Iterator[Batch] = iter(())
        self._epoch = -1
        self._coming: Batch | None = None  # the batch after this one, where its rows are looked up ahead
        self._samples = 0  # of the batch under way
        self._timer = Timer()

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
        batch, self._coming = self._coming, None
        if batch is None:
            batch = self._next(self.position)
        self.position += 1
        if self.tables is not None and self.position < self.plan.end:
            self._coming = self._next(self.position)
        self._samples = batch.size
        return batch.to(self.device) if self.device != "cpu" else batch

    def _next(self, position: int) -> Batch:
        epoch, index = divmod(position, self.steps_per_epoch)
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

    def grad(self, batch: Batch) -> Gradient:
        """The gradient of the loss on `batch`; an empty batch gives zeros with no samples.

        Raises:
            TrainingError: the loss is not finite.
            WorkloadError: the user's loss failed or is not a scalar.
        """
        began = time.perf_counter()
        self.flat.drop_grad()
        gradient = Gradient(self.flat.packed, batch.size)
        if batch.size:
            gradient.loss = self._backward(batch)
        self._used, self._unused = [p.grad is not None for p in self.flat.parameters], ()
        self.flat.collect_grad()
        self._timer.compute += time.perf_counter() - began
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
        self._mean, self._unused = buckets.finish()
        self._timer.compute += time.perf_counter() - began - (buckets.seconds - talked)
        return self._mean

    def _mean_at_once(self, batch: Batch) -> Tensor:
        mean: Tensor = self.ring.mean(self.grad(batch))
        used = self.ring.max(torch.tensor(self._used, dtype=torch.uint8))
        self._unused = [i for i, some in enumerate(used.tolist()) if not some]
        return mean

    def _backward(self, batch: Batch) -> float:
        with user_code("loss"):
            loss = self.workload.loss(self.flat.model, batch)
        value = self._check(loss)
        with user_code("loss"):
            loss.backward()  # type: ignore[no-untyped-call]
        self._timer.losses.append((value, batch.size))
        return value

    def step(self, grad: Gradient | Tensor) -> None:
        """Let this worker's own optimizer apply a gradient vector."""
        began = time.perf_counter()
        vector = grad.vector if isinstance(grad, Gradient) else grad
        if vector is self._mean and self._only_reads is not False:
            self.flat.bind(vector if self._only_reads else vector.clone())
        else:
            self.flat.load_grad(vector)
        for i in self._unused:
            self.flat.parameters[i].grad = None
        if self._only_reads is None:  # found out once, on a copy
            self._only_reads = _steps_by_reading(self.optimizer, self.flat.parameters)
        else:
            with user_code("optimizer.step"):
                self.optimizer.step()
        self._timer.compute += time.perf_counter() - began

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
        self.flat.model.train()
        for choice in self.choices:
            report(choice)
        self._evaluate(report)  # what a death before this generation has cut short
        while self.position < self.plan.end and not stopped():
            before, step = self._start_round(), self.position
            if self.tables is not None:
                self.tables.begin(step)
            self.strategy.round(self)
            if self.tables is not None and self.server is None:
                self.tables.push(step, float(self._samples))
            report(self._point(before))
            if self.position in self.plan.boundary or self.position == self.wanted:
                keep(self.part())
            self._evaluate(report)
        if self.server is not None and not stopped():
            self.server.settle()
        if not stopped():
            keep(self.part())  # also for one that replaced a worker at its very end

    def _evaluate(self, report: Callable[[dict[str, Any]], None]) -> None:
        """After each epoch but the last, whose evaluation the driver asks for; what was heard is not said again."""
        at = self.position
        if self.plan.evaluated < at < self.plan.end and at % self.steps_per_epoch == 0:
            report({"kind": "evaluation", "round": at, "sums": self.evaluate(self._shared())})

    def _shared(self) -> Tensor | None:
        """What to evaluate where the servers hold it: in step, only once everyone's pushes of the round are in."""
        if self.server is None:
            return None
        vector: Tensor = self.server.pull() if self.strategy.lockstep else self.server.read()
        return vector

    def evaluate(self, vector: Tensor | None = None) -> dict[str, tuple[float, int]]:
        """Sums and sample counts of every metric over this worker's share of the evaluation data.

        Means over all workers are the sums divided by the counts. `vector` replaces the parameters first.
        """
        if vector is not None:
            self.params = vector
        model, sums = self.flat.model, dict[str, tuple[float, int]]()
        model.eval()
        with torch.no_grad(), user_code("evaluate"):
            data = self.workload.evaluation_data()
            for batch in data.batches(rank=self.rank, size=self.size, seed=self.plan.seed, epoch=0):
                if batch.size:
                    batch = batch.to(self.device)
                    means = {"loss": self.workload.loss(model, batch)} | _metrics(self.workload.evaluate(model, batch))
                    for name, mean in means.items():
                        total, count = sums.get(name, (0.0, 0))
                        sums[name] = (total + _number(name, mean) * batch.size, count + batch.size)
        model.train()
        return sums

    def part(self) -> WorkerPart:
        """This worker's share of a checkpoint, as copies. What it has pushed is there."""
        if self.tables is not None:
            self.tables.settle()
        lead = self.rank == 0 and self.optimizer is not None
        return WorkerPart(
            self.position,
            self.flat.vector.cpu().clone() if lead else None,
            optim.moments(self.optimizer, self.flat.layout, self.flat.parameters) if lead else {},
            self.buffers() if self.rank == 0 else {},
            torch.get_rng_state(),
        )

    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers and frozen parameters by name, as copies."""
        return {name: value.detach().cpu().clone() for name, value in beside(self.flat.model).items()}

    def load(self, snapshot: Snapshot) -> None:
        """Take over parameters, optimizer state, buffers and this rank's random state."""
        snapshot.check(self.flat.layout)
        self.params = snapshot.params
        with torch.no_grad():
            for name, value in beside(self.flat.model).items():
                if name in snapshot.buffers:
                    value.copy_(snapshot.buffers[name])
        if self.optimizer is not None:
            optim.load(self.optimizer, snapshot.moments, self.flat.layout, self.flat.parameters)
        if self.rank in snapshot.rng:
            torch.set_rng_state(snapshot.rng[self.rank])
        else:
            torch.manual_seed(self.plan.seed * 1_000_003 + self.rank)

    def _check(self, loss: Any) -> float:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise WorkloadError(
                f"loss(model, batch) gave {shape}: return one number as a tensor, the mean over the batch"
            )
        if not math.isfinite(loss.item()):
            raise TrainingError(
                f"the loss became {loss.item()} on worker-{self.rank} at round {self.position - 1} "
                f"(epoch {(self.position - 1) // self.steps_per_epoch + 1}):\n"
                "lower the learning rate, clip the gradient, or look for bad values in the data",
                rank=self.rank,
                round=self.position - 1,
            )
        return float(loss.item())

    def _start_round(self) -> Timer:
        self._timer = Timer(began=time.perf_counter())
        now = self._traffic()
        return Timer(waiting=now[0], moving=now[1], bytes=now[2])

    def _traffic(self) -> tuple[float, float, int]:
        if self.server is not None:
            return self.server.seconds_waiting, 0.0, self.server.bytes_moved
        if self.tables is not None:
            waiting = self.ring.seconds_waiting + self.tables.seconds_waiting
            return waiting, self.ring.seconds_moving, self.ring.bytes_sent
        return self.ring.seconds_waiting, self.ring.seconds_moving, self.ring.bytes_sent

    def _point(self, before: Timer) -> dict[str, Any]:
        waiting, moving, moved = self._traffic()
        losses = self._timer.losses
        samples = sum(count for _, count in losses)
        seconds = time.perf_counter() - self._timer.began
        exposed = max(0.0, seconds - self._timer.compute)  # what a background thread does meanwhile takes no time
        wait = min(waiting - before.waiting, exposed)
        return {
            "kind": "round",
            "round": self.position - 1,
            "epoch": (self.position - 1) // self.steps_per_epoch,
            "loss": sum(loss * count for loss, count in losses) / samples if samples else None,
            "samples": samples,
            "seconds": seconds,
            "compute": self._timer.compute,
            "wait": wait,
            "move": min(moving - before.moving, exposed - wait),
            "bytes": moved - before.bytes,
            "lead": self.server.lead if self.server is not None else None,
            **(self.tables.point() if self.tables is not None else {}),
        }


def _steps_by_reading(optimizer: Any, params: list[nn.Parameter]) -> bool:
    """Take a step; whether it, and every later one, leaves the gradients as they are.

    Only torch's own optimizers without hooks always do what they did once; some of them write (SGD with nesterov and
    foreach does).
    """
    before = [None if p.grad is None else p.grad._version for p in params]
    with user_code("optimizer.step"):
        optimizer.step()
    after = [None if p.grad is None else p.grad._version for p in params]
    own = type(optimizer).__module__.startswith("torch.optim.") and "step" not in vars(optimizer)
    return own and before == after and not optimizer._optimizer_step_pre_hooks and not _GLOBAL_HOOKS


def model_of(workload: Workload) -> nn.Module:
    """A new model of the user's. Raises WorkloadError."""
    with user_code("model"):
        model = workload.model()
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"model() gave {type(model).__name__}: return a torch.nn.Module")
    return model


def _metrics(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise WorkloadError(
            f"evaluate(model, batch) gave {type(given).__name__}: return a dict of means such as {{'accuracy': 0.9}}"
        )
    return given


def _number(name: str, mean: Any) -> float:
    try:
        return float(mean)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WorkloadError(
            f"evaluate(model, batch) gave {name!r} a {type(mean).__name__}: return one number, its mean over the batch"
        ) from error
