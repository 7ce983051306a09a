"""The steps of one client in one round: its batches in their order, gradients, and what it replies. For any arrays."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from rayps_client.row_order import Ints, parts
from rayps_client.rows import Batch, Rows
from rayps_client.trainers.local_trainer import LocalTask
from rayps_client.trainers.local_work import LocalWork
from rayps_client.user_errors import users_code

V = TypeVar("V")  # vectors: tensors of torch, or arrays of numpy


@dataclass(frozen=True, slots=True)
class StepLoss:
    """The loss of a step: its mean, the weight of this mean, and the number of rows."""

    mean: float
    weight: float
    rows: int


class Engine(Protocol[V]):
    """A model as one vector, its loss, and its optimizer."""

    @property
    def vector(self) -> V:
        """The model's parameters, which a step changes in place."""

    @property
    def lr(self) -> float:
        """The optimizer's rate. Raises ConfigError if it has several."""

    @property
    def sign(self) -> int:
        """1, or -1 if the optimizer maximizes."""

    def reset(self) -> None:
        """Let the optimizer be as if it had taken no step."""

    def gradient(self, micro_batches: Sequence[Batch], of: Collection[str] | None = None) -> tuple[V, StepLoss]:
        """Return the gradient of a step's mean loss, as a new vector, and the loss.

        `of`: the names of the parameters to which it refers; None means all. A step leaves the others unchanged.
        """

    def step(self, gradient: V) -> None:
        """Take one step of the optimizer."""

    def copy(self, vector: V) -> V:
        """Return a copy of a vector."""


class ClientSteps(Generic[V]):
    """The argument of a strategy's half: the client to train, with its rows, model and optimizer."""

    def __init__(
        self,
        engine: Engine[V],
        task: LocalTask,
        rows: Rows,
        accumulate: int,
        vectors: tuple[V, Mapping[str, V], dict[str, V]],
        layers: tuple[Collection[str], Collection[str]] = ((), ()),
    ) -> None:
        """`vectors`: w_t, the server's state, and the client's state. `accumulate`: micro-batches in a step.

        `layers`: the names of the private parameters and of the shared ones.
        """
        self.w = engine.vector
        self.w_t, self.shared, self.state = vectors
        self.private, self.shared_names = layers
        self.n = rows.rows()
        self.reply: dict[str, V] = {}
        self.steps = 0  # steps since the last call of `batches`
        self.losses: list[StepLoss] = []
        self._engine, self._task, self._rows, self._accumulate = engine, task, rows, accumulate
        self._local = local_work(task)

    @property
    def lr(self) -> float:
        """The optimizer's rate. Raises ConfigError if it has several."""
        return self._engine.lr

    @property
    def sign(self) -> int:
        """1, or -1 if the optimizer maximizes."""
        return self._engine.sign

    def batches(self, epochs: int | None = None) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step: of `epochs` epochs, or of the epochs or steps that the options set.

        Each call starts with a new optimizer. A second call yields the same batches.
        """
        self._engine.reset()
        self.steps = 0
        task, local = self._task, self._local
        size = local.rows(self.n, self._rows.batch_size)
        step = size * self._accumulate
        stream = parts(
            task.seed,
            task.client,
            self.n,
            step,
            round=task.round,
            epochs=epochs or local.epochs,
            steps=None if epochs else local.local_steps,
            shuffle=getattr(self._rows, "shuffle", True),
            used=local.used(self.n, self._rows.batch_size, drop_last=getattr(self._rows, "drop_last", False)),
        )
        for positions in stream:
            for low in range(0, len(positions), step):
                members = positions[low : low + step]
                yield [self._take(members[at : at + size]) for at in range(0, len(members), size)]

    def _take(self, positions: Ints) -> Batch:
        with users_code("data"):
            return self._rows.take(positions)

    def grad(self, micro_batches: Sequence[Batch], of: Collection[str] | None = None) -> V:
        """Return the gradient of the loss on a step's batches, at `w`: of the parameters named in `of`, or of all."""
        gradient, loss = self._engine.gradient(micro_batches, of)
        self.losses.append(loss)
        return gradient

    def step(self, gradient: V) -> None:
        """Take one step of the client's optimizer by a gradient."""
        self.steps += 1
        self._engine.step(gradient)

    def copy(self, vector: V) -> V:
        """Return a copy of a vector."""
        return self._engine.copy(vector)


def local_work(task: LocalTask) -> LocalWork:
    """Return how long a client trains by the options of the order's strategy."""
    found = {name: task.strategy.get(name) for name in ("local_epochs", "local_steps", "batch_size")}
    whole = {name: value if isinstance(value, int) else None for name, value in found.items()}
    return LocalWork(**whole)


def mean_of(losses: Sequence[StepLoss]) -> tuple[float, int]:
    """Return the mean loss of a training, NaN without weight, and the number of its samples, with repetitions."""
    weight = sum(each.weight for each in losses)
    total = math.fsum(each.mean * each.weight for each in losses if each.weight)
    return total / weight if weight else math.nan, sum(each.rows for each in losses)
