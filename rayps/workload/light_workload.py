"""Run workloads of the light client on a cluster: `rayps_client.Workload`, and `rayps_client.NumpyWorkload`.

A class derived from one of these is combined with `rayps.Workload`. The model of a numpy workload holds its parameters,
and the gradient of its loss is the one that the workload's function returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from rayps_client.rows import ArrayRows
from rayps_client.trainers.numpy_trainer import flattened
from rayps_client.workload import Arrays, NumpyWorkload, checked_arrays
from rayps_client.workload import Workload as LightWorkload
from torch import Tensor, nn

from rayps import data
from rayps.data.base import Batch, Data, map_tensors
from rayps.data.memory import tensors

LIGHT = (LightWorkload, NumpyWorkload)  # the base classes of workloads of the light client


class DataBridge:
    """Turns rows of the light client into data of rayps."""

    def data(self) -> Data:
        """Return the data of the light workload."""
        return data_of(super().data())  # type: ignore[misc,no-any-return]


class EvaluationBridge(DataBridge):
    """The same for a workload with `evaluation_data`."""

    def evaluation_data(self) -> Data:
        """Return the evaluation data of the light workload."""
        return data_of(super().evaluation_data())  # type: ignore[misc,no-any-return]


class ArrayModel(nn.Module):
    """A module that holds the parameters of a numpy workload."""

    def __init__(self, parameters: Arrays) -> None:
        super().__init__()
        for name, value in checked_arrays(parameters).items():
            self.register_parameter(name, nn.Parameter(torch.from_numpy(value)))


class GivenGradient(torch.autograd.Function):
    """A loss whose gradient is known: forward returns the loss, and backward the gradient of each parameter."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        """Store the gradients, and return the loss."""
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients, times that of the loss."""
        return (None, None, *(outputs[0] * gradient for gradient in ctx.gradients))


class NumpyBridge:
    """The methods of `rayps.Workload` for a numpy workload."""

    lr: float
    momentum: float

    def model(self) -> nn.Module:
        """Return a module with the workload's parameters."""
        work: Any = self
        return ArrayModel(work.parameters())

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return SGD with the workload's rate and momentum."""
        return torch.optim.SGD(params, lr=self.lr, momentum=self.momentum)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of the workload's function, with the gradient that it returns."""
        work: Any = self
        held = dict(model.named_parameters())
        first = next(iter(held.values()))
        arrays = _arrays(model)
        loss, gradient = work.loss_and_gradient(arrays, _of_numpy(batch))
        vector = torch.from_numpy(flattened(gradient, arrays, next(iter(arrays.values())).dtype)).to(first.device)
        parts = torch.split(vector, [p.numel() for p in held.values()])
        cut = [part.view(p.shape) for part, p in zip(parts, held.values(), strict=True)]
        value = torch.tensor(float(loss), dtype=first.dtype, device=first.device)
        found: Tensor = GivenGradient.apply(value, cut, *held.values())  # type: ignore[no-untyped-call]
        return found

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, float]:
        """Return the workload's metrics of a batch."""
        found: Mapping[str, float] = super().evaluate(_arrays(model), _of_numpy(batch))  # type: ignore[misc]
        return found


_ADAPTED: dict[tuple[type, type], type] = {}


def adapted(kind: type, base: type) -> type:
    """Return a class that is `kind` and also a workload of the class `base`, which is `rayps.Workload`."""
    if issubclass(kind, base) or not issubclass(kind, LIGHT):
        return kind
    found = _ADAPTED.get((kind, base))
    if found is None:
        own = any("evaluation_data" in vars(each) for each in kind.__mro__)
        bridges: tuple[type, ...] = (EvaluationBridge if own else DataBridge,)
        if issubclass(kind, NumpyWorkload):
            bridges = (*bridges, NumpyBridge)
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        found = _ADAPTED[kind, base] = type(base)(kind.__name__, (*bridges, kind, base), names)
    return found


def data_of(found: Any) -> Any:
    """Return rows of the light client as data of rayps, and everything else as it is."""
    if isinstance(found, ArrayRows):
        options = {"batch_size": found.batch_size, "shuffle": found.shuffle, "drop_last": found.drop_last}
        return tensors(found.x, found.y, **options)  # type: ignore[arg-type]
    again = getattr(found, "again", None)
    if again is not None:  # Parquet: its module is loaded only where Arrow is needed
        return again(data.parquet)
    return found


def _arrays(model: nn.Module) -> dict[str, Any]:
    """Return the parameters as arrays, which use the parameters' memory on the CPU."""
    return {name: p.detach().cpu().numpy() for name, p in model.named_parameters()}


def _of_numpy(batch: Batch) -> Batch:
    def array(tensor: Tensor) -> Any:
        return tensor.detach().cpu().numpy()

    return Batch(map_tensors(batch.x, array), map_tensors(batch.y, array), batch.size)
