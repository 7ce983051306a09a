"""One worker's part of a divided model: the layers of a stage, a slice of each layer, or both."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from rayps_client.errors import WorkloadError
from rayps_client.values import JsonObject
from torch import Tensor, nn

from rayps.comm.ring import Ring
from rayps.core.metrics import Totals, add_totals
from rayps.core.pipeline.schedule import make_table
from rayps.core.strategy.replica import Pipeline
from rayps.data.base import Batch, Nested, map_tensors
from rayps.data.batch_parts import cut_batch
from rayps.parallel.division.borrowed_parameters import BorrowedParameters
from rayps.parallel.division.build import keep_only
from rayps.parallel.pipeline import loss_proxy
from rayps.parallel.pipeline.cut import layers
from rayps.parallel.pipeline.engine import PipelineEngine
from rayps.parallel.pipeline.step_weight import StepWeight
from rayps.parallel.tensor import agree, split
from rayps.tensors.division import Division
from rayps.tensors.optim import Factory
from rayps.tensors.subset_optimizer import of_some
from rayps.workload.accumulate import Check, Ready, StepLoss
from rayps.workload.base import Workload
from rayps.workload.blank_model import blank
from rayps.workload.model_part import WeightCheck, Whole, evaluation_totals
from rayps.workload.precision import autocast

_TIMELINE_CALL = 3  # number of the call of `facts` that also reports a step's timeline: the first two steps are slower


class ModelSlice(Whole):
    """One column's part of the model, which runs forward and backward together with the other columns' parts."""

    def __init__(
        self,
        workload: Workload,
        division: Division,
        column: int,
        rings: Mapping[str, Ring],
        *,
        seed: int = 0,
        data: int = 0,
        device: str = "cpu",
    ) -> None:
        """Build the part of `column`, with memory for its own parameters and buffers only.

        `rings` are this worker's rings along the axes "stage" and "tensor". `data` is the number of its replica.

        Raises:
            WorkloadError: model() builds a different model on this worker than on the driver.
        """
        stage, rank = division.place(column)
        mine = division.columns[column]
        model = blank(workload)
        if division.tensor > 1:
            model = split(model, division.plan, rank, division.tensor, rings["tensor"])
        pieces = {
            piece.name: piece
            for piece in (*mine.owned, *(borrowed.piece for borrowed in mine.borrowed), *mine.untrained)
        }
        keep_only(model, {id(value) for name, value in _tensors(model).items() if name in pieces}, device)
        found = {name: value for name, value in _tensors(model).items() if name in pieces}
        for name, piece in pieces.items():
            if name not in found or tuple(found[name].shape) != piece.local:
                here = tuple(found[name].shape) if name in found else "missing"
                raise WorkloadError(
                    f"parameter or buffer {name!r} should have shape {piece.local} on this worker and is {here}: "
                    "model() must build the same model each time"
                )
        parameters = dict(model.named_parameters())
        self.workload, self.module, self._device = workload, model, device
        self.check_weight = WeightCheck(workload, model, is_checked=True)  # before the start
        self.reports = stage == division.stages - 1 and rank == 0
        self._whole = division.layout
        self.layout, self.parameters = mine.layout, [parameters[piece.name] for piece in mine.owned]
        self._untrained = {piece.name for piece in mine.untrained}
        self._trained = frozenset(mine.layout.names)
        self._borrowed = [parameters[borrowed.piece.name] for borrowed in mine.borrowed]
        self._exchange = BorrowedParameters(division, column, parameters, rings)
        self._unchecked_ring = rings.get("tensor")
        self._engine: PipelineEngine | None = None
        self._step_weight: StepWeight | None = None
        self._facts_calls = 0  # number of calls of facts()
        replica = division.replica
        if isinstance(replica, Pipeline) and replica.stages > 1:
            self._micro = replica.micro_batches
            self._step_weight = StepWeight(rings["stage"])
            rows = make_table(replica.schedule, replica.stages, replica.micro_batches, replica.chunks)
            self._engine = PipelineEngine(
                layers(model),
                division.boundaries,
                rows[stage],
                rings["stage"],
                routes=division.routes,
                seed=seed,
                data=data,
                device=device,
                computing=lambda: autocast(workload, device),
            )

    @property
    def beside(self) -> dict[str, Tensor]:
        """The part's buffers, and parameters that need no gradient, by name."""
        return {name: value for name, value in super().beside.items() if name in self._untrained}

    def refresh(self) -> None:
        """Receive the current values of borrowed parameters.

        Raises LinkError if another worker of the replica is lost or does not answer.
        """
        self._exchange.refresh()

    def backward(
        self, batch: Batch, step: int, check: Check, *, ready: Ready | None = None, scale: float = 1.0
    ) -> StepLoss:
        """Compute the gradients of the owned parameters from a batch; return the loss, which is None on other workers.

        The loss is returned on the worker that computes it. All workers of the replica must call this method together.
        """
        for p in self._borrowed:
            p.grad = None
        self._exchange.refresh()
        loss = (
            super().backward(batch, step, check, ready=ready, scale=scale)
            if self._engine is None
            else self._pipeline_backward(batch, step, check)
        )
        if self._unchecked_ring is not None:
            agree(self._exchange.whole, self._unchecked_ring)
            self._unchecked_ring = None  # check once
        self._exchange.return_gradients()
        return loss

    def _pipeline_backward(self, batch: Batch, step: int, check: Check) -> StepLoss:
        engine, step_weight = self._engine, self._step_weight
        assert engine is not None and step_weight is not None
        parts, metrics = cut_batch(batch, self._micro), Totals()
        fractions = loss_proxy.weights(parts)
        step_weight.begin()

        def loss(micro: int, output: Nested) -> Tensor:
            with autocast(self.workload, self._device):
                found = loss_proxy.loss(self.workload, parts[micro], output)
            add_totals(metrics, found.metrics)
            if not found.weight_of(parts[micro].size):  # the value of such a sum does not count, even if it is NaN
                found.total = _zero(output)
            check(found.total)
            return step_weight.add(found, fractions[micro])

        mean = engine.backward(step, fractions, lambda i: loss_proxy.inputs(self.workload, parts[i]), loss)
        found = step_weight.finish(mean, batch.size)
        found.metrics = metrics
        return found

    def evaluate(self, batch: Batch) -> Totals:
        """Return the totals of a batch's metrics, or {} if this is not the worker of the replica that `reports`."""
        if self._engine is None:
            totals = super().evaluate(batch)
            return totals if self.reports else {}
        parts, totals = cut_batch(batch, self._micro), Totals()
        weights = loss_proxy.weights(parts)

        def done(micro: int, output: Nested) -> None:
            part = parts[micro]
            with autocast(self.workload, self._device):
                loss = loss_proxy.loss(self.workload, part, output, training=False)
                given = loss_proxy.metrics(self.workload, part, output)
            add_totals(totals, evaluation_totals(loss, given, part.size))

        self._engine.evaluate(weights, lambda i: loss_proxy.inputs(self.workload, parts[i]), done)
        return totals if self.reports else {}

    def factory(self, factory: Factory) -> Factory:
        """Return an optimizer factory for this part's parameters, in the order of `layout`.

        `factory` is the workload's, which expects all parameters of the model.
        """
        return of_some(factory, self._whole, [entry.name for entry in self.layout.entries])

    def facts(self) -> JsonObject:
        """Return measurements of the pipeline's last step, for metrics, or {} if there is no pipeline."""
        engine = self._engine
        if engine is None:
            return {}
        found: JsonObject = {
            "activations": engine.last.peak,
            "idle": engine.last.idle,
            "busy": engine.last.busy,
            "messages": engine.last.messages,
            "stage_bytes": engine.last.bytes,
        }
        self._facts_calls += 1
        if self._facts_calls == _TIMELINE_CALL:
            found["spans"] = [(str(span.action), span.start, span.end) for span in engine.last.spans]
        return found

    def close(self) -> None:
        """Drop the activations and messages of an unfinished step."""
        if self._engine is not None:
            self._engine.close()


def _zero(output: Nested) -> Tensor:
    """Return 0 as a function of the model's output, whose gradient is 0."""
    found: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        found.append(t)
        return t

    map_tensors(output, keep)
    return torch.stack([t.float().nan_to_num().sum() * 0 for t in found if t.requires_grad]).sum()


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's parameters and buffers by name."""
    return dict(model.named_parameters()) | dict(model.named_buffers())
