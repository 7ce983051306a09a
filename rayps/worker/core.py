"""One replica on one worker: model, data, optimizer, meter, and the methods that strategies of every family call.

A `Worker` is the argument of a strategy's `round`. It uses no actors, no files and no retries. Each family adds methods
in a subclass, such as `rayps.worker.loops.sync_gradients.SyncWorker`. The family's loop
(`rayps.worker.loops.loop.Loop`) runs the rounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from rayps_client.errors import ConfigError, TrainingError
from rayps_client.trainers.module_modes import evaluating
from rayps_client.values import Json, JsonObject, Keywords
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks as _GLOBAL_HOOKS

from rayps.core.job.records import Event, Point
from rayps.core.job.user_code import user_code
from rayps.core.metrics import Total, Totals, add_totals
from rayps.core.strategy.strategy import RoundMemory
from rayps.data.base import Batch, Data, Nested
from rayps.tensors import optim
from rayps.tensors.clip import NormClip
from rayps.tensors.finite import find_gradient_fault
from rayps.tensors.flat import FlatModel, Gradient, Layout
from rayps.tensors.learning_rate import Ticks, pace_of, recipe_of
from rayps.tensors.user_loss import check_loss
from rayps.worker.connections import WorkerConnections
from rayps.worker.exchange.step_scaling import StepScaling
from rayps.worker.members import make_members
from rayps.worker.plan import WorkerPlan
from rayps.worker.privacy import Privacy, make_privacy
from rayps.worker.rows.evaluation_batches import EvaluationFacts, bound_batches
from rayps.worker.rows.make_stream import make_stream
from rayps.workload.accumulate import Ready, StepLoss
from rayps.workload.base import Workload, evaluates_training_data
from rayps.workload.checkpoint_activations import checkpoint_activations
from rayps.workload.compile_model import compile_model
from rayps.workload.division_face import find_division
from rayps.workload.model import model_of
from rayps.workload.model_blocks import named_briefly
from rayps.workload.model_part import ModelPart, Whole

if TYPE_CHECKING:
    from rayps.ps.client.table_face import ModelTables

Memory = Callable[[int, torch.dtype], Tensor]  # (elements, dtype) -> a new vector, e.g. in shared memory
Traffic = tuple[float, float, int]  # seconds waited, seconds spent on transfer, bytes


@dataclass(frozen=True, slots=True)
class VectorMemory:
    """Where a worker's vectors are. A function allocates memory that other processes use; None means private memory.

    `keeps_sparse`: gradients of sparse layout stay sparse. `holds_gradient`: there is a vector of gradients; if False,
    gradients stay in `.grad`.
    """

    gradients: Memory | None = None
    parameters: Callable[[Layout], Memory | None] = lambda layout: None
    keeps_sparse: bool = False
    holds_gradient: bool = True

    def flatten(self, part: ModelPart) -> FlatModel:
        """Make the parameters of a model's part views of one vector in this memory.

        Raises LinkError if a connection fails while the memory is allocated.
        """
        return FlatModel(
            part.module,
            self.gradients,
            (part.layout, part.parameters),
            self.parameters(part.layout),
            keeps_sparse=self.keeps_sparse,
            holds_gradient=self.holds_gradient,
        )


class Worker:
    """One replica under a strategy, with the methods that every family needs.

    `memory` is the strategy's state between its rounds. `shared` is the part of this state that is equal on all
    workers.
    """

    synchronizes_batchnorm: ClassVar[bool] = False  # whether the family can synchronize BatchNorm layers

    def __init__(
        self,
        workload: Workload,
        plan: WorkerPlan,
        peers: WorkerConnections,
        device: str = "cpu",
        *,
        vectors: VectorMemory | None = None,
        steps: bool = True,
    ) -> None:
        """Build the model. If `steps`, the worker also has an optimizer.

        `vectors` says where the vectors of gradients and parameters are; None means in private memory.

        Raises:
            WorkloadError, DataError: the user's code failed.
        """
        self.workload, self.plan, self.device = workload, plan, device
        self.ring: Any = peers.ring  # a `Ring` or a `CompressedRing` in a family with a ring; else None
        self.memory: RoundMemory = {}
        self.shared: dict[str, Tensor] = {}
        self.done, self.reason = False, ""  # whether the strategy has met its stop rule, and why
        self.tables: ModelTables | None = None  # the model's sparse tables on servers; None if it has none
        self.log = RoundLog()
        self.scaling = StepScaling(workload.precision)
        self.batches = make_stream(workload, plan)
        self.part: ModelPart = self._make_model_part(peers)
        self.flat = (vectors or VectorMemory()).flatten(self.part)
        self.clip = NormClip(workload.clip_norm, peers.rings.values(), measures=True)
        self.clip.share = self.rank, self.size
        self.local: WorkerOptimizer | None = self._make_optimizer() if steps else None
        self.meter = Meter(list(peers.rings.values()))
        self.privacy: Privacy | None = make_privacy(self)  # makes the sums of a step's rows private; None without it
        self.members = make_members(self, peers)  # decides whose gradients count; None: those of all workers

    # ---- position

    @property
    def rank(self) -> int:
        """The number of the replica, 0 to size - 1."""
        return self.batches.rank

    @property
    def size(self) -> int:
        """The number of replicas."""
        return self.batches.size

    @property
    def position(self) -> int:
        """The number of steps whose batch this replica has taken since the start of the run."""
        return self.batches.position

    @position.setter
    def position(self, position: int) -> None:
        self.batches.position = position

    @property
    def rows(self) -> int:
        """The number of rows in this worker's share of the data."""
        return self.batches.data.share(self.rank, self.size)

    @property
    def all_rows(self) -> int:
        """The number of rows of the data, over all workers."""
        return self.batches.data.rows()

    # ---- model and optimizer

    @property
    def params(self) -> Tensor:
        """The parameters as one vector [size]. An assignment copies the new values into the model."""
        return self.flat.vector

    @params.setter
    def params(self, vector: Tensor) -> None:
        if vector.data_ptr() != self.flat.vector.data_ptr():
            self.flat.vector.copy_(vector)

    @property
    def layout(self) -> Layout:
        """The layout of the vector of parameters."""
        return self.flat.layout

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer of this worker, or None if only servers step."""
        return None if self.local is None else self.local.optimizer

    def batch(self) -> Batch:
        """Return the next batch of this worker's share of the data.

        Raises DataError or WorkloadError if the batch cannot be read.
        """
        began = time.perf_counter()
        batch = self.batches.take(self.plan.end)
        self.meter.data += time.perf_counter() - began
        self.log.add_events(self.batches.events())
        return batch.to(self.device) if self.device != "cpu" else batch

    def grad(self, batch: Batch) -> Gradient:
        """Return the gradient of the loss on `batch`, a vector [size]. For an empty batch it is zero, with 0 samples.

        If `loss` returns pairs (sum, weight), the samples of the gradient are its weight. A gradient in fp16 that has
        overflowed is zero, with 0 samples, and the next `step` does nothing.

        Raises:
            TrainingError: the loss or the gradient is not finite.
            WorkloadError: the user's loss failed or is neither a scalar nor a pair (sum, weight).
        """
        return self._settle(self._compute_gradient(batch)[0])

    def step(self, grad: Gradient | Tensor) -> None:
        """Apply a gradient with this worker's optimizer, clipped to the workload's `clip_norm`.

        Raises:
            WorkloadError: the optimizer's step failed.
            TypeError: only servers step under this strategy.
        """
        if self.local is None:
            raise TypeError(
                f"under {self.plan.strategy.name} servers step and workers have no optimizer: call w.server.push, not "
                "w.step"
            )
        if self.scaling.skips:
            return
        with self.meter.computing():
            self.local.step(grad.vector if isinstance(grad, Gradient) else grad)

    def clipped(self, vector: Tensor) -> Tensor:
        """Return the vector, or a scaled copy if its norm is above the workload's `clip_norm`.

        Raises LinkError if a connection within the replica fails.
        """
        return self.clip.clipped(vector)

    def committed_state(self) -> tuple[Tensor, optim.Moments]:
        """Return what a backup holds of parameters and moments: all of them, without a copy.

        The moments include the groups' `edits`: see `rayps.tensors.optim.edits`.
        """
        optimizer, flat = self.optimizer, self.flat
        assert optimizer is not None, "a worker whose state is committed has an optimizer"
        named = zip(flat.layout.entries, flat.parameters, strict=True)
        moments = {entry.name: optimizer.state.get(p, {}) for entry, p in named}
        return flat.vector, optim.with_edits(moments, optimizer, flat.layout, flat.parameters)

    def of_first_rank(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return rank 0's tensors, by name. Workers that are not in step have no common moment and return their own.

        This is a collective: all workers call it in the same round. Raises LinkError if a connection fails.
        """
        return tensors

    def own_loss(self) -> float:
        """Return the mean loss of this worker's model over all of the evaluation data."""
        result = evaluate_share(self, whole=True).get("loss", Total(math.nan, 1)).result
        return math.nan if result is None else result

    # ---- reports

    def say(self, **numbers: float) -> None:
        """Add numbers to this round's point. All workers must add equal ones. Standard metrics cannot be replaced."""
        self.log.add_numbers(numbers)

    def event(self, kind: str, message: str, **facts: Json) -> None:
        """Add an event to the job's journal. The event is sent at the end of this round."""
        self.log.add_event(kind, message, facts)

    # ---- for subclasses

    def _compute_gradient(self, batch: Batch, early: EarlyGradient | None = None) -> tuple[Gradient, list[bool]]:
        """Return the gradient as `grad` does, and for each parameter whether backward has computed a gradient.

        If the gradient has overflowed in fp16, `scaling.overflow` is true, and the gradient is that of no sample.
        `early` collects the gradient while backward continues, if it has a sample.

        Raises ConfigError under privacy, because the gradient has no noise.
        """
        if self.privacy is not None:
            raise explain_missing_noise("push_grad" if self.local is None else "mean_grad")
        with self.meter.computing():
            self.flat.drop_grad()
            gradient = Gradient(self.flat.packed, batch.size)
            self.scaling.overflow = False
            if batch.size:
                found = self._backward(batch, None if early is None else early.begin)
                gradient.samples, gradient.loss = found.weight, math.nan if found.mean is None else found.mean
                if early is not None and early.begun:
                    early.collect()
                else:
                    self._multiply_gradients(found.factor)
                if self.tables is not None and found.factor != 1:
                    self.tables.scale(found.factor)
            used = [p.grad is not None for p in self.flat.parameters]
            self.flat.collect_grad()
            if gradient.samples:
                fault = find_gradient_fault(self.flat)
                if fault is not None and self.scaling.may_skip:
                    self.scaling.overflow = True
                    gradient.packed.zero_()
                    gradient.samples, gradient.skipped = 0, True
                else:
                    self._must_be_finite(self.plan.rank, fault)
        return gradient, used

    def _backward(self, batch: Batch, ready: Ready | None = None) -> StepLoss:
        factor = self.scaling.factor
        found = self.part.backward(batch, self.position - 1, self._check, ready=ready, scale=factor)
        return self._record_loss(found, batch)

    def _record_loss(self, found: StepLoss, batch: Batch) -> StepLoss:
        """Record the loss of a step in the meter, and return it. Raises WorkloadError if a frozen layer has thawed."""
        self.flat.refuse_thawed()
        self.batches.weight = found.weight
        if found.mean is not None and self.part.reports:
            self.meter.add_loss(found.mean, found.weight, batch.size)
            add_totals(self.meter.totals, found.metrics)
        return found

    def _multiply_gradients(self, factor: float) -> None:
        if factor == 1:
            return
        with torch.no_grad():
            for p in self.flat.parameters:
                if p.grad is not None:
                    p.grad.mul_(factor)

    def _settle(self, gradient: Gradient) -> Gradient:
        """Return this worker's own gradient, after a decision about its step that concerns no other worker."""
        overflow = self.scaling.overflow
        if gradient.samples or overflow:
            self._decide(overflow, all_ranks=False)
        return gradient

    def _decide(self, overflow: bool, *, all_ranks: bool) -> None:
        """Skip the next step if `overflow`, and adapt the scale. If `all_ranks`, all ranks make this call together."""
        scaling = self.scaling
        if scaling.scale is None:
            return
        skips = scaling.decide(overflow, by_all=all_ranks or self.size == 1)
        if all_ranks and self.rank:
            return
        self.meter.totals |= {"skipped": Total(int(skips), 1, "sum"), "loss_scale": Total(scaling.factor, 1, "min")}
        if skips and scaling.skipped == 1:
            who = "all workers skip" if all_ranks else f"worker-{self.plan.rank} skips"
            message = (
                f"{who} the step of round {self.position - 1}: a gradient in fp16 is not finite. The loss scale is now "
                f"{scaling.factor:g}; such steps are counted in the metric `skipped`"
            )
            self.log.add_event("skipped", message, {"round": self.position - 1, "scale": scaling.factor})

    def _check(self, loss: Nested) -> float:
        at = self.position - 1
        return read_loss(loss, self.plan.rank, at, self.batches.epoch_of(at)[0])

    def _must_be_finite(self, rank: int, parameter: str | None) -> None:
        """Raise TrainingError if `parameter` is not None, or if a table row's gradient on this worker is not finite.

        `parameter` is the name of a parameter whose gradient on worker `rank` is not finite; None if there is none.
        """
        row = None if parameter is not None or self.tables is None else self.tables.gradient_fault()
        if parameter is not None or row is not None:
            at = self.position - 1
            raise explain_gradient(rank, parameter, row, at, self.batches.epoch_of(at)[0], self.meter.growth)

    def _make_optimizer(self) -> WorkerOptimizer:
        factory = self.part.factory(recipe_of(self.workload, self.plan.lr_factor))
        return LocalOptimizer(factory, self.flat, self.clip, Ticks(self.plan.origin, self.batches.steps_per_epoch))

    def _make_model(self) -> nn.Module:
        """Return a model whose parameters are loaded next. Raises WorkloadError if the user's code fails."""
        return model_of(self.workload)

    def _make_model_part(self, peers: WorkerConnections) -> ModelPart:
        plan, workload = self.plan, self.workload
        if plan.division is None:
            model = plan.strategy.split(self._make_model().to(self.device), peers.ring)
            blocks = checkpoint_activations(model, workload.checkpoint_activations, workload.compile, self.device)
            if blocks and not plan.rank:
                message = f"the activations of {len(blocks)} modules ({named_briefly(blocks)}) are computed again"
                self.log.choices.append({"kind": "choice", "message": message, "blocks": blocks})
            compile_model(model, workload.compile, self.device)
            return Whole(workload, model)
        column = plan.grid.column(plan.rank)
        return find_division().model_slice(
            workload, plan.division, column, peers.rings, seed=plan.seed, data=self.rank, device=self.device
        )


class EarlyGradient(Protocol):
    """Collects a gradient into the vector of a flat model while backward continues."""

    @property
    def begun(self) -> bool:
        """Whether a gradient is collected now."""

    def begin(self, weight: float, factor: float) -> None:
        """Begin, before the last backward of the step: see `rayps.workload.accumulate.Ready`."""

    def collect(self) -> None:
        """Collect the rest of the gradient, after backward."""


# ---- optimizer


class WorkerOptimizer(Protocol):
    """The optimizer with which a worker steps its parameters, or those that it owns."""

    optimizer: Optimizer  # the user's
    unused: Collection[int]  # indices of the parameters that have no gradient in the next step, which skips them
    mean: Tensor | None  # the gradient of the next step if it is in memory that other ranks also read

    def at(self, round: int) -> None:
        """Set the learning rates of round `round` by the schedule. Raises WorkloadError if the schedule fails."""

    def step(self, vector: Tensor) -> None:
        """Apply a gradient, clipped to the workload's `clip_norm`. Raises WorkloadError if the step fails."""

    def moments(self) -> optim.Moments:
        """Return a dict from a parameter's name to its optimizer state, as copies on the CPU."""

    def load(self, moments: optim.Moments) -> None:
        """Restore the state of whole parameters. The state of an optimizer of another kind is dropped."""

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the optimizer's state, in the same order on all workers."""

    def make_state(self) -> None:
        """Create the optimizer's state with all values zero. The parameters do not change."""

    def reset(self) -> None:
        """Drop the optimizer's state."""


class LocalOptimizer:
    """A worker's optimizer, which steps the parameters of a flat model.

    `unused` are the indices of the parameters that have no gradient in the next step, and that the optimizer skips.
    `mean` is a gradient in memory that other ranks also read. It is copied unless the optimizer only reads gradients.
    """

    def __init__(self, factory: optim.Factory, flat: FlatModel, clip: NormClip, ticks: Ticks) -> None:
        """Build the user's optimizer and schedule. Raises WorkloadError if optimizer() or schedule() fails."""
        self.optimizer: Optimizer = optim.made(factory, flat.parameters)
        self.unused: Collection[int] = ()
        self.mean: Tensor | None = None
        self._pace = pace_of(factory, flat.layout, self.optimizer, ticks)
        self._flat, self._clip = flat, clip
        self._only_reads: bool | None = None  # whether a step leaves the gradients unchanged; None if not known yet

    def at(self, round: int) -> None:
        """Set the learning rates of round `round` by the schedule. Raises WorkloadError if the schedule fails."""
        if self._pace is not None:
            self._pace.at(round)

    def step(self, vector: Tensor) -> None:
        """Apply a gradient [size], clipped to the workload's `clip_norm`. Raises WorkloadError if the step fails."""
        flat = self._flat
        vector = self._clip.with_sparse(flat.parameters, vector) if flat.sparse_grads else self._clip.clipped(vector)
        if vector is self.mean and self._only_reads is not False:
            flat.bind(vector if self._only_reads else vector.clone())
        else:
            flat.load_grad(vector)
        for i in self.unused:
            flat.parameters[i].grad = None
        if not flat.parameters:
            return  # this worker owns no parameters
        if self._only_reads is None:  # the first step tests this, on a copy of the gradient
            self._only_reads = step_and_compare(self.optimizer, flat.parameters)
            return
        with user_code("optimizer.step"):
            self.optimizer.step()

    def moments(self) -> optim.Moments:
        """Return a dict from a parameter's name to its optimizer state, as copies on the CPU."""
        return optim.copy_moments(self.optimizer, self._flat.layout, self._flat.parameters)

    def load(self, moments: optim.Moments) -> None:
        """Restore the state that `moments` returned. The state of an optimizer of another kind is dropped."""
        fitting = optim.select_fitting(moments, self.optimizer)
        optim.load(self.optimizer, fitting, self._flat.layout, self._flat.parameters)

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the optimizer's state, in the same order on all workers."""
        states = [self.optimizer.state.get(p, {}) for p in self._flat.parameters]
        return [state[key] for state in states for key in sorted(state) if isinstance(state[key], Tensor)]

    def make_state(self) -> None:
        """Create the optimizer's state with all values zero. The parameters do not change.

        Raises WorkloadError if the optimizer's step fails.
        """
        before = self._flat.vector.clone()
        self._flat.zero_grad()
        with user_code("optimizer.step"):
            self.optimizer.step()
        self._flat.vector.copy_(before)
        for each in self.tensors():
            each.zero_()

    def reset(self) -> None:
        """Drop the optimizer's state."""
        self.optimizer.state.clear()


def step_and_compare(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> bool:
    """Take a step, and return whether this step and all later steps leave the gradients unchanged.

    Return True only if this step left them unchanged and the optimizer is one of torch's, without hooks. An optimizer
    of another class may change them in a later step. Some of torch's optimizers change them too (SGD with nesterov and
    foreach). Raises WorkloadError if the step fails.
    """
    before = [None if p.grad is None else p.grad._version for p in params]
    with user_code("optimizer.step"):
        optimizer.step()
    after = [None if p.grad is None else p.grad._version for p in params]
    own = type(optimizer).__module__.startswith("torch.optim.") and "step" not in vars(optimizer)
    return own and before == after and not optimizer._optimizer_step_pre_hooks and not _GLOBAL_HOOKS


# ---- meter


class RingTraffic(Protocol):
    """The traffic of a ring, as totals since the ring was formed."""

    @property
    def seconds_waiting(self) -> float:
        """Seconds waited for other ranks."""

    @property
    def seconds_moving(self) -> float:
        """Seconds spent on transfer."""

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to other ranks."""


class Meter:
    """Measures seconds and bytes of the current round.

    The worker adds to `compute` (seconds), `data` (seconds to get the batch), the losses and `totals` (metrics).
    Each of `sources` returns the totals of one connection since it was formed. `lead()` returns by how many rounds the
    worker is ahead of the slowest worker, as servers report it, or None.
    """

    def __init__(self, axes: Sequence[RingTraffic] = ()) -> None:
        """Start at zero; `axes` are the rings within the worker's replica."""
        self.compute = self.data = 0.0
        self.totals: Totals = {}
        self._losses: list[tuple[float, float, int]] = []  # mean, weight, rows
        self.sources: list[Callable[[], Traffic]] = [traffic_of(ring) for ring in axes]
        self.lead: Callable[[], int | None] = lambda: None
        self._axes = axes
        self._ends: tuple[float, float] | None = None  # the first and the last loss; None before the first
        self._began = 0.0
        self._before: Traffic = (0.0, 0.0, 0)

    def begin(self) -> None:
        """Start a round."""
        self.compute, self.data, self._losses, self.totals = 0.0, 0.0, [], {}
        self._began, self._before = time.perf_counter(), self._traffic()

    def add_loss(self, mean: float, weight: float, rows: int) -> None:
        """Add the mean loss over a batch of `rows` rows, and its weight: `rows`, or what the loss returned."""
        self._losses.append((mean, weight, rows))
        if weight:
            self._ends = (self._ends or (mean, mean))[0], mean

    @property
    def growth(self) -> str | None:
        """How the loss has exploded since the first step, in words; None if it has not."""
        first, last = self._ends or (0.0, 0.0)
        if not abs(last) > _EXPLODED * max(abs(first), 1.0):
            return None
        return f"the loss has grown from {first:.3g} to {last:.3g}: lower the learning rate, or clip the gradient"

    def drop_losses(self) -> None:
        """Drop the losses and metrics of this round, because its gradient does not count."""
        self._losses, self.totals = [], {}

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count the time inside the block as `compute`, except the waits for other workers of the replica."""
        began, inside = time.perf_counter(), self._inside()
        yield
        self.compute += time.perf_counter() - began - (self._inside() - inside)

    def _inside(self) -> float:
        return float(sum(ring.seconds_waiting for ring in self._axes))

    def _traffic(self) -> Traffic:
        waiting, moving, moved = 0.0, 0.0, 0
        for source in self.sources:
            more = source()
            waiting, moving, moved = waiting + more[0], moving + more[1], moved + more[2]
        return waiting, moving, moved

    def point(self) -> Point:
        """Return the metrics of the round."""
        waiting, moving, moved = (now - then for now, then in zip(self._traffic(), self._before, strict=True))
        weight = sum(weight for _, weight, _ in self._losses)
        seconds = time.perf_counter() - self._began
        exposed = max(0.0, seconds - self.compute - self.data)  # the time of background threads is not counted
        wait = min(waiting, exposed)
        return {
            "loss": sum(loss * own for loss, own, _ in self._losses if own) / weight if weight else None,
            "weight": weight,
            "samples": sum(rows for _, _, rows in self._losses),
            **({"metrics": dict(self.totals)} if self.totals else {}),
            "seconds": seconds,
            "compute": self.compute,
            "data": self.data,
            "wait": wait,
            "move": min(moving, exposed - wait),
            "talk": waiting + moving,  # includes transfers that overlap with compute
            "bytes": moved,
            "lead": self.lead(),
        }


def traffic_of(ring: RingTraffic) -> Callable[[], Traffic]:
    """Return the source of a ring's traffic for a `Meter`."""
    return lambda: (ring.seconds_waiting, ring.seconds_moving, ring.bytes_sent)


class RoundLog:
    """A worker's reports except measurements: choices before the first round, numbers and events of each round."""

    def __init__(self) -> None:
        self.choices: list[Event] = []
        self._numbers: dict[str, float] = {}
        self._events: list[Event] = []

    def add_numbers(self, numbers: dict[str, float]) -> None:
        """Add named numbers to this round's point."""
        self._numbers |= {name: value if isinstance(value, int) else float(value) for name, value in numbers.items()}

    def add_event(self, kind: str, message: str, facts: JsonObject) -> None:
        """Add an event for the job's journal."""
        self._events.append({"kind": kind, "message": message, **facts})

    def add_events(self, events: list[Event]) -> None:
        """Add events for the job's journal."""
        self._events += events

    def take_events(self) -> list[Event]:
        """Return and remove the events since the last call."""
        taken, self._events = self._events, []
        return taken

    def take_numbers(self) -> Point:
        """Return and remove the numbers since the last call, as a part of a point. It is {} if there are none."""
        taken, self._numbers = self._numbers, {}
        return {"said": taken} if taken else {}


# ---- evaluation and errors


def evaluate_share(w: Worker, *, whole: bool = False) -> Totals:
    """Evaluate the model over this worker's share of the evaluation data, or over all of it if `whole`.

    `evaluation_batches` of the workload and of the plan bound the batches; `rayps.worker.rows.evaluation_batches` has
    the bounds of data without a length. Return a dict from a metric's name to its `Total` over the share. Raises
    WorkloadError or DataError if the user's code fails, and LinkError if a connection within the replica fails.
    """
    rank, size = (0, 1) if whole else (w.rank, w.size)
    totals = Totals()
    w.part.refresh()
    with evaluating(w.flat.model), torch.no_grad(), user_code("evaluate"):
        data = w.workload.evaluation_data()
        batches = data.batches(rank=rank, size=size, seed=w.plan.seed, epoch=0)
        for batch in bound_batches(batches, collect_evaluation_facts(w, data, whole=whole), w.plan.timeout):
            if batch.size:
                with user_code("evaluate"):  # each batch is a call of its own for the time limit
                    found = w.part.evaluate(batch.to(w.device))
                add_totals(totals, found)
    return totals


def collect_evaluation_facts(w: Worker, data: Data, *, whole: bool) -> EvaluationFacts:
    """Return the facts that bound an evaluation of a worker on `data`, of its share or, if `whole`, of all of it."""
    passes = w.batches.pass_
    limits = [most for most in (w.plan.evaluation.batches, w.workload.evaluation_batches) if most is not None]
    return EvaluationFacts(
        limit=min(limits, default=None),
        has_length=data.has_length,
        is_default=evaluates_training_data(w.workload),
        by_rounds=w.plan.last_epoch is None,
        ended=passes is not None and passes.ended,
        trained=w.position * w.batches.accumulate * (w.size if whole else 1),
    )


def read_loss(loss: object, rank: int, round: int, epoch: int) -> float:
    """Return the user's loss as a number.

    Raises:
        WorkloadError: `check_loss` refuses the loss.
        TrainingError: the loss is not finite.
    """
    value = float(check_loss(loss, trains=False).item())  # whether it has a gradient was checked before
    if not math.isfinite(value):
        raise TrainingError(
            f"the loss became {value} on worker-{rank} at round {round} (epoch {epoch + 1}):\n"
            "lower the learning rate, clip the gradient, or look for bad values in the data",
            rank=rank,
            round=round,
        )
    return value


def explain_missing_noise(way: str) -> ConfigError:
    """Return the error for a gradient that a strategy asks for under privacy. `way`: the method that adds noise."""
    return ConfigError(
        f"under privacy a strategy's round calls w.{way}(batch), which clips the gradient of each row and adds noise, "
        "and not w.grad, whose result has no noise: change the strategy's round, or leave out privacy",
        field="privacy",
    )


_EXPLODED = 1e3  # a loss so many times the first one explains a gradient that is not finite
_NO_DERIVATIVE = (
    "look for an operation without a finite derivative (sqrt or a norm at 0, 0 * inf, a division by 0), or for bad "
    "values in the data; torch.autograd.set_detect_anomaly(True) names the operation"
)


def explain_gradient(
    rank: int, parameter: str | None, row: tuple[str, int] | None, round: int, epoch: int, growth: str | None = None
) -> TrainingError:
    """Return the error for a gradient that is not finite: of `parameter`, or of `row` = (table, id).

    `rank` is the worker with this gradient; -1 if each worker's gradient is finite, but their sum is not. `growth` says
    how the loss has exploded, which then is the cause.
    """
    named: Keywords = {"parameter": parameter, "rank": rank}
    what, who = f"the gradient of parameter {parameter!r}", f"on worker-{rank}"
    if row is not None:
        what = f"the gradient of table {row[0]!r}, id {row[1]},"
        named = {"parameter": row[0], "id": row[1], "rank": rank}
    if rank < 0:
        who = "in the sum over the workers, whose gradients are finite,"
        del named["rank"]
    return TrainingError(
        f"{what} is not finite (NaN or infinite) {who} at round {round} (epoch {epoch + 1}), but the loss is finite:\n"
        + (growth or _NO_DERIVATIVE),
        round=round,
        **named,
    )
