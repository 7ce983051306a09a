"""The workload of `python -m benchmarks secure`: a network 784-hidden-10 in numpy, and a few random rows a client."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import rayps_client
from numpy.typing import NDArray

FEATURES, CLASSES, ROWS = 784, 10, 20
Array = NDArray[np.float32]


class Wide(rayps_client.NumpyWorkload):
    """A network with one hidden layer; a client's rows follow from SECURE_CLIENT, its number."""

    lr: float = 0.1
    hidden: int = 250

    def parameters(self) -> dict[str, Array]:
        """Return the parameters: 198,760 for 250 hidden units."""
        made = np.random.default_rng(0)
        return {
            "a": made.normal(0, 0.05, (self.hidden, FEATURES)).astype(np.float32),
            "b": np.zeros(self.hidden, dtype=np.float32),
            "c": made.normal(0, 0.05, (CLASSES, self.hidden)).astype(np.float32),
            "d": np.zeros(CLASSES, dtype=np.float32),
        }

    def data(self) -> Any:
        """Return this client's rows."""
        made = np.random.default_rng(int(os.environ.get("SECURE_CLIENT", "0")))
        x = made.random((ROWS, FEATURES)).astype(np.float32)
        return rayps_client.tensors(x, made.integers(0, CLASSES, ROWS), batch_size=ROWS)

    def loss_and_gradient(self, parameters: Any, batch: Any) -> tuple[float, dict[str, Array]]:
        """Return the mean cross-entropy and its gradient."""
        a, b, c, d = (parameters[name] for name in "abcd")
        rows = np.arange(len(batch.y))
        inner = np.maximum(batch.x @ a.T + b, 0)
        scores = inner @ c.T + d
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        loss = float(-np.log(chances[rows, batch.y]).mean())
        chances[rows, batch.y] -= 1
        error = chances / len(rows)
        back = (error @ c) * (inner > 0)
        return loss, {"a": back.T @ batch.x, "b": back.sum(0), "c": error.T @ inner, "d": error.sum(0)}
