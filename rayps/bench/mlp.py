"""What a training step's contenders learn, and the plain torch loop that all but rayps's own run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from rayps import data
from rayps.data import Batch, Data
from rayps.workload import Workload

_BATCH, _ROUNDS = 32, 64  # samples a step; steps an epoch


class Mlp(Workload):
    """64 numbers in, two hidden layers, ten classes out."""

    def __init__(self, hidden: int, size: int) -> None:
        self._hidden, self._rows = hidden, _BATCH * _ROUNDS * size

    def model(self) -> nn.Module:
        """4.3 million parameters where hidden is 2048."""
        n = self._hidden
        return nn.Sequential(nn.Linear(64, n), nn.ReLU(), nn.Linear(n, n), nn.ReLU(), nn.Linear(n, 10))

    def data(self) -> Data:
        """Random rows; what is learnt does not matter here."""
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(self._rows, 64, generator=generator)
        return data.tensors(x, torch.randint(0, 10, (self._rows,), generator=generator), batch_size=_BATCH)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy."""
        return nn.functional.cross_entropy(model(batch.x), batch.y)

    def optimizer(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(params, lr=0.01)


def plain_steps(work: Mlp, model: nn.Module) -> Callable[[int], dict[str, float]]:
    """A plain torch loop: a function that takes so many steps and tells milliseconds a step."""
    optimizer = work.optimizer(list(model.parameters()))
    batches = _endless(work)

    def turn(steps: int) -> dict[str, float]:
        start = time.perf_counter()
        for _ in range(steps):
            batch = next(batches)
            optimizer.zero_grad()
            loss = work.loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            loss.item()
        return {"step": 1000 * (time.perf_counter() - start) / steps}

    return turn


def _endless(work: Mlp) -> Iterator[Batch]:
    rows = work.data()
    while True:
        yield from rows.batches(rank=0, size=1, seed=0, epoch=0)
