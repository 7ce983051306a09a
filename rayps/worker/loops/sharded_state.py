"""Workers in step that hold the whole model, and only a slice of the optimizer's state, or also of the gradient.

Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models", SC 2020, stages 1 and 2. The
elements of each bucket have owners, about 1/N of the bucket for each of N workers. In a step, a worker gets the mean
gradient of the elements that it owns, applies its optimizer to them, and sends their new values to the other workers.

The state of a worker between two rounds is that of its own elements: their values and moments. No process holds the
whole state of the optimizer. A checkpoint is written in parts, by the worker that holds the part, and the driver never
has a tensor. The parameters of a worker are equal on all workers after `gather`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rayps.comm.ring import Ring
from rayps.comm.ring.owned_slices import OwnedSlices
from rayps.core.job.records import Event
from rayps.core.strategy.strategy_families import rebuilds
from rayps.core.strategy.topology import AUTO_BUCKET_MB, shard_of
from rayps.core.urls import Location
from rayps.data.base import Batch
from rayps.tensors import optim
from rayps.tensors.checkpoints.checkpoint import meta_of
from rayps.tensors.checkpoints.checkpoint_parts import read_contents, read_pieces, verify_share
from rayps.tensors.clip import NormClip
from rayps.tensors.finite import find_not_finite, is_finite
from rayps.tensors.flat import FlatModel, Gradient, Layout, square_of, square_quickly
from rayps.tensors.learning_rate import Ticks, pace_of, recipe_of
from rayps.tensors.snapshot import Snapshot
from rayps.tensors.state_pieces import entries_of, fill, join_moments, list_wanted, pieces_of
from rayps.tensors.training_state import TrainingState
from rayps.worker.connections import WorkerConnections
from rayps.worker.core import Memory, VectorMemory, Worker
from rayps.worker.exchange.buckets import Buckets, cut, find_spans
from rayps.worker.exchange.scattered_gradients import ScatteredGradients
from rayps.worker.exchange.step_flags import OVERFLOW
from rayps.worker.loops.sync_gradients import SyncGradients, SyncWorker
from rayps.worker.part_writer import PartWriter
from rayps.worker.plan import WorkerPart, WorkerPlan
from rayps.worker.ring_worker import find_gradient_memory
from rayps.workload.accumulate import micro_batches
from rayps.workload.base import Workload
from rayps.workload.model import seeded_model
from rayps.workload.model_part import Whole

_BLOCK = 1 << 20  # elements whose squares are summed at a time


class SlicedSteps:
    """The user's optimizer over the elements that a worker owns: see `rayps.worker.core.WorkerOptimizer`."""

    def __init__(self, factory: optim.Factory, flat: FlatModel, ranges: list[tuple[int, int]], ticks: Ticks) -> None:
        """Build the user's optimizer and schedule. Raises WorkloadError if optimizer() or schedule() fails."""
        self.ranges = ranges
        self.unused: Collection[int] = ()
        self.mean: Tensor | None = None
        self._flat = flat
        self._sliced = optim.SlicedOptimizer(factory, flat.layout, flat.vector, 0, flat.layout.size, ranges)
        self.optimizer: Optimizer = self._sliced.optimizer
        self._pace = pace_of(factory, flat.layout, self.optimizer, ticks)

    def at(self, round: int) -> None:
        """Set the learning rates of round `round` by the schedule. Raises WorkloadError if the schedule fails."""
        if self._pace is not None:
            self._pace.at(round)

    def step(self, vector: Tensor) -> None:
        """Apply a gradient, which may be of all elements or of the owned ones, joined. It is not clipped.

        Raises WorkloadError if the optimizer's step fails.
        """
        names = self._flat.layout.names
        self._sliced.step_used(vector, [names[i] for i in self.unused])

    def owned(self, vector: Tensor) -> list[Tensor]:
        """Return the owned elements of a vector of all elements, or of the owned ones, without a copy."""
        if vector.numel() != self._flat.layout.size:
            return [vector]
        return [vector[lo:hi] for lo, hi in self.ranges]

    def moments(self) -> optim.Moments:
        """Return a dict from a parameter's name to the optimizer state of its owned piece, as copies on the CPU."""
        found = self._sliced.moments()
        return {
            name: {key: value.cpu() if isinstance(value, Tensor) else value for key, value in state.items()}
            for name, state in found.items()
        }

    def load(self, moments: optim.Moments) -> None:
        """Restore the state of whole parameters. The state of an optimizer of another kind is dropped."""
        self._sliced.load(self._place(moments), self._flat.layout)

    def restore(self, moments: optim.Moments) -> None:
        """Restore the state of the owned pieces, which `moments` returned. Another optimizer's state is dropped."""
        self._sliced.restore(self._place(moments))

    def _place(self, moments: optim.Moments) -> optim.Moments:
        device = self._flat.vector.device
        return {
            name: {k: v.to(device) if isinstance(v, Tensor) and k != "step" else v for k, v in state.items()}
            for name, state in optim.select_fitting(moments, self.optimizer).items()
        }

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the optimizer's state."""
        return [value for state in self.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]

    def make_state(self) -> None:
        """Do nothing: no strategy that averages the optimizer's state divides it."""

    def reset(self) -> None:
        """Drop the optimizer's state."""
        self.optimizer.state.clear()


@dataclass(frozen=True, slots=True)
class VectorCuts:
    """How the vector is cut into buckets, and each bucket among the workers."""

    bucket_mb: float  # 10^6 bytes of a bucket; 0 means one bucket
    members: list[list[int]]  # the indices of each bucket's parameters
    slices: OwnedSlices

    @classmethod
    def of(cls, ring: Ring, layout: Layout, bucket_mb: float) -> VectorCuts:
        """Cut the vector of a layout. All workers of the ring must make the same call."""
        members = cut(layout, 1e6 * bucket_mb or math.inf)
        return cls(bucket_mb, members, OwnedSlices(ring, find_spans(layout, members)))


class ShardedWorker(SyncWorker):
    """A worker that holds the optimizer's state of the elements that it owns, and steps them.

    Under `shard` "gradients", it holds the gradients of these elements only, and of the bucket that backward computes.
    """

    def __init__(self, workload: Workload, plan: WorkerPlan, peers: WorkerConnections, device: str = "cpu") -> None:
        """Build the worker, and agree with the others on the elements that each one owns. See `Worker`."""
        ring = peers.ring
        assert ring is not None, "gradients are averaged over a ring"
        self.cuts: VectorCuts | None = None  # set when the model's layout is known
        scatters = shard_of(plan.strategy) == "gradients"
        vectors = VectorMemory(
            find_gradient_memory(ring, device), partial(self._parameters, ring), holds_gradient=not scatters
        )
        super().__init__(workload, plan, peers, device, vectors=vectors)
        self.clip = NormClip(workload.clip_norm, [ring], measures=True)
        self._scattered: ScatteredGradients | None = None
        if self._scatters:
            self._scattered = ScatteredGradients(
                self.flat, ring, self.slices, self._cuts.members, self.flags, several=self.batches.accumulate > 1
            )
        if plan.rank == 0 and plan.size > 1:
            self.log.choices.append(self._describe_choice())

    @property
    def _scatters(self) -> bool:
        """Whether this worker holds only its slice of the gradients."""
        return shard_of(self.plan.strategy) == "gradients"

    @property
    def _cuts(self) -> VectorCuts:
        assert self.cuts is not None, "the model is laid out"
        return self.cuts

    @property
    def slices(self) -> OwnedSlices:
        """Which elements of the vector each worker owns."""
        return self._cuts.slices

    @property
    def sliced(self) -> SlicedSteps:
        """The optimizer of the elements that this worker owns."""
        assert isinstance(self.local, SlicedSteps), "the worker has built it"
        return self.local

    def _average_gradients(self, batch: Batch) -> Tensor:
        """Return the mean gradient over the samples of all workers, where this worker owns the elements.

        The result has all elements, of which those that other workers own are undefined, or the owned elements only,
        ascending and joined. The next `step` skips the parameters that no rank used. Raises the errors of `grad`, and
        LinkError if a connection fails.
        """
        scattered = self._scattered
        if scattered is None or self.privacy is not None:
            return super()._average_gradients(batch)
        began, talked = time.perf_counter(), scattered.seconds
        scattered.begin_step()
        own = len(micro_batches(batch)) if batch.size else 0
        most = self._find_most_micro_batches(own)
        if own:
            assert isinstance(self.part, Whole), "a sharded worker holds the whole model"
            self._record_parameters()
            found = self.part.backward_each(batch, self._check, scattered, scale=self.scaling.factor)
            self._state_changes()
            self._record_loss(found, batch)
        for _ in range(most - own):  # the other ranks have more micro-batches
            scattered.begin(0)
            scattered.end()
        may_skip = self.scaling.may_skip
        if not may_skip:
            self._must_be_finite(self.rank, scattered.fault)
        elif scattered.fault is not None:
            self.flags.state(OVERFLOW)
        mean, unused = scattered.finish()
        mean = mean.to(self.flat.vector.device)
        self._skip(unused)
        if not may_skip and not is_finite(mean):
            self._must_be_finite(-1, self._find_owned_name(find_not_finite(mean)))
        if self.scaling.scale is not None:
            self._decide(may_skip and self.flags.stated(OVERFLOW), all_ranks=True)
        self.meter.compute += time.perf_counter() - began - (scattered.seconds - talked)
        return mean

    def step(self, grad: Gradient | Tensor) -> None:
        """Apply a mean gradient to the elements that this worker owns, and get the other elements from their owners.

        All workers must call this together. The gradient is clipped by the norm over all workers' elements, whose
        squares are summed in another order than under all_reduce. Raises WorkloadError if the optimizer's step fails,
        and LinkError if a connection fails.
        """
        self._must_be_alike()
        if self.scaling.skips:
            return
        vector = grad.vector if isinstance(grad, Gradient) else grad
        factor = self._clip_factor(vector)
        with self.meter.computing():
            if factor < 1:
                vector = torch.cat(self.sliced.owned(vector)).mul_(factor)
            self.sliced.step(vector)
        self.slices.gather(self.flat.vector)

    def committed_state(self) -> tuple[Tensor, optim.Moments]:
        """Return what a backup holds: the elements that this worker owns, joined, and their moments."""
        return torch.cat(self.sliced.owned(self.flat.vector)), self.sliced.moments()

    def _describe_choice(self) -> Event:
        """Return an event that says what each worker holds, and how gradients are sent."""
        count = len(self._cuts.members)
        held = "the optimizer's state" + (" and the gradients" if self._scatters else "")
        copy = "; another worker holds a copy" if rebuilds(self.plan.strategy, from_servers=False) else ""
        message = (
            f"each of {self.plan.size} workers holds {held} of about {1 / self.plan.size:.0%} of the elements, in "
            f"{count} bucket{'s'[: count != 1]}{copy}"
        )
        return {"kind": "choice", "message": message, "shard": shard_of(self.plan.strategy)}

    # ---- for the base class

    def _make_model(self) -> nn.Module:
        """Return the model drawn from the job's seed, because no other process has the first parameters."""
        return seeded_model(self.workload, self.plan.seed)

    def _parameters(self, ring: Ring, layout: Layout) -> Memory | None:
        size = self._bucket_mb
        if self.plan.strategy.topology.compression is not None:
            size = 0.0  # a compressed mean is one vector
        elif self.device != "cpu" and not self._scatters and len(ring.choices.get("hosts", ())) < 2:
            size = 0.0  # the host waits for a device once in a step
        self.cuts = VectorCuts.of(ring, layout, AUTO_BUCKET_MB if size is None else size)
        return self.cuts.slices.allocate if self.device == "cpu" else None

    def _make_optimizer(self) -> SlicedSteps:
        factory = self.part.factory(recipe_of(self.workload, self.plan.lr_factor))
        ticks = Ticks(self.plan.origin, self.batches.steps_per_epoch)
        return SlicedSteps(factory, self.flat, self.slices.ranges(), ticks)

    def _make_buckets(self, ring: Ring) -> Buckets | None:
        if self._scatters:
            return None
        return Buckets(self.flat, ring, self._cuts.bucket_mb, self.flags, slices=self.slices)

    # ---- parts

    def _find_most_micro_batches(self, own: int) -> int:
        """Return the most micro-batches of a worker in this step. Raises LinkError if a connection fails."""
        if self.batches.accumulate == 1:
            return 1
        return int(self.means.exact_ring.max(torch.tensor([own], dtype=torch.int64)))

    def _clip_factor(self, vector: Tensor) -> float:
        if self.clip.most is None:
            self.clip.note(square=sum(map(square_quickly, self.sliced.owned(vector))))
            return 1.0
        square = torch.zeros((), dtype=torch.float64)
        for owned in self.sliced.owned(vector):
            for block in torch.split(owned, _BLOCK):
                square += square_of(block)
        return self.clip.factor(square)

    def _find_owned_name(self, at: int) -> str:
        """Return the name of the parameter of the element `at` of the owned elements, joined."""
        for piece in entries_of(self.flat.layout, self.slices.ranges()):
            if at < piece.hi - piece.lo:
                return piece.name
            at -= piece.hi - piece.lo
        raise AssertionError("the element is owned")


class ShardedState(SyncGradients):
    """The loop of workers that hold slices of the optimizer's state, and write their parts of checkpoints."""

    view: ClassVar[type[Worker]] = ShardedWorker
    retains_unasked: ClassVar[bool] = False
    w: ShardedWorker

    def __init__(self, workload: Workload, plan: WorkerPlan, peers: WorkerConnections, device: str = "cpu") -> None:
        """Build the worker. See `Loop`."""
        super().__init__(workload, plan, peers, device)
        self._writer = PartWriter.of(plan)

    def state_dict(self, *, together: bool) -> WorkerPart:
        """Return this worker's part of a checkpoint, which is being written, without parameters and moments.

        The state is copied before the call returns.
        """
        w = self.w
        part = self._make_part(None, {})
        if self._writer is not None:
            pieces = pieces_of(w.flat.layout, w.sliced.ranges, w.flat.vector, w.sliced.moments(), empty=w.rank == 0)
            frozen = {
                name: p.detach().cpu()
                for name, p in self._read_frozen().items()
                if w.rank == 0 and self._loaded.get(name) == p._version  # a changed one is among the buffers
            }
            part.pending = self._writer.start(part.round, pieces, frozen)
        return part

    def abandon(self) -> None:
        """Stop the write of a part, because the generation has ended."""
        if self._writer is not None:
            self._writer.close()

    def _load(self, state: Snapshot | TrainingState) -> None:
        """Set the elements that this worker owns and their moments, and get the other elements from their owners.

        The state is whole, or that of the owned elements, or it is in a checkpoint, or drawn already.
        """
        w, local = self.w, self.w.sliced
        source = state.source if isinstance(state, Snapshot) else None
        self.load_buffers(state.buffers)
        if source is None and state.params.numel() == w.flat.layout.size:
            w.params = state.params
            local.load(state.moments)
        elif source is None:
            at = 0
            for lo, hi in local.ranges:
                w.flat.vector[lo:hi] = state.params[at : at + hi - lo]
                at += hi - lo
            local.restore(state.moments)
        elif source.path is not None:
            self._read(source.path)
        w.slices.gather(w.flat.vector)

    def _read(self, path: Location) -> None:
        """Read the owned elements, their moments and the frozen parameters from a checkpoint.

        Each worker verifies its share of the files. Raises CheckpointError if the checkpoint is missing or damaged.
        """
        w, local, layout = self.w, self.w.sliced, self.w.flat.layout
        verify_share(path, w.rank, w.size)
        shapes = read_contents(path)
        reads = list_wanted(layout, local.ranges, shapes)
        frozen = {f"frozen/{name}": None for name in self._read_frozen() if f"frozen/{name}" in shapes}
        found = read_pieces(path, reads | frozen)
        self.load_buffers({key.removeprefix("frozen/"): found.pop(key) for key in frozen})
        fill(layout, found, w.flat.vector, local.ranges)
        local.restore(join_moments(found, meta_of(path)["optimizer_numbers"]))
