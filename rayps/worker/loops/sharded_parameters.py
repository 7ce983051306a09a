"""Workers in step that hold a part of each parameter, its gradient and its optimizer state: `shard="parameters"`.

The step of `all_reduce`, g = sum(n_i g_i) / sum(n_i), by torch's FSDP2: see `rayps.worker.loops.sharded_model`. All
workers run each forward and backward pass together, because a pass gets the parameters of its layers from all workers.
A worker without rows takes part with rows that do not count. The gradient of each micro-batch is summed over the
workers in its backward pass, so that no worker holds a whole gradient.

All weights of a step must be known before its gradients are scaled. Each loss is therefore divided by the number of all
rows of the step, which the workers exchange first, and the sum is multiplied by rows / sum(n_i) at the end. These are
equal unless losses are pairs (sum, weight).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from rayps_client.errors import DataError, WorkloadError
from rayps_client.trainers.module_modes import evaluating
from torch import Tensor

from rayps.comm.ring import Ring
from rayps.core.job.records import Point
from rayps.core.job.user_code import user_code
from rayps.core.metrics import Totals, add_totals
from rayps.core.urls import Location
from rayps.data.base import Batch
from rayps.tensors import optim
from rayps.tensors.checkpoints.checkpoint import meta_of
from rayps.tensors.checkpoints.checkpoint_parts import read_contents, read_pieces, verify_share
from rayps.tensors.clip import NormClip
from rayps.tensors.flat import Layout
from rayps.tensors.learning_rate import Ticks
from rayps.tensors.optim import PER_PARAMETER, Group
from rayps.tensors.snapshot import Snapshot
from rayps.tensors.state_pieces import join_moments
from rayps.tensors.training_state import TrainingState
from rayps.worker.connections import WorkerConnections
from rayps.worker.core import Meter, RoundLog, Worker, collect_evaluation_facts, explain_gradient, traffic_of
from rayps.worker.exchange.step_flags import COUNT, StepFlags
from rayps.worker.exchange.step_scaling import StepScaling
from rayps.worker.loops.loop import Loop
from rayps.worker.loops.sharded_model import ShardedModel, units_of
from rayps.worker.part_writer import PartWriter
from rayps.worker.plan import WorkerPart, WorkerPlan
from rayps.worker.process_group import ProcessGroup
from rayps.worker.ring_worker import of_first_rank
from rayps.worker.rows.evaluation_batches import bound_batches
from rayps.worker.rows.make_stream import make_stream
from rayps.workload.base import Workload
from rayps.workload.loss_result import LossResult, is_pair, loss_result, whole
from rayps.workload.model_part import Whole
from rayps.workload.precision import autocast


class DividedWorker(Worker):
    """A worker that holds its shards of the model. It takes whole steps: see `take_step`."""

    part: Whole

    def __init__(self, workload: Workload, plan: WorkerPlan, peers: WorkerConnections, device: str = "cpu") -> None:
        """Form the process group, and build the divided model. See `Worker`, whose vectors this worker lacks."""
        assert peers.ring is not None, "the workers are on a ring"
        self.workload, self.plan, self.device = workload, plan, device
        self.ring: Ring = peers.ring
        self.memory, self.shared = {}, {}
        self.done, self.reason = False, ""
        self.tables, self.local, self.privacy, self.members = None, None, None, None
        self.log = RoundLog()
        self.scaling = StepScaling(None)
        self.batches = make_stream(workload, plan)
        self.flags = StepFlags()
        self.group = ProcessGroup(peers.ring, plan.peers.ring[0], timeout=plan.timeout)
        try:
            with self.group.failures():
                ticks = Ticks(plan.origin, self.batches.steps_per_epoch)
                self.model = ShardedModel(workload, plan.seed, self.group.mesh, ticks, plan.lr_factor)
        except BaseException:
            self.group.destroy()
            raise
        self.part = Whole(workload, self.model.module)
        if plan.rank == 0 and plan.size > 1:
            message = (
                f"each of {plan.size} workers holds parameters, gradients and the optimizer's state of about "
                f"{1 / plan.size:.0%} of the elements, by torch's FSDP2 in {len(units_of(self.model.module)) + 1} units"
            )
            self.log.choices.append({"kind": "choice", "message": message, "shard": "parameters"})
        self.clip = NormClip(workload.clip_norm, [self.ring], measures=True)
        self.meter = Meter()
        self.meter.sources.append(traffic_of(self.ring))
        self._counted: Batch | None = None  # the last micro-batch with rows

    @property
    def layout(self) -> Layout:
        """The layout of the vector that all trained parameters would form."""
        return self.model.layout

    def batch(self) -> Batch:
        """Return the next batch as `Worker.batch` does, and state in this step's flags whether there is another."""
        batch = super().batch()
        self.batches.state(self.flags)
        return batch

    def of_first_rank(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return rank 0's tensors: see `Worker.of_first_rank`."""
        return of_first_rank(self.ring, tensors)

    def take_step(self, batch: Batch) -> None:
        """Compute the mean gradient over the samples of all workers, clip it, and step. All workers call it together.

        Raises:
            TrainingError: a loss or the gradient is not finite.
            WorkloadError: the user's loss or optimizer failed.
            LinkError: a peer was lost, or does not answer.
        """
        began = time.perf_counter()
        parts = list(batch.parts or (batch,))
        rows, most = self._exchange(batch.size, len(parts))
        self.model.zero_grad()
        if rows:
            weight = self._backward_parts(parts, most, rows, batch)
            self.model.refuse_other_parameters()
            self._finish_step(weight, rows)
        self.meter.compute += time.perf_counter() - began

    def _exchange(self, rows: int, parts: int) -> tuple[int, int]:
        """Return the rows of this step on all workers, and the most micro-batches of a worker. Exchange the flags."""
        own = torch.tensor([rows, parts, *self.flags.marks()], dtype=torch.int64)
        every = self.ring.all_gather(own).view(self.size, 2 + COUNT)
        self.flags.receive(every[:, 2:].amax(0).to(torch.uint8))
        return int(every[:, 0].sum()), int(every[:, 1].max())

    def _backward_parts(self, parts: list[Batch], most: int, rows: int, batch: Batch) -> float:
        """Run forward and backward of each micro-batch. Return this worker's weight in the step."""
        total, weight, pairs = 0.0, 0.0, None
        totals: Totals = {}
        for number in range(most):
            part = parts[number] if number < len(parts) else None
            if part is None or not part.size:
                self._backward_nothing()
                continue
            self._counted = part
            with user_code("loss"), self.group.failures():
                found = self._compute_loss(part)
                add_totals(totals, found.metrics)
                pairs = is_pair(found, pairs)
                self.part.check_weight.see(found, part)
                own = found.weight_of(part.size)
                if own:
                    value = self._check(found.total)
                    total += value if pairs else value * own
                    weight += own
                share = rows if pairs else rows / own
                _backward(found.total * 0 if not own else found.total if share == 1 else found.total / share)
        if weight:
            self.meter.add_loss(total / weight, whole(weight), batch.size)
        add_totals(self.meter.totals, totals)
        self.batches.weight = whole(weight)
        return weight

    def _backward_nothing(self) -> None:
        """Take part in a micro-batch of the other workers, by rows whose loss counts nothing."""
        if self._counted is None:
            self._counted = self._find_any_batch()
        with user_code("loss"), self.group.failures():
            _backward(self._compute_loss(self._counted).total * 0)

    def _finish_step(self, weight: float, rows: int) -> None:
        model = self.model
        fault = model.fault()
        own = torch.tensor([weight, fault, self.part.check_weight.is_due], dtype=torch.float64)
        found = self.ring.all_gather(own).view(self.size, 3)
        weights, worst = float(found[:, 0].sum()), int(found[:, 1].max())
        if found[:, 2].any():
            self._check_weight()
        if worst >= 0:  # a shard is of the sum over all workers: each of them has the name of the parameter
            at = self.position - 1
            raise explain_gradient(
                -1, model.layout.names[worst], None, at, self.batches.epoch_of(at)[0], self.meter.growth
            )
        if not weights:
            return
        model.scale_gradients(rows / weights)
        if self.clip.most is None:
            self.clip.note(square=model.quick_square())
        else:
            model.scale_gradients(min(self.clip.factor(model.square()), 1.0))
        with user_code("optimizer.step"), self.group.failures():
            model.optimizer.step()

    def _check_weight(self) -> None:
        """Check, on all workers together, that the weight of the loss does not depend on the model: see `WeightCheck`.

        Each worker calls the loss for its last micro-batch, with the same number of other shards.
        """
        check, batch = self.part.check_weight, self._counted
        assert batch is not None, "each worker has computed in this step"
        check.is_checked = True
        with self.group.failures():
            check.of(batch, replaced=self.model.other_values, most=self._find_most)

    def _find_most(self, number: int) -> int:
        return int(self.ring.max(torch.tensor([number], dtype=torch.int64)))

    def _compute_loss(self, batch: Batch, *, trains: bool = True) -> LossResult:
        with autocast(self.workload, self.device):
            given = self.workload.loss(self.model.module, batch)
        self.model.refuse_read_outside(given)
        return loss_result(given, batch.size, trains=trains)

    def _find_any_batch(self) -> Batch:
        """Return a micro-batch with rows of any worker. Raises DataError if no worker has one."""
        with user_code("data"):
            for rank in range(self.size):
                for batch in self.batches.data.batches(rank=rank, size=self.size, seed=self.plan.seed, epoch=0):
                    if batch.size:
                        return batch.to(self.device)
        raise DataError("the data has no row on any worker, and each worker computes on rows under shard='parameters'")

    def evaluate(self) -> Totals:
        """Evaluate over this worker's share of the evaluation data. All workers call it together.

        A worker whose share has fewer batches than the others' takes part with its last one. Raises WorkloadError or
        DataError if the user's code fails, and LinkError if a peer is lost.
        """
        totals = Totals()
        with evaluating(self.model.module), torch.no_grad(), user_code("evaluate"):
            data = self.workload.evaluation_data()
            batches = data.batches(rank=self.rank, size=self.size, seed=self.plan.seed, epoch=0)
            facts = collect_evaluation_facts(self, data, whole=False)
            for batch, counts in self._yield_together(bound_batches(batches, facts, self.plan.timeout)):
                with user_code("evaluate"), self.group.failures():
                    found = self.part.evaluate(batch.to(self.device))
                if counts:
                    add_totals(totals, found)
        return totals

    def _yield_together(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, bool]]:
        """Yield this worker's batches with rows, and then others, which do not count, until no worker has any."""
        last: Batch | None = None
        while True:
            batch = next((each for each in batches if each.size), None)
            if not int(self.ring.max(torch.tensor([batch is not None], dtype=torch.uint8))):
                return
            last = batch or last or self._find_evaluation_batch()
            yield last, batch is not None

    def _find_evaluation_batch(self) -> Batch:
        with user_code("evaluation_data"):
            data = self.workload.evaluation_data()
            for rank in range(self.size):
                for batch in data.batches(rank=rank, size=self.size, seed=self.plan.seed, epoch=0):
                    if batch.size:
                        return batch
        raise DataError("the evaluation data has no row that this worker can read, and another worker has one")


class ShardedParameters(Loop):
    """The loop of workers that hold shards of the parameters, and write their parts of checkpoints."""

    view: ClassVar[type[Worker]] = DividedWorker
    retains_unasked: ClassVar[bool] = False
    w: DividedWorker

    def __init__(self, workload: Workload, plan: WorkerPlan, peers: WorkerConnections, device: str = "cpu") -> None:
        """Build the worker. See `Loop`."""
        super().__init__(workload, plan, peers, device)
        self._ended = False  # whether the last round has ended without an error
        self._writer = PartWriter.of(plan)

    # ---- rounds

    def run_round(self) -> None:
        """Take one step at the learning rates of the schedule."""
        w = self.w
        w.model.at(w.position)
        w.take_step(w.batch())

    def begin(self, stopped: object) -> None:
        """Do nothing: the model is in training mode."""

    def point(self) -> Point:
        """Return the metrics of the last round, without traffic: torch's process group does not count it."""
        return {key: value for key, value in super().point().items() if key not in ("bytes", "talk")}

    def agree(self) -> bool:
        """Return True: the flags were exchanged in the step."""
        return True

    def _read_flags(self) -> StepFlags:
        return self.w.flags

    def _read_groups(self) -> Sequence[Group]:
        return self.w.model.optimizer.param_groups

    def finish(self) -> None:
        """End the plan. The process group remains for the evaluation after it, and ends with the worker's ring."""
        self._ended = True

    def close(self) -> None:
        """Release the loop's resources, and after an error or a stop also the process group."""
        super().close()
        if self._ended:
            self.w.group.is_idle = True
        else:
            self.w.group.destroy()

    def abandon(self) -> None:
        """Stop the write of a part, because the generation has ended."""
        if self._writer is not None:
            self._writer.close()

    # ---- what is evaluated

    def consensus(self) -> Tensor | None:
        """Return None: the workers' shards are the parameters."""
        return None

    def evaluated_state(self) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return None and rank 0's buffers: the worker's own shards are evaluated, and weights are not averaged."""
        return None, self.w.of_first_rank(self._read_module_buffers())

    def average_weights(self) -> None:
        """Do nothing, because an average of the weights is refused."""

    def evaluate(self, vector: Tensor | None = None) -> Totals:
        """Evaluate the model over this worker's share: see `DividedWorker.evaluate`.

        `vector` are all parameters, of which the worker takes its shards; None means that they do not change.
        """
        if vector is not None:
            self.w.model.load_whole(vector, {})
        return self.w.evaluate()

    # ---- state

    def state_dict(self, *, together: bool) -> WorkerPart:
        """Return this worker's part of a checkpoint, which is being written, without parameters and moments.

        The state is copied before the call returns. Frozen parameters are written in pieces too.
        """
        w = self.w
        part = self._make_part(None, {})
        if self._writer is not None:
            part.pending = self._writer.start(part.round, w.model.pieces(), {})
        return part

    def buffers(self) -> dict[str, Tensor]:
        """Return a dict from the names of the model's buffers to copies."""
        return {name: value.detach().clone() for name, value in self.w.model.module.named_buffers()}

    def frozen_values(self) -> dict[str, Tensor]:
        """Return {}: no worker holds whole parameters."""
        return {}

    def load_buffers(self, buffers: dict[str, Tensor]) -> None:
        """Copy named buffers into the model, and of named parameters this worker's shards. Ignore unknown names."""
        model = self.w.model
        frozen = model.ranges(frozen=True)
        with torch.no_grad():
            for name, value in model.module.named_buffers():
                if name in buffers:
                    value.copy_(buffers[name])
            model.fill({name: buffers[name].reshape(-1)[lo:hi] for name, (lo, hi) in frozen.items() if name in buffers})

    def _read_frozen(self) -> dict[str, Tensor]:
        return {}

    def _load(self, state: Snapshot | TrainingState) -> None:
        """Set this worker's shards and their moments: from a whole state, from a checkpoint, or drawn."""
        model = self.w.model
        source = state.source if isinstance(state, Snapshot) else None
        model.draw()
        self.load_buffers(state.buffers)
        if source is None:
            model.load_whole(state.params, state.moments)
        elif source.path is not None:
            self._read(source.path)

    def _read(self, path: Location) -> None:
        """Read this worker's shards and their moments from a checkpoint. Each worker verifies its share of the files.

        Raises CheckpointError if the checkpoint is missing or damaged.
        """
        w, model = self.w, self.w.model
        verify_share(path, w.rank, w.size)
        shapes, ranges = read_contents(path), model.ranges()
        sizes = {entry.name: list(entry.shape) for entry in model.layout.entries}
        reads: dict[str, tuple[int, int] | None] = {f"model/{name}": span for name, span in ranges.items()}
        for key, facts in shapes.items():
            kind, _, rest = key.partition("/")
            name, _, what = rest.rpartition("/")
            if kind == "optim" and name in ranges:
                reads[key] = ranges[name] if facts["shape"] == sizes[name] and what not in PER_PARAMETER else None
            if kind == "frozen" and rest in (frozen := model.ranges(frozen=True)):
                reads[key] = frozen[rest]
        found = read_pieces(path, reads)
        model.fill({key.partition("/")[2]: found[key] for key in reads if not key.startswith("optim/")})
        moments: optim.Moments = join_moments(found, meta_of(path)["optimizer_numbers"])
        model.load_moments(moments)


def _backward(loss: Tensor) -> None:
    if not loss.requires_grad:
        raise WorkloadError(
            "loss(model, batch) returned a loss of weight 0 without a gradient, and under shard='parameters' each "
            "worker takes part in each backward pass: compute it from the model's output, such as a sum over no token"
        )
    loss.backward()  # type: ignore[no-untyped-call]
