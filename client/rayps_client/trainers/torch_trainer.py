"""Train a torch model of a light client, with the bits of rayps's own trainer."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rayps_client.errors import ConfigError, WorkloadError
from rayps_client.exchange.raw_tensors import RawTensor
from rayps_client.rows import Batch, Rows
from rayps_client.trainers.client_turn import StepLoss
from rayps_client.trainers.light_trainer import LightTrainer, checked_rows, own_totals
from rayps_client.trainers.local_trainer import LayoutRow, RawTensors
from rayps_client.trainers.module_modes import evaluating, prepare_to_train
from rayps_client.trainers.moved_weight import refuse_moved_weight
from rayps_client.trainers.own_metrics import OwnTotals
from rayps_client.trainers.partial_gradient import gradients_of
from rayps_client.trainers.torch_schedule import RateSchedule
from rayps_client.trainers.torch_tensors import raw_of, raws_of, tensor_of
from rayps_client.user_errors import users_code
from rayps_client.workload import Workload

_TINY = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_RAYPS = "install rayps on this machine, and run `rayps client`"


class TorchEngine:
    """A torch model whose parameters are views of one vector, with the workload's loss and optimizer."""

    def __init__(self, workload: Workload, device: str = "cpu") -> None:
        """Build the model.

        Raises:
            ConfigError: the device cannot be used, or the workload uses what the light client lacks.
            WorkloadError: `model()` or `optimizer()` fails, or the model has parameters of several dtypes.
        """
        _check(workload, device)
        self.workload, self.device = workload, torch.device(device)
        with self.apart(), users_code("model"):
            model = workload.model()
        if not isinstance(model, nn.Module):
            raise WorkloadError(f"model() returned {type(model).__name__}: return a torch.nn.Module")
        self.model = model.to(self.device)
        prepare_to_train(self.model)
        self._named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self._buffers = dict(self.model.named_buffers())
        self._vector = self._flattened()
        self._schedule = RateSchedule(workload, self._made)
        self._tick, self._weighed = 0, False  # `_weighed`: whether the weight of a pair was checked
        self.reset()

    def _flattened(self) -> Tensor:
        """Make each parameter a view of one vector, and return the vector."""
        kinds = {p.dtype for _, p in self._named}
        if len(kinds) != 1:
            found = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds)) or "none"
            raise WorkloadError(f"the model's parameters have the dtypes {found}: give them one, e.g. model.float()")
        vector = torch.empty(sum(p.numel() for _, p in self._named), dtype=kinds.pop(), device=self.device)
        at = 0
        with torch.no_grad():
            for _, p in self._named:
                view = vector[at : at + p.numel()].view(p.shape)
                view.copy_(p)
                p.data = view
                at += p.numel()
        return vector

    @property
    def vector(self) -> Tensor:
        """The model's parameters, which a step changes in place."""
        return self._vector

    @property
    def lr(self) -> float:
        """The optimizer's rate. Raises ConfigError if its groups have different rates."""
        found = {float(group["lr"]) for group in self._optimizer.param_groups if "lr" in group}
        if len(found) != 1:
            raise ConfigError(
                f"the optimizer has {len(found)} learning rates, but this strategy needs a single one: give all "
                "parameters the same lr",
                field="strategy",
            )
        return found.pop()

    @property
    def sign(self) -> int:
        """1, or -1 if the optimizer maximizes. Raises ConfigError if its groups differ in this."""
        found = {bool(group.get("maximize", False)) for group in self._optimizer.param_groups}
        if len(found) != 1:
            raise ConfigError("give all groups of the optimizer the same maximize", field="strategy")
        return -1 if found.pop() else 1

    def reset(self) -> None:
        """Make a new optimizer, with the schedule's rates."""
        self._optimizer = self._made()
        self._schedule.apply(self._optimizer, self._tick)

    def _made(self) -> Optimizer:
        method: Any = self.workload.optimizer
        by_name = "named_parameters" in inspect.signature(method).parameters
        with users_code("optimizer"):
            found = method(self._named if by_name else [p for _, p in self._named])
        if not isinstance(found, Optimizer):
            raise WorkloadError(
                f"optimizer(params) returned {type(found).__name__}: return a torch.optim.Optimizer over params"
            )
        return found

    def begin(self, tick: int, seed: int) -> None:
        """Set the schedule's step, and seed torch, for dropout for example."""
        self._tick = tick
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed_all(seed)

    def _only(self, of: Collection[str] | None) -> contextlib.AbstractContextManager[None]:
        """Compute gradients of the parameters with these names only; None means of all."""
        return contextlib.nullcontext() if of is None else gradients_of(of, self._named)

    def gradient(self, micro_batches: Sequence[Batch], of: Collection[str] | None = None) -> tuple[Tensor, StepLoss]:
        """Return the gradient of a step's mean loss, and the loss. Parameters that are not named in `of` have zeros.

        Raises:
            WorkloadError: the user's loss fails, or is not a number with a gradient.
        """
        for _, p in self._named:
            p.grad = None
        rows = sum(batch.size for batch in micro_batches)
        total, weight, divisor, value = 0.0, 0.0, 0.0, 0.0
        pairs: bool | None = None
        for batch in micro_batches:
            with users_code("loss"), self._only(of):
                loss, given = self._loss(batch)
                if pairs not in (None, given is not None):
                    raise WorkloadError("loss() returned a pair (sum, weight) for one batch and a mean for another")
                pairs = given is not None
                own: float = batch.size if given is None else given
                if not own:
                    continue
                weight += own
                divisor = divisor or (own if pairs else rows)
                share = divisor if pairs else divisor / own
                (loss if share == 1 else loss / share).backward()  # type: ignore[no-untyped-call]
                value = float(loss.detach())
                total += value if pairs else value * own
        if pairs and weight and divisor != weight:
            for _, p in self._named:
                if p.grad is not None:
                    p.grad.mul_(divisor / weight)
        mean = value if len(micro_batches) == 1 and not pairs else total / weight if weight else math.nan
        return self._collected(), StepLoss(mean if weight else 0.0, weight, rows)

    def _loss(self, batch: Batch) -> tuple[Tensor, float | None]:
        """Return the workload's loss of a micro-batch: (mean, None), or (sum, weight)."""
        given = self._given(batch)
        found, weight = self._called(given)
        if weight is not None and not self._weighed:
            self._weighed = True
            refuse_moved_weight(lambda: self._called(given)[1], self.model)
        if not isinstance(found, Tensor) or found.numel() != 1 or not (found.requires_grad or weight == 0):
            raise WorkloadError(
                "loss(model, batch) must return one number as a tensor with a gradient, the mean over the batch, or a "
                "pair (sum, weight)"
            )
        return found, weight

    def _called(self, given: Batch) -> tuple[Any, float | None]:
        with self._precision():
            return _loss_of(self.workload.loss(self.model, given))

    def _given(self, batch: Batch) -> Batch:
        return Batch(self._moved(batch.x), None if batch.y is None else self._moved(batch.y), batch.size)

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        half = self.workload.precision is not None
        return torch.autocast(self.device.type, torch.bfloat16) if half else contextlib.nullcontext()

    def _moved(self, values: Any) -> Any:
        if isinstance(values, np.ndarray):
            values = torch.from_numpy(values)
        return values.to(self.device) if isinstance(values, Tensor) else values

    def _collected(self) -> Tensor:
        grads = [(p, p.grad) for _, p in self._named]
        return torch.cat([torch.zeros_like(p).reshape(-1) if g is None else _dense(g).reshape(-1) for p, g in grads])

    def step(self, gradient: Tensor) -> None:
        """Take one step of the workload's optimizer by a gradient. A parameter that the loss did not use is skipped."""
        most = self.workload.clip_norm
        if most is not None:
            factor = most / (float(torch.sum(gradient.to(torch.float64) ** 2).cpu().sqrt()) + _TINY)
            gradient = gradient if factor >= 1 else gradient * factor
        at = 0
        for _, p in self._named:
            if p.grad is not None:
                p.grad = gradient[at : at + p.numel()].view(p.shape)
            at += p.numel()
        with users_code("optimizer.step"):
            self._optimizer.step()

    def copy(self, vector: Tensor) -> Tensor:
        """Return a copy of a vector."""
        return vector.clone()

    def layout(self) -> Sequence[LayoutRow]:
        """Return the names, shapes and dtypes of the parameters."""
        kind = str(self._vector.dtype).removeprefix("torch.")
        return [(name, list(p.shape), kind) for name, p in self._named]

    def load(self, vector: Tensor, buffers: Mapping[str, RawTensor]) -> None:
        """Copy parameters and buffers into the model."""
        if vector.data_ptr() != self._vector.data_ptr():
            self._vector.copy_(vector)
        for name, raw in buffers.items():
            self._buffers[name].detach().copy_(tensor_of(raw))

    def buffers(self) -> RawTensors:
        """Return the model's buffers."""
        return raws_of(self._buffers)

    def vector_of(self, raw: RawTensor) -> Tensor:
        """Return bytes as a tensor on the device."""
        return tensor_of(raw).to(self.device)

    def raw(self, vector: Tensor) -> RawTensor:
        """Return a vector as bytes."""
        return raw_of(vector)

    def metrics(self, batch: Batch) -> OwnTotals:
        """Return the totals of a batch's loss and metrics, of the model in evaluation mode, without gradients."""
        given = self._given(batch)
        with evaluating(self.model), torch.no_grad(), users_code("evaluate"), self._precision():
            found, weight = self._called(given)
            more = self.workload.evaluate(self.model, given)
        if weight is None:
            return own_totals(more, (float(found) * batch.size, batch.size), batch.size)
        return own_totals(more, (float(found) if weight else 0.0, weight), batch.size)

    def apart(self) -> contextlib.AbstractContextManager[object]:
        """Return a context after which torch's random numbers continue as if nothing had been drawn in it."""
        return torch.random.fork_rng(devices=[])


def torch_trainer(workload: Workload, rows: object, device: str = "cpu") -> LightTrainer[Tensor]:
    """Return the trainer of a workload with a torch model.

    Raises:
        ConfigError, WorkloadError, DataError: the workload or its rows cannot be trained here.
    """
    found: Rows = checked_rows(rows, workload)
    return LightTrainer(TorchEngine(workload, device), found, workload.accumulate)


def _check(workload: Workload, device: str) -> None:
    """Refuse what the light client does not train. Raises ConfigError; the error names the way out."""
    name = type(workload).__name__
    for field, trained in (
        ("compile", False),
        ("checkpoint_activations", False),
        ("sync_batchnorm", False),
        ("precision", workload.precision if workload.precision == "bf16" else None),
    ):
        value = getattr(workload, field, trained)
        if value != trained:
            raise ConfigError(f"{field} of {name} is {value!r}, which the light client does not train: {_RAYPS}")
    k = workload.accumulate
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ConfigError(f"accumulate of {name} is {k!r}: give a whole number of at least 1", field="accumulate")
    try:
        torch.zeros(1, device=device)
    except Exception as error:  # each kind of device fails in its own way
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"device {device!r} cannot be used on this machine: {cause}. Give --device cpu", field="device"
        ) from error


def _loss_of(found: Any) -> tuple[Any, float | None]:
    """Return what `loss` returned as (mean, None), or as (sum, weight)."""
    found = found["loss"] if isinstance(found, Mapping) else found
    if isinstance(found, tuple) and len(found) == 2:
        return found[0], float(found[1])
    return found, None


def _dense(grad: Tensor) -> Tensor:
    grad = grad.detach()
    return grad if grad.layout is torch.strided else grad.to_dense()
