"""What a client learns: `Workload`, whose model is a torch module, and `NumpyWorkload`, which needs no torch.

A file with such a class runs unchanged in the light client and on a cluster of rayps: `rayps.Workload` derives from
`Workload`, and where rayps is not installed, `from rayps import Workload` is this class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rayps_client.errors import ConfigError

if TYPE_CHECKING:
    import torch

Arrays: TypeAlias = Mapping[str, NDArray[Any]]


class Workload(ABC):
    """What to learn: a torch model, a loss, data, an optimizer and its schedule; `rayps.Workload` says more of each.

    A light client trains models on one device, with `clip_norm`, `accumulate`, a `schedule`, and `precision` "bf16".

    Example:
        class Line(rayps_client.Workload):
            def model(self):
                return torch.nn.Linear(3, 1)

            def data(self):
                return rayps_client.parquet("ours.parquet", features=["a", "b", "c"], label="y", batch_size=10)

            def loss(self, model, batch):
                return torch.nn.functional.mse_loss(model(batch.x)[:, 0], batch.y)
    """

    clip_norm: float | None = None
    accumulate: int = 1
    precision: str | None = None

    @abstractmethod
    def model(self) -> torch.nn.Module:
        """Return a new model."""

    @abstractmethod
    def data(self) -> Any:
        """Return this client's rows, such as `rayps_client.tensors(x, y, batch_size=32)`."""

    @abstractmethod
    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        """Return the mean loss over the batch, or a pair (sum, weight), or a dict with either as "loss"."""

    def evaluate(self, model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
        """Return metrics of the batch by name: means over its rows, beside its loss. By default there are none."""
        return {}

    def optimizer(self, params: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer of `params`."""
        import torch

        return torch.optim.SGD(params, lr=0.01)


class NumpyWorkload(ABC):
    """What to learn, in numpy alone: parameters as arrays, and a function that returns the loss and its gradient.

    The step is SGD: `lr` is its rate, and `momentum` m that of torch (v <- m v + g; w <- w - lr v). On a cluster, the
    job's model holds the parameters, and the same function gives its gradient.

    Example:
        class Line(rayps_client.NumpyWorkload):
            lr: float = 0.1

            def parameters(self):
                return {"w": np.zeros(3), "b": np.zeros(1)}

            def data(self):
                return rayps_client.tensors(np.load("x.npy"), np.load("y.npy"), batch_size=10)

            def loss_and_gradient(self, parameters, batch):
                error = batch.x @ parameters["w"] + parameters["b"] - batch.y
                gradient = {"w": 2 * error @ batch.x / len(batch), "b": 2 * error.mean(keepdims=True)}
                return float((error**2).mean()), gradient
    """

    lr: float = 0.01
    momentum: float = 0.0
    clip_norm: float | None = None
    accumulate: int = 1

    @abstractmethod
    def parameters(self) -> Arrays:
        """Return new parameters by name: arrays of one float dtype. They are the job's parameters at its start."""

    @abstractmethod
    def data(self) -> Any:
        """Return this client's rows, such as `rayps_client.tensors(x, y, batch_size=32)`; batches are numpy arrays."""

    @abstractmethod
    def loss_and_gradient(self, parameters: Arrays, batch: Any) -> tuple[float, Arrays]:
        """Return the mean loss over the batch, and its gradient by the name of the parameter."""

    def evaluate(self, parameters: Arrays, batch: Any) -> Mapping[str, float]:
        """Return metrics of the batch by name: means over its rows. A client only calls it if the job says so."""
        return {}


def checked_arrays(parameters: Arrays) -> dict[str, NDArray[Any]]:
    """Return copies of the parameters of a `NumpyWorkload`.

    Raises:
        ConfigError: there are none, a name has a dot, or they are not arrays of one float dtype.
    """
    found = {name: np.array(value) for name, value in parameters.items()}
    kinds = sorted({value.dtype.name for value in found.values()})
    if len(kinds) != 1 or kinds[0] not in ("float32", "float64"):
        raise ConfigError(
            f"parameters() has arrays of {', '.join(kinds) or 'no dtype'}: return arrays of float32, or of float64",
            field="parameters",
        )
    for name in found:
        if not name or "." in name:
            raise ConfigError(
                f"parameters() has the name {name!r}: give names without dots, such as layer_1", field="parameters"
            )
    return found
