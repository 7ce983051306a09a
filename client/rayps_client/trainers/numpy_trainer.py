"""Train a `NumpyWorkload`: parameters and gradients are arrays of numpy, and torch is not needed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayps_client.errors import ConfigError, WorkloadError
from rayps_client.exchange.raw_tensors import RawTensor, raw_of_array
from rayps_client.rows import Batch
from rayps_client.statistic_columns import StatisticColumns
from rayps_client.trainers.client_turn import StepLoss
from rayps_client.trainers.light_trainer import LightTrainer, checked_rows, own_totals
from rayps_client.trainers.local_trainer import LayoutRow, RawTensors
from rayps_client.trainers.own_metrics import OwnTotals
from rayps_client.user_errors import users_code
from rayps_client.workload import NumpyWorkload, checked_arrays

Array = NDArray[Any]
_TINY = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class NumpyEngine:
    """The arrays of a workload as one vector, with SGD."""

    def __init__(self, workload: NumpyWorkload) -> None:
        """Make the parameters. Raises WorkloadError or ConfigError if they cannot be used."""
        self.workload = workload
        with users_code("parameters"):
            found = checked_arrays(workload.parameters())
        self._vector: Array = np.concatenate([value.reshape(-1) for value in found.values()])
        self._views: dict[str, Array] = {}
        at = 0
        for name, value in found.items():
            self._views[name] = self._vector[at : at + value.size].reshape(value.shape)
            at += value.size
        self._velocity: Array | None = None

    @property
    def vector(self) -> Array:
        """The parameters, which a step changes in place."""
        return self._vector

    @property
    def lr(self) -> float:
        """The rate of SGD."""
        return self.workload.lr

    @property
    def sign(self) -> int:
        """1: the loss is minimized."""
        return 1

    def reset(self) -> None:
        """Forget the velocity."""
        self._velocity = None

    def gradient(self, micro_batches: Sequence[Batch], of: Collection[str] | None = None) -> tuple[Array, StepLoss]:
        """Return the gradient of a step's mean loss, and the loss. Parameters that are not named in `of` have zeros.

        Raises:
            WorkloadError: the user's function fails, or returns other names or shapes than `parameters()`.
        """
        rows = sum(batch.size for batch in micro_batches)
        total: Array = np.zeros_like(self._vector)
        losses = 0.0
        for batch in micro_batches:
            with users_code("loss_and_gradient"):
                loss, gradient = self.workload.loss_and_gradient(self._views, _of_numpy(batch))
                found = flattened(gradient, self._views, self._vector.dtype)
            single = len(micro_batches) == 1
            total += found if single else found * (batch.size / rows)
            losses += float(loss) if single else float(loss) * (batch.size / rows)
        return self._only(of, total), StepLoss(losses, rows, rows)

    def _only(self, of: Collection[str] | None, gradient: Array) -> Array:
        """Set the elements of the parameters that are not named in `of` to zero; None names all."""
        if of is None:
            return gradient
        at = 0
        for name, value in self._views.items():
            if name not in of:
                gradient[at : at + value.size] = 0
            at += value.size
        return gradient

    def step(self, gradient: Array) -> None:
        """Take one step of SGD: v <- m v + g; w <- w - lr v."""
        most, momentum = self.workload.clip_norm, self.workload.momentum
        if most is not None:
            factor = most / (math.sqrt(float(np.sum(gradient.astype(np.float64) ** 2))) + _TINY)
            gradient = gradient if factor >= 1 else gradient * factor
        if momentum:
            self._velocity = gradient if self._velocity is None else momentum * self._velocity + gradient
            gradient = self._velocity
        self._vector -= self.workload.lr * gradient

    def copy(self, vector: Array) -> Array:
        """Return a copy of a vector."""
        return vector.copy()

    def layout(self) -> Sequence[LayoutRow]:
        """Return the names, shapes and dtypes of the parameters."""
        return [(name, list(value.shape), value.dtype.name) for name, value in self._views.items()]

    def load(self, vector: Array, buffers: Mapping[str, RawTensor]) -> None:
        """Copy parameters into the model, which has no buffers. Raises ConfigError if there are buffers."""
        if buffers:
            raise ConfigError(f"the job's model has a buffer {sorted(buffers)[0]!r}, and a NumpyWorkload has none")
        self._vector[:] = vector

    def buffers(self) -> RawTensors:
        """Return no buffers."""
        return {}

    def begin(self, tick: int, seed: int) -> None:
        """Do nothing: there is no schedule, and the function draws no random numbers of rayps."""

    def vector_of(self, raw: RawTensor) -> Array:
        """Return bytes as an array."""
        return raw.array()

    def raw(self, vector: Array) -> RawTensor:
        """Return a vector as bytes."""
        return raw_of_array(vector)

    def metrics(self, batch: Batch) -> OwnTotals:
        """Return the totals of a batch's loss and metrics."""
        given = _of_numpy(batch)
        with users_code("evaluate"):
            loss, _ = self.workload.loss_and_gradient(self._views, given)
            more = self.workload.evaluate(self._views, given)
        return own_totals(more, (float(loss) * batch.size, batch.size), batch.size)

    def apart(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()


def numpy_trainer(workload: NumpyWorkload, rows: object) -> LightTrainer[Array]:
    """Return the trainer of a numpy workload.

    Raises:
        ConfigError, WorkloadError, DataError: the workload or its rows cannot be trained.
    """
    found = checked_rows(rows, workload)
    if isinstance(workload, StatisticColumns):
        workload.check_queries()
        workload.check_features(getattr(found, "feature_names", None))
    return LightTrainer(NumpyEngine(workload), found, workload.accumulate)


def flattened(gradient: Mapping[str, Array], parameters: Mapping[str, Array], kind: np.dtype[Any]) -> Array:
    """Return a gradient by name as one vector, in the order of the parameters.

    Raises:
        WorkloadError: its names or shapes are not those of the parameters.
    """
    if gradient.keys() != parameters.keys():
        odd = sorted(gradient.keys() ^ parameters.keys())[0]
        raise WorkloadError(f"loss_and_gradient() {'lacks' if odd in parameters else 'has an unknown'} {odd!r}")
    parts = []
    for name, value in parameters.items():
        found = np.asarray(gradient[name])
        if found.shape != value.shape:
            raise WorkloadError(
                f"the gradient of {name!r} has the shape {found.shape}, and the parameter {value.shape}: return one "
                "number for each element"
            )
        parts.append(found.reshape(-1).astype(kind, copy=False))
    return np.concatenate(parts)


def _of_numpy(batch: Batch) -> Batch:
    return Batch(np.asarray(batch.x), None if batch.y is None else np.asarray(batch.y), batch.size)
