"""The workload of `python -m benchmarks uploads`: a network 784-hidden-10 in numpy on handwritten digits.

The images are in `digits.npz` beside this file. The clients have equal parts of the training images; which part this
process has, and how many there are, is in UPLOADS_PART, such as 3/8.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import rayps_client
from numpy.typing import NDArray

FEATURES, CLASSES = 784, 10
Array = NDArray[np.float32]


class Digits(rayps_client.NumpyWorkload):
    """A network with one hidden layer."""

    lr: float = 0.1
    hidden: int = 100

    def __init__(self) -> None:
        self.folder = Path(__file__).resolve().parent  # stays with the workload, which travels without this file

    def parameters(self) -> dict[str, Array]:
        """Return the parameters: 79,510 for 100 hidden units."""
        made = np.random.default_rng(0)
        return {
            "a": made.normal(0, 0.05, (self.hidden, FEATURES)).astype(np.float32),
            "b": np.zeros(self.hidden, dtype=np.float32),
            "c": made.normal(0, 0.05, (CLASSES, self.hidden)).astype(np.float32),
            "d": np.zeros(CLASSES, dtype=np.float32),
        }

    def data(self) -> Any:
        """Return this client's images."""
        part, parts = (int(number) for number in os.environ["UPLOADS_PART"].split("/"))
        return self._rows("train", slice(part, None, parts), 32)

    def evaluation_data(self) -> Any:
        """Return images that no client has."""
        return self._rows("test", slice(None), 500)

    def _rows(self, name: str, which: slice, batch_size: int) -> Any:
        with np.load(self.folder / "digits.npz") as file:
            x, y = file[f"{name}_x"][which].astype(np.float32) / 255, file[f"{name}_y"][which].astype(np.int64)
        return rayps_client.tensors((x - np.float32(0.13)) / np.float32(0.31), y, batch_size=batch_size)

    def loss_and_gradient(self, parameters: Any, batch: Any) -> tuple[float, dict[str, Array]]:
        """Return the cross-entropy and its gradient."""
        hidden = np.maximum(batch.x @ parameters["a"].T + parameters["b"], 0)
        chances = _softmax(hidden @ parameters["c"].T + parameters["d"])
        loss = -float(np.log(chances[np.arange(len(batch)), batch.y] + 1e-12).mean())
        chances[np.arange(len(batch)), batch.y] -= 1
        error = chances / np.float32(len(batch))
        below = (error @ parameters["c"]) * (hidden > 0)
        return loss, {"a": below.T @ batch.x, "b": below.sum(0), "c": error.T @ hidden, "d": error.sum(0)}

    def evaluate(self, parameters: Any, batch: Any) -> dict[str, float]:
        """Return the accuracy."""
        hidden = np.maximum(batch.x @ parameters["a"].T + parameters["b"], 0)
        found = (hidden @ parameters["c"].T + parameters["d"]).argmax(axis=1)
        return {"accuracy": float((found == batch.y).mean())}


def _softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True), dtype=np.float32)
